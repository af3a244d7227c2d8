"""headrace.LLM: the engine offline, in the caller's own process and thread.

The caller's thread drives the loop: there is no background process, nothing runs between calls.
One LLM belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import secrets
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, cast

import msgspec

from headrace import config, launch
from headrace.asked import Sampler, output_tokens
from headrace.beams import Beam, BeamRules, BeamSearch
from headrace.completion import Choice, Completion, Job
from headrace.draws import parse_defaults
from headrace.errors import ConfigError, EngineDead, InvalidRequest, RequestFailed, by_code
from headrace.grammar.asked import of_structured
from headrace.grammar.check import Checker
from headrace.load_bar import LoadBar
from headrace.messages import Abort, Done, End, Finish, Grammar, Logprobs, Pooling, Submit
from headrace.params import BeamParams, SamplingParams
from headrace.pooled import Classification, Embedding, classified, embedded
from headrace.progress import Bar
from headrace.text.choice import ChoiceText
from headrace.text.conversation import asked_of
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import load_text
from headrace.vectors import (
    check_dimensions,
    check_generates,
    check_labels,
    check_lengths,
    pooling_of,
)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

OWNER = 0  # the engine's only client
GENERATE_TOKENS = 16  # max_tokens of `generate` when none is given, as /v1/completions has it


class LLM:
    """An engine in this process.

    Args:
        model: as `headrace serve` takes it: a GGUF file, a folder, hf:owner/name, pypi:package;
            empty for the default model.
        settings: a setting of `headrace serve` by its name, such as max_num_seqs=8, but for those
            that its HTTP side alone reads, which are refused. HEADRACE_* variables hold for those
            not given here. An `itl_target_ms` of auto is no limit here: nobody waits for single
            tokens, so prompts go as fast as they can, and a step that they fill is theirs alone.

    Raises SetupError: a bad setting, or a model that cannot be found, read or run.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        if idle := [key for key in settings if key in config.SERVING]:
            why = "it is for `headrace serve`, and an LLM serves nobody"
            raise ConfigError(f"{idle[0]} would change nothing: {why}", param=idle[0])
        given = {"model": model, **settings} if model else settings
        self.settings, _ = config.load(given)
        unhurried = self.settings.itl_target_ms == "auto"
        if unhurried:
            self.settings = msgspec.structs.replace(self.settings, itl_target_ms="0")
        files = launch.find_model(self.settings, _say)
        dummy = self.settings.load_format == "dummy"
        self._card, self._tokenizer = load_text(files, optional=dummy)
        self._template = ChatTemplate(self._card)
        server = parse_defaults(self.settings.default_sampling)
        self._sampler = Sampler(self._card, server, self._tokenizer)
        with LoadBar(lambda line: None, shown=sys.stderr.isatty()) as bar:
            self._engine, self.info = launch.build_engine(
                self.settings, files, _quiet, bar.show, prompts_first=unhurried
            )
        self._handles = itertools.count()
        self._live: dict[int, Job] = {}
        self._seeds = random.Random(self.settings.seed or secrets.randbits(64))
        self._checker = Checker()
        self._closed = False

    # ------------------------------------------------------------ what the caller asks

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continue each prompt: a text, token ids, or a list of either.

        params: one for all, or one for each prompt. progress: a bar on stderr; None = if that is a
        terminal. Returns the choices of the first prompt, then those of the second, and so on.

        Raises InvalidRequest or ContextTooLong before anything runs. Ctrl-C aborts all of it.
        """
        jobs = self._prepare(self._encode(prompts), params, GENERATE_TOKENS, "prompts")
        return self._run(jobs, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        progress: bool | None = None,
        **template: Any,
    ) -> list[Completion]:
        """Answer one conversation, or each of a list of them. `template`: more for the template,
        such as tools or documents; docs/tools.md says what one that lacks them is given.

        Otherwise as `generate`; without max_tokens an answer may fill the context.
        """
        ids = self._render(messages, template)
        return self._run(self._prepare(ids, params, None, "messages"), progress)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        **template: Any,
    ) -> Generator[str, None, None]:
        """Pieces of the text of one answer to a prompt or a conversation, as they come.

        Closing the generator aborts the request. Needs n = 1. Raises as `generate` does, at the
        call; and a HeadraceError from the generator when the engine fails the request.
        """
        for name in ("n", "best_of"):
            if params is not None and getattr(params, name) not in (None, 1):
                asked = getattr(params, name)
                raise InvalidRequest(f"{name} = {asked}: a stream has one choice", param=name)
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            conversation = cast(Sequence[Message], prompt)
            jobs = self._prepare(self._render(conversation, template), params, None, "messages")
        elif template:
            raise InvalidRequest("template arguments need messages", param=next(iter(template)))
        else:
            ids = self._encode([cast(Prompt, prompt)])
            jobs = self._prepare(ids, params, GENERATE_TOKENS, "prompts")
        return self._pieces(jobs[0])

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamParams
    ) -> list[Completion]:
        """The likeliest continuations of each prompt, best first; `cumulative_logprob` of each.

        Otherwise as `generate`.
        """
        rules = BeamRules(params.beam_width, params.length_penalty, params.early_stopping)
        shape = SamplingParams(
            stop_token_ids=params.stop_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._check(shape)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._card.eos_ids)}
        step = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=rules.sampling.logprobs,
            ignore_eos=True,
            cache_salt=params.cache_salt,
        )
        ids = [self._begun(prompt, "prompts") for prompt in self._encode(prompts)]
        for at, prompt in enumerate(ids):
            what = f"prompt {at}"
            output_tokens(self.info, len(prompt), params.max_tokens, "prompts", what=what)
        searches = [BeamSearch(prompt, rules, params.max_tokens, stops) for prompt in ids]
        while open_ones := [search for search in searches if not search.done]:
            asked = [prompt for search in open_ones for prompt in search.prompts]
            said = iter([_report(one) for one in self.generate(asked, step, progress=False)])
            for search in open_ones:
                search.feed([next(said) for _ in search.prompts])
        return [
            self._beam(at, index, ids[at], beam, params, shape)
            for at, search in enumerate(searches)
            for index, beam in enumerate(search.best(params.n or params.beam_width))
        ]

    def _beam(
        self,
        at: int,
        index: int,
        prompt: list[int],
        beam: Beam,
        params: BeamParams,
        shape: SamplingParams,
    ) -> Completion:
        choice = self._choice(at, index, prompt, shape)
        heard = choice.text.hear(beam.tokens, End(0, 0, beam.reason, beam.stop_id))
        made = choice.completion
        made.text, made.token_ids, made.finish_reason = heard.text, beam.tokens, beam.reason
        made.cumulative_logprob = beam.total
        if (count := params.logprobs) is not None:
            made.logprobs = [
                Logprobs(one.logprob, one.rank, one.top_ids[:count], one.top[:count])
                for one in beam.said
            ]
        return made

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Literal["mean", "last"] | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        cache_salt: str = "",
        progress: bool | None = None,
    ) -> list[Embedding]:
        """Each prompt as a vector: the mean of its tokens' last hidden states, or the last of them.

        pooling: None = the model's own, else the mean. dimensions: the first so many, before the
        vector is brought to length 1. Otherwise as `generate`.
        """
        check_dimensions(self.info, dimensions)
        kind = pooling_of(self._card, pooling)
        jobs = self._run_pooled(self._encode(prompts, add_end=True), kind, cache_salt, progress)
        return [embedded(at, job, dimensions, normalize=normalize) for at, job in enumerate(jobs)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        cache_salt: str = "",
        progress: bool | None = None,
    ) -> list[Classification]:
        """What the model's classification head says of each prompt; a reward model's reward is
        `scores[0]`. Otherwise as `generate`."""
        check_labels(self.info)
        ids = self._encode(prompts, add_end=True)
        jobs = self._run_pooled(ids, "scores", cache_salt, progress)
        return [classified(at, job, self._card) for at, job in enumerate(jobs)]

    def close(self) -> None:
        """Free the model. The object is of no more use."""
        if not self._closed:
            self._closed = True
            self._engine.close()
            self._checker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ from prompts to jobs

    def _encode(
        self, prompts: Prompt | Sequence[Prompt], *, add_end: bool = False
    ) -> list[list[int]]:
        if isinstance(prompts, str):
            many: Sequence[Prompt] = [prompts]
        elif prompts and all(type(item) is int for item in prompts):
            many = [cast(Sequence[int], prompts)]
        else:
            many = cast(Sequence[Prompt], prompts)
        found = [item for item in many if isinstance(item, str)]
        texts = self._tokenizer.encode_batch(found, add_end=add_end)
        encoded = iter(texts)
        return [next(encoded) if isinstance(x, str) else self._ids(x) for x in many]

    def _ids(self, prompt: Sequence[int]) -> list[int]:
        try:
            ids = list(prompt)
        except TypeError:
            ids = [-1]
        if not ids or not all(type(x) is int and 0 <= x < self.info.vocab_size for x in ids):
            raise InvalidRequest(
                f"a prompt is a text or a list of ids in [0, {self.info.vocab_size})",
                param="prompts",
            )
        return ids

    def _render(self, messages: Any, template: Mapping[str, Any]) -> list[list[int]]:
        """Messages, or a list of conversations, to ids. The template writes BOS itself."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidRequest("messages is a list of at least one message", param="messages")
        many = [messages] if isinstance(messages[0], Mapping) else messages
        for conversation in many:
            _check_messages(conversation)
        texts = [self._template.prompt(asked_of(turns, template)) for turns in many]
        return self._tokenizer.encode_batch(texts, add_special=False)

    def _prepare(
        self, prompts: list[list[int]], params: Params, default_tokens: int | None, param: str
    ) -> list[Job]:
        check_generates(self.info)
        each = [params] * len(prompts) if isinstance(params, SamplingParams | None) else params
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"{len(each)} params for {len(prompts)} prompts: give one, or one each",
                param="params",
            )
        pairs = zip(prompts, each, strict=True)
        return [
            self._job(at, prompt, one or SamplingParams(), default_tokens, param)
            for at, (prompt, one) in enumerate(pairs)
        ]

    def _job(
        self, at: int, prompt: list[int], params: SamplingParams, default: int | None, param: str
    ) -> Job:
        prompt = self._begun(prompt, param)
        self._check(params)
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self._card.eos_ids)
        submit = Submit(
            handle=next(self._handles),
            prompt=prompt,
            max_tokens=output_tokens(
                self.info,
                len(prompt),
                params.max_tokens or default,
                param,
                what=f"prompt {at}",
                min_tokens=params.min_tokens,
            ),
            sampling=msgspec.structs.replace(
                self._sampler.sampling(
                    params, self.info.vocab_size, sorted(stop_ids), self._seeds.getrandbits(64)
                ),
                logprobs=_reports(params),
            ),
            stop_ids=sorted(stop_ids),
            n=params.width,
            priority=params.priority,
            cache_salt=params.cache_salt,
            arrived_s=time.monotonic(),
            grammar=self._grammar(params),
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        )
        choices = [self._choice(at, index, prompt, params) for index in range(params.width)]
        return Job(submit, choices, params)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        self._tokenizer.need_text("structured_outputs")
        grammar = of_structured(params.structured_outputs)
        if grammar is not None:
            self._checker.submit(grammar, "structured_outputs").result()
        return grammar

    def _begun(self, prompt: list[int], param: str) -> list[int]:
        """The prompt, or BOS where it is empty."""
        if not prompt and self._tokenizer.bos_id is None:
            raise InvalidRequest("the prompt is empty and the model has no BOS", param=param)
        return prompt or [cast(int, self._tokenizer.bos_id)]

    def _choice(self, at: int, index: int, prompt: list[int], params: SamplingParams) -> Choice:
        text = ChoiceText(
            self._tokenizer,
            params.stops,
            params.skip_special_tokens,
            params.include_stop_str_in_output,
            prompt_tail=prompt[-8:],
            min_tokens=params.min_tokens or 0,
        )
        return Choice(Completion(prompt_index=at, index=index, prompt_token_ids=prompt), text)

    def _check(self, params: SamplingParams) -> None:
        if params.stops:
            self._tokenizer.need_text("stop")
        for name, many in (("n", params.n), ("best_of", params.width)):
            if many > self.info.max_num_seqs:
                raise InvalidRequest(
                    f"{name} = {many} is over max_num_seqs = {self.info.max_num_seqs}", param=name
                )
        if params.priority and self.settings.scheduling_policy != "priority":
            raise InvalidRequest(
                "priority needs LLM(..., scheduling_policy='priority')", param="priority"
            )
        for token in params.stop_token_ids:
            if token >= self.info.vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids: {token} is not in [0, {self.info.vocab_size})",
                    param="stop_token_ids",
                )

    # ------------------------------------------------------------ running them

    def _run(self, jobs: list[Job], progress: bool | None) -> list[Completion]:
        self._finish(jobs, progress)
        return [completion for job in jobs for completion in job.shown()]

    def _run_pooled(
        self, prompts: list[list[int]], pooling: Pooling, cache_salt: str, progress: bool | None
    ) -> list[Job]:
        check_lengths(self.info, prompts, "prompts")
        jobs = [
            Job(
                Submit(
                    handle=next(self._handles),
                    prompt=prompt,
                    max_tokens=0,
                    cache_salt=cache_salt,
                    arrived_s=time.monotonic(),
                    pooling=pooling,
                ),
                [],
                SamplingParams(),
            )
            for prompt in prompts
        ]
        self._finish(jobs, progress)
        return jobs

    def _finish(self, jobs: list[Job], progress: bool | None) -> None:
        shown = sys.stderr.isatty() if progress is None else progress
        with Bar(len(jobs), shown) as bar, self._feeding(jobs) as step:
            while not all(job.done for job in jobs):
                step()
                bar.show(sum(j.done is not None for j in jobs), sum(j.tokens for j in jobs))

    def _pieces(self, job: Job) -> Generator[str, None, None]:
        with self._feeding([job]) as step:
            while job.done is None or job.fresh:
                if job.fresh:
                    piece = "".join(job.fresh)
                    job.fresh.clear()
                    yield piece
                else:
                    step()
        if job.done.error:
            raise by_code(job.done.error, job.done.message)

    @contextlib.contextmanager
    def _feeding(self, jobs: list[Job]) -> Iterator[Callable[[], None]]:
        """A step that submits as many of `jobs` as the engine takes and runs one turn.

        Leaving early aborts what was submitted and waits for its end.
        """
        waiting = list(jobs)  # a heap: a refused job comes back in its place
        room = self.info.max_num_seqs + self.settings.max_queue

        def step() -> None:
            while waiting and len(self._live) < room:
                job = heapq.heappop(waiting)
                self._live[job.submit.handle] = job
                self._engine.submit(OWNER, job.submit)
            for job in self._turn():  # the queue was full: again, when something has ended
                heapq.heappush(waiting, job)

        if self._closed:
            raise EngineDead("this LLM is closed")
        try:
            yield step
        finally:
            mine = [job for job in jobs if job.submit.handle in self._live]
            for job in mine:
                self._engine.abort(OWNER, Abort(job.submit.handle))
            while any(job.submit.handle in self._live for job in mine):
                self._turn()

    def _turn(self) -> list[Job]:
        """One turn of the loop, told to the jobs. Returns those refused for a full queue."""
        out = self._engine.turn().get(OWNER)
        if out is None:
            return []
        for vector in out.vectors:
            self._live[vector.handle].vector = vector.values
        ends = {(e.handle, e.choice): e for e in out.ends if self._live[e.handle].choices}
        news: dict[tuple[int, int], list[int]] = {key: [] for key in ends}
        for handle, choice, token in zip(out.handles, out.choices, out.tokens, strict=True):
            news.setdefault((handle, choice), []).append(token)
        for piece in out.prompt_logprobs:
            self._live[piece.handle].said += piece.entries
        for handle, choice, one in zip(out.handles, out.choices, out.logprobs, strict=False):
            at = self._live[handle].choices[choice]
            if one is not None and not at.ended:
                at.said.append(one)
        for (handle, choice), tokens in news.items():
            self._hear(self._live[handle], choice, tokens, ends.get((handle, choice)))
        return [job for done in out.dones if (job := self._settle(done))]

    def _hear(self, job: Job, choice: int, tokens: list[int], end: End | None) -> None:
        """A choice's new tokens. `end`: it ended in this turn, with the last of them."""
        at = job.choices[choice]
        job.tokens += len(tokens)
        if at.ended:
            return
        heard = at.text.hear(tokens, end)
        at.completion.token_ids += tokens
        if heard.finish is not None:
            at.ended = True
            at.completion.finish_reason = heard.finish
            at.conclude(job.params.logprobs is not None)
        if heard.overrun:
            self._engine.finish(OWNER, Finish(job.submit.handle, choice, at.text.n_tokens))
        at.completion.text += heard.text
        if choice == 0 and heard.text:
            job.fresh.append(heard.text)

    def _settle(self, done: Done) -> Job | None:
        """The request's one terminal message. Returns the job if it must be submitted again."""
        job = self._live.pop(done.handle)
        if done.error == "queue_full" and self._live:
            return job
        job.done = done
        for choice in job.choices:
            choice.completion.cached_tokens = done.cached_tokens
            if job.submit.prompt_logprobs >= 0 and not done.error:
                choice.completion.prompt_logprobs = job.said
            if done.error:
                choice.completion.finish_reason = "error"
                choice.completion.error = f"{done.error}: {done.message}"
        return None


def _report(completion: Completion) -> Logprobs:
    """Of the one token that a beam's step drew."""
    if completion.error or not completion.logprobs:
        raise RequestFailed(completion.error or "a step of the search drew nothing")
    return completion.logprobs[0]


def _reports(params: SamplingParams) -> int:
    """As Sampling.logprobs; a choice among several needs its tokens' log-probabilities."""
    if params.logprobs is not None:
        return params.logprobs
    return 0 if params.width > params.n else -1


def _check_messages(conversation: Any) -> None:
    if isinstance(conversation, str) or not isinstance(conversation, Sequence) or not conversation:
        raise InvalidRequest("a conversation is a list of at least one message", param="messages")
    for message in conversation:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest("a message is a mapping with a role", param="messages")
        if not isinstance(message.get("content"), str | None):
            raise InvalidRequest("the content of a message is text", param="messages")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _quiet(phase: str, seconds: float) -> None:
    """The phases of the start are for `headrace serve` to print."""
