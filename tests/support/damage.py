"""Damage to the files of a finished run, and what the next stage makes of it."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle3.common import files
from support.pipeline import LAYERS, manifest, run_stage, tree, write_traces

Damage = Callable[[Path, Path, random.Random], bool]


def one_bit(path: Path, _other: Path, rng: random.Random) -> bool:
    """Flip a bit anywhere; False when there is none."""
    data = bytearray(path.read_bytes())
    if not data:
        return False
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return True


def half(path: Path, _other: Path, _rng: random.Random) -> bool:
    """Cut the second half off."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return bool(data)


def torn_line(path: Path, _other: Path, _rng: random.Random) -> bool:
    """Cut the last line in its middle."""
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    if path.suffix != ".jsonl" or not lines:
        return False
    path.write_bytes(data[: len(data) - len(lines[-1]) // 2])
    return True


def zero_tail(path: Path, _other: Path, _rng: random.Random) -> bool:
    """Fill the last sixteenth with zeros, as a file system does after a power cut."""
    data = path.read_bytes()
    count = max(1, len(data) // 16)
    path.write_bytes(data[:-count] + bytes(count))
    return path.read_bytes() != data


def deleted(path: Path, _other: Path, _rng: random.Random) -> bool:
    """Remove the file."""
    path.unlink()
    return True


def swapped(path: Path, other: Path, _rng: random.Random) -> bool:
    """Put another run's file in its place; False where there is none, or an equal one."""
    if not other.is_file() or other.read_bytes() == path.read_bytes():
        return False
    shutil.copy(other, path)
    return True


DAMAGES: dict[str, Damage] = {each.__name__: each for each in (one_bit, half, torn_line, zero_tail, deleted, swapped)}
EXTRACT = ("02_extract_hidden_states.py", "--backend", "hf", "--dtype", "float32", "--max-length", 64, "--layers",
           *LAYERS.split())
VOCAB = ("03_build_vocab_mapping.py", "--draft-vocab-size", 128)
TRAIN = ("04_train.py", "--epochs", 1, "--batch-tokens", 200, "--validation-fraction", 0.2)
EXPORT = ("05_fix_weight_keys.py", "--engine-version", "0.32.0")
MEASURE = ("06_benchmark.py", "--prompts", "prompts/benchmark.jsonl", "--limit", 2, "--dry-run")
# Which stages read what: {folder: the stages after it}.
READERS = {"01_traces": (EXTRACT, VOCAB), "02_states": (TRAIN,), "03_vocab": (TRAIN,), "04_train": (EXPORT,),
           "05_export": (MEASURE,)}
# Not read by any stage after the one that wrote it.
UNREAD = (".lock", "progress.json", "metrics.jsonl", "token_counts.safetensors")


@dataclass(frozen=True)
class Outcome:
    """What became of one damage: "refused", "without effect", or "ACCEPTED", and the words that say so."""

    file: str
    damage: str
    stage: str
    verdict: str
    words: str


def finished_run(run: Path, model: Path, first: int = 0) -> Path:
    """Make a run of the first five stages on a tiny model's traces; return it."""
    folder = write_traces(run, model, count=16, first=first)
    entry = {"path": "traces.jsonl", "bytes": (folder / "traces.jsonl").stat().st_size,
             "sha256": files.sha256_file(folder / "traces.jsonl")}
    files.write_json(folder / "manifest.json", manifest(folder) | {"outputs": {"traces": entry}})
    for stage in (EXTRACT, VOCAB, TRAIN, EXPORT):
        call(stage, run, model)
    return run


def call(stage: tuple, run: Path, model: Path, *more: object, check: int | None = 0):
    return run_stage(stage[0], "--run-dir", run, "--model", model, *stage[1:], *more, check=check)


def damageable(run: Path) -> list[str]:
    """Return the files of a run that a later stage may read, relative to it; of equal ones an example."""
    found, states = [], 0
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if not path.is_file() or path.name in UNREAD or path.name.startswith(".") or name.split("/")[0] not in READERS:
            continue
        if path.is_symlink() or any(parent.is_symlink() for parent in path.parents):
            continue
        if "hidden_states" in path.parts:
            states += 1
            if states > 2:
                continue
        found.append(name)
    return found


def expected_results(run: Path, model: Path, scratch: Path) -> dict[str, dict[str, str]]:
    """Return {script: hashes of what it makes of the undamaged run}."""
    found = {}
    for stage in dict.fromkeys(stage for stages in READERS.values() for stage in stages):
        out = scratch / f"good-{stage[0]}"
        call(stage, run, model, "--out", out)
        found[stage[0]] = tree(out) if out.exists() else {}
    return found


def outcomes(run: Path, model: Path, other: Path, name: str, damage: str, good: dict[str, dict[str, str]],
             scratch: Path, seed: int = 0) -> list[Outcome]:
    """Damage one file of a copy of a run and let every stage that may read it try."""
    copy = scratch / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy, symlinks=True)
    if not DAMAGES[damage](copy / name, other / name, random.Random(f"{seed} {name} {damage}")):
        return []
    found = []
    for stage in READERS[name.split("/")[0]]:
        out = scratch / "out"
        shutil.rmtree(out, ignore_errors=True)
        result = call(stage, copy, model, "--out", out, check=None)
        words = " ".join(result.stderr.split())
        # of a manifest put in another's place, the file that it does not fit is named
        named = Path(name).name in words or (damage == "swapped" and f"/{name.split('/')[0]}/" in words)
        if result.returncode in (3, 4) and named:
            verdict = "refused"
        elif result.returncode == 0 and good[stage[0]] and tree(out) == good[stage[0]]:
            verdict = "without effect"
        else:
            verdict = "ACCEPTED" if result.returncode == 0 else f"exit {result.returncode}, not named"
        at = words.find("ERROR")
        found.append(Outcome(name, damage, stage[0], verdict, words[at : at + 160] if at >= 0 else words[-160:]))
    return found
