"""What every runner reads off a plan, and the promises that it holds the scheduler to."""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import EngineError
from headrace.messages import Output, StepPlan

_DRAWN = (Output.SAMPLE, Output.PROMPT_LOGPROBS)
_OFFERED = (Output.NONE, Output.POOL, *_DRAWN)


def sources_of(plan: StepPlan) -> list[int]:
    """Forward rows that are drawn from, in the order of their first draw."""
    return list(dict.fromkeys(plan.draw_from))


def lasts_of(plan: StepPlan) -> list[int]:
    """Forward rows whose last token's hidden state is wanted, and no logits."""
    return [row for row, kind in plan.pools if kind != "sum"]


def whole(plan: StepPlan) -> bool:
    """Whether something is wanted of tokens that are not the last of their forward row."""
    return bool(plan.prompts) or any(kind == "sum" for _, kind in plan.pools)


def refuse_unoffered(plan: StepPlan) -> None:
    """Raises EngineError for a kind of output that no runner of a model offers."""
    for kind in plan.outputs:
        if kind not in _OFFERED:
            raise EngineError(f"this runner does not offer output kind {kind}")


def check(plan: StepPlan, taken: Callable[[int], bool]) -> None:
    """The plan's own promises; a broken one is a bug of the scheduler.

    `taken`: whether a sequence owns a device row, after the plan's leaves and joins.
    """
    for row, count, ids in zip(plan.rows, plan.counts, plan.ids, strict=True):
        assert taken(row), f"step {plan.step} computes row {row}, which is free"
        assert count == (1 if ids is None else len(ids)), f"row {row}: {count} tokens, ids {ids}"
    assert not plan.draw_at, "this runner draws from last positions"
    for i in plan.draw_from:
        assert plan.outputs[i] in _DRAWN, f"a draw from forward row {i}, which has no output"
    for i, _ in plan.pools:
        assert plan.outputs[i] == Output.POOL, f"forward row {i} yields no vector"
        assert plan.ids[i] is not None, f"forward row {i} yields a vector but has no ids"
    assert len({i for i, _ in plan.pools}) == len(plan.pools), "a forward row yields two vectors"
    for i, count, after in plan.prompts:
        assert plan.outputs[i] == Output.PROMPT_LOGPROBS, f"forward row {i} reports no prompt"
        assert plan.ids[i] is not None, f"forward row {i} reports a prompt but has no ids"
        assert count >= 0, f"forward row {i}: {count} most likely tokens"
        assert after >= -1, f"forward row {i}: id {after}"
