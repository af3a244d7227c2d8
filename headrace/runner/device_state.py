"""The device tables of a GPU: what it knows of each running sequence; plan deltas change them.

One int32 tensor holds every table, so a delta is a list of (address, value) pairs: one copy from
pinned memory and one small kernel, whatever changed. A step that changes nothing sends nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.backends.cuda.kv_store import IdSlots
from headrace.backends.cuda.upload import Upload
from headrace.kernels import state
from headrace.kernels.draw_params import KINDS, WIDTH, Kind, is_few, kind_of, pack
from headrace.kernels.edit_params import EDIT_WIDTH, edits, lists_of, pack_edits
from headrace.messages import Grow, Join, Sampling, StepPlan
from headrace.runner.arena import Arena

_PAIRS = 1 << 15  # pairs that one upload holds
LIST_IDS = 1 << 22  # ids that the lists of all rows may hold together: 16 MB
_NEUTRAL = pack_edits(Sampling(), 0, 0)


class DeviceState:
    """Block tables, last drawn token and sampling parameters of each row.

    All int32: tables [groups, max_rows + 1, width], last [max_rows + 1], prompts [max_rows + 1]
    (tokens of each prompt), params [max_rows + 1, 8], edits [max_rows + 1, EDIT_WIDTH] and arena
    [LIST_IDS] (see `kernels.edit_params`). The last row is the spare one that padding uses: its
    tables name the spare block throughout.

    id_block = 0: nothing of a sequence's ids stands here, and `Join.history` is not needed, since
    every token before a draw has its id beside its K and V (`CudaKvStore.ids`). Where no KV group
    keeps all tokens that is not so: then each row has `id_block` * width ids of its own, `slots`.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        spare_block: int,
        device: torch.device,
        *,
        groups: int = 1,
        id_block: int = 0,
    ) -> None:
        rows = max_rows + 1
        self._width, self._rows, self._groups = width, rows, groups
        self._row_ids = id_block * width
        sizes = [groups * rows * width, rows, rows, rows * WIDTH, rows * EDIT_WIDTH, LIST_IDS]
        sizes.append(rows * self._row_ids)
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = torch.split(self._all, sizes)
        tables, self.last, self.prompts, params, edited, self.arena, ids = parts
        self._prompts_at, self._params_at = sum(sizes[:2]), sum(sizes[:3])
        self._edits_at, self._arena_at = sum(sizes[:4]), sum(sizes[:5])
        self._ids_at = sum(sizes[:6])
        self.tables, self.params = tables.view(groups, rows, width), params.view(rows, WIDTH)
        self.edits = edited.view(rows, EDIT_WIDTH)
        self.edits[:] = torch.tensor(_NEUTRAL, dtype=torch.int32)
        self.tables[:, max_rows] = spare_block
        self.slots: IdSlots | None = None
        if id_block:
            own = torch.arange(rows * width, dtype=torch.int32, device=device)
            self.slots = IdSlots(ids.view(-1, id_block), own.view(rows, width))
        self.spare_row = max_rows
        self._taken = [False] * max_rows
        self._kinds = [0] * max_rows  # places in KINDS
        self._lists = Arena(LIST_IDS)
        self._pieces: dict[int, tuple[int, int]] = {}  # row -> its (begin, count) of the arena
        self._not_neutral: set[int] = set()  # rows of `edits` that are not _NEUTRAL
        self.edited: dict[int, Sampling] = {}  # rows whose logits are written anew
        self.logprobs: dict[int, int] = {}  # rows that report them -> how many beside the drawn one
        self.recorded: dict[int, Sampling] = {}  # rows whose draws are shown
        self.refused: set[int] = set()  # rows whose lists found no room: their draws fail
        self._addresses: list[int] = []
        self._values: list[int] = []
        self._upload = Upload((1 + _PAIRS, 2), device)
        self._pairs = torch.zeros((1 + _PAIRS, 2), dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Leaves, joins and grows of a plan, in that order; queued on the current stream."""
        for row in plan.leaves:
            self._leave(row)
        for join in plan.joins:
            self._join(join)
        for grow in plan.grows:
            self._grow(grow)
        self._flush()

    def _leave(self, row: int) -> None:
        """Changes nothing for a free row."""
        self._taken[row] = False
        self.edited.pop(row, None)
        self.logprobs.pop(row, None)
        self.recorded.pop(row, None)
        self.refused.discard(row)
        if row in self._pieces:
            self._lists.give(*self._pieces.pop(row))

    def _join(self, join: Join) -> None:
        row = join.row
        assert not self._taken[row], f"row {row} is joined twice"
        found, groups = len(join.tables), self._groups
        assert found == groups, f"{found} KV groups, this runner has {groups}"
        assert not join.adapter, "this runner has no adapters"
        self._taken[row] = True
        for group, table in enumerate(join.tables):
            self._put(group, row, 0, table)
        if self._row_ids:
            self._poke(self._ids_at + row * self._row_ids, join.history)
        self._poke(self._prompts_at + row, [join.prompt_tokens])
        self._kinds[row] = KINDS.index(kind_of(join.sampling))
        packed = pack(join.sampling, join.choice)
        self._poke(self._params_at + row * WIDTH, packed)
        self._join_edits(row, join.sampling, join.prompt_tokens)
        if join.sampling.logprobs >= 0:
            self.logprobs[row] = join.sampling.logprobs
        if join.record:
            self.recorded[row] = join.sampling

    def _join_edits(self, row: int, sampling: Sampling, prompt_tokens: int) -> None:
        """Rows without any pay nothing, unless the row's last owner had some."""
        packed = _NEUTRAL
        if edits(sampling):
            lists = lists_of(sampling)
            at = self._lists.take(len(lists)) if lists else 0
            if at is None:
                self.refused.add(row)
                self._kinds[row] = 0  # its token counts for nothing
            else:
                packed = pack_edits(sampling, prompt_tokens, at)
                self.edited[row] = sampling
                if lists:
                    self._pieces[row] = (at, len(lists))
                    self._poke(self._arena_at + at, lists)
        if packed is not _NEUTRAL or row in self._not_neutral:
            self._poke(self._edits_at + row * EDIT_WIDTH, packed)
            self._not_neutral.add(row)
            if packed is _NEUTRAL:
                self._not_neutral.discard(row)

    def _grow(self, grow: Grow) -> None:
        assert self._taken[grow.row], f"row {grow.row} grows but is free"
        assert grow.group < self._groups, f"KV group {grow.group}, this runner has {self._groups}"
        self._put(grow.group, grow.row, grow.first, grow.blocks)

    def _put(self, group: int, row: int, first: int, blocks: list[int]) -> None:
        end = first + len(blocks)
        assert end <= self._width, f"{end} blocks in a table that holds {self._width}"
        self._poke((group * self._rows + row) * self._width + first, blocks)

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

    def cuts_at_sigma(self, row: int) -> bool:
        """Whether the row uses top_n_sigma, and its logits must be written to for that."""
        sampling = self.edited.get(row)
        return sampling is not None and sampling.top_n_sigma > 0.0 and not is_few(sampling)

    def compile(self) -> None:
        """Launch the kernel of this table, for `kernels.launch.compiling`."""
        self._poke_device(1)
