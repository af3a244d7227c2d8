"""Programmatic dependent launch: a kernel's programs start while the kernel before still drains.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
Rules for a kernel launched with `launch_pdl=True`:
  every program calls `release` first, so that the next kernel may start early;
  every program calls `wait` before it reads what another kernel of the step wrote, and before it
  writes anything: then all kernels before have ended, not only the last one;
  no program ends before `wait`. Before it only what never changes (weights) may be touched, and
  what was written before a kernel that passes it on.
A kernel passes on (`pass_on`) by waiting first and releasing then: its programs release only when
all kernels before it have ended, and no program of any later kernel starts before they have. So
those may read what the kernels before it wrote, such as the columns of a step, before they wait for
what they need from the kernel right before them. They read it past the L1 cache (`.cg`), which may
hold what stood there in the step before. What it costs: the next kernel starts later, so it is for
kernels that last longer than a launch takes.
In a loop whose loads are pipelined `after_wait` is both a wait and a value: loads at addresses made
from it come after the wait whatever the compiler moves, others may be in flight before.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def release(PDL: tl.constexpr) -> None:
    """Let the next kernel's programs start as soon as there is room for them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr) -> None:
    """Until every kernel before this one has ended and its writes are seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pass_on(PDL: tl.constexpr) -> None:
    """`wait`, then `release`: later kernels may read what those before this one wrote."""
    wait(PDL)
    release(PDL)


@triton.jit
def after_wait(turn, PDL: tl.constexpr):
    """`turn` (int32, any changing value), once every kernel before this one has ended."""
    if PDL:
        return tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, $1;",
            "=r,r",
            [turn],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return turn


def supported(device: torch.device) -> bool:
    """Whether the device has it: compute capability 9.0 on."""
    if INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a launch: the kernel's PDL switch and the launch attribute."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
