"""Stage 05's renaming against a plain copy of the same file, in turn, each synced to disk; peak memory of both.

The checkpoint has Kimi-K2.5's tensors with sizes scaled to --gb, random bytes, and an odd-sized tensor that is left
out. Then the whole stage runs once on it as a process (with its checks and checksums, which read the weights again).

  python benchmarks/export_rate.py --gb 4.5 --rounds 5
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from eagle3.common import files, tensor_files  # noqa: E402
from eagle3.drafter.checkpoint import engine_names, expected_shapes  # noqa: E402
from eagle3.drafter.flat_config import IDS  # noqa: E402

_BLOCK = 8 << 20
_KIMI = {"hidden_size": 7168, "intermediate_size": 18432, "draft_vocab_size": 32000, "vocab_size": 163840}
_KIMI_GB = 2.38  # 1,190.9 M weights in bfloat16


def main() -> int:
    """Measure, print a line for people and one of JSON; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="copies and renamings, in turn")
    parser.add_argument("--dir", default=None, help="where to work; default: the system's temporary directory")
    parser.add_argument("--target", type=float, default=1.3, help="most time of a copy")
    parser.add_argument("--target-mb", type=float, default=200.0, help="most memory of a process")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        figures = measure(Path(folder), given.gb, given.rounds)
    good = figures["ratio"] <= given.target and max(figures["renaming_mb"], figures["stage_mb"]) <= given.target_mb
    print(f"{figures['gb']:.2f} GB: copy {figures['copy_s']:.2f} s, renaming {figures['renaming_s']:.2f} s, "
          f"{figures['ratio']:.2f}x; peak memory {figures['renaming_mb']:.0f} MB; the whole stage "
          f"{figures['stage_s']:.1f} s, {figures['stage_mb']:.0f} MB", file=sys.stderr)
    print(json.dumps(figures | {"target": given.target, "met": good}))
    return 0 if good else 1


def measure(folder: Path, gigabytes: float, rounds: int) -> dict[str, float]:
    """Return medians over the rounds; one round before them fills the caches."""
    source = make_checkpoint(folder / "checkpoint", gigabytes)
    copies, renamings = [], []
    both = [(copies, copy, folder / "copy"), (renamings, rename, folder / "renamed.safetensors")]
    for number in range(rounds + 1):
        for times, action, target in both if number % 2 else reversed(both):
            target.unlink(missing_ok=True)
            os.sync()  # what was written before is no burden on this one
            times.append(seconds(action, source, target))
    renaming_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    stage_s, stage_mb = run_stage(folder)
    copy_s, renaming_s = statistics.median(copies[1:]), statistics.median(renamings[1:])
    return {"gb": source.stat().st_size / 1e9, "copy_s": copy_s, "renaming_s": renaming_s,
            "ratio": renaming_s / copy_s,
            "renaming_mb": renaming_mb, "stage_s": stage_s, "stage_mb": stage_mb}


def make_checkpoint(folder: Path, gigabytes: float) -> Path:
    """Write a checkpoint of about this size, and its verifier's config; return the file of weights."""
    scale = (gigabytes / _KIMI_GB) ** 0.5
    sizes = {name: max(64, int(value * scale) // 64 * 64) for name, value in _KIMI.items()}
    heads = max(1, int(64 * scale))
    config = sizes | {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 128,
                      "num_aux_hidden_states": 3}  # fmt: skip
    shapes = {name: shape for name, shape in expected_shapes(config).items() if name != "embed_tokens.weight"}
    types = {name: {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}.get(name, ("BF16", 2)) for name in shapes}
    header: dict[str, dict] = {}
    end = 0
    for name in sorted(shapes, key=lambda name: (-types[name][1], name)):
        size = types[name][1] * shapes[name][0] * (shapes[name][1] if len(shapes[name]) > 1 else 1)
        header[name] = {"dtype": types[name][0], "shape": shapes[name], "data_offsets": [end, end + size]}
        end += size
    folder.mkdir(parents=True)
    text = json.dumps(header).encode()
    with open(folder / tensor_files.SINGLE, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            write_data(file, name, entry["data_offsets"][1] - entry["data_offsets"][0], sizes)
        file.flush()
        os.fsync(file.fileno())
    served = config | {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, IDS: [2, 4, 5],
                       "rope_theta": 50000.0, "num_hidden_layers": 1}  # fmt: skip
    files.write_json(folder / "config.json", served)
    files.write_json(folder.parent / "verifier" / "config.json", served | {"num_hidden_layers": 8})
    return folder / tensor_files.SINGLE


def write_data(file, name: str, size: int, sizes: dict[str, int]) -> None:
    """Write a consistent mapping, or random bytes that are no NaN in bfloat16."""
    if name == "d2t":
        file.write(bytes(size))
    elif name == "t2d":
        file.write(b"\1" * sizes["draft_vocab_size"] + bytes(size - sizes["draft_vocab_size"]))
    else:
        block = bytes(value & 0x3F for value in os.urandom(1 << 16)) * (_BLOCK >> 16)
        for start in range(0, size, _BLOCK):
            file.write(block[: min(_BLOCK, size - start)])


def copy(source: Path, target: Path) -> None:
    """Copy the file as shutil does, and sync it."""
    shutil.copyfile(source, target)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Write the file anew under the engines' names, without t2d, as stage 05 does."""
    tensors = tensor_files.read_header(source)
    table = engine_names(tensors.keys() - {"t2d"}, "vllm")
    with files.replacing(target) as temporary:
        tensor_files.write(temporary, {name: tensors[key] for key, name in table.items()})


def seconds(action: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    """Return how long an action takes."""
    started = time.monotonic()
    action(source, target)
    return time.monotonic() - started


def run_stage(folder: Path) -> tuple[float, float]:
    """Run the script once; return its seconds and the peak memory of its processes in MB."""
    command = [sys.executable, str(ROOT / "05_fix_weight_keys.py"), "--model", str(folder / "verifier"), "--checkpoint",
               str(folder / "checkpoint"), "--out", str(folder / "05_export"), "--engine-version", "0.32.0"]
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(errors)
    return time.monotonic() - started, usage.ru_maxrss / 1000


if __name__ == "__main__":
    sys.exit(main())
