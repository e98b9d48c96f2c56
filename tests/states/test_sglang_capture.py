"""Stage 02 and SGLang: hooks, arguments and gates, on a package with SGLang's interfaces and on files of its wheels."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import sglang_package
from support.pipeline import LAYERS, manifest, run_stage, write_traces

from eagle3.common.errors import UsageError
from eagle3.common.options import EngineOptions, ExtractSection
from eagle3.engines import capturing, installed
from eagle3.states import self_check, sglang_hooks, sglang_side, sizes
from eagle3.states.settings import CaptureSettings
from eagle3.states.store import StateStore

SETTINGS = CaptureSettings(
    backend="sglang", model="/m", trust_remote_code=False, layers=(1, 2, 3, 7), num_layers=8, hidden_size=4,
    dtype="float32", states_dtype="auto", capture="auto", compiled=False, max_length=100, batch_tokens=128,
    tensor_parallel_size=2, engine_args=("--attention-backend", "triton"))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return {"PYTHONPATH": str(sglang_package.write(tmp_path_factory.mktemp("sglang")))}


@pytest.fixture(scope="module")
def traced(tiny_model, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    write_traces(run_dir, tiny_model)
    return run_dir


def extract(run_dir, model, env, *more, check=0):
    return run_stage("02_extract_hidden_states.py", "--run-dir", run_dir, "--model", model, "--dtype", "float32",
                     "--layers", *LAYERS.split(), "--max-length", 64, "--batch-tokens", 64, *more, env=env, check=check)


@pytest.fixture(scope="module")
def captured(traced, tiny_model, package):
    """States of the tiny model by transformers (02_hf) and by SGLang's interfaces (02_states)."""
    extract(traced, tiny_model, {}, "--backend", "hf", "--out", traced / "02_hf")
    extract(traced, tiny_model, package, "--engine", "sglang")
    return traced


# --- the whole stage ---


def test_states_are_those_of_transformers(captured):
    ours, theirs = StateStore(captured / "02_states"), StateStore(captured / "02_hf")
    for i in range(12):
        (states, ids), (expected, expected_ids) = ours.load(i), theirs.load(i)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(states, expected, atol=2e-5, rtol=1e-4)


def test_manifest_and_index_are_of_the_same_form_as_with_transformers(captured):
    ours, theirs = manifest(captured / "02_states"), manifest(captured / "02_hf")
    assert ours.keys() - theirs.keys() <= {"engine", "patches"} and theirs.keys() <= ours.keys()
    assert (ours["engine"], ours["capture"]) == ({"kind": "sglang", "version": "0.5.17"}, "hooks")
    assert ours["agreement"] == 1.0 and ours["logprob_difference"] < 1e-4
    assert ours["positions_checked"] == theirs["positions_checked"]
    one, other = (StateStore(captured / name).index()[3] for name in ("02_states", "02_hf"))
    assert one.keys() == other.keys() and one["next_token"] == other["next_token"]
    said = (captured / "logs" / "02_states-capture.log").read_text()
    assert "Traceback" not in said


def test_a_run_that_goes_on_ends_with_the_same_bytes(captured, tiny_model, package):
    folder = captured / "02_states"
    before = {path.name: path.read_bytes() for path in (folder / "hidden_states").iterdir()}
    for i in (2, 9):
        (folder / "hidden_states" / f"hs_{i}.safetensors").unlink()
    extract(captured, tiny_model, package, "--engine", "sglang")
    assert {path.name: path.read_bytes() for path in (folder / "hidden_states").iterdir()} == before


def test_states_in_fp8(traced, tiny_model, package):
    extract(traced, tiny_model, package, "--engine", "sglang", "--states-dtype", "fp8", "--out", traced / "02_fp8")
    assert manifest(traced / "02_fp8")["states_dtype"] == "fp8"


def test_a_pass_over_other_tokens_is_no_sample(traced, tiny_model, package):
    result = extract(traced, tiny_model, package, "--engine", "sglang", "--engine-args", "--broken ids", "--out",
                     traced / "02_ids", check=None)
    assert result.returncode in (3, 4) and "states for 0 of" in result.stderr + json.dumps(
        [*StateStore(traced / "02_ids").index().values()])


def test_a_hook_that_sees_nothing_ends_the_stage(traced, tiny_model, package):
    result = extract(traced, tiny_model, package, "--engine", "sglang", "--engine-args", "--broken layers", "--out",
                     traced / "02_layers", check=3)
    assert "4 streams of shape" in result.stderr


def test_contradicting_options_are_refused(traced, tiny_model, package):
    for more, said in ((("--backend", "vllm"), "--backend"), (("--capture", "outputs"), "--capture")):
        assert said in extract(traced, tiny_model, package, "--engine", "sglang", *more, check=2).stderr
    for given, kind, backend in (("auto", "vllm", "vllm"), ("auto", "sglang", "sglang"), ("hf", "sglang", "hf")):
        assert sizes.backend_of(ExtractSection(backend=given), EngineOptions(kind=kind)) == backend
    with pytest.raises(UsageError):
        sizes.backend_of(ExtractSection(backend="sglang"), EngineOptions())


def test_preflight_and_dry_run(traced, tiny_model, package, tmp_path):
    said = extract(traced, tiny_model, package, "--engine", "sglang", "--out", tmp_path / "02", "--dry-run").stderr
    assert "sglang 0.5.17" in said and "loads SGLang with --tp-size 1" in said and "--forward-hooks" in said
    said = extract(traced, tiny_model, package, "--engine", "sglang", "--engine-args", "--enable-dp-attention", "--out",
                   tmp_path / "02", check=3).stderr
    assert "with --enable-dp-attention" in said
    for version, reason in (("0.5.7", "has no --forward-hooks"), ("0.5.21", "the last to capture from is 0.5.20")):
        other = {"PYTHONPATH": str(sglang_package.write(tmp_path / version, version))}
        said = extract(traced, tiny_model, other, "--engine", "sglang", "--out", tmp_path / "02", check=3).stderr
        assert f"SGLang {version} " in said and reason in said


@pytest.mark.parametrize(("words", "reason"), [
    ([], ""), (["--tp-size", "8"], ""), (["--pp-size", "1"], ""), (["--pp-size", "2"], "not with"),
    (["--dp-size=4"], "not with"), (["--nnodes", "2"], "not with"), (["--speculative-algorithm", "EAGLE3"], "whole")])
def test_arguments_that_hide_streams(words, reason, monkeypatch):
    monkeypatch.setattr(installed, "engine_version", lambda _: "0.5.17")
    found = capturing.refusal(EngineOptions(kind="sglang", args=words))
    assert reason in found and bool(found) == bool(reason)
    assert not capturing.refusal(EngineOptions(args=words))  # vLLM's are another matter


# --- the command line ---


def words(known, hooks=({"name": "x"},)):
    return sglang_side.command_words(SETTINGS, hooks, known)


def test_each_version_is_told_in_its_own_spelling():
    enforce = "--enforce-disable-flashinfer-allreduce-fusion"
    assert not {enforce, "--disable-piecewise-cuda-graph", "--cuda-graph-backend-prefill"} & set(words(set()))
    assert {enforce, "--disable-piecewise-cuda-graph"} <= set(words({enforce, "--disable-piecewise-cuda-graph"}))
    newer = words({enforce, "--disable-piecewise-cuda-graph", "--cuda-graph-backend-prefill"})
    assert newer[newer.index("--cuda-graph-backend-prefill") + 1] == "disabled"
    assert "--disable-piecewise-cuda-graph" not in newer
    assert newer[:2] == ["--attention-backend", "triton"]  # the user's first: ours count where both are given
    assert "--disable-cuda-graph" in newer and "--disable-cuda-graph" not in words(set(), ())


def test_what_it_resolved_to_is_looked_at():
    assert not sglang_side.refused(SimpleNamespace(pp_size=1, dp_size=None, speculative_algorithm=None))
    assert "enable_dp_attention" in sglang_side.refused(SimpleNamespace(enable_dp_attention=True))
    assert "nnodes=2" in sglang_side.refused(SimpleNamespace(nnodes=2))


# --- the hooks ---


@pytest.fixture
def tap(monkeypatch):
    monkeypatch.setattr(sglang_hooks, "PassSender", lambda *_, **__: SimpleNamespace(
        sent=[], mark=lambda batch: None, send=lambda *given: sent.append(given)))
    sent = []
    tap = sglang_hooks.Tap(SETTINGS, 1, torch.device("cpu"))
    tap.sent = sent
    return tap


def batch_of(*lengths, decode=False):
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: decode)
    places = torch.cat([torch.arange(length) for length in lengths])
    return SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=[*lengths], input_ids=places + 7, positions=places,
                           next_token_logits_buffer=None)


def test_a_layer_may_return_more_than_two_parts_and_its_parts_may_be_overwritten(tap, monkeypatch):
    monkeypatch.setattr(sglang_hooks, "_metadata", lambda _: None)
    tap.obey({"start": True})
    for slot in range(4):
        hidden, residual = torch.full((5, 4), float(slot)), torch.ones(5, 4)
        tap.note([slot], (hidden, residual, None))  # DeepSeek's: hidden, residual, chosen indices
        residual.zero_()
    tap.end(SimpleNamespace(_get_logits=lambda *_: None), (None, torch.ones(5, 4), None, batch_of(2, 3)))
    (passed, count, sequences, _), = tap.sent
    assert [float(each[0, 0]) for each in passed.streams] == [1, 2, 3, 4] and (count, sequences) == (5, 2)
    assert tap.obey({"mark": 1})["passes"] == 1 and len(tap.obey({})["checksums"]) == 4


def test_decoding_is_left_out_and_streams_that_are_not_whole_are_refused(tap):
    tap.note([0], torch.ones(1, 4))
    tap.end(None, (None, torch.ones(1, 4), None, batch_of(1, decode=True)))
    assert tap.obey({})["passes"] == 0
    for slot in range(4):
        tap.note([slot], torch.ones(2 if slot == 1 else 5, 4))  # scattered over the ranks
    with pytest.raises(LookupError, match="4 streams"):
        tap.end(None, (None, torch.ones(5, 4), None, batch_of(2, 3)))
    waiting = torch.ones(5, 4)
    waiting._sglang_needs_allreduce_fusion = True
    with pytest.raises(ValueError, match="all-reduce"):
        tap.note([0], (waiting, torch.ones(5, 4)))
    with pytest.raises(ValueError, match="no residual"):
        tap.note([0], (torch.ones(5, 4), torch.ones(5, 2, dtype=torch.int32)))  # DeepSeek's from 0.5.21 on
    newer = batch_of(5)
    newer.residual_stream = object()
    with pytest.raises(LookupError, match="out of its layers"):
        tap.end(None, (None, torch.ones(5, 4), None, newer))


class Rank:
    """What answers for a rank in a thread; the second has run fewer passes until it is asked to wait."""

    def __init__(self, address, rank, sums):
        self.rank, self.sums, self.heard = rank, sums, []
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(address)
        threading.Thread(target=sglang_hooks.serve, args=(self, self.connection, rank), daemon=True).start()

    def obey(self, message):
        self.heard.append(message)
        if message.get("mark") == 9:
            raise ValueError("broken")
        return {"passes": 5, "checksums": self.sums}


def test_ranks_are_asked_in_order_and_compared():
    ranks = sglang_side.Ranks()
    second, first = Rank(ranks.address, 1, [[1.0, 7.0]]), Rank(ranks.address, 0, [[1.0, 2.0]])
    ranks.accept(2)
    answers = ranks.ask(mark=3)
    assert first.heard == [{"mark": 3}] and second.heard == [{"mark": 3, "wait": 5}]
    assert "rank 1" in self_check.ranks_agree([answer["checksums"] for answer in answers])
    with pytest.raises(RuntimeError, match="rank 0: ValueError: broken"):
        ranks.ask(mark=9)


def test_ranks_that_do_not_come_are_told(monkeypatch):
    monkeypatch.setattr(sglang_side, "_CONNECT_S", 0.1)
    with pytest.raises(LookupError, match="0 of 1 SGLang processes"):
        sglang_side.Ranks().accept(1)


# --- files of released wheels ---


def released(version):
    """Return the folder of SGLang's files that a capture leans on, out of the wheel on the package index."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle3-tests"
    folder = cache / f"sglang-states-{version}"
    if not (folder / "done").exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--python-version", "3.12",
                   "--only-binary=:all:", "-d", str(folder), f"sglang=={version}"]
        fetched = subprocess.run(command, capture_output=True, text=True)
        assert fetched.returncode == 0, f"no wheel to test against: {fetched.stderr[-1000:]}"
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as files:
            wanted = [name for name in files.namelist() if re.search(
                r"srt/(server_args|arg_groups/fields/\w+|layers/logits_processor|managers/tokenizer_manager"
                r"|models/(llama|qwen3|deepseek_v2)|model_executor/hook_manager)\.py$", name)]
            files.extractall(folder, wanted)
        wheel.unlink()
        (folder / "done").touch()
    return folder / "sglang" / "srt"


VERSIONS = ("0.5.8", "0.5.17", "0.5.20")


@pytest.mark.parametrize("version", VERSIONS)
def test_released_hook_managers_take_our_hooks(version, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("hook_manager", released(version) / "model_executor/hook_manager.py")
    manager = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(manager)
    noted = []
    tap = SimpleNamespace(note=lambda slots, output: noted.append((slots, float(output[0, 0]))),
                          end=lambda module, inputs: noted.append("end"))
    monkeypatch.setattr(sglang_hooks, "_tap", lambda config: tap)

    class Layer(torch.nn.Module):
        def forward(self, hidden):
            return hidden + 1

    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList(Layer() for _ in range(20))  # layers.1 is not layers.1x
    wrapped = torch.nn.Module()
    wrapped.language_model = torch.nn.Module()
    wrapped.language_model.model, wrapped.language_model.logits_processor = decoder, torch.nn.Identity()
    settings = CaptureSettings(**SETTINGS.__dict__ | {"layers": (2, 10, 17, 19)})
    manager.register_forward_hooks(wrapped, sglang_hooks.specifications(settings, "/nowhere"))
    hidden = torch.zeros(1, 1)
    for layer in decoder.layers:
        hidden = layer(hidden)
    wrapped.language_model.logits_processor(hidden)
    # the stream entering layer 2 is what two layers have made of it; behind the last of 20 it is the teacher's
    assert noted == [([0], 2.0), ([1], 10.0), ([2], 17.0), ([3], 20.0), "end"]


@pytest.mark.parametrize("version", [*VERSIONS, "0.5.21"])
def test_layers_of_released_versions_give_both_parts_of_the_stream(version):
    models = {name: (released(version) / f"models/{name}.py").read_text() for name in ("deepseek_v2", "qwen3", "llama")}
    apart = {name: "residual_batch" in text for name, text in models.items()}
    assert any(apart.values()) == (version == "0.5.21")
    if version != "0.5.21":
        assert "return hidden_states, residual" in models["llama"] and "self.logits_processor(" in models["llama"]


@pytest.mark.parametrize("version", VERSIONS)
def test_released_versions_have_what_a_capture_uses(version):
    root = released(version)
    flags = "\n".join(path.read_text() for path in [root / "server_args.py", *root.glob("arg_groups/fields/*.py")])
    known = {f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+):", flags, re.MULTILINE)}
    known |= set(re.findall(r'"(--[a-z-]+)"', flags))
    used = {word for word in sglang_side.command_words(SETTINGS, [{"name": "x"}], known) if word.startswith("--")}
    assert used <= known | {"--tp-size", "--model-path"}, used - known
    processor = (root / "layers/logits_processor.py").read_text()
    assert re.search(r"def _get_logits\(\s+self,\s+hidden_states: torch.Tensor,\s+lm_head: \w+,\s+logits_metadata: ",
                     processor)
    assert "def from_forward_batch(cls, forward_batch" in processor and "next_token_logits_buffer:" in processor
    manager = (root / "managers/tokenizer_manager.py").read_text()
    whole = re.search(r"def _should_use_batch_tokenization.*?\n    (async )?def ", manager, re.DOTALL).group()
    assert "not self._batch_has_text" in whole  # ids alone go as one message
