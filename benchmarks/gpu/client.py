"""What a server's users feel: any OpenAI-compatible server, the same prompts and definitions.

    python -m benchmarks.gpu.client http://127.0.0.1:8000 [--model NAME] [--shape qwen2.5-14b]

    level  c streams of 64 random ids -> 75 tokens; three rounds, the one with the most tokens/s
    quiet  32 streams of 64 -> 400
    storm  32 streams of 64 -> 1200 while a prompt of 8000 arrives each second, twelve of them
    reuse  a prefix of 8000 tokens, cold, then five times with other ends

TTFT: from send to the first chunk with a token. ITL: gaps between such chunks, pooled. A chunk
that only says why the answer ended is no token; one without text is (a server without tokenizer).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec
import uvloop

from benchmarks.gpu.drive import Clock, Rows
from benchmarks.gpu.shapes import CONFIGS


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens, streams and rounds of the four parts."""

    levels: tuple[int, ...] = (1, 8, 64, 256)
    rounds: int = 3
    prompt: int = 64
    output: int = 75
    streams: int = 32
    quiet: int = 400
    long: int = 1200
    storm_prompts: int = 12
    storm_tokens: int = 8000
    storm_every_s: float = 1.0
    reuse_times: int = 5


SMALL = Sizes((1, 4), 1, 8, 6, 3, 12, 40, 2, 200, 0.02, 2)


@dataclasses.dataclass
class Stream:
    """One answer as its client saw it; seconds on one clock."""

    ttft_s: float
    gaps_s: list[float]
    tokens: int
    chunks: int
    took_s: float


class Choice(msgspec.Struct):
    """Of a chunk, what counts."""

    text: str = ""
    finish_reason: str | None = None


class Event(msgspec.Struct):
    """A chunk. One process reads 15,000 of them a second and more, so they are decoded lightly."""

    choices: list[Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None


JSON = {"content-type": "application/json"}
DECODE = msgspec.json.Decoder(Event).decode


class Client:
    """Sends prompts of random ids to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, vocab: int) -> None:
        self._session, self._url, self._model = session, url.rstrip("/"), model
        self._draw, self._low, self._high = random.Random(1), vocab // 100, vocab * 2 // 3

    def ids(self, n: int) -> list[int]:
        """`n` random ids, away from both ends of the vocabulary."""
        return [self._draw.randrange(self._low, self._high) for _ in range(n)]

    async def ask(self, prompt: Sequence[int], tokens: int) -> Stream:
        """Stream one answer of exactly `tokens` tokens. Raises RuntimeError for any other."""
        return await self._sent(self._body(prompt, tokens), tokens)

    def _body(self, prompt: Sequence[int], tokens: int) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    async def _sent(self, body: bytes, tokens: int) -> Stream:
        sent_s = time.perf_counter()
        stamps: list[float] = []
        counted = 0
        url = self._url + "/v1/completions"
        async with self._session.post(url, data=body, headers=JSON) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {(await answer.text())[:300]}")
            rest = b""
            async for piece in answer.content.iter_any():
                now_s = time.perf_counter()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data: {"):
                        continue
                    event = DECODE(line[6:])
                    if event.error is not None:
                        raise RuntimeError(f"error in the stream: {event.error}")
                    if event.usage:
                        counted = event.usage["completion_tokens"]
                    if any(has_token(choice, bool(stamps)) for choice in event.choices):
                        stamps.append(now_s)
        if counted != tokens or not stamps:
            raise RuntimeError(f"{counted} tokens in {len(stamps)} chunks, asked for {tokens}")
        gaps_s = [b - a for a, b in itertools.pairwise(stamps)]
        took_s = time.perf_counter() - sent_s
        return Stream(stamps[0] - sent_s, gaps_s, counted, len(stamps), took_s)

    async def together(self, n: int, prompt_tokens: int, tokens: int) -> tuple[list[Stream], float]:
        """`n` streams at once, and the seconds from the first send to the last end."""
        bodies = [self._body(self.ids(prompt_tokens), tokens) for _ in range(n)]
        began_s = time.perf_counter()
        streams = await asyncio.gather(*[self._sent(body, tokens) for body in bodies])
        return list(streams), time.perf_counter() - began_s


def has_token(choice: Choice, begun: bool) -> bool:
    """Whether a chunk's choice carries a token. `begun`: one came before."""
    return bool(choice.text) or choice.finish_reason is None or not begun


def percentile_ms(values_s: Sequence[float], p: float) -> float | None:
    """The value at rank p / 100 * n, in milliseconds; None of nothing."""
    if not values_s:
        return None
    return sorted(values_s)[min(len(values_s) - 1, int(p / 100 * len(values_s)))] * 1e3


def gaps(streams: Sequence[Stream]) -> dict[str, Any]:
    """ITL of streams, pooled."""
    pooled = [gap for stream in streams for gap in stream.gaps_s]
    return {
        "itl_p50_ms": percentile_ms(pooled, 50),
        "itl_p99_ms": percentile_ms(pooled, 99),
        "itl_max_ms": percentile_ms(pooled, 100),
        "tokens_per_chunk": sum(s.tokens for s in streams) / sum(s.chunks for s in streams),
    }


async def level(client: Client, c: int, sizes: Sizes) -> dict[str, Any]:
    """The best of some rounds of `c` streams at once."""
    best: dict[str, Any] = {"tok_s": 0.0}
    for _ in range(sizes.rounds):
        streams, took_s = await client.together(c, sizes.prompt, sizes.output)
        ttft_s = [stream.ttft_s for stream in streams]
        row = {
            "work": f"http {c} streams",
            "tok_s": sum(stream.tokens for stream in streams) / took_s,
            "ttft_p50_ms": percentile_ms(ttft_s, 50),
            "ttft_p99_ms": percentile_ms(ttft_s, 99),
            "e2e_p50_ms": percentile_ms([stream.took_s for stream in streams], 50),
            **gaps(streams),
        }
        best = max(best, row, key=lambda row: float(row["tok_s"]))
    return best


async def quiet(client: Client, sizes: Sizes) -> dict[str, Any]:
    """Decodes and nothing else."""
    return {
        "work": "http quiet",
        **gaps((await client.together(sizes.streams, sizes.prompt, sizes.quiet))[0]),
    }


async def storm(client: Client, sizes: Sizes) -> dict[str, Any]:
    """Decodes while long prompts arrive."""

    async def later(i: int) -> Stream:
        await asyncio.sleep((0.5 + i) * sizes.storm_every_s)
        return await client.ask(client.ids(sizes.storm_tokens), 4)

    decodes = asyncio.create_task(client.together(sizes.streams, sizes.prompt, sizes.long))
    prompts = await asyncio.gather(*[later(i) for i in range(sizes.storm_prompts)])
    ttft_s = [stream.ttft_s for stream in prompts]
    return {
        "work": "http storm",
        **gaps((await decodes)[0]),
        "storm_ttft_p50_ms": percentile_ms(ttft_s, 50),
        "storm_ttft_p99_ms": percentile_ms(ttft_s, 99),
    }


async def reuse(client: Client, sizes: Sizes) -> dict[str, Any]:
    """A long prefix that comes back with other ends."""
    prefix = client.ids(sizes.storm_tokens)
    cold = await client.ask(prefix + client.ids(32), 1)
    warm = [await client.ask(prefix + client.ids(32), 1) for _ in range(sizes.reuse_times)]
    return {
        "work": "http reuse",
        "cold_ttft_ms": cold.ttft_s * 1e3,
        "warm_ttft_p50_ms": percentile_ms([stream.ttft_s for stream in warm], 50),
    }


async def measure(
    url: str, model: str, vocab: int, clock: Clock, rows: Rows, sizes: Sizes | None = None
) -> None:
    """All parts, one row each; parts that fail or find no time left are named."""
    sizes = sizes or Sizes()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        if not model:
            async with session.get(url.rstrip("/") + "/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]
        client = Client(session, url, model, vocab)
        await client.together(8, sizes.prompt, 16)
        parts = [(f"http {c} streams", level(client, c, sizes)) for c in sizes.levels]
        parts += [("http quiet", quiet(client, sizes)), ("http storm", storm(client, sizes))]
        parts += [("http reuse", reuse(client, sizes))]
        skipped = []
        for name, part in parts:
            if clock.left_s <= 0:
                part.close()
                skipped.append(name)
                continue
            try:
                rows.say(**await part)
            except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
                rows.say(work=name, failed=f"{type(error).__name__}: {error}")
        if skipped:
            rows.say(skipped=skipped, reason="the time budget is spent")


@click.command()
@click.argument("url")
@click.option("--model", default="", help="default: the first that the server names")
@click.option("--engine", default="server", help="name of the server in the rows")
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--small", is_flag=True, help="a few seconds, to try it")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON lines, appended")
@click.option("--budget-s", type=float, default=0.0, help="0 = no limit")
def main(
    url: str, model: str, engine: str, shape: str, small: bool, out: Path | None, budget_s: float
) -> None:
    """Measure the server at URL."""
    rows = Rows(out, engine=engine, shape=shape)
    sizes = SMALL if small else Sizes()
    vocab = CONFIGS[shape]["vocab_size"]
    uvloop.run(measure(url, model, vocab, Clock(budget_s), rows, sizes))


if __name__ == "__main__":
    main()
