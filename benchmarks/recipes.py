"""Ways to train a drafter, compared on one run's states: predicted acceptance length by seed, time, a table.

A recipe is a name and flags of stage 04 (a YAML file; recipes/screening.yaml has those that were asked about). Each is
trained with each seed on the same states, the same samples held out, into a folder of its own; the same command again
goes on where it was, and one more recipe or seed trains only that. The first recipe is what the others are compared
with, seed by seed: the difference is told with its standard error over seeds, and a recipe "shows" when the difference
is beyond two of them in three seeds or more.

  python benchmarks/recipes.py --config configs/smollm2-135m.yaml --run-dir runs/smollm2-135m \\
      --recipes recipes/screening.yaml --seeds 0 1 2 --jobs 4
  python benchmarks/recipes.py … --only adamw muon --limits 300 3000 30000      # a learning curve over samples

Small drafters leave most of a GPU idle: --jobs trains several at once there, whose seconds are then no measure.
"""

import argparse
import concurrent.futures
import math
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml

from eagle3.common import files, manifest, pages

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Training:
    """One training: a recipe's flags, a seed, and the samples it may use (None: all)."""

    recipe: str
    flags: tuple[str, ...]
    seed: int
    limit: int | None

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"{self.recipe}-{self.limit or 'all'}-s{self.seed}"


def main() -> int:
    """Train what is missing, print the table; exit code 1 when a training failed."""
    given = arguments()
    recipes = read_recipes(given.recipes, given.only)
    trainings = [Training(name, flags, seed, limit) for limit in given.limits
                 for seed in given.seeds for name, flags in recipes.items()]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        codes = list(pool.map(lambda each: train(given, each), trainings))
    found = {each: outcome for each in trainings if (outcome := outcome_of(given.out / each.name))}
    rows = [row(limit, name, next(iter(recipes)), found, given.at) for limit in given.limits for name in recipes]
    print(pages.text_table(["samples", "recipe", "seeds", "length at " + given.at, "difference", "shows", "loss",
                            "steps", "s"], rows))
    files.write_json(given.out / "recipes.json", [
        {"recipe": each.recipe, "flags": [*each.flags], "seed": each.seed, "limit": each.limit} | outcome
        for each, outcome in found.items()])
    return int(any(codes))


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--run-dir", type=Path, required=True, help="a run with stages 01 to 03 complete")
    parser.add_argument("--recipes", type=Path, required=True, help="YAML: name: flags of 04_train.py")
    parser.add_argument("--only", nargs="+", default=[], help="recipes to train; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limits", type=lambda text: int(text) or None, nargs="+", default=[None],
                        help="first N samples, 0 for all; several for a learning curve")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once")
    parser.add_argument("--at", default="3", help="draft tokens of the length in the table")
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/recipes")
    given = parser.parse_args()
    given.out = (given.out or given.run_dir / "recipes").resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    return given


def read_recipes(path: Path, only: list[str]) -> dict[str, tuple[str, ...]]:
    """Return flags by name, those in `only` in its order; exits when the file has another form or lacks a name."""
    known = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(known, dict) or not all(isinstance(flags, str | None) for flags in known.values()):
        sys.exit(f"{path}: expected lines NAME: FLAGS, such as  muon: --optimizer muon --lr 5e-3")
    if unknown := [name for name in only if name not in known]:
        sys.exit(f"{path} has no recipe {', '.join(unknown)}; it has {', '.join(known)}")
    return {name: tuple(shlex.split(known[name] or "")) for name in only or known}


def train(given: argparse.Namespace, training: Training) -> int:
    """Run stage 04, which does nothing where this training is complete; return its exit code."""
    limit = ["--limit", str(training.limit)] if training.limit else []
    command = [sys.executable, "04_train.py", "--config", given.config, "--run-dir", str(given.run_dir.resolve()),
               "--out", str(given.out / training.name), "--seed", str(training.seed), *limit, *training.flags]
    with (given.out / f"{training.name}.log").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ).returncode
    outcome = outcome_of(given.out / training.name)
    told = f"length {outcome['lengths'].get(given.at, math.nan):.3f}" if outcome else f"see {log.name}"
    print(f"{training.name}: exit code {code}, {told}", file=sys.stderr, flush=True)
    return code


def outcome_of(directory: Path) -> dict[str, Any] | None:
    """Return the figures of a finished training, None where it is not finished."""
    if not (directory / "manifest.json").exists() or (known := manifest.read(directory))["status"] != "complete":
        return None
    return {"lengths": known["best"]["lengths"], "loss": known["best"]["loss"], "steps": known["counts"]["done"],
            "seconds": sum(known["seconds"].values())}


def row(limit: int | None, name: str, first: str, found: dict[Training, dict[str, Any]], at: str) -> list[str]:
    """Return a recipe's row of the table."""
    mine, base = ({each.seed: outcome for each, outcome in found.items() if (each.limit, each.recipe) == (limit, one)}
                  for one in (name, first))
    if not mine:
        return [str(limit or "all"), name, "0", *["–"] * 6]
    lengths = {seed: outcome["lengths"][at] for seed, outcome in mine.items()}
    gained = [lengths[seed] - base[seed]["lengths"][at] for seed in lengths.keys() & base.keys()]
    mean, error = spread(gained)
    told = "–" if name == first or not gained else f"{mean:+.3f}" + (f" ±{error:.3f}" if error is not None else "")
    shows = "–" if name == first or len(gained) < 3 else "yes" if abs(mean) > 2 * (error or 0) else "no"
    average, ends = statistics.mean(lengths.values()), f" [{min(lengths.values()):.3f}–{max(lengths.values()):.3f}]"
    return [str(limit or "all"), name, str(len(mine)), f"{average:.3f}" + ends * (len(mine) > 1), told, shows,
            f"{statistics.mean(outcome['loss'] for outcome in mine.values()):.4f}",
            f"{statistics.mean(outcome['steps'] for outcome in mine.values()):.0f}",
            f"{statistics.mean(outcome['seconds'] for outcome in mine.values()):.0f}"]


def spread(values: list[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error; (nan, None) of nothing, no error of a single value."""
    if len(values) < 2:
        return (values[0] if values else math.nan), None
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    sys.exit(main())
