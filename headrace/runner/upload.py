"""Pieces of a checkpoint onto a device: several threads read, one stream copies.

Each thread owns two buffers of page-locked memory: while the device copies one, the thread fills
the other. So memory in flight is 2 * threads buffers, whatever the size of the model.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from headrace.runner.checkpoint import Checkpoint
from headrace.runner.pieces import Piece

Advance = Callable[[int], None]  # bytes that have been handed to the device since the last call


def upload(
    parameters: Mapping[str, Tensor],
    pieces: Sequence[Piece],
    checkpoint: Checkpoint,
    threads: int,
    advance: Advance = lambda size_bytes: None,
) -> None:
    """Fill `parameters`, all on one device or in this machine's memory, and wait until they are
    filled.

    `advance` is called from one thread at a time. Raises what the checkpoint raises.
    """
    targets = [piece.target(parameters) for piece in pieces]
    device = next((target.device for target in targets if target.is_cuda), None)
    stream = None
    if device is not None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
    size_bytes = max(target.numel() * target.element_size() for target in targets)
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    for at in range(len(pieces)):
        work.put(at)
    told = threading.Lock()

    def carry() -> None:
        # One thread a core already: torch's own threads would only compete.
        torch.set_num_threads(1)
        lane = _Lane(size_bytes, stream)
        while True:
            try:
                at = work.get_nowait()
            except queue.Empty:
                return
            lane.copy(pieces[at].read(checkpoint), targets[at])
            with told:
                advance(targets[at].numel() * targets[at].element_size())

    try:
        _run(carry, threads, work)
    finally:
        if stream is not None:  # also before buffers of a failed upload are freed
            stream.synchronize()


def _run(carry: Callable[[], None], threads: int, work: queue.SimpleQueue[int]) -> None:
    """`carry` on `threads` threads; the first error ends the others' work and is raised."""

    def guarded() -> None:
        try:
            carry()
        except BaseException:
            while not work.empty():
                try:
                    work.get_nowait()
                except queue.Empty:
                    break
            raise

    with ThreadPoolExecutor(threads, "upload") as pool:
        for future in [pool.submit(guarded) for _ in range(threads)]:
            future.result()


class _Lane:
    """One thread's two buffers. `stream` None: the target is in this machine's own memory."""

    def __init__(self, size_bytes: int, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._turn = 0
        self._buffers: list[Tensor] = []
        self._busy: list[torch.cuda.Event | None] = [None, None]
        if stream is not None:
            self._buffers = [
                torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]

    def copy(self, rows: Tensor, target: Tensor) -> None:
        """`rows`, in the target's type, to `target`; returns before the device has them."""
        if self._stream is None or not target.is_cuda:
            target.copy_(rows)
            return
        self._turn ^= 1
        busy = self._busy[self._turn]
        if busy is not None:
            busy.synchronize()  # the device still reads this buffer until then
        buffer = self._buffers[self._turn][: target.numel() * target.element_size()]
        staged = buffer.view(target.dtype).view(target.shape)
        staged.copy_(rows)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._busy[self._turn] = event
