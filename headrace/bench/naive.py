"""The yardstick: one Hugging Face `generate()` at a time behind the engine's own surface.

It is what a server looks like before continuous batching, and shares the HTTP edge with the real
engine, so that a comparison measures the engine and nothing else. `n` choices are generated one
after another; there is no KV pool, no prefix cache and no priority.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace import config
from headrace.config import Settings
from headrace.engine.recorder import view_of
from headrace.engine.stats import EngineStats, StepTimes
from headrace.errors import ConfigError
from headrace.extras import install
from headrace.messages import (
    Abort,
    Done,
    End,
    EngineInfo,
    Finish,
    Look,
    Reason,
    Sampling,
    Submit,
    TokenOut,
)

if TYPE_CHECKING:
    from headrace.sources.files import ModelFiles

Key = tuple[int, int]  # owner, handle
PATIENCE_S = 0.02  # how long an idle `turn` waits for a token before it lets the caller look around


def _need_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"engine = naive needs transformers: {install('transformers')}",
            param="engine",
        ) from None
    return transformers


class _Stopped(Exception):
    """Raised inside `generate()` to leave it: the choice's tokens are no longer wanted."""


class _Job:
    """One request. The loop thread owns it; the worker reads `ended` and `gone`, and no more."""

    def __init__(self, key: Key, message: Submit, now_s: float) -> None:
        self.key, self.message = key, message
        self.gone = False  # answered by its Done: whatever the worker still says is dropped
        self.ended: set[int] = set()  # choices that have their End
        self.tokens = [0] * message.n  # sent, by choice
        self.submitted_s, self.begun_s, self.first_s, self.last_s = now_s, 0.0, 0.0, 0.0


class NaiveEngine:
    """Same methods as `engine.loop.Engine`; every method but the worker's on the caller's thread.

    `generate(prompt, max_tokens, sampling, choice, stop_ids, on_token)` is `hugging_face(model)`:
    it calls `on_token(id)` for each token, in order, and returns when the choice is complete.
    """

    def __init__(
        self,
        settings: Settings,
        generate: Callable[..., None],
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._settings, self._generate = settings, generate
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._live: dict[Key, _Job] = {}
        self._out: dict[int, TokenOut] = {}
        self._todo: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._finished: Counter[str] = Counter()
        self._started = self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._running = 0
        self._worker = threading.Thread(target=self._work, name="naive generate", daemon=True)
        self._worker.start()

    # ------------------------------------------------------------ what the caller asks

    def submit(self, owner: int, message: Submit) -> None:
        """Queue a request. Exactly one Done answers it, at once when it cannot run."""
        refusal = self._refusal(owner, message)
        self._started += 1
        if refusal:
            self._finished["refused"] += 1
            self._to(owner).dones.append(Done(message.handle, *refusal))
            return
        job = _Job((owner, message.handle), message, time.monotonic())
        self._live[job.key] = job
        if not message.max_tokens:
            self._close_job(job, "length")  # it keeps no cache: there is nothing to compute
            return
        self._todo.put(job)

    def _refusal(self, owner: int, message: Submit) -> tuple[str, str] | None:
        """(code, message) for what can never run or may not wait."""
        longest = len(message.prompt) + message.max_tokens
        if (owner, message.handle) in self._live:
            return "invalid_request", f"handle {message.handle} is in use"
        if not message.prompt or not all(0 <= x < self._vocab_size for x in message.prompt):
            return "invalid_request", f"prompt ids must lie in [0, {self._vocab_size})"
        if message.grammar is not None:
            return "invalid_request", "the naive engine has no structured output"
        if message.adapter:
            return "invalid_request", "the naive engine has no adapters"
        if beyond := _beyond(message):
            return "invalid_request", f"the naive engine has no {beyond}"
        if longest > self._max_model_len:
            return "context_length_exceeded", (
                f"{len(message.prompt)} prompt tokens and {message.max_tokens} output tokens do "
                f"not fit into {self._max_model_len}"
            )
        if self._live and len(self._live) - 1 >= self._settings.max_queue:
            return "queue_full", f"{self._settings.max_queue} requests are waiting"
        return None

    def abort(self, owner: int, message: Abort) -> None:
        """End every live choice with "abort". Unknown handles are ignored."""
        if job := self._live.get((owner, message.handle)):
            self._close_job(job, "abort")

    def finish(self, owner: int, message: Finish) -> None:
        """End one choice with "stop" after its first `n_tokens` tokens."""
        job = self._live.get((owner, message.handle))
        if job and message.choice not in job.ended:
            assert message.n_tokens <= job.tokens[message.choice], "finish beyond what was sent"
            job.tokens[message.choice] = message.n_tokens
            self._end(job, message.choice, "stop")

    def look(self, owner: int, _message: Look) -> None:
        """Counts; there are neither steps nor blocks."""
        self._to(owner).view = view_of(self.stats(), time.monotonic(), 0)

    def drop_owner(self, owner: int) -> None:
        """The owner is gone: nothing of its requests is handed out any more."""
        for job in [job for key, job in self._live.items() if key[0] == owner]:
            self._close_job(job, "abort")
        self._out.pop(owner, None)

    def warm(self) -> None:
        """The worker has been ready from the start."""

    def watch(self, told: Callable[[StepTimes], None]) -> None:
        """It computes whole answers, not steps: nothing is ever told."""

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._out)

    def spare_s(self) -> float:
        """A turn waits by itself."""
        return 0.0

    def idle(self) -> bool:
        """Nothing is ever put off."""
        return False

    def turn(self) -> dict[int, TokenOut]:
        """What has come since the last turn, by owner. Waits at most `PATIENCE_S` for the first."""
        with contextlib.suppress(queue.Empty):
            if self._live and not self._out:
                self._events.get(timeout=PATIENCE_S)()
            while True:
                self._events.get_nowait()()
        out, self._out = self._out, {}
        return out

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running,
            waiting=len(self._live) - self._running,
            kv_blocks=0,
            kv_used=0,
            steps=self._steps,
            preemptions=0,
            recomputed_tokens=0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            generation_tokens=self._generation_tokens,
            finished=dict(self._finished),
            started=self._started,
        )

    def close(self) -> None:
        """Abort what runs and end the worker."""
        for job in list(self._live.values()):
            self._close_job(job, "abort")
        self._todo.put(None)
        self._worker.join()

    # ------------------------------------------------------------ the loop thread's bookkeeping

    def _to(self, owner: int) -> TokenOut:
        return self._out.setdefault(owner, TokenOut([], [], [], [], []))

    def _begin(self, job: _Job) -> None:
        if not job.gone:
            self._running, job.begun_s = 1, time.monotonic()

    def _token(self, job: _Job, choice: int, token: int, at_s: float) -> None:
        if job.gone or choice in job.ended:
            return
        out = self._to(job.key[0])
        out.handles.append(job.key[1])
        out.choices.append(choice)
        out.tokens.append(token)
        job.tokens[choice] += 1
        job.first_s, job.last_s = job.first_s or at_s, at_s
        self._steps += 1
        self._generation_tokens += 1
        message = job.message
        if token in message.stop_ids:
            self._end(job, choice, "stop", token)
        elif job.tokens[choice] == message.max_tokens:
            self._end(job, choice, "length")

    def _end(self, job: _Job, choice: int, reason: Reason, stop_id: int = -1) -> None:
        owner, handle = job.key
        job.ended.add(choice)
        self._to(owner).ends.append(End(handle, choice, reason, stop_id))
        if len(job.ended) == job.message.n:
            self._done(job, reason)

    def _close_job(self, job: _Job, reason: Reason, error: str = "", message: str = "") -> None:
        """End every live choice, and so the request."""
        owner, handle = job.key
        for choice in set(range(job.message.n)) - job.ended:
            job.ended.add(choice)
            self._to(owner).ends.append(End(handle, choice, reason))
        self._done(job, reason, error, message)

    def _done(self, job: _Job, reason: Reason, error: str = "", message: str = "") -> None:
        owner, handle = job.key
        job.gone = True
        if job.begun_s:
            self._running = 0
            self._prompt_tokens += len(job.message.prompt)
        now_s = time.monotonic()
        begun_s = job.begun_s or now_s
        del self._live[job.key]
        self._finished[reason] += 1
        self._to(owner).dones.append(
            Done(
                handle,
                error,
                message,
                prompt_tokens=len(job.message.prompt),
                output_tokens=sum(job.tokens),
                longest_tokens=max(job.tokens),
                queue_s=begun_s - job.submitted_s,
                prefill_s=max(job.first_s - begun_s, 0.0),
                decode_s=job.last_s - job.first_s,
                compute_s=now_s - begun_s,  # it runs alone
            )
        )

    # ------------------------------------------------------------ the worker thread

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            if not job.gone:
                self._events.put(functools.partial(self._begin, job))
                self._run(job)

    def _run(self, job: _Job) -> None:
        message = job.message
        for choice in range(message.n):

            def on_token(token: int, choice: int = choice) -> None:
                at_s = time.monotonic()
                self._events.put(lambda: self._token(job, choice, token, at_s))
                if job.gone or choice in job.ended:
                    raise _Stopped

            try:
                if not job.gone and choice not in job.ended:
                    self._generate(
                        message.prompt,
                        message.max_tokens,
                        message.sampling,
                        choice,
                        message.stop_ids,
                        on_token,
                    )
                self._events.put(functools.partial(self._complete, job, choice))
            except _Stopped:
                continue
            except Exception as error:  # whatever transformers raises ends this request alone
                text = f"{type(error).__name__}: {error}"
                self._events.put(functools.partial(self._fail, job, text))
                return

    def _complete(self, job: _Job, choice: int) -> None:
        """`generate()` has returned: nobody may wait for more of this choice."""
        if choice not in job.ended:
            self._fail(job, "generate() returned before a stop id and before max_tokens")

    def _fail(self, job: _Job, text: str) -> None:
        if not job.gone:
            self._close_job(job, "error", "request_failed", text)


class _Streamer:
    """What `generate()` wants of a streamer: hands on each drawn token."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token, self._prompt_seen = on_token, False

    def put(self, value: Any) -> None:
        """`value` is a tensor of ids; that of the first call is the prompt."""
        if self._prompt_seen:
            for token in value.view(-1).tolist():
                self._on_token(token)
        self._prompt_seen = True

    def end(self) -> None:
        """All tokens were put: `generate()` returns next, and that says the same."""


def hugging_face(model: Any, threads: int = 0) -> Callable[..., None]:
    """`generate()` of a transformers causal model, one prompt a call, as `NaiveEngine` wants it.

    Draws are torch's, not headrace's: a seed gives the same tokens here each time, and other ones
    than the real engine gives. `threads`: compute threads; 0 = torch's own choice.
    """
    import torch

    transformers = _need_transformers()
    model.generation_config = transformers.GenerationConfig()  # requests bring all values resolved

    def generate(
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        choice: int,
        stop_ids: list[int],
        on_token: Callable[[int], None],
    ) -> None:
        if threads:
            torch.set_num_threads(threads)  # holds for the calling thread alone: the worker
        ids = torch.tensor([prompt], device=model.device)
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed((sampling.seed ^ choice * 0x9E3779B97F4A7C15) % 2**64)
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_generation_config(transformers, max_tokens, sampling, stop_ids),
                streamer=_Streamer(on_token),
            )

    return generate


def _beyond(message: Submit) -> str:
    """What `generate()` cannot do as asked; "" if nothing."""
    s, repetition = message.sampling, message.sampling.repetition
    others = repetition and (repetition.frequency, repetition.presence, repetition.window)
    wanted = {
        "rules for tokens": s.rules,
        "frequency or presence penalty, or penalty window": others and any(others),
        "DRY": s.dry,
        "LZ penalty": s.lz,
        "top_n_sigma": s.top_n_sigma > 0,
        "log-probabilities": s.logprobs >= 0 or message.prompt_logprobs >= 0,
        "grammar": message.grammar,
        "pooling": message.pooling,
    }
    return next((name for name, asked in wanted.items() if asked), "")


def _generation_config(
    transformers: Any, max_tokens: int, sampling: Sampling, stop_ids: list[int]
) -> Any:
    repetition = sampling.repetition
    shape = {
        "max_new_tokens": max_tokens,
        "repetition_penalty": 1.0 if repetition is None else repetition.repetition,
        "eos_token_id": list(stop_ids) or None,
        "pad_token_id": 0,  # never used: one row has no padding
    }
    if sampling.temperature < 1e-5:
        return transformers.GenerationConfig(do_sample=False, **shape)
    return transformers.GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,  # 0 = off, there too
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=max(1e-9, sampling.typical_p),  # it keeps one token, but refuses 0
        **shape,
    )


def build_naive(
    settings: Settings, files: ModelFiles, report: Callable[[str, float], None]
) -> tuple[NaiveEngine, EngineInfo]:
    """Load the model into transformers. Raises ConfigError for settings that mean nothing here."""
    refuse(settings)
    begun = time.perf_counter()
    _need_transformers()

    import torch

    from headrace.backends.cpu import device
    from headrace.bench.naive_model import hf_model
    from headrace.models.spec import read_spec
    from headrace.runner import ledger
    from headrace.runner.checkpoint import dtypes_of, open_checkpoint

    report("import torch and transformers", time.perf_counter() - begun)
    begun = time.perf_counter()
    spec = read_spec(files)
    length = ledger.wanted_model_len(settings, spec).value
    stored = dtypes_of(open_checkpoint(files))
    dtype = ledger.resolve_dtype(settings, stored, device.flags())
    model = hf_model(files, getattr(torch, dtype.value))
    report(f"load weights as {dtype.value} ({dtype.reason})", time.perf_counter() - begun)
    info = EngineInfo(
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        vocab_size=spec.vocab_size,
        block_size=settings.block_size,
        kv_blocks=0,
    )
    engine = NaiveEngine(
        settings,
        hugging_face(model, settings.threads or device.cores()),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
    )
    return engine, info


def refuse(settings: Settings) -> None:
    """Raise ConfigError for a setting that the naive engine would have to ignore."""
    keys = ["kv_blocks", "kv_memory", "block_size", "scheduling_policy", "load_format", "overlap"]
    keys += ["quantization", "kv_dtype", "allow_pickle", "check_weights", "cuda_graphs"]
    keys += ["cpu_kernels", "cpu_precision", "prefix_caching", "kv_events_endpoint"]
    config.refuse(
        settings, "engine = naive", keys if settings.backend == "cpu" else [*keys, "backend"]
    )
