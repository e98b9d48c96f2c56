"""Why acceptance is low: every known cause, found and ruled out, on a small run that is damaged in one place."""

import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pipeline import run_stage
from support.project import ROOT

from eagle3.checks import causes, explain, similarity
from eagle3.common import files, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.drafter import network, verifier, vocab
from eagle3.drafter.flat_config import IDS
from eagle3.engines.startup_log import EngineLog
from eagle3.traces import trace_rows
from eagle3.training import checkpoints

LAYERS = [2, 4, 5, 7]
NAME = "drafter-3_c4"
GOOD, LOW = [0.5, 0.25, 0.1], [0.1, 0.02, 0.0]
BEGIN, END = [0, 300, 301], [1, 302, 303]  # what a template puts around a prompt
CAPTURES = "Using auxiliary layers from speculative config: "
FLAG = "--enforce-disable-flashinfer-allreduce-fusion"
LOG = """(APIServer) INFO non-default args: {'enforce_eager': True, 'enable_prefix_caching': False}
(EngineCore) INFO [llm_base_proposer.py:1440] Detected EAGLE model without its own embed_tokens in the checkpoint.
(EngineCore) INFO [llm_base_proposer.py:1541] Detected EAGLE model with distinct lm_head weights. Keeping separate
(EngineCore) INFO [gpu_model_runner.py:5243] Using auxiliary layers from speculative config: (2, 4, 5)
(EngineCore) ERROR EngineDeadError: EngineCore encountered an issue.
"""


def sentence(rng, first=10, last=40, length=24):
    return [rng.randint(first, last) for _ in range(length)]


def conversation(rng, **reply):
    return [*BEGIN, *(rng.randint(50, 250) for _ in range(rng.randint(4, 9))), *END], sentence(rng, **reply)


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """A run as stages 01 to 06 leave it, its drafter fresh, its figures made up, its files real."""
    run = tmp_path_factory.mktemp("explained") / "run"
    facts, rng = verifier.read(tiny_model), random.Random(0)
    identity = {"model": files.model_identity(tiny_model)}
    rows = [dict(zip(("prompt_token_ids", "completion_token_ids"), conversation(rng), strict=True)) for _ in range(60)]
    files.write_bytes(run / "01_traces" / trace_rows.FILE_NAME, b"".join(map(files.encode_line, rows)))
    files.write_json(run / "01_traces" / "manifest.json", {"stage": "01_traces", "inputs": identity})
    files.write_json(run / "02_states" / "manifest.json", {"stage": "02_states", "layers": LAYERS, "inputs": identity})
    files.write_json(run / "03_vocab" / "manifest.json", {"stage": "03_vocab", "held_out_coverage": 0.99})

    counts = torch.zeros(facts.vocab_size, dtype=torch.int64)
    counts[10:128] = 5
    d2t, t2d = (torch.from_numpy(array) for array in vocab.build_mapping(counts.numpy(), 128))
    model = network.build(facts, LAYERS, d2t, t2d, network.layer_shape(facts))
    step = run / "04_train" / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    save_file(checkpoints.served_tensors(model), step / tensor_files.SINGLE, metadata={"format": "pt"})
    files.write_json(step / "config.json", network.served_config(model, facts))
    promised = {"length": 1 + sum(GOOD), "by_position": GOOD, "rounds": 2000}
    files.write_json(step / "trainer.json", {"step": 1, "layers": LAYERS, "validation": {"acceptance": promised}})
    names = ("model.safetensors", "config.json", "trainer.json")
    files.write_json(step / "checksums.json", {name: files.sha256_file(step / name) for name in names})
    (step.parent / "best").symlink_to("step_1")
    files.write_json(run / "04_train" / "manifest.json",
                     {"stage": "04_train", "options": {"train": {"draft_tokens": 3}}})
    run_stage("05_fix_weight_keys.py", "--run-dir", run, "--model", tiny_model, "--engine-version", "0.32.0")

    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "06_bench-drafter-3-server.log").write_text(LOG)
    options = {
        "common": {"run_dir": str(run)},
        "model": {"path": str(tiny_model), "layers": LAYERS},
        "engine": {"kind": "vllm", "args": [], "env": {}, "tensor_parallel_size": 1},
        "benchmark": {"temperature": 0.0, "draft_tokens": [3], "serve_args": [], "drafter": None},
    }
    inputs = identity | {"drafter": files.model_identity(run / "05_export" / "vllm"), "engine": "0.32.0"}
    files.write_json(run / "06_bench" / "manifest.json", {"stage": "06_bench", "status": "complete", "options": options,
                                                          "inputs": inputs})
    figures(run)
    answer(run, [conversation(rng) for _ in range(20)])
    return run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def figures(run, measured=GOOD, predicted=GOOD, version="0.32.0", attached=False, kind="vllm", more=()):
    """Write results.json; more: lengths measured later on the same server."""

    def measurement(shares, name):
        acceptance = {"length": 1 + sum(shares), "by_position": shares, "drafts": 1000.0}
        return {"name": name, "draft_tokens": 3, "acceptance": acceptance, "replies": "x",
                "engine": {"kind": kind, "version": version, "attached": attached}}

    first = measurement(measured, NAME)
    if predicted:
        first["predicted"] = {"length": 1 + sum(predicted), "by_position": predicted, "rounds": 1000}
    later = [measurement([length - 1, 0.0, 0.0], f"drafter-3_c{8 * k}") for k, length in enumerate(more, start=1)]
    runs = [{"draft_tokens": 0}, first, *later]
    files.write_json(run / "06_bench" / "results.json", {"schema_version": 1, "runs": runs})


def answer(run, pairs):
    """Write the measured replies."""
    rows = [{"id": str(k), "prompt_token_ids": prompt, "completion_token_ids": reply}
            for k, (prompt, reply) in enumerate(pairs)]
    files.write_bytes(run / "06_bench" / f"replies_{NAME}.jsonl", b"".join(map(files.encode_line, rows)))


def edit(path, function):
    """Change a JSON file in place with a function that changes its value or returns another."""
    content = files.read_json(path)
    files.write_json(path, function(content) or content)


def recorded(run, section, **values):
    edit(run / "06_bench" / "manifest.json", lambda manifest: manifest["options"][section].update(values))


def config(run, **values):
    edit(run / "05_export" / "vllm" / "config.json", lambda content: content.update(values))


def tensors(run, function):
    path = run / "05_export" / "vllm" / tensor_files.SINGLE
    content = load_file(path)
    function(content)
    save_file(content, path)


def says(run, *lines):
    (run / "logs" / "06_bench-drafter-3-server.log").write_text("\n".join(["non-default args: {}", *lines, ""]))


def cause(run, number):
    return next(each for each in explain.explain(run).causes if each.number == number)


def told(found):
    return " ".join(item.text for item in found.evidence)


# --- is there anything to explain -------------------------------------------------------------------------


def test_a_good_run_has_nothing_to_explain(run):
    found = explain.explain(run)
    assert not found.low and found.exit_code == 0 and "not low" in found.answer and not found.notes
    assert {each.status for each in found.causes} == {causes.OUT}
    assert [each.number for each in found.causes] == [*range(1, 12)]
    assert {name: round(each.length, 2) for name, each in found.figures.items()} == dict.fromkeys(
        ("measured", "predicted", "promised"), 1.85)


@pytest.mark.parametrize(("measured", "predicted", "open_", "side"), [
    ([0.49, 0.24, 0.1], GOOD, [False, False], ""),  # rounding
    ([0.4, 0.2, 0.1], GOOD, [True, False], explain.ENGINE),
    ([0.3, 0.1, 0.1], [0.3, 0.1, 0.1], [False, True], explain.FILES),
    ([0.46, 0.23, 0.1], [0.46, 0.23, 0.1], [False, False], ""),  # 0.06 is less than the validation's own error
    (LOW, None, [True], explain.BOTH),
])
def test_which_of_the_gaps_is_open(run, measured, predicted, open_, side):
    figures(run, measured, predicted)
    found = explain.explain(run)
    assert [gap.open for gap in found.gaps] == open_
    assert [gap.side for gap in found.gaps if gap.open] == ([side] if side else [])
    assert found.low is any(open_) and found.exit_code == (3 if any(open_) else 0)


def test_a_small_sample_is_allowed_more():
    few, many = (explain.Figures(1 + sum(GOOD), GOOD, rounds) for rounds in (50, 5000))
    assert few.error > 5 * many.error > 0
    assert explain._gaps({"measured": few, "predicted": few})[0].tolerance > 0.03
    assert explain._gaps({"measured": many, "predicted": many})[0].tolerance == 0.03


@pytest.mark.parametrize(("told", "length", "low"), [([0.5, 0.34], 1.84, False), ([], 1.85, False), ([], 1.2, True)])
def test_positions_that_the_engine_does_not_tell(run, told, length, low):
    figures(run, GOOD, GOOD)
    edit(run / "06_bench" / "results.json", lambda results: results["runs"][1].update(
        acceptance={"length": length, "by_position": told, "drafts": 1000.0}))
    found = explain.explain(run)
    assert found.low is low and found.figures["measured"].length == pytest.approx(length)
    assert found.figures["predicted"].length == pytest.approx(1.85)


def test_low_without_a_known_cause_says_where_to_look(run):
    figures(run, LOW, GOOD)
    assert "the engine accepts less than its files allow" in explain.explain(run).answer
    figures(run, LOW, LOW)
    assert "harder than its validation samples" in explain.explain(run).answer


def test_what_remains_is_named_with_the_open_side_first(run):
    figures(run, LOW, GOOD, attached=True)
    recorded(run, "benchmark", temperature=None)
    (run / "01_traces" / trace_rows.FILE_NAME).unlink()
    says(run)
    answer = explain.explain(run).answer
    assert "not ruled out: 1 auxiliary layer ids, 11 prefix caching" in answer
    assert "KV cache, 8 temperature, 9" in answer
    assert answer.endswith("9 tokenizer, chat template or prompts unlike the training's")


# --- every cause, found and not ---------------------------------------------------------------------------


def without_ids(run):
    """Leave the choice of layers to the engine, and train on others than it takes by itself."""
    edit(run / "04_train/checkpoints/step_1/trainer.json", lambda training: training.update(layers=[2, 4, 6, 7]))
    recorded(run, "model", layers=[2, 4, 6, 7])
    config(run, **{IDS: None, "eagle_config": None})
    says(run)


def shifted(content):
    content["d2t"][:-1] += 1


def blown(content):
    content["fc.weight"][0, 0] = float("nan")


def noisy(name):
    def change(content):
        content[name] = content[name] + 1.0
    return change


@pytest.mark.parametrize(("number", "word", "damage"), [
    (1, "captures [1, 3, 4]; expected [2, 4, 5]", lambda run: config(run, **{IDS: [1, 3, 4]})),
    (1, "captures [2, 3, 5]", lambda run: config(run, **{IDS: None, "eagle_config": {IDS: [2, 3, 5]}})),
    (1, "captures [2, 4, 5]; expected [2, 4, 6]", lambda run: without_ids(run)),
    (1, "it captures layers [2, 3, 5]", lambda run: says(run, CAPTURES + "(2, 3, 5)")),
    (1, "it captures layers [2, 3, 5]", lambda run: says(run, "Using Eagle3 auxiliary layers from model: [2, 3, 5]")),
    (1, "the prediction captured", lambda run: recorded(run, "model", layers=[1, 4, 5, 7])),
    (2, "not the verifier's", lambda run: tensors(run, lambda content: content.update(
        {"embed_tokens.weight": torch.ones(content["t2d"].shape[0], 64, dtype=torch.bfloat16)}))),
    (2, "engine's log", lambda run: says(run, "Detected EAGLE model with distinct embed_tokens weights. Keeping")),
    (3, "model.norm.weight", lambda run: tensors(run, lambda content: content.update(
        {"model.norm.weight": content.pop("norm.weight")}))),
    (3, "fc.weight: other values", lambda run: tensors(run, noisy("fc.weight"))),
    (3, "missing: fc.weight", lambda run: tensors(run, lambda content: content.pop("fc.weight"))),
    (3, "NaN", lambda run: tensors(run, blown)),
    (3, "were not initialized", lambda run: says(run, "Following weights were not initialized from checkpoint: {'x'}")),
    (3, "hidden_act", lambda run: config(run, hidden_act="gelu")),
    (5, "theta", lambda run: config(run, rope_theta=100.0, rope_parameters={"rope_theta": 100.0})),
    (5, "theta", lambda run: config(run, rope_theta=100.0)),  # one of two spellings
    (5, "max_position_embeddings is 16", lambda run: config(run, max_position_embeddings=16)),
    (6, "norm_before_residual", lambda run: config(run, norm_before_residual=True)),
    (6, "norm_output", lambda run: config(run, norm_output=True)),
    (6, "rms_norm_eps", lambda run: config(run, rms_norm_eps=0.1)),
    (7, "lm_head.weight missing", lambda run: tensors(run, lambda content: content.pop("lm_head.weight"))),
    (7, "d2t missing", lambda run: tensors(run, lambda content: content.pop("d2t"))),
    (7, "d2t: other values", lambda run: tensors(run, shifted)),
    (7, "lm_head.weight: other values", lambda run: tensors(run, noisy("lm_head.weight"))),
    (7, "engine's log", lambda run: says(run, "Detected EAGLE model without its own lm_head in the checkpoint.")),
    (8, "temperature 0.7", lambda run: recorded(run, "benchmark", temperature=0.7)),
])
def test_a_damaged_drafter_or_setting_is_named_first(run, number, word, damage):
    damage(run)
    figures(run, LOW, LOW)
    found = explain.explain(run)
    assert found.causes[0].number == number and found.causes[0].status == causes.FOUND, found.answer
    assert word in told(found.causes[0])
    assert found.answer.startswith(f"most likely {number} ") and found.exit_code == 3
    assert [each.number for each in found.causes if each.status == causes.FOUND] == [number]


def test_a_prediction_at_the_same_temperature_rules_it_out_for_the_engine(run):
    recorded(run, "benchmark", temperature=0.7)
    figures(run, LOW, GOOD)
    assert cause(run, 8).status == causes.OUT
    figures(run, LOW, LOW)
    assert cause(run, 8).status == causes.FOUND
    figures(run, LOW, None)
    assert cause(run, 8).status == causes.FOUND


def other_file(name):
    def change(run):
        edit(run / "06_bench" / "manifest.json", lambda manifest: manifest["inputs"]["model"].update({name: "another"}))
    return change


def bare_prompts(run):
    rng = random.Random(1)
    answer(run, [(prompt[3:-3], reply) for prompt, reply in (conversation(rng) for _ in range(20))])


def other_replies(**reply):
    def change(run):
        rng = random.Random(1)
        answer(run, [conversation(rng, **reply) for _ in range(20)])
    return change


@pytest.mark.parametrize(("word", "damage"), [
    ("the tokenizer", other_file("tokenizer.json")),
    ("the chat template", other_file("chat_template.jinja")),
    ("the verifier itself", other_file("model.safetensors")),
    ("not the chat format", bare_prompts),
    ("0% of the replies' token pairs occur", other_replies(first=60, last=100)),
    ("the draft vocabulary holds", other_replies(first=300, last=400)),
    ("beyond the longest trace", other_replies(length=80)),
])
def test_other_prompts_and_replies_than_the_traces_are_named(run, word, damage):
    damage(run)
    figures(run, LOW, LOW)
    found = explain.explain(run)
    assert found.causes[0].number == 9 and word in told(found.causes[0]), found.answer
    assert not [each for each in found.causes[1:] if each.status == causes.FOUND]


def test_unlike_replies_are_no_cause_while_the_prediction_is_as_promised(run):
    other_replies(first=60, last=100)(run)
    figures(run, LOW, GOOD)
    assert cause(run, 9).status == causes.OUT


def test_data_remain_open_without_token_ids_or_records(run):
    answer(run, [])
    assert cause(run, 9).status == causes.REMAINS
    edit(run / "06_bench" / "manifest.json", lambda manifest: manifest["inputs"].pop("model") and None)
    assert "no record" in told(cause(run, 9))


@pytest.mark.parametrize(("version", "line", "env", "status"), [
    ("0.16.0", "Directly load the compiled graph(s) for compile range", {}, causes.REMAINS),
    ("0.16.0", "Cache the graph of compile range", {}, causes.OUT),
    ("0.16.0", "Enforce eager set, disabling torch.compile", {}, causes.OUT),
    ("0.16.0", "Directly load the compiled graph(s)", {"VLLM_DISABLE_COMPILE_CACHE": "1"}, causes.OUT),
    ("0.17.1", "Directly load the compiled graph(s)", {}, causes.OUT),
])
def test_the_compile_cache(run, version, line, env, status):
    figures(run, version=version)
    recorded(run, "engine", env=env)
    says(run, "Using cache directory: /c/abc for vLLM's torch.compile", line)
    found = cause(run, 4)
    assert found.status == status
    assert status == causes.OUT or "rm -r /c/abc" in found.evidence[0].fix


def sglang(run, version, attached=False, **engine):
    figures(run, version=version, kind="sglang", attached=attached)
    recorded(run, "engine", kind="sglang", **engine)
    shutil.copytree(run / "05_export" / "vllm", run / "05_export" / "sglang")


@pytest.mark.parametrize(("version", "attached", "engine", "status"), [
    ("0.5.10", False, {"tensor_parallel_size": 8}, causes.FOUND),
    ("0.5.10", False, {"tensor_parallel_size": 1}, causes.OUT),
    ("0.5.10", False, {"tensor_parallel_size": 8, "args": [FLAG]}, causes.OUT),
    ("0.5.11", False, {"tensor_parallel_size": 8}, causes.OUT),
    ("0.5.10", True, {"tensor_parallel_size": 1}, causes.REMAINS),
])
def test_the_fused_all_reduce_of_sglang(run, version, attached, engine, status):
    sglang(run, version, attached, **engine)
    assert cause(run, 10).status == status
    assert cause(run, 4).status == causes.OUT


@pytest.mark.parametrize(("version", "found"), [("0.5.10", True), ("0.5.12", False)])
def test_layer_names_that_an_old_sglang_skips(run, version, found):
    tensors(run, lambda content: [content.update({name.replace("midlayer.", "layers.0."): content.pop(name)})
                                  for name in list(content) if name.startswith("midlayer.")])
    sglang(run, version)
    assert (cause(run, 3).status == causes.FOUND) is found


@pytest.mark.parametrize(("attached", "line", "more", "status"), [
    (False, "'enable_prefix_caching': False", (1.2,), causes.OUT),
    (False, "enable_prefix_caching=True, chunked", (), causes.REMAINS),
    (False, "enable_prefix_caching=True, chunked", (1.9, 1.5), causes.FOUND),
    (False, "disable_radix_cache=False", (1.5,), causes.FOUND),
    (False, "disable_radix_cache=True", (1.5,), causes.OUT),
    (True, "", (), causes.REMAINS),
])
def test_prefix_caching(run, attached, line, more, status):
    figures(run, attached=attached, more=more)
    says(run, line)
    assert cause(run, 11).status == status


def test_an_attached_server_leaves_the_ids_open(run):
    figures(run, attached=True)
    says(run)
    assert cause(run, 1).status == causes.REMAINS
    says(run, CAPTURES + "(2, 4, 5)")
    assert cause(run, 1).status == causes.OUT


def test_a_drafter_from_elsewhere_leaves_its_weights_and_ids_open(run, tmp_path):
    elsewhere = shutil.copytree(run / "05_export" / "vllm", tmp_path / "elsewhere" / "drafter")
    recorded(run, "benchmark", drafter=str(elsewhere))
    (run / "02_states" / "manifest.json").unlink()
    assert {each.number for each in explain.explain(run).causes if each.status == causes.REMAINS} == {1, 3}


def test_a_declared_embedding_is_no_fault(run):
    tensors(run, lambda content: content.update(
        {"embed_tokens.weight": torch.ones(content["t2d"].shape[0], 64, dtype=torch.bfloat16)}))
    edit(run / "05_export" / "manifest.json",
         lambda manifest: manifest["fingerprint_basis"].update({"export.trained_embedding": True}))
    assert cause(run, 2).status == causes.OUT and "declared" in told(cause(run, 2))


# --- what a run leaves behind -----------------------------------------------------------------------------


def test_a_fault_without_effect_is_told_all_the_same(run):
    config(run, max_position_embeddings=16)
    found = explain.explain(run)
    assert not found.low and found.exit_code == 3
    assert "not low" in found.answer and "yet a fault: 5 " in found.answer


def test_changed_files_are_noted(run):
    config(run, hidden_act="gelu")
    notes = " ".join(explain.explain(run).notes)
    assert "changed since the measurement" in notes and "not what stage 05 wrote" in notes


def test_the_checkpoint_is_found_again_when_best_has_moved_on(run):
    checkpoints = run / "04_train" / "checkpoints"
    newer = shutil.copytree(checkpoints / "step_1", checkpoints / "step_2")
    content = load_file(newer / tensor_files.SINGLE)
    content["fc.weight"] = content["fc.weight"] + 1.0
    save_file(content, newer / tensor_files.SINGLE)
    files.point(checkpoints / "best", "step_2")
    assert "step_1" in told(cause(run, 3)) and cause(run, 3).status == causes.OUT


def test_a_stage_that_stopped_after_measuring_is_explained(run):
    results = run / "06_bench" / "results.json"
    figures(run, LOW, None)
    measured = files.read_json(results)["runs"][1]
    results.unlink()
    files.write_json(run / "06_bench" / "runs" / f"{NAME}.json", measured)
    assert explain.explain(run).figures.keys() == {"measured", "promised"} and explain.explain(run).low
    files.write_json(run / "06_bench" / "runs" / f"predicted_{NAME}.json",
                     {"replies": "x", "by_position": GOOD, "length": 1.85, "rounds": 900})
    assert [gap.open for gap in explain.explain(run).gaps] == [True, False]


def test_an_engine_that_refused_is_quoted_and_its_cause_named(run):
    (run / "06_bench" / "results.json").unlink()
    tensors(run, lambda content: content.pop("lm_head.weight"))
    says(run, "(EngineCore) ERROR AssertionError: Expected logits to have shape",
         "RuntimeError: Engine core initialization failed. See root cause above.")
    found = explain.explain(run)
    assert found.low and found.exit_code == 3
    assert found.answer.startswith("nothing was measured (AssertionError: Expected logits")
    assert "most likely 7 " in found.answer


def test_only_the_last_start_in_a_log_counts(run):
    path = run / "logs" / "06_bench-drafter-3-server.log"
    path.write_text("non-default args: {}\nUsing auxiliary layers from speculative config: (1, 2, 3)\n" + LOG)
    assert EngineLog(path).captured == [2, 4, 5] and EngineLog(path).prefix_caching is False
    assert EngineLog(run / "nowhere.log").captured == [] and EngineLog(run / "nowhere.log").prefix_caching is None


def test_a_folder_of_stage_06_can_be_named(run):
    other = shutil.copytree(run / "06_bench", run / "06_bench_depths")
    recorded(run, "benchmark", temperature=0.9)
    figures(run, predicted=None)
    edit(other / "manifest.json", lambda manifest: manifest["options"]["common"].update({"run_dir": str(run)}))
    assert cause(run, 8).status == causes.FOUND and cause(other, 8).status == causes.OUT


def test_a_run_that_was_not_measured_is_an_error(tmp_path):
    with pytest.raises(PreconditionError, match="nothing was measured"):
        explain.explain(tmp_path)


def test_a_very_large_file_of_traces_is_sampled(tmp_path, monkeypatch):
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b"".join(files.encode_line({"row": k}) for k in range(1000)))
    assert len(list(similarity.sampled(path))) == 1000
    monkeypatch.setattr(similarity, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(similarity, "_SAMPLE_ROWS", 10)
    assert [row["row"] // 100 for row in similarity.sampled(path)] == list(range(10))


# --- as a command -----------------------------------------------------------------------------------------


def doctor(*arguments):
    return subprocess.run([sys.executable, "-X", "importtime", "-m", "eagle3.doctor", *map(str, arguments)], text=True,
                          capture_output=True, cwd=ROOT)


def test_the_command_answers_in_its_first_line_without_torch(run):
    config(run, **{IDS: [1, 3, 4]})
    figures(run, LOW, GOOD)
    result = doctor("--explain", run)
    assert result.returncode == 3, result.stderr
    assert result.stdout.splitlines()[0].startswith("most likely 1 auxiliary layer ids: ")
    assert "LOW, look at what the engine loads" in result.stdout and "ruled out   2 " in result.stdout
    assert not [line for line in result.stderr.splitlines() if line.rpartition("|")[2].strip() in ("torch", "vllm")]


def test_the_command_as_json(run):
    result = doctor("--explain", run, "--json")
    content = json.loads(result.stdout)
    assert result.returncode == 0 and content["low"] is False and len(content["causes"]) == 11
    assert content["figures"]["measured"]["length"] == pytest.approx(1.85)


def test_the_command_without_a_measurement_is_exit_3(tmp_path):
    result = doctor("--explain", tmp_path)
    assert result.returncode == 3 and "nothing was measured" in result.stderr
