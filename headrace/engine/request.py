"""Request and Sequence: the only mutable record of a request. Loop thread only.

A request's progress is integers. For one sequence (one choice), always

    computed <= planned <= len(tokens) + draws in flight,    len(tokens) <= limit

Tokens that a grammar forces are known before they are drawn: they are appended to `tokens`, and a
draw in flight for a position that is known by then is dropped.

  tokens    prompt and drawn tokens that the host has read
  cached    tokens whose KV came from the prefix cache when it was last admitted
  planned   tokens whose KV a launched step computes or has computed
  computed  tokens whose KV a finished step has computed
  base      len(tokens) when it was last admitted, or when its grammar last forced tokens: what is
            at or after it was drawn into its row
  room      the token at this position needs another look at memory (or is the last one)
  limit     prompt + max_tokens; where nothing is drawn, the end of its last step counts as a token
  claim     blocks that layers with a window may still take for what it brought
  scored    newest prompt token whose log-probability was passed on (0: none; token 0 has none)
  pooled    sum of the hidden states that finished steps have computed since its position 0
  settled   newest step that may still hold a draw of it when it lost its row: until that step has
            finished, `tokens` is not all that was drawn, and it cannot be admitted again

Prefill, decode and resumption are the same thing: `planned` chases what is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.policy import Key, Policy, order_key
from headrace.engine.protocol import Matcher
from headrace.errors import HeadraceError
from headrace.kv.cache import Table
from headrace.messages import Pooling, Reason, Submit

NO_ROW = -1


class Sequence:
    """One choice of a request."""

    __slots__ = (
        "base",
        "cached",
        "choice",
        "claim",
        "computed",
        "ended",
        "forcible",
        "handle",
        "key",
        "limit",
        "matcher",
        "owner",
        "peak",
        "planned",
        "pooled",
        "pooling",
        "prompt_tokens",
        "queued",
        "request",
        "room",
        "row",
        "scored",
        "settled",
        "spare_rows",
        "stop_ids",
        "table",
        "tokens",
    )

    def __init__(
        self, request: Request, choice: int, key: Key, tokens: list[int], table: Table
    ) -> None:
        self.request = request
        self.owner = request.owner
        self.handle = request.submit.handle
        self.choice = choice
        self.key = key
        self.tokens = tokens
        self.table = table
        self.prompt_tokens = len(tokens)
        self.limit = len(tokens) + max(1, request.submit.max_tokens)
        self.pooling: Pooling | None = request.submit.pooling
        self.pooled: npt.NDArray[np.float64] | None = None
        self.stop_ids = request.stop_ids
        self.cached = self.planned = self.computed = self.room = 0
        self.base = len(tokens)
        self.claim = self.scored = 0
        self.settled = 0
        self.peak = 0  # the most it had planned when it was preempted
        self.row = NO_ROW
        self.spare_rows: list[int] = []  # rows kept for the other choices until the fork
        self.queued: Any = None  # its entry in the waiting queue, None when it does not wait
        self.ended = False
        self.matcher: Matcher | None = None  # where it stands in its grammar
        self.forcible = request.forcible

    @property
    def drained(self) -> bool:
        """Its last draw is in flight: nothing is left to plan."""
        return self.planned >= self.limit - 1

    @property
    def unscored(self) -> bool:
        """Log-probabilities of its prompt are asked for and not all passed on."""
        return (
            self.request.submit.prompt_logprobs >= 0
            and self.choice == 0
            and self.scored < self.prompt_tokens - 1
        )

    @property
    def whole(self) -> bool:
        """Every token of its prompt must be computed: no cache is read."""
        return self.pooling == "mean" or self.unscored

    @property
    def generated(self) -> int:
        """Drawn tokens that the host has read."""
        return len(self.tokens) - self.prompt_tokens


class Request:
    """One `Submit` and what became of it: a group of `n` sequences, one before the fork.

    One prefill serves all choices: choice 0 computes the prompt, the others are forked from it in
    the plan that completes it. From then on each is scheduled on its own.
    """

    __slots__ = (
        "ahead",
        "arrival",
        "cached_tokens",
        "compute_fs",
        "counts",
        "error",
        "first_token_s",
        "last_token_s",
        "owner",
        "policy",
        "preempted_s",
        "reasons",
        "recompute_fs",
        "resident",
        "scheduled_s",
        "sequences",
        "stop_ids",
        "submit",
        "submitted_s",
    )

    def __init__(
        self, owner: int, submit: Submit, arrival: int, now: float, policy: Policy, table: Table
    ) -> None:
        self.owner = owner
        self.submit = submit
        self.arrival = arrival
        self.policy = policy
        self.stop_ids = frozenset(submit.stop_ids)
        self.submitted_s = now
        self.scheduled_s = self.first_token_s = self.last_token_s = -1.0  # -1: not yet
        self.cached_tokens = 0
        self.preempted_s: list[float] = []  # when it was, each time
        self.compute_fs = 0  # device time charged so far; see `engine.meter`
        self.recompute_fs = 0  # of that, for what preemptions had lost
        self.ahead = False  # a choice ended while a step in flight may have held a row of it
        self.resident = 0  # sequences that own a row
        self.counts = [0] * submit.n  # output tokens of choices that ended
        self.error: HeadraceError | None = None  # of the first choice that ended with one
        self.reasons: list[Reason | None] = [None] * submit.n  # None: still open
        self.sequences = [self._sequence(0, list(submit.prompt), table)]

    def _sequence(self, choice: int, tokens: list[int], table: Table) -> Sequence:
        key = order_key(self.policy, self.submit.priority, self.arrival, choice)
        return Sequence(self, choice, key, tokens, table)

    @property
    def forcible(self) -> bool:
        """Tokens that its grammar forces need no draw: nothing else is asked of a draw."""
        sampling = self.submit.sampling
        rules = sampling.rules
        free = rules is None or not (rules.allowed or rules.banned or rules.bad_words)
        return free and sampling.logprobs < 0

    @property
    def draws(self) -> bool:
        """Tokens are asked for; else it has ended when its prompt is computed."""
        return self.submit.max_tokens > 0

    @property
    def unforked(self) -> bool:
        """Choices 1.. do not exist yet. They never will where nothing is drawn."""
        return self.draws and len(self.sequences) < self.submit.n

    @property
    def closed(self) -> bool:
        """Every choice has ended."""
        return None not in self.reasons

    @property
    def rows(self) -> int:
        """Device rows that its next admission takes."""
        return self.submit.n if self.unforked else 1

    def fork(self, table: Table) -> Sequence:
        """The next choice, standing where choice 0 stands; the caller gives it a row."""
        parent = self.sequences[0]
        child = self._sequence(len(self.sequences), parent.tokens.copy(), table)
        child.key = (parent.key[0], self.arrival, child.choice)
        child.cached, child.planned = parent.cached, parent.planned
        child.computed, child.base = parent.computed, parent.base
        child.matcher = parent.matcher.clone() if parent.matcher is not None else None
        self.sequences.append(child)
        return child
