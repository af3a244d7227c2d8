"""Gauges and counters of an engine against what its clients know, whatever they do."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from headrace.observe.metrics import EngineMetrics, expose
from tests.unit.engine_rig import Rig

OWNERS = 2
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 12), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, OWNERS - 1), st.just(0), st.just(0)),
        st.tuples(st.just("turn"), st.integers(1, 4), st.just(0), st.just(0)),
    ),
    max_size=25,
)


class Watched:
    """A rig whose metrics are read after every turn."""

    def __init__(self, *, overlap: bool) -> None:
        self.rig = Rig(blocks=24, rows=4, overlap=overlap, max_queue=6, max_num_batched_tokens=24)
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics("m", 4, self.registry)
        self.rig.engine.watch(self.metrics.note)
        self.dropped: set[tuple[int, int]] = set()  # live when their owner was dropped
        self.last: dict[str, float] = {}

    def do(self, kind: str, a: int, b: int, c: int) -> None:
        """One operation, as in OPS."""
        rig = self.rig
        asked = sorted(rig.submits)
        if kind == "submit":
            rig.submit(a, b, owner=a % OWNERS, n=c)
        elif kind == "abort" and asked:
            owner, handle = asked[a % len(asked)]
            rig.abort(handle, owner)
        elif kind == "drop":
            self.dropped |= {key for key in rig.submits.keys() - rig.dones.keys() if key[0] == a}
            rig.engine.drop_owner(a)
        elif kind == "turn":
            for _ in range(a):
                rig.turn()
                self.check()

    def reasons(self) -> dict[str, int]:
        """Ends of requests by reason, as clients could count them; who was dropped, too."""
        found = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0, "refused": 0, "lost": 0})
        for key, done in self.rig.dones.items():
            ends = {end.reason for (*owned, _), end in self.rig.ends.items() if tuple(owned) == key}
            worst = [reason for reason in ("error", "abort", "length", "stop") if reason in ends]
            found[worst[0] if done.prompt_tokens else "refused"] += 1
        found["abort"] += len(self.dropped)
        return dict(found)

    def check(self) -> None:
        """What the page says is what all clients together know. Just after a turn."""
        self.metrics.update(self.rig.engine.stats())
        shown, rig = self.shown(), self.rig
        live = len(rig.submits.keys() - rig.dones.keys() - self.dropped)
        running, waiting = (shown[f"headrace_requests_{x}"] for x in ("running", "waiting"))
        assert running + waiting == live
        assert shown["vllm:num_requests_running"] == running <= 4
        assert shown["vllm:num_requests_waiting"] == waiting
        assert shown["headrace_requests_started_total"] == len(rig.submits)
        for reason, count in self.reasons().items():
            assert shown[f"headrace_requests_finished_total {reason}"] == count, reason
            if reason not in ("refused", "lost"):
                assert shown[f"vllm:request_success_total {reason}"] == count, reason
        assert shown["headrace_step_tokens_count"] == shown["headrace_steps_total"]
        assert shown["headrace_kv_blocks_used"] == rig.kv.used_blocks
        assert shown["vllm:kv_cache_usage_perc"] == rig.kv.used_blocks / rig.kv.size
        fallen = [name for name, value in self.last.items() if shown[name] < value]
        assert not fallen, "B085: counters only rise"
        rising = ("_total", "_count", "_sum")
        self.last = {k: v for k, v in shown.items() if k.split(" ")[0].endswith(rising)}

    def shown(self) -> dict[str, float]:
        """Series by name and reason; no buckets."""
        found = {}
        text = expose(self.registry).decode()
        lines = [line for line in text.splitlines() if "_bucket" not in line]
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                labels = sample.labels
                reason = labels.get("reason", labels.get("finished_reason", ""))
                found[f"{sample.name} {reason}".strip()] = sample.value
        return found


@given(ops=OPS, overlap=st.booleans())
@settings(max_examples=40, deadline=None)
def test_gauges_are_what_clients_know(ops: list[tuple[str, int, int, int]], overlap: bool) -> None:
    """B086, B048, B076: after aborts, refusals and the end of a client, and when all is over."""
    watched = Watched(overlap=overlap)
    for op in ops:
        watched.do(*op)
    watched.rig.run()
    watched.check()
    for name in ("requests_running", "requests_waiting", "kv_blocks_used"):
        assert watched.shown()[f"headrace_{name}"] == 0
    heard = sum(map(len, watched.rig.tokens.values()))
    made = watched.shown()["vllm:generation_tokens_total"]
    assert made == heard or (watched.dropped and made > heard)


def test_a_mass_cancel() -> None:
    """All at once, running and waiting: the gauges fall with the next turn."""
    watched = Watched(overlap=True)
    for _ in range(9):
        watched.do("submit", 8, 12, 1)
    watched.do("turn", 3, 0, 0)
    assert watched.shown()["vllm:num_requests_running"] == 4
    for key in list(watched.rig.submits):
        watched.rig.abort(key[1], key[0])
    watched.do("turn", 2, 0, 0)
    shown = watched.shown()
    assert shown["vllm:num_requests_running"] == shown["vllm:num_requests_waiting"] == 0
    assert shown["vllm:kv_cache_usage_perc"] == 0
    assert shown["vllm:request_success_total abort"] == 9


def test_prefix_cache_and_chunks() -> None:
    watched = Watched(overlap=False)
    for _ in range(2):
        watched.rig.submit([7] * 20, 2)
        watched.rig.run()
    watched.check()
    shown = watched.shown()
    assert shown["vllm:prompt_tokens_total"] == shown["vllm:prefix_cache_queries_total"] == 40
    assert shown["vllm:prefix_cache_hits_total"] == shown["vllm:prompt_tokens_cached_total"] == 20
    assert shown["headrace_prefill_tokens_total"] == 21, "the last token of a cached prompt"
    assert shown["vllm:iteration_tokens_total_sum"] == 23
