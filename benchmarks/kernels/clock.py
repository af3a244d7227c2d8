"""How long a sequence of launches takes on the card: replays of one CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

Clock = Callable[[Callable[[], Any], int], float]  # launches, replays -> microseconds


def graph_us(launches: Callable[[], Any], replays: int) -> float:
    """Median of the replays, in microseconds. The launches run once before they are captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    graph.replay()
    torch.cuda.synchronize()
    times_ms: list[float] = []
    for _ in range(replays):
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times_ms.append(begun.elapsed_time(ended))
    return statistics.median(times_ms) * 1000
