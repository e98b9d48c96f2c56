"""Products in float8: how near they are, and where they are refused."""

from types import SimpleNamespace

import pytest
import torch
from support.pipeline import LAYERS, run_stage

from eagle3.training import float8


def test_a_row_keeps_its_direction_whatever_its_size():
    torch.manual_seed(0)
    x = torch.randn(6, 64).bfloat16() * torch.logspace(-9, 9, 6)[:, None].bfloat16()
    rounded, scales = float8.by_rows(torch.cat([x, torch.zeros(1, 64).bfloat16()]))
    back = rounded.float() * scales
    assert ((back[:6] - x.float()).norm(dim=1) / x.float().norm(dim=1) < 0.035).all()
    assert not back[6].any() and rounded.float().abs().max() == float8.LARGEST == torch.finfo(float8.FORM).max


def test_products_forward_and_back_are_within_their_rounding():
    torch.manual_seed(0)
    whole, x, given = torch.randn(48, 64).bfloat16(), torch.randn(9, 64).bfloat16(), torch.randn(9, 48).bfloat16()
    matrix, out = float8.Matrix(whole), torch.empty(9, 48, dtype=torch.bfloat16)
    for found, exact in ((matrix.times(x, out), x.double() @ whole.double().T), (out, x.double() @ whole.double().T),
                         (matrix.back(given), given.double() @ whole.double())):
        assert found.dtype == torch.bfloat16 and 0.01 < (found - exact).norm() / exact.norm() < 0.05
    assert matrix.times(x[:0]).shape == (0, 48) and matrix.back(given[:0]).shape == (0, 64)


def drafter(width=64, **norms):
    layer = SimpleNamespace(self_attn=torch.nn.Module(), mlp=torch.nn.Module())
    layer.mlp.up_proj = torch.nn.Linear(64, width, bias=False)
    flags = {"fc_norm": False, "norm_before_fc": False, "norm_output": False,
             "norm_before_residual": False} | norms
    return SimpleNamespace(layers=[layer], config=SimpleNamespace(**flags))


@pytest.mark.parametrize(("model", "card", "fused", "why"), [
    (drafter(), (9, 0), True, None),
    (drafter(), (8, 9), True, None),
    (drafter(), (8, 0), True, "compute capability 8.9, this is 8.0"),
    (drafter(), (9, 0), False, "fused step"),
    (drafter(fc_norm=True), (9, 0), True, "fc_norm"),
    (drafter(width=50), (9, 0), True, "up_proj has 50 x 64"),
])
def test_what_cannot_be_in_float8_is_told_with_its_reason(monkeypatch, model, card, fused, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    found = float8.refusal(model, torch.device("cuda"), fused)
    assert found is None if why is None else why in found


def test_without_a_gpu_there_is_no_float8():
    assert "no GPU" in float8.refusal(drafter(), torch.device("cpu"), False)


def test_stage_04_refuses_it_before_it_trains(prepared, tiny_model, tmp_path):
    train = ["04_train.py", "--run-dir", tmp_path, "--model", tiny_model, "--layers", *LAYERS.split(), "--states",
             prepared / "02_states", "--vocab", prepared / "03_vocab", "--matmul", "fp8"]
    assert "not with float32" in run_stage(*train, "--dtype", "float32", check=2).stderr
    refused = run_stage(*train, check=3)
    assert "cannot be in float8" in refused.stderr and "no GPU is in use" in refused.stderr
    assert not (tmp_path / "04_train/checkpoints").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_makes_its_row_of_a_product_nan(value):
    x, whole = torch.ones(3, 32).bfloat16(), torch.ones(16, 32).bfloat16()
    x[1, 5] = value
    found = float8.Matrix(whole).times(x)
    assert found[1].isnan().all() and not found[[0, 2]].isnan().any()
