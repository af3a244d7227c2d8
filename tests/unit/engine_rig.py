"""An engine on the fake runner, and an owner that checks what it is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.backends.fake import FakeRunner, reference
from headrace.backends.fake.logprobs import report
from headrace.backends.fake.model import advance, root
from headrace.backends.fake.vectors import pooled
from headrace.config import Settings
from headrace.engine.kv_events import KVEventPublisher
from headrace.engine.loop import Engine
from headrace.engine.protocol import Runner, StepCost
from headrace.launch import make_cache
from headrace.messages import (
    Abort,
    Done,
    End,
    Finish,
    Logprobs,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    TokenOut,
)
from tests.unit.fake_grammar import FakeGrammars
from tests.unit.fake_grammar import reference as constrained_reference

GREEDY = Sampling(temperature=0.0)
LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
Id = tuple[int, int]  # owner, handle


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Submits, turns, and keeps everything that was said; asserts the order of what is said."""

    def __init__(
        self,
        blocks: int = 64,
        block_size: int = 4,
        rows: int = 8,
        *,
        overlap: bool = False,
        max_model_len: int = 512,
        prefix_caching: bool = True,
        windows: tuple[int, ...] = (0,),
        eos: tuple[int, ...] = (),
        wrap: Callable[[FakeRunner], Runner] = lambda runner: runner,
        cost: StepCost | None = None,
        itl_target_s: float = 0.0,
        prompts_first: bool = False,
        grammars: FakeGrammars | None = None,
        publisher: KVEventPublisher | None = None,
        **settings: Any,
    ) -> None:
        self.clock = Clock()
        self.fake = FakeRunner(
            blocks,
            block_size,
            rows,
            max_model_len,
            verify=True,
            eos_ids=eos,
            cost=cost,
            windows=windows,
        )
        self.kv = make_cache(
            self.fake.capacity,
            prefix_caching=prefix_caching,
            log_events=publisher is not None,
        )
        self.plans: list[StepPlan] = []
        settings = {"max_num_seqs": rows, "max_num_batched_tokens": 64} | settings
        self.engine = Engine(
            Settings(**settings),
            self.kv,
            wrap(self.fake),
            overlap=overlap,
            itl_target_s=itl_target_s,
            prompts_first=prompts_first,
            grammars=grammars,
            clock=self.clock,
            on_step=self._on_step,
            publisher=publisher,
        )
        self.eos = eos[0] if eos else None
        self.handles = itertools.count(1)
        self.submits: dict[Id, Submit] = {}
        self.tokens: dict[tuple[int, int, int], list[int]] = {}  # owner, handle, choice
        self.reports: dict[tuple[int, int, int], list[Logprobs]] = {}
        self.prompts: dict[Id, list[Logprobs]] = {}  # of prompt tokens 1, 2, ...
        self.vectors: dict[Id, bytes] = {}
        self.ends: dict[tuple[int, int, int], End] = {}
        self.dones: dict[Id, Done] = {}
        self.finished: set[tuple[int, int, int]] = set()  # choices for which a stop string came

    def _on_step(self, plan: StepPlan, result: StepResult) -> None:
        assert plan.step == result.step
        self.plans.append(plan)

    def submit(
        self, prompt: list[int] | int, max_tokens: int = 4, owner: int = 0, **fields: Any
    ) -> int:
        """Submit; a number is a prompt of that many tokens of its own. Returns the handle."""
        handle = next(self.handles)
        if isinstance(prompt, int):
            prompt = [(handle * 7 + i * 3) % 256 for i in range(prompt)]
        fields.setdefault("sampling", GREEDY)
        msg = Submit(handle, prompt, max_tokens, **fields)
        self.submits[owner, handle] = msg
        self.engine.submit(owner, msg)
        return handle

    def abort(self, handle: int, owner: int = 0) -> None:
        """The client of `handle` is gone."""
        self.engine.abort(owner, Abort(handle))

    def finish(self, handle: int, choice: int, n_tokens: int, owner: int = 0) -> None:
        """A stop string was found."""
        self.finished.add((owner, handle, choice))
        self.engine.finish(owner, Finish(handle, choice, n_tokens))

    def turn(self) -> dict[int, TokenOut]:
        """One turn, then every invariant of the cache and of what owners hear."""
        told = self.engine.turn()
        self.kv.check()
        for owner, out in told.items():
            assert len(out.handles) == len(out.choices) == len(out.tokens)
            for piece in out.prompt_logprobs:
                known = self.prompts.setdefault((owner, piece.handle), [])
                assert (owner, piece.handle) not in self.dones, "a prompt's report after the Done"
                assert piece.first == len(known) + 1, "pieces come in order, once"
                known += piece.entries
            for vector in out.vectors:
                assert (owner, vector.handle) not in self.vectors, "two vectors"
                assert (owner, vector.handle) not in self.dones, "a vector after the Done"
                self.vectors[owner, vector.handle] = vector.values
            reports = out.logprobs or [None] * len(out.tokens)
            assert len(reports) == len(out.tokens)
            columns = zip(out.handles, out.choices, out.tokens, reports, strict=True)
            for handle, choice, token, entry in columns:
                submit = self.submits[owner, handle]
                assert (entry is not None) == (submit.sampling.logprobs >= 0), "asked, or not"
                if entry is not None:
                    self.reports.setdefault((owner, handle, choice), []).append(entry)
                scored = len(self.prompts.get((owner, handle), []))
                whole = len(submit.prompt) - 1 if submit.prompt_logprobs >= 0 else 0
                assert scored == whole, "a token before its prompt's report"
                key = (owner, handle, choice)
                assert (owner, handle) not in self.dones, "a token after the Done"
                assert key not in self.ends, "a token after the End"
                self.tokens.setdefault(key, []).append(token)
            for end in out.ends:
                key = (owner, end.handle, end.choice)
                assert key not in self.ends, "two Ends"
                self.ends[key] = end
                submit = self.submits[owner, end.handle]
                if submit.prompt_logprobs >= 0 and end.reason in ("stop", "length"):
                    scored = len(self.prompts.get((owner, end.handle), []))
                    assert scored == len(submit.prompt) - 1, "an End before its prompt's report"
            for done in out.dones:
                assert (owner, done.handle) not in self.dones, "two Dones"
                self.dones[owner, done.handle] = done
        stats = self.engine.stats()
        assert stats.started == sum(stats.finished.values()) + stats.running + stats.waiting
        self.check_meter()
        return told

    def check_meter(self) -> None:
        """All that the device worked is billed, or on an account, or to be spread."""
        meter = self.engine.meter
        known_fs = meter.billed_fs - meter.prepaid_fs + meter.carry_fs
        for owned in self.engine.registry._requests.values():
            for request in owned.values():
                meter._read(request)
                known_fs += request.compute_fs
        for late in meter._late:
            meter._read(late.request)
            known_fs += late.request.compute_fs - late.charged_fs
        assert known_fs == meter.busy_fs, "device time was lost, or billed twice"

    def run(self, turns: int = 2000) -> None:
        """Turn until there is nothing to do."""
        for _ in range(turns):
            if not self.engine.has_work:
                return
            self.turn()
        raise AssertionError(f"still at work after {turns} turns: {self.engine.stats()}")

    def check_tokens(self) -> None:
        """All tokens of all requests are those of the reference, as many as there may be."""
        for (owner, handle), submit in self.submits.items():
            for choice in range(submit.n):
                if submit.grammar is not None:
                    self._check_constrained(owner, submit, choice)
                    continue
                if submit.pooling is not None:
                    self._check_vector(owner, submit)
                    continue
                got = self.tokens.get((owner, handle, choice), [])
                want = reference(
                    submit.prompt,
                    submit.sampling,
                    choice,
                    len(got),
                    adapter=submit.adapter,
                    eos=self.eos,
                )
                assert got == want, f"tokens of {owner}/{handle}/{choice}"
                assert len(got) <= submit.max_tokens
                if submit.sampling.logprobs >= 0:
                    said = self.reports.get((owner, handle, choice), [])
                    assert said == self._said(submit, submit.prompt, got, submit.sampling.logprobs)
            if submit.prompt_logprobs >= 0:
                said = self.prompts.get((owner, handle), [])
                tail = submit.prompt[1 : 1 + len(said)]
                assert said == self._said(submit, submit.prompt[:1], tail, submit.prompt_logprobs)

    def _check_vector(self, owner: int, submit: Submit) -> None:
        """One that ended by itself got its vector, and no other did; none got a token."""
        key = (owner, submit.handle)
        assert (*key, 0) not in self.tokens, "a token for who asked for a vector"
        end, got = self.ends.get((*key, 0)), self.vectors.get(key)
        assert (got is not None) == (end is not None and end.reason == "stop"), f"{end}, {got!r}"
        if got is None:
            return
        states = [root(submit.adapter)]
        for token in submit.prompt:
            states.append(advance(states[-1], token))
        if submit.pooling == "mean":
            want = pooled("sum", states[1:]) / np.float32(len(submit.prompt))
        else:
            assert submit.pooling is not None, "asked for"
            want = pooled(submit.pooling, states)
        np.testing.assert_allclose(np.frombuffer(got, "<f4"), want, rtol=1e-6)

    def _said(
        self, submit: Submit, before: list[int], tokens: list[int], count: int
    ) -> list[Logprobs]:
        """What the fake model says of each of `tokens`, after `before` and those before it."""
        state, out = root(submit.adapter), []
        for token in before:
            state = advance(state, token)
        for token in tokens:
            out.append(report(state, token, count, self.eos))
            state = advance(state, token)
        return out

    def _check_constrained(self, owner: int, submit: Submit, choice: int) -> None:
        key = (owner, submit.handle, choice)
        got, end = self.tokens.get(key, []), self.ends.get(key)
        want, reason = constrained_reference(submit, choice, self.eos)
        assert got == want[: len(got)], f"tokens of {key} under {submit.grammar}"
        done = self.dones.get(key[:2])
        if end is None or end.reason == "abort" or (done is not None and done.error):
            return
        if end.reason != reason or len(got) != len(want):
            assert end.reason == "stop", f"{key} ended with {end}, not {reason}"
            assert key in self.finished, f"{key} stopped after {len(got)} of {len(want)} tokens"

    def check_idle(self) -> None:
        """Everything was answered and given back."""
        stats = self.engine.stats()
        assert not self.engine.has_work
        assert stats.running == stats.waiting == stats.kv_used == 0
        assert self.engine.scheduler.growth_blocks == 0
        assert self.engine.scheduler.claimed_blocks == 0
        assert self.engine.scheduler.free_rows == self.engine.scheduler.rows
        self.kv.check()


def first_tokens(rig: Rig) -> list[int]:
    """Handles in the order of their first token."""
    return [handle for _, handle, _ in rig.tokens]


def priority_rig(**fields: object) -> Rig:
    """Two rows, priority policy."""
    options = {"rows": 2, "scheduling_policy": "priority", "max_wait_s": 1000.0} | fields
    return Rig(**options)  # type: ignore[arg-type]
