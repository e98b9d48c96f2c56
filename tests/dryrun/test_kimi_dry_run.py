"""`--dry-run` of every stage for Kimi-K2.5, on a laptop: the model's JSON files, Python and PyYAML, nothing else."""

import json
import math
import os
import shutil
import stat
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml
from support import kimi_files
from support.project import ROOT

from eagle3.common import config, options
from eagle3.drafter import flat_config, verifier
from eagle3.dryrun import estimates

CONFIG = ROOT / "configs" / "kimi-k2.5.yaml"
SCRIPTS = sorted(path.name for path in ROOT.glob("0*.py"))
PLAN = "only a plan"


@pytest.fixture(scope="session")
def laptop(tmp_path_factory):
    """An interpreter of its own that has PyYAML and no other package."""
    folder = tmp_path_factory.mktemp("laptop")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "yaml").symlink_to(Path(yaml.__file__).parent)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def kimi(tmp_path_factory):
    """The JSON files of Kimi-K2.5."""
    return kimi_files.write(tmp_path_factory.mktemp("models") / "Kimi-K2.5")


@pytest.fixture
def dry(laptop, kimi, tmp_path):
    """Run a stage's dry run with the real configuration; returns what it printed."""

    def run(script, *arguments, code=0, model=kimi, configuration=CONFIG, python=laptop):
        before = sorted(tmp_path.rglob("*"))
        command = [python, ROOT / script, "--config", configuration, "--run-dir", tmp_path / "run", "--model", model,
                   "--dry-run", *arguments]
        result = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=60,
                                env={"PATH": os.environ["PATH"]})
        assert result.returncode == code, result.stderr
        assert sorted(tmp_path.rglob("*")) == before  # nothing is written
        return result.stderr

    return run


def only(script: str) -> str:
    """Return the full name of a script that starts with this number."""
    return next(name for name in SCRIPTS if name.startswith(script))


WORDS = {
    "01": ["10,000 prompts, 10,000 of them to ask", "--tensor-parallel-size 8", "--reasoning-parser=kimi_k2",
           "--trust-remote-code", "68.4 GB of weights on each of 8 GPUs (547.0 GB / 8)",
           "7.8 GB of KV cache for 110,720 tokens (64 requests of 1,730; 70,272 bytes each",
           "5h18m: 17,300,000 tokens", "10,000 traces in 5.3 h", "not here: prompts: data/prompts.jsonl"],
    "02": ["01_traces has not run yet: planned for 10,000 samples", "captures [2, 30, 58, 60]", "992.2 GB",
           "57,344 bytes a token (4 x 7168 x 2)", "--tensor-parallel-size 8", "--max-model-len 8193", "1h55m",
           "24m30s for loading, then 3,165 tok/s", "828 GB"],
    "03": ["draft vocabulary 32,000, 1,730,560 bytes", "target vocabulary 163,840", "98.3%",
           "not here: drafter: no weights in models/AQ-MedAI-Kimi-K2-Instruct-eagle3"],
    "04": ["02_states has not run yet: planned for 10,000 samples, 17,300,000 tokens",
           "1,190,948,864 of 2,594,737,152 parameters", "about 1,255 steps of 65,536 tokens", "20 GFLOP a token",
           "8 processes of this script", "16.7 GB a checkpoint every 20 minutes",
           "2.4 GB of weights, gradients, moments", "19m22s", "155 min on one GPU",
           "not here: drafter: no weights in models/AQ-MedAI-Kimi-K2-Instruct-eagle3"],
    "05": ["which has not been trained yet", "midlayer.self_attn.q_proj.weight [8192, 14336]",
           "fc.weight [7168, 21504]", "2.4 GB for vllm",
           "auxiliary layers [2, 30, 58], nested list [2, 30, 58]; positions up to 262,144"],
    "06": ["which has not been exported yet", "baseline (3 measurements, ", "drafter-5 (", "drafter-10 (",
           "drafter-16 (", "baseline-again (3 measurements, ",
           '"num_speculative_tokens": 16}', "--no-enable-prefix-caching", "--tensor-parallel-size 8",
           "2h27m: 6 loads of the verifier (5 servers, 1 for the prediction)"],
}  # fmt: skip


@pytest.mark.parametrize("number", WORDS)
def test_a_laptop_with_the_json_files_alone_can_plan_every_stage(dry, number):
    said = dry(only(number))
    for words in WORDS[number]:
        assert words in said
    assert "not here: weights: 64 shards, 547.0 GB" in said and PLAN in said
    assert ("not here: engine: no vllm in" in said) == (number in ("01", "02", "06"))
    assert ("not here: GPUs: 8 wanted" in said) == (number in ("01", "02", "04", "06"))
    figures = [line for line in said.splitlines() if line.split()[2:3] in (["memory"], ["time"])]
    assert all(line.endswith("(estimate)") for line in figures)
    assert len(figures) == {"01": 2, "02": 2, "03": 0, "04": 2, "05": 0, "06": 2}[number]


def test_limit_and_a_prompts_file_scale_the_plan(dry, tmp_path):
    assert "planned for 100 samples (--limit) and 173,000 tokens" in dry(only("02"), "--limit", "100")
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": f"question {i}"}) + "\n" for i in range(7)))
    text = CONFIG.read_text().replace("data/prompts.jsonl", str(prompts))
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    assert f"planned for 7 samples (as many as {prompts} has) and 12,110 tokens" in dry(only("02"), configuration=mine)
    assert "7 prompts, 7 of them to ask" in dry(only("01"), configuration=mine)
    assert "7 samples, 12,110 tokens" in dry(only("04"), configuration=mine)


def test_finished_traces_are_planned_with(dry, tmp_path):
    folder = tmp_path / "run" / "01_traces"
    folder.mkdir(parents=True)
    counts = {"done": 37_312, "prompt_tokens": 7_800_000, "completion_tokens": 80_000_000}
    (folder / "manifest.json").write_text(json.dumps({"status": "complete", "fingerprint": "f", "counts": counts}))
    said = dry(only("02"))
    assert "37,312 samples, 87,800,000 tokens" in said and "5.0 TB" in said and "has not run yet" not in said
    assert "02_states has not run yet: planned for 37,312 samples, 87,800,000 tokens" in dry(only("04"))
    (folder / "manifest.json").write_text(json.dumps({"status": "running", "counts": counts}))
    for number in ("02", "03", "04"):
        assert "an input is not complete" in dry(only(number), code=3)


@pytest.mark.parametrize(
    ("number", "arguments", "words"),
    [
        ("01", ["--prompts", "absent.jsonl"], "the prompts file is missing"),
        ("02", ["--traces", "absent"], "an input is missing"),
        ("02", ["--layers", "2", "30", "58", "59"], "the last decoder layer"),
        ("03", ["--traces", "absent"], "an input is missing"),
        ("04", ["--states", "absent"], "an input is missing"),
        ("05", ["--checkpoint", "absent"], "there is no checkpoint"),
        ("06", ["--drafter", "absent"], "not an exported drafter"),
        ("06", ["--prompts", "absent.jsonl"], "the prompts file is missing"),
    ],
)
def test_what_is_named_has_to_be_there(dry, number, arguments, words):
    assert words in dry(only(number), *arguments, code=3)


@pytest.mark.parametrize("number", ["02", "06"])
def test_with_weights_in_place_the_engine_has_to_be_there_too(dry, kimi, tmp_path, number):
    here = shutil.copytree(kimi, tmp_path / "with-a-shard")
    shard = sorted(set(kimi_files.weight_map().values()))[0]
    (here / shard).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    said = dry(only(number), code=3, model=here)
    assert "the interpreter has no vllm" in said and PLAN not in said


def test_with_weights_in_place_the_disk_has_to_be_large_enough(dry, kimi, tmp_path):
    here = shutil.copytree(kimi, tmp_path / "with-a-shard")
    (here / "model-00001-of-000064.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    folder = tmp_path / "run" / "01_traces"
    folder.mkdir(parents=True)
    counts = {"done": 10**9, "prompt_tokens": 0, "completion_tokens": 10**13}
    (folder / "manifest.json").write_text(json.dumps({"status": "complete", "counts": counts}))
    assert "the disk is too small" in dry(only("02"), "--backend", "hf", code=3, model=here)


def test_an_engine_that_is_installed_has_to_be_the_right_one(dry, tmp_path):
    packages = tmp_path / "packages"
    for version, code in (("0.17.0", 3), ("0.32.0", 0)):
        shutil.rmtree(packages, ignore_errors=True)
        (packages / "vllm").mkdir(parents=True)
        (packages / "vllm" / "__init__.py").touch()
        (packages / f"vllm-{version}.dist-info").mkdir()
        (packages / f"vllm-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONDONTWRITEBYTECODE=1 PYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        said = dry(only("06"), "--engine-python", python, code=code)
        assert ("needs patches" if code else "vllm 0.32.0") in said
    gone = dry(only("06"), "--engine-python", "/only/on/the/target/python")
    assert "not here: engine: no vllm in /only/on/the/target/python" in gone


def test_damaged_files_fail(dry, kimi, tmp_path):
    broken = shutil.copytree(kimi, tmp_path / "broken")
    (broken / "config.json").write_text((kimi / "config.json").read_text()[:-40])
    assert "config.json" in dry(only("02"), code=3, model=broken)
    text = json.loads((kimi / "config.json").read_text())
    del text["text_config"]["hidden_size"]
    (broken / "config.json").write_text(json.dumps(text))
    assert "hidden_size" in dry(only("04"), code=3, model=broken)


def test_sglang_is_planned_with_its_own_flags(dry):
    said = dry(only("06"), "--engine", "sglang", "--engine-args", "--mem-fraction-static=0.85", "--draft-tokens", "16")
    assert "-m sglang.launch_server" in said and "--tp-size 8" in said
    said = dry(only("06"), "--engine", "sglang", "--capture-python", "/opt/vllm/bin/python")
    assert "not here: the prediction's engine: " in said and "/opt/vllm/bin/python" in said
    assert "--speculative-num-steps 16 --speculative-eagle-topk 1 --speculative-num-draft-tokens 17" in said


def test_from_scratch_is_two_lines_less(dry, tmp_path):
    lines = [line for line in CONFIG.read_text().splitlines()
             if not line.strip().startswith(("from_checkpoint:", "init_from:"))]
    scratch = tmp_path / "scratch.yaml"
    scratch.write_text("\n".join(lines))
    for number in ("03", "04"):
        said = dry(only(number), configuration=scratch)
        assert "not here: drafter" not in said and "32,000" in said


def test_a_published_drafter_that_is_here_is_read_from_its_header(dry, kimi, tmp_path):
    facts = verifier.read(kimi)
    header, end = {}, 0
    for name, shape in estimates.tensors(facts, 30_000).items():
        kind, item = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}.get(name, ("BF16", 2))
        start, end = end, end + item * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    published = tmp_path / "published"
    published.mkdir()
    with open(published / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # a sparse file: no bytes on disk
    shape = flat_config.layer_shape(facts) | {"draft_vocab_size": 30_000, "model_type": "llama"}
    (published / "config.json").write_text(json.dumps(shape))
    mine = tmp_path / "mine.yaml"
    mine.write_text(CONFIG.read_text().replace("models/AQ-MedAI-Kimi-K2-Instruct-eagle3", str(published)))
    said = dry(only("03"), configuration=mine)
    assert f"{published}: 15 tensors, draft vocabulary 30,000" in said and "not here: drafter" not in said
    said = dry(only("04"), configuration=mine)
    fewer = 1_190_948_864 - 2_000 * 7168
    assert f"{fewer:,} of" in said and "not here: drafter" not in said
    with open(published / "model.safetensors", "r+b") as file:
        file.truncate(8 + len(text) + end - 1)  # cut off while it was downloaded
    assert "model.safetensors" in dry(only("04"), configuration=mine, code=3)


# --- other models, and the formulas ------------------------------------------------------------------------


def test_another_model_gets_sizes_and_no_times(tiny_model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": "x" * 40}) + "\n" for i in range(3)))
    configuration = f"generate: {{prompts: {prompts}, max_tokens: 20}}\nvocab: {{draft_vocab_size: 64}}\n"
    (tmp_path / "c.yaml").write_text(configuration)
    common = ["--config", tmp_path / "c.yaml", "--run-dir", tmp_path / "run", "--model", tiny_model, "--dry-run"]
    for number, words in (("02", "planned for 3 samples"), ("03", "at most"), ("04", "for 3 samples, 90 tokens")):
        command = [sys.executable, ROOT / only(number), *map(str, common)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0 and words in result.stderr, result.stderr
        assert "RTX" not in result.stderr and " time " not in result.stderr and "theirs" not in result.stderr
    (tmp_path / "c.yaml").write_text("")
    command = [sys.executable, ROOT / only("02"), *map(str, common)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 3 and "01_generate_synthetic.py first" in result.stderr  # nothing says how many


def test_the_drafter_is_counted_to_the_parameter(kimi, tiny_model):
    import torch

    from eagle3.drafter import network as drafters

    counted = estimates.drafter(verifier.read(kimi), 32_000)
    assert (round(counted.total / 1e6, 1), round(counted.trained / 1e6, 1)) == (2594.7, 1190.9)
    facts = verifier.read(tiny_model)
    t2d = torch.zeros(facts.vocab_size, dtype=torch.bool)
    t2d[10:74] = True
    d2t = torch.nonzero(t2d)[:, 0] - torch.arange(64)
    model = drafters.build(facts, [2, 4, 5, 7], d2t, t2d, drafters.layer_shape(facts))
    small = estimates.drafter(facts, 64)
    assert small.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert small.total == sum(p.numel() for p in model.parameters())


def test_only_the_very_model_has_a_reference(kimi, tiny_model, tmp_path):
    known = estimates.reference(verifier.read(kimi))
    assert known is not None and known.tokens * 57_344 == 992_051_200_000  # not the 828 GB that were reported
    small = shutil.copytree(kimi, tmp_path / "small")
    text = json.loads((kimi / "config.json").read_text())
    text["text_config"] |= {"hidden_size": 256, "num_hidden_layers": 8}
    (small / "config.json").write_text(json.dumps(text))
    assert estimates.reference(verifier.read(small)) is None and estimates.reference(verifier.read(tiny_model)) is None


def test_cache_and_weights_of_models_without_latent_attention(tiny_model):
    facts = verifier.read(tiny_model)
    assert estimates.kv_bytes_per_token(facts, 1) == 2 * 1 * 32 * 8 * 2  # K and V, one head of 32, 8 layers, bf16
    assert estimates.weight_bytes(tiny_model) == (tiny_model / "model.safetensors").stat().st_size


@pytest.mark.engine
def test_vllm_knows_the_flags_of_the_configuration():
    generate = config.parse(options.GenerateOptions, ["--config", str(CONFIG)], "")
    bench = config.parse(options.BenchmarkOptions, ["--config", str(CONFIG)], "")
    given = [*generate.engine.args, *generate.generate.serve_args, *bench.benchmark.serve_args]
    commented = [word.strip("#- ").split()[0] for word in CONFIG.read_text().splitlines()
                 if word.strip().startswith("# - --")]
    program = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(json.loads(sys.argv[1]))\n"
        "print(parsed.reasoning_parser, parsed.tool_call_parser, parsed.max_num_seqs, parsed.limit_mm_per_prompt)\n"
    )
    words = ["--model", "x", "--trust-remote-code", "--attention-backend=TRITON_MLA", *given, *(
        "--" + word.lstrip("-") for word in commented)]
    result = subprocess.run([sys.executable, "-c", program, json.dumps(words)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "kimi_k2 kimi_k2 64 {'image': 0, 'vision_chunk': 0}"
