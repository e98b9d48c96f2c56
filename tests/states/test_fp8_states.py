"""States as fp8: what rounding costs, what is refused, and that everything which reads states reads this form."""

import json
import shutil

import pytest
import torch
from hs_connectors import fp8_utils
from safetensors.torch import load_file, save_file
from support import kimi_files
from support.pipeline import LAYERS, kill_midway, manifest, run_stage, tree, write_traces
from support.project import ROOT

from eagle3.common import tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.states.encoding import FP8_FORM, SCALES, bytes_per_token, decode_fp8, encode_fp8
from eagle3.states.pass_sender import pass_tensors
from eagle3.states.store import StateStore, load_dataset
from eagle3.states.writing import Writer
from eagle3.training.batches import TrainingSample, collate, read_samples

SIZES = (0.002, 0.7, 40.0, 3000.0)  # of the slots: a model's first layers are far below its last


def states(tokens=64, hidden=512, dtype=torch.bfloat16):
    """Return states [tokens, 4, hidden] whose slots have the sizes above, each vector with one massive value."""
    values = torch.randn(tokens, 4, hidden, generator=torch.Generator().manual_seed(0))
    values[..., 7] = 30.0
    return (values * torch.tensor(SIZES)[None, :, None]).to(dtype)


def errors(decoded, original):
    """Return the relative error of each vector [tokens, slots]."""
    return (decoded.double() - original.double()).norm(dim=-1) / original.double().norm(dim=-1)


def test_every_slot_keeps_its_precision_however_small_it_is():
    original = states()
    worst = errors(decode_fp8(*encode_fp8(original)), original).amax(0)
    assert (worst < 0.03).all(), worst
    public = errors(fp8_utils.dequantize_fp8_tensor(*fp8_utils.quantize_tensor_to_fp8(original)), original).amin(0)
    assert public[0] > 0.5 and public[3] < 0.03  # one scale for all slots: the bound can fail


def test_powers_of_two_would_lose_more():
    original = states()
    encoded, scales = encode_fp8(original)
    higher = torch.exp2(torch.log2(original.abs().amax(-1, keepdim=True).float() / 448).ceil())
    powers = decode_fp8((original / higher).to(torch.float8_e4m3fn), higher)
    assert errors(decode_fp8(encoded, scales), original).mean() < 0.8 * errors(powers, original).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_decoding_rounds_once(dtype):
    encoded, scales = encode_fp8(states(dtype=dtype))
    assert encoded.dtype == torch.float8_e4m3fn and encoded.shape == (64, 4, 512)
    assert scales.dtype == torch.float32 and scales.shape == (64, 4, 1)
    assert torch.equal(scales.to(torch.bfloat16).float(), scales)
    exact = encoded.double() * scales.double()
    assert torch.equal(decode_fp8(encoded, scales), exact.to(torch.bfloat16))
    free = (states(dtype=dtype).abs().amax(-1, keepdim=True).float() / 448)
    assert not torch.equal(free.to(torch.bfloat16).float(), free)  # a scale as it is computed is rounded when read


def test_the_public_formula_reads_the_same_values():
    encoded, scales = encode_fp8(states())
    assert torch.equal(fp8_utils.dequantize_fp8_tensor(encoded, scales), decode_fp8(encoded, scales))
    assert SCALES == fp8_utils.SCALES_KEY


def test_zeros_stay_and_the_ends_of_the_range_stay_finite():
    largest, smallest = torch.finfo(torch.bfloat16).max, 1e-38
    original = torch.tensor([0.0, largest, -largest, smallest, 1e-30])[:, None, None].expand(-1, 4, 16)
    original = original.to(torch.bfloat16)
    decoded = decode_fp8(*encode_fp8(original))
    assert torch.isfinite(decoded).all()
    assert (decoded[0] == 0).all() and (decoded[3:].float().abs() < 2e-30).all()
    assert (errors(decoded, original)[1:3] < 0.01).all()
    assert torch.isfinite(decode_fp8(*encode_fp8(torch.full((1, 4, 16), torch.finfo(torch.float32).max)))).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused_not_clamped(value, tmp_path):
    broken = states()
    broken[3, 2, 5] = value
    packed = pass_tensors(torch.ones(64), torch.arange(64), [*broken.unbind(1)], fp8=True)
    entry = Writer(tmp_path, {}).submit(7, packed["tokens"], [packed]).result()
    assert entry == {"i": 7, "error": "NaN or Inf: in so many of 64 tokens, by layer slot: {2: 1}"}
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_gpu_encodes_to_the_same_bytes():
    for dtype in (torch.bfloat16, torch.float32):
        here, there = encode_fp8(states(dtype=dtype)), encode_fp8(states(dtype=dtype).cuda())
        assert torch.equal(here[0].view(torch.uint8), there[0].cpu().view(torch.uint8))
        assert torch.equal(here[1], there[1].cpu())


# --- stage 02 as a process -------------------------------------------------------------------------------


def arguments(run_dir, model, *more):
    return ["02_extract_hidden_states.py", "--run-dir", run_dir, "--model", model, "--backend", "hf", "--dtype",
            "float32", "--layers", *LAYERS.split(), "--max-length", 64, "--batch-tokens", 64, *more]


@pytest.fixture(scope="module")
def plain(tiny_model, tmp_path_factory):
    """A run directory with states as captured."""
    run_dir = tmp_path_factory.mktemp("plain")
    write_traces(run_dir, tiny_model)
    run_stage(*arguments(run_dir, tiny_model))
    return run_dir


@pytest.fixture(scope="module")
def small(plain, tiny_model, tmp_path_factory):
    """A run directory with the same states as fp8."""
    run_dir = tmp_path_factory.mktemp("small")
    shutil.copytree(plain / "01_traces", run_dir / "01_traces")
    run_stage(*arguments(run_dir, tiny_model, "--states-dtype", "fp8"))
    return run_dir


def test_the_files_hold_the_captured_states_in_fp8(plain, small):
    before, after = StateStore(plain / "02_states"), StateStore(small / "02_states")
    index = after.index()
    assert len(index) == 12
    for i, entry in index.items():
        tensors = load_file(after.path(i))
        captured, ids = before.load(i)
        decoded, same_ids = after.load(i, entry["sha256"])
        assert tensors["hidden_states"].dtype == torch.float8_e4m3fn and tensors[SCALES].shape == (len(ids), 4, 1)
        assert decoded.dtype == torch.bfloat16 and torch.equal(decoded, decode_fp8(*encode_fp8(captured)))
        assert torch.equal(ids, same_ids)
        assert torch.equal(after.last_teacher(i), decoded[-1, -1])
        assert torch.equal(before.last_teacher(i), captured[-1, -1])


def test_a_file_is_as_long_as_estimated(small):
    store = StateStore(small / "02_states")
    for i, entry in store.index().items():
        path = store.path(i)
        tensors = tensor_files.read_header(path)
        assert tensors["hidden_states"].dtype == "F8_E4M3"
        data = path.stat().st_size - min(tensor.start for tensor in tensors.values())
        assert data == entry["tokens"] * bytes_per_token(64, "fp8")
        assert path.stat().st_size == entry["bytes"]


def test_manifest_and_files_name_the_form(plain, small):
    from safetensors import safe_open

    for run_dir, form in ((plain, "float32"), (small, "fp8")):
        result = manifest(run_dir / "02_states")
        assert (result["status"], result["states_dtype"], result["counts"]["done"]) == ("complete", form, 12)
        assert ("extract.states_dtype" in result["fingerprint_basis"]) == (form == "fp8")  # older results have none
        with safe_open(StateStore(run_dir / "02_states").path(0), framework="pt") as file:
            about = json.loads(file.metadata()["capture"])
        assert about["dtype"] == "float32" and about.get("states") == (FP8_FORM if form == "fp8" else None)
    assert manifest(small / "02_states")["agreement"] >= 0.9


def test_what_others_read_of_it(small):
    from hs_connectors import FP8Transfer
    from speculators.train.data import ArrowDataset

    store, transfer = StateStore(small / "02_states"), FP8Transfer(small / "02_states" / "hidden_states")
    for i in range(12):
        decoded, ids = store.load(i)
        read = transfer.get_cached(i)
        assert read.keys() == {"hidden_states", "token_ids"}
        assert torch.equal(read["hidden_states"], decoded) and torch.equal(read["token_ids"], ids)
    dataset = ArrowDataset(max_len=128, datapath=small / "02_states", transfer=transfer, on_missing="raise")
    sample, decoded = dataset[3], store.load(3)[0]
    assert torch.equal(sample["hidden_states"], decoded[:, :-1].flatten(1).to(sample["hidden_states"].dtype))


def test_training_reads_it(plain, small):
    batches = []
    for run_dir in (plain, small):
        store = StateStore(run_dir / "02_states")
        samples = read_samples(store, load_dataset(run_dir / "02_states"))
        batches.append(collate(store, samples, 64, 3, verify=True))
    before, after = batches
    assert after.aux.dtype == after.teacher.dtype == torch.bfloat16
    assert torch.equal(before.ids, after.ids) and before.aux.shape == after.aux.shape
    assert (before.teacher - after.teacher.float()).norm() < 0.04 * before.teacher.norm()
    assert (before.aux - after.aux.float()).norm() < 0.04 * before.aux.norm()


def test_a_scale_that_is_missing_or_not_finite_is_found(small, tmp_path):
    shutil.copytree(small / "02_states", tmp_path / "states")
    store = StateStore(tmp_path / "states")
    sample = TrainingSample(2, "", load_dataset(store.directory)[2][2])
    tensors = load_file(store.path(2))
    save_file(tensors | {SCALES: tensors[SCALES].index_fill(0, torch.tensor(4), float("inf"))}, store.path(2))
    with pytest.raises(PreconditionError, match="NaN or Inf in hidden states"):
        collate(store, [sample], 64, 3, verify=False)
    del tensors[SCALES]
    save_file(tensors, store.path(2))
    with pytest.raises(PreconditionError, match="only that sample is captured again"):
        store.load(2)


def test_sigkill_costs_nothing(small, tiny_model, tmp_path):
    shutil.copytree(small / "01_traces", tmp_path / "01_traces")
    command = arguments(tmp_path, tiny_model, "--states-dtype", "fp8")
    kill_midway(*command, done=lambda: len(list(tmp_path.glob("02_states/hidden_states/hs_*"))))
    run_stage(*command)
    assert tree(tmp_path / "02_states") == tree(small / "02_states")


def test_another_form_is_refused_on_what_lies_there(plain, small, tiny_model, tmp_path):
    shutil.copytree(plain, tmp_path / "plain")
    shutil.copytree(small, tmp_path / "small")
    refused = run_stage(*arguments(tmp_path / "plain", tiny_model, "--states-dtype", "fp8"), check=3).stderr
    assert 'extract.states_dtype: null → "fp8"' in refused and "--restart" in refused
    refused = run_stage(*arguments(tmp_path / "small", tiny_model), check=3).stderr
    assert 'extract.states_dtype: "fp8" → null' in refused
    assert tree(tmp_path / "small" / "02_states") == tree(small / "02_states")
    again = run_stage(*arguments(tmp_path / "small", tiny_model, "--states-dtype", "fp8"))
    assert "complete already" in again.stderr


def test_the_dry_run_says_what_fp8_saves(tmp_path):
    kimi = kimi_files.write(tmp_path / "Kimi-K2.5")
    command = ["02_extract_hidden_states.py", "--config", "configs/kimi-k2.5.yaml", "--run-dir", tmp_path / "run",
               "--model", kimi, "--dry-run"]
    plan = run_stage(*command, "--states-dtype", "fp8", cwd=ROOT).stderr
    assert bytes_per_token(7168, "fp8") == 4 * 7168 + 4 * 4 + 8
    for words in ("496.4 GB", "28,672 bytes a token (4 x 7168 x 1), 16 for scales, 8 for its id",
                  "fp8 instead of 992.2 GB", "--hidden-states-backend fp8"):
        assert words in plan, plan
