"""What requests are billed is what the device worked, measured by other means: processor time of
the whole process, and on a GPU events of our own around each step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from headrace.backends.choose import settled
from headrace.engine.loop import Engine
from headrace.engine.protocol import Capacity, Masks, Runner, Ticket
from headrace.launch import make_cache
from headrace.messages import Abort, Done, Sampling, StepPlan, StepResult, Submit
from headrace.sources.files import ModelFiles
from tests.devices import load, settings_for

# Steps of some milliseconds on a processor, of one on a GPU: what surrounds them does not count.
WIDTHS = {"cpu": (512, 6), "native": (512, 6), "cuda": (2560, 16)}
SIZES = {"kv_blocks": 160, "max_num_seqs": 8, "max_num_batched_tokens": 192, "threads": 1}


def config(hidden: int, layers: int) -> dict[str, Any]:
    """Of a Llama with random weights."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048,
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip


class ProcessorTime:
    """Seconds that all threads of this process computed, from a step's launch to its result."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    def begin(self) -> float:
        return time.process_time()

    def queued(self, began: float) -> float:
        return began

    def end(self, began: float) -> None:
        self.busy_s += time.process_time() - began


class Events:
    """Seconds between two events of our own, before and after all that a step queues."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.busy_s = runner, 0.0

    def _record(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with self._runner._forward.on_stream():
            event.record()
        return event

    def begin(self) -> Any:
        return self._record()

    def queued(self, began: Any) -> Any:
        return began, self._record()

    def end(self, events: Any) -> None:
        began, ended = events
        ended.synchronize()
        self.busy_s += began.elapsed_time(ended) / 1e3


class Timed:
    """A runner whose steps are timed from outside."""

    def __init__(self, runner: Runner, clock: Any) -> None:
        self._runner, self._clock = runner, clock

    @property
    def capacity(self) -> Capacity:
        return self._runner.capacity

    def launch(self, plan: StepPlan) -> Ticket:
        began = self._clock.begin()
        return TimedTicket(self._runner.launch(plan), self._clock, began)

    def counters(self) -> Mapping[str, int]:
        return self._runner.counters()

    def idle(self) -> bool:
        return self._runner.idle()

    def close(self) -> None:
        self._runner.close()


class TimedTicket:
    """One of its steps."""

    def __init__(self, ticket: Ticket, clock: Any, began: Any) -> None:
        self._ticket, self._clock, self._mark = ticket, clock, began

    def likely(self) -> Sequence[int]:
        return self._ticket.likely()

    def finish(self, masks: Masks | None = None) -> None:
        self._ticket.finish(masks)
        self._mark = self._clock.queued(self._mark)

    def result(self) -> StepResult:
        result = self._ticket.result()
        self._clock.end(self._mark)
        return result


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Engine, Any]]:
    def make(backend: str) -> tuple[Engine, Any]:
        folder = tmp_path_factory.mktemp("busy")
        (folder / "config.json").write_text(json.dumps(config(*WIDTHS[backend])))
        fields = {"load_format": "dummy", **SIZES}
        runner = load(backend, ModelFiles("busy", "hf", folder), **fields)
        clock = Events(runner) if backend == "cuda" else ProcessorTime()
        kv = make_cache(runner.capacity, prefix_caching=True)
        settings = settled(settings_for(backend, **fields))
        return Engine(settings, kv, Timed(runner, clock), overlap=backend == "cuda"), clock

    return make


def test_the_records_add_up_to_the_time_that_others_measure(
    backend: str, engine_of: Callable[[str], tuple[Engine, Any]]
) -> None:
    """Prompts of many lengths in chunks, decodes, a cached prompt, and aborts on the way."""
    engine, clock = engine_of(backend)
    dones: list[Done] = []

    def turn() -> None:
        for out in engine.turn().values():
            dones.extend(out.dones)

    greedy, handles = Sampling(temperature=0.0), iter(range(1, 100))
    for length in (15, 300, 100, 450, 190, 300):
        prompt = [(7 * i + length) % 2048 for i in range(length)]
        engine.submit(0, Submit(next(handles), prompt, 24, greedy))
    for _ in range(6):
        turn()
    engine.abort(0, Abort(2))
    engine.submit(0, Submit(next(handles), [9] * 270, 200, greedy))
    for _ in range(12):
        turn()
    engine.abort(0, Abort(7))  # its row is in flight where steps overlap
    while engine.has_work:
        turn()
    engine.close()
    assert len(dones) == 7
    owed_s = sum(done.compute_s for done in dones)
    assert min(done.compute_s for done in dones) > 0
    assert owed_s == pytest.approx(engine.meter.busy_fs / 1e15, rel=0.02)
    assert owed_s == pytest.approx(clock.busy_s, rel=0.02)
