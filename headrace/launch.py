"""The composition root: the one file that may know every other. Builds an engine; runs a server.

`headrace serve` is one supervisor (this process: no torch, no HTTP), one engine process and
`api_workers` HTTP processes, in a runtime folder that only this user may enter (mode 0700).
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace import bytecode
from headrace.backends.choose import (
    resolve_api_workers,
    resolve_backend,
    resolve_itl_target_s,
    resolve_max_num_batched_tokens,
    resolve_max_num_seqs,
    resolve_overlap,
    settled,
)
from headrace.backends.cpu.device import cores
from headrace.config import Resolved, Settings
from headrace.errors import ConfigError, SetupError
from headrace.messages import EngineInfo
from headrace.observe.logs import configure_logging, print_line
from headrace.observe.tracing import check_installed
from headrace.pages import give_back
from headrace.sources.cache import cache_home
from headrace.sources.files import ModelFiles

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from headrace.engine.protocol import Capacity, Grammars, Runner, ServingEngine
    from headrace.kv.cache import KVCache
    from headrace.runner.build import LoadInfo
    from headrace.sim.device import Device

Report = Callable[[str, float], None]  # (phase, seconds it took)
Progress = Callable[[int, int], None]  # (bytes of weights that are loaded, bytes in all)
PROGRESS_S = 0.1  # between two words of the engine process about weights that load
FAKE_MODEL_LEN, FAKE_KV_BLOCKS = 8192, 4096


def find_model(settings: Settings, say: Callable[[str], None]) -> ModelFiles:
    """Resolve (and, where needed, download) the model that `settings` name. Raises SetupError."""
    from headrace.sources.resolve import FAKE, resolve

    settled(settings)  # refuses what cannot run before anything is downloaded
    fake = settings.backend == "fake" and not settings.model
    weights = settings.load_format != "dummy"
    files = FAKE
    if not fake:
        pickles = settings.allow_pickle
        files = resolve(settings.model, say=say, weights=weights, pickles=pickles)
    if not files.has_text:
        say(f"{files.path} has no tokenizer.json: prompts are token ids, answers carry no text")
    if not settings.served_model_name:
        return files
    return ModelFiles(settings.served_model_name, files.kind, files.path)


def build_engine(
    settings: Settings,
    files: ModelFiles,
    report: Report,
    progress: Progress | None = None,
    *,
    prompts_first: bool = False,
) -> tuple[ServingEngine, EngineInfo]:
    """Load the model and put an engine around it; `progress` hears of every piece of its weights.

    prompts_first: whole answers are waited for, not tokens. Raises SetupError.
    """
    settings = settled(settings)
    if settings.engine == "naive":
        from headrace.bench.naive import build_naive

        return build_naive(settings, files, report)
    from headrace.engine.loop import Engine
    from headrace.kv.events import groups_of

    fake = settings.backend == "fake"
    loaded = None if fake else _load_runner(settings, files, report, progress)
    runner = _fake_runner(settings) if loaded is None else loaded[0]
    facts = runner.capacity
    target_s = resolve_itl_target_s(settings, facts.cost)
    if target_s.value:
        report(f"{'ITL target':13} {target_s.value * 1000:.0f} ms: {target_s.reason}", 0.0)
    publisher = None
    if settings.kv_events_endpoint:
        from headrace.engine.kv_events import KVEventPublisher

        publisher = KVEventPublisher(settings, facts.block_size, facts.windows)
        publisher.start()
    log_events = publisher is not None
    kv = make_cache(facts, prefix_caching=settings.prefix_caching, log_events=log_events)
    engine = Engine(
        settings,
        kv,
        runner,
        overlap=resolve_overlap(settings, settings.backend).value,
        itl_target_s=target_s.value,
        prompts_first=prompts_first,
        grammars=build_grammars(settings, files, facts.vocab_size),
        publisher=publisher,
    )
    return engine, EngineInfo(
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_rows,
        vocab_size=facts.vocab_size,
        block_size=facts.block_size,
        kv_blocks=facts.kv_blocks[0],
        kernels=facts.kernels,
        width=facts.width,
        labels=facts.labels,
        generates=facts.generates,
        device_uuid=facts.device_uuid,
        records=True,
        draws_note=facts.draws_note,
        positions=loaded[1].spec.known_positions if loaded else None,
        ledger=loaded[1].sizes if loaded else [],
        kv_tokens=kv.kept_tokens,
        kv_windows=groups_of(facts.windows),
    )


def make_cache(facts: Capacity, *, prefix_caching: bool, log_events: bool = False) -> KVCache:
    """The KV cache of a runner: one whose blocks leave the window, where layers have one."""
    from headrace.kv.cache import KVCache
    from headrace.kv.groups import GroupedCache

    (blocks,), size, windows = facts.kv_blocks, facts.block_size, facts.windows
    if windows == (0,):
        return KVCache(blocks, size, prefix_caching, log_events=log_events)
    return GroupedCache(blocks, size, prefix_caching, windows=windows, log_events=log_events)


def build_grammars(settings: Settings, files: ModelFiles, vocab_size: int) -> Grammars:
    """What compiles grammars for an engine; it reads the tokenizer when the first one comes."""
    from headrace.grammar.compile import Compiler
    from headrace.grammar.vocabulary import Vocabulary
    from headrace.sources.card import read_card
    from headrace.text.tokenizer import load_tokenizer

    card = read_card(files)

    def load() -> Vocabulary:
        tokenizer = load_tokenizer(files, card, optional=settings.load_format == "dummy")
        return Vocabulary(
            tokenizer.table or [],
            tokenizer.special_ids,
            list(card.eos_ids),
            vocab_size,
            lambda text: tokenizer.encode(text, add_special=False, parse_special=False),
        )

    return Compiler(load, [i for i in card.eos_ids if i < vocab_size])


def _fake_runner(settings: Settings) -> Runner:
    from headrace.backends.fake import FakeRunner

    blocks, longest = _fake_sizes(settings)
    device = _fake_device(settings)
    return FakeRunner(
        kv_blocks=blocks,
        block_size=settings.block_size,
        max_rows=settings.max_num_seqs,
        max_model_len=longest,
        step_ms=settings.fake_step_ms,
        cost=device.cost if device is not None else None,
    )


def _fake_device(settings: Settings) -> Device | None:
    """What the fake backend is as fast as. Raises ConfigError for a file that is none."""
    if not settings.fake_device:
        return None
    from headrace.sim.device import DEVICES, read_device

    return DEVICES.get(settings.fake_device) or read_device(Path(settings.fake_device))


def _fake_sizes(settings: Settings) -> tuple[int, int]:
    """Blocks of the KV cache, and tokens of the longest sequence."""
    device = _fake_device(settings)
    room = device.kv_tokens // settings.block_size if device is not None else FAKE_KV_BLOCKS
    blocks = settings.kv_blocks or room
    room = blocks * settings.block_size
    return blocks, min(settings.max_model_len or FAKE_MODEL_LEN, room)


def _load_runner(
    settings: Settings, files: ModelFiles, report: Report, progress: Progress | None
) -> tuple[Runner, LoadInfo]:
    """The runner, and what is known of its load."""
    if files.kind == "fake":
        raise ConfigError("the fake model needs backend = fake", param="backend")
    begun, on_card = time.perf_counter(), settings.backend == "cuda"
    with _unhindered() if on_card else nullcontext():
        with _garbage_kept():
            if on_card:
                _import_for_card()
            from headrace.runner.build import load_runner

        report("import the runner", time.perf_counter() - begun)
        runner, info = load_runner(settings, files, report, progress)
    for line in info.ledger:
        report(line, 0.0)
    return runner, info


def _import_for_card() -> None:
    """torch and all that computes on a GPU: seconds of Python, beside which the driver makes its
    context and Triton's key is found, neither of which needs Python."""
    from headrace.backends.cuda.context import make_ahead

    make_ahead()
    from headrace.kernels import key

    key.find()
    importlib.import_module("headrace.runner.load_cuda")


@contextmanager
def _unhindered() -> Iterator[None]:
    """For a load that has much of Python's work in it, such as the import of torch."""
    with _garbage_kept(), bytecode.kept("torch", cache_home() / "bytecode"):
        yield


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """For imports and a load: what they make stays, and searching it took a sixth of torch's
    import. It leaves the block as old, so that the next search passes it too."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # else somebody's objects would thaw
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def explain(settings: Settings) -> Mapping[str, Resolved[Any]]:
    """What each `auto` comes to here and why, as far as it can be told without loading weights."""
    backend = resolve_backend(settings)
    outcomes: dict[str, Resolved[Any]] = {
        "backend": backend,
        "max_num_seqs": resolve_max_num_seqs(settings, backend.value),
        "max_num_batched_tokens": resolve_max_num_batched_tokens(settings, backend.value),
        "itl_target_ms": _explain_itl_target(settings, backend.value),
        "overlap": resolve_overlap(settings, backend.value),
        "api_workers": resolve_api_workers(settings),
    }
    if backend.value == "cpu":
        outcomes["threads"] = Resolved(settings.threads or cores(), "cores this process may use")
    outcomes.update(_explain_model(settled(settings), backend.value))
    return {
        key: outcome
        for key, outcome in outcomes.items()
        if getattr(settings, key) in ("auto", "", 0)
    }


def _explain_itl_target(settings: Settings, backend: str) -> Resolved[Any]:
    if backend == "cuda" or settings.fake_device:
        return Resolved("at start", "from the model's step time on this card")
    return Resolved(0, f"the {backend} backend has no model of its step time")


def _explain_model(settings: Settings, backend: str) -> Mapping[str, Resolved[Any]]:
    keys = ("dtype", "kv_blocks", "max_model_len")
    if backend == "fake":
        blocks, longest = _fake_sizes(settings)
        return {
            "dtype": Resolved("none", "the fake model has no weights"),
            "kv_blocks": Resolved(blocks, "the fake backend's own size"),
            "max_model_len": Resolved(longest, "the fake model's, and the KV cache holds it"),
        }
    from headrace.sources.resolve import local

    try:
        weights = settings.load_format != "dummy"
        files = local(settings.model, weights=weights, pickles=settings.allow_pickle)
        if files is None:
            return dict.fromkeys(keys, Resolved("at start", "the model is not on this machine yet"))
        from headrace.runner import build

        known: dict[str, Resolved[Any]] = {
            "served_model_name": Resolved(files.name, "the model's own name")
        }
        if settings.engine == "naive":
            facts = build.read_facts(settings, files)
            return known | {
                "dtype": facts.dtype,
                "kv_blocks": Resolved("none", "the naive engine has no KV pool"),
                "max_model_len": facts.wanted_model_len,
            }
        return known | build.explain(settings, files)
    except SetupError as error:
        return dict.fromkeys(keys, Resolved("error", error.message))


def run_server(settings: Settings) -> int:
    """`headrace serve`: run until SIGTERM or SIGINT; the process's exit code."""
    from headrace.supervisor import Supervisor

    def say(text: str) -> None:
        try:
            print_line(text)
        except OSError:  # whoever read it is gone: go on in silence, also at the exit's flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    begun = time.perf_counter()
    if settings.otlp_endpoint:
        check_installed()
    files = find_model(settings, say)
    settings = msgspec.structs.replace(settings, served_model_name=files.name)
    return Supervisor(settings, files, say, begun).run()


def engine_process(
    folder: Path, settings: Settings, files: ModelFiles, tell: Connection[object, object]
) -> None:
    """Entry point of the engine process. `tell` is a pipe to the supervisor."""
    configure_logging(settings.log_level)
    from headrace.engine.server import serve

    def build(phase: Callable[[str], None]) -> tuple[ServingEngine, EngineInfo]:
        def report(name: str, seconds: float) -> None:
            phase(name)
            tell.send(("phase", name, seconds))

        told_s = 0.0

        def progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal told_s
            now_s = time.perf_counter()
            if now_s - told_s > PROGRESS_S:
                told_s = now_s
                tell.send(("weights", (done_bytes, total_bytes), 0.0))

        phase("loading")
        engine, info = build_engine(settings, files, report, progress)
        # Elsewhere 45 MB of RAM weigh more than 0.5 s.
        if resolve_backend(settings).value == "cuda":
            engine.warm()
        give_back()
        tell.send(("ready", info, 0.0))
        return engine, info

    try:
        serve(folder, settings, build)
    except SetupError as error:
        tell.send(("failed", error.message, 0.0))
        raise SystemExit(2) from None


def api_process(
    folder: Path, settings: Settings, files: ModelFiles, worker: int, sock: socket.socket
) -> None:
    """Entry point of one HTTP process."""
    configure_logging(settings.log_level)
    from headrace.api.server import serve

    try:
        serve(folder, settings, files, worker, sock)
    except SetupError as error:  # a tokenizer or template that cannot be read
        print_line(f"headrace: {error.message}")
        raise SystemExit(2) from None
