"""A whole server under its supervisor: its page through aborts and an engine's death, and the real
Prometheus that scrapes it: every query of the dashboard says something."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from headrace.observe.metrics import expose
from headrace.observe.nvml import Device
from headrace.observe.telemetry import DeviceMetrics, TokenEnergy
from tests.e2e.serve_process import ServeProcess
from tests.e2e.serving import PATIENCE_S
from tests.unit.scripted_nvml import UUID, ScriptedNvml
from tests.unit.test_metrics_docs import documented
from tests.unit.test_telemetry import WHOLE

DEPLOY = Path(__file__).parents[2] / "deploy" / "observability"
BOARD = DEPLOY / "grafana" / "dashboards" / "headrace.json"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
WITH_PROMETHEUS = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="prometheus and promtool are not installed"
)
LONG = {"prompt": "go on", "max_tokens": 3000, "ignore_eos": True, "stream": True}
REASONS = ("stop", "length", "abort", "error", "refused", "lost")


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    options = ("--backend", "fake", "--fake-step-ms", "5", "--api-workers", "2", "--restart")
    with ServeProcess(*options, "--telemetry-s", "0.1", "--engine-timeout-s", "3") as running:
        yield running


Found = dict[tuple[str, str], float]


def page(server: ServeProcess) -> Found:
    """(name, values of the labels that tell series apart) -> value."""
    found: Found = {}
    text = server.get("/metrics")[1]
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            which = [labels.get(x, "") for x in ("reason", "finished_reason", "process", "le")]
            key = (sample.name, "".join(which))
            found[key] = found.get(key, 0.0) + sample.value
    return found


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S} s for: {what}"
        time.sleep(0.05)
    return value


@contextmanager
def streams(server: ServeProcess, count: int) -> Iterator[list[http.client.HTTPResponse]]:
    """Streams that have begun, all of them running."""
    address = urllib.parse.urlsplit(server.url)
    assert address.hostname is not None
    connections = [
        http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_S)
        for _ in range(count)
    ]
    try:
        for connection in connections:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(LONG), headers)
        responses = [connection.getresponse() for connection in connections]
        assert all(response.readline().startswith(b"data: ") for response in responses)
        yield responses
    finally:
        for connection in connections:
            connection.close()


def idle(server: ServeProcess) -> Found | None:
    """The page, if nothing runs or waits."""
    now = page(server)
    names = ("headrace_requests_running", "headrace_requests_waiting", "headrace_kv_blocks_used")
    return now if all(now.get((name, "")) == 0 for name in names) else None


def balanced(now: Found) -> bool:
    """What was taken has ended, or is there."""
    ended = sum(now["headrace_requests_finished_total", reason] for reason in REASONS)
    held = now["headrace_requests_running", ""] + now["headrace_requests_waiting", ""]
    return now["headrace_requests_started_total", ""] == ended + held


def check_accounts(now: Found) -> None:
    """B086: of an idle engine; and no second name says otherwise."""
    assert balanced(now), now
    for reason in ("stop", "length", "abort", "error"):
        ours = now["headrace_requests_finished_total", reason]
        assert now["vllm:request_success_total", reason] == ours
    assert now["vllm:num_requests_running", ""] == now["headrace_requests_running", ""]


def grown(before: Found, after: Found, name: str, which: str = "") -> float:
    return after[name, which] - before[name, which]


def test_aborted_requests_are_counted_everywhere(server: ServeProcess) -> None:
    """B086, B076: their prompt tokens, their end, their histograms."""
    before = until(lambda: idle(server), "idle")
    with streams(server, 5):
        until(lambda: page(server)["headrace_requests_running", ""] == 5, "all running")
        until(lambda: balanced(page(server)), "accounts that add up")

    names = ("request_prompt_tokens", "request_generation_tokens", "request_params_n",
             "request_params_max_tokens", "e2e_request_latency_seconds",
             "time_to_first_token_seconds", "request_queue_time_seconds",
             "request_inference_time_seconds")  # fmt: skip

    def counted() -> Found | None:
        now = idle(server)
        done = now and all(grown(before, now, f"vllm:{name}_count") == 5 for name in names)
        return now if done else None

    after = until(counted, "the aborts, and the notes of both HTTP processes, each once")
    check_accounts(after)
    assert grown(before, after, "vllm:request_success_total", "abort") == 5
    assert grown(before, after, "vllm:prompt_tokens_total") > 0
    prompts = grown(before, after, "vllm:request_prompt_tokens_sum")
    assert prompts == grown(before, after, "vllm:prompt_tokens_total")
    fallen = {
        key for key, value in before.items()
        if key[0].endswith(("_total", "_count", "_bucket")) and after[key] < value
    }  # fmt: skip
    assert not fallen, "B085: counters only rise"


def resident(server: ServeProcess, process: str) -> bool:
    """Its memory is shown, and is that of a Python."""
    return page(server).get(("headrace_process_resident_bytes", process), 0) > 2**20


def test_every_name_of_a_live_page_is_documented(server: ServeProcess) -> None:
    text = server.get("/metrics")[1]
    assert set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)) <= documented().keys()
    for name in ("engine", "api-0", "api-1", "supervisor"):
        until(partial(resident, server, name), f"the memory of {name}")


def test_an_engine_that_dies_and_comes_back(server: ServeProcess) -> None:
    """No gauge shows what was: it is gone with its engine, and right in the next one."""
    before = until(lambda: idle(server), "idle")
    with streams(server, 8) as opened:
        until(lambda: page(server)["headrace_requests_running", ""] == 8, "all running")
        os.kill(server.children["headrace-engine"], signal.SIGKILL)
        until(lambda: page(server).get(("headrace_requests_running", "")) != 8, "forgotten")
        for response in opened:
            assert b"engine_dead" in response.read()
    after = until(lambda: idle(server), "the new engine, idle")
    check_accounts(after)
    assert grown(before, after, "headrace_requests_finished_total", "lost") == 8
    assert grown(before, after, "headrace_requests_started_total") == 8
    until(lambda: server.get("/ready")[0] == 200, "ready again")
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    assert server.post("/v1/completions", body)[0] == 200
    now = until(lambda: idle(server), "idle again")
    assert grown(after, now, "headrace_requests_finished_total", "length") == 1
    assert grown(after, now, "headrace_requests_finished_total", "lost") == 0


# ---------------------------------------------------------------- Prometheus


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    run = subprocess.run(
        [PROMTOOL, *arguments], cwd=DEPLOY, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@WITH_PROMETHEUS
def test_promtool_takes_config_and_rules_and_the_rules_do_what_they_say() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "alerts_test.yml")
    alerts = set(re.findall(r"- alert: (\w+)", (DEPLOY / "alerts.yml").read_text()))
    tests = (DEPLOY / "alerts_test.yml").read_text()
    fires = set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n", tests))
    quiet = set(re.findall(r"alertname: (\w+)\}", tests))
    assert alerts == fires, "each fires in a test"
    assert alerts <= quiet, "each is quiet in a test"


def queries() -> dict[str, str]:
    """Title and legend of each curve -> its query."""
    board = json.loads(BOARD.read_text())
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", [])
    }


def test_rules_and_dashboard_name_metrics_that_exist() -> None:
    known = set(documented())
    known |= {name + part for name in documented() for part in ("_bucket", "_sum", "_count")}
    for text in (*queries().values(), (DEPLOY / "alerts.yml").read_text()):
        assert set(re.findall(r"\b(?:headrace|vllm|DCGM)[\w:]*(?=[{\[])", text)) <= known
    panels = [panel for panel in json.loads(BOARD.read_text())["panels"] if "targets" in panel]
    assert len({panel["id"] for panel in panels}) == len(panels)
    first = sorted((p["gridPos"]["y"], p["gridPos"]["x"], p["title"]) for p in panels)[:4]
    assert [title for *_, title in first] == [
        "Throughput",
        "Time to first token",
        "Token to token, and end to end, against load",
        "Running and waiting",
    ]


class Prometheus:
    """The real one, with the shipped config, for other targets and in a hurry."""

    def __init__(self, folder: Path, *targets: str) -> None:
        for name in ("alerts.yml", "prometheus.yml"):
            text = (DEPLOY / name).read_text().replace(" 5s", " 500ms")
            (folder / name).write_text(
                text.replace('"host.docker.internal:8000"', ", ".join(map(json.dumps, targets)))
            )
        assert PROMETHEUS is not None
        log = folder / "log"
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}",
             f"--storage.tsdb.path={folder / 'data'}",
             "--web.listen-address=127.0.0.1:0"],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        listens = re.compile(r'msg="Listening on" address=127\.0\.0\.1:(\d+)')
        self.port = int(until(lambda: listens.search(log.read_text()), "its port")[1])

    def get(self, path: str, **query: str) -> Any:
        """`data` of an answer of its API; None while it starts."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        except OSError:
            return None

    def says(self, query: str) -> bool:
        """The query has a value that is a number."""
        found = self.get("query", query=query)
        return found is not None and any(
            not math.isnan(float(series["value"][1])) for series in found["result"]
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._log.close()


@contextmanager
def card() -> Iterator[str]:
    """host:port of a page with a scripted card under load."""
    registry, nvml = CollectorRegistry(), ScriptedNvml(**WHOLE)
    device, metrics = Device(nvml, UUID), DeviceMetrics(registry)
    energy, made = TokenEnergy(registry), Counter("headrace_made", "tokens", registry=registry)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nvml.says["energy"] += 100_000
            made.inc(50)
            tokens = float(made._value.get())
            energy.write("device", metrics.write(device, device.read()), tokens, tokens / 50)
            text = expose(registry)
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()


@contextmanager
def load(server: ServeProcess) -> Iterator[None]:
    """Chats, again and again, until the end."""
    stopped = threading.Event()
    body = {
        "messages": [{"role": "user", "content": "again and again"}],
        "max_tokens": 20,
        "ignore_eos": True,
    }

    def ask() -> None:
        while not stopped.is_set():
            for streamed in (True, False):
                request = urllib.request.Request(
                    server.url + "/v1/chat/completions",
                    json.dumps(body | {"stream": streamed}).encode(),
                    {"content-type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    answer.read()
            stopped.wait(0.05)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def variables() -> dict[str, tuple[str, str]]:
    """Name of a variable -> the metric and the label that its values come from."""
    found = {}
    for one in json.loads(BOARD.read_text())["templating"]["list"]:
        if one["type"] == "query":
            match = re.fullmatch(r"label_values\((\w+), (\w+)\)", one["query"]["query"])
            assert match, one
            found[one["name"]] = match[1], match[2]
    return found


def among(values: list[str]) -> str:
    """As Grafana writes several chosen values into a PromQL string."""
    return "(" + "|".join(re.escape(value).replace("\\", r"\\") for value in values) + ")"


@WITH_PROMETHEUS
def test_every_query_of_the_dashboard_says_something(server: ServeProcess, tmp_path: Path) -> None:
    address = server.url.removeprefix("http://")
    with card() as gpu, load(server):
        prometheus = Prometheus(tmp_path, address, gpu)
        try:
            until(lambda: prometheus.says('sum(up{job="headrace"}) == 2'), "both are scraped")
            chosen = {}
            for name, (metric, label) in variables().items():
                given = partial(prometheus.get, f"label/{label}/values", **{"match[]": metric})
                chosen[name] = until(given, f"values of ${name}")
            assert chosen["instance"] == [address]
            for title, query in queries().items():
                asked = query.replace("$__rate_interval", "5s")
                asked = asked.replace("$model", among(chosen["model"]))
                asked = asked.replace("$instance", among([address, gpu]))
                until(partial(prometheus.says, asked), f"{title}: {asked}")
            groups = prometheus.get("rules")["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            assert len(rules) == len(re.findall("- alert:", (DEPLOY / "alerts.yml").read_text()))
            until(
                lambda: all(
                    rule["health"] == "ok"
                    for group in prometheus.get("rules")["groups"]
                    for rule in group["rules"]
                ),
                "the rules were evaluated",
            )
        finally:
            prometheus.stop()
