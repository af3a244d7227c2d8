"""Which layers of a mixture get compressed copies of their experts (see `kernels.compressed`), and
what that takes.

The plain matrices stay: steps of many tokens multiply faster with those. So copies are bought with
memory that a KV cache of fair size can spare.
"""

from __future__ import annotations

import torch

from headrace.backends.cuda.device import Card
from headrace.backends.cuda.mixture import Mixture, copies_of
from headrace.config import Settings, parse_bytes
from headrace.errors import ConfigError
from headrace.kernels import compressed
from headrace.kv.room import most_held
from headrace.models.kv_layout import layout_of
from headrace.models.layers import Decoder
from headrace.models.routed import RoutedBlock, RoutedMlp
from headrace.runner import ledger
from headrace.runner.phase import Report, phase

FAIR_TOKENS = 768  # of KV for each sequence that may run
FAIR_SEQUENCES = 4  # of the greatest length, if that is more
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

    longest: tokens of a sequence. Raises ConfigError where `all` is asked for and cannot be.
    """
    every = settings.expert_copies == "all"
    routed = {} if settings.expert_copies == "off" else _routed(model)
    wanted = [layer for layer, mlp in routed.items() if _fits(mlp)]
    if every and not wanted:
        raise ConfigError(
            "expert_copies = all: this model has no experts in bfloat16 whose matrices are whole "
            f"blocks of {compressed.ROWS} rows and {compressed.COLUMNS} columns",
            param="expert_copies",
        )
    if mixture is None or not wanted:
        return None
    budget = None if every else _budget_bytes(settings, model, longest, card)
    reason = "every layer" if every else "what a KV cache of fair size leaves"
    with phase("copy experts", report):
        for layer in wanted:
            if budget is not None and (budget := budget - _copy_bytes(routed[layer])) < 0:
                break
            try:
                copies = copies_of(routed[layer])
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"expert_copies = {settings.expert_copies}: {error}", param="expert_copies"
                ) from None
            if copies is not None:
                mixture.copies[layer] = copies
            elif every:
                raise ConfigError(
                    f"expert_copies = all: too many numbers of layer {layer} have exponents far "
                    "from the others'",
                    param="expert_copies",
                )
        torch.cuda.empty_cache()
    count = len(mixture.copies)
    size_bytes = sum(copies.size_bytes for copies in mixture.copies.values())
    note = f"of {count} of {len(routed)} layers, 12 bits a number: {reason}"
    return ledger.Line("expert copies", size_bytes, note)


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
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(card.index)
    usable = int(total * settings.gpu_memory_utilization) - (total - free)
    return usable - int(total * _HEADROOM) - _kv_bytes(settings, model, longest)


def _kv_bytes(settings: Settings, model: Decoder, longest: int) -> int:
    """Of the KV cache that was asked for, or one of fair size."""
    if settings.kv_memory:
        return parse_bytes(settings.kv_memory, "kv_memory")
    spec, layout, size = model.spec, layout_of(model.spec), settings.block_size
    name = str(model.dtype).removeprefix("torch.")
    one = ledger.kv_block_bytes(spec, layout, name, size)
    if settings.kv_blocks:
        return settings.kv_blocks * one
    of_all = settings.max_num_seqs * most_held(layout.windows, size, FAIR_TOKENS // size + 1)
    of_long = FAIR_SEQUENCES * most_held(layout.windows, size, longest // size + 1)
    return max(of_all, of_long) * one
