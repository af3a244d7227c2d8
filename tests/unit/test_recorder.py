"""What the engine tells of recorded requests and to who watches, on the fake runner."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages import WATCHED_S, BlockNote, Done, Look, Recorded, Sampling, TokenOut, View
from tests.unit.engine_rig import GREEDY, Rig


class Watcher:
    """Turns a rig and keeps what is told beside tokens."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.told: dict[int, list[Recorded]] = {}
        self.views: list[View] = []

    def turn(self) -> dict[int, TokenOut]:
        outs = self.rig.turn()
        for out in outs.values():
            for handle, raw in out.recorded:
                known = self.told.setdefault(handle, [])
                known.append(msgspec.msgpack.decode(raw, type=Recorded))
            if out.view is not None:
                self.views.append(out.view)
        return outs

    def run(self) -> None:
        while self.rig.engine.has_work:
            self.turn()

    def blocks(self, handle: int) -> list[BlockNote]:
        return [note for part in self.told[handle] for note in part.blocks]


def check_record(watcher: Watcher, handle: int) -> None:
    """The steps computed every position that was not cached; draws are the tokens."""
    rig, told = watcher.rig, watcher.told[handle]
    submit = rig.submits[0, handle]
    done: Done = rig.dones[0, handle]
    number = told[0].number
    assert {part.number for part in told} == {number}
    rows: Counter[int] = Counter()
    for step in (step for part in told for step in part.steps):
        assert len(step.requests) == len(step.starts) == len(step.counts) == len(step.draws)
        assert number in step.requests
        assert step.landed_s >= step.launched_s
        for i, owner in enumerate(step.requests):
            assert step.counts[i] == 1 or i >= step.decodes
            if owner == number:
                rows.update(range(step.starts[i], step.starts[i] + step.counts[i]))
    if not done.preemptions:
        first = min(done.cached_tokens, len(submit.prompt) - 1)
        assert set(range(first, len(submit.prompt))) <= set(rows)
        assert all(rows[i] == 1 for i in range(first, len(submit.prompt)))
    draws: dict[int, list[int]] = {}
    for draw in (draw for part in told for draw in part.draws):
        assert draw.index == len(draws.setdefault(draw.choice, []))
        draws[draw.choice].append(draw.token)
    for choice in range(submit.n):
        assert draws.get(choice, []) == rig.tokens.get((0, handle, choice), [])


def tables_of(notes: list[BlockNote]) -> dict[int, dict[int, int]]:
    """Replay the events; what is freed or lost is what the table holds."""
    tables: dict[int, dict[int, int]] = {}
    for note in notes:
        table = tables.setdefault(note.choice, {})
        if note.kind in ("shared", "allocated", "copied"):
            table |= dict(enumerate(note.blocks, note.first))
        elif note.kind == "evicted":
            assert set(note.blocks) <= set(table.values()), "evicted for somebody else"
        elif note.first >= 0:
            assert [table.pop(i) for i in sorted(table)[: len(note.blocks)]] == note.blocks
        else:
            assert [table[i] for i in sorted(table)] == note.blocks, note
            table.clear()
    return tables


WINDOWS = st.sampled_from([(0,), (6,), (0, 6)])
REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 12),  # output tokens
        st.integers(1, 3),  # n
        st.booleans(),  # recorded
        st.booleans(),  # a prefix that others have
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, blocks=st.integers(16, 40), overlap=st.booleans(), windows=WINDOWS)
def test_any_mix_is_told_truly(
    requests: list[tuple[int, int, int, bool, bool]],
    blocks: int,
    overlap: bool,
    windows: tuple[int, ...],
) -> None:
    """Preemptions, forks, prefix hits, evictions: tokens are the reference's, records add up."""
    rig = Rig(blocks=blocks, overlap=overlap, windows=windows)
    watcher = Watcher(rig)
    recorded = []
    for prompt, output, n, record, common in requests:
        tokens = [7] * prompt if common else prompt
        sampling = Sampling(temperature=0.8, seed=prompt) if output % 2 else GREEDY
        handle = rig.submit(tokens, output, n=n, record=record, sampling=sampling)
        recorded += [handle] if record else []
        watcher.turn()
    watcher.run()
    rig.check_tokens()
    rig.check_idle()
    assert set(watcher.told) == set(recorded)
    for handle in recorded:
        check_record(watcher, handle)
        left = tables_of(watcher.blocks(handle))
        assert not any(left.values()), "blocks that were never given back"


def test_an_abort_gives_the_blocks_back_in_the_record() -> None:
    rig = Rig()
    watcher = Watcher(rig)
    handle = rig.submit(9, 50, record=True)
    for _ in range(4):
        watcher.turn()
    rig.abort(handle)
    watcher.run()
    assert watcher.blocks(handle)[-1].kind == "freed"
    assert not any(tables_of(watcher.blocks(handle)).values())


def test_a_refused_request_tells_nothing() -> None:
    rig = Rig(max_model_len=32)
    watcher = Watcher(rig)
    rig.submit(30, 30, record=True)
    watcher.run()
    assert not watcher.told
    assert not rig.engine.registry.recorder.active


def test_preemptions_have_their_times() -> None:
    rig = Rig(blocks=8, rows=2, prefix_caching=False)
    first = rig.submit(4, 24)
    second = rig.submit(4, 24, record=True)
    watcher = Watcher(rig)
    while rig.engine.has_work:
        rig.clock.now += 1.0
        watcher.turn()
    done = rig.dones[0, second]
    assert done.preemptions > 0
    assert done.preempted_s == sorted(done.preempted_s)
    assert rig.clock.now >= done.preempted_s[-1] > 100.0
    assert rig.dones[0, first].preempted_s == []
    assert "preempted" in {note.kind for note in watcher.blocks(second)}


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_kept_only_while_somebody_looks(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    watcher = Watcher(rig)
    recorder = rig.engine.registry.recorder
    rig.submit(5, 40)
    for _ in range(5):
        watcher.turn()
    assert not recorder.active
    assert rig.kv.evicted is None
    rig.engine.look(0, Look(states=True))
    watcher.turn()
    (view,) = watcher.views
    assert view.last_steps == []
    assert (view.running, view.waiting) == (1, 0)
    assert view.kv_used == rig.kv.used_blocks == view.states.count(2)
    for _ in range(3):
        watcher.turn()
    rig.engine.look(0, Look())
    watcher.turn()
    steps = watcher.views[1].last_steps
    assert len(steps) == 4
    assert [bool(step.landed_s) for step in steps] == [True] * 3 + [not overlap]
    rig.clock.now += WATCHED_S + 0.1
    watcher.turn()
    assert not recorder.active
    assert rig.kv.evicted is None
    watcher.run()
    rig.check_tokens()


def test_an_idle_engine_forgets_the_steps() -> None:
    rig = Rig()
    rig.engine.look(0, Look())
    rig.submit(5, 3)
    rig.run()
    recorder = rig.engine.registry.recorder
    rig.engine.idle()
    assert recorder.active, "somebody may look again"
    rig.clock.now += WATCHED_S + 0.1
    rig.engine.idle()
    assert not recorder.active


def test_two_looks_in_a_turn_lose_no_states() -> None:
    rig = Rig()
    watcher = Watcher(rig)
    rig.engine.look(0, Look(states=True))
    rig.engine.look(0, Look())
    watcher.turn()
    assert len(watcher.views) == 1
    assert watcher.views[0].states == bytes(rig.kv.size)


def test_states_tell_shared_and_reusable_blocks() -> None:
    rig = Rig()
    prompt = list(range(12))
    rig.submit(prompt, 1)
    rig.run()
    assert rig.kv.states().count(1) == rig.kv.cached_blocks == 3
    rig.submit([*prompt, 1], 20)
    rig.submit([*prompt, 2], 20)
    rig.turn()
    assert rig.kv.states().count(3) == 3
    assert rig.kv.states().count(2) == 2
