"""Every shipped configuration is valid for every stage."""

import shlex

import pytest
import yaml
from support.project import ROOT

from eagle3.common import config, options

SCREENING = ROOT / "recipes" / "screening.yaml"
CONFIGS = sorted({*(ROOT / "configs").glob("*.yaml"), *(ROOT / "recipes").glob("*.yaml")} - {SCREENING})
STAGE_OPTIONS = [
    options.GenerateOptions,
    options.ExtractOptions,
    options.VocabOptions,
    options.TrainOptions,
    options.ExportOptions,
    options.BenchmarkOptions,
]


def test_the_configurations_that_entry_points_name_exist():
    assert {path.name for path in CONFIGS} >= {"smollm2-135m.yaml", "kimi-k2.5.yaml"}
    default = config.read_yaml(ROOT / "configs" / "smollm2-135m.yaml")
    assert default["model"]["path"] == "models/smollm2-135m"  # the folder that run.sh makes


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_configuration_is_valid_for_every_stage(path):
    written = yaml.safe_load(path.read_text())
    for stage_options in STAGE_OPTIONS:
        resolved = config.to_dict(config.parse(stage_options, ["--config", str(path), "--run-dir", "runs/x"], ""))
        for section in set(resolved) & set(written):
            for name, value in written[section].items():
                found = resolved[section][name]
                if isinstance(value, str) and not isinstance(found, str):  # YAML 1.1 reads 1e-4 as text
                    value = value.split() if isinstance(found, list) else type(found)(value)
                assert found == value, f"{section}.{name}"


@pytest.mark.parametrize("flags", yaml.safe_load(SCREENING.read_text()).values())
def test_the_flags_of_a_recipe_are_those_of_stage_04(flags):
    given = config.to_dict(config.parse(options.TrainOptions, shlex.split(flags), ""))
    assert (given == config.to_dict(options.TrainOptions())) == (not flags), "a recipe that changes nothing"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_prompt_files_that_the_project_ships_exist(path):
    for section in config.read_yaml(path).values():
        prompts = section.get("prompts", "")
        if prompts.startswith("prompts/"):
            assert (ROOT / prompts).is_file(), prompts


def test_the_kimi_configuration_is_what_that_run_needs():
    path = str(ROOT / "configs" / "kimi-k2.5.yaml")
    parsed = {stage: config.parse(stage, ["--config", path], "") for stage in STAGE_OPTIONS}
    generate, extract, vocab, train, export, benchmark = parsed.values()
    assert generate.model.layers == [2, 30, 58, 60] and generate.engine.tensor_parallel_size == 8
    assert generate.generate.reasoning == "required" and generate.model.trust_remote_code
    # no reply is generated that stage 02 throws away or stage 04 cuts
    assert generate.generate.max_model_len <= extract.extract.max_length <= train.train.batch_tokens
    assert generate.generate.max_tokens <= generate.generate.max_model_len
    seats = next(int(word.partition("=")[2]) for word in generate.engine.args if word.startswith("--max-num-seqs="))
    assert max(benchmark.benchmark.concurrency) <= seats and generate.generate.concurrency <= seats
    assert vocab.vocab.draft_vocab_size == 32_000 and vocab.vocab.from_checkpoint == train.train.init_from
    chosen = train.train
    assert (chosen.lr, chosen.warmup_ratio, chosen.ttt_steps, chosen.gpus) == (3e-5, 0.01, 3, 8)
    assert export.export.serving_length == 262_144 and benchmark.benchmark.draft_tokens == [5, 10, 16]
