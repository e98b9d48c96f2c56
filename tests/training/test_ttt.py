"""A training step: its loss and its gradients."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from eagle3.training import batches, checkpoints, ttt
from eagle3.training import losses as ttt_losses


def resolve(loss):
    from speculators.losses import resolve_loss_config

    return resolve_loss_config(loss, "eager")


def speculators_loss(model, batch, steps):
    """What speculators' own forward computes for the same batch (one document, all supervised)."""
    from speculators.models.attention import create_float_mask

    model._create_mask_fn = create_float_mask
    inputs = {"hidden_states": batch.aux[None], "input_ids": batch.ids[None], "position_ids": batch.positions[None],
              "document_ids": torch.zeros_like(batch.ids)[None], "loss_mask": batch.mask[None],
              "verifier_last_hidden_states": batch.teacher[None]}
    with torch.compiler.set_stance("force_eager"):
        return model(**inputs, ttt_steps=steps, loss_config=resolve("kl_div"))[1:]


@pytest.mark.parametrize("norms", [(), ("fc_norm",), ("norm_output",), ("norm_before_fc", "norm_output"),
                                   ("norm_before_residual", "norm_output")])
def test_loss_and_gradients_are_those_of_speculators(parts, norms):
    build, store, samples = parts
    ours, theirs = build(norms=norms), build(norms=norms)
    assert set(checkpoints.trainable(ours)) >= {f"{name}.0.weight" for name in norms if name == "fc_norm"}
    states, _ = store.load(samples[0].i)
    # speculators' loss counts every position whose target is there: supervise all
    everything = replace(samples[0], loss_mask=np.ones_like(samples[0].loss_mask))
    batch = batches.collate(store, [everything], 1000, 3, verify=True)
    length = everything.length
    assert len(batch.rows) == length - 1  # nothing is known to follow the last position
    losses = ttt.loss(ours, batch, 3, resolve("kl_div"))
    counts = torch.tensor([len(rows) for rows, _ in batch.judged])
    (losses / counts).sum().backward()
    theirs_batch = replace(batch, teacher=states[1:, -1].to(batch.aux.dtype))
    loss, metrics = speculators_loss(theirs, theirs_batch, 3)
    loss.backward()
    by_step = [float(metrics[f"loss_{step}_sum"]) for step in range(3)]
    assert by_step == pytest.approx((losses / counts).tolist(), rel=1e-4)
    for name, parameter in checkpoints.trainable(ours).items():
        reference = dict(theirs.named_parameters())[name].grad
        assert torch.allclose(parameter.grad, reference, rtol=1e-3, atol=1e-6), name


def test_documents_do_not_see_each_other(parts):
    build, store, samples = parts
    model = build().eval()
    alone = batches.collate(store, [samples[3]], 1000, 3, verify=False)
    packed = batches.collate(store, [samples[1], samples[3], samples[2]], 1000, 3, verify=False)
    start = samples[1].length
    for one, many in zip(ttt.draft(model, alone, 3)[0], ttt.draft(model, packed, 3)[0], strict=True):
        assert torch.equal(one, many[start : start + samples[3].length])


def test_positions_without_loss_are_left_out_and_change_nothing(parts):
    """Rows of a second turn see the first turn; a gap in the mask is computed but not judged."""
    build, store, samples = parts
    sample = samples[0]
    mask = np.zeros(sample.length + 1, dtype=bool)
    mask[3:7] = mask[9:13] = True
    batch = batches.collate(store, [replace(sample, loss_mask=mask)], 1000, 3, verify=False)
    assert batch.mask.nonzero().flatten().tolist() == [2, 3, 4, 8, 9, 10]
    assert batch.spans == [(0, 2, 11)]
    judged = [batch.rows[rows].tolist() for rows, _ in batch.judged]
    assert judged == [[2, 3, 4, 8, 9, 10], [2, 3, 8, 9], [2, 8]]
    everything = batches.collate(store, [replace(sample, loss_mask=np.ones_like(mask))], 1000, 3, verify=False)
    model = build().eval()
    full = ttt.draft(model, everything, 3)[0]
    for few, reference, rows in zip(ttt.draft(model, batch, 3)[0], full, judged, strict=True):
        assert torch.equal(few[rows], reference[rows]) and (few >= 0).sum() == len(rows)
    losses = ttt.loss(model, batch, 3, resolve("kl_div"))
    by_hand = []
    targets = ttt.teacher_logits(model, everything)
    for step, logits in enumerate(ttt.logits_by_step(model, everything, 3)):
        rows, logits = torch.tensor(judged[step]), logits.detach()
        by_hand.append(float(resolve("kl_div")["kl_div"][0](logits[rows][None], targets[rows + step][None]).sum()))
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-5)


def kept_elements(function):
    """Return what a function returns, and how many elements it keeps for a backward pass."""
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return function(), sum(kept.values())


@pytest.mark.parametrize(("norms", "loss"), [((), "kl_div"), (("fc_norm", "norm_output"), "lk_hybrid"),
                                             (("norm_before_fc",), "ce")])
def test_recomputing_changes_no_loss_and_no_gradient_and_keeps_less(parts, monkeypatch, norms, loss):
    build, store, samples = parts
    monkeypatch.setattr(ttt, "CHUNK", 7)  # several chunks, the last a smaller one
    batch = batches.collate(store, samples[:4], 1000, 3, verify=False)
    assert len(batch.judged[0][0]) % 7 and len(batch.judged[2][0]) > 14
    found = []
    for recompute in (False, True):
        model, counts = build(norms=norms), torch.zeros(3, 3, dtype=torch.int64)
        losses, kept = kept_elements(functools.partial(ttt.loss, model, batch, 3, ttt_losses.of(loss), 0.7, counts,
                                                       recompute))
        losses.sum().backward()
        gradients = {name: parameter.grad for name, parameter in checkpoints.trainable(model).items()}
        found.append((losses.detach(), gradients, counts, kept))
    (losses, gradients, counts, kept), (others, theirs, recounted, less) = found
    assert torch.allclose(losses, others, rtol=1e-5) and torch.equal(counts, recounted)
    assert less < 0.5 * kept
    for name, gradient in gradients.items():
        assert (gradient - theirs[name]).norm() <= 1e-5 * gradient.norm(), name
