"""Masks of a step on their way to a GPU, beside the stream that computes the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.backends.cuda.upload import Upload
from headrace.engine.protocol import Masks

_BUFFERS = 2  # a step's masks arrive while those of the step before may still be read


class MaskUpload:
    """Room for a mask of each draw. The copy has a stream of its own, so it does not wait for the
    forward pass that the caller's stream is busy with."""

    def __init__(self, draws: int, vocab: int, device: torch.device) -> None:
        words = -(-vocab // 32)
        self._buffers = [
            torch.zeros((draws, words), dtype=torch.int32, device=device) for _ in range(_BUFFERS)
        ]
        self._upload = Upload((draws, words), device)
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._read = [torch.cuda.Event() for _ in range(_BUFFERS)] if cuda else []
        self._copied = torch.cuda.Event() if cuda else None
        self._at = 0

    @property
    def current(self) -> Tensor:
        """[draws, words] int32: what was sent last."""
        return self._buffers[self._at]

    def send(self, masks: Masks) -> None:
        """Copy the masks; what the caller's stream does from now on sees them in `current`."""
        count = len(masks.draws)
        self._at = (self._at + 1) % _BUFFERS
        target = self.current
        assert masks.bits.shape == (count, target.shape[1]), "a mask has a bit for each token"
        self._upload.slot()[:count] = masks.bits
        with self._beside():
            self._upload.send(target, count)
        if self._copied is not None:
            torch.cuda.current_stream(target.device).wait_event(self._copied)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None or self._copied is None:
            yield
            return
        self._stream.wait_event(self._read[self._at])
        with torch.cuda.stream(self._stream):
            yield
            self._copied.record()

    def read(self) -> None:
        """The caller's stream has queued all that reads `current`."""
        if self._read:
            self._read[self._at].record()

    @property
    def size_bytes(self) -> int:
        """Device memory."""
        return sum(buffer.numel() * 4 for buffer in self._buffers)
