"""One HTTP process: uvicorn on a socket that the launcher bound, and the drain after SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn
import uvloop

from headrace.api.app import create_app
from headrace.api.connection import Connection, Connections, SocketConnection
from headrace.api.exchange import Exchanges
from headrace.api.seats import Seats
from headrace.api.service import Service
from headrace.config import Settings
from headrace.engine.client import EngineClient
from headrace.errors import ShuttingDown
from headrace.observe.metrics import ApiMetrics
from headrace.pages import give_back
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import load_text

log = logging.getLogger("headrace.api")

SEATS_FILE = "seats"  # in the folder of the engine's sockets
KEEP_ALIVE_S = 75  # an idle connection is closed after this
AFTER_DEADLINE_S = 5.0  # for the last error events to leave


class Server(uvicorn.Server):
    """uvicorn's, with its signals left to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: SIGTERM drains first."""
        yield


def serve(
    folder: Path, settings: Settings, files: ModelFiles, worker: int, sock: socket.socket
) -> None:
    """Serve on `sock` until SIGTERM, then drain. Call in the main thread.

    `folder` holds the engine's sockets; `worker` is 0..N-1. Raises ModelError for unreadable files.
    """
    name = settings.served_model_name or files.name
    metrics = ApiMetrics(name)
    client = EngineClient(folder, worker, engine_timeout_s=settings.engine_timeout_s)
    card, tokenizer = load_text(files, optional=settings.load_format == "dummy")
    service = Service(settings, name, card, tokenizer, client, metrics, worker, folder)
    client.on_done = service.on_done
    client.on_gap = metrics.inter_token_s.note
    if worker == 0:
        log.info("%s", service.dialect.why)
    connections = Connections(settings.receive_timeout_s, settings.stall_timeout_s)

    def on_sweep() -> None:
        metrics.flush()
        connections.check()

    exchanges = Exchanges(
        settings.stall_timeout_s,
        settings.keepalive_s,
        on_sweep,
        request_timeout_s=settings.request_timeout_s,
        first_token_timeout_s=settings.first_token_timeout_s,
    )
    seats = Seats(settings.max_streams, folder / SEATS_FILE, worker)
    config = uvicorn.Config(
        create_app(service, exchanges, seats),
        http=partial(Connection, connections),  # type: ignore[arg-type]  # called, never asked
        ws=SocketConnection,
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,  # small frames: it would cost more than it saves
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(AFTER_DEADLINE_S),
    )
    give_back()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(Server(config), service, exchanges, sock))
    finally:
        service.checker.close()
        service.strangers.close()
        service.meter.close()
        service.hooks.close()
        if service.tracer is not None:
            service.tracer.close()


async def _run(server: Server, service: Service, exchanges: Exchanges, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    draining = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, draining.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    drain = asyncio.create_task(_drain(draining, server, service, exchanges))
    try:
        await server.serve(sockets=[sock])
    finally:
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)


async def _drain(
    draining: asyncio.Event, server: Server, service: Service, exchanges: Exchanges
) -> None:
    """Admit nothing, let what runs end, then end what is left, then stop uvicorn."""
    await draining.wait()
    service.draining = True
    log.info("draining %d open requests", len(exchanges.open))
    await exchanges.empty(service.settings.shutdown_timeout_s)
    if exchanges.open:
        log.warning("ending %d requests at the shutdown deadline", len(exchanges.open))
        exchanges.end_all(ShuttingDown("the server is shutting down"))
        await exchanges.empty(AFTER_DEADLINE_S)
    server.should_exit = True
