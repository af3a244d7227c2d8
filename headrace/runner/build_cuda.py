"""From settings and files to a runner on a GPU: weights, kernels, a measured step, KV, graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
import torch

from headrace.backends.cpu.device import cores
from headrace.backends.cuda.attention import Attention
from headrace.backends.cuda.buffers import Buffers
from headrace.backends.cuda.device import Card
from headrace.backends.cuda.kv_store import ID_BYTES, CudaKvStore, IdSlots
from headrace.backends.cuda.latent import LatentPaths, shape_of
from headrace.backends.cuda.ops import Choose, ChooseTiles, Place
from headrace.backends.cuda.turns import Turns
from headrace.config import PrefillAttention, Resolved, Settings, parse_bytes
from headrace.engine.protocol import Capacity, StepCost
from headrace.errors import ConfigError
from headrace.kernels import pdl, tuned
from headrace.kernels.product import Workspace
from headrace.messages import KernelsInfo
from headrace.models.kv_layout import KvLayout, layout_of
from headrace.models.layers import Decoder
from headrace.models.spec import ModelSpec
from headrace.runner import ledger
from headrace.runner.calibrate import Probe, measure_cost
from headrace.runner.cuda_runner import CudaRunner
from headrace.runner.device_state import DeviceState
from headrace.runner.draws import WIDE_ROWS
from headrace.runner.expert_copies import copy_experts
from headrace.runner.forward import Forward
from headrace.runner.phase import Report, phase
from headrace.runner.taps import NOTE
from headrace.runner.work import from_cost

_SLACK_BYTES = 256 * 2**20  # fragments, and what the driver takes for itself later


class Plan(msgspec.Struct, frozen=True):
    """Sizes of one runner, settled before memory is measured."""

    max_rows: int
    max_tokens: int
    block_size: int
    max_model_len: int


class Room(msgspec.Struct, frozen=True):
    """What a step was seen to need, in bytes of device memory."""

    total: int
    used: int  # everything but the KV cache: context, weights, activations at their peak
    graphs: int


def forward_on(
    model: Decoder,
    plan: Plan,
    blocks: int,
    card: Card,
    buffers: Buffers,
    *,
    choose: Choose | None = None,
    choose_tiles: ChooseTiles | None = None,
    decoding: Callable[[int], tuned.Decoding] | None = None,
    prefill_attention: PrefillAttention = "auto",
    graphed: bool = True,
) -> Forward:
    """The model with a KV cache of `blocks` and empty tables.

    `choose`, `choose_tiles`, `decoding`: configurations of its kernels; None: as the card's table
    has them.
    Not `graphed`: every step is launched call by call, padded as ever.
    """
    spec, device = model.spec, buffers.x.device
    store, state = _memory(model, plan, blocks, device)
    positions = state.tables.shape[2] * plan.block_size
    place = Place(
        store=store,
        slots=state.slots or IdSlots(store.ids, state.tables[0]),
        buffers=buffers,
        workspace=Workspace(device),
        turns=Turns(model, positions, plan.max_tokens, state.prompts),
        last=state.last,
        choose=choose
        or functools.partial(
            tuned.choose,
            device_name=card.name,
            normed_head=spec.head_dim if spec.qk_norm else 0,
        ),
        choose_tiles=choose_tiles or functools.partial(tuned.choose_tiles, device_name=card.name),
        multiprocessors=card.multiprocessors,
        pdl=pdl.supported(device),
        latent=None if spec.latent is None else shape_of(spec),
    )
    sizes = (card.multiprocessors, plan.max_tokens, plan.max_rows, model.dtype, device)
    if spec.latent is not None:
        paths = LatentPaths(spec, *sizes)
        return Forward(model, place, state, paths, plan.max_tokens, graphed=graphed)
    heads = tuned.Heads(spec.heads, spec.kv_heads, spec.head_dim)
    attention = Attention(
        spec,
        *sizes,
        decoding
        or functools.partial(
            tuned.choose_decoding,
            heads=heads,
            dtype=model.dtype,
            multiprocessors=card.multiprocessors,
            device_name=card.name,
        ),
        prefill_attention,
    )
    return Forward(model, place, state, attention, plan.max_tokens, graphed=graphed)


def _memory(
    model: Decoder, plan: Plan, blocks: int, device: torch.device
) -> tuple[CudaKvStore, DeviceState]:
    """A cache of `blocks`, all zero, and tables of its KV groups."""
    spec, layout = model.spec, layout_of(model.spec)
    store = CudaKvStore(
        layers=layout.layers,
        places=layout.places,
        keeps_ids=_keeps_ids(layout),
        blocks=blocks,
        kv_heads=spec.kv_heads,
        block_size=plan.block_size,
        head_dim=spec.head_dim,
        dtype=model.dtype,
        device=device,
        keys_are_values=spec.keys_are_values,
    )
    state = DeviceState(
        plan.max_rows,
        # An overlapped step may run past the last token of a sequence: two blocks to spare.
        -(-plan.max_model_len // plan.block_size) + 2,
        store.spare_block,
        device,
        groups=len(layout.windows),
        id_block=0 if _keeps_ids(layout) else plan.block_size,
    )
    return store, state


def _keeps_ids(layout: KvLayout) -> bool:
    """Whether the first KV group has a block for every token, where its id can stand."""
    return not layout.windows[0]


def build_runner(
    settings: Settings,
    model: Decoder,
    wanted_len: Resolved[int],
    card: Card,
    report: Report,
) -> tuple[CudaRunner, Resolved[int], Resolved[int], list[ledger.Line]]:
    """The runner, the KV blocks, the longest sequence and lines of the device's memory.

    Raises ConfigError where the memory does not hold a block.
    """
    if model.dtype == torch.bfloat16:  # float16 has no room for products of what is not normed
        model.fold_norms()
    device, layout = torch.device("cuda", card.index), layout_of(model.spec)
    plan = Plan(
        max_rows=settings.max_num_seqs,
        max_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        max_model_len=wanted_len.value,
    )
    buffers = Buffers(model.spec, plan.max_tokens, plan.max_rows, model.dtype, device)
    forward_of = functools.partial(
        forward_on,
        prefill_attention=settings.prefill_attention,
        graphed=settings.cuda_graphs,
    )
    copied = copy_experts(settings, model, buffers.mixture, plan.max_model_len, card, report)
    with phase("compile kernels", report):
        step_blocks = -(-plan.max_tokens // plan.block_size) * len(layout.windows)
        trial = forward_of(model, plan, step_blocks, card, buffers)
        trial.compile(cores())
    with phase("run the largest step", report):
        probe = Probe(trial)
        with trial.fewer_layers():  # each takes memory that the one before has given back
            probe.run(0, min(plan.max_tokens, probe.room))
        probe.close()
        room = measure_room(trial, card)
        trial.close()
        del trial, probe
        torch.cuda.empty_cache()
    blocks = size_kv(settings, model.spec, model.dtype, room)
    length = ledger.fit_model_len(wanted_len, blocks.value, plan.block_size, layout.windows)
    plan = msgspec.structs.replace(plan, max_model_len=length.value)
    forward = forward_of(model, plan, blocks.value, card, buffers)
    with phase("plan the attention of long prompts", report):
        chosen = forward.prepare_attention()  # graphs may hold what it makes ready
    with phase("capture graphs", report):
        forward.capture()
    kernels = kernels_info(chosen, card)
    report(kernels.reason, 0.0)
    with phase("measure the time of steps", report):
        limited = settings.itl_target_ms == "auto" or float(settings.itl_target_ms) > 0
        cost = measure_cost(forward, plan.max_tokens, limited=limited)
    free_bytes, _ = torch.cuda.mem_get_info(card.index)
    lines = [copied] if copied is not None else []
    lines += _lines(forward, buffers, plan, room, free_bytes)
    capacity = _capacity(model, plan, blocks.value, cost, kernels, card)
    return CudaRunner(forward, capacity), blocks, length, lines


def _lines(
    forward: Forward, buffers: Buffers, plan: Plan, room: Room, free_bytes: int
) -> list[ledger.Line]:
    """Of the memory ledger: what the device holds beside weights and KV cache."""
    return [
        ledger.Line("step buffers", buffers.size_bytes, f"for {plan.max_tokens} tokens"),
        ledger.Line("sampler", forward.sampler.size_bytes, f"{WIDE_ROWS} edited rows at a time"),
        ledger.Line("vectors", forward.pooler.size_bytes, "of embeddings and scores"),
        ledger.Line(
            "graphs",
            room.graphs,
            f"reserved from the largest for {forward.graphs.planned}; "
            f"{forward.graphs.planned - forward.graphs.captured} are captured later"
            if forward.graphs.planned
            else "none, as set",
        ),
        ledger.Line("left free", free_bytes, f"of {ledger.show_bytes(room.total)}"),
    ]


def kernels_info(attention: Resolved[str], card: Card) -> KernelsInfo:
    """The choice of the attention of prompts, for /metrics."""
    more = "" if attention.value == "triton" else f"+{attention.value}"
    isa = "sm_{}{}".format(*card.capability)
    reason = f"prefill attention: {attention.value} ({attention.reason})"
    return KernelsInfo("cuda", f"triton{more}", isa, "exact", reason)


def _capacity(
    model: Decoder, plan: Plan, blocks: int, cost: StepCost, kernels: KernelsInfo, card: Card
) -> Capacity:
    return Capacity(
        kv_blocks=[blocks],
        block_size=plan.block_size,
        max_rows=plan.max_rows,
        max_model_len=plan.max_model_len,
        vocab_size=model.spec.vocab_size,
        cost=cost,
        kernels=kernels,
        work=from_cost(cost, model.spec),
        width=model.spec.hidden,
        labels=model.spec.labels,
        generates=model.spec.generates,
        device_uuid=card.uuid,
        draws_note=NOTE,
        windows=layout_of(model.spec).windows,
    )


def measure_room(forward: Forward, card: Card) -> Room:
    """Device memory in use now, after the largest step ran, less the trial KV cache."""
    least, total = torch.cuda.mem_get_info(card.index)
    torch.cuda.empty_cache()  # as a capture does: what a step left is none of a graph's
    free, _ = torch.cuda.mem_get_info(card.index)
    forward.capture(1)
    after, _ = torch.cuda.mem_get_info(card.index)
    graphs = (free - after) * forward.graphs.planned
    return Room(total=total, used=total - least - forward.store.size_bytes, graphs=graphs)


def size_kv(settings: Settings, spec: ModelSpec, dtype: torch.dtype, room: Room) -> Resolved[int]:
    """Blocks of the KV cache. Raises ConfigError if what is left holds none."""
    if settings.kv_blocks:
        return Resolved(settings.kv_blocks, "asked for")
    layout, name = layout_of(spec), str(dtype).removeprefix("torch.")
    block_bytes = ledger.kv_block_bytes(spec, layout, name, settings.block_size)
    block_bytes += ID_BYTES * settings.block_size * _keeps_ids(layout)
    if settings.kv_memory:
        key, budget = "kv_memory", parse_bytes(settings.kv_memory, "kv_memory")
        reason = f"kv_memory = {settings.kv_memory}"
    else:
        key, share = "gpu_memory_utilization", settings.gpu_memory_utilization
        budget = int(room.total * share) - room.used - room.graphs - _SLACK_BYTES
        reason = f"what is left of {share:.0%} of {ledger.show_bytes(room.total)}"
    blocks = budget // block_bytes - 1  # one is spare
    if blocks < 1:
        raise ConfigError(
            f"{reason} holds no KV block of {ledger.show_bytes(block_bytes)} "
            f"({settings.block_size} tokens)",
            param=key,
        )
    return Resolved(blocks, reason)
