"""Stage 04: train an EAGLE-3 drafter on the captured states.

Reads   02_states (or --states), 03_vocab (or --vocab), and of the verifier the embedding, norm and head.
Writes  04_train/checkpoints/step_{n} with `best` and `last` pointing into it, each with the served form
        (model.safetensors, config.json) and the float32 state for an exact resume; metrics.jsonl, curves.html.
Needs   one GPU, several with --gpus N, or a CPU for small models.

Trained: fc, one decoder layer, norm, lm_head. After each epoch the held-out samples give the accuracy by TTT
step and the predicted acceptance length: draft rounds walked as the engine will, no adding up of accuracies, for each
draft-token count, by source and by position in the context. `best` is the best at what stage 06 serves.

Left alone it goes on: a step whose gradient is not finite or a spike is skipped, a sample with a damaged states file
left out (--max-failures); both are named and counted. Texts longer than a batch are trained in chunks (--long-samples).

--init-from continues a published drafter of any layout: its layer (heads, sizes, RoPE, positions) and its weights,
the verifier's embedding and head, the vocabulary of 03_build_vocab_mapping.py --from-checkpoint. What it is worth
before training is measured as step 0. With --gpus N weights, gradients and moments are divided among the processes.

  python 04_train.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --gpus 8
  python 04_train.py --config configs/smollm2-135m.yaml --run-dir runs/smol --lr 3e-4 --out runs/smol/04_train_lr3e-4
  python 04_train.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --gpus 8 --init-from drafters/published
"""

import os
import shlex
from pathlib import Path
from typing import Any

from eagle3.common import config, files, workers
from eagle3.common.errors import PreconditionError, StaleError, UsageError
from eagle3.common.log import logger
from eagle3.common.options import BenchmarkOptions, TrainOptions, TrainSection
from eagle3.common.script import main
from eagle3.common.stage import Stage
from eagle3.drafter import verifier
from eagle3.drafter.flat_config import TRAINED_NORMS
from eagle3.training import tracking
from eagle3.training.lineage import check_lineage


def run(options: TrainOptions, stage: Stage) -> None:
    """Train from the newest checkpoint, or from the start, to the last epoch."""
    train = options.train
    check_choices(train)
    facts = verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    states, mapping = stage.path_of(train.states, "02_states"), stage.path_of(train.vocab, "03_vocab")
    if stage.common.dry_run:
        from eagle3.dryrun.train import describe

        describe(options, stage, facts, states, mapping)
        return look_ahead(options, stage)
    upstream = {"states": stage.upstream(states, "--states"), "vocab": stage.upstream(mapping, "--vocab")}
    check_lineage(upstream, facts, states, mapping, mapping_named=bool(train.vocab))
    tracking.check(train.track)
    look_ahead(options, stage)
    if not workers.FOLDER:  # once, before any process is started
        check_start(options, stage, facts, upstream, mapping)
    opened = open_once(options, stage, upstream, states)
    if not opened and workers.world() == 1:
        return None
    if train.gpus > 1 and workers.world() == 1:
        return stage.run_workers(train.gpus)
    return train_here(options, stage, facts, states, mapping, upstream["states"]["layers"], opened)


def look_ahead(options: TrainOptions, stage: Stage) -> None:
    """Look at the GPUs before any process is started, once for all of them and not for a finished result."""
    workers.check_environment(options.train.gpus)
    if workers.world() > 1 or stage.is_complete:
        return
    from eagle3.checks import preflight

    preflight.before_training(options, stage)
    if not stage.common.dry_run:
        check_gpus(options.train.gpus)


def check_gpus(gpus: int) -> None:
    """Refuse more processes than CUDA shows GPUs, unless it shows none: then all train on the CPU."""
    if gpus == 1:
        return
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < gpus:
        raise PreconditionError("there are fewer GPUs than processes", where="--gpus", found=gpus,
                                expected=f"at most {torch.cuda.device_count()}, the GPUs that CUDA shows",
                                fix="give a smaller --gpus, or check nvidia-smi and CUDA_VISIBLE_DEVICES")


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
                                    train.intermediate_size, norms=wanted_norms(train), fix=shlex.join(again)):
        logger.warning("%s: %s", train.init_from, note)


def check_choices(train: TrainSection) -> None:
    """Raise UsageError for options that exclude each other."""
    if train.optimizer == "muon" and (train.gpus > 1 or workers.world() > 1):
        raise UsageError("Muon needs whole matrices, which several processes divide", where="--optimizer muon, --gpus",
                         expected="one process", found=max(train.gpus, workers.world()),
                         fix="take --optimizer adamw, or one GPU")
    if train.optimizer == "muon" and train.moments == "bf16":
        raise UsageError("Muon has one moment, which torch keeps in float32", where="--optimizer muon, --moments bf16",
                         expected="--moments float32", found="bf16", fix="leave one of the two out")
    if train.matmul == "fp8" and train.dtype == "float32":
        raise UsageError("float8 products come with bfloat16, not with float32", where="--matmul fp8, --dtype float32",
                         expected="--dtype bfloat16 or auto", found="float32", fix="leave one of the two out")
    if train.fc_norm and train.norm_before_fc:
        raise UsageError("two norms before fc are chosen", where="--fc-norm, --norm-before-fc", expected="one of them",
                         fix="leave one out")


def wanted_norms(train: TrainSection) -> dict[str, bool | None]:
    """Return the norms that are asked for, None where it is left to the drafter."""
    return {name: getattr(train, name) for name in TRAINED_NORMS}


def served_draft_tokens(options: TrainOptions, stage: Stage) -> list[int]:
    """Return the draft-token counts that choose the best checkpoint."""
    if options.train.draft_tokens:
        return [options.train.draft_tokens]
    benchmark = config.of_file(BenchmarkOptions, stage.common.config).benchmark
    return sorted({count for count in benchmark.draft_tokens if count > 0}) or BenchmarkOptions().benchmark.draft_tokens


def results_of(options: TrainOptions, stage: Stage, states: Path, world: int) -> dict[str, Any]:
    """Return the options that change results. What an option changes nothing of, or does as versions without it did, is
    not among them: results of those versions stay what they are."""
    from eagle3.states.store import StateStore

    train, results = options.train, config.result_options(options)
    for name in ("train.gpus", "train.accumulation"):
        del results[name]
    results |= {"train.batches_per_step": world * train.accumulation, "common.limit": stage.common.limit}
    served = served_draft_tokens(options, stage)
    results["train.draft_tokens"] = served[0] if len(served) == 1 else served
    lengths = [entry["tokens"] - 1 for entry in StateStore(states).index().values() if "bytes" in entry]
    if train.long_samples == "truncate" or max(lengths, default=0) <= train.batch_tokens:
        del results["train.long_samples"]
    fresh = TrainOptions().train
    for name in ("max_steps", "spike_factor", "recompute", "moments", "matmul"):
        if getattr(train, name) == getattr(fresh, name):
            del results[f"train.{name}"]
    return results


def open_once(options: TrainOptions, stage: Stage, upstream: dict[str, dict[str, Any]], states: Path) -> bool:
    """Lock and open the stage before any other process starts, or in the first of those that a launcher started."""
    train = options.train
    if workers.world() > 1:
        if not workers.FOLDER and workers.local_rank() == 0:
            logger.info("process %d of %d waits for the others at %s:%s", workers.rank() + 1, workers.world(),
                        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        if workers.rank() > 0:
            logger.setLevel("WARNING")  # what all processes know is said once
        elif workers.FOLDER:
            stage.join()
        if workers.FOLDER or workers.rank() > 0:
            return True
    results = results_of(options, stage, states, max(workers.world(), train.gpus))
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


def train_here(options: TrainOptions, stage: Stage, facts: verifier.Verifier, states: Path, mapping: Path,
               layers: list[int], opened: bool) -> None:
    """Train in this process, alone or as one of a group.

    Args:
        layers: ids of the captured states. opened: whether there is work; the first process decides for all.
    """
    import torch

    from eagle3.drafter import network, vocab
    from eagle3.states.store import StateStore, load_dataset
    from eagle3.training import batches, checkpoints, float8, ttt
    from eagle3.training.long_samples import LONG, fit
    from eagle3.training.loop import Loop
    from eagle3.training.schedule import Schedule
    from eagle3.training.trainer import Processes, Trainer

    train = options.train
    stage.check_stop()  # a signal that came before the processes wait for each other
    processes = Processes.start()
    if not processes.from_first(opened):
        return processes.stop()
    store = StateStore(states, len(layers))
    samples = batches.read_samples(store, load_dataset(states), stage.common.limit, missing=train.max_failures)
    whole = batches.split(samples, train.validation_fraction, train.seed)
    fitted = [fit(half, train.batch_tokens, train.long_samples, train.ttt_steps) for half in whole if half]
    training, held_out = fitted[0].samples, fitted[1].samples if whole[1] else []
    schedule = Schedule(training, train, train.accumulation * processes.world)
    d2t, t2d = vocab.load_mapping(mapping / vocab.MAPPING)
    shape = network.layer_shape(facts, train.intermediate_size)
    norms = tuple(name for name, wanted in wanted_norms(train).items() if wanted)
    model = (network.continue_from(Path(train.init_from), facts, layers) if train.init_from
             else network.build(facts, layers, d2t, t2d, shape, norms=norms, seed=train.seed)).to(processes.device)
    if ttt.has_norms(model) and ttt.fused_on(processes.device):
        logger.info("%s: the plain form of the step is trained, the fused one does not know them",
                    ", ".join(network.norms_of(model)))
    if train.matmul == "fp8" and (why := float8.refusal(model, processes.device, ttt.fused_on(processes.device))):
        raise PreconditionError(f"products cannot be in float8: {why}", where="--matmul fp8", fix="leave --matmul out")
    trainer = Trainer(model, store, train, processes, served_draft_tokens(options, stage))
    loop = Loop(stage, facts, trainer, schedule, held_out, layers)
    packed = schedule.packed(0)
    logger.info(
        "%d training and %d held-out samples; %d steps of %d batches x %d tokens, packed to %.1f%%; %s trained "
        "parameters; %s%s", *map(len, whole), schedule.total_steps,
        schedule.batches_per_step, train.batch_tokens, 100 * batches.efficiency(packed, train.batch_tokens),
        f"{sum(p.numel() for p in checkpoints.trainable(model).values()):,}", processes.device,
        "".join(f"; {name}: {each.say(train.long_samples)}" for name, each in
                zip(("training", "held out"), fitted, strict=False) if each.long_samples))
    try:
        loop.run()
    except torch.OutOfMemoryError as error:
        raise PreconditionError("a GPU has too little memory", found=str(error).partition(". ")[0],
                                fix="give --recompute on, or lower --batch-tokens and raise --accumulation by as much; "
                                "nvidia-smi shows who else uses the GPU") from error
    if processes.rank == 0:
        loop.complete(len(whole[0]), **{name: sum(getattr(each, name) for each in fitted) for name in LONG})
    return processes.stop()  # not after an error: it might wait for the others, who wait for this one


if __name__ == "__main__":
    main(__doc__, TrainOptions, run)
