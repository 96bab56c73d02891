"""Host memory straight from the system, in whole pages: what is given back is gone at once.

The heap keeps large blocks that were freed below others, and torch's own allocator of pinned memory rounds every request up to a
power of two and keeps what is given back. So blocks are mapped, and where an accelerator is to copy from and to them by itself,
they are registered with CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor

LEAST_BYTES = 2**16  # what is smaller the heap serves better


class Mapped(mmap.mmap):
    """Private anonymous memory. Registered with CUDA, it is let go before it is unmapped."""

    library: Any = None
    address = 0

    def register(self, memory: Tensor, library: Any) -> None:
        code = int(library.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code != 0:
            raise RuntimeError(
                f"{memory.numel():,} bytes of host memory could not be pinned (CUDA error {code}); allow less by zerodp.Offload(host_bytes=...)"
            )
        self.library, self.address = library, memory.data_ptr()

    def __del__(self) -> None:
        if self.library is not None:
            with contextlib.suppress(Exception):  # at the end of the process CUDA may be gone, and all this with it
                self.library.cudaHostUnregister(self.address)


def mapped(nbytes: int, library: Any = None) -> Tensor:
    """[nbytes] uint8 that begins on a page and goes back to the system with its last user; registered with this library, if any.

    Raises:
        RuntimeError: the system has no more of it, or no more that can be registered.
    """
    try:
        memory = Mapped(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"no memory for {nbytes:,} bytes on the host: {error.strerror}") from error
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if library is not None:
        memory.register(tensor, library)
    return tensor


def block(nbytes: int, pin: bool) -> Tensor:
    """[nbytes] uint8; contents are arbitrary. With `pin`, an accelerator can copy from and to it by itself.

    Raises:
        RuntimeError: see `mapped`.
    """
    with torch.inference_mode(False):  # or training could not use it later
        if pin and torch.cuda.is_available():
            return mapped(nbytes, torch.cuda.cudart())
        # Tensors without memory, when a plan is simulated, are torch's to make; so is what other accelerators can copy from.
        if pin or nbytes < LEAST_BYTES or torch._C._len_torch_dispatch_stack() > 0:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        return mapped(nbytes)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, which they keep alive, for files; without a copy and without numpy."""
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")
