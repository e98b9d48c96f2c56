"""Forward passes handed from the process that runs the verifier to the stage, through shared memory.

The engine's process must do nothing but run the model: it copies what a pass gave into a slab, on a GPU in a stream of
its own into pinned memory, and goes on with the next pass. Matching, hashing and writing are the stage's. A slab is
free again when the stage has written what lies in it; with all of them full the engine waits, so that memory is bounded
by SLABS passes.

They meet at a Unix socket: the engine's side connects, sends the file descriptor of its memory, then a JSON line a
pass; the stage answers with the number of each slab that it has done with.
"""

import contextlib
import json
import mmap
import os
import queue
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SLABS = 3  # one is filled, one is copied, one is written
_ALIGNMENT = 64
_BOOKKEEPING = 64  # bytes a token beside its states: id, position, flags, and the rows of the self-check
_TENSORS = 16 << 10  # alignment of a few tensors


def slab_bytes(tokens: int, bytes_per_token: int) -> int:
    """Return what a slab takes for a pass of so many tokens, their states `bytes_per_token` each."""
    whole = tokens * (bytes_per_token + _BOOKKEEPING) + _TENSORS
    return -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE


class Sender:
    """The engine's side: owns the memory, and hands passes over in the order in which they were made."""

    def __init__(self, address: str, size: int, device: "torch.device") -> None:
        """Connect to the stage at `address` and share SLABS slabs of `size` bytes, pinned for a GPU."""
        import torch

        descriptor = os.memfd_create("eagle3-states")
        os.ftruncate(descriptor, SLABS * size)
        self._memory = torch.frombuffer(mmap.mmap(descriptor, SLABS * size), dtype=torch.uint8)
        self._size, self._stream = size, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            failed = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), SLABS * size, 0))
            if failed:
                raise MemoryError(f"{SLABS * size:,} bytes cannot be pinned (cudaHostRegister gives {failed})")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        socket.send_fds(self._socket, [json.dumps({"size": size}).encode() + b"\n"], [descriptor])
        os.close(descriptor)
        self._free: queue.Queue[int | None] = queue.Queue()
        for number in range(SLABS):
            self._free.put(number)
        self._copied: queue.Queue[tuple[Any, dict[str, Any]]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._speak, daemon=True).start()

    def send(self, tensors: "dict[str, torch.Tensor]", **about: Any) -> None:
        """Hand over the tensors of a pass; they may be changed or freed at once. Waits while no slab is free."""
        import torch

        slab = self._free.get()
        if slab is None:
            raise ConnectionError("the stage that takes the states is gone")
        places, end = {}, slab * self._size
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # None: nothing is done
            for name, tensor in tensors.items():
                tensor = tensor.contiguous()
                start = -(-end // _ALIGNMENT) * _ALIGNMENT
                end = start + tensor.nbytes
                if end > (slab + 1) * self._size:
                    raise MemoryError(f"a pass of {tensors['tokens'].numel()} tokens does not fit a slab of "
                                      f"{self._size:,} bytes")
                if stream is not None:
                    tensor.record_stream(stream)
                self._memory[start:end].copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
                places[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start)
        done = None if stream is None else stream.record_event()
        self._copied.put((done, {"slab": slab, "tensors": places} | about))

    def tell(self, **message: Any) -> None:
        """Say something between two passes."""
        self._copied.put((None, message))

    def _speak(self) -> None:
        while True:
            done, message = self._copied.get()
            if done is not None:
                done.synchronize()
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return  # _listen sees it too

    def _listen(self) -> None:
        with self._socket.makefile("r") as lines:
            for line in lines:
                self._free.put(int(line))
        self._free.put(None)


class Receiver:
    """The stage's side: a socket that one sender finds at `address`. A context manager that removes it."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="eagle3-"))  # for this user alone, of a length that sockets take
        self.address = str(self._folder / "states")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.address)
        self._listening.listen(1)
        self._connection: socket.socket | None = None
        self._memory: mmap.mmap | None = None

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._connection, self._listening):
            if each is not None:
                _close(each)
        shutil.rmtree(self._folder, ignore_errors=True)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Wait for the sender, then yield what it says until either side ends; "tensors" are views of its memory."""
        try:
            self._connection, _ = self._listening.accept()
        except OSError:
            return  # closed before anyone came
        first, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 12, 1)
        if not descriptors:
            return
        self._memory = mmap.mmap(descriptors[0], SLABS * json.loads(first)["size"])
        os.close(descriptors[0])
        with self._connection.makefile("r") as lines:
            for line in lines:
                message = json.loads(line)
                yield message | {"tensors": self._views(message.get("tensors", {}))}

    def release(self, slab: int) -> None:
        """Let the sender fill a slab again."""
        assert self._connection is not None
        try:
            self._connection.sendall(b"%d\n" % slab)
        except OSError:
            return  # it has ended, which whoever waits for it will see

    def _views(self, places: dict[str, tuple[str, list[int], int]]) -> "dict[str, torch.Tensor]":
        import math

        import torch

        views = {}
        for name, (dtype, shape, start) in places.items():
            kind = getattr(torch, dtype)
            views[name] = torch.frombuffer(self._memory, dtype=torch.uint8, offset=start,
                                           count=math.prod(shape) * kind.itemsize).view(kind).view(shape)
        return views


def _close(connection: socket.socket) -> None:
    """Close a socket, and wake a thread that reads from it or waits for someone to connect."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
