"""Options: flags over a file over defaults, what is refused and how, and secrets."""

import json

import pytest

from eagle3.common import config
from eagle3.common.errors import UsageError
from eagle3.common.options import ExtractOptions, GenerateOptions, TrainOptions


def parse(options_class, *arguments):
    return config.parse(options_class, list(arguments), "doc")


def yaml_file(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_flag_beats_file_beats_default(tmp_path):
    path = yaml_file(tmp_path, "train:\n  lr: 1e-4\n  epochs: 7\n")
    train = parse(TrainOptions, "--config", path, "--epochs", "9").train
    assert (train.epochs, train.lr, train.seed) == (9, 1e-4, 0)
    assert isinstance(train.lr, float)  # YAML 1.1 reads 1e-4 as text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  epoch: 3\n", ["train.epoch", "did you mean epochs?"]),
        ("trian:\n  epochs: 3\n", ["trian", "did you mean train?"]),
        ("train:\n  epochs: three\n", ["train.epochs", "int", "'three'"]),
        ("train:\n  epochs: 2.5\n", ["train.epochs", "not a whole number"]),
        ("train:\n  epochs: 0\n", ["train.epochs", "at least 1"]),
        ("train:\n  validation_fraction: 0.95\n", ["at most 0.9"]),
        ("train:\n  lr: true\n", ["train.lr", "float"]),
        ("train:\n  loss: mse\n", ["kl_div or ce", "'mse'"]),
        ("generate:\n  serve: 1\n", ["generate.serve", "not true or false"]),
        ("model:\n  layers: 3\n", ["model.layers", "a list"]),
        ("model:\n  layers: [a]\n", ["model.layers", "int"]),
        ("train: 3\n", ["train", "a section must hold options"]),
        ("- 1\n", ["must hold sections"]),
        ("a: [\n", ["not YAML"]),
        ("train: 2001-99-99\n", ["not YAML"]),
        ("train:\n  lr: !!float x\n", ["not YAML"]),
        ("train:\n  lr: .inf\n", ["train.lr", "float"]),
        (f"train:\n  epochs: 0x{'f' * 5000}\n", ["train.epochs", "int"]),
        ("train:\n  states: \"a\\0b\"\n", ["train.states", "NUL"]),
        ("generate:\n  endpoint: \"'\"\n", ["generate.endpoint", "quotation"]),
        ("generate:\n  chat_template_kwargs: {a: 2001-01-01}\n", ["generate.chat_template_kwargs", "JSON"]),
        ("engine:\n  env: {A: [1]}\n", ["engine.env", "texts"]),
    ],
)
def test_a_wrong_file_is_refused_whatever_section_it_is_in(tmp_path, text, words):
    path = yaml_file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        parse(ExtractOptions, "--config", path)
    assert caught.value.exit_code == 2
    for word in [*words, path]:
        assert word in str(caught.value)


def test_a_binary_or_missing_file_is_refused(tmp_path):
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    for name, words in (("b.yaml", "not YAML"), ("missing.yaml", "does not exist")):
        with pytest.raises(UsageError, match=words):
            parse(TrainOptions, "--config", str(tmp_path / name))


def test_an_unknown_flag_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean --epochs?") as caught:
        parse(TrainOptions, "--epoch", "3")
    assert "--epoch" in str(caught.value)


def test_flags_are_checked_like_the_file():
    for arguments, word in (
        (["--epochs", "0"], "at least 1"), (["--lr", "fast"], "float"), (["--lr"], "argument"),
        (["--lr", "nan"], "float"),
        (["--adam-betas", "0.9"], "wrong number of values"), (["--adam-betas", "0.9", "0.95", "0.99"], "wrong number"),
        (["--adam-betas", "2", "3"], "too large"), (["--adam-betas", "-0.1", "0.9"], "too small"),
    ):
        with pytest.raises(UsageError, match=word):
            parse(TrainOptions, *arguments)


@pytest.mark.parametrize(("arguments", "code"), [
    (["--run-dir", "/proc/nope"], 3), (["--run-dir", "{here}/file"], 3), (["--run-dir", "{here}/file/x"], 3),
    (["--run-dir", "{here}/" + "x" * 300], 3), (["--run-dir", "{here}/run", "--out", "/proc/nope"], 3),
    (["--run-dir", "{here}/run", "--adam-betas", "2", "3"], 2)])
def test_a_place_where_nothing_can_lie_and_a_value_that_cannot_be_have_their_codes(tmp_path, capsys, arguments, code):
    from eagle3.common.script import run_script

    (tmp_path / "file").touch()
    argv = ["04_train.py", *(word.format(here=tmp_path) for word in arguments)]
    assert run_script("", TrainOptions, lambda _, stage: stage.open(inputs={}), argv) == code
    assert "fix:" in capsys.readouterr().err


def test_lists_dictionaries_and_engine_arguments_on_the_command_line():
    options = parse(
        GenerateOptions,
        *("--layers", "2", "15", "27", "29", "--engine-env", '{"A": "1"}', "--no-serve"),
        *("--engine-args", "--enforce-eager --override '{\"a b\": 1}'", "--serve-args=--verbose"),
    )
    assert options.model.layers == [2, 15, 27, 29]
    assert options.engine.env == {"A": "1"}
    assert options.engine.args == ["--enforce-eager", "--override", '{"a b": 1}']
    assert options.generate.serve_args == ["--verbose"]
    assert options.generate.serve is False


def test_one_engine_argument_after_a_space():
    assert parse(GenerateOptions, "--engine-args", "--enforce-eager", "--serve").engine.args == ["--enforce-eager"]


@pytest.mark.parametrize("options_class", [GenerateOptions, TrainOptions])
def test_the_printed_configuration_reads_back(tmp_path, options_class):
    arguments = ["--model", "m", "--layers", "1", "2", "3", "4"]
    if options_class is GenerateOptions:
        arguments += ["--engine-args", "--a 'b c'", "--chat-template-kwargs", '{"thinking": false}', "--top-p", "0.9"]
    options = parse(options_class, *arguments)
    again = parse(options_class, "--config", yaml_file(tmp_path, config.to_yaml(options)))
    assert config.to_dict(again) | {"common": 0} == config.to_dict(options) | {"common": 0}
    assert again.model.layers == [1, 2, 3, 4]


def test_secrets_are_masked_everywhere():
    options = parse(GenerateOptions, "--engine-env", '{"VLLM_API_KEY": "canary", "A": "1"}')
    assert options.engine.env["VLLM_API_KEY"] == "canary"
    shown = json.dumps([config.to_dict(options), config.result_options(options), config.to_yaml(options)])
    assert "canary" not in shown
    assert '"A": "1"' in shown
    for argv in (["x", "--engine-env", '{"MY_TOKEN": "canary"}'], ["x", '--engine-env={"MY_TOKEN": "canary"}']):
        assert "canary" not in str(config.without_secrets(argv))
    assert config.without_secrets(["x", "--engine-env"]) == ["x", "--engine-env"]
