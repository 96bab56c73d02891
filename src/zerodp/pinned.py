"""Host memory that an accelerator can copy from and to by itself: pinned, to the page, for as long as somebody has it.

torch's own allocator of pinned memory rounds every request up to a power of two, and keeps what is given back. So where there is
CUDA, plain memory is registered with it, and goes back to the system with its last user.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch
from torch import Tensor


class Registered(mmap.mmap):
    """Anonymous memory that CUDA's runtime has locked into its place; it is let go before it is unmapped."""

    library: Any = None
    address = 0

    def register(self, library: Any) -> Tensor:
        """All of it, uint8; the tensor's storage keeps it alive.

        Raises:
            RuntimeError: the system allows no more of it.
        """
        memory = torch.frombuffer(self, dtype=torch.uint8)
        code = int(library.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code != 0:
            raise RuntimeError(
                f"{memory.numel():,} bytes of host memory could not be pinned (CUDA error {code}); allow less by zerodp.Offload(host_bytes=...)"
            )
        self.library, self.address = library, memory.data_ptr()
        return memory

    def __del__(self) -> None:
        if self.library is not None:
            with contextlib.suppress(Exception):  # at the end of the process CUDA may be gone, and all this with it
                self.library.cudaHostUnregister(self.address)


def pinned(nbytes: int) -> Tensor:
    """[nbytes] uint8 that begins on a page; contents are arbitrary."""
    with torch.inference_mode(False):  # or training could not use it later
        if torch.cuda.is_available():
            return Registered(-1, nbytes).register(torch.cuda.cudart())
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
