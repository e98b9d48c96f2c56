"""Training checkpoints: complete or not there, the newest complete one found, float32 state for exact resume.

`checkpoints/step_{n}/` holds the served form (model.safetensors in bf16, config.json) and what resuming needs
(trainer_state.safetensors: float32 weights and AdamW moments; trainer.json: counters). checksums.json is
written last and the folder gets its name by a rename, so a folder named step_{n} was complete once, and
damage since then is found by its checksums.
"""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3 import drafter as drafters
from eagle3 import files
from eagle3.errors import PreconditionError
from eagle3.log import logger
from eagle3.verifier import Verifier

STATE, COUNTERS, CHECKSUMS = "trainer_state.safetensors", "trainer.json", "checksums.json"


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by name, in a fixed order."""
    return {name: parameter for name, parameter in sorted(model.named_parameters()) if parameter.requires_grad}


def save(
    root: Path, step: int, model: Any, verifier: Verifier, optimizer: torch.optim.Optimizer, counters: dict[str, Any]
) -> Path:
    """Write `root/step_{step}` and return it; counters is JSON with at least `step` and `epoch`."""
    folder = root / f"step_{step}"
    temporary = root / f"{files.TEMPORARY_PREFIX}step_{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_file(served_tensors(model), temporary / "model.safetensors", metadata={"format": "pt"})
        files.write_json(temporary / "config.json", drafters.served_config(model, verifier))
        save_file(_state_tensors(model, optimizer), temporary / STATE)
        files.write_json(temporary / COUNTERS, counters)
        names = ("model.safetensors", "config.json", STATE, COUNTERS)
        for name in names:
            with open(temporary / name, "rb+") as file:
                os.fsync(file.fileno())
        files.write_json(temporary / CHECKSUMS, {name: files.sha256_file(temporary / name) for name in names})
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        files.fsync_directory(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in files.DISK_FULL:
            raise files.disk_full(folder) from error
        raise
    return folder


def served_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return what engines load, in bf16: trained weights and the mapping; never the verifier's own weights."""
    tensors = {name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
               for name, parameter in trainable(model).items()}
    tensors["d2t"] = model.d2t.detach().cpu().to(torch.int64)
    tensors["t2d"] = model.t2d.detach().cpu().to(torch.bool)
    return tensors


def _state_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in trainable(model).items():
        tensors[f"param/{name}"] = parameter.detach().cpu().float().contiguous()
        for key in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                tensors[f"{key}/{name}"] = optimizer.state[parameter][key].detach().cpu().float().contiguous()
    return tensors


def load(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's float32 state into model and optimizer and return its counters."""
    tensors = load_file(folder / STATE)
    counters = files.read_json(folder / COUNTERS)
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(tensors[f"param/{name}"])
            if f"exp_avg/{name}" in tensors:
                optimizer.state[parameter] = {
                    # torch counts steps in float32: exact up to 2^24
                    "step": torch.tensor(float(counters["step"])),
                    **{key: tensors[f"{key}/{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")},
                }
    return counters


def newest(root: Path) -> Path | None:
    """Return the newest checkpoint whose files have their checksums; damaged ones are named and passed over.

    Raises PreconditionError when there are checkpoints and all are damaged: training never starts from
    scratch silently.
    """
    for leftover in root.glob(files.TEMPORARY_PREFIX + "*"):
        with contextlib.suppress(OSError):
            leftover.unlink() if leftover.is_symlink() or leftover.is_file() else shutil.rmtree(leftover)
    found = sorted(root.glob("step_*"), key=lambda path: -int(path.name.removeprefix("step_")))
    for folder in found:
        damage = _damage(folder)
        if not damage:
            return folder
        logger.warning("checkpoint %s is damaged (%s); taking an older one", folder, damage)
    if found:
        raise PreconditionError(
            "every checkpoint is damaged", where=root, found=", ".join(path.name for path in found),
            fix="restore one from a copy, or start anew with --restart (moves these aside)",
        )
    return None


def _damage(folder: Path) -> str:
    try:
        checksums = files.read_json(folder / CHECKSUMS)
        wrong = [name for name, digest in checksums.items() if files.sha256_file(folder / name) != digest]
    except (OSError, PreconditionError, AttributeError) as error:
        return str(error).splitlines()[0]
    return "wrong checksum of " + ", ".join(wrong) if wrong else ""


def point_to(root: Path, name: str, folder: Path) -> None:
    """Make the link `root/name` (best, last) point to a checkpoint."""
    files.replace_symlink(root / name, folder.name)


def prune(root: Path, keep_epoch_ends: int) -> None:
    """Remove checkpoints that nothing needs: all but best, last and the newest epoch ends."""
    keep = {os.path.realpath(root / name) for name in ("best", "last") if (root / name).exists()}
    folders = sorted(root.glob("step_*"), key=lambda path: -int(path.name.removeprefix("step_")))
    epoch_ends = [path for path in folders if _is_epoch_end(path)]
    keep |= {os.path.realpath(path) for path in epoch_ends[:keep_epoch_ends]}
    for folder in folders:
        if os.path.realpath(folder) not in keep:
            doomed = root / f"{files.TEMPORARY_PREFIX}{folder.name}"
            os.rename(folder, doomed)  # a half-removed folder must not look like a checkpoint
            shutil.rmtree(doomed)


def _is_epoch_end(folder: Path) -> bool:
    try:
        return bool(files.read_json(folder / COUNTERS).get("epoch_end"))
    except PreconditionError:
        return False
