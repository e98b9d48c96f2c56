"""Every file of a finished small run, damaged in every way: the next stage refuses it by name, or nothing comes of it.

    python tests/manual/damage_sweep.py [--seeds 1] [--only 02_states]

Not part of the default tests, which take a sample: some hundred stages are started, about six seconds each. Exit
code 1 when any damage was accepted with an effect.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import damage  # noqa: E402
from support.models import make_tiny_model  # noqa: E402


def main() -> int:
    """Sweep and print a line a damage, then the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="sweeps with other bits (default: 1)")
    parser.add_argument("--only", default="", help="only files whose path begins so")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = make_tiny_model(scratch / "tiny-llama")
        run, other = (damage.finished_run(scratch / name, model, first) for name, first in (("run", 0), ("other", 40)))
        good, found = damage.expected_results(run, model, scratch), []
        for name in damage.damageable(run):
            if not name.startswith(given.only):
                continue
            for kind in damage.DAMAGES:
                for seed in range(given.seeds):
                    for outcome in damage.outcomes(run, model, other, name, kind, good, scratch, seed):
                        found.append(outcome)
                        print(f"{outcome.verdict:<15} {outcome.damage:<9} {outcome.stage[:2]} {outcome.file}: "
                              f"{outcome.words[:100]}", flush=True)
    counted = Counter(outcome.verdict for outcome in found)
    print(", ".join(f"{count} {verdict}" for verdict, count in counted.most_common()))
    return int(bool(counted.keys() - {"refused", "without effect"}))


if __name__ == "__main__":
    sys.exit(main())
