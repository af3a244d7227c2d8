"""How much of the engine's own rate is left through HTTP, on a modelled card.

    python -m benchmarks.http_share [--streams 64 256] [--works wave,long] [--apis 1] [--rounds 5]

The fake backend's steps take what steps of Qwen2.5-14B's shape take on an H200
(benchmarks/devices/h200-14b.json, from results/gpu-h200-start-http-2026-11-28). The same prompts go
through `headrace.LLM` and through a server: wave = 64 random ids -> 75 tokens, long = 32 -> 300.
The share is that of the median rounds. Beside it: CPU microseconds a token of the engine's process
and of the HTTP processes, the time to the first token, and how much of the time the device worked.

The client is sockets and a selector, and takes about 10 microseconds an event: server and client
need three cores to themselves, or the figures are those of a shared machine (`cores`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import selectors
import socket
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any, cast

import psutil
from prometheus_client.parser import text_string_to_metric_families

from headrace.bench.report import conditions
from headrace.cli.child_server import ChildServer
from headrace.config import flag_of

HERE = Path(__file__).parent
DEVICE = HERE / "devices" / "h200-14b.json"
WORKS = {"wave": (64, 75), "long": (32, 300)}  # prompt tokens, output tokens
END = b"\r\n0\r\n\r\n"  # of a body in chunks
Prompts = list[list[int]]


def settings(streams: int, device: str) -> dict[str, Any]:
    """What both engines are told."""
    return {
        "fake_device": device,
        "max_num_seqs": max(256, streams),
        "max_num_batched_tokens": 8192,
        "prefix_caching": False,
    }


def prompts(streams: int, tokens: int, seed: int) -> Prompts:
    """Random ids that are bytes of text."""
    draw = random.Random(seed)
    return [[draw.randrange(32, 127) for _ in range(tokens)] for _ in range(streams)]


def offline(streams: int, work: tuple[int, int], rounds: int, device: str) -> list[float]:
    """Tokens a second of each round, in a process of its own."""
    asked = (streams, work, rounds, device)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_offline, asked)


def _offline(streams: int, work: tuple[int, int], rounds: int, device: str) -> list[float]:
    from headrace import LLM, SamplingParams

    params = SamplingParams(max_tokens=work[1], ignore_eos=True, temperature=0)
    rates = []
    with LLM(backend="fake", **settings(streams, device)) as llm:
        llm.generate(prompts(streams, work[0], -1), params, progress=False)
        for i in range(rounds):
            asked = prompts(streams, work[0], i)
            began_s = time.perf_counter()
            llm.generate(asked, params, progress=False)
            rates.append(streams * work[1] / (time.perf_counter() - began_s))
    return rates


class Wave:
    """Streams that begin at once, over connections that stay."""

    def __init__(self, port: int, streams: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]

    def run(self, asked: Prompts, tokens: int, model: str = "fake") -> tuple[float, list[float]]:
        """Seconds to the end of the last, and to the first event of each. model: "" = any."""
        requests = [_request(prompt, tokens, model) for prompt in asked]
        began_s = time.perf_counter()
        for sock, request in zip(self._sockets, requests, strict=True):
            sock.sendall(request)
            self._selector.register(sock, selectors.EVENT_READ, [b"", 0])
        first_s: list[float] = []
        events = 0
        while self._selector.get_map():
            for key, _ in self._selector.select():
                sock, state = cast(socket.socket, key.fileobj), key.data
                data = sock.recv(1 << 16)
                if not data:
                    raise RuntimeError("the server closed a connection")
                if not state[1]:
                    state[1] = 1
                    first_s.append(time.perf_counter() - began_s)
                    if not data.startswith(b"HTTP/1.1 200"):
                        raise RuntimeError(data[:300].decode(errors="replace"))
                events += data.count(b'"text":"')
                tail = (state[0] + data)[-len(END) :]
                state[0] = tail
                if tail == END:
                    self._selector.unregister(sock)
        took_s = time.perf_counter() - began_s
        self.events = events
        return took_s, first_s

    def close(self) -> None:
        """No more."""
        for sock in self._sockets:
            sock.close()


def _request(prompt: list[int], tokens: int, model: str) -> bytes:
    body = {
        **({"model": model} if model else {}),
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    raw = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(raw) + raw


def through_http(
    streams: int, work: tuple[int, int], rounds: int, apis: int, device: str
) -> dict[str, Any]:
    """The figures of one level."""
    asked = settings(streams, device) | {"backend": "fake", "api_workers": apis}
    flags = [part for key, value in asked.items() for part in _flag(key, value)]
    with ChildServer(flags, lambda line: None) as server:
        port = int(server.url.rpartition(":")[2])
        parts = processes(server.pid, port)
        wave = Wave(port, streams)
        wave.run(prompts(streams, work[0], -1), work[1])
        rates, firsts, events = [], [], 0
        before, busy_s, wall_s = _cpu_s(parts), _busy_s(server.url), 0.0
        for i in range(rounds):
            took_s, first_s = wave.run(prompts(streams, work[0], i), work[1])
            rates.append(streams * work[1] / took_s)
            firsts += first_s
            events += wave.events
            wall_s += took_s
        spent = {part: seconds - before[part] for part, seconds in _cpu_s(parts).items()}
        busy_s = _busy_s(server.url) - busy_s
        wave.close()
    tokens = rounds * streams * work[1]
    return {
        "tok_s": statistics.median(rates),
        "tok_s_rounds": [round(rate) for rate in rates],
        "us_per_token": {part: round(s / tokens * 1e6, 1) for part, s in spent.items()},
        "events_per_token": round((events - rounds * streams) / tokens, 3),
        "ttft_p50_ms": statistics.median(firsts) * 1e3,
        "ttft_max_ms": max(firsts) * 1e3,
        "device_busy": round(busy_s / wall_s, 3),
    }


def _flag(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag_of(key) if value else "--no-" + flag_of(key).removeprefix("--")]
    return [flag_of(key), str(value)]


def processes(pid: int, port: int) -> dict[str, list[psutil.Process]]:
    """Those of a server, by part, and this one."""
    parts: dict[str, list[psutil.Process]] = {"engine": [], "http": [], "client": []}
    for process in psutil.Process(pid).children(recursive=True):
        listens = any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == port
            for one in process.net_connections("tcp")
        )
        parts["http" if listens else "engine"].append(process)
    parts["client"].append(psutil.Process())
    return parts


def _busy_s(url: str) -> float:
    with urllib.request.urlopen(url + "/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "headrace_busy_seconds_total"
        )


def _cpu_s(parts: dict[str, list[psutil.Process]]) -> dict[str, float]:
    return {
        part: sum(sum(process.cpu_times()[:2]) for process in group)
        for part, group in parts.items()
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--works", default="wave,long")
    parser.add_argument("--apis", type=int, default=1, help="HTTP processes of the server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default=str(DEVICE), help="as --fake-device")
    parser.add_argument("--out", type=Path, default=None, help="JSON")
    args = parser.parse_args()
    rows = []
    for name in args.works.split(","):
        for streams in args.streams:
            alone = offline(streams, WORKS[name], args.rounds, args.device)
            row: dict[str, Any] = {"work": name, "streams": streams}
            row["offline_tok_s"] = statistics.median(alone)
            row |= through_http(streams, WORKS[name], args.rounds, args.apis, args.device)
            row["share"] = round(row["tok_s"] / row["offline_tok_s"], 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.out is not None:
        facts = conditions(http_processes=str(args.apis), device=Path(args.device).name)
        args.out.write_text(json.dumps({"conditions": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
