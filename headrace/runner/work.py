"""What the parts of a step cost, for parting its time among rows: `engine.protocol.StepWork`.

On a GPU from the model of step time (`calibrate`); on a processor from two short runs of the real
forward pass at the start. Both measure whole steps; what of that belongs to the head, to reading KV
and to attention follows from bytes and operations.
"""

from __future__ import annotations

import time

import torch

from headrace.backends.cpu.forward import Batch, Forward
from headrace.backends.cpu.kv_store import KvStore
from headrace.engine.protocol import StepCost, StepWork
from headrace.models.layers import Decoder
from headrace.runner.worker import Worker

_CHUNK_TOKENS, _SLOW_CHUNK_TOKENS = 16, 4
_SLOW_S = 0.1  # a token that takes longer: the start has no time for a long chunk


def head_share(model: Decoder) -> float:
    """The head's part of the weights that a step reads, by parameters."""
    spec = model.spec
    head = spec.vocab_rows * spec.hidden
    total = sum(p.numel() for p in model.parameters())
    return head / (total if spec.tied else total - head)  # untied: of the embedding it reads rows


def from_cost(cost: StepCost, model: Decoder) -> StepWork:
    """Of a device whose step time is known: by steps of which one position gets logits."""
    head = head_share(model)
    return StepWork(
        weights_s=cost.floor_s * (1 - head),
        token_s=cost.token_s,
        head_s=cost.floor_s * head,
        head_token_s=cost.token_s * head / (1 - head),
        pair_s=cost.pair_s,
        read_s=cost.read_s,
    )


def measure(
    forward: Forward, worker: Worker, model: Decoder, store: KvStore, weight_bytes: int
) -> StepWork:
    """Of a processor: one token alone is the reading of the weights, a chunk shows the products.

    Runs steps of random tokens in the first KV blocks; who gets them writes them anew.
    """
    _seconds(forward, worker, store, 1)  # memory is touched, buffers are made
    step_s = _seconds(forward, worker, store, 1)
    count = _CHUNK_TOKENS if step_s < _SLOW_S else _SLOW_CHUNK_TOKENS
    count = min(count, store.blocks * store.block_size)
    chunk_s = _seconds(forward, worker, store, count)
    spec, head = model.spec, head_share(model)
    weights_s, head_s = step_s * (1 - head), step_s * head
    token_s = min(weights_s, max(0.0, chunk_s - head_s) / count)  # one position gets logits
    products = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    pairs = 2 * spec.layers * spec.heads * spec.head_dim  # multiplications: scores and values
    kv_bytes = sum(tensor[0].nbytes for tensor in (*store.k, *store.v)) / store.block_size
    return StepWork(
        weights_s=weights_s,
        token_s=token_s,
        head_s=head_s,
        head_token_s=token_s * head / (1 - head),
        pair_s=token_s * pairs / products,
        read_s=step_s * kv_bytes / weight_bytes,
    )


def _seconds(forward: Forward, worker: Worker, store: KvStore, count: int) -> float:
    """Processor time of a step with one chunk of `count` tokens."""
    blocks = -(-count // store.block_size)
    batch = Batch(
        torch.arange(count),
        torch.arange(blocks)[None],
        [0],
        [0],
        [count],
        [],
        [0],
    )

    def run() -> float:
        began_s = time.thread_time()
        with torch.inference_mode():
            forward.logits(batch)
        return time.thread_time() - began_s

    return worker.submit(run).result()
