"""What every handler of one HTTP process shares: made once at start, read everywhere."""

from __future__ import annotations

import hashlib
import random
import time
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.requests import Request

from headrace import __version__
from headrace.api.dialect import find_dialect
from headrace.api.live import Live
from headrace.api.metering import Meter
from headrace.api.record import Record
from headrace.api.record_relay import RecordRelay
from headrace.api.record_view import whole
from headrace.api.recorder import Recorder
from headrace.api.response_store import ResponseStore
from headrace.api.resume import Streams
from headrace.asked import Sampler
from headrace.config import Settings
from headrace.draws import parse_defaults
from headrace.engine.client import EngineClient
from headrace.engine.token_stream import TokenStream
from headrace.errors import NotFound
from headrace.grammar.check import Checker
from headrace.hooks.load import load_hooks
from headrace.messages import Done
from headrace.observe.metrics import ApiMetrics
from headrace.observe.tracing import Tracer
from headrace.prices import parse_prices
from headrace.sources.card import ModelCard
from headrace.text.identity import prompt_identity
from headrace.text.stranger import Strangers
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import NoTokenizer, Tokenizer


class Service:
    """Model facts, the engine's client, metrics, and whether the server is draining."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        card: ModelCard,
        tokenizer: Tokenizer,
        client: EngineClient,
        metrics: ApiMetrics,
        worker: int = 0,
        folder: Path | None = None,
    ) -> None:
        """folder: of the server, shared by its processes; None: there is only this one."""
        self.settings = settings
        self.name = name
        self.card = card
        self.tokenizer = tokenizer
        self.template = ChatTemplate(card)
        self.strangers = Strangers(card.special_tokens)
        self.dialect = find_dialect(settings, card, self.template.facts, tokenizer)
        self.client = client
        self.metrics = metrics
        self.meter = Meter(
            name,
            parse_prices(settings.prices),
            metrics.usage,
            settings.usage_log,
            settings.usage_fsync_s,
        )
        self.draining = False
        self.created_s = int(time.time())
        facts = f"{__version__} {name} {settings.backend} {settings.dtype}"
        self.fingerprint = "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:10]
        self.eos_ids = list(card.eos_ids)
        self.sampler = Sampler(card, parse_defaults(settings.default_sampling), tokenizer)
        special = sorted(tokenizer.special_ids)
        self.checker = Checker(
            [tokenizer.id_to_bytes(i).decode("utf-8", "replace") for i in special]
        )
        self.responses = ResponseStore(
            folder,
            settings.response_store_count,
            settings.response_store_bytes,
            settings.response_store_ttl_s,
        )
        self.folder = folder
        self.streams = Streams(worker, settings.stream_resume_s, settings.stream_resume_bytes)
        self.hooks = load_hooks(settings.hook)
        self._record(metrics, worker)
        self.live = Live(client, metrics.reading)
        self.watchers = 0  # of `live`
        self._seeds = random.Random(f"{settings.seed}/{worker}" if settings.seed else None)

    def _record(self, metrics: ApiMetrics, worker: int) -> None:
        """What is noted of requests, for the live page and for traces."""
        settings, endpoint = self.settings, self.settings.otlp_endpoint
        self.tracer: Tracer | None = None
        if endpoint:
            self.tracer = Tracer("headrace", endpoint, settings.trace_ratio, metrics.registry)
        self.recorder = Recorder(
            self.name,
            settings.record_count,
            settings.record_bytes,
            offers_full=settings.ui,
            filtered=bool(self.hooks.filter),
            always=self.tracer is not None,
        )

        def show(record: Record) -> dict[str, Any]:
            return whole(record, self.tokenizer, self.client.info)

        self.records = RecordRelay(self.recorder, show, worker, self.folder)

    @cached_property
    def prompt_identity(self) -> str:
        """What makes tokens of prompts here; "" = nothing does. Made when it is first wanted: that
        may take some tenths of a second."""
        if isinstance(self.tokenizer, NoTokenizer):
            return ""
        return prompt_identity(self.tokenizer, self.card, self.dialect.native)

    def draw_seed(self) -> int:
        """A seed for a request that brings none; repeatable per process when settings.seed is."""
        return self._seeds.getrandbits(64)

    def check_model(self, model: str | None) -> None:
        """Raises NotFound for a model that is not served here."""
        if model is not None and model != self.name:
            raise NotFound(f"the model {model!r} is not served here", param="model")

    def on_done(self, stream: TokenStream, done: Done) -> None:
        """Per-request times, for ended and aborted requests alike."""
        first_s, arrived_s = stream.first_token_s, stream.arrived_s
        self.metrics.count_done(
            done,
            ttft_s=first_s - arrived_s if first_s else None,
            e2e_s=time.monotonic() - arrived_s,
            max_tokens=stream.limits.pop(done.handle, 0),
            choices=stream.n,
        )


def service_of(request: Request) -> Service:
    """The Service of the app that took the request."""
    service = request.app.state.service
    assert isinstance(service, Service), "app.state.service is set by create_app"
    return service


def named(request: Request, parameter: str = "id") -> str:
    """What the path names there. Paths are matched undecoded, see headrace.request_path."""
    return unquote(request.path_params[parameter])


def encode_json(value: Any) -> bytes:
    """One encoder for all responses."""
    return msgspec.json.encode(value)
