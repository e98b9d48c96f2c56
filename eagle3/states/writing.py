"""Writing captured samples: hs_{i}.safetensors straight from the memory in which the states arrived.

A file holds token_ids [T] int64 and hidden_states [T, slots, H], fp8 with hidden_states_scales [T, slots, 1] float32.
The bytes are those of `safetensors.torch.save`: wide types first, then by name.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import files, tensor_files
from eagle3.states.encoding import SCALES

if TYPE_CHECKING:
    import torch

THREADS = 8
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int64": "I64"}


class Writer:
    """Writes samples to hs_{i}.safetensors in threads; hashing and writing leave the interpreter free."""

    def __init__(self, directory: Path, metadata: dict[str, str]) -> None:
        self.directory, self.metadata = directory, metadata
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="states")

    def submit(self, number: int, token_ids: "torch.Tensor", pieces: "list[dict[str, torch.Tensor]]",
               ) -> "Future[dict[str, Any]]":
        """Start writing a sample; the future gives its entry, or a PreconditionError such as a full disk.

        Args:
            token_ids: [T] int64.
            pieces: its states in order, each {"states": [t, slots, H], "finite": [t, slots] bool, with fp8 "scales"}.
        """
        return self._pool.submit(self._write, number, token_ids, pieces)

    def settle(self) -> None:
        """Make the names of all files durable that were written so far: once for many, before an index names them."""
        files.fsync_directory(self.directory)

    def close(self) -> None:
        """Finish what was submitted."""
        self._pool.shutdown()

    def _write(self, number: int, token_ids: "torch.Tensor", pieces: "list[dict[str, torch.Tensor]]") -> dict[str, Any]:
        import torch

        whole = {name: torch.cat([piece[name] for piece in pieces]) if len(pieces) > 1 else pieces[0][name]
                 for name in pieces[0]}
        if not whole["finite"].all():
            counts = enumerate((~whole["finite"]).sum(0).tolist())
            slots = {slot: count for slot, count in counts if count}
            return {"i": number, "error": f"NaN or Inf: in so many of {len(token_ids)} tokens, by layer slot: {slots}"}
        tensors = {"token_ids": token_ids, "hidden_states": whole["states"]}
        if "scales" in whole:
            tensors = {"token_ids": token_ids, SCALES: whole["scales"], "hidden_states": whole["states"]}
        header = tensor_files.make_header(
            {name: (_NAMES[str(tensor.dtype).removeprefix("torch.")], tensor.shape, tensor.nbytes)
             for name, tensor in tensors.items()}, self.metadata)
        parts: list[bytes | memoryview] = [header]
        parts += [memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                  for tensor in tensors.values()]
        digest = hashlib.sha256()
        files.write_parts(self.directory / f"hs_{number}.safetensors", parts, digest.update)
        return {"i": number, "tokens": len(token_ids), "bytes": sum(len(part) for part in parts),
                "sha256": digest.hexdigest()}
