"""What the parts of a step cost, for parting its time among rows: `engine.protocol.StepWork`.

On a GPU from the model of step time (`calibrate`); on a processor from two short runs of the real
forward pass at the start. Both measure whole steps; what of that belongs to the head, to reading KV
and to attention follows from bytes and operations.
"""

from __future__ import annotations

import math
import time

import numpy as np

from headrace.backends.cpu.batch import Batch, Forward
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.engine.protocol import StepCost, StepWork
from headrace.models.registry import slots_of
from headrace.models.sizes import parameters
from headrace.models.spec import ModelSpec
from headrace.runner.worker import Worker

_CHUNK_TOKENS, _SLOW_CHUNK_TOKENS = 16, 4
_SLOW_S = 0.1  # a token that takes longer: the start has no time for a long chunk


def head_share(spec: ModelSpec) -> float:
    """The head's part of the weights that a step reads, by parameters."""
    head = spec.vocab_rows * spec.hidden
    total = parameters(spec).total
    return head / (total if spec.tied else total - head)  # untied: of the embedding it reads rows


def from_cost(cost: StepCost, spec: ModelSpec) -> StepWork:
    """Of a device whose step time is known: by steps of which one position gets logits."""
    head = head_share(spec)
    return StepWork(
        weights_s=cost.floor_s * (1 - head),
        token_s=cost.token_s,
        head_s=cost.floor_s * head,
        head_token_s=cost.token_s * head / (1 - head),
        pair_s=cost.pair_s,
        read_s=cost.read_s,
    )


def measure(
    forward: Forward, worker: Worker, spec: ModelSpec, memory: KvMemory, weight_bytes: int
) -> StepWork:
    """Of a processor: one token alone is the reading of the weights, a chunk shows the products.

    Runs steps of random tokens in the first KV blocks; who gets them writes them anew.
    """
    _seconds(forward, worker, memory, 1)  # memory is touched, buffers are made
    step_s = _seconds(forward, worker, memory, 1)
    count = _CHUNK_TOKENS if step_s < _SLOW_S else _SLOW_CHUNK_TOKENS
    count = min(count, memory.blocks * memory.block_size)
    chunk_s = _seconds(forward, worker, memory, count)
    head = head_share(spec)
    weights_s, head_s = step_s * (1 - head), step_s * head
    token_s = min(weights_s, max(0.0, chunk_s - head_s) / count)  # one position gets logits
    products = sum(math.prod(slot.shape) for slot in slots_of(spec) if len(slot.shape) >= 2)
    pairs = 2 * spec.layers * spec.heads * spec.head_dim  # multiplications: scores and values
    kv_bytes = memory.groups * memory.size_bytes / ((memory.blocks + 1) * memory.block_size)
    return StepWork(
        weights_s=weights_s,
        token_s=token_s,
        head_s=head_s,
        head_token_s=token_s * head / (1 - head),
        pair_s=token_s * pairs / products,
        read_s=step_s * kv_bytes / weight_bytes,
    )


def _seconds(forward: Forward, worker: Worker, memory: KvMemory, count: int) -> float:
    """Processor time of a step with one chunk of `count` tokens."""
    blocks = -(-count // memory.block_size)
    batch = Batch(
        np.arange(count),
        np.tile(np.arange(blocks), (memory.groups, 1, 1)),
        [0],
        [0],
        [count],
        [],
        [0],
    )

    def run() -> float:
        began_s = time.thread_time()
        forward.logits(batch)
        return time.thread_time() - began_s

    return worker.submit(run).result()
