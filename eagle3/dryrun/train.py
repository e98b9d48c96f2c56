"""The dry run of stage 04: the drafter's size, the steps of its training, memory, disk and time."""

import math
from pathlib import Path

from eagle3.common import log, machine
from eagle3.common.options import TrainOptions
from eagle3.common.stage import Stage
from eagle3.drafter.flat_config import NORM_FLAGS, TRAINED_NORMS, layer_shape
from eagle3.drafter.verifier import Verifier
from eagle3.dryrun import estimates, foreseen
from eagle3.dryrun.dry_run import DryRun
from eagle3.states.store import StateStore
from eagle3.training import tracking
from eagle3.training.lineage import check_lineage
from eagle3.training.memory import too_large


def describe(options: TrainOptions, stage: Stage, facts: Verifier, states: Path, mapping: Path) -> None:
    """Print what a run would do, from manifests only (estimates are marked)."""
    train, dry = options.train, DryRun(stage, facts.folder)
    upstream = {
        "states": stage.upstream(states, "--states", None if train.states else foreseen.states(stage, facts)),
        "vocab": stage.upstream(mapping, "--vocab", None if train.vocab else foreseen.vocab(stage, facts)),
    }
    check_lineage(upstream, facts, states, mapping, mapping_named=bool(train.vocab))
    tracking.check(train.track)
    samples, tokens = foreseen.limited(upstream["states"]["counts"], stage.common.limit)
    layer = dry.published(train.init_from) if train.init_from else layer_shape(facts, train.intermediate_size) | {
        name: bool(getattr(train, name)) for name in TRAINED_NORMS}
    drafter = estimates.drafter(facts, upstream["vocab"]["draft_vocab_size"], layer)
    a_step = train.batch_tokens * train.accumulation * train.gpus
    steps = math.ceil(tokens * (1 - train.validation_fraction) / a_step) * train.epochs
    steps = min(steps, train.max_steps or steps)
    dry.say("reads", f"{samples:,} samples, {tokens:,} tokens; draft vocabulary {drafter.vocab:,}")
    operations = drafter.flops_per_token(train.ttt_steps) / 1e9
    lengths = [entry["tokens"] for entry in StateStore(states).index().values() if "bytes" in entry]
    if longer := sum(length - 1 > train.batch_tokens for length in lengths[:stage.common.limit]):
        dry.say("", f"{longer:,} texts are longer than a batch of {train.batch_tokens:,} tokens: --long-samples "
                f"{train.long_samples}")
    dry.say("trains", f"{drafter.trained:,} of {drafter.total:,} parameters; {train.epochs} epochs, about {steps:,} "
            f"steps of {a_step:,} tokens, {train.ttt_steps} TTT steps, {operations:.3g} GFLOP a token (estimate)")
    moment = 2 if train.moments == "bf16" else 4  # bytes
    kept = train.keep_checkpoints + 2 + (steps // train.keep_every if train.keep_every else 0)
    dry.say("writes", f"{stage.directory / 'checkpoints'}: {log.size(drafter.checkpoint_bytes(moment))} a checkpoint "
            f"every {train.save_every_min:g} minutes, up to {kept} kept and one being written (estimate)")
    dry.say("starts", f"{train.gpus} processes of this script, one a GPU" if train.gpus > 1 else "one process")
    bf16 = dry.trains_in_bf16(train.dtype)
    fused = train.loss == "kl_div" and not any((layer or {}).get(name) for name in NORM_FLAGS)
    state, whole = drafter.state_bytes(train.gpus, moment), drafter.whole_bytes(train.gpus, bf16)
    again = train.recompute == "on"

    def needed(again: bool) -> tuple[int, int]:
        rows, steps = train.batch_tokens, train.ttt_steps
        activations = drafter.activation_bytes(rows, steps, bf16=bf16, fused=fused, recompute=again)
        if not (bf16 and fused):
            return activations, state + whole + activations
        return activations, drafter.step.peak(rows, steps, moments=2 * moment, processes=train.gpus, recompute=again,
                                              fp8=train.matmul == "fp8")

    if train.recompute == "auto" and (visible := machine.gpus()) and not dry.elsewhere:
        least = min(gpu.total_mib for gpu in visible) * machine.MIB
        again = too_large(needed(False)[1] + drafter.step.ahead(train.batch_tokens), least)
    activations, peak = needed(again)
    how = "its layer, head and loss computed again" if again else f"--recompute {train.recompute}"
    dry.say("memory", f"on each of {train.gpus}: {log.size(state)} of weights, gradients, "
            f"moments, {log.size(whole)} frozen or gathered, at most {log.size(activations)} for the backward pass of "
            f"{train.batch_tokens:,} tokens ({how}); at its peak {log.size(peak)}, and "
            f"{log.size(drafter.step.ahead(train.batch_tokens))} of batches loaded ahead (estimate)")
    if dry.known:
        dry.time(dry.known.training_seconds(tokens, train.epochs, train.gpus), f"{tokens:,} tokens x {train.epochs} "
                 f"epochs at {train.gpus} times the rate of one GPU in {dry.known.name}: at best")
    dry.gpus(train.gpus)
    dry.disk(stage.directory, drafter.checkpoint_bytes(moment) * (kept + 1), "the checkpoints")
    dry.end()
