"""From a checked body to `Job`s: messages to prompt text, text to ids, defaults filled in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from headrace.api.given_ids import FIELD, end_of, given_ids
from headrace.api.moderate import moderated, texts_of
from headrace.api.prompt_spans import content_spans
from headrace.api.record import PromptSpan, Record
from headrace.api.schemas import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_RULES,
    Chat,
    Completion,
    Generation,
)
from headrace.api.service import Service
from headrace.api.structured import checked_chat_grammar, checked_grammar
from headrace.api.tools import toolbox
from headrace.api.turns import conversation_of, rendered
from headrace.asked import output_tokens
from headrace.beams import BeamRules
from headrace.engine.client import Job
from headrace.errors import InvalidRequest
from headrace.hooks.contract import Asked
from headrace.messages import EngineInfo, Grammar, Sampling
from headrace.text.parts import Parser
from headrace.text.tokenizer import Tokenizer
from headrace.text.trace import Span, prompt_spans
from headrace.text.turns import written_on

COMPLETION_TOKENS = 16  # OpenAI's default max_tokens of /v1/completions
INLINE_S = 0.02  # a template that took longer is rendered in a thread
INLINE_BYTES = 2048  # longer bodies are rendered and tokenised in a thread
T = TypeVar("T")


class Shown(msgspec.Struct, frozen=True):
    """What is shown beside the text of an answer."""

    top: int = -1  # as Sampling.logprobs
    prompt_top: int = -1  # vLLM's prompt_logprobs; -1 = none
    token_ids: bool = False  # of prompts and answers
    echo: list[list[Span]] = []  # by prompt: tokens of an echo with log-probabilities

    @property
    def tokens(self) -> bool:
        """Something is said of single tokens of an answer."""
        return self.token_ids or self.top >= 0


class Prepared(msgspec.Struct, frozen=True):
    """Everything the answer side needs. Choice index = prompt index * width + choice."""

    jobs: list[Job]  # one a prompt
    n: int  # choices that are shown for each prompt
    stops: list[str]
    skip_special: bool
    include_stop: bool
    echo: list[str]  # text shown before each prompt's answer; [] = none
    shown: Shown = Shown()
    width: int = 0  # choices that are drawn, of which the n best are shown; 0 = n
    beams: BeamRules | None = None  # how to search, instead of drawing
    min_tokens: int = 0  # stop strings that are complete before as many tokens do not count
    user: str = ""  # the caller's own name for who asks
    parser: Callable[[], Parser] | None = None  # one for each choice; None: its text is all text
    tools: frozenset[str] = frozenset()  # names that the request gave to its tools
    kept: frozenset[int] = frozenset()  # special tokens that the parser must see as text
    labels: dict[str, float] = {}  # from moderation, for the response's header
    documents: list[dict[str, Any]] = []  # that the answer may cite
    asked: list[Asked] = []  # one a prompt, where a hook scores answers
    ignored: list[str] = []  # fields that were not made use of

    @property
    def drawn(self) -> int:
        """Choices of each prompt in the engine."""
        return self.width or self.n

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counted once, whatever n is."""
        return sum(len(job.prompt) for job in self.jobs)


async def prepare_chat(
    service: Service,
    request: Chat,
    info: EngineInfo,
    body_bytes: int,
    record: Record | None = None,
) -> Prepared:
    """One prompt from the chat template. Raises InvalidRequest, ContextTooLong, and what hooks
    raise."""
    if record is not None:
        record.parsed()
    limit = request.limit_tokens
    labels = await moderated(service, texts_of(request)) if service.hooks.moderation else {}
    tools = toolbox(request.tools, request.tool_choice, request.parallel_tool_calls)
    if tools is not None:
        service.dialect.check_tools()
        service.tokenizer.need_text("tools")

    given = await given_ids(service, request, info.vocab_size, record)
    rendered_s: list[float] = []

    def render() -> tuple[str, list[int]]:
        if given:
            if record is not None:
                record.rendered()
                record.tokenized()
            return end_of(service, given), given
        asked = conversation_of(service, request, tools.shown if tools is not None else [])
        text = rendered(service, request, asked)
        rendered_s.append(time.monotonic())
        if record is not None:
            record.rendered()
        ids = service.tokenizer.encode(text, add_special=bool(request.add_special_tokens))
        if record is not None:
            record.tokenized()
            if record.full is not None:
                again = partial(rendered, service, request)
                record.full.prompted(text, content_spans(text, asked, again))
        return text, ids

    # Its own time limit is for one; who waits for the event loop are many.
    quick = service.template.slowest_s < INLINE_S
    quick = quick and not request.chat_template_kwargs and request.chat_template is None
    text, ids = await timed(service, body_bytes if quick else INLINE_BYTES + 1, render, rendered_s)
    if not ids:
        raise InvalidRequest("the messages render to an empty prompt", param="messages")
    inside = service.dialect.begun(text, written_on(request))
    grammar = await checked_chat_grammar(service, request, tools, inside)
    parser = service.dialect.parser(tools, inside)
    prepared = _prepared(service, request, info, [ids], limit, "messages", grammar)
    return msgspec.structs.replace(
        prepared,
        parser=parser,
        tools=frozenset(tool.function.name for tool in request.tools or ()),
        kept=service.dialect.kept if parser is not None else frozenset(),
        labels=labels,
        documents=request.documents or [],
        asked=[Asked(_plain(request))] if service.hooks.score else [],
        ignored=_untaken(request, given),
    )


async def prepare_completion(
    service: Service,
    request: Completion,
    info: EngineInfo,
    body_bytes: int,
    record: Record | None = None,
) -> Prepared:
    """One to MAX_PROMPTS prompts of text or ids. Raises as `prepare_chat`."""
    if record is not None:
        record.parsed()
    labels: dict[str, float] = {}
    if service.hooks.moderation:
        texts = await asyncio.to_thread(_prompt_texts, service, request, info)
        labels = await moderated(service, texts)
    grammar = await checked_grammar(service, request)
    add_special = request.add_special_tokens is not False
    n = request.width
    tokenizer = service.tokenizer
    most = info.max_num_seqs // n + service.settings.max_queue  # more can never be taken at once
    given = await given_ids(service, request, info.vocab_size, record)

    def encode() -> tuple[list[list[int]], list[str], list[list[Span]]]:
        prompts = split_prompt(request.prompt, info.vocab_size)
        if len(prompts) * n > MAX_CHOICES or len(prompts) > most:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n = {n} are over {min(MAX_CHOICES // n, most)}",
                param="prompt",
            )
        ids = (
            [given]
            if given
            else [
                tokenizer.encode(prompt, add_special=add_special)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]
        )
        if not all(ids):
            if tokenizer.bos_id is None:
                raise InvalidRequest(
                    "the prompt is empty and this model has no begin-of-text token to start from",
                    param="prompt",
                )
            ids = [prompt or [tokenizer.bos_id] for prompt in ids]
        if record is not None:
            record.tokenized()
            first = prompts[0]
            if record.full is not None and isinstance(first, str):
                record.full.prompted(first, [PromptSpan(0, len(first), "content", "")])
        return ids, *_echo(tokenizer, request, prompts, ids)

    ids, echo, spans = await timed(service, body_bytes, encode)
    limit = COMPLETION_TOKENS if request.limit_tokens is None else request.limit_tokens
    prepared = _prepared(service, request, info, ids, limit, "prompt", grammar, echo, spans)
    asked: list[Asked] = []
    if service.hooks.score:
        texts = await asyncio.to_thread(_prompt_texts, service, request, info)
        asked = [Asked(prompt=text) for text in texts]
    ignored = _untaken(request, given)
    return msgspec.structs.replace(prepared, labels=labels, asked=asked, ignored=ignored)


def _untaken(request: Generation, given: list[int]) -> list[str]:
    return [FIELD] if request.prompt_ids is not None and not given else []


def _plain(request: Chat) -> list[dict[str, Any]]:
    """The messages as they were sent."""
    messages: list[dict[str, Any]] = msgspec.to_builtins(request.messages)
    return [{name: value for name, value in one.items() if value is not None} for one in messages]


def _prompt_texts(service: Service, request: Completion, info: EngineInfo) -> list[str]:
    """The prompts as a moderation hook sees them; ids are read as text."""
    tokenizer = service.tokenizer
    texts = []
    for prompt in split_prompt(request.prompt, info.vocab_size):
        if isinstance(prompt, list):
            tokenizer.need_text("prompt")
            prompt = tokenizer.decode(prompt, skip_special=False)
        texts.append(prompt)
    return texts


def _echo(
    tokenizer: Tokenizer,
    request: Completion,
    prompts: list[str | list[int]],
    ids: list[list[int]],
) -> tuple[list[str], list[list[Span]]]:
    """The echoed texts, and of what tokens they are if that is asked for; or nothing."""
    if not request.echo:
        return [], []
    texts = [
        prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special=False)
        for prompt in prompts
    ]
    if request.top_count < 0:
        return texts, []
    traced = [
        prompt_spans(tokenizer, known, prompt if isinstance(prompt, str) else None)
        for prompt, known in zip(prompts, ids, strict=True)
    ]
    # A tokenizer that changes texts: what the tokens add up to is what was read.
    return [text for _, text in traced], [spans for spans, _ in traced]


def split_prompt(
    prompt: str | list[Any], vocab_size: int, field: str = "prompt", most: int = MAX_PROMPTS
) -> list[str | list[int]]:
    """The four shapes of `prompt` as a list. Raises InvalidRequest for mixed or illegal ones."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest(f"{field} is an empty list", param=field)
    if all(type(item) is int for item in prompt):
        return [_ids(prompt, vocab_size, field)]
    if len(prompt) > most:
        raise InvalidRequest(f"more than {most} {field}s", param=field)
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(isinstance(item, list) for item in prompt):
        return [_ids(item, vocab_size, field) for item in prompt]
    raise InvalidRequest(
        f"{field} must be a string, a list of strings, a list of token ids or a list of id lists",
        param=field,
    )


def _ids(items: list[Any], vocab_size: int, field: str) -> list[int]:
    if not items:
        raise InvalidRequest(f"{field} holds an empty list of ids", param=field)
    for item in items:
        if type(item) is not int or not 0 <= item < vocab_size:
            raise InvalidRequest(
                f"{field}: {item!r} is not a token id in [0, {vocab_size})", param=field
            )
    return items


def _prepared(
    service: Service,
    request: Generation,
    info: EngineInfo,
    prompts: list[list[int]],
    limit: int | None,
    param: str,
    grammar: Grammar | None,
    echo: list[str] | None = None,
    spans: list[list[Span]] | None = None,
) -> Prepared:
    shown = _shown(request, spans or [])
    beams = _beams(request, grammar)
    width = request.n or 1 if beams else request.width
    ranked = width > (request.n or 1)
    stop_ids = list(request.stop_token_ids or ())
    if not request.ignore_eos:
        stop_ids = sorted({*stop_ids, *service.eos_ids})
    sampling = msgspec.structs.replace(
        service.sampler.sampling(request, info.vocab_size, stop_ids, 0),
        logprobs=max(shown.top, 0 if ranked else -1),
    )
    _check_rules(len(prompts), sampling, grammar)
    jobs = [
        Job(
            prompt=prompt,
            max_tokens=output_tokens(
                info, len(prompt), limit, param, min_tokens=request.min_tokens
            ),
            sampling=sampling
            if request.seed is not None
            else msgspec.structs.replace(sampling, seed=service.draw_seed()),
            stop_ids=stop_ids,
            n=width,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            grammar=grammar,
            prompt_logprobs=max(shown.prompt_top, shown.top if shown.echo else -1),
        )
        for prompt in prompts
    ]
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if stops:
        service.tokenizer.need_text("stop")
    return Prepared(
        jobs=jobs,
        n=request.n or 1,
        stops=stops,
        skip_special=request.skip_special_tokens is not False,
        include_stop=bool(request.include_stop_str_in_output),
        user=request.user or "",
        echo=echo or [],
        shown=shown,
        width=width,
        beams=beams,
        min_tokens=request.min_tokens or 0,
    )


def _check_rules(prompts: int, sampling: Sampling, grammar: Grammar | None) -> None:
    """A short body could ask for gigabytes: rules times prompts."""
    size = sampling.rules.size if sampling.rules is not None else 0
    size += len(sampling.dry.breakers) if sampling.dry is not None else 0
    size += len(grammar.text) // 8 if grammar is not None else 0
    if prompts > 1 and prompts * size > MAX_RULES:
        raise InvalidRequest(
            f"{prompts} prompts with {size} ids in rules, breakers and grammar each are over "
            f"{MAX_RULES} in all: send fewer prompts at once",
            param="prompt",
        )


def _shown(request: Generation, spans: list[list[Span]]) -> Shown:
    return Shown(
        top=request.top_count,
        prompt_top=-1 if request.prompt_logprobs is None else request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        echo=spans,
    )


def _beams(request: Generation, grammar: Grammar | None) -> BeamRules | None:
    """The search that is asked for. As OpenAI's ancestors had it, best_of is a width too."""
    if not request.use_beam_search:
        return None
    if grammar is not None:
        raise InvalidRequest(
            "use_beam_search and structured output exclude each other", param="use_beam_search"
        )
    penalty, early = request.length_penalty, request.early_stopping
    return BeamRules(
        width=request.width,
        length_penalty=1.0 if penalty is None else penalty,
        early_stopping=False if early is None else early,
    )


async def timed(
    service: Service, body_bytes: int, work: Callable[[], T], rendered_s: Sequence[float] = ()
) -> T:
    """Short bodies here, long ones in a thread: nobody else's stream waits for a tokeniser.

    rendered_s: time.monotonic() at which the prompt's text was there, if `work` makes it first.
    """
    begun_s = time.monotonic()
    result = work() if body_bytes <= INLINE_BYTES else await asyncio.to_thread(work)
    for text_s in rendered_s:
        service.metrics.render_s.write(text_s - begun_s)
        begun_s = text_s
    service.metrics.tokenize_s.write(time.monotonic() - begun_s)
    return result
