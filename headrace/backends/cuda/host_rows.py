"""Tables in this machine's memory of which kernels read rows, over the link, where they lie.

Page-locked pages have one address for processor and GPU. torch's own allocator of such memory takes
the next power of two, 8 GiB for 4.4; these are locked as they are.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html (cudaHostRegister)
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ModelError

_PORTABLE_AND_MAPPED = 3


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that kernels may read as well. Raises ModelError where the system refuses."""
    size_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child that forks off to compile would get a copy: locked pages are never shared.
    pages.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    address = memory.ctypes.data
    failed = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE_AND_MAPPED))
    if failed:
        raise ModelError(
            f"cannot lock {size_bytes / 2**30:.1f} GiB of memory for rows that the GPU reads: "
            f"CUDA error {failed}"
        )
    weakref.finalize(memory, _release, address).atexit = False  # before the pages go
    return torch.from_numpy(memory).view(dtype).view(shape)


def _release(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
