"""Does the loader of stage 04 keep up when the states are on a disk and not in memory?

Drops the files from the page cache (posix_fadvise) before each pass, and reads them

  1. as the disk gives them: whole files, as many readers as the loader has, nothing computed;
  2. as training does, checksums proved (the first epoch) and batches put together, as fast as it goes;
  3. the same for a step that takes --step-ms: which share of the time does it wait for data?

Target: waiting below 1% where the disk gives what the steps eat; else at least 90% of the disk's rate.

  python benchmarks/load_cold.py --states runs/kimi/02_states --batch-tokens 8192 --step-ms 270
  python benchmarks/load_cold.py --scratch /data --documents 400           # random states of Kimi's size, 23 GB
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

READERS = min(8, os.cpu_count() or 1)  # as Trainer has


def main() -> int:
    """Measure the three, print a JSON line; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--states", type=Path, help="a 02_states folder")
    where.add_argument("--scratch", type=Path, help="a folder of the disk in question, where random states are written")
    parser.add_argument("--documents", type=int, default=100, help="texts to write with --scratch (default: 100)")
    parser.add_argument("--document", type=int, default=1024, help="tokens of each (default: 1024)")
    parser.add_argument("--hidden", type=int, default=7168, help="hidden size of them (default: 7168)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="as of stage 04 (default: 8192)")
    parser.add_argument("--step-ms", type=float, default=270.0, help="time of a training step (default: 270)")
    given = parser.parse_args()

    import torch

    from eagle3.states.store import StateStore, load_dataset
    from eagle3.training import batches
    from eagle3.training.prefetch import Prefetcher

    if given.scratch:
        store, samples = write_states(given)
    else:
        store = StateStore(given.states)
        samples = batches.read_samples(store, load_dataset(given.states))
    packed = batches.pack(samples, given.batch_tokens, seed=0)
    paths = [store.path(sample.i) for batch in packed for sample in batch]
    total = sum(path.stat().st_size for path in paths)
    needed = total / len(packed) / given.step_ms * 1000
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def batches_of() -> Iterator[object]:
        with ThreadPoolExecutor(READERS) as readers, contextlib.closing(Prefetcher(
                packed, lambda members: batches.collate(store, members, given.batch_tokens, 3, True, device, None,
                                                        readers))) as loader:
            yield from loader

    disk, of_disk = cold(paths, lambda: bare(paths))
    loader, of_loader = cold(paths, lambda: sum(1 for _ in batches_of()))
    waited = 0.0

    def train() -> None:
        nonlocal waited
        stream = batches_of()
        next(stream)  # nothing can be loaded ahead of the first
        for _ in packed[1:]:
            time.sleep(given.step_ms / 1000)
            started = time.monotonic()
            next(stream)
            waited += time.monotonic() - started

    steps, of_steps = cold(paths, train)
    rates = {"disk_gb_s": total / disk / 1e9, "loader_gb_s": total / loader / 1e9, "needed_gb_s": needed / 1e9}
    waiting = waited / steps
    from_disk = [round(count / total, 3) for count in (of_disk, of_loader, of_steps)]
    said = {name: round(value, 3) for name, value in rates.items()} | {
        "waiting": round(waiting, 4), "read_from_disk": from_disk,
        "batches": len(packed), "bytes": total, "device": str(device)}
    print(json.dumps(said))
    if rates["disk_gb_s"] >= rates["needed_gb_s"]:
        return int(waiting >= 0.01)
    return int(rates["loader_gb_s"] < 0.9 * rates["disk_gb_s"])


def write_states(given: argparse.Namespace) -> tuple:
    """Write a store of random states; return it and its samples."""
    import numpy as np
    import torch
    from safetensors.torch import save

    from eagle3.common import files
    from eagle3.states.store import StateStore
    from eagle3.training.batches import TrainingSample

    store, samples = StateStore(given.scratch / "cold_states"), []
    store.files.mkdir(parents=True, exist_ok=True)
    for number in range(given.documents):
        generator = torch.Generator().manual_seed(number)
        states = torch.randn(given.document + 1, 4, given.hidden, generator=generator).to(torch.bfloat16)
        files.write_bytes(store.path(number), save({
            "hidden_states": states, "token_ids": torch.arange(given.document + 1)}))
        samples.append(TrainingSample(number, files.sha256_file(store.path(number)),
                                      np.arange(given.document + 1) >= given.document // 4))
    return store, samples


def bare(paths: list[Path]) -> None:
    """Read files whole, side by side, and do nothing with them."""

    def read(path: Path) -> None:
        buffer = bytearray(1 << 22)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(read, paths))


def cold(paths: list[Path], act: Callable[[], object]) -> tuple[float, int]:
    """Drop files from the cache, then act; return seconds, and the bytes that came from the disk."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not written yet stays in the cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, started = read_bytes(), time.monotonic()
    act()
    return time.monotonic() - started, read_bytes() - before


def read_bytes() -> int:
    """Return how many bytes this process has had read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.partition(":")[2] for line in lines if line.startswith("read_bytes")))


if __name__ == "__main__":
    sys.exit(main())
