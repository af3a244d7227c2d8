"""Replicas behind the gateway, with KV events: predictions come true."""

from __future__ import annotations

import json
import random
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serve_process import ServeProcess
from tests.e2e.serving import PATIENCE_S, kept_ports
from tests.e2e.test_gateway import GatewayProcess
from tests.unit.kv_subscriber import PlainSubscriber
from tests.unit.test_inspect import GEMMA3

MODEL = "smollm2-135m-instruct"
SYSTEM = "You answer questions about mills. " * 5


def replica(folder: Path, port: int) -> ServeProcess:
    """A server with few blocks: old prefixes are evicted."""
    return ServeProcess(
        *("--backend", "cpu", "--threads", "1", "--max-model-len", "256", "--kv-blocks", "18"),
        *("--kv-events-endpoint", f"ipc://{folder / 'events'}"),
        *("--kv-events-replay-endpoint", f"ipc://{folder / 'events'}.replay"),
        port=port,
    )


class Fleet:
    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none")

    def ask(self, text: str) -> dict[str, Any]:
        """One chat; what the gateway says of its decision."""
        answer = self.client.chat.completions.with_raw_response.create(
            model=MODEL,
            max_tokens=4,
            temperature=0,
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
        )
        return self.decision(answer.headers["x-request-id"])

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One completion; what the gateway says of its decision."""
        url = f"http://127.0.0.1:{self.gateway.port}/v1/completions"
        head = {"content-type": "application/json"}
        asked = urllib.request.Request(url, json.dumps(body).encode(), head)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            answer.read()
            return self.decision(answer.headers["x-request-id"])

    def decision(self, request_id: str) -> dict[str, Any]:
        _, body = self.gateway.ask("GET", f"/gateway/decisions/{request_id}")
        told: dict[str, Any] = json.loads(body)
        return told

    def settled(self) -> None:
        """Until the gateway has applied every event of those whom it listens to, and expects none:
        what an answer leaves behind is published, or waits to be, before that answer ends."""
        deadline_s = time.monotonic() + PATIENCE_S
        up = [row["name"] for row in self.gateway.workers().values() if row["state"] == "up"]
        published = {url: batches_of(url) for url in up}
        while True:
            rows = self.gateway.workers()
            said = {url: rows[url]["kv_events"] or {} for url in published}
            now = {url: one.get("next_batch") for url, one in said.items()}
            if now == published and all(
                (one["state"], one["expected_blocks"]) == ("exact", 0) for one in said.values()
            ):
                return
            assert time.monotonic() < deadline_s, (published, rows)
            time.sleep(0.05)


def batches_of(url: str) -> int:
    """How many batches of events a worker has published; it says so when all of them left."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S) as answer:
        told = json.load(answer)["data"][0]["kv_events"]
    with PlainSubscriber(told["endpoint"], told["replay_endpoint"]) as asked:
        kept = asked.replay(0)
    return kept[-1][0] + 1 if kept else 0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hr") as made:
        yield Path(made)


def test_engine_confirmed_hits_are_those_that_were_predicted(
    default_server: ServeProcess, folder: Path
) -> None:
    """One worker has served others before, one has little memory and is restarted."""
    before = _taken(default_server)
    with kept_ports() as port, replica(folder, port) as small:
        workers = ("--worker", default_server.url, "--worker", small.url)
        options = ("--policy", "round_robin", "--tokenizer", f"{MODEL}=")
        with GatewayProcess(*workers, *options) as gateway:
            gateway.wait_up(2)
            fleet = Fleet(gateway)
            outcomes = []
            for n in range(10):
                fleet.settled()
                outcomes.append(fleet.ask(f"{n % 4}: what turns the wheel? " * (1 + n % 4)))
            compared = [told["cached_tokens"] for told in outcomes]
            assert [c["predicted"] for c in compared] == [c["confirmed"] for c in compared]
            assert not any(c["silent_miss"] for c in compared)
            assert [c["index"] for c in compared[2:]] == ["exact"] * 8
            assert sum(c["confirmed"] > 0 for c in compared) >= 6
            for told in outcomes:
                said = told["worker_said"]["prompt_tokens"]
                assert told["prompt_tokens_estimated"] == said, "the tokens are the worker's"
            assert _taken(default_server) - before + _taken(small) == 10, "no worker tokenised"
            assert gateway.workers()[small.url]["kv_events"]["blocks"] > 0
            assert small.stop() == 0
            gateway.wait_up(1)
            with replica(folder, port) as again:
                gateway.wait_up(2)
                fleet.settled()
                row = gateway.workers()[again.url]["kv_events"]
                assert row["blocks"] == 0, "what it had is forgotten"
                for n in (1, 1, 1, 1):
                    fleet.settled()
                    told = fleet.ask(f"After the restart, {n}")["cached_tokens"]
                    assert told["predicted"] == told["confirmed"]
                assert told["confirmed"] > 0
                fleet.client.close()


def test_hits_of_layers_with_windows_too(tmp_path: Path, folder: Path) -> None:
    """A random model of Gemma 3's kind: two layers of six keep all, four a window of 40 tokens."""
    config = GEMMA3 | {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
        "head_dim": 16, "num_attention_heads": 2, "sliding_window": 40,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    endpoint = f"ipc://{folder / 'windows'}"
    options = ("--backend", "cpu", "--load-format", "dummy", "--threads", "1", "--kv-blocks", "48")
    places = ("--kv-events-endpoint", endpoint, "--kv-events-replay-endpoint", endpoint + ".replay")
    with ServeProcess(str(tmp_path), *options, *places, "--max-model-len", "256") as server:
        card = json.loads(server.get("/v1/models")[1])["data"][0]
        assert (card["kv_tokens"], card["kv_events"]["windows"]) == (48 // 3 * 16, [0, 40])
        metrics = server.get("/metrics")[1]
        assert f'headrace_kv_tokens{{model_name="{card["id"]}"}} 256.0' in metrics
        assert 'num_gpu_blocks="16"' in metrics
        said = "48 blocks of 16 tokens in 2 layers, 3 groups of them, 256 tokens in all"
        assert said in server.said
        with GatewayProcess("--worker", server.url, "--policy", "round_robin") as gateway:
            gateway.wait_up(1)
            fleet = Fleet(gateway)
            chance = random.Random(3)
            old = [[chance.randrange(256) for _ in range(n)] for n in (90, 110)]
            compared = []
            for n in range(24):
                fleet.settled()
                prompt = chance.choice(old)
                prompt = [*prompt[: chance.randrange(80, len(prompt))], *range(n, n + 20)]
                told = fleet.complete({"model": card["id"], "prompt": prompt, "max_tokens": 3})
                compared.append(told["cached_tokens"])
            fleet.client.close()
    assert [c["predicted"] for c in compared] == [c["confirmed"] for c in compared]
    assert [c["index"] for c in compared[1:]] == ["exact"] * 23
    assert sum(c["confirmed"] > 0 for c in compared) >= 6


def _taken(server: ServeProcess) -> float:
    name = f'headrace_given_prompts_total{{model_name="{MODEL}",outcome="taken"}}'
    lines = server.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
