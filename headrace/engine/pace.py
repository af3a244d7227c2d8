"""Pace: how late the next step may be launched without the device running dry.

A step that is launched as soon as the one before it begins waits on the device for as long as that
one takes, and whoever arrives meanwhile is left to the step behind both. So where single tokens are
computed step after step, the launch waits as well, for arrivals, until the device will soon be
done: a request then waits for the rest of one step instead of for one and a half. Only who has
others to listen to (`engine.server`) makes use of it; tokens do not depend on it.
"""

from __future__ import annotations

from headrace.messages import StepPlan

LEAST_SLACK_S = 0.0015  # kept beside what a launch takes: wake-ups are late by up to a millisecond
MOST_SLACK_S = 0.05
LEAST_WAIT_S = 0.001
LATE_S = 0.0002  # a wait that took no longer was none: the device was dry before the launch
REQUEST_S, TOKEN_S = 1e-4, 4e-7  # to plan and send one that waits, and each token of its prompt
_FORGET = 0.97  # a step: of the longest launch, and of slack that was added


class Pace:
    """Knows the step in flight from its launch and from the end of the one before it.

    It takes as long as the last one, if both compute single tokens of the same sequences; of others
    nothing is known, and nobody waits. A step may be long for once, because a driver or the process
    was stopped; so it takes no longer than the one before that, whosever single tokens those were.
    Each time that the device was found dry after a wait, the slack doubles; it shrinks again step
    by step.
    """

    def __init__(self) -> None:
        self._slack_s = LEAST_SLACK_S
        # The longest of late, planning and launching: steps with prompts, steps of single tokens.
        self._launch_s = [0.0, 0.0]
        self._rows = 0  # of the step launched last; 0: not of single tokens, or of others' too
        self._begins_s = 0.0  # the device began it about then
        self._last_rows = 0  # of the step that ended last; 0: not of single tokens
        self._singles_s = 0.0, 0.0  # the last two steps of single tokens took; 0: there was none
        self._waited = False  # for arrivals, before the step launched last

    def launched(self, plan: StepPlan, begun_s: float, now_s: float) -> None:
        """`plan` is queued on the device; planning it began at `begun_s`."""
        rows = _single_rows(plan)
        self._rows, self._begins_s = 0 if plan.joins else rows, begun_s
        kind = rows > 0
        self._launch_s[kind] = max(now_s - begun_s, self._launch_s[kind] * _FORGET)

    def landed(self, plan: StepPlan, busy_s: float, waited_s: float, now_s: float) -> None:
        """The device was done with `plan` at `now_s`, after a wait of `waited_s`, and goes on.

        What the host does with the result is no part of the wait: it would hide that the device had
        run dry, and move the beginning of the next step.
        """
        self._last_rows = _single_rows(plan)
        if self._last_rows:
            self._singles_s = self._singles_s[1], busy_s
        self._begins_s = max(self._begins_s, now_s)
        if self._waited and waited_s < LATE_S:
            self._slack_s = min(2 * self._slack_s, MOST_SLACK_S)
        else:
            self._slack_s = max(LEAST_SLACK_S, self._slack_s * _FORGET)
        self._waited = False

    def spare_s(self, now_s: float, waiting: int = 0, tokens: int = 0) -> float:
        """Seconds for which the device needs no launch; 0 = launch now.

        waiting: requests that the next step may admit; `tokens`: of their prompts. Needs: the step
        launched last is in flight, and the one before it has landed.
        """
        if self._rows == 0 or self._last_rows != self._rows:
            return 0.0
        launch_s = self._launch_s[not waiting] + self._slack_s
        launch_s += waiting * REQUEST_S + tokens * TOKEN_S
        spare_s = self._begins_s + min(self._singles_s) - launch_s - now_s
        if spare_s < LEAST_WAIT_S:
            return 0.0
        self._waited = True
        return spare_s


def _single_rows(plan: StepPlan) -> int:
    """How many, if each computes one token; else 0."""
    rows = len(plan.rows)
    return rows if rows == sum(plan.counts) else 0
