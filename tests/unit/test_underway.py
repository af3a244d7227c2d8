"""The blocks of prompts that steps in flight compute."""

from __future__ import annotations

from headrace.engine.request import Sequence
from headrace.engine.underway import Underway
from headrace.kv.cache import KVCache
from tests.unit.test_queue import sequence

PROMPT = list(range(40))


def alike(kv: KVCache, arrival: int, row: int) -> Sequence:
    made = sequence(arrival)
    made.tokens = [*PROMPT, arrival]
    made.table, made.row = kv.open("", ""), row
    return made


def test_of_several_that_compute_a_block_the_one_ahead_counts() -> None:
    kv = KVCache(40, 4)
    underway, ahead, behind = Underway(kv), alike(kv, 0, 0), alike(kv, 2, 1)
    underway.note(1, ahead, 41)
    underway.note(1, behind, 41)
    assert underway.has_ahead(alike(kv, 1, 2), 8, 4)
    assert not underway.has_ahead(alike(kv, 0, 2), 8, 4), "nobody is ahead of it"


def test_a_step_that_has_finished_is_forgotten() -> None:
    kv = KVCache(40, 4)
    underway, first, waits = Underway(kv), alike(kv, 0, 0), alike(kv, 1, 1)
    underway.note(1, first, 20)
    first.planned = 20
    underway.note(2, first, 21)
    kv.fence(1)
    underway.land()
    assert not underway.has_ahead(waits, 8, 4), "its first blocks are computed; no cache has them"
    kv.fence(2)
    underway.land()
    assert not underway._steps
