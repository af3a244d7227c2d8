"""Budget: how many tokens of prompts go into a step beside the tokens of those that decode.

`StaticBudget` counts tokens alone. `CostBudget` also keeps the predicted time of a step below the
target for the time between two tokens (ITL) while something decodes: so prompts that arrive in a
storm cost those that decode at most that much. A burst is no storm: a step that gives more
sequences their first token than it keeps waiting for the next may take as long as it needs. Each
of them then draws tokens of its own, so that under one gap in a hundred is a long one where answers
have a hundred tokens and more. What the last steps did not use of that counts on: the rest of a
burst, of fewer prompts than decode by then, goes as fast as its beginning.

Neither looks at a clock. `CostBudget` hears how long its limited steps took: see `engine.lateness`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.engine.lateness import Lateness
from headrace.engine.protocol import StepCost

_GAIN = 1.02  # in tokens a second, for which a step is made smaller than it may be
_KEPT = 0.5  # a step, of a burst's credit: what comes later is another burst
_BURST_SHARE = 2  # fewer prompts than one in this many of those that decode are no burst
CRUMB_SHARE = 16  # less than one part in this many of a step is no beginning for a longer prompt


class Prediction(NamedTuple):
    """What a step should take: seconds, by the runner's model alone, and the load behind it (see
    `engine.lateness`)."""

    seconds: float
    load_s: float


class Budget(Protocol):
    """One object for all steps: `begin`, then a `grant` for each chunk while it is `open`."""

    open: bool  # another chunk of this step may get tokens

    def begin(self, decodes: Sequence[int], *, stalled: bool, prompts: int, tokens: int) -> None:
        """A new step. `decodes`: positions of its decode rows, a token each.

        stalled: a sequence past its prompt is left out of this step for want of memory.
        prompts: sequences that have drawn no token, admitted or waiting; `tokens`: of all of them,
        those that are to compute before.
        """

    def grant(self, start: int, wanted: int) -> int:
        """Tokens that the next chunk gets: `wanted` of them or fewer, from position `start` on.

        A chunk that gets fewer closes the budget; it may get none. The first chunk of a step gets
        at least one token where the budget was open. What is left of a step behind other chunks is
        not spent on a crumb of a longer prompt: that would only cut it once more.
        """

    @property
    def prediction(self) -> Prediction | None:
        """Of the step planned last, where the target limits it."""

    def learn(self, prediction: Prediction, busy_s: float) -> None:
        """A step of which that was predicted kept the device busy for `busy_s` seconds."""

    @property
    def factor(self) -> float:
        """How many times what was predicted such a step takes, by what was learned."""


def budget_for(cost: StepCost | None, max_tokens: int, target_s: float) -> Budget:
    """The budget of an engine whose steps hold `max_tokens` tokens; target_s = 0 is no limit."""
    if target_s == 0:
        return StaticBudget(max_tokens)
    assert cost is not None, "a target for the step time, and a runner that does not know it"
    return CostBudget(cost, max_tokens, target_s)


def _is_crumb(left: int, wanted: int, max_tokens: int) -> bool:
    return left < wanted and left * CRUMB_SHARE < max_tokens


class StaticBudget:
    """As many tokens as a step may hold, less a crumb."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._left = 0
        self._granted = False  # a chunk of this step has tokens
        self.open = False

    def begin(self, decodes: Sequence[int], *, stalled: bool, prompts: int, tokens: int) -> None:
        """See `Budget`."""
        self._left = self._max_tokens - len(decodes)
        self._granted = False
        self.open = self._left > 0

    def grant(self, start: int, wanted: int) -> int:
        """See `Budget`."""
        if self._granted and _is_crumb(self._left, wanted, self._max_tokens):
            self.open = False
            return 0
        count = min(wanted, self._left)
        self._left -= count
        self._granted = True
        self.open = self._left > 0
        return count

    @property
    def prediction(self) -> Prediction | None:
        """There is none."""
        return None

    def learn(self, prediction: Prediction, busy_s: float) -> None:
        """Nobody tells what was never predicted."""
        raise AssertionError("a budget that predicts nothing")

    @property
    def factor(self) -> float:
        """Nothing was."""
        return 1.0


class CostBudget:
    """As many tokens as fit below `target_s` seconds; `StaticBudget`'s while nothing decodes, and
    in a burst: while more prompts of the mean length fit a step than sequences decode. Those that
    got their first token in the last steps count as well, less the sequences that waited beyond the
    target then, as long as prompts are half as many as decode.

    Progress: whatever the prediction says, a step takes at least one tile of prompt tokens, and as
    many more as fill the last tile, as far as max_tokens allows. No prompt starves, however many
    decode and however long their contexts are; the target gives way, not the prompt.

    Tiles: tokens are paid in whole tiles, so a chunk that must be cut is cut where a tile is full;
    and of the sizes that were measured, at the one that gets most prompt tokens done in a second.
    """

    def __init__(self, cost: StepCost, max_tokens: int, target_s: float) -> None:
        self._cost, self._max_tokens, self._target_s = cost, max_tokens, target_s
        self._tokens = 0  # of the step so far
        self._prompt_tokens = 0  # of these
        self._pairs = 0.0  # as StepCost.seconds has them
        self._reads = 0
        self._decodes = 0
        self._firsts = 0  # prompts completed in the step so far
        self._credit = 0.0  # first tokens of the last steps less their long gaps
        self._sure_tokens = 0  # of the step: up to here no prediction is asked
        self._lateness = Lateness()
        self._load_s = 0.0  # behind the step
        self._whole = StaticBudget(max_tokens)  # of a step that has no limit
        self._limited = False
        self.open = False

    def begin(self, decodes: Sequence[int], *, stalled: bool, prompts: int, tokens: int) -> None:
        """See `Budget`."""
        self._settle()
        tile = self._cost.tile
        self._tokens, self._prompt_tokens = len(decodes), 0
        self._decodes, self._firsts = len(decodes), 0
        self._pairs = 0.0
        self._reads = sum(decodes) + len(decodes)  # position p reads p + 1 tokens
        least = -(-(len(decodes) + tile) // tile) * tile
        self._sure_tokens = min(least, self._max_tokens)
        room = self._max_tokens - len(decodes)
        firsts = prompts * room // tokens if tokens > room else prompts  # that the step could hold
        self._limited = stalled or (bool(decodes) and not self._is_burst(firsts))
        self._whole.begin(decodes, stalled=stalled, prompts=prompts, tokens=tokens)
        self.open = self._tokens < self._max_tokens

    def grant(self, start: int, wanted: int) -> int:
        """See `Budget`."""
        if self._limited:
            most = min(wanted, self._max_tokens - self._tokens)
            count = min(most, max(0, self._sure_tokens - self._tokens))
            if count < most:
                count = max(count, self._fitting(start, most, wanted))
        else:
            count = self._whole.grant(start, wanted)
        self._tokens += count
        self._prompt_tokens += count
        self._pairs += count * (start + count / 2)
        self._firsts += count == wanted
        whole = count == wanted and self._tokens < self._max_tokens
        self.open = whole if self._limited else self._whole.open
        return count

    @property
    def prediction(self) -> Prediction | None:
        """See `Budget`. There is none of a short step, whose time the card's clock does not
        settle."""
        seconds = self._model_s() if self._limited and self._prompt_tokens else 0.0
        return Prediction(seconds, self._load_s) if seconds * 2 >= self._target_s else None

    def learn(self, prediction: Prediction, busy_s: float) -> None:
        """See `Budget`."""
        self._lateness.learn(prediction.load_s, prediction.seconds, busy_s)

    @property
    def factor(self) -> float:
        """See `Budget`."""
        return self._lateness.factor(self._load_s)

    def _model_s(self) -> float:
        return self._cost.seconds(self._tokens, self._pairs, self._reads)

    def _settle(self) -> None:
        """Book the step before: the sequences that got their first token, the long gaps, and the
        load."""
        seconds = self._model_s() * self.factor
        gaps = self._decodes if seconds > self._target_s else 0
        self._credit = max(0.0, self._credit * _KEPT + self._firsts - gaps)
        prompts = self._prompt_tokens > 0
        self._load_s = self._lateness.loaded(self._load_s, seconds, prompts=prompts)

    def _is_burst(self, firsts: int) -> bool:
        """A step may be long that gives so many their first token."""
        if firsts > self._decodes:
            return True
        return firsts * _BURST_SHARE >= self._decodes < firsts + int(self._credit)

    def _fitting(self, start: int, most: int, wanted: int) -> int:
        """The most tokens, up to `most`, with which the step stays within the target."""

        def seconds(count: int) -> float:
            pairs = self._pairs + count * (start + count / 2)
            return self._cost.seconds(self._tokens + count, pairs, self._reads)

        target_s = self._target_s / self.factor
        count = bisect_right(range(1, most + 1), target_s, key=seconds)
        if count == wanted:
            return count
        whole = (self._tokens + count) // self._cost.tile * self._cost.tile - self._tokens
        largest = count if whole < 0 else whole  # below 0: the tile is paid for already
        smaller = [size - self._tokens for size in self._cost.sizes if size - self._tokens > 0]
        rates = {n: (self._prompt_tokens + n) / seconds(n) for n in smaller if n < largest}
        best = max(rates, key=rates.__getitem__, default=largest)
        worth = best != largest and rates[best] > _GAIN * (
            (self._prompt_tokens + largest) / seconds(largest)
        )
        return best if worth else largest
