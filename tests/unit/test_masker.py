"""Masks of the engine: which are made, and that none that is spared changes a token."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.messages import Grammar, Repetition, Rules, Sampling
from tests.unit.engine_rig import GREEDY, LOOPS, Rig
from tests.unit.fake_grammar import EOS, FakeGrammars


def constrained(spec: str, overlap: bool, **fields: Any) -> tuple[int, list[int]]:
    """Masks that one request of `spec` made, and its tokens, which are the reference's."""
    grammars = FakeGrammars()
    rig = Rig(overlap=overlap, grammars=grammars, eos=(EOS,))
    more: dict[str, Any] = {"sampling": GREEDY, "stop_ids": [EOS]} | fields
    handle = rig.submit(5, 40, grammar=Grammar("lark", spec), **more)
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert rig.dones[0, handle].error == ""
    return grammars.fills, rig.tokens[0, handle, 0]


@LOOPS
def test_what_the_runner_would_take_anyway_needs_no_mask(overlap: bool) -> None:
    fills, tokens = constrained("*" * 20, overlap)
    assert len(tokens) == 20
    assert fills <= 2, "an end of turn would be refused; nothing else is"
    assert constrained("*" * 20, overlap, sampling=Sampling(temperature=0, logprobs=1))[0] == fills


@LOOPS
@pytest.mark.parametrize(
    "sampling", [Sampling(seed=1), Sampling(temperature=0, repetition=Repetition(1.5))]
)
def test_a_draw_that_looks_at_more_than_the_largest_gets_a_mask(
    overlap: bool, sampling: Sampling
) -> None:
    assert constrained("*" * 20, overlap, sampling=sampling)[0] >= 20


@LOOPS
def test_a_refused_token_gets_a_mask(overlap: bool) -> None:
    """The model hardly ever says one of the four letters by itself."""
    fills, tokens = constrained("." * 20, overlap)
    assert set(tokens) <= set(b"abcd")
    assert fills >= 15


@LOOPS
def test_what_is_forced_needs_no_mask(overlap: bool) -> None:
    """One forced token is drawn like any other, and so are all where they are reported."""
    for sampling in (Sampling(seed=1), Sampling(seed=1, logprobs=0)):
        fills, tokens = constrained("*a" * 10, overlap, sampling=sampling)
        assert bytes(tokens[1::2]) == b"a" * 10
        assert fills == 10
    assert constrained("abcd" * 5, overlap, sampling=Sampling(seed=1, logprobs=0))[0] == 0


@LOOPS
def test_ends_are_decided_by_the_mask(overlap: bool) -> None:
    """A likely end of turn is allowed where the grammar accepts; one that it forces is refused."""
    rig = Rig(overlap=overlap, grammars=FakeGrammars(), eos=(EOS,))
    for i in range(40):
        prompt, spec = [i * 7 % 256, i], Grammar("lark", "**~")
        rig.submit(prompt, 90, sampling=GREEDY, stop_ids=[EOS], grammar=spec)
    rig.run()
    rig.check_tokens()
    assert any(end.stop_id == EOS for end in rig.ends.values())
    stopped = Rig(overlap=overlap, grammars=FakeGrammars(), eos=(EOS,))
    stopped.submit(3, 9, stop_ids=[ord("a")], grammar=Grammar("lark", "a*"))
    stopped.run()
    stopped.check_tokens()
    assert stopped.dones[0, 1].error == "invalid_request", stopped.dones


@LOOPS
def test_a_choice_that_has_ended_costs_the_others_nothing(overlap: bool) -> None:
    """Its draw in flight is for nobody, and these rules leave it no token at all."""
    rig = Rig(overlap=overlap, grammars=FakeGrammars(), eos=(EOS,))
    sampling = Sampling(seed=1, rules=Rules(banned=[0]))
    handle = rig.submit(
        5, 90, n=4, sampling=sampling, stop_ids=[EOS], grammar=Grammar("lark", "**~")
    )
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert rig.dones[0, handle].error == ""
    lengths = [len(rig.tokens[0, handle, choice]) for choice in range(4)]
    assert len(set(lengths)) > 1, "they end one after another"


@LOOPS
@pytest.mark.parametrize(("spec", "stops"), [("", []), ("~", [*b"ABC"])])
def test_an_output_that_is_complete_before_its_first_token_waits_for_its_prompts_report(
    overlap: bool, spec: str, stops: list[int]
) -> None:
    """The mask says so while the prompt is computed. It ends before its draw, which these rules
    leave no token, can fail."""
    rig = Rig(overlap=overlap, grammars=FakeGrammars(), eos=(EOS,))
    for top in (-1, 0, 2):
        for n in (1, 3):
            rig.submit(
                20,
                9,
                n=n,
                prompt_logprobs=top,
                sampling=Sampling(seed=1, rules=Rules(banned=[0])),
                stop_ids=[EOS, *stops],
                grammar=Grammar("lark", spec),
            )
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert not rig.tokens
    assert [done.error for done in rig.dones.values()] == [""] * 6
    assert {end.reason for end in rig.ends.values()} == {"stop"}
    assert [len(said) for said in rig.prompts.values()] == [19] * 4


@pytest.mark.parametrize(
    ("stops", "rules", "named"),
    [
        ([ord("a")], Rules(held=[EOS], min_tokens=2), "stop_token_ids"),
        ([ord("a")], Rules(banned=[0]), "banned_token_ids, stop_token_ids"),
        ([], Rules(banned=[ord("a")]), "banned_token_ids"),
        ([], Rules(allowed=[7], held=[EOS], min_tokens=2), "allowed_token_ids, min_tokens"),
    ],
)
def test_what_leaves_no_token_is_named(stops: list[int], rules: Rules, named: str) -> None:
    rig = Rig(overlap=True, grammars=FakeGrammars(), eos=(EOS,))
    handle = rig.submit(
        3,
        9,
        stop_ids=[EOS, *stops],
        sampling=Sampling(seed=1, rules=rules),
        grammar=Grammar("lark", "*a*"),
    )
    rig.run()
    said = rig.dones[0, handle].message
    assert said == f"no token is allowed: structured output, {named} together leave none"
