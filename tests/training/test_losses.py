"""Losses: against speculators' own, values and gradients, and what they are where one knows it."""

import math
from dataclasses import fields

import pytest
import torch

from eagle3.common.options import TrainSection
from eagle3.training import losses


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_values_and_gradients_are_those_of_speculators(name, scale):
    from speculators.losses import resolve_loss_config

    torch.manual_seed(0)
    ours, targets = torch.randn(1, 50, 37) * scale, torch.randn(1, 50, 37) * scale
    theirs = ours.clone().requires_grad_()
    ours.requires_grad_()
    ((function, weight),) = losses.of(name).values()
    ((reference, _),) = resolve_loss_config(name, "eager").values()
    value, expected = function(ours, targets), reference(theirs, targets)
    assert weight == 1.0 and value.shape == (1, 50)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    value.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_losses_are_zero_where_both_agree_and_finite_where_nothing_does(name):
    function = losses.LOSSES[name]
    certain = torch.tensor([[100.0, 0.0, 0.0]])
    assert float(function(certain, certain)) == pytest.approx(0.0, abs=1e-6)
    other = certain.roll(1, -1).requires_grad_()
    apart = function(other, certain)
    apart.backward()
    bound = {"tv": 1.0, "jsd": math.log(2), "nla": -math.log(1e-5)}.get(name)
    assert bound is None or float(apart) == pytest.approx(bound, rel=1e-5)
    assert float(apart) > 0.6 and torch.isfinite(other.grad).all()


def test_every_loss_can_be_chosen():
    (loss,) = [item for item in fields(TrainSection) if item.name == "loss"]
    assert set(loss.metadata["choices"]) == set(losses.LOSSES)
