"""Which layers get copies of their experts, by settings and by what memory there is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from headrace.backends.cuda.device import Card
from headrace.backends.cuda.mixture import ExpertCopies, Mixture, copies_of
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.kernels import compressed
from headrace.models.kv_layout import layout_of
from headrace.models.layers import Decoder
from headrace.models.registry import module_of
from headrace.models.routed import RoutedMlp
from headrace.models.spec import ModelSpec
from headrace.runner import expert_copies, ledger
from headrace.runner.expert_copies import FAIR_TOKENS, copy_experts
from tests.kernels.test_compressed import SPEC

CARD = Card("a card", 0, 4, (9, 0))
LAYERS = 3
WHOLE = msgspec.structs.replace(SPEC, layers=LAYERS, kinds=SPEC.kinds[:1] * LAYERS)
LONGEST = 4096
GIB = 1 << 30
Copy = Callable[..., tuple[ledger.Line | None, set[int]]]


def model_of(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    model = module_of(spec.architecture).build(spec, dtype)
    rng = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.02)
    return model


@pytest.fixture
def copy(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Copy:
    """copy_experts on a card of 16 GiB of which so much is free -> its line, and which layers."""

    def copied(
        free: int = 12 * GIB,
        model: Decoder | None = None,
        longest: int = LONGEST,
        **given: object,
    ) -> tuple[ledger.Line | None, set[int]]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 16 * GIB))
        settings = msgspec.convert(
            {"max_num_seqs": 8, "max_num_batched_tokens": 8} | given, Settings
        )
        model = model_of(WHOLE) if model is None else model
        experts = model.spec.experts
        mixture = None if experts is None else Mixture(model.spec, 8, model.dtype, device)
        line = copy_experts(
            settings, model.to(device), mixture, longest, CARD, lambda what, took_s: None
        )
        return line, set() if mixture is None else set(mixture.copies)

    return copied


def copy_bytes(spec: ModelSpec = WHOLE) -> int:
    """Of a layer."""
    assert spec.experts is not None
    return compressed.size_bytes(spec.experts.total * 3 * spec.hidden * spec.experts.ffn)


def fair_bytes(longest: int) -> int:
    one = ledger.kv_block_bytes(WHOLE, layout_of(WHOLE), "bfloat16", 16)
    return one * max(8 * (FAIR_TOKENS // 16 + 1), longest // 16 + 1)


def test_all_where_there_is_room(copy: Copy) -> None:
    line, layers = copy()
    assert layers == {0, 1, 2}
    assert line is not None
    assert LAYERS * copy_bytes() <= line.size_bytes <= LAYERS * copy_bytes() * 1.1
    assert "3 of 3 layers" in line.note


@pytest.mark.parametrize("longest", [LONGEST, 4 * LONGEST], ids=["all", "longest"])
@pytest.mark.parametrize("room", range(LAYERS + 1))
def test_as_many_as_a_fair_kv_cache_leaves(copy: Copy, room: int, longest: int) -> None:
    """It is one for all that run, or for the longest sequence."""
    used = 16 * GIB - int(0.9 * 16 * GIB) + 16 * GIB // 32
    for spare, found in ((0, room), (-1, max(0, room - 1))):
        free = used + fair_bytes(longest) + room * copy_bytes() + spare
        line, layers = copy(free, longest=longest)
        assert layers == set(range(found))
        assert line is not None
        assert f"{found} of 3 layers" in line.note


@pytest.mark.parametrize("sized", [{"kv_blocks": 7}, {"kv_memory": "1MiB"}], ids=str)
def test_beside_a_kv_cache_that_is_sized_by_hand_nothing_is_taken(
    copy: Copy, sized: dict[str, object]
) -> None:
    """`headrace up` puts replicas on one card by that: the rest of it is theirs."""
    line, layers = copy(**sized)
    assert layers == set()
    assert line is not None
    assert line.size_bytes == 0
    assert "0 of 3 layers" in line.note
    assert "sized by hand" in line.note
    assert copy(expert_copies="all", **sized)[1] == {0, 1, 2}


def test_a_layer_without_copies_takes_nothing_of_the_room(copy: Copy) -> None:
    used = 16 * GIB - int(0.9 * 16 * GIB) + 16 * GIB // 32
    wide = model_of(WHOLE)
    wide.get_parameter("blocks.1.routed.down").zero_()
    line, layers = copy(used + fair_bytes(LONGEST) + 2 * copy_bytes(), model=wide)
    assert layers == {0, 2}
    assert line is not None
    assert "exponents of 1 are spread too far" in line.note


def test_memory_that_ran_out_ends_what_was_asked_for_alone(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever said `auto` has asked for a server, not for copies."""
    made: list[object] = []

    def second_fails(mlp: RoutedMlp) -> ExpertCopies | None:
        made.append(mlp)
        if len(made) == 2:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        return copies_of(mlp)

    monkeypatch.setattr(expert_copies, "copies_of", second_fails)
    line, layers = copy()
    assert layers == {0}
    assert line is not None
    assert "no memory for those of layer 1" in line.note
    made.clear()
    with pytest.raises(ConfigError, match="layer 1: tried to allocate 3 GiB") as found:
        copy(expert_copies="all")
    assert found.value.param == "expert_copies"


def test_off_and_models_that_have_none(copy: Copy) -> None:
    assert copy(expert_copies="off") == (None, set())
    dense = msgspec.structs.replace(WHOLE, kinds=(), experts=None)
    assert copy(model=model_of(dense)) == (None, set())
    assert copy(model=model_of(WHOLE, torch.float32)) == (None, set())


def test_all_asks_for_no_room(copy: Copy) -> None:
    line, layers = copy(0, expert_copies="all")
    assert layers == {0, 1, 2}
    assert line is not None
    assert "every layer" in line.note


def test_all_is_refused_where_it_cannot_be(copy: Copy) -> None:
    assert WHOLE.experts is not None
    narrow = msgspec.structs.replace(
        WHOLE, experts=msgspec.structs.replace(WHOLE.experts, ffn=compressed.COLUMNS // 2)
    )
    for model in (model_of(narrow), model_of(WHOLE, torch.float32)):
        with pytest.raises(ConfigError, match="64 rows and 128 columns") as found:
            copy(expert_copies="all", model=model)
        assert found.value.param == "expert_copies"
    wide = model_of(WHOLE)
    wide.get_parameter("blocks.1.routed.down").zero_()
    with pytest.raises(ConfigError, match="layer 1") as found:
        copy(expert_copies="all", model=wide)
    assert found.value.param == "expert_copies"
    line, layers = copy(model=wide)
    assert layers == {0, 2}
    assert line is not None
    assert "2 of 3 layers" in line.note
