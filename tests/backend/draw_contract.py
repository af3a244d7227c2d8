"""What every runner must do with a draw: rules, penalties, grammar masks, and what it reports.

More clauses of the runner contract, in the same form; see `runner_contract`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from headrace.engine.protocol import Masks
from headrace.messages import (
    Dry,
    Grow,
    Logprobs,
    Lz,
    Repetition,
    Rules,
    Sampling,
    StepResult,
)
from tests.backend.runner_contract import (
    GREEDY,
    OTHER,
    PROMPT,
    MakeRunner,
    Steps,
    decode,
    decode_all,
    generate,
)

SHAPED = [  # rows whose draws look at more than their logits
    Sampling(temperature=0.0, repetition=Repetition(3.0, 2.0, 2.0, window=12)),
    Sampling(0.0, rules=Rules(allowed=[100, 101, 102]), dry=Dry(50.0, 1.75, 1, breakers=[42])),
    Sampling(seed=3, lz=Lz(0.5, 20), typical_p=0.7, top_n_sigma=1.5),
    Sampling(
        seed=4,
        rules=Rules([(7, 3.0)], [], [11, 42], [[5, 60], [60, 61], [90]], 3, [3, 61]),
        repetition=Repetition(3.0, presence=5.0),
    ),
]


def shaped_rows_keep_to_themselves(make: MakeRunner) -> None:
    """Rules and penalties see their own sequence, whoever else is in the step."""
    want = [generate(make, sampling=sampling) for sampling in SHAPED]
    plain = generate(make)
    for sampling, tokens in zip(SHAPED, want, strict=True):
        without = replace(sampling, dry=None, lz=None, repetition=None, top_n_sigma=0.0)
        assert generate(make, sampling=without) != tokens, f"{sampling} changes nothing here"
    for who in ([*SHAPED[:3], GREEDY], [GREEDY, *reversed(SHAPED[1:])]):
        steps = Steps(make())
        for row, sampling in enumerate(who):
            steps.join(row, list(range(row * 8, row * 8 + 8)), sampling)
            steps.forward(row, PROMPT)
        got = decode_all(steps, 7)
        steps.runner.close()
        assert got == [plain if s is GREEDY else want[SHAPED.index(s)] for s in who]


def history_is_the_sequence_however_it_came(make: MakeRunner) -> None:
    """From the join, from forward rows, from draws; after a resumption; a step ahead."""
    for sampling in SHAPED:
        want = generate(make, sampling=sampling)
        assert generate(make, sampling=sampling, chunks=(3, 4)) == want
        steps = Steps(make())
        steps.join(0, [0, 1, 2, 3, 4, 5], sampling, known=PROMPT[:2], prompt_tokens=len(PROMPT))
        steps.forward(0, PROMPT[:6], draw_into=())
        steps.run()
        steps.forward(0, PROMPT[6:])
        got = steps.run()
        steps.forward(0, got[-1:])
        got += steps.run()
        steps.leaves = [0]
        known = PROMPT + got
        steps.join(3, [10, 11, 12, 13, 14], sampling, known=known, prompt_tokens=len(PROMPT))
        steps.forward(3, known)
        before = steps.launch()
        for _ in range(5):
            steps.forward(3, None)
            ahead = steps.launch()
            got += before.result().tokens
            before = ahead
        got += before.result().tokens
        steps.runner.close()
        assert got == want


def forks_remember_the_prompt(make: MakeRunner) -> None:
    """n = 2 with penalties: each choice goes its own way from the same ids."""
    sampling = Sampling(seed=7, repetition=Repetition(1.3, 1.0, 1.0), lz=Lz(0.3))
    want = [generate(make, sampling=sampling, choice=choice, count=5) for choice in range(2)]
    steps = Steps(make())
    for row in range(2):
        steps.join(row, [0, 1, 2], sampling, row)
    steps.forward(0, PROMPT, draw_into=(0, 1))
    got = [[token] for token in steps.run()]
    steps.length = dict.fromkeys((0, 1), len(PROMPT))
    steps.grows = [Grow(0, 0, 3, [20]), Grow(1, 0, 2, [30, 31])]
    steps.copies = [(2, 30)]
    for _ in range(4):
        for row in range(2):
            steps.forward(row, None)
        for choice, token in enumerate(steps.run()):
            got[choice].append(token)
    steps.runner.close()
    assert got == want


def rules_hold(make: MakeRunner) -> None:
    """Allowed, banned, forced and held ids; greedy and drawn."""
    for base in (GREEDY, Sampling(seed=5)):

        def ruled(base: Sampling = base, **rules: Any) -> list[int]:
            return generate(make, sampling=replace(base, rules=Rules(**rules)), count=6)

        free = generate(make, sampling=base, count=6)
        assert ruled(bias=[(101, 100.0)]) == [101] * 6
        assert set(ruled(allowed=[102, 103])) <= {102, 103}
        assert free[0] not in ruled(banned=[free[0]])
        assert ruled(bad_words=[[PROMPT[-1], free[0]]])[0] != free[0]
        held = ruled(bias=[(101, 100.0)], min_tokens=3, held=[101])
        assert 101 not in held[:3]
        assert held[3:] == [101] * 3


def masks_hold_for_their_draw(make: MakeRunner) -> None:
    """Only tokens of the mask; rows without one are as they were; bits may be used again."""
    want = generate(make, count=4)
    steps = Steps(make())
    for row, sampling in enumerate([GREEDY, GREEDY, Sampling(seed=1)]):
        steps.join(row, list(range(row * 8, row * 8 + 8)), sampling)
        steps.forward(row, PROMPT)
    got: list[list[int]] = [[], [], []]
    masks = steps.allow({1: [100, 101, 35], 2: [70]})
    for i in range(4):
        ticket = steps.launch(masks)
        masks.bits[:] = 0  # finish() took what it needs
        for row, token in enumerate(ticket.result().tokens):
            got[row].append(token)
        for row in range(3):
            steps.forward(row, None)
        masks = steps.allow(
            {2: [71 + i], 1: [0, 31, 32, 64, 130 % steps.runner.capacity.vocab_size]}
        )
    steps.runner.close()
    assert got[0] == want
    assert got[1][0] in (100, 101, 35)
    assert set(got[1][1:]) <= {0, 31, 32, 64, 130}
    assert got[2] == [70, 71, 72, 73]


def likely_is_what_a_mask_may_confirm(make: MakeRunner) -> None:
    """A draw whose likely token is allowed takes it; one that says nothing, or whose is refused,
    takes what it would have taken. A runner may know nothing beforehand."""
    how = [
        GREEDY,
        Sampling(temperature=0.0, logprobs=2),
        Sampling(seed=5),
        Sampling(temperature=0.0, repetition=Repetition(3.0)),
    ]

    def drawn(masks: Callable[[Steps, list[int]], Masks | None]) -> tuple[list[int], list[int]]:
        steps = Steps(make())
        for row, sampling in enumerate(how):
            steps.join(row, list(range(row * 8, row * 8 + 4)), sampling)
            steps.forward(row, PROMPT)
        ticket = steps.begin()
        likely = list(ticket.likely())
        ticket.finish(masks(steps, likely))
        tokens = list(ticket.result().tokens)
        steps.runner.close()
        return tokens, likely

    def every(steps: Steps) -> list[int]:
        return list(range(steps.runner.capacity.vocab_size))

    free, _ = drawn(lambda steps, likely: None)
    got, likely = drawn(lambda steps, _: steps.allow(dict.fromkeys(range(len(how)), every(steps))))
    assert free[0] == free[1]
    assert got[:2] == free[:2]
    if not likely:
        return
    assert likely == [free[0], free[1], -1, -1]

    def some(steps: Steps, likely: list[int]) -> Masks:
        without = [token for token in every(steps) if token != likely[1]]
        return steps.allow({0: [likely[0], 7], 1: without, 2: every(steps), 3: every(steps)})

    confirmed, again = drawn(some)
    assert again == likely
    assert confirmed == [got[0], confirmed[1], *got[2:]]
    assert confirmed[1] != got[1]


def a_draw_without_a_token_fails_alone(make: MakeRunner) -> None:
    """The step ahead may compute it; its row can be used again."""
    want = generate(make)
    steps = Steps(make())
    steps.join(0, [0, 1, 2, 3, 4, 5])
    steps.join(1, [8, 9, 10, 11], Sampling(rules=Rules(allowed=[5]), repetition=Repetition(1.2)))
    steps.forward(0, PROMPT)
    steps.forward(1, PROMPT)
    first = steps.launch(steps.allow({1: [6]}))
    steps.forward(0, None)
    steps.forward(1, None)
    ahead = steps.launch()
    result: StepResult = first.result()
    assert result.tokens == [want[0], -1]
    assert [draw for draw, _ in result.failed] == [1]
    assert "no token is allowed" in result.failed[0][1]
    assert ahead.result().tokens[0] == want[1]
    steps.leaves = [1]
    steps.join(1, [8, 9, 10, 11])
    steps.forward(0, None)
    steps.forward(1, PROMPT)
    assert steps.run() == [want[2], want[0]]
    steps.runner.close()


def draws_report_logprobs(make: MakeRunner) -> None:
    """Only those that ask, as many as they ask for, whoever else is in the step."""
    plain = generate(make)
    asking = Sampling(temperature=0.0, logprobs=5)
    alone = Steps(make())
    alone.join(0, [0, 1, 2, 3, 4, 5], asking)
    alone.forward(0, PROMPT)
    first = alone.launch().result()
    alone.runner.close()
    steps = Steps(make())
    steps.join(0, [0, 1, 2, 3, 4, 5])
    steps.join(1, [6, 7, 8, 9, 10, 11], asking)
    steps.join(2, [12, 13, 14, 15, 16], Sampling(temperature=3.0, seed=7, logprobs=0))
    steps.forward(0, OTHER)
    steps.forward(1, PROMPT)
    steps.forward(2, PROMPT)
    result = steps.launch().result()
    nothing, entry, other = result.logprobs
    assert nothing is None
    assert_reports(entry, plain[0], 5)
    assert_reports(other, result.tokens[2], 0)
    assert_close(entry, first.logprobs[0])
    at = dict(zip(entry.top_ids, entry.top, strict=True))  # type: ignore[union-attr]
    if result.tokens[2] in at:
        assert math.isclose(at[result.tokens[2]], other.logprob, abs_tol=1e-4)  # type: ignore[union-attr]
    steps.forward(0, None)
    assert steps.launch().result().logprobs == []
    steps.forward(1, None)
    assert_reports(steps.launch().result().logprobs[0], plain[1], 5)
    steps.runner.close()


def assert_reports(entry: Logprobs | None, token: int, count: int) -> None:
    """`entry` may be what is said of a greedy or drawn `token` and `count` others."""
    assert entry is not None
    assert len(entry.top_ids) == len(entry.top) == count
    assert entry.top == sorted(entry.top, reverse=True)
    assert len(set(entry.top_ids)) == count
    assert math.fsum(math.exp(value) for value in entry.top) <= 1 + 1e-6
    assert entry.logprob <= 1e-9
    if entry.rank <= count:
        assert entry.logprob in entry.top
    if token in entry.top_ids:
        assert entry.top[entry.top_ids.index(token)] == entry.logprob
    elif count:
        assert entry.logprob <= entry.top[-1]


def assert_close(entry: Logprobs | None, other: Logprobs | None) -> None:
    """Alike but for rounding: near-equals may change places."""
    assert entry is not None
    assert other is not None
    assert math.isclose(entry.logprob, other.logprob, abs_tol=1e-4)
    pairs = zip(entry.top, other.top, strict=True)
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in pairs)


def prompts_report_logprobs(make: MakeRunner) -> None:
    """Of each token after the first, whole or in chunks; a draw from the row is not disturbed."""
    whole = Steps(make())
    whole.join(0, [0, 1, 2, 3, 4, 5])
    whole.forward(0, PROMPT)
    whole.score(3)
    result = whole.launch().result()
    (entries,) = result.prompt_logprobs
    assert len(entries) == len(PROMPT) - 1
    for token, entry in zip(PROMPT[1:], entries, strict=True):
        assert_reports(entry, token, 3)
    got = result.tokens + decode(whole, 0, 7)
    assert got == generate(make)
    whole.runner.close()
    parts = Steps(make())
    parts.join(0, [0, 1, 2, 3, 4, 5])
    parts.join(1, [6, 7, 8, 9, 10])
    pieces: list[Logprobs] = []
    for at, size in ((0, 1), (1, 6), (7, 3)):
        end = at + size
        parts.forward(1, OTHER[at : at + 1] or [1], draw_into=())
        parts.forward(0, PROMPT[at:end], draw_into=None if end == len(PROMPT) else ())
        parts.score(3, PROMPT[end] if end < len(PROMPT) else -1)
        result = parts.launch().result()
        pieces += result.prompt_logprobs[0]
    assert result.tokens == got[:1]
    parts.runner.close()
    for one, other in zip(pieces, entries, strict=True):
        assert_close(one, other)


def what_follows_a_prompt_is_what_is_drawn(make: MakeRunner) -> None:
    """A prompt's report of its own greedy continuation agrees with the draws' reports."""
    steps = Steps(make())
    steps.join(0, [0, 1, 2, 3, 4, 5], Sampling(temperature=0.0, logprobs=2))
    steps.forward(0, PROMPT)
    results = [steps.launch().result()]
    for _ in range(4):
        steps.forward(0, None)
        results.append(steps.launch().result())
    tokens = [result.tokens[0] for result in results]
    steps.join(1, [6, 7, 8, 9, 10, 11])
    steps.forward(1, PROMPT + tokens[:-1])
    steps.score(2, tokens[-1])
    (entries,) = steps.launch().result().prompt_logprobs
    steps.runner.close()
    for result, entry in zip(results, entries[len(PROMPT) - 1 :], strict=True):
        assert_close(result.logprobs[0], entry)


DRAW_CONTRACT: list[Callable[[MakeRunner], None]] = [
    shaped_rows_keep_to_themselves,
    history_is_the_sequence_however_it_came,
    forks_remember_the_prompt,
    rules_hold,
    masks_hold_for_their_draw,
    likely_is_what_a_mask_may_confirm,
    a_draw_without_a_token_fails_alone,
    draws_report_logprobs,
    prompts_report_logprobs,
    what_follows_a_prompt_is_what_is_drawn,
]
