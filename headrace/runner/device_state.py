"""The device tables of a GPU: what it knows of each running sequence; plan deltas change them.

One int32 tensor holds every table, so a delta is a list of (address, value) pairs: one copy from
pinned memory and one small kernel, whatever changed. A step that changes nothing sends nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.backends.cuda.upload import Upload
from headrace.kernels import state
from headrace.kernels.draw_params import KINDS, WIDTH, Kind, kind_of, pack
from headrace.messages import Grow, Join, StepPlan

_PAIRS = 1 << 15  # pairs that one upload holds


class DeviceState:
    """Block table, last drawn token and sampling parameters of each row.

    tables [max_rows + 1, width], last [max_rows + 1], params [max_rows + 1, 8], all int32. The last
    row is the spare one that padding uses: its table names the spare block throughout.
    """

    def __init__(self, max_rows: int, width: int, spare_block: int, device: torch.device) -> None:
        rows = max_rows + 1
        self._width = width
        self._last_at = rows * width
        self._params_at = self._last_at + rows
        self._all = torch.zeros(self._params_at + rows * WIDTH, dtype=torch.int32, device=device)
        self.tables = self._all[: self._last_at].view(rows, width)
        self.last = self._all[self._last_at : self._params_at]
        self.params = self._all[self._params_at :].view(rows, WIDTH)
        self.tables[max_rows] = spare_block
        self.spare_row = max_rows
        self._taken = [False] * max_rows
        self._kinds = [0] * max_rows  # places in KINDS
        self._addresses: list[int] = []
        self._values: list[int] = []
        self._upload = Upload((1 + _PAIRS, 2), device)
        self._pairs = torch.zeros((1 + _PAIRS, 2), dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Leaves, joins and grows of a plan, in that order; queued on the current stream."""
        for row in plan.leaves:
            self._taken[row] = False
        for join in plan.joins:
            self._join(join)
        for grow in plan.grows:
            self._grow(grow)
        self._flush()

    def _join(self, join: Join) -> None:
        row = join.row
        assert not self._taken[row], f"row {row} is joined twice"
        assert len(join.tables) == 1, f"{len(join.tables)} KV groups, this runner has 1"
        assert not join.adapter, "this runner has no adapters"
        self._taken[row] = True
        self._put(row * self._width, 0, join.tables[0])
        self._kinds[row] = KINDS.index(kind_of(join.sampling))
        packed = pack(join.sampling, join.choice)
        self._poke(self._params_at + row * WIDTH, packed)

    def _grow(self, grow: Grow) -> None:
        assert self._taken[grow.row], f"row {grow.row} grows but is free"
        assert grow.group == 0, f"KV group {grow.group}, this runner has 1"
        self._put(grow.row * self._width, grow.first, grow.blocks)

    def _put(self, base: int, first: int, blocks: list[int]) -> None:
        end = first + len(blocks)
        assert end <= self._width, f"{end} blocks in a table that holds {self._width}"
        self._poke(base + first, blocks)

    def _poke(self, address: int, values: list[int]) -> None:
        self._addresses.extend(range(address, address + len(values)))
        self._values.extend(values)

    def _flush(self) -> None:
        """Send what changed; of two values for one address, the later."""
        if not self._addresses:
            return
        latest = dict(zip(self._addresses, self._values, strict=True))
        self._addresses, self._values = [], []
        pairs = np.array(list(latest.items()), np.int32)
        for at in range(0, len(pairs), _PAIRS):
            count = min(_PAIRS, len(pairs) - at)
            slot = self._upload.slot()
            slot[0] = count, 0
            slot[1 : 1 + count] = pairs[at : at + count]
            self._upload.send(self._pairs, 1 + count)
            self._poke_device(count)

    def _poke_device(self, count: int) -> None:
        state.poke(self._all, self._pairs[1 : 1 + count], self._pairs[0, :1])

    def taken(self, row: int) -> bool:
        """Whether a sequence owns `row`."""
        return self._taken[row]

    def kind(self, rows: list[int]) -> Kind:
        """The least kind of call that draws for all these rows."""
        return KINDS[max(map(self._kinds.__getitem__, rows))]

    def compile(self) -> None:
        """Launch the kernel of this table, for `kernels.launch.compiling`."""
        self._poke_device(1)

    @property
    def size_bytes(self) -> int:
        return self._all.numel() * 4
