"""How the layers of a model lie in blocks of the KV cache, where some have a window. No torch.

Layers are parted into groups of equal size, so that one block of the pool fits each of them. Layers
of a group have the same window; a group that is not full leaves room that nobody uses. Layers that
read another's K and V have no room of their own.
"""

from __future__ import annotations

import msgspec

from headrace.models.spec import ModelSpec

_SPARE_SHARE = 10  # one part in so many of the room may be left unused, for fewer groups


class KvLayout(msgspec.Struct, frozen=True):
    """windows: of each group, newest tokens that its queries read, 0 = all; those come first.
    places: of each layer whose K and V are read, the group and the place in its blocks."""

    layers: int  # of one group
    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    def kept_bytes(self, layer_bytes: int, tokens: int = 1) -> int:
        """What a sequence of so many tokens takes, blocks not rounded up. layer_bytes: of K and V
        of a token in one layer. Of one token: in every layer, and in what groups leave unused."""
        held = sum(min(tokens, window or tokens) for window in self.windows)
        return held * self.layers * layer_bytes


def layout_of(spec: ModelSpec) -> KvLayout:
    """A group for each kind of layer, or several.

    The size of a group divides the number of layers that keep most, where room costs most. The
    largest such size is taken that leaves little of the others' room unused: each group is a table.
    """
    kinds = spec.every_layer()
    windows = sorted({kind.window for kind in kinds if kind.kv_from < 0})
    windows.sort(key=lambda window: -window if window else -(1 << 60))  # what keeps most first
    layers = {
        window: [i for i, kind in enumerate(kinds) if kind.window == window and kind.kv_from < 0]
        for window in windows
    }
    counts = [len(some) for some in layers.values()]
    size = max(n for n in range(1, counts[0] + 1) if counts[0] % n == 0 and _fits(n, counts))
    places: dict[int, tuple[int, int]] = {}
    groups: list[int] = []
    for window, some in layers.items():
        for at, layer in enumerate(some):
            places[layer] = len(groups) + at // size, at % size
        groups += [window] * -(-len(some) // size)
    owners = (i if kind.kv_from < 0 else kind.kv_from for i, kind in enumerate(kinds))
    return KvLayout(size, tuple(groups), tuple(places[owner] for owner in owners))


def _fits(size: int, counts: list[int]) -> bool:
    """Groups of `size` leave little unused."""
    room = sum(-(-count // size) * size for count in counts)
    return (room - sum(counts)) * _SPARE_SHARE <= room
