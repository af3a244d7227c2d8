"""Prometheus metrics of one process; `exposition` adds the processes of a server up.

docs/metrics.md names every one. Names that others know them by are in `aliases`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from headrace.observe.exposition import Exposition
from headrace.observe.histogram import (
    CHOICES,
    REQUEST,
    STEP,
    STEP_TOKENS,
    TOKEN,
    TOKENS,
    TTFT,
    WORK,
    Histograms,
)
from headrace.observe.metrics_page import Reading
from headrace.observe.usage_metrics import UsageMetrics

REGISTRY = CollectorRegistry()


class Stats(Protocol):
    """What the engine counts: gauges, then totals.

    `finished` is reason -> requests, `runner` what its runner alone can count: event -> times.
    """

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_blocks(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def kv_used(self) -> int: ...
    @property
    def step_factor(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def queried_tokens(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def started(self) -> int: ...
    @property
    def finished(self) -> Mapping[str, int]: ...
    @property
    def runner(self) -> Mapping[str, int]: ...
    @property
    def kv_events(self) -> Mapping[str, int]: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def unclaimed_s(self) -> float: ...


class Step(Protocol):
    """Where the time of one step went; see `engine.stats.StepTimes`."""

    @property
    def tokens(self) -> int: ...
    @property
    def plan_s(self) -> float: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def sample_s(self) -> float: ...
    @property
    def apply_s(self) -> float: ...
    @property
    def wall_s(self) -> float: ...


class Ended(Protocol):
    """What a request's Done says; see `messages.Done`."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def longest_tokens(self) -> int: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def decode_s(self) -> float: ...


class EngineMetrics:
    """The engine's gauges and counters. `update` now and then; equal values cost a compare."""

    GAUGES = (
        ("running", "headrace_requests_running", "requests that hold a row"),
        ("waiting", "headrace_requests_waiting", "requests in the queue"),
        ("kv_blocks", "headrace_kv_blocks", "KV blocks in the pool"),
        ("kv_used", "headrace_kv_blocks_used", "KV blocks that a request holds"),
        ("kv_tokens", "headrace_kv_tokens", "tokens that the KV cache keeps in every layer"),
        (
            "step_factor",
            "headrace_step_time_factor",
            "times what was predicted that steps held to the ITL target take; 1 at the start",
        ),
    )
    COUNTERS = (
        ("steps", "headrace_steps", "steps finished"),
        ("preemptions", "headrace_preemptions", "requests that lost their KV blocks"),
        ("recomputed_tokens", "headrace_recomputed_tokens", "tokens computed again after that"),
        ("prompt_tokens", "headrace_prompt_tokens", "prompt tokens of admitted requests"),
        (
            "queried_tokens",
            "headrace_prefix_queried_tokens",
            "of these, tokens that were looked up in the prefix cache",
        ),
        ("cached_tokens", "headrace_cached_tokens", "of these, tokens that were found there"),
        ("prefill_tokens", "headrace_prefill_tokens", "tokens computed in chunks of prompts"),
        ("generation_tokens", "headrace_generation_tokens", "tokens generated"),
        ("started", "headrace_requests_started", "requests that the engine took"),
        ("busy_s", "headrace_busy_seconds", "time the device worked"),
        (
            "unclaimed_s",
            "headrace_unclaimed_seconds",
            "of that, for requests of HTTP processes that died: in no usage record",
        ),
    )

    def __init__(
        self, model_name: str, block_size: int, registry: CollectorRegistry = REGISTRY
    ) -> None:
        """Counts as lost what an engine before this one, in the same folder, did not finish."""
        self._model_name = model_name
        self._block_size = block_size
        lost = _lost(registry)
        finished = _Labelled(
            "headrace_requests_finished", "requests that the engine ended, by reason",
            "reason", model_name, registry,
        )  # fmt: skip
        finished.add("lost", lost)  # before a gauge says that nothing runs
        self._gauges = [
            (field, _gauge(name, text, registry, ["model_name"]).labels(model_name))
            for field, name, text in self.GAUGES
        ]
        self._counters = [
            (field, Counter(name, text, ["model_name"], registry=registry).labels(model_name))
            for field, name, text in self.COUNTERS
        ]
        self._usage = _gauge(
            "headrace_kv_usage_ratio", "share of KV blocks that a request holds, 0 to 1", registry,
            ["model_name"],
        ).labels(model_name)  # fmt: skip
        self._config = _gauge(
            "vllm:cache_config_info", "always 1; the labels hold the facts", registry,
            ["model_name", "engine", "block_size", "num_gpu_blocks"],
        )  # fmt: skip
        self._registry = registry
        runner = _Labelled(
            "headrace_runner_events", "what the runner did, by its own names for it",
            "event", model_name, registry,
        )  # fmt: skip
        kv_events = _Labelled(
            "headrace_kv_events", "batches of KV events published or dropped, and replays",
            "event", model_name, registry,
        )  # fmt: skip
        self._by_label = (("finished", finished), ("runner", runner), ("kv_events", kv_events))
        self._last: dict[str, float] = {}
        self._make_histograms(Histograms(model_name, registry))

    def _make_histograms(self, histograms: Histograms) -> None:
        self._histograms, make = histograms, histograms.make
        self._tokens = make("headrace_step_tokens", "tokens computed in a step", STEP_TOKENS)
        self._wall_s = make("headrace_step_seconds", "a step, launched to its tokens known", STEP)
        self._plan_s = make("headrace_step_plan_seconds", "host: a step planned", STEP)
        self._forward_s = make("headrace_step_forward_seconds", "device: a step's forward", STEP)
        self._sample_s = make("headrace_step_sample_seconds", "device: a step's draws", STEP)
        self._apply_s = make("headrace_step_apply_seconds", "host: a step's tokens applied", STEP)

    def describe_kernels(self, labels: Mapping[str, str]) -> None:
        """What computes and why; `labels` are the fields of `messages.KernelsInfo`."""
        gauge = _gauge(
            "headrace_kernels_info", "always 1; the labels say what computes and why",
            self._registry, ["model_name", *labels],
        )  # fmt: skip
        gauge.labels(self._model_name, *labels.values()).set(1)

    def note(self, step: Step) -> None:
        """A step was applied; shown after the next `update`."""
        self._tokens.note(step.tokens)
        self._wall_s.note(step.wall_s)
        self._plan_s.note(step.plan_s)
        self._apply_s.note(step.apply_s)
        if step.sample_s >= 0:  # else the runner cannot tell the two apart
            self._sample_s.note(step.sample_s)
            self._forward_s.note(max(0.0, step.busy_s - step.sample_s))

    def update(self, stats: Stats) -> None:
        """Write what changed since the last call."""
        last = self._last
        new: dict[str, float] = {}
        for field, counter in self._counters:
            value = new[field] = getattr(stats, field)
            if value > last.get(field, 0):
                counter.inc(value - last.get(field, 0))
        for field, labelled in self._by_label:
            labelled.update(getattr(stats, field))
        self._histograms.flush()
        # Gauges last: a page that shows no request has counted them all.
        if stats.kv_tokens != last.get("kv_tokens"):
            blocks = stats.kv_tokens // self._block_size  # of a sequence: readers multiply
            labels = (self._model_name, "0", str(self._block_size), str(blocks))
            self._config.labels(*labels).set(1)
        if stats.kv_used != last.get("kv_used"):
            self._usage.set(stats.kv_used / stats.kv_blocks if stats.kv_blocks else 0.0)
        for field, gauge in self._gauges:
            value = new[field] = getattr(stats, field)
            if value != last.get(field):
                gauge.set(value)
        self._last = new


def _lost(registry: CollectorRegistry) -> int:
    """Requests that engines before this one took and did not live to finish."""
    page = Exposition(registry)
    started = page.reading("headrace_requests_started")
    finished = page.reading("headrace_requests_finished")
    live = (started.value if started else 0) - (finished.value if finished else 0)
    return max(0, round(live))


class _Labelled:
    """A counter with one label, whose totals are kept elsewhere."""

    def __init__(
        self, name: str, text: str, label: str, model_name: str, registry: CollectorRegistry
    ) -> None:
        self._counter = Counter(name, text, ["model_name", label], registry=registry)
        self._model_name = model_name
        self._last: dict[str, int] = {}

    def add(self, key: str, count: int) -> None:
        """Raise one series."""
        self._counter.labels(self._model_name, key).inc(count)

    def update(self, totals: Mapping[str, int]) -> None:
        """Raise the series to `totals`; one at 0 is shown from the first time it is named."""
        for key, total in totals.items():
            before = self._last.get(key)
            if before is None or total > before:
                self.add(key, total - (before or 0))
                self._last[key] = total


class ApiMetrics:
    """What one HTTP process measures. `note`s (tokens) are shown after the next `flush`."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._model_name = model_name
        self.registry = registry
        self._exposition = Exposition(registry)
        self.usage = UsageMetrics(model_name, registry)
        self._requests = Counter(
            "headrace_requests",
            "HTTP requests, by endpoint and status",
            ["model_name", "endpoint", "status"],
            registry=registry,
        )
        self._hooks = Counter(
            "headrace_hooks",
            "what hooks said, by kind and outcome",
            ["model_name", "kind", "outcome"],
            registry=registry,
        )
        self._given_prompts = Counter(
            "headrace_given_prompts",
            "prompts that came with their tokens: taken, or why not",
            ["model_name", "outcome"],
            registry=registry,
        )
        self._make_histograms(Histograms(model_name, registry))

    def _make_histograms(self, histograms: Histograms) -> None:
        self._histograms, make = histograms, histograms.make
        self.render_s = make("headrace_render_seconds", "messages to one prompt text", WORK)
        self.tokenize_s = make("headrace_tokenize_seconds", "prompts of a request to ids", WORK)
        self.emit_s = make(
            "headrace_emit_seconds", "news of a stream, from the engine's message to the socket",
            WORK,
        )  # fmt: skip
        self.queue_s = make("headrace_queue_seconds", "submit to first scheduled", REQUEST)
        self.prefill_s = make("headrace_prefill_seconds", "first scheduled to first token", REQUEST)
        self.decode_s = make("headrace_decode_seconds", "first token to last token", REQUEST)
        self.inference_s = make(
            "headrace_inference_seconds", "first scheduled to last token", REQUEST
        )
        self.ttft_s = make("headrace_ttft_seconds", "HTTP arrival to first token", TTFT)
        self.e2e_s = make("headrace_e2e_seconds", "HTTP arrival to the end of the request", REQUEST)
        self.inter_token_s = make("headrace_inter_token_seconds", "token to next token", TOKEN)
        self.token_s = make(
            "headrace_time_per_output_token_seconds",
            "of a request: mean time from token to token after the first",
            TOKEN,
        )
        self.prompt_tokens = make("headrace_request_prompt_tokens", "of a request", TOKENS)
        self.output_tokens = make(
            "headrace_request_output_tokens", "of a request, over all choices", TOKENS
        )
        self.longest_tokens = make(
            "headrace_request_longest_tokens", "of a request: those of its longest choice", TOKENS
        )
        self.max_tokens = make("headrace_request_max_tokens", "max_tokens of a request", TOKENS)
        self.choices = make("headrace_request_choices", "n of a request", CHOICES)

    def count_request(self, endpoint: str, status: int) -> None:
        """One HTTP request ended (status 499: the client went away)."""
        self._requests.labels(self._model_name, endpoint, str(status)).inc()

    def count_given_prompt(self, outcome: str) -> None:
        """A prompt came with its tokens."""
        self._given_prompts.labels(self._model_name, outcome).inc()

    def count_hook(self, kind: str, outcome: str) -> None:
        """A hook of that kind had its say."""
        self._hooks.labels(self._model_name, kind, outcome).inc()

    def count_done(
        self, done: Ended, *, ttft_s: float | None, e2e_s: float, max_tokens: int, choices: int
    ) -> None:
        """The engine ended a request, aborted ones too. ttft_s: None if no token came.

        One that it refused has no prompt tokens, and is none of its requests.
        """
        self.e2e_s.write(e2e_s)
        if not done.prompt_tokens:
            return
        self.prompt_tokens.write(done.prompt_tokens)
        self.output_tokens.write(done.output_tokens)
        self.longest_tokens.write(done.longest_tokens)
        self.max_tokens.write(max_tokens)
        self.choices.write(choices)
        if ttft_s is not None:
            self.ttft_s.write(ttft_s)
            self.queue_s.write(done.queue_s)
            self.prefill_s.write(done.prefill_s)
            self.decode_s.write(done.decode_s)
            self.inference_s.write(done.prefill_s + done.decode_s)
            if done.longest_tokens > 1:
                self.token_s.write(done.decode_s / (done.longest_tokens - 1))

    def flush(self) -> None:
        """Write what was noted. The thread of the notes alone."""
        self._histograms.flush()

    def expose(self) -> bytes:
        """The text for /metrics. Any thread."""
        return self._exposition.text()

    def reading(self, name: str) -> Reading | None:
        """What a family says now, of all processes; see `Page.reading`. Any thread."""
        return self._exposition.reading(name)


def expose(registry: CollectorRegistry = REGISTRY) -> bytes:
    """Prometheus text of `registry`, or of every process when they share a folder."""
    return Exposition(registry).text()


def _gauge(name: str, text: str, registry: CollectorRegistry, labels: list[str]) -> Gauge:
    # One process writes each of these: of a dead one's values, the newest counts until the
    # supervisor forgets them.
    return Gauge(name, text, labels, registry=registry, multiprocess_mode="livemostrecent")
