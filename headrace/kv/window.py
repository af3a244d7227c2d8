"""WindowCache: the KV memory of a model whose layers all see their newest tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.kv.cache import KVCache, Table


class WindowCache(KVCache):
    """One KV group of layers with a sliding window: a query reads itself and the `window` - 1
    tokens before it.

    A table gives blocks back as soon as they are out of the window of every position that is still
    to be computed. No fence is needed for that: steps in flight compute positions from the
    committed ones on, and so read none of these blocks. What was given back can be hit until it is
    handed out again.

    A prefix is hit where the blocks of its last window are cached, whatever became of those before.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        *,
        window: int,
        log_events: bool = False,
    ) -> None:
        super().__init__(blocks, block_size, prefix_caching, log_events=log_events)
        assert window > 0, f"a window of {window} tokens"
        self.window = window

    def commit(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        """See `KVCache`; then gives back what no later position reads."""
        super().commit(table, tokens, computed)
        # At least one stays, for a table of blocks without a holder would be none.
        outside = min((computed + 1 - self.window) // self.block_size, len(table.blocks) - 1)
        if outside > table.freed:
            self._free(table.blocks[table.freed : outside])
            table.freed = outside

    def _hits(self, table: Table, tokens: Sequence[int]) -> tuple[int, list[int]]:
        size, best, run = self.block_size, 0, 0
        found: list[int | None] = []
        for i in range(len(tokens) // size if self.prefix_caching else 0):
            found.append(self._index.get(self._digest(table, tokens, i)))
            run = 0 if found[-1] is None else run + 1
            if run and run >= i + 1 - self._first(i + 1):
                best = i + 1
        skipped = self._first(best)
        return skipped, [block for block in found[skipped:best] if block is not None]

    def _first(self, blocks: int) -> int:
        """Of a prefix of so many blocks, the first that is read by its last token, which may have
        to be computed again, or by a later one."""
        return max(0, blocks * self.block_size - self.window) // self.block_size
