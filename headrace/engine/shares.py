"""Who pays for a step: its device time parted among its forward rows.

What is read once for all rows is shared by those that use it, one part a row: the weights of the
layers by every row, those of the head by rows that get logits. Beyond the time of that reading,
products cost time for each token, and are shared by tokens. Attention is a row's own: the KV that
it reads, or for long chunks its pairs of tokens.

That is the Shapley value of `max(reading, products)`: who comes first pays the reading, whoever
comes later only what is added, and every order counts alike. So a decode beside a chunk of 2048
tokens pays half the reading of the weights, not 1/2049 of the step, and never more than alone; rows
that only decode pay equal parts and their own KV.

Shares are whole femtoseconds, so that they add up exactly.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.engine.protocol import StepWork
from headrace.messages import Output, StepPlan

FS = 10**15  # in a second


class Costs(NamedTuple):
    """What the rows of one step cost by a model, in seconds. A decode row at position p costs
    row_s + read_s * (p + 1)."""

    row_s: float
    read_s: float
    chunks_s: list[float]  # of the forward rows after the decode rows
    total_s: float
    reads: int  # tokens that all decode rows read: the sum of p + 1


class Shares(NamedTuple):
    """The same in femtoseconds of the step's real time. rest_fs is what rounding left over."""

    row_fs: int
    read_fs: int
    chunks_fs: list[int]
    rest_fs: int


def modelled(work: StepWork, plan: StepPlan, decodes: int) -> Costs:
    """What each row would cost by the model `work`.

    decodes: the first so many forward rows are decode rows: one token, one draw each.
    """
    rows = len(plan.rows)
    assert rows > 0, "a step without rows"
    starts, counts = plan.starts[decodes:], plan.counts[decodes:]
    heads = [_headed(plan, i) for i in range(decodes, rows)]
    tokens, headed = decodes + sum(counts), decodes + sum(map(bool, heads))
    row_s, token_s = _product(work.weights_s, work.token_s, rows, tokens)
    head_row_s, head_s = _product(work.head_s, work.head_token_s, headed, decodes + sum(heads))
    chunks_s = [
        row_s
        + token_s * count
        + (head_row_s + head_s * head if head else 0.0)
        + max(work.pair_s * count * (start + count / 2), work.read_s * (start + count))
        for start, count, head in zip(starts, counts, heads, strict=True)
    ]
    row_s += token_s + head_row_s + head_s
    reads = sum(plan.starts) - sum(starts) + decodes
    total_s = decodes * row_s + reads * work.read_s + sum(chunks_s)
    return Costs(row_s, work.read_s, chunks_s, total_s, reads)


def split(costs: Costs, decodes: int, busy_fs: int) -> Shares:
    """`busy_fs` >= 0 in the proportions of `costs`; its parts add up to exactly that."""
    assert costs.total_s > 0, "a step whose rows cost nothing"
    scale = busy_fs / costs.total_s
    row_fs, read_fs = int(costs.row_s * scale), int(costs.read_s * scale)
    chunks_fs = [int(chunk_s * scale) for chunk_s in costs.chunks_s]
    given_fs = decodes * row_fs + costs.reads * read_fs + sum(chunks_fs)
    return Shares(row_fs, read_fs, chunks_fs, busy_fs - given_fs)


def _headed(plan: StepPlan, row: int) -> int:
    """Positions of a chunk that the head computes."""
    output = plan.outputs[row]
    if output == Output.PROMPT_LOGPROBS:
        return plan.counts[row]
    return int(output == Output.SAMPLE)


def _product(weights_s: float, token_s: float, rows: int, tokens: int) -> tuple[float, float]:
    """Reading, for each row, and what products take beyond it, for each token."""
    if not rows:
        return 0.0, 0.0
    return weights_s / rows, max(0.0, token_s - weights_s / tokens)
