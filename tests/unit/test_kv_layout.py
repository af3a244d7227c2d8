"""How layers are parted into KV groups."""

from __future__ import annotations

import msgspec
import pytest

from headrace.models.kv_layout import layout_of
from headrace.models.spec import LayerSpec, ModelSpec, Rope

PLAIN = ModelSpec(
    architecture="x",
    layers=1,
    hidden=8,
    heads=1,
    kv_heads=1,
    head_dim=8,
    ffn=8,
    vocab_rows=8,
    vocab_size=8,
    rope=Rope(),
    norm_eps=1e-5,
    tied=True,
    qkv_bias=False,
    max_positions=64,
)


def model(*windows: int, shared: int = 0) -> ModelSpec:
    """Layers with these windows; the last `shared` read the K and V of the last others alike."""
    kinds = [LayerSpec(window=window) for window in windows]
    own = len(kinds) - shared
    for i in range(own, len(kinds)):
        source = max(j for j in range(own) if windows[j] == windows[i])
        kinds[i] = msgspec.structs.replace(kinds[i], kv_from=source)
    return msgspec.structs.replace(PLAIN, layers=len(kinds), kinds=tuple(kinds))


def gemma3(layers: int) -> tuple[int, ...]:
    """Five layers of six have a window."""
    return tuple(0 if i % 6 == 5 else 512 for i in range(layers))


@pytest.mark.parametrize(
    ("windows", "size", "groups"),
    [
        ((0,) * 30, 30, 1),
        ((4096,) * 32, 32, 1),
        (gemma3(18), 3, 1 + 5),  # Gemma-3-270M
        (gemma3(26), 4, 1 + 6),  # 1B: 4 and 22 layers, room for 24
        (gemma3(34), 5, 1 + 6),  # 4B: 5 and 29
        (gemma3(48), 8, 1 + 5),  # 12B
        (gemma3(62), 5, 2 + 11),  # 27B: 10 and 52; groups of 10 would leave 8 of 60 unused
        ((128, 0) * 12, 12, 1 + 1),  # gpt-oss
        ((0, 8, 4, 8), 1, 1 + 2 + 1),
    ],
)
def test_groups_waste_little(windows: tuple[int, ...], size: int, groups: int) -> None:
    layout = layout_of(model(*windows))
    assert (layout.layers, len(layout.windows)) == (size, groups)
    room = layout.layers * len(layout.windows)
    assert len(windows) <= room <= 1.12 * len(windows)


@pytest.mark.parametrize("windows", [gemma3(26), (128, 0) * 3, (0, 8, 4, 8), (7,) * 5])
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window(
    windows: tuple[int, ...],
) -> None:
    layout = layout_of(model(*windows))
    assert len(set(layout.places)) == len(windows) == len(layout.places)
    assert all(at < layout.layers for _, at in layout.places)
    assert [layout.windows[group] for group, _ in layout.places] == list(windows)
    kept = [window or 1 << 30 for window in layout.windows]
    assert kept == sorted(kept, reverse=True), "what keeps most comes first"


def test_layers_that_read_others_have_no_room() -> None:
    spec = model(8, 0, 8, 0, 8, 0, shared=2)
    layout = layout_of(spec)
    assert (layout.layers, len(layout.windows)) == (2, 2)
    assert layout.places[4] == layout.places[2]
    assert layout.places[5] == layout.places[3]
