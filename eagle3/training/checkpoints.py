"""Training checkpoints: complete or not there, the newest complete one found, float32 state for exact resume.

`checkpoints/step_{n}/` holds the served form (model.safetensors in bf16, config.json) and what resuming needs
(trainer_state.safetensors: float32 weights, and the optimizer's moments as it has them; trainer.json: counters).
checksums.json is written last and the folder gets its name by a rename, so a folder named step_{n} was complete once,
and damage since then is found by its checksums.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle3.common import files, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.drafter import network as drafters
from eagle3.drafter.checkpoint import CHECKSUMS, TRAINING
from eagle3.drafter.verifier import Verifier

STATE, COUNTERS = "trainer_state.safetensors", TRAINING
# In the order in which the safetensors library lays tensors out.
_TYPES = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.bool: "BOOL"}
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # AdamW's two, Muon's one
_FOLDER = re.compile(r"step_(0|[1-9][0-9]*)")  # what was copied by hand beside them is left alone
Part = tuple[str, torch.Tensor, Callable[[], torch.Tensor]]  # name, a tensor of that shape and type, how it is made


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by name, in a fixed order."""
    return {name: parameter for name, parameter in sorted(model.named_parameters()) if parameter.requires_grad}


def save(
    root: Path, step: int, model: Any, verifier: Verifier, optimizer: torch.optim.Optimizer, counters: dict[str, Any],
    *, writes: bool = True,
) -> Path:
    """Write `root/step_{step}` and return it; counters is JSON with at least `step` and `epoch`.

    Processes that share the weights all call it, one of them with `writes`: tensors are put together one by one.
    """
    folder = root / f"step_{step}"
    if not writes:
        for tensors in (_served(model), _state(model, optimizer)):
            for _, _, make in tensors:
                make()
        return folder
    temporary = root / f"{files.TEMPORARY_PREFIX}step_{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write(temporary / "model.safetensors", _served(model), {"format": "pt"})
        files.write_json(temporary / "config.json", drafters.served_config(model, verifier))
        _write(temporary / STATE, _state(model, optimizer), {})
        files.write_json(temporary / COUNTERS, counters)
        names = ("model.safetensors", "config.json", STATE, COUNTERS)
        for name in names:
            with open(temporary / name, "rb+") as file:
                files.fsync(file.fileno())
        files.write_json(temporary / CHECKSUMS, {name: files.sha256_file(temporary / name) for name in names})
        old = root / f"{files.TEMPORARY_PREFIX}old-{folder.name}"
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():  # the same step was saved before its validation: it may be the only checkpoint
            os.rename(folder, old)
        os.rename(temporary, folder)  # killed just before, `newest` does it
        files.fsync_directory(root)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if not folder.exists():
            with contextlib.suppress(OSError):  # where there was one
                os.rename(root / f"{files.TEMPORARY_PREFIX}old-{folder.name}", folder)
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in files.DISK_FULL:
            raise files.disk_full(folder) from error
        raise
    return folder


def served_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return what engines load, in bf16: trained weights and the mapping (none of a whole vocabulary); never the
    verifier's own weights."""
    return {name: make() for name, _, make in _served(model)}


def _served(model: Any) -> list[Part]:
    mapping = {name: getattr(model, name) for name in ("d2t", "t2d") if getattr(model, name) is not None}
    return _ordered([*(_part(name, parameter, torch.bfloat16) for name, parameter in trainable(model).items()),
                     *(_part(name, tensor, tensor.dtype) for name, tensor in mapping.items())])


def _state(model: Any, optimizer: torch.optim.Optimizer) -> list[Part]:
    parts = []
    for name, parameter in trainable(model).items():
        parts.append(_part(f"param/{name}", parameter, torch.float32))
        parts += [_part(f"{key}/{name}", optimizer.state[parameter][key],
                        optimizer.state[parameter][key].dtype)
                  for key in _MOMENTS if key in optimizer.state.get(parameter, {})]
    return _ordered(parts)


def _ordered(parts: list[Part]) -> list[Part]:
    """Return parts in the order of the file, which is also the order in which processes put them together."""
    return sorted(parts, key=lambda part: (list(_TYPES).index(part[1].dtype), part[0]))


def _part(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Part:
    def make() -> torch.Tensor:
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        return whole.to("cpu", dtype).contiguous()

    return name, torch.empty(tensor.shape, dtype=dtype, device="meta"), make


def _write(path: Path, parts: list[Part], metadata: dict[str, str]) -> None:
    """Write a safetensors file, byte for byte the library's own, with one tensor in memory at a time."""
    header = {name: (_TYPES[like.dtype], like.shape, like.nbytes) for name, like, _ in parts}
    with open(path, "wb") as file:
        file.write(tensor_files.make_header(header, metadata))
        for _, _, make in parts:
            file.write(make().reshape(-1).view(torch.uint8).numpy().data)


def load(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's float32 state into model and optimizer and return its counters."""
    counters = files.read_json(folder / COUNTERS)
    with torch.no_grad(), safe_open(folder / STATE, framework="pt") as file:
        saved = set(file.keys())

        def own(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
            whole = file.get_tensor(name).to(parameter.device)
            if isinstance(parameter, DTensor):  # its rows of it, without asking other processes
                return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            return whole.clone()

        for name, parameter in trainable(model).items():
            parameter.copy_(own(f"param/{name}", parameter))
            if moments := {key: own(f"{key}/{name}", parameter) for key in _MOMENTS if f"{key}/{name}" in saved}:
                # torch counts steps in float32: exact up to 2^24; Muon does not count
                step = torch.tensor(float(counters["step"] - counters.get("skipped_steps", 0)),
                                    device=parameter.device)
                optimizer.state[parameter] = moments | ({"step": step} if "exp_avg" in moments else {})
    return counters


def folders(root: Path) -> list[Path]:
    """Return the checkpoints in `root`, the newest first: folders named step_{n}, and nothing else that lies there."""
    found = [path for path in root.glob("step_*") if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def newest(root: Path) -> Path | None:
    """Return the newest checkpoint whose files have their checksums; damaged ones are named and passed over.

    Raises PreconditionError when there are checkpoints and all are damaged: training never starts from
    scratch silently.
    """
    for leftover in sorted(root.glob(files.TEMPORARY_PREFIX + "*"), reverse=True):  # step_n before old-step_n
        final = root / leftover.name.removeprefix(files.TEMPORARY_PREFIX).removeprefix("old-")
        if _FOLDER.fullmatch(final.name) and not final.exists() and not _damage(leftover):
            os.rename(leftover, final)
            continue
        with contextlib.suppress(OSError):
            leftover.unlink() if leftover.is_symlink() or leftover.is_file() else shutil.rmtree(leftover)
    found = folders(root)
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
    """Let `root/name` (best, last) lead to a checkpoint; `files.followed` returns it."""
    files.point(root / name, folder.name)


def prune(root: Path, keep_epoch_ends: int, keep_every: int | None = None) -> None:
    """Remove checkpoints that nothing needs: all but best, last, the newest epoch ends, and each `keep_every` steps."""
    keep = {os.path.realpath(files.followed(root / name)) for name in ("best", "last")}
    found = folders(root)
    epoch_ends = [path for path in found if _is_epoch_end(path)]
    keep |= {os.path.realpath(path) for path in epoch_ends[:keep_epoch_ends]}
    keep |= {os.path.realpath(path) for path in found if keep_every and _step(path) % keep_every == 0}
    for folder in found:
        if os.path.realpath(folder) not in keep:
            doomed = root / f"{files.TEMPORARY_PREFIX}old-{folder.name}"
            os.rename(folder, doomed)  # a half-removed folder must not look like a checkpoint
            shutil.rmtree(doomed)


def _is_epoch_end(folder: Path) -> bool:
    try:
        return bool(files.read_json(folder / COUNTERS).get("epoch_end"))
    except PreconditionError:
        return False
