"""Drafters of stage 04 and of `speculators train`, trained on the very same states, judged alike: length by seed.

Both sides get the same samples of one run, the same draft vocabulary, as many epochs and TTT steps, the same number of
tokens in a batch; the samples that stage 04 holds out with a seed are held out on both sides. The peer's other settings
are its defaults, but for its window of 2,048 tokens, which shorter texts do not notice and stage 05 refuses; of its
learning rates the one that is best in the mean over seeds counts. Each drafter is exported by stage 05 and walked over
the held-out samples by the same code: the predicted acceptance length. Stage 06 measures an export like any other
(--drafter OUT/peer-0.001-s0-export/vllm).

  python benchmarks/recipe_against_speculators.py --config recipes/smollm2-135m.yaml --run-dir runs/smollm2-self \
      --seeds 0 1 2 --peer-lrs 3e-4 1e-3 3e-3
  python benchmarks/recipe_against_speculators.py … --peer-flags "--loss-implementation eager --draft-attn-impl sdpa"

The same command again trains only what is missing. --jobs trains several at once; seconds are then no measure. Prints a
JSON line at its end and exits with 1 when a training failed, or ours is not longer in every seed.
"""

import argparse
import concurrent.futures
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eagle3.common import config, manifest, pages, tensor_files
from eagle3.common.options import TrainOptions
from eagle3.drafter import verifier, vocab

ROOT = Path(__file__).resolve().parent.parent
OURS = "stage 04"


def main() -> int:
    """Train what is missing, judge everything, print; return the exit code."""
    given = arguments()
    options = config.parse(TrainOptions, ["--config", given.config, "--run-dir", str(given.run_dir),
                                          *shlex.split(given.flags)], "")
    facts = verifier.read(Path(options.model.path))
    trainings = [(side, seed) for seed in given.seeds for side in (OURS, *map(float, given.peer_lrs))]
    judges = {seed: Judge(given, options, facts, seed) for seed in given.seeds}
    for judge in judges.values():
        judge.write_for_peer()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        done = dict(zip(trainings, pool.map(lambda each: train(given, options, judges[each[1]], *each), trainings),
                        strict=True))
    found = {each: judges[each[1]].judge(folder) for each, folder in done.items() if folder}
    peers = {lr: [found[lr, seed] for seed in given.seeds if (lr, seed) in found] for lr in map(float, given.peer_lrs)}
    best = max((lr for lr in peers if peers[lr]), key=lambda lr: statistics.mean(peers[lr]), default=None)
    print(pages.text_table(["side", *(f"seed {seed}" for seed in given.seeds), "mean"],
                           [row(side, best, given.seeds, found) for side in (OURS, *peers)]))
    pairs = [(found[OURS, seed], found[best, seed]) for seed in given.seeds
             if {(OURS, seed), (best, seed)} <= found.keys()]
    gains = [ours / theirs - 1 for ours, theirs in pairs]
    good = len(gains) == len(given.seeds) and min(gains) > 0
    print(json.dumps({"lengths": {f"{side} seed {seed}": round(length, 4) for (side, seed), length in found.items()},
                      "best_peer_lr": best, "gain": round(statistics.mean(gains), 4) if gains else None,
                      "gains": [round(gain, 4) for gain in gains], "good": good}))
    return int(not good)


def row(side: Any, best: float | None, seeds: list[int], found: dict[Any, float]) -> list[str]:
    """Return a side's row of the table."""
    lengths = [found.get((side, seed)) for seed in seeds]
    known = [length for length in lengths if length]
    return [side if side == OURS else f"speculators, lr {side:g}" + " (best)" * (side == best),
            *(f"{length:.3f}" if length else "failed" for length in lengths),
            f"{statistics.mean(known):.3f}" if known else "–"]


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--run-dir", type=Path, required=True, help="a run with stages 01 to 03 complete")
    parser.add_argument("--flags", default="", help="more flags of stage 04")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--peer-lrs", nargs="+", default=["3e-4", "1e-3", "3e-3"])
    parser.add_argument("--peer-flags", default="", help="more flags of `speculators train`")
    parser.add_argument("--at", type=int, default=3, help="draft tokens of the length")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once")
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/against_speculators")
    given = parser.parse_args()
    given.out = (given.out or given.run_dir / "against_speculators").resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    given.run_dir = given.run_dir.resolve()
    return given


class Judge:
    """What one seed holds out, and how long the drafts of a drafter are there."""

    def __init__(self, given: argparse.Namespace, options: TrainOptions, facts: Any, seed: int) -> None:
        from eagle3.states.store import StateStore, load_dataset
        from eagle3.training import batches

        self.given, self.options, self.facts = given, options, facts
        self.states = given.run_dir / "02_states"
        self.layers = manifest.read(self.states)["layers"]
        self.store = StateStore(self.states, len(self.layers))
        samples = batches.read_samples(self.store, load_dataset(self.states))
        self.training, self.held_out = batches.split(samples, options.train.validation_fraction, seed)

        self.data = given.out / f"data-s{seed}"

    def write_for_peer(self) -> None:
        """Write what the peer reads: the samples in their order, those held out last, and the draft vocabulary."""
        import numpy as np
        from datasets import load_from_disk

        if (self.data / "t2d.npy").exists():
            return
        shutil.rmtree(self.data, ignore_errors=True)
        order = [sample.i for sample in (*self.training, *self.held_out)]
        load_from_disk(str(self.states)).select(order).save_to_disk(str(self.data))
        (self.data / "hidden_states").mkdir()
        for place, number in enumerate(order):
            (self.data / "hidden_states" / f"hs_{place}.safetensors").symlink_to(self.store.path(number).resolve())
        for name, mapping in zip(("d2t", "t2d"), vocab.load_mapping(self.given.run_dir / "03_vocab" / vocab.MAPPING),
                                 strict=True):
            np.save(self.data / f"{name}.npy", mapping.numpy())

    def judge(self, folder: Path) -> float:
        """Return the predicted acceptance length of an exported drafter over what was held out."""
        from eagle3.drafter import network
        from eagle3.training.trainer import Processes, Trainer

        processes = Processes.start()
        model = network.continue_from(folder, self.facts, self.layers).to(processes.device)
        trainer = Trainer(model, self.store, self.options.train, processes, [self.given.at])
        return float(trainer.validate(self.held_out)["lengths"][str(self.given.at)])


def train(given: argparse.Namespace, options: TrainOptions, judge: Judge, side: Any, seed: int) -> Path | None:
    """Train and export one drafter, where that is not done; return the export, None if something failed."""
    name = f"ours-s{seed}" if side == OURS else f"peer-{side:g}-s{seed}"
    folder, export = given.out / name, given.out / f"{name}-export"
    if (export / "vllm/model.safetensors").exists():
        return export / "vllm"
    common = ["--config", given.config, "--run-dir", str(given.run_dir)]
    with (given.out / f"{name}.log").open("w", encoding="utf-8") as log:
        def run(*command: str) -> bool:
            print("$", shlex.join(command), file=log, flush=True)
            return not subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ).returncode

        if side == OURS:
            good = run(sys.executable, "04_train.py", *common, "--out", str(folder), "--seed", str(seed),
                       *shlex.split(given.flags))
            checkpoint = folder / "checkpoints/best"
        else:
            flags = peer_flags(given, options, judge, side, seed, folder)
            good = run(sys.executable, "-m", "speculators.train", *flags)
            checkpoint = folder / "checkpoint_best"
        good = good and run(sys.executable, "05_fix_weight_keys.py", *common, "--checkpoint", str(checkpoint), "--out",
                            str(export), "--to", "vllm")
        print(f"{name}: " + ("done" if good else f"failed, see {log.name}"), file=sys.stderr, flush=True)
    return export / "vllm" if good else None


def peer_flags(given: argparse.Namespace, options: TrainOptions, judge: Judge, lr: float, seed: int, folder: Path
               ) -> list[str]:
    """Return the peer's flags: which data, as much of it as stage 04 sees, the rest its defaults."""
    data, train = judge.data, options.train
    share = (len(judge.training) + 0.5) / (len(judge.training) + len(judge.held_out))
    first = tensor_files.read_header(judge.store.path(judge.training[0].i))
    fp8 = ["--hidden-states-backend", "fp8"] if "hidden_states_scales" in first else []
    draft_vocab = tensor_files.read_header(given.run_dir / "03_vocab" / vocab.MAPPING)["d2t"].shape[0]
    return ["--speculator-type", "eagle3", "--verifier-name-or-path", options.model.path, "--data-path", str(data),
            "--d2t-path", str(data / "d2t.npy"), "--t2d-path", str(data / "t2d.npy"), "--draft-vocab-size",
            str(draft_vocab), "--target-layer-ids", *map(str, judge.layers[:-1]), *fp8, "--on-missing", "raise",
            "--total-seq-len", str(train.batch_tokens), "--train-data-ratio", repr(share), "--epochs",
            str(train.epochs), "--ttt-steps", str(train.ttt_steps), "--lr", str(lr), "--seed", str(seed), "--save-best",
            "--no-resume-from-checkpoint", "--full-attention-indices", "0", "--save-path", str(folder),
            *shlex.split(given.peer_flags)]


if __name__ == "__main__":
    sys.exit(main())
