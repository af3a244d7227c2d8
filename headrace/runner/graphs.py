"""The CUDA graphs of one model: those that the start needs, and others when there is time.

A graph that is not there yet costs nothing but speed: its step is padded to the next one that is
there, or launched call by call. It is captured while there is nothing to do, one a call of
`capture_next`; or, where a device never rests, before the step that would miss it for the `OFTEN`th
time (`RARELY`th, where another stands in).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

log = logging.getLogger(__name__)

# Steps of one size that lose about what a capture takes, some 50 ms:
OFTEN = 4  # launched call by call
RARELY = 16  # padded to a larger graph
Way = Literal["alone", "mixed", "crowd", "eager"]  # how a step is run: see `runner.forward`
Key = tuple[Way, int]  # and its tokens


class Graphs:
    """Graphs by key; all share the memory of the one captured first.

    keys: all there may be, in the order of their captures: the one that needs most memory first.
    work(way, tokens) queues what a graph holds; load(way, tokens) queues each of its kernels at
    least once, for none may come to the device while a graph is recorded; pad(way, tokens) comes
    before both and lets them find padding alone, so that nothing changes that anybody reads later.
    Without a `stream` there are no graphs. Everything is called on that stream, by one thread.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream | None,
        keys: Sequence[Key],
        pad: Callable[[Way, int], None],
        load: Callable[[Way, int], None],
        work: Callable[[Way, int], None],
    ) -> None:
        self._stream, self._pad, self._load, self._work = stream, pad, load, work
        self._keys = list(keys)
        self._graphs: dict[Key, Any] = {}
        self._put_off: list[Key] = []
        self._missed: Counter[Key] = Counter()
        self._pool: Any = None

    @property
    def planned(self) -> int:
        """Graphs there are when all are captured."""
        return len(self._keys)

    @property
    def captured(self) -> int:
        """Graphs there are."""
        return len(self._graphs)

    def capture(self, first: int) -> None:
        """Capture the first so many; the others are put off. Raises what a capture raises."""
        if self._stream is None:
            return
        for key in self._keys[:first]:
            self._capture(key)
        self._put_off = self._keys[first:]

    def capture_next(self) -> bool:
        """Capture one that was put off; False if there is none. Waits for the device.

        Needs: nothing that was queued is still to be followed by work that reads the step's
        columns or buffers, such as its draws.
        """
        if not self._put_off:
            return False
        self._try(self._put_off[0])
        return True

    def expect(self, way: Way, tokens: int, larger: Sequence[int] = ()) -> int:
        """Tokens to pad the next step to, which would be `tokens`. Call before its columns are
        written.

        That is `tokens` where that graph is there; else the first of `larger`, ascending, whose
        graph is; else `tokens`, call by call. Needs: as `capture_next`.
        """
        key: Key = (way, tokens)
        if key in self._graphs:
            return tokens
        stand_in = next((size for size in larger if (way, size) in self._graphs), None)
        if key in self._put_off:
            self._missed[key] += 1
            if self._missed[key] >= (OFTEN if stand_in is None else RARELY):
                self._try(key)
        return tokens if stand_in is None or key in self._graphs else stand_in

    def run(self, way: Way, tokens: int) -> None:
        """Replay the graph, or queue what it would hold."""
        graph = self._graphs.get((way, tokens))
        if graph is None:
            self._work(way, tokens)
        else:
            graph.replay()

    def _try(self, key: Key) -> None:
        """Capture one that was put off. Where another program has taken the memory that was
        reserved for it, steps go on call by call."""
        self._put_off.remove(key)
        try:
            self._capture(key)
        except torch.OutOfMemoryError as error:
            log.warning(
                "no memory for %d of %d graphs: steps of their sizes are launched call by call: %s",
                1 + len(self._put_off),
                self.planned,
                error,
            )
            self._put_off = []

    def _capture(self, key: Key) -> None:
        self._pad(*key)
        self._load(*key)
        self._graphs[key] = self._record(key)

    def _record(self, key: Key) -> Any:
        """The graph of `key`; nothing of it runs. Work of other threads may go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            self._work(*key)
        self._pool = graph.pool()
        return graph

    def close(self) -> None:
        """Drop the graphs. The device must be done with them."""
        self._graphs.clear()
        self._put_off = []
