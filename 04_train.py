"""Stage 04: train an EAGLE-3 drafter on the captured states.

Reads   02_states (or --states), 03_vocab (or --vocab), and of the verifier the embedding, norm and head.
Writes  04_train/checkpoints/step_{n} with `best` and `last` pointing into it, each with the served form
        (model.safetensors, config.json) and the float32 state for an exact resume; metrics.jsonl.
Needs   one GPU, several with --gpus N, or a CPU for small models.

Trained: fc, one decoder layer, norm, lm_head. After each epoch the held-out samples give the accuracy by TTT
step and the predicted acceptance length: draft rounds walked as the engine will, no adding up of accuracies.

  python 04_train.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --gpus 8
  python 04_train.py --config configs/smollm2-135m.yaml --run-dir runs/smol --lr 3e-4 --out runs/smol/04_train_lr3e-4
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eagle3 import config, files, log, verifier
from eagle3.errors import Interrupted, PreconditionError
from eagle3.log import logger
from eagle3.options import TrainOptions
from eagle3.script import EXIT_FILE, main
from eagle3.stage import Stage, require_free_disk


def run(options: TrainOptions, stage: Stage) -> None:
    """Train from the newest checkpoint, or from the start, to the last epoch."""
    train = options.train
    facts = verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    states, mapping = stage.path_of(train.states, "02_states"), stage.path_of(train.vocab, "03_vocab")
    upstream = {"states": stage.upstream(states, "--states"), "vocab": stage.upstream(mapping, "--vocab")}
    check_lineage(upstream, facts, states, mapping)
    if stage.common.dry_run:
        return describe(options, stage, facts, upstream)
    if train.gpus > 1 and "RANK" not in os.environ:
        return launch(stage, train.gpus)
    if not open_once(options, stage, upstream):
        return None

    from eagle3 import batches, drafter, trainstate, vocab
    from eagle3.epochs import Loop
    from eagle3.states import StateStore, load_dataset
    from eagle3.training import Plan, Processes, Trainer

    processes = Processes.start()
    try:
        store = StateStore(states)
        _, _, masks = load_dataset(states)
        samples = batches.read_samples(store, masks, stage.common.limit)
        training, held_out = batches.split(samples, train.validation_fraction, train.seed)
        plan = Plan(training, train, train.accumulation * processes.world)
        d2t, t2d = vocab.load_mapping(mapping / vocab.MAPPING)
        model = drafter.build(facts, upstream["states"]["layers"], d2t, t2d,
                              drafter.layer_shape(facts, train.intermediate_size), seed=train.seed).to(processes.device)
        trainer = Trainer(model, store, train, processes)
        loop = Loop(stage, facts, trainer, plan, held_out)
        packed = plan.packed(0)
        logger.info(
            "%d training and %d held-out samples; %d steps of %d batches x %d tokens, packed to %.1f%%; %s trained "
            "parameters; %s", len(training), len(held_out), plan.total_steps, plan.batches_per_step,
            train.batch_tokens, 100 * batches.efficiency(packed, train.batch_tokens),
            f"{sum(p.numel() for p in trainstate.trainable(model).values()):,}", processes.device)
        loop.run()
        if processes.rank == 0:
            loop.complete(len(training))
    finally:
        processes.stop()
    return None


def open_once(options: TrainOptions, stage: Stage, upstream: dict[str, dict[str, Any]]) -> bool:
    """Lock and open the stage in the first process; the others follow it without writing."""
    train = options.train
    world = int(os.environ.get("WORLD_SIZE", str(train.gpus)))
    results = config.result_options(options)
    for name in ("train.gpus", "train.accumulation"):
        del results[name]
    results |= {"train.batches_per_step": world * train.accumulation, "common.limit": stage.common.limit}
    if int(os.environ.get("RANK", "0")) > 0:
        return True
    identities = {name: manifest["identity"] for name, manifest in upstream.items()}
    identities["model"] = files.sha256_json(files.model_identity(Path(options.model.path)))
    return stage.open(inputs=identities, results=results)


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


def describe(options: TrainOptions, stage: Stage, facts: verifier.Verifier, upstream: dict[str, dict]) -> None:
    """Print what a run would do, from manifests only (estimates are marked)."""
    train, counts = options.train, upstream["states"]["counts"]
    draft_vocab = upstream["vocab"]["draft_vocab_size"]
    hidden, inner = facts.hidden_size, train.intermediate_size or int(facts.config["intermediate_size"])
    trained = 3 * hidden * hidden + 6 * hidden * hidden + 3 * hidden * inner + draft_vocab * hidden
    steps = -(-counts["tokens"] * (1 - train.validation_fraction) // (train.batch_tokens * train.accumulation
                                                                       * train.gpus)) * train.epochs
    checkpoint = trained * (2 + 12)
    logger.info("reads   %d samples, %s tokens; draft vocabulary %s", counts["done"], f"{counts['tokens']:,}",
                f"{draft_vocab:,}")
    logger.info("trains  about %s parameters (estimate), %d epochs, about %d steps (estimate), %d TTT steps",
                f"{trained:,}", train.epochs, steps, train.ttt_steps)
    logger.info("writes  %s: %s a checkpoint (estimate), up to %d kept", stage.directory / "checkpoints",
                log.size(checkpoint), train.keep_checkpoints + 2)
    logger.info("starts  %s", f"torchrun with {train.gpus} processes" if train.gpus > 1 else "one process")
    require_free_disk(stage.directory, checkpoint * (train.keep_checkpoints + 2), "the checkpoints")


def launch(stage: Stage, gpus: int) -> None:
    """Run this script under torchrun and end with the first process's own exit code.

    torchrun turns every failure into 1, so the worker leaves its code in a file. A signal to this process goes
    to torchrun, which passes it on once; the workers save and stop.
    """
    with tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder) / "exit"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus),
                   *sys.argv]
        child = subprocess.Popen(command, env={**os.environ, EXIT_FILE: str(code_file)}, start_new_session=True)
        stage.interrupt.on_stop(lambda: os.killpg(child.pid, signal.SIGKILL))
        passed_on = False
        while child.poll() is None:
            if stage.signal is not None and not passed_on:
                child.terminate()
                passed_on = True
            time.sleep(0.1)
        code = int(code_file.read_text()) if code_file.exists() else child.returncode
    if stage.signal is not None:
        raise Interrupted(stage.signal)
    sys.exit(code)


if __name__ == "__main__":
    main(__doc__, TrainOptions, run)
