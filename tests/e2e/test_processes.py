"""Signals: draining, a deadline, engines and HTTP processes that stop, die and come back."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import pytest

from tests.e2e.serving import PATIENCE_S, Server, events

TEXT = "/v1/completions"
LONG = {"prompt": "go on", "max_tokens": 3000, "ignore_eos": True}


class Open:
    """One streamed request that has begun; `rest` is what comes until its end."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        raw = json.dumps({**body, "stream": True})
        self._connection.request("POST", TEXT, raw, {"content-type": "application/json"})
        self.response = self._connection.getresponse()
        assert self.response.status == 200
        self.first = self.response.readline()
        assert self.first.startswith(b"data: ")

    def rest(self) -> list[Any]:
        try:
            return events(self.first + self.response.read())
        finally:
            self.leave()

    def leave(self) -> None:
        """Close the connection."""
        self.response.close()
        self._connection.close()


@contextmanager
def crowd(
    server: Server, streams: int, wholes: int, body: dict[str, Any]
) -> Iterator[tuple[list[Open], list[Future[tuple[int, dict[str, str], bytes]]]]]:
    """Running streams, and whole answers that wait in threads."""
    with ThreadPoolExecutor(streams + wholes) as pool:
        opened = list(pool.map(lambda _: Open(server, body), range(streams)))
        waiting = [pool.submit(server.request, "POST", TEXT, body) for _ in range(wholes)]
        total = streams + wholes  # of a new server; some may have ended by now
        started = partial(server.metric, "headrace_requests_started_total")
        server.wait(lambda: started() == total, "all have begun")
        yield opened, waiting


def code_of(raw: bytes) -> str:
    return str(json.loads(raw)["error"]["code"])


def test_sigterm_lets_streams_end_and_admits_nothing() -> None:
    """Combinations: SIGTERM during 20 streams."""
    body = {**LONG, "max_tokens": 400}
    with Server(fake_step_ms=10.0, shutdown_timeout_s=60.0) as server:
        with crowd(server, 20, 2, body) as (streams, wholes):
            held = Open(server, LONG)  # it would take half a minute: the process waits for it
            server.apis[0].send_signal(signal.SIGTERM)
            server.wait(lambda: server.get("/ready")[0] == 503, "not ready")
            assert server.get("/health")[0] == 200
            status, headers, raw = server.request("POST", TEXT, body)
            assert (status, code_of(raw)) == (503, "shutting_down")
            assert "retry-after" in headers
            held.leave()
            for stream in streams:
                assert stream.rest()[-1] == "[DONE]"
            for whole in wholes:
                status, _, raw = whole.result()
                assert status == 200
                assert json.loads(raw)["usage"]["completion_tokens"] == 400
        assert server.apis[0].wait(PATIENCE_S) == 0
        assert server.engine.poll() is None
        server.engine.send_signal(signal.SIGTERM)
        assert server.engine.wait(PATIENCE_S) == 0


def test_sigterm_deadline_ends_streams_with_an_error_event() -> None:
    with Server(fake_step_ms=10.0, shutdown_timeout_s=0.5) as server:
        with crowd(server, 3, 2, LONG) as (streams, wholes):
            server.apis[0].send_signal(signal.SIGTERM)
            for stream in streams:
                last = stream.rest()[-1]
                assert last["error"]["code"] == "shutting_down"
            for whole in wholes:
                status, _, raw = whole.result()
                assert (status, code_of(raw)) == (503, "shutting_down")
        assert server.apis[0].wait(PATIENCE_S) == 0


def test_sigterm_while_idle_is_quick_and_clean() -> None:
    with Server(workers=2, shutdown_timeout_s=600.0) as server:
        with socket.create_connection(("127.0.0.1", server.port)):
            for api in server.apis:
                api.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole group; not for us
                api.send_signal(signal.SIGTERM)
            assert [api.wait(PATIENCE_S) for api in server.apis] == [0, 0]
        server.engine.send_signal(signal.SIGINT)
        server.engine.send_signal(signal.SIGTERM)
        assert server.engine.wait(PATIENCE_S) == 0
        log = server.log_path.read_text()
        assert "Traceback" not in log
        assert "Exception" not in log


def test_a_killed_engine_fails_streams_and_a_new_one_serves() -> None:
    with Server(fake_step_ms=10.0, engine_timeout_s=1.5) as server:
        with crowd(server, 3, 2, LONG) as (streams, wholes):
            server.engine.kill()
            server.engine.wait()
            for stream in streams:
                assert stream.rest()[-1]["error"]["code"] == "engine_dead"
            for whole in wholes:
                status, _, raw = whole.result()
                assert (status, code_of(raw)) == (503, "engine_dead")
        assert server.get("/health")[0] == 503
        assert server.get("/ready")[0] == 503
        status, _, raw = server.request("POST", TEXT, LONG)
        assert (status, code_of(raw)) == (503, "engine_dead")
        server.engine = server.start_engine()
        server.wait(lambda: server.get("/ready")[0] == 200, "ready again")
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 3})[0] == 200
        server.wait_idle()


def test_an_engine_that_is_back_before_anyone_noticed_fails_the_old_streams() -> None:
    with Server(fake_step_ms=10.0, engine_timeout_s=60.0) as server:
        with crowd(server, 2, 0, LONG) as (streams, _):
            server.engine.kill()
            server.engine.wait()
            server.engine = server.start_engine()
            for stream in streams:
                assert stream.rest()[-1]["error"]["code"] == "engine_dead"
        server.wait(lambda: server.get("/ready")[0] == 200, "ready again")
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 3})[0] == 200


def test_a_stopped_engine_is_found_and_forgets_what_nobody_waits_for() -> None:
    with Server(fake_step_ms=10.0, engine_timeout_s=4.0) as server:
        with crowd(server, 2, 0, LONG) as (streams, _):
            server.engine.send_signal(signal.SIGSTOP)
            server.wait(lambda: server.get("/health")[0] == 503, "unhealthy")
            for stream in streams:
                assert stream.rest()[-1]["error"]["code"] == "engine_dead"
        server.engine.send_signal(signal.SIGCONT)
        server.wait(lambda: server.get("/ready")[0] == 200, "ready again")
        server.wait_idle()
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 3})[0] == 200


def test_long_steps_are_no_illness() -> None:
    """B082: a long prefill fails no probe."""
    with Server(fake_step_ms=4500.0, engine_timeout_s=3.5) as server:
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "x", "max_tokens": 1}
            answer = pool.submit(server.request, "POST", TEXT, body)
            seen = set()
            while not answer.done():
                seen.add((server.get("/health")[0], server.get("/ready")[0]))
                threading.Event().wait(0.1)
        assert answer.result()[0] == 200
        assert seen == {(200, 200)}


def test_a_killed_http_process_frees_its_requests_and_comes_back() -> None:
    with Server(fake_step_ms=5.0, api_timeout_s=5.0) as server:
        with crowd(server, 3, 0, LONG) as (streams, _):
            server.apis[0].kill()
            server.apis[0].wait()
            for stream in streams:
                with pytest.raises((http.client.HTTPException, OSError)):
                    stream.rest()
        server.apis[0] = server.start_api(0)
        server.wait(lambda: server.get("/ready")[0] == 200, "ready again")
        server.wait_idle()
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 3})[0] == 200


def test_a_stopped_http_process_loses_its_requests_and_nobody_elses() -> None:
    with Server(workers=2, fake_step_ms=5.0, api_timeout_s=3.0) as server:
        first, second = server.apis
        second.send_signal(signal.SIGSTOP)
        stream = Open(
            server, {**LONG, "max_tokens": 2000}
        )  # on the first one: the other is stopped
        second.send_signal(signal.SIGCONT)
        first.send_signal(signal.SIGSTOP)
        quick = Open(server, {**LONG, "max_tokens": 200})
        assert quick.rest()[-1] == "[DONE]"
        server.wait(lambda: server.metric("headrace_requests_running") == 0, "the drop")
        first.send_signal(signal.SIGCONT)
        assert stream.rest()[-1]["error"]["code"] == "request_failed"
        server.wait_idle()


def test_an_idle_server_uses_no_processor_time() -> None:
    with Server() as server:
        server.wait_idle()
        engine = psutil.Process(server.engine.pid)
        before = sum(engine.cpu_times()[:2])
        threading.Event().wait(2.0)
        assert sum(engine.cpu_times()[:2]) - before <= 0.1  # a busy loop would use 2 s
