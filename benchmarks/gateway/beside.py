"""headrace's gateway beside vllm-router and sglang-router, over the same mock workers.

    python -m benchmarks.gateway.beside --peers DIR [--rounds 2] [--scale 1] [--only headrace]

Each router in turn, alone before two mock workers that answer at once; all share this machine's
cores with the load generator, so CPU seconds are the figure to trust, and latencies are told as
what they add to the same load without a router. A figure is the median of the rounds; a router that
is not installed is left out. `routers.py` says how each is started. At `--scale 1` and two rounds
it takes under four minutes; results go to benchmarks/results/gateway-DATE.json and its table.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvloop

from benchmarks.gateway.load import Figures, at_rate, chats, closed, for_count, for_s
from benchmarks.gateway.routers import ROUTERS, Router, Running, answered, mocks, running
from headrace import __version__

RESULTS = Path(__file__).parents[1] / "results"
SHORT, LONG, MIDDLE = 200, 64_000, 2_000  # characters of a prompt
STREAM_EVENTS = 32
OPEN_PER_S = 300.0
INDEX_BYTES = 16 * 2**20  # of headrace while memory is measured: full before half of the prompts
Row = dict[str, float]
ASKED: tuple[tuple[str, str, float], ...] = (  # of headrace: column, what it says, most
    ("cpu_s_per_1000_c64", "CPU s per 1000 short requests, 64 at once", 0.17),
    ("cpu_s_per_1000_chunks", "CPU s per 1000 chunks, 64 streams", 0.06),
    ("added_p50_ms_300", "added p50 at 300 requests/s, ms", 0.6),
    ("added_p50_ms_64k", "added p50 of prompts of 64k characters, ms", 1.2),
)
COLUMNS = (
    ("per_s_c64", "req/s, 64 at once", "{:.0f}"),
    ("cpu_s_per_1000_c1", "CPU s/1000, one at a time", "{:.3f}"),
    ("cpu_s_per_1000_c64", "CPU s/1000, 64 at once", "{:.3f}"),
    ("cpu_s_per_1000_chunks", "CPU s/1000 chunks", "{:.3f}"),
    ("added_p50_ms_c1", "added p50 ms, one at a time", "{:.2f}"),
    ("added_p50_ms_300", "added p50 ms, 300/s", "{:.2f}"),
    ("added_p99_ms_300", "added p99 ms, 300/s", "{:.2f}"),
    ("added_p50_ms_64k", "added p50 ms, 64k prompts", "{:.2f}"),
    ("cpu_s_per_1000_64k", "CPU s/1000, 64k prompts", "{:.3f}"),
    ("added_first_p50_ms", "added TTFT p50 ms, streams", "{:.2f}"),
    ("busiest_share", "share of the busier worker, cold prompts", "{:.0%}"),
    ("rss_start_mib", "MiB at start", "{:.0f}"),
    ("rss_half_mib", "MiB, half of the unique prompts", "{:.0f}"),
    ("rss_end_mib", "MiB, all of them", "{:.0f}"),
    ("failed", "failed", "{:.0f}"),
)


def prepared(count: int, characters: int, *, stream: bool = False) -> Iterator[bytes]:
    """Requests made ahead, so that making them costs nothing while time is taken."""
    source = chats(characters, stream=stream)
    return itertools.chain(list(itertools.islice(source, count)), source)


async def loads(port: int, scale: float) -> dict[str, Figures]:
    """The stretches whose times are compared with and without a router."""
    out = {}
    requests = prepared(int(3000 * scale), SHORT)
    out["c1"] = await closed(port, requests, 1, for_s(1.2 * scale))
    requests = prepared(int(900 * scale), SHORT)
    out["300"] = await at_rate(port, requests, OPEN_PER_S, 2.5 * scale)
    requests = prepared(int(600 * scale), LONG)
    out["64k"] = await closed(port, requests, 4, for_s(1.2 * scale))
    requests = prepared(200, SHORT, stream=True)
    out["streams"] = await closed(port, requests, 64, for_s(2.0 * scale))
    return out


async def costs(router: Running, scale: float, row: Row) -> dict[str, Figures]:
    """The same, with the CPU seconds that each took."""
    out = {}

    def spent(name: str, figures: Figures, before_s: float, each: int = 1) -> None:
        cpu_s = router.cpu_s() - before_s
        row[name] = 1000 * cpu_s / max(1, each * len(figures.seen))
        row["failed"] = row.get("failed", 0) + figures.failed

    requests = prepared(int(3000 * scale), SHORT)
    before_s = router.cpu_s()
    out["c1"] = await closed(router.port, requests, 1, for_s(1.2 * scale))
    spent("cpu_s_per_1000_c1", out["c1"], before_s)
    requests = prepared(int(12000 * scale), SHORT)
    before_s = router.cpu_s()
    c64 = await closed(router.port, requests, 64, for_s(2.0 * scale))
    spent("cpu_s_per_1000_c64", c64, before_s)
    row["per_s_c64"], row["p50_ms_c64"] = c64.per_s, c64.ms(0.5)
    requests = prepared(int(900 * scale), SHORT)
    before_s = router.cpu_s()
    out["300"] = await at_rate(router.port, requests, OPEN_PER_S, 2.5 * scale)
    spent("cpu_s_per_1000_300", out["300"], before_s)
    requests = prepared(int(600 * scale), LONG)
    before_s = router.cpu_s()
    out["64k"] = await closed(router.port, requests, 4, for_s(1.2 * scale))
    spent("cpu_s_per_1000_64k", out["64k"], before_s)
    requests = prepared(200, SHORT, stream=True)
    before_s = router.cpu_s()
    out["streams"] = await closed(router.port, requests, 64, for_s(2.0 * scale))
    spent("cpu_s_per_1000_chunks", out["streams"], before_s, STREAM_EVENTS)
    return out


def added(row: Row, seen: dict[str, Figures], direct: dict[str, Figures]) -> None:
    """What the router adds to the times of the same load without it."""
    for name in ("c1", "300", "64k"):
        for text, share in (("p50", 0.5), ("p99", 0.99)):
            row[f"added_{text}_ms_{name}"] = seen[name].ms(share) - direct[name].ms(share)
    for text, share in (("p50", 0.5), ("p99", 0.99)):
        first = seen["streams"].ms(share, first=True)
        row[f"added_first_{text}_ms"] = first - direct["streams"].ms(share, first=True)


async def evenness(router: Running, workers: list[str], count: int) -> float:
    """Cold prompts one at a time: the share that went to the busier worker."""
    before = [answered(url) for url in workers]
    await closed(router.port, prepared(count, MIDDLE), 1, for_count(count))
    got = [answered(url) - was for url, was in zip(workers, before, strict=True)]
    return max(got) / max(1, sum(got))


async def memory(router: Running, count: int, row: Row) -> None:
    """Resident memory before, between and after `count` prompts that nobody has seen."""
    row["rss_start_mib"] = router.rss_mib()
    for name in ("rss_half_mib", "rss_end_mib"):
        await closed(router.port, chats(MIDDLE, stream=False), 16, for_count(count // 2))
        row[name] = router.rss_mib()


def measure(
    router: Router,
    workers: list[str],
    direct: dict[str, Figures],
    scale: float,
    peers: Path,
    folder: Path,
) -> Row:
    """One round of one router. direct: the same loads without it."""
    row: Row = {}
    with running(router, workers, peers, folder) as process:
        added(row, uvloop.run(costs(process, scale, row)), direct)
        row["busiest_share"] = uvloop.run(evenness(process, workers, int(300 * scale)))
    with running(router, workers, peers, folder, INDEX_BYTES) as process:
        uvloop.run(memory(process, int(20_000 * scale), row))
    return row


def table(rows: dict[str, Row], facts: dict[str, object]) -> str:
    """The page."""
    lines = [f"# Routers beside each other, {facts['date']}", ""]
    lines += [f"{key}: {value}  " for key, value in facts.items() if key != "date"]
    lines += ["", "| | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for key, text, shape in COLUMNS:
        cells = (shape.format(row[key]) if key in row else "" for row in rows.values())
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    own = next((row for label, row in rows.items() if label.startswith("headrace")), None)
    if own is not None:
        lines += ["", "| asked of headrace | most | is |", "|---|---|---|"]
        lines += [f"| {text} | {most} | {own[key]:.3f} |" for key, text, most in ASKED]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="their environment")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of the time of each stretch")
    parser.add_argument("--only", default="", help="routers whose label contains this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    here = (asked.peers / "bin" / "python").exists()
    chosen = [
        router
        for router in ROUTERS
        if asked.only in router.label and (here or router.name == "headrace")
    ]
    rounds: dict[str, list[Row]] = {router.label: [] for router in chosen}
    with tempfile.TemporaryDirectory() as name, mocks(2, Path(name)) as workers:
        for _ in range(asked.rounds):
            direct = uvloop.run(loads(int(workers[0].rpartition(":")[2]), asked.scale))
            for router in chosen:
                row = measure(router, workers, direct, asked.scale, asked.peers, Path(name))
                rounds[router.label].append(row)
                print(router.label, {k: round(v, 4) for k, v in row.items()}, flush=True)
    rows = {
        label: {key: statistics.median(row[key] for row in some) for key in some[0]}
        for label, some in rounds.items()
    }
    facts: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "headrace": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "rounds": asked.rounds,
        "scale": asked.scale,
        "memory": f"{int(20_000 * asked.scale)} unique prompts of {MIDDLE} characters; "
        f"headrace with an index of {INDEX_BYTES >> 20} MiB",
    }
    page = table(rows, facts)
    stem = asked.out / f"gateway-{facts['date']}"
    stem.with_suffix(".json").write_bytes(
        msgspec.json.format(msgspec.json.encode({**facts, "rows": rows, "rounds_of": rounds}))
    )
    stem.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
