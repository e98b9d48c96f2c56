"""Stage 04: train an EAGLE-3 drafter on the captured states.

Reads   02_states (or --states), 03_vocab (or --vocab), and of the verifier the embedding, norm and head.
Writes  04_train/checkpoints/step_{n} with `best` and `last` pointing into it, each with the served form
        (model.safetensors, config.json) and the float32 state for an exact resume; metrics.jsonl.
Needs   one GPU, several with --gpus N, or a CPU for small models.

Trained: fc, one decoder layer, norm, lm_head. After each epoch the held-out samples give the accuracy by TTT
step and the predicted acceptance length: draft rounds walked as the engine will, no adding up of accuracies.

--init-from continues a published drafter of any layout: its layer (heads, sizes, RoPE, positions) and its weights,
the verifier's embedding and head, the vocabulary of 03_build_vocab_mapping.py --from-checkpoint. What it is worth
before training is measured as step 0. With --gpus N weights, gradients and moments are divided among the processes.

  python 04_train.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --gpus 8
  python 04_train.py --config configs/smollm2-135m.yaml --run-dir runs/smol --lr 3e-4 --out runs/smol/04_train_lr3e-4
  python 04_train.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --gpus 8 --init-from drafters/published
"""

import math
import os
import shlex
from pathlib import Path
from typing import Any

from eagle3.common import config, files, log, workers
from eagle3.common.errors import PreconditionError, StaleError
from eagle3.common.log import logger
from eagle3.common.options import TrainOptions
from eagle3.common.script import main
from eagle3.common.stage import Stage
from eagle3.drafter import verifier


def run(options: TrainOptions, stage: Stage) -> None:
    """Train from the newest checkpoint, or from the start, to the last epoch."""
    train = options.train
    facts = verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    states, mapping = stage.path_of(train.states, "02_states"), stage.path_of(train.vocab, "03_vocab")
    if stage.common.dry_run:
        describe(options, stage, facts, states, mapping)
        return look_ahead(options, stage)
    upstream = {"states": stage.upstream(states, "--states"), "vocab": stage.upstream(mapping, "--vocab")}
    check_lineage(upstream, facts, states, mapping)
    look_ahead(options, stage)
    if not workers.FOLDER:  # once, before any process is started
        check_start(options, stage, facts, upstream, mapping)
    opened = open_once(options, stage, upstream)
    if not opened and workers.world() == 1:
        return None
    if train.gpus > 1 and workers.world() == 1:
        return stage.run_workers(train.gpus)

    import torch

    from eagle3.drafter import network, vocab
    from eagle3.states.store import StateStore, load_dataset
    from eagle3.training import batches, checkpoints
    from eagle3.training.loop import Loop
    from eagle3.training.trainer import Plan, Processes, Trainer

    stage.check_stop()  # a signal that came before the processes wait for each other
    processes = Processes.start()
    if not processes.from_first(opened):
        return processes.stop()
    store = StateStore(states, len(upstream["states"]["layers"]))
    _, _, masks = load_dataset(states)
    samples = batches.read_samples(store, masks, stage.common.limit)
    training, held_out = batches.split(samples, train.validation_fraction, train.seed)
    plan = Plan(training, train, train.accumulation * processes.world)
    d2t, t2d = vocab.load_mapping(mapping / vocab.MAPPING)
    layers = upstream["states"]["layers"]
    shape = network.layer_shape(facts, train.intermediate_size)
    model = (network.continue_from(Path(train.init_from), facts, layers) if train.init_from
             else network.build(facts, layers, d2t, t2d, shape, seed=train.seed)).to(processes.device)
    trainer = Trainer(model, store, train, processes)
    loop = Loop(stage, facts, trainer, plan, held_out, layers)
    packed = plan.packed(0)
    logger.info(
        "%d training and %d held-out samples; %d steps of %d batches x %d tokens, packed to %.1f%%; %s trained "
        "parameters; %s", len(training), len(held_out), plan.total_steps, plan.batches_per_step,
        train.batch_tokens, 100 * batches.efficiency(packed, train.batch_tokens),
        f"{sum(p.numel() for p in checkpoints.trainable(model).values()):,}", processes.device)
    try:
        loop.run()
    except torch.OutOfMemoryError as error:
        raise PreconditionError("a GPU has too little memory", found=str(error).partition(". ")[0],
                                fix="lower --batch-tokens and raise --accumulation by as much; nvidia-smi shows who "
                                "else uses the GPU") from error
    if processes.rank == 0:
        loop.complete(len(training))
    return processes.stop()  # not after an error: it might wait for the others, who wait for this one


def open_once(options: TrainOptions, stage: Stage, upstream: dict[str, dict[str, Any]]) -> bool:
    """Lock and open the stage before any other process starts, or in the first of those that a launcher started."""
    train = options.train
    if workers.world() > 1:
        if workers.rank() > 0:
            logger.setLevel("WARNING")  # what all processes know is said once
        if not workers.FOLDER:
            logger.info("process %d of %d waits for the others at %s:%s", workers.rank() + 1, workers.world(),
                        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        elif workers.rank() == 0:
            stage.join()
        if workers.FOLDER or workers.rank() > 0:
            return True
    world = max(workers.world(), train.gpus)
    results = config.result_options(options)
    for name in ("train.gpus", "train.accumulation"):
        del results[name]
    results |= {"train.batches_per_step": world * train.accumulation, "common.limit": stage.common.limit}
    identities = {name: manifest["identity"] for name, manifest in upstream.items()}
    identities["model"] = files.sha256_json(files.model_identity(Path(options.model.path)))
    if train.init_from:
        identities["init_from"] = files.sha256_json(files.model_identity(Path(train.init_from)))
    try:
        checkpoints = stage.directory / "checkpoints"
        return stage.open(inputs=identities, results=results, holds=lambda: any(checkpoints.glob("*step_*")))
    except StaleError as error:
        if "train.batches_per_step" not in str(error.parts["found"]):
            raise
        same = "as many batches a step: --gpus times --accumulation"
        raise StaleError(error.what, where=error.parts["where"], expected=same, found=error.parts["found"],
                         fix=str(error.parts["fix"])) from None


def check_lineage(upstream: dict[str, dict], facts: verifier.Verifier, states: Path, mapping: Path) -> None:
    """Refuse states and a mapping that do not belong to this verifier or were made from other traces."""
    if upstream["states"]["hidden_size"] != facts.hidden_size:
        raise PreconditionError("the states are of another model", where=states,
                                expected=f"hidden size {facts.hidden_size}",
                                found=upstream["states"]["hidden_size"], fix="check --model and --states")
    if upstream["vocab"]["vocab_size"] != facts.vocab_size:
        raise PreconditionError("the mapping is of another model", where=mapping,
                                expected=f"{facts.vocab_size} target tokens",
                                found=upstream["vocab"]["vocab_size"], fix="check --model and --vocab")


def look_ahead(options: TrainOptions, stage: Stage) -> None:
    """Look at the GPUs before any process is started, once for all of them and not for a finished result."""
    workers.check_environment(options.train.gpus)
    if workers.world() > 1 or stage.is_complete:
        return
    from eagle3.checks import preflight

    preflight.before_training(options, stage)
    if not stage.common.dry_run:
        check_gpus(options.train.gpus)


def check_start(options: TrainOptions, stage: Stage, facts: verifier.Verifier, upstream: dict[str, dict],
                mapping: Path) -> None:
    """Refuse a drafter of --init-from that does not fit the verifier, the states or the vocabulary."""
    train = options.train
    if not train.init_from:
        return
    from eagle3.drafter import network, vocab

    again = ["python", "03_build_vocab_mapping.py", "--config", stage.common.config, "--run-dir", str(stage.run_dir),
             "--model", options.model.path, "--from-checkpoint", train.init_from, "--out", str(mapping), "--restart"]
    if not stage.common.config:
        del again[2:4]
    if not train.vocab:
        del again[-3:-1]
    t2d = vocab.load_mapping(mapping / vocab.MAPPING)[1]
    for note in network.check_start(Path(train.init_from), facts, upstream["states"]["layers"], t2d,
                                    train.intermediate_size, fix=shlex.join(again)):
        logger.warning("%s: %s", train.init_from, note)


def describe(options: TrainOptions, stage: Stage, facts: verifier.Verifier, states: Path, mapping: Path) -> None:
    """Print what a run would do, from manifests only (estimates are marked)."""
    from eagle3.drafter.flat_config import layer_shape
    from eagle3.dryrun import dry_run, estimates

    train, plan = options.train, dry_run.DryRun(stage, facts.folder)
    upstream = {
        "states": stage.upstream(states, "--states", None if train.states else dry_run.states(stage, facts)),
        "vocab": stage.upstream(mapping, "--vocab", None if train.vocab else dry_run.vocab(stage, facts)),
    }
    check_lineage(upstream, facts, states, mapping)
    samples, tokens = dry_run.limited(upstream["states"]["counts"], stage.common.limit)
    layer = plan.published(train.init_from) if train.init_from else layer_shape(facts, train.intermediate_size)
    drafter = estimates.drafter(facts, upstream["vocab"]["draft_vocab_size"], layer)
    a_step = train.batch_tokens * train.accumulation * train.gpus
    steps = math.ceil(tokens * (1 - train.validation_fraction) / a_step) * train.epochs
    plan.say("reads", f"{samples:,} samples, {tokens:,} tokens; draft vocabulary {drafter.vocab:,}")
    operations = drafter.flops_per_token(train.ttt_steps) / 1e9
    plan.say("trains", f"{drafter.trained:,} of {drafter.total:,} parameters; {train.epochs} epochs, about {steps:,} "
             f"steps of {a_step:,} tokens, {train.ttt_steps} TTT steps, {operations:.3g} GFLOP a token (estimate)")
    kept = train.keep_checkpoints + 2
    plan.say("writes", f"{stage.directory / 'checkpoints'}: {log.size(drafter.checkpoint_bytes)} a checkpoint every "
             f"{train.save_every_min:g} minutes, up to {kept} kept and one being written (estimate)")
    plan.say("starts", f"{train.gpus} processes of this script, one a GPU" if train.gpus > 1 else "one process")
    bf16 = plan.trains_in_bf16(train.dtype)
    activations = drafter.activation_bytes(train.batch_tokens, train.ttt_steps, bf16)
    plan.say("memory", f"on each of {train.gpus}: {log.size(drafter.state_bytes(train.gpus))} of weights, gradients, "
             f"moments, {log.size(drafter.whole_bytes(train.gpus, bf16))} frozen or gathered, at most "
             f"{log.size(activations)} for the backward pass of {train.batch_tokens:,} tokens (estimate)")
    if plan.known:
        plan.time(plan.known.training_seconds(tokens, train.epochs, train.gpus), f"{tokens:,} tokens x {train.epochs} "
                  f"epochs at {train.gpus} times the rate of one GPU in {plan.known.name}: at best")
    plan.gpus(train.gpus)
    plan.disk(stage.directory, drafter.checkpoint_bytes * (kept + 1), "the checkpoints")
    plan.end()


def check_gpus(gpus: int) -> None:
    """Refuse more processes than CUDA shows GPUs, unless it shows none: then all train on the CPU."""
    if gpus == 1:
        return
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < gpus:
        raise PreconditionError("there are fewer GPUs than processes", where="--gpus", found=gpus,
                                expected=f"at most {torch.cuda.device_count()}, the GPUs that CUDA shows",
                                fix="give a smaller --gpus, or check nvidia-smi and CUDA_VISIBLE_DEVICES")


if __name__ == "__main__":
    main(__doc__, TrainOptions, run)
