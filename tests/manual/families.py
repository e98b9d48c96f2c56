"""Shows on a real vLLM which families of verifiers work: states, probabilities, a start with a drafter.

    python tests/manual/families.py --work /tmp/families
    python tests/manual/families.py --work /tmp/families --dtype bfloat16 granite gemma3

Not part of the default tests: two engines a family, one after another (two minutes a family on two CPU cores). For
each family a tiny random model is captured by vLLM and by transformers in float32, its log-probabilities are compared
with the head that stage 02 and 04 use, and vLLM generates with an untrained drafter. Prints a line a
family for the table in docs/verifiers.md; --work keeps models, logs and results.json. Exit code 1 if any family fails.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import family_engine  # noqa: E402
from support.families import FAMILIES  # noqa: E402


def attempt(name: str, work: Path, dtype: str) -> dict:
    """Try one family; what fails is named and the rest still tried."""
    shutil.rmtree(work, ignore_errors=True)
    model = family_engine.build(name, work / "model")
    found: dict = {"family": name, "dtype": dtype}
    try:
        captured = family_engine.states(model, work, "vllm", dtype)
        store, bound = captured.pop("store"), captured.pop("bound")
        found |= captured | {"good": captured["logprob_difference"] <= bound}
        if name != "kimi-k2.5":  # transformers 5.19 does not load the names of published checkpoints
            reference = family_engine.states(model, work, "hf", "float32")
            found["states_error"] = round(family_engine.error_of(store, reference["store"]), 6)
    except Exception as error:  # noqa: BLE001 - the table says what it was
        found["states"] = f"{type(error).__name__}: {error}"
    try:
        found |= family_engine.serve(model, work, dtype)
    except Exception as error:  # noqa: BLE001
        found["serving"] = f"{type(error).__name__}: {error}"
    return found


def main() -> int:
    """Try the families named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*FAMILIES, []], help="families; default: all")
    parser.add_argument("--work", type=Path, required=True, help="folder for models, logs and results.json")
    parser.add_argument("--dtype", default="float32", help="of the engine")
    options = parser.parse_args()
    results = []
    for name in options.names or FAMILIES:
        results.append(attempt(name, options.work / name, options.dtype))
        print(json.dumps(results[-1]), flush=True)
        options.work.mkdir(parents=True, exist_ok=True)
        (options.work / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return int(any("states" in result or "serving" in result or not result["good"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
