"""Registry: every live request, and what its owner is told: tokens, ends, and the one Done.

Every submitted (owner, handle) gets exactly one Done, unless its owner is dropped. A handle that is
submitted again while it lives is refused with a Done of its own; the live request goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import repeat

from headrace.config import Settings
from headrace.engine.compiling import Compiling
from headrace.engine.draft import Flight
from headrace.engine.meter import Meter
from headrace.engine.outbox import Outbox
from headrace.engine.pooling import refuse_pooling, vector_of
from headrace.engine.protocol import Capacity, Grammars, Matcher
from headrace.engine.recorder import Recorder
from headrace.engine.request import NO_ROW, Request, Sequence
from headrace.engine.scheduler import Scheduler
from headrace.engine.shares import FS
from headrace.engine.stats import Tally
from headrace.errors import (
    ContextTooLong,
    HeadraceError,
    InvalidRequest,
    QueueFull,
    RequestFailed,
)
from headrace.kv.cache import KVCache
from headrace.messages import (
    NO_TOKEN_ALLOWED,
    Done,
    End,
    Logprobs,
    PromptLogprobs,
    Reason,
    Rules,
    StepResult,
    Submit,
    Vector,
)

_NONE: Iterable[None] = repeat(None)  # never ends: the report column of a step that has none


class Registry:
    """Live requests by owner and handle. Loop thread only."""

    def __init__(
        self,
        settings: Settings,
        kv: KVCache,
        capacity: Capacity,
        scheduler: Scheduler,
        tally: Tally,
        meter: Meter,
        grammars: Grammars | None = None,
    ) -> None:
        self.outbox = Outbox()
        self.recorder = Recorder(kv, self.outbox)
        self.live = 0
        self.constrained = 0  # live requests with a grammar
        self.compiling = Compiling(grammars)
        self._ends = grammars.end_ids if grammars is not None else ()
        self._requests: dict[int, dict[int, Request]] = {}  # owner -> handle -> request
        self._arrivals = 0
        self._settings = settings
        self._kv = kv
        self._capacity = capacity
        self._scheduler = scheduler
        self._tally = tally
        self._meter = meter

    # ------------------------------------------------------------ from owners

    def submit(self, owner: int, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it with its Done at once."""
        self._tally.started += 1
        try:
            self._refuse(owner, submit)
        except HeadraceError as error:
            self._tally.finished["refused"] += 1
            done = Done(submit.handle, error.code, error.message)
            self.outbox.of(owner).dones.append(done)
            return
        self._arrivals += 1
        variant = self._capacity.variant(len(submit.prompt))
        table = self._kv.open(submit.cache_salt, submit.adapter, variant)
        policy = self._settings.scheduling_policy
        request = Request(owner, submit, self._arrivals, now, policy, table)
        self._requests.setdefault(owner, {})[submit.handle] = request
        self.live += 1
        if submit.record:
            self.recorder.open(request)
        if submit.grammar is None:
            self._scheduler.add(request.sequences[0], now)
        else:
            self.constrained += 1
            self.compiling.add(request, now)

    def admit_compiled(self, now: float) -> None:
        """Requests whose matcher is there join the queue; those that have none end."""
        for request, error in self.compiling.take(now):
            if error is None:
                self._scheduler.add(request.sequences[0], now)
            else:
                self._end_all(request, "error", error.code, error.message)

    def _refuse(self, owner: int, submit: Submit) -> None:
        """Raise what is wrong with a submit: what can never run, a live handle, a full queue."""
        if submit.handle in self._requests.get(owner, ()):
            raise InvalidRequest(f"handle {submit.handle} is already live", param="handle")
        refuse_pooling(submit, self._capacity)
        prompt, most = len(submit.prompt), submit.max_tokens
        if prompt < 1 or most < 0 or submit.n < 1:
            raise InvalidRequest(
                f"{prompt} prompt tokens, max_tokens {most}, n {submit.n}: at least 1, 0 and 1"
            )
        if not 0 <= min(submit.prompt) <= max(submit.prompt) < self._capacity.vocab_size:
            raise InvalidRequest(
                f"prompt ids run from {min(submit.prompt)} to {max(submit.prompt)}; the vocabulary "
                f"has {self._capacity.vocab_size}",
                param="prompt",
            )
        rows = self._scheduler.rows
        if submit.n > rows:
            raise InvalidRequest(
                f"n = {submit.n} is over {rows}, the sequences that can run at once", param="n"
            )
        self._refuse_length(prompt, most)
        if submit.grammar is not None:
            self.compiling.refuse()
        queue, free = self._scheduler.queue, self._scheduler.free_rows
        limit = self._settings.max_queue
        # Those for whom rows are free are on their way, though no step has taken them in yet.
        soon, rows = len(queue) + len(self.compiling), queue.rows + self.compiling.rows
        waiting = min(soon, max(0, rows - free))
        if waiting >= limit and rows + submit.n > free:
            raise QueueFull(f"{waiting} requests wait; max_queue is {limit}")

    def _refuse_length(self, prompt: int, most: int) -> None:
        total = prompt + most
        longest = self._capacity.max_model_len
        if total > longest:
            raise ContextTooLong(
                f"{prompt} prompt tokens + max_tokens {most} = {total} exceed the context length "
                f"of {longest} tokens",
                param="max_tokens",
            )
        computed = max(prompt, total - 1)  # the last token that is drawn is not computed
        kv = self._kv
        if kv.most_held(kv.blocks_for(computed)) > kv.size:
            raise ContextTooLong(
                f"{prompt} prompt tokens + max_tokens {most} = {total} exceed the KV cache of "
                f"{kv.longest_tokens} tokens",
                param="max_tokens",
            )

    def abort(self, owner: int, handle: int) -> None:
        """Every open choice ends with "abort". Unknown handles are ignored: it may have ended."""
        request = self._requests.get(owner, {}).get(handle)
        if request is not None:
            self._end_all(request, "abort")

    def drop_owner(self, owner: int) -> None:
        """The owner is gone: abort its requests and forget what it has not taken."""
        billed_fs = self._meter.billed_fs
        for request in list(self._requests.get(owner, {}).values()):
            self._end_all(request, "abort")
        self._meter.unclaimed_fs += self._meter.billed_fs - billed_fs
        self.outbox.discard(owner)

    def finish(self, owner: int, handle: int, choice: int, n_tokens: int) -> None:
        """The choice ends with "stop" after its first `n_tokens` tokens.

        A choice that ended meanwhile keeps its reason, and counts to `n_tokens` all the same while
        its request lives. Unknown handles and choices are ignored: it may have ended.
        """
        request = self._requests.get(owner, {}).get(handle)
        if request is None or not 0 <= choice < len(request.sequences):
            return
        sequence = request.sequences[choice]
        count = max(0, min(n_tokens, sequence.generated))
        if sequence.ended:
            request.counts[choice] = min(request.counts[choice], count)
        else:
            self._end(sequence, "stop", -1, count)

    # ------------------------------------------------------------ from the runner

    def apply(self, flight: Flight, result: StepResult, now: float) -> None:
        """A step has finished: pass its tokens on, publish full blocks, end what is complete."""
        plan, tokens = flight.plan, result.tokens
        assert result.step == plan.step, f"result of step {result.step} for {plan.step}"
        assert len(tokens) == len(plan.draw_into), "one token a draw"
        self._kv.fence(plan.step)
        self._meter.charge(flight, result.busy_s)
        self._tally.steps += 1
        decodes = len(flight.decoders)
        reports = result.logprobs or _NONE
        assert not result.logprobs or len(result.logprobs) == len(tokens), "one report a draw"
        if plan.prompts:
            self._pass_prompts(flight, result)
        for sequence in flight.complete:
            if not sequence.ended:
                self._end(sequence, "stop")
        if result.failed or (tokens and min(tokens) < 0):
            self._fail_draws(flight, result)
        self._apply_decodes(flight, tokens, reports, now)
        counts, starts = plan.counts, plan.starts
        if flight.prefills:
            self._tally.prefill_tokens += sum(counts[decodes:])
        for i, sequence in enumerate(flight.prefills, decodes):
            if sequence.row != NO_ROW:
                sequence.computed = starts[i] + counts[i]
                self._kv.commit(sequence.table, sequence.tokens, sequence.computed)
        if plan.pools:
            self._pass_vectors(flight, result, now)
        for sequence in flight.read:
            if not sequence.ended:
                sequence.request.first_token_s = sequence.request.last_token_s = now
                self._end_all(sequence.request, "length")
        for j, sequence in enumerate(flight.drawers, decodes):
            if not sequence.ended:
                entry = result.logprobs[j] if result.logprobs else None
                self._first_draw(sequence, tokens[j], entry, now)

    def _pass_prompts(self, flight: Flight, result: StepResult) -> None:
        """Log-probabilities of prompt tokens, each sent once whatever was computed twice."""
        plan, decodes = flight.plan, len(flight.decoders)
        for (row, _, _), entries in zip(plan.prompts, result.prompt_logprobs, strict=True):
            sequence, first = flight.prefills[row - decodes], plan.starts[row] + 1
            if sequence.ended:
                continue
            known = max(0, sequence.scored + 1 - first)
            sequence.scored = first + len(entries) - 1
            out = self.outbox.of(sequence.owner)
            out.prompt_logprobs.append(
                PromptLogprobs(sequence.handle, first + known, entries[known:])
            )

    def _pass_vectors(self, flight: Flight, result: StepResult, now: float) -> None:
        """Vectors that are complete: each ends its request with "stop"."""
        plan, decodes = flight.plan, len(flight.decoders)
        for (row, _), values in zip(plan.pools, result.vectors, strict=True):
            sequence, start = flight.prefills[row - decodes], plan.starts[row]
            if sequence.ended:
                continue
            request = sequence.request
            try:
                vector = vector_of(sequence, values, start, start + plan.counts[row])
            except HeadraceError as error:
                self._end_all(request, "error", error.code, error.message)
                continue
            if vector is not None:
                request.first_token_s = request.last_token_s = now
                self.outbox.of(sequence.owner).vectors.append(Vector(sequence.handle, vector))
                self._end(sequence, "stop")

    def _apply_decodes(
        self,
        flight: Flight,
        tokens: list[int],
        reports: Iterable[Logprobs | None],
        now: float,
    ) -> None:
        """The hot loop: one token for each decoding sequence."""
        kv, outbox = self._kv, self.outbox
        block_size, owner, sent = kv.block_size, None, 0
        for sequence, start, token, entry in zip(
            flight.decoders, flight.plan.starts, tokens, reports, strict=False
        ):
            if sequence.ended:
                continue  # a token past the end: its KV was never published
            if sequence.row != NO_ROW:  # else preempted since: the token counts, the KV is gone
                sequence.computed = computed = start + 1
                if not computed % block_size:
                    kv.commit(sequence.table, sequence.tokens, computed)
            known = sequence.tokens
            if len(known) > start + 1:
                continue  # its grammar had forced this token, and those after it
            if sequence.owner != owner:
                owner = sequence.owner
                out = outbox.of(owner)
                handles, choices, texts = out.handles, out.choices, out.tokens
            handles.append(sequence.handle)
            choices.append(sequence.choice)
            texts.append(token)
            if entry is not None:
                outbox.note(out, entry)
            sent += 1
            sequence.request.last_token_s = now
            known.append(token)
            if token in sequence.stop_ids:
                self._end(sequence, "stop", token)
            elif sequence.matcher is not None:
                sent += self._follow(sequence, token)
            elif len(known) >= sequence.limit:
                self._end(sequence, "length")
        self._tally.generation_tokens += sent

    def _first_draw(
        self, sequence: Sequence, token: int, entry: Logprobs | None, now: float
    ) -> None:
        """The token that completed a prompt, or what was known at a resumption."""
        request = sequence.request
        if request.first_token_s < 0:
            request.first_token_s = now
        if sequence.row != NO_ROW:  # a fork stands where its prompt's step stood
            sequence.computed = max(sequence.computed, sequence.base)
            self._kv.commit(sequence.table, sequence.tokens, sequence.computed)
        out = self.outbox.of(sequence.owner)
        out.handles.append(sequence.handle)
        out.choices.append(sequence.choice)
        out.tokens.append(token)
        if entry is not None:
            self.outbox.note(out, entry)
        self._tally.generation_tokens += 1
        request.last_token_s = now
        sequence.tokens.append(token)
        if token in sequence.stop_ids:
            self._end(sequence, "stop", token)
        elif sequence.matcher is not None:
            self._tally.generation_tokens += self._follow(sequence, token)
        elif len(sequence.tokens) >= sequence.limit:
            self._end(sequence, "length")

    def _follow(self, sequence: Sequence, token: int) -> int:
        """The grammar of `sequence` sees its newest token; returns how many more it forces.

        They are known and told at once, and the next plan computes them as one chunk. A choice
        whose grammar allows no more ends with "stop", without an end id.
        """
        matcher, known = sequence.matcher, sequence.tokens
        assert matcher is not None, "a choice without a grammar"
        before = len(known)
        try:
            matcher.advance(token)
            if sequence.forcible and not matcher.ended and before < sequence.limit - 1:
                self._force(sequence, matcher)
        except HeadraceError as error:
            self._fail(sequence, error)
            return 0
        if matcher.ended:
            self._end(sequence, "stop")
        elif len(known) >= sequence.limit:
            self._end(sequence, "length")
        return len(known) - before

    def _force(self, sequence: Sequence, matcher: Matcher) -> None:
        """Append what can only follow. One token is no gain: the draw in flight yields it."""
        known = sequence.tokens
        forced = matcher.forced()[: sequence.limit - len(known)]
        if len(forced) < 2 or not sequence.stop_ids.isdisjoint(forced):
            return
        out = self.outbox.of(sequence.owner)
        for token in forced:
            matcher.advance(token)
            known.append(token)
            out.handles.append(sequence.handle)
            out.choices.append(sequence.choice)
            out.tokens.append(token)
        sequence.base = len(known)

    def complete(self, flight: Flight, sequences: list[Sequence]) -> None:
        """The grammar of each allows only its end now: it ends with "stop", at once, or with the
        step in flight where that has yet to report on its request's prompt."""
        for sequence in sequences:
            if sequence.request.sequences[0].unscored:
                flight.complete.append(sequence)
            elif not sequence.ended:
                self._end(sequence, "stop")

    def give_up(self, flight: Flight) -> None:
        """Requests whose matcher was given up end with an error."""
        for sequence in (*flight.decoders, *flight.drawers):
            if sequence.matcher is not None and not sequence.ended:
                try:
                    sequence.matcher.check()
                except HeadraceError as error:
                    self._fail(sequence, error)

    def _fail_draws(self, flight: Flight, result: StepResult) -> None:
        """The choices behind failed draws end with an error, the others do not notice. What was
        drawn for a choice that has ended was for nobody: rules may leave no token of its mask."""
        sequences = [*flight.decoders, *flight.drawers]
        reasons = dict(result.failed)
        for draw, token in enumerate(result.tokens):
            if token < 0:
                reasons.setdefault(draw, "no token was drawn")
        for draw, why in reasons.items():
            if sequences[draw].ended:
                continue
            error: HeadraceError = RequestFailed(why)
            if why == NO_TOKEN_ALLOWED:
                error = _nothing_left(sequences[draw].request.submit, self._ends)
            self._fail(sequences[draw], error)

    def fail_running(self, why: str) -> None:
        """A step broke as a whole: every request that owns a row ends with `request_failed`."""
        for sequence in list(self._scheduler.running):
            self._end_all(sequence.request, "error", "request_failed", why)

    # ------------------------------------------------------------ ends

    def _end(
        self, sequence: Sequence, reason: Reason, stop_id: int = -1, count: int | None = None
    ) -> None:
        """One choice ends; the last one ends the request."""
        request = sequence.request
        self._end_choice(request, sequence.choice, reason, stop_id, count)
        if request.closed:
            self._close(request, "", "")

    def _fail(self, sequence: Sequence, error: HeadraceError) -> None:
        """One choice ends with an error, which the Done tells. Its text may have ended before, at a
        stop string: whoever reads it knows, and ends the other choices if it had not."""
        request = sequence.request
        request.error = request.error or error
        self._end(sequence, "error")

    def _end_all(
        self, request: Request, reason: Reason, error: str = "", message: str = ""
    ) -> None:
        """All open choices end, those not forked yet too."""
        if request.closed:
            return  # ended already, by another of its sequences
        for choice, known in enumerate(request.reasons):
            if known is None:
                self._end_choice(request, choice, reason)
        self._close(request, error, message)

    def _end_choice(
        self,
        request: Request,
        choice: int,
        reason: Reason,
        stop_id: int = -1,
        count: int | None = None,
    ) -> None:
        if choice < len(request.sequences):
            sequence = request.sequences[choice]
            sequence.ended = True
            request.ahead |= sequence.planned > sequence.computed
            if request.submit.record:
                self.recorder.ended(sequence, self._scheduler.launched)
            self._scheduler.drop(sequence)
            request.counts[choice] = sequence.generated if count is None else count
        request.reasons[choice] = reason
        end = End(request.submit.handle, choice, reason, stop_id)
        self.outbox.of(request.owner).ends.append(end)

    def _close(self, request: Request, error: str, message: str) -> None:
        """The one Done."""
        handle, owner = request.submit.handle, request.owner
        if request.error is not None and not error:
            error, message = request.error.code, request.error.message
        mine = self._requests[owner]
        del mine[handle]
        if not mine:
            del self._requests[owner]
        self.live -= 1
        self.constrained -= request.submit.grammar is not None
        order: tuple[Reason, ...] = ("error", "abort", "length", "stop")  # the worst names it
        worst = next(reason for reason in order if reason in request.reasons)
        self._tally.finished[worst] += 1
        begun = request.scheduled_s if request.scheduled_s >= 0 else request.last_token_s
        first = request.first_token_s
        done = Done(
            handle,
            error,
            message,
            len(request.submit.prompt),
            request.cached_tokens,
            sum(request.counts),
            max(0.0, begun - request.submitted_s),
            max(0.0, first - begun),
            max(0.0, request.last_token_s - first) if first >= 0 else 0.0,
            self._meter.settle(request) / FS,
            request.recompute_fs / FS,
            request.preempted_s,
            max(request.counts),
        )
        if request.submit.record:
            self.recorder.closed(request)
        self.outbox.of(owner).dones.append(done)


def _nothing_left(submit: Submit, ends: Collection[int]) -> InvalidRequest:
    """The fields of a request exclude each other, which only a draw could find. ends: the model's
    own. Beside a grammar alone, min_tokens takes away none but ends that may follow."""
    rules = submit.sampling.rules or Rules()
    given = {
        "allowed_token_ids": rules.allowed,
        "banned_token_ids": rules.banned,
        "bad_words": rules.bad_words,
    }
    names = [name for name, value in given.items() if value]
    if rules.held and (names or submit.grammar is None):
        names.append("min_tokens")
    if submit.grammar is not None:
        stops = not set(submit.stop_ids) <= set(ends)
        names = ["structured output", *names, *(["stop_token_ids"] if stops or not names else ())]
    return InvalidRequest(f"{NO_TOKEN_ALLOWED}: {', '.join(names)} together leave none")
