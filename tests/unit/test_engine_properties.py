"""Random lives of many requests: scheduler, cache and fake runner together.

After every rule the cache is whole; after every turn nothing is said twice or too late; in the end
every id has exactly one Done, every token is the reference's, and everything was given back.
"""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.protocol import StepCost
from headrace.messages import Grammar, Lz, Pooling, Repetition, Rules, Sampling, Submit
from tests.unit.engine_rig import Rig
from tests.unit.fake_grammar import FakeGrammars

OWNERS = 3
EOS = 258
SHARED = [(i * 5) % 256 for i in range(64)]  # prompts begin alike, so that they share blocks

# A token takes a microsecond, and one at position 10 one more for its attention.
COST = StepCost(floor_s=2e-6, token_s=1e-6, base_s=0, pair_s=1e-7, read_s=1e-8, tile=4)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    rules=st.none()
    | st.builds(Rules, bad_words=st.just([[101, 116], [32]]), min_tokens=st.integers(0, 5),
                held=st.just([EOS])),
    repetition=st.none() | st.just(Repetition(1.5, 0.5, 0.5, 9)),
    lz=st.none() | st.just(Lz(0.5, 16)),
    logprobs=st.sampled_from([-1, -1, 0, 3]),
)  # fmt: skip


class EngineMachine(RuleBasedStateMachine):
    """One engine with tiny memory and three owners."""

    rig: Rig
    constrained = 0.0  # share of requests with a grammar

    @initialize(
        blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        rows=st.integers(1, 6),
        budget=st.integers(6, 40),
        overlap=st.booleans(),
        prefix_caching=st.sampled_from([True, True, False]),
        windows=st.sampled_from([(0,), (0,), (2,), (7,), (0, 3), (0, 7, 7), (2, 9)]),
        policy=st.sampled_from(["fcfs", "priority", "priority", "static"]),
        max_queue=st.sampled_from([50, 50, 4, 0]),
        max_wait_s=st.sampled_from([0.0, 3.0, 1000.0]),
        target_s=st.sampled_from([0.0, 8e-6, 20e-6]),
        late=st.booleans(),
        prompts_first=st.booleans(),
        twin_tokens=st.sampled_from([1, 4, 128]),
    )
    def start(
        self,
        blocks: int,
        block_size: int,
        rows: int,
        budget: int,
        overlap: bool,
        prefix_caching: bool,
        windows: tuple[int, ...],
        policy: str,
        max_queue: int,
        max_wait_s: float,
        target_s: float,
        late: bool,
        prompts_first: bool,
        twin_tokens: int,
    ) -> None:
        self.grammars = FakeGrammars(late=late)
        self.rig = Rig(
            blocks * len(windows),
            block_size,
            rows,
            overlap=overlap,
            max_model_len=60,
            prefix_caching=prefix_caching,
            windows=windows,
            eos=(EOS,),
            max_num_batched_tokens=budget,
            scheduling_policy=policy,
            max_queue=max_queue,
            max_wait_s=max_wait_s,
            cost=COST if target_s else None,
            itl_target_s=target_s,
            prompts_first=prompts_first,
            grammars=self.grammars,
        )
        self.rig.engine.scheduler.twin_tokens = twin_tokens
        self.gone: set[tuple[int, int]] = set()
        self.finished: dict[tuple[int, int, int], int] = {}

    @rule(
        shape=st.randoms(use_true_random=False),
        count=st.integers(1, 4),
        owner=st.integers(0, OWNERS - 1),
        sampling=samplings,
    )
    def submit(self, shape: Random, count: int, owner: int, sampling: Sampling) -> None:
        """A few requests that mostly fit; sizes come from `shape`, so that they spread evenly."""
        pool_tokens = min(60, self.rig.kv.longest_tokens)
        for _ in range(count):
            shared = shape.randrange(0, max(1, pool_tokens // 2))
            own = [shape.randrange(3) for _ in range(shape.randrange(4))]
            prompt = SHARED[:shared] + own or [7]
            most = max(0, pool_tokens - len(prompt) + (shape.random() < 0.05) * 5)
            self.rig.submit(
                prompt,
                shape.randint(0, min(30, most)),
                owner,
                sampling=sampling,
                n=shape.choice([1, 1, 1, min(2, self.rig.engine.scheduler.rows), 3]),
                priority=shape.randint(-1, 2),
                cache_salt=shape.choice(["", "", "", "s"]),
                adapter=shape.choice(["", "", "", "a"]),
                stop_ids=shape.choice([[], [EOS], [EOS, ord("e")]]),
                grammar=self._grammar(shape),
                prompt_logprobs=shape.choice([-1, -1, -1, 0, 2]),
            )

    def _grammar(self, shape: Random) -> Grammar | None:
        """A spec of `fake_grammar`, now and then one that fails."""
        if shape.random() >= self.constrained:
            return None
        states = shape.choice(
            ["a.~", "abcdfgh", "abcdfgh.~", "abcde.~", "abcdfgh.~!", "a**", "**~"]
        )
        spec = "".join(shape.choice(states) for _ in range(shape.randint(0, 30)))
        return Grammar("lark", "?" if shape.random() < 0.05 else spec)

    @rule(
        shape=st.randoms(use_true_random=False),
        owner=st.integers(0, OWNERS - 1),
        pooling=st.sampled_from(["mean", "mean", "last", "scores"]),
    )
    def submit_pooled(self, shape: Random, owner: int, pooling: Pooling) -> None:
        """A prompt that wants a vector, now and then as long as a sequence may be."""
        pool_tokens = min(60, self.rig.kv.longest_tokens)
        shared = shape.choice([pool_tokens, shape.randrange(1, pool_tokens + 1)])
        self.rig.submit(
            SHARED[:shared],
            0,
            owner,
            pooling=pooling,
            priority=shape.randint(-1, 2),
            cache_salt=shape.choice(["", "", "", "s"]),
            adapter=shape.choice(["", "", "", "a"]),
        )

    @rule(turns=st.integers(1, 12), seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def turn(self, turns: int, seconds: float) -> None:
        for _ in range(turns):
            self.rig.clock.now += seconds
            if turns % 3:
                self.grammars.settle()
            self.rig.turn()

    def _pick(self, number: int) -> tuple[int, int]:
        ids = [i for i in self.rig.submits if i not in self.rig.dones and i not in self.gone]
        ids = ids or list(self.rig.submits)  # one that has ended, which must change nothing
        return ids[number % len(ids)]

    @precondition(lambda self: self.rig.submits)
    @rule(number=st.integers(0, 99))
    def abort(self, number: int) -> None:
        owner, handle = self._pick(number)
        self.rig.abort(handle, owner)

    @precondition(lambda self: self.rig.tokens)
    @rule(number=st.integers(0, 99), cut=st.integers(0, 3))
    def finish(self, number: int, cut: int) -> None:
        keys = [k for k in self.rig.tokens if k not in self.rig.ends] or list(self.rig.tokens)
        key = keys[number % len(keys)]
        n_tokens = max(1, len(self.rig.tokens[key]) - cut)
        self.rig.finish(key[1], key[2], n_tokens, key[0])
        if key not in self.rig.ends:
            self.finished[key] = n_tokens

    @rule(owner=st.integers(0, OWNERS - 1))
    def drop(self, owner: int) -> None:
        self.rig.engine.drop_owner(owner)
        lost = {i for i in self.rig.submits if i[0] == owner and i not in self.rig.dones}
        self.gone |= lost

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "rig"):
            self.rig.kv.check()
            scheduler = self.rig.engine.scheduler
            here = [s for s in scheduler.running if s.row >= 0]
            assert scheduler.growth_blocks == sum(scheduler._growth(s) for s in here)
            assert scheduler.claimed_blocks == sum(s.claim for s in here) >= 0
            assert [s.key for s in here] == sorted(s.key for s in here)
            assert len(scheduler._underway._steps) <= 2, "steps that finished are kept"
            kv = self.rig.kv
            for s in here:
                if s.computed >= s.base:
                    assert s.table.size <= kv.most_held(s.table.length), "more than a window"

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        self.grammars.late = False
        while self.grammars.waiting:
            self.grammars.settle()
        rig.run(turns=3000)
        rig.check_tokens()
        rig.check_idle()
        assert set(rig.dones) == set(rig.submits) - self.gone
        for key, done in rig.dones.items():
            submit = rig.submits[key]
            allowed = ["", "queue_full", "invalid_request", "context_length_exceeded"]
            if submit.grammar is not None and "!" in submit.grammar.text:
                allowed.append("request_failed")
            assert done.error in allowed, done
            if done.error:
                continue
            assert 0 <= done.cached_tokens <= done.prompt_tokens == len(submit.prompt)
            total = 0
            for choice in range(submit.n):
                choice_key = (*key, choice)
                total += self._check_end(choice_key, submit)
            if not any((*key, choice) in self.finished for choice in range(submit.n)):
                assert done.output_tokens == total

    def _check_end(self, key: tuple[int, int, int], submit: Submit) -> int:
        max_tokens, stop_ids = submit.max_tokens, submit.stop_ids
        end, tokens = self.rig.ends[key], self.rig.tokens.get(key, [])
        assert not set(tokens[:-1]) & set(stop_ids), "it went on past a stop id"
        if end.reason == "length":
            assert len(tokens) == max_tokens
        elif end.stop_id >= 0:
            assert (end.reason, tokens[-1]) == ("stop", end.stop_id)
            assert end.stop_id in stop_ids
        elif end.reason == "stop":
            # Who has a grammar or wants a vector was checked by the rig.
            checked = submit.grammar is not None or submit.pooling is not None
            assert checked or key in self.finished, "a stop that nobody asked for"
        else:
            assert end.reason == "abort"
        return len(tokens)


class ConstrainedMachine(EngineMachine):
    """The same, and half of the requests have a grammar."""

    constrained = 0.5


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestConstrained = ConstrainedMachine.TestCase
TestConstrained.settings = settings(TestEngine.settings, max_examples=40, stateful_step_count=20)
