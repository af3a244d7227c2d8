"""headrace.LLM on the fake backend: the whole path from text to text, in this process."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import headrace
from headrace import LLM, BeamParams, SamplingParams
from headrace.errors import ConfigError, ContextTooLong, EngineDead, InvalidRequest
from headrace.messages import End

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | more)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(backend="fake", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256) as made:
        yield made


def idle(llm: LLM) -> bool:
    """Nothing is left in the engine."""
    stats = llm._engine.stats()
    assert stats.started == sum(stats.finished.values())
    return not llm._engine.has_work and (stats.running, stats.waiting) == (0, 0)


def test_one_prompt(llm: LLM) -> None:
    (one,) = llm.generate("Once upon a time", GREEDY)
    assert len(one.token_ids) == 12
    assert one.text == bytes(t for t in one.token_ids if t < 256).decode(errors="replace")
    assert one.finish_reason == "length"
    assert one.prompt_token_ids == list(b"Once upon a time")
    assert (one.prompt_index, one.index, one.error) == (0, 0, "")
    assert idle(llm)


def test_text_ids_and_lists_are_the_same_prompt(llm: LLM) -> None:
    text, ids = "abc", list(b"abc")
    alone = llm.generate(text, GREEDY)[0].token_ids
    shapes: list[Any] = [ids, [text], [ids], [text, ids], (text, tuple(ids))]
    for prompts in shapes:
        for completion in llm.generate(prompts, GREEDY):
            assert completion.token_ids == alone


def test_many_more_prompts_than_the_queue_takes_come_back_in_order() -> None:
    with LLM(backend="fake", max_num_seqs=2, max_num_batched_tokens=16, max_queue=3) as llm:
        prompts = [f"prompt {i}" for i in range(30)]
        each = [greedy(max_tokens=1 + i % 7) for i in range(30)]
        found = llm.generate(prompts, each)
        assert [c.prompt_index for c in found] == list(range(30))
        assert [len(c.token_ids) for c in found] == [1 + i % 7 for i in range(30)]
        assert found[17].token_ids == llm.generate("prompt 17", each[17])[0].token_ids
        assert idle(llm)


def test_no_waiting_at_all() -> None:
    with LLM(backend="fake", max_num_seqs=2, max_num_batched_tokens=16, max_queue=0) as llm:
        found = llm.generate(["a", "b", "c", "d", "e"], greedy(n=2))
        assert [(c.prompt_index, c.index) for c in found] == list(
            itertools.product(range(5), range(2))
        )
        assert {len(c.token_ids) for c in found} == {12}
        assert idle(llm)


def test_choices(llm: LLM) -> None:
    found = llm.generate(["x", "y"], SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True))
    assert [(c.prompt_index, c.index) for c in found] == list(itertools.product(range(2), range(3)))
    assert len({tuple(c.token_ids) for c in found[:3]}) == 3


def test_seeds(llm: LLM) -> None:
    hot = SamplingParams(seed=-3, max_tokens=30, ignore_eos=True)
    first, again = llm.generate(["x", "x"], hot)
    assert first.token_ids == again.token_ids
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    one, two = llm.generate(["x", "x"], free)
    assert one.token_ids != two.token_ids
    runs = []
    for _ in range(2):
        with LLM(backend="fake", seed=7) as fixed:
            runs.append([c.token_ids for c in fixed.generate(["x", "x"], free)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("tell me", greedy(max_tokens=60))[0]
    stop = whole.text[20:23]
    at = whole.text.index(stop)
    shown = ["".join(chr(t) for t in whole.token_ids[:k] if t < 256) for k in range(61)]
    complete = next(k for k, text in enumerate(shown) if stop in text)
    for include in (False, True):
        params = greedy(max_tokens=60, stop=["never~", stop], include_stop_str_in_output=include)
        (one,) = llm.generate("tell me", params)
        assert one.text == whole.text[: at + (3 if include else 0)]
        assert one.finish_reason == "stop"
        assert one.token_ids == whole.token_ids[:complete]
    assert idle(llm)


def test_a_stop_string_that_the_last_bytes_complete(llm: LLM) -> None:
    """Half a character at the end of the tokens is U+FFFD, known only when nothing more comes."""
    params = greedy(max_tokens=3, stop="b\ufffd")
    (job,) = llm._prepare([[1]], params, None, "prompts")
    handle = job.submit.handle
    llm._hear(job, 0, [*b"ab", "漢".encode()[0]], End(handle, 0, "length"))
    found = job.choices[0].completion
    assert (found.text, found.finish_reason) == ("a", "stop")


def test_stop_ids(llm: LLM) -> None:
    whole = llm.generate("tell me", greedy(max_tokens=40))[0]
    stop = whole.token_ids[9]
    first = whole.token_ids.index(stop)
    (one,) = llm.generate("tell me", greedy(max_tokens=40, stop_token_ids=[stop]))
    assert one.finish_reason == "stop"
    assert one.token_ids == whole.token_ids[: first + 1]
    assert one.text == whole.text[:first]


def test_end_of_turn_stops_unless_ignored(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, seed=0)
    stopped = [c for c in llm.generate([f"q{i}" for i in range(20)], params)
               if c.finish_reason == "stop"]  # fmt: skip
    assert stopped, "of 20 long answers, one draws the end of its turn"
    assert all(c.token_ids[-1] in (256, 258) for c in stopped)
    assert all(len(c.text) == len(c.token_ids) - 1 for c in stopped)


def test_prefix_cache_is_reported(llm: LLM) -> None:
    prompt = "p" * 50
    cold, warm = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 48
    assert warm.token_ids == cold.token_ids
    assert llm.generate(prompt, greedy(cache_salt="other"))[0].cached_tokens == 0


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, GREEDY)
    prompt = b"".join(bytes([i]) for i in one.prompt_token_ids if i < 256)
    assert b"user\nhi" in prompt
    assert prompt.endswith(b"assistant\n")
    assert 257 in one.prompt_token_ids
    many = llm.chat([conversation, conversation[1:]], GREEDY)
    assert many[0].token_ids == one.token_ids
    assert [c.prompt_index for c in many] == [0, 1]
    (open_ended,) = llm.chat(conversation, SamplingParams(temperature=0, ignore_eos=True))
    assert len(open_ended.prompt_token_ids) + len(open_ended.token_ids) == 256


def test_what_a_template_lacks_is_said_in_words(llm: LLM) -> None:
    turns = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "look_up"}}
    (ids,) = llm._render(turns, {"tools": [tool], "documents": [{"title": "T"}]})
    shown = bytes(i for i in ids if i < 256).decode()
    assert '{"name": "look_up"}' in shown
    assert '[1] {"title": "T"}' in shown
    call = {"role": "assistant", "tool_calls": [{"function": {}}]}
    with pytest.raises(InvalidRequest, match=r"function\.name"):
        llm._render([*turns, call], {})


def test_stream_is_generate_in_pieces(llm: LLM) -> None:
    params = greedy(max_tokens=50)
    whole = llm.generate("go on", params)[0].text
    pieces = list(llm.stream("go on", params))
    assert "".join(pieces) == whole
    assert len(pieces) > 10
    messages = [{"role": "user", "content": "go on"}]
    assert "".join(llm.stream(messages, params)) == llm.chat(messages, params)[0].text
    assert "".join(llm.stream(list(b"go on"), params)) == whole


def test_streams_and_batches_may_interleave(llm: LLM) -> None:
    params = greedy(max_tokens=30)
    expected = llm.generate(["a", "b", "c"], params)
    one, two = llm.stream("a", params), llm.stream("b", params)
    texts = [next(one), next(two)]
    assert llm.generate("c", params)[0].text == expected[2].text
    assert texts[0] + "".join(one) == expected[0].text
    assert texts[1] + "".join(two) == expected[1].text


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream("go on", greedy(max_tokens=200))
    next(stream)
    stream.close()
    assert idle(llm)
    assert llm._engine.stats().finished["abort"] == 1
    assert llm._engine.stats().generation_tokens < 200


def test_ctrl_c_aborts_what_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = itertools.count()
    turn = llm._engine.turn

    def interrupted() -> Any:
        if next(turns) == 5:
            raise KeyboardInterrupt
        return turn()

    monkeypatch.setattr(llm._engine, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([f"p{i}" for i in range(10)], greedy(max_tokens=100))
    assert idle(llm)
    assert llm.generate("still here", GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_bad_params_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(n=5), "n"),
        (SamplingParams(priority=1), "priority"),
        (SamplingParams(stop_token_ids=[259]), "stop_token_ids"),
        ([SamplingParams()] * 3, "params"),
    ],
)
def test_params_that_this_engine_cannot_honour(llm: LLM, params: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["a", "b"], params)
    assert caught.value.param == param
    assert llm._engine.stats().started == 0


@pytest.mark.parametrize("prompts", [[259], [-1], [[1, "x"]], [True], "", [[]], [None], [1.5]])
def test_bad_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompts"
    assert llm._engine.stats().started == 0


@pytest.mark.parametrize(
    "messages", ["hi", [], [[]], ["hi"], [{"content": "x"}], [{"role": "user", "content": 3}]]
)
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.param == "messages"


def test_what_cannot_fit_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match=r"250.*12.*256"):
        llm.generate(["fits", "x" * 250], GREEDY)
    with pytest.raises(InvalidRequest) as caught:
        llm.stream("x", greedy(n=2))
    assert caught.value.param == "n"
    assert llm._engine.stats().started == 0
    assert llm.generate([], GREEDY) == []


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="no_such"):
        LLM(backend="fake", no_such=1)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(backend="fake", max_num_seqs=-1)


@pytest.mark.parametrize("given", [{"port": 8000}, {"seed": 1, "api_key": ("secret",)}])
def test_what_only_a_server_has_a_use_for_is_refused(given: dict[str, Any]) -> None:
    """Its default too: whoever gives it expects something of it."""
    name = list(given)[-1]
    with pytest.raises(ConfigError, match=f"^{name} would change nothing: .*headrace serve") as why:
        LLM(backend="fake", **given)
    assert why.value.param == name
    assert "secret" not in why.value.message


def test_settings_of_a_server_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "8080")
    with LLM(backend="fake") as made:
        assert made.settings.port == 8080


def test_closed(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(EngineDead):
        llm.generate("x", GREEDY)


def test_progress_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capfd.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "2/2" in err
    assert "tokens/s" in err


def test_importing_headrace_is_light() -> None:
    code = (
        "import sys, headrace; assert headrace.__version__\n"
        "heavy = {'torch', 'msgspec', 'rich', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "headrace.LLM; assert not {'torch', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no_such"):
        headrace.no_such  # noqa: B018


def test_sampling_parameters_reach_the_draw(llm: LLM) -> None:
    free = llm.generate("abc", greedy())[0].token_ids
    assert free[0] not in llm.generate("abc", greedy(banned_token_ids=[free[0]]))[0].token_ids
    assert set(llm.generate("abc", greedy(allowed_token_ids=[120]))[0].token_ids) == {120}
    assert llm.generate("abc", greedy(logit_bias={120: 100}))[0].token_ids == [120] * 12
    held = greedy(logit_bias={"258": 100}, min_tokens=4, ignore_eos=False)
    assert len(llm.generate("abc", held)[0].token_ids) == 5
    stops = greedy(stop=[chr(free[0]), chr(free[3])], min_tokens=4)
    assert llm.generate("abc", stops)[0].token_ids == free[:4]
    for params in (greedy(logit_bias={"259": 1}), greedy(allowed_token_ids=[-1])):
        with pytest.raises(InvalidRequest, match="is not a token id"):
            llm.generate("abc", params)
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        greedy(repetition_penalty=0)
    with LLM(backend="fake", default_sampling="temperature=0,top_k=1") as other:
        assert other.generate("abc", SamplingParams(max_tokens=5))[0].token_ids == free[:5]


def test_seeds_alone_in_a_crowd_preempted_and_warm() -> None:
    """The same tokens with penalties, rules and filters, wherever and however often they run."""
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "penalty_window": 30},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1, "typical_p": 0.8},
        {"lz_penalty": 0.5, "bad_words": ["e", "th"], "min_tokens": 10},
    ]
    many = [
        SamplingParams(seed=i, max_tokens=40, ignore_eos=True, temperature=0.9, **kinds[i % 4])
        for i in range(16)
    ]
    prompts = [f"the same beginning {i % 3}" for i in range(16)]
    settings: dict[str, Any] = {"backend": "fake", "max_model_len": 128, "block_size": 4}
    with LLM(**settings, max_num_seqs=16, kv_blocks=600) as roomy:
        alone = [roomy.generate(p, s)[0].token_ids for p, s in zip(prompts, many, strict=True)]
        warm = roomy.generate(prompts, many)
        assert max(c.cached_tokens for c in warm) > 0
        assert [c.token_ids for c in warm] == alone
    with LLM(**settings, max_num_seqs=16, kv_blocks=60, prefix_caching=False) as tight:
        assert [c.token_ids for c in tight.generate(prompts, many)] == alone
        assert tight._engine.stats().preemptions > 0


def test_logprobs(llm: LLM) -> None:
    """One report a token, also of a prompt; a stop string cuts reports where it cuts tokens."""
    plain = llm.generate("Once", greedy(logprobs=2, prompt_logprobs=1))[0]
    assert plain.logprobs is not None
    assert len(plain.logprobs) == len(plain.token_ids)
    for token, one in zip(plain.token_ids, plain.logprobs, strict=True):
        assert len(one.top_ids) == 2
        assert one.top[one.top_ids.index(token)] == one.logprob
    assert plain.cumulative_logprob == pytest.approx(sum(one.logprob for one in plain.logprobs))
    assert plain.prompt_logprobs is not None
    assert plain.prompt_logprobs[0] is None
    assert len(plain.prompt_logprobs) == len(b"Once")
    assert all(one and len(one.top) == 1 for one in plain.prompt_logprobs[1:])
    stop = plain.text[4:6]
    cut = llm.generate("Once", greedy(logprobs=2, stop=stop))[0]
    assert cut.logprobs == plain.logprobs[: len(cut.token_ids)]
    assert len(cut.token_ids) < 12
    assert cut.prompt_logprobs is None
    assert llm.generate("Once", GREEDY)[0].logprobs is None
    assert idle(llm)


def test_reports_do_not_depend_on_the_schedule(llm: LLM) -> None:
    """In a crowd, with the cache warm, and beside choices."""
    params = SamplingParams(
        max_tokens=20, seed=5, n=2, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    prompt = "x" * 70
    alone = llm.generate(prompt, params)
    crowd = llm.generate([prompt, *(["other"] * 9), prompt], params)
    for choices in (crowd[:2], crowd[-2:]):
        for one, other in zip(alone, choices, strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
            assert one.prompt_logprobs == other.prompt_logprobs


def test_best_of(llm: LLM) -> None:
    params: dict[str, Any] = {"max_tokens": 6, "temperature": 2.0, "seed": 3, "ignore_eos": True}
    every = llm.generate("pick", SamplingParams(n=4, logprobs=0, **params))
    best = llm.generate("pick", SamplingParams(n=2, best_of=4, **params))
    ranked = sorted(every, key=lambda one: one.cumulative_logprob or 0, reverse=True)
    assert [one.token_ids for one in best] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best] == [0, 1]
    assert best[0].logprobs is None
    assert best[0].cumulative_logprob == ranked[0].cumulative_logprob


def test_beam_search(llm: LLM) -> None:
    """Beams are likelier than what greedy finds, come best first, and read like any text."""
    params = BeamParams(beam_width=3, max_tokens=8, ignore_eos=True, logprobs=1)
    prompts: list[str | list[int]] = ["one", [1, 2, 3]]
    found = llm.beam_search(prompts, params)
    assert [(one.prompt_index, one.index) for one in found] == [
        (at, index) for at in range(2) for index in range(3)
    ]
    for beams in (found[:3], found[3:]):
        totals = [one.cumulative_logprob or 0 for one in beams]
        assert totals == sorted(totals, reverse=True)
        assert len({tuple(one.token_ids) for one in beams}) == 3
    score = llm.generate("one", greedy(max_tokens=8, logprobs=0))[0].cumulative_logprob
    assert (found[0].cumulative_logprob or 0) >= (score or 0) - 1e-9
    assert found[0].text == bytes(found[0].token_ids).decode(errors="replace")
    assert found[0].logprobs is not None
    assert [len(one.top) for one in found[0].logprobs] == [1] * 8
    (one,) = llm.beam_search("one", BeamParams(beam_width=3, max_tokens=8, ignore_eos=True, n=1))
    assert one.token_ids == found[0].token_ids
    assert idle(llm)
    with pytest.raises(InvalidRequest, match="beam_width"):
        BeamParams(beam_width=11)
    with pytest.raises(InvalidRequest, match="over the 2 beams"):
        BeamParams(beam_width=2, n=3)
    with pytest.raises(ContextTooLong):
        llm.beam_search("one", BeamParams(beam_width=2, max_tokens=1000))
