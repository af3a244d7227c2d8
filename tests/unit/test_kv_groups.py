"""GroupedCache: what falls out of a window is given back; a hit needs the last window alone where
layers have one. The rest of its contract is `test_cache.py`'s."""

from __future__ import annotations

import pytest

from headrace.kv.cache import Table
from headrace.kv.groups import GroupedCache
from headrace.messages import Sampling
from tests.unit.engine_rig import Rig

TOKENS = list(range(100, 200))


def filled(kv: GroupedCache, count: int) -> Table:
    """A table whose first `count` tokens were computed in one step."""
    table = kv.open("", "")
    assert kv.reserve(table, count, kv.match(table, TOKENS[:count])) is not None
    kv.commit(table, TOKENS[:count], count)
    kv.check()
    return table


def test_blocks_go_back_once_no_later_position_reads_them() -> None:
    kv = GroupedCache(16, 4, windows=[6])
    table = filled(kv, 12)
    for computed, freed in ((12, 1), (13, 2), (16, 2), (17, 3)):
        assert kv.reserve(table, computed, computed - 1) is not None
        kv.commit(table, TOKENS[:computed], computed)
        # Position `computed` reads from computed - 5 on.
        assert table.freed == freed == (computed - 5) // 4
        assert kv.used_blocks == len(table.held)
    kv.release(table, 0)
    kv.check()
    assert (kv.used_blocks, table.freed) == (0, 0)


def test_a_long_sequence_runs_in_a_small_pool() -> None:
    kv = GroupedCache(4, 4, windows=[8])
    table = kv.open("", "")
    for computed in range(1, 100):
        assert kv.reserve(table, computed, computed - 1) is not None
        kv.commit(table, TOKENS[:computed], computed)
        kv.check()
    assert kv.used_blocks <= 3


@pytest.mark.parametrize(("window", "first"), [(4, 3), (5, 2), (8, 2), (9, 1), (16, 0), (99, 0)])
def test_a_hit_needs_its_last_window_alone(window: int, first: int) -> None:
    kv = GroupedCache(16, 4, windows=[window])
    kv.release(filled(kv, 16), 0)
    again = kv.open("", "")
    assert kv.match(again, TOKENS[:18]) == 16
    assert (again.freed, len(again.held)) == (first, 4 - first)
    kv.check()
    kv.release(again, 0)
    gone = kv.open("", "")  # what lies before the window is handed out to others
    blocks = 16 - (4 - first)
    assert kv.probe(gone, [], 4 * blocks) == blocks
    assert kv.reserve(gone, 4 * blocks, 0) is not None
    assert kv.match(again, TOKENS[:18]) == 16
    kv.check()


def test_a_hole_in_the_window_is_no_hit() -> None:
    kv = GroupedCache(8, 4, windows=[8])
    table = filled(kv, 8)
    kv.release(table, 0)
    other = kv.open("", "")
    assert kv.reserve(other, 4 * 7, 0) is not None  # the tail of the released one is evicted first
    again = kv.open("", "")
    assert kv.match(again, TOKENS[:8]) == 4
    assert again.freed == 0


def test_a_fork_holds_what_its_twin_holds() -> None:
    kv = GroupedCache(8, 4, windows=[5])
    table = filled(kv, 14)
    twin = kv.fork(table)
    assert (twin.freed, twin.held) == (table.freed, table.held)
    assert twin.freed == 2
    assert set(twin.blocks) == set(twin.held), "ids of blocks that others may have are not named"
    kv.check()
    kv.release(table, 0)
    kv.commit(twin, TOKENS[:14], 14)
    kv.release(twin, 0)
    kv.check()
    assert kv.used_blocks == 0


def test_an_engine_gives_memory_back_while_sequences_run() -> None:
    """Two sequences of 60 tokens in a pool of 72: without a window they would take turns."""
    held = []
    for window in (0, 8):
        rig = Rig(18, 4, 2, windows=(window,), max_model_len=64)
        for _ in range(2):
            rig.submit(20, 40, sampling=Sampling(temperature=0.0))
        most = 0
        while len(rig.dones) < 2:
            rig.turn()
            most = max(most, rig.kv.used_blocks)
        held.append((most, sum(done.preemptions for done in rig.dones.values())))
    assert held[0][0] == 18
    assert held[0][1] > 0
    assert held[1] == (6, 0), "three blocks hold a window, and nobody is preempted"


def test_a_mixed_hit_needs_all_of_the_one_and_the_last_window_of_the_other() -> None:
    kv = GroupedCache(16, 4, windows=[0, 6])
    kv.release(filled(kv, 16), 0)
    again = kv.open("", "")
    assert kv.match(again, TOKENS[:18]) == 16
    assert again.gone == [0, 2]
    kv.check()
    kv.release(again, 0)
    # 8 of 16 blocks are free of content; what fell out of the window goes next.
    other = kv.open("", "")
    assert kv.reserve(other, 4 * 9, 0, 1) is not None
    assert kv.evicted is None
    assert kv.match(kv.open("", ""), TOKENS[:12]) == 0, "the window's blocks before it are gone"
    assert kv.match(again, TOKENS[:18]) == 16
    kv.check()


def test_windows_get_room_as_a_prompt_goes_on() -> None:
    """A prompt of 60 tokens in three groups takes 15 blocks, and a window and a chunk twice."""
    kv = GroupedCache(26, 4, windows=[0, 6, 6])
    table = kv.open("", "")
    need = kv.probe(table, TOKENS[:60], 60, stepwise=True)
    assert need == kv.most_held(15) == 15 + 2 * 4
    assert kv.reserve(table, 60, 0, 1) is not None
    assert (kv.used_blocks, kv.writable(table), kv.claim(table, 60)) == (15 + 2, 4, need - 17)
    assert kv.reach(table, 0) == 4 + 9 // 2 * 4
    assert kv.reach(table, 2) == 4 + 3 // 2 * 4
    for computed in range(10, 61, 10):
        assert kv.reserve(table, computed, computed - 10) is not None
        kv.commit(table, TOKENS[:60], computed)
        kv.check()
    assert table.size <= need
    assert kv.claim(table, 60) == need - table.size
    assert kv.match(kv.open("", ""), TOKENS[:60]) == 60


@pytest.mark.parametrize("windows", [(0, 7, 7), (0, 0, 5), (9, 3)])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_longest_sequence_fits_alone(windows: tuple[int, ...], overlap: bool) -> None:
    """As the arithmetic says, and its neighbour that comes between makes it no worse."""
    rig = Rig(40, 4, 2, windows=windows, overlap=overlap, max_num_batched_tokens=9)
    longest = rig.kv.longest_tokens
    for prompt in (longest // 2, 8, longest - 1):
        rig.submit(prompt, longest - prompt + 1)
    over = rig.submit(5, longest)  # and where every layer has a window it does not matter
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    errors = {handle: done.error for (_, handle), done in rig.dones.items() if done.error}
    assert errors == ({over: "context_length_exceeded"} if 0 in windows else {})
