"""Which layers of a mixture get compressed copies of their experts (see `kernels.compressed`), and
what that takes.

The plain matrices stay: steps of many tokens multiply faster with those. So copies are bought with
memory that a KV cache of fair size can spare. Whoever sizes the KV cache by hand may mean to leave
the rest to others, such as more replicas on the card, and gets copies only by asking for `all`.
"""

from __future__ import annotations

import math

import torch

from headrace.backends.cuda.device import Card
from headrace.backends.cuda.mixture import Mixture, copies_of
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.kernels import compressed
from headrace.kv.room import most_held
from headrace.models.kv_layout import layout_of
from headrace.models.layers import Decoder
from headrace.models.routed import RoutedBlock, RoutedMlp
from headrace.runner import ledger
from headrace.runner.phase import Report, phase

FAIR_TOKENS = 768  # of KV for each sequence that may run; if that is less, one of the longest
_HEADROOM = 1 / 32  # of the card: activations, graphs and fragments


def copy_experts(
    settings: Settings,
    model: Decoder,
    mixture: Mixture | None,
    longest: int,
    card: Card,
    report: Report,
) -> ledger.Line | None:
    """Make the copies -> a line of the memory ledger; None: none can be, or `off`.

    longest: tokens of a sequence. Raises ConfigError where `all` is asked for and cannot be; `auto`
    is content with fewer.
    """
    every = settings.expert_copies == "all"
    routed = {} if settings.expert_copies == "off" else _routed(model)
    wanted = [layer for layer, mlp in routed.items() if _fits(mlp)]
    if every and not wanted:
        raise _refused(
            "this model has no experts in bfloat16 whose matrices are whole blocks of "
            f"{compressed.ROWS} rows and {compressed.COLUMNS} columns"
        )
    if mixture is None or not wanted:
        return None
    budget = math.inf if every else _budget_bytes(settings, model, longest, card)
    reason, spread = _reason(settings), 0
    with phase("copy experts", report):
        for layer in wanted:
            if _copy_bytes(routed[layer]) > budget:
                break
            try:
                copies = copies_of(routed[layer])
            except torch.OutOfMemoryError as error:
                if every:
                    raise _refused(f"no memory for those of layer {layer}: {error}") from None
                reason = f"no memory for those of layer {layer}"
                break
            if copies is not None:
                mixture.copies[layer] = copies
                budget -= _copy_bytes(routed[layer])
            elif every:
                raise _refused(
                    f"too many numbers of layer {layer} have exponents far from the others'"
                )
            else:
                spread += 1
        torch.cuda.empty_cache()
    count = len(mixture.copies)
    size_bytes = sum(copies.size_bytes for copies in mixture.copies.values())
    note = f"of {count} of {len(routed)} layers, 12 bits a number: {reason}"
    note += f"; exponents of {spread} are spread too far" if spread else ""
    return ledger.Line("expert copies", size_bytes, note)


def _refused(why: str) -> ConfigError:
    return ConfigError(f"expert_copies = all: {why}", param="expert_copies")


def _reason(settings: Settings) -> str:
    if settings.expert_copies == "all":
        return "every layer"
    if _sized(settings):
        return "the KV cache is sized by hand"
    return "what a KV cache of fair size leaves"


def _sized(settings: Settings) -> bool:
    """By hand: then gpu_memory_utilization says nothing."""
    return bool(settings.kv_blocks or settings.kv_memory)


def _routed(model: Decoder) -> dict[int, RoutedMlp]:
    blocks = (block for block in model.blocks if isinstance(block, RoutedBlock))
    return {block.index: block.routed for block in blocks if block.routed is not None}


def _fits(mlp: RoutedMlp) -> bool:
    hidden, ffn = mlp.gate_up.shape[1], mlp.spec.ffn
    whole = compressed.compressible(2 * ffn, hidden) and compressed.compressible(hidden, ffn)
    return whole and mlp.gate_up.dtype == torch.bfloat16


def _copy_bytes(mlp: RoutedMlp) -> int:
    return compressed.size_bytes(mlp.gate_up.numel() + mlp.down.numel())


def _budget_bytes(settings: Settings, model: Decoder, longest: int, card: Card) -> int:
    """What copies may take."""
    if _sized(settings):
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(card.index)
    usable = int(total * settings.gpu_memory_utilization) - (total - free)
    return usable - int(total * _HEADROOM) - _kv_bytes(settings, model, longest)


def _kv_bytes(settings: Settings, model: Decoder, longest: int) -> int:
    """Of a KV cache of fair size."""
    spec, layout, size = model.spec, layout_of(model.spec), settings.block_size
    name = str(model.dtype).removeprefix("torch.")
    one = ledger.kv_block_bytes(spec, layout, name, size)
    of_all = settings.max_num_seqs * most_held(layout.windows, size, FAIR_TOKENS // size + 1)
    of_longest = most_held(layout.windows, size, longest // size + 1)
    return max(of_all, of_longest) * one
