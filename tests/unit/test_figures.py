"""Pages say what the recorded results say, and link to what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "docs" / "measured.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")],
    key=str,
)


def recorded(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def row(page: str, first: str) -> list[str]:
    """Cells behind the first of the one row that begins with it."""
    (found,) = [cells(line) for line in page.splitlines() if line.startswith(f"| {first} |")]
    return found[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if link.startswith("https://"):
            continue
        assert (page.parent / link).exists(), link
        if anchor:
            there = (page.parent / link if link else page).read_text()
            heads = re.findall(r"^#+ (.*)$", there, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads}
    for module in re.findall(r"python -m (benchmarks[\w.]+)", text):
        path = ROOT / module.replace(".", "/").removesuffix("/")
        assert path.with_suffix(".py").exists() or path.is_dir(), module


def test_host_costs() -> None:
    api = {one["streams"]: one for one in recorded("api_cost.json")["rows"]}[64]
    loop, process = api["loop_us_per_token"], api["process_us_per_token"]
    name = "HTTP process, each token (decode, detokenise, SSE chunk), 64 streams"
    assert row(MEASURED, name) == [f"{loop:.0f} us, {process:.0f} us with sockets and metrics"]
    steps = [
        one for one in recorded("engine_overhead.json")["rows"]
        if one["loop"] == "plain" and not one["indexed"] and not one["waiting"]
    ]  # fmt: skip
    (told,) = row(MEASURED, "plan + apply of one step, 64 / 256 / 1024 running")
    match = re.fullmatch(r"(.+) ms \(p99 (.+)\)", told)
    assert match, told
    shown = [one for one in steps if one["running"] > 1]
    near(match[1], [one["median_ms"] for one in shown])
    near(match[2], [one["p99_ms"] for one in shown])


def rounded(told: str, value: float) -> bool:
    """`told` is `value` to the digits that it shows."""
    digits = len(told.partition(".")[2])
    return abs(float(told) - value) <= 0.5001 * 10.0**-digits


def near(told: str, values: Sequence[float]) -> None:
    """Figures with slashes between them, each a value to two digits."""
    shown = [float(figure) for figure in told.split("/")]
    assert shown == pytest.approx(values, rel=0.06)


def test_streams() -> None:
    found = recorded("streams.json")
    page = " ".join((ROOT / "docs" / "bench.md").read_text().split())
    us, client = found["us_per_token"], found["client_us_per_token"]
    assert f"{found['tokens_per_s']:,.0f} tokens/s" in page
    assert f"{us['engine']:.1f} us of processor time a token in the engine process" in page
    assert f"{us['http']:.0f} in the HTTP process and {client:.0f} in the generator" in page
    assert f"ITL p50 {found['itl_p50_ms']:.1f} ms" in page


def test_the_processor_beside_its_peers() -> None:
    table = (RESULTS / "cpu_peers-2026-11-28.md").read_text()
    rates = table.split("| server | figure |")[0]
    for name, where in (
        ("headrace, tok/s", "headrace"),
        ("llama-server Q4_0", "llama-server Q4_0"),
        ("llama-server Q4_1", "llama-server Q4_1"),
    ):
        told, found = row(README, name), row(rates, where)
        assert told[:6] == found[1:7]
        assert told[7] == f"{found[7]} tok/s"
        assert told[8] == f"{float(found[8]):.1f} s"
        assert told[9] == f"{found[9]} MiB"


def test_the_gateway_beside_its_peers() -> None:
    table = (RESULTS / "gateway-2026-11-28.md").read_text()
    head = re.compile(r"^\| \| (headrace token_cost .*) \|$", re.MULTILINE)
    (columns,), (shown,) = head.findall(table), head.findall(README)
    mine = [cells(columns).index(name) for name in cells(shown)]
    for name, where, digits in (
        ("CPU s per 1000 short requests, 64 at once", "CPU s/1000, 64 at once", 2),
        ("CPU s per 1000 chunks of streams", "CPU s/1000 chunks", 3),
        ("added TTFT p50, 64 paced streams, ms", "added TTFT p50 ms, streams", 1),
    ):
        found = [float(row(table, where)[at]) for at in mine]
        assert row(README, name) == [f"{value:.{digits}f}" for value in found]
    page = " ".join((ROOT / "docs" / "gateway.md").read_text().split())
    short, chunks, p50, long, start, end, first = (
        row(table, name)[cells(columns).index("headrace token_cost")]
        for name in (
            "CPU s/1000, 64 at once", "CPU s/1000 chunks", "added p50 ms, 300/s",
            "added p50 ms, 64k prompts", "MiB at start", "MiB, all of them",
            "added TTFT p50 ms, streams",
        )
    )  # fmt: skip
    assert f"{short} and {chunks} CPU seconds, {p50} ms and {long} ms; {start} MiB" in page
    assert f"{end} after 20 000 unique prompts" in page
    assert f"their first token {float(first):.1f} ms later" in page


@pytest.mark.parametrize(
    ("title", "file", "loads"),
    [
        ("The gateway before two GPUs", "gateway-devices-2026-11-28.json", (0.9, 2.0)),
        ("The gateway before two replicas on a CPU", "gateway-cpu-2026-11-28.json", (0.9, 1.5)),
    ],
    ids=["gpu", "cpu"],
)
def test_the_gateway_before_devices(title: str, file: str, loads: tuple[float, ...]) -> None:
    """Each cell of the page is TTFT and hits of one run."""
    runs = {
        (p["router"], p["policy"], p["workload"], p["load"]): p
        for p in json.loads((RESULTS / file).read_text())["points"]
    }
    page = MEASURED.split(f"## {title}")[1].split("\n## ")[0]
    told = {cells(line)[0] for line in page.splitlines() if re.search(r"\d%", line)}
    simulated = "the simulator, of token_cost"
    assert told - {simulated} == {policy for router, policy, _, _ in runs if router == "headrace"}
    for name in told:
        key = ("", "token_cost") if name == simulated else ("headrace", name)
        places = [(w, load) for w in ("shared prefixes", "conversations") for load in loads]
        found = [runs[*key, *place] for place in places]
        assert row(page, name) == [f"{p['ttft_mean_s']:.3f} / {p['hit_share']:.0%}" for p in found]


@pytest.mark.parametrize("which", ["distinct", "single"])
def test_batching_against_one_at_a_time(which: str) -> None:
    """Throughput, latencies and cores of each level, the naive server's before headrace's."""
    table = (RESULTS / f"engine_vs_naive_{which}.md").read_text()
    levels: dict[str, dict[str, list[float]]] = {"naive": {}, "headrace": {}}
    for line in table.splitlines():
        name, level, *rest = [*cells(line), ""]
        name = name.partition(",")[0]  # "headrace, prefix cache"
        if name in levels:
            e2e, itl, rate, cores = (float(rest[at]) for at in (2, 6, 9, 11))
            levels[name][level] = [rate, e2e, itl, cores]
    page = MEASURED.split(f"<!-- {which} -->")[1].split(f"<!-- /{which} -->")[0]
    shown = [cells(line) for line in page.splitlines() if re.match(r"\| \d", line)]
    assert [level for level, *_ in shown] == list(levels["naive"])
    for level, *told in shown:
        naive, ours = levels["naive"][level], levels["headrace"][level]
        pairs = [value for both in zip(naive, ours, strict=True) for value in both]
        for figure, value in zip(told, pairs, strict=True):
            assert rounded(figure, value), (level, figure, value)


def waves(*sizes: int) -> list[str]:
    return [f"wave {size}x(32->75)" for size in sizes]


STREAMS = [f"http {count} streams" for count in (1, 64, 256)]
GPU_ROWS = {  # README's row: works and figure of the recorded table
    "1 / 4 / 8 / 16 at once, tok/s": (waves(1, 4, 8, 16), "tok_s"),
    "32 / 64 / 128 / 256 at once, tok/s": (waves(32, 64, 128, 256), "tok_s"),
    "prefill 1x2048 / 1x8000 / 4x8000, tok/s": (
        [f"prefill {shape}->1)" for shape in ("1x(2048", "1x(8000", "4x(8000")], "tok_s",
    ),
    "512 x (512 -> 128) sampled, tok/s": (["batch 512x(512->128) sampled"], "tok_s"),
    "32 x (4096 -> 256), tok/s": (["batch 32x(4096->256)"], "tok_s"),
    "HTTP, 1 / 64 / 256 streams of 64 -> 75, tok/s": (STREAMS, "tok_s"),
    "HTTP, TTFT p50 at 1 / 64 / 256, ms": (STREAMS, "ttft_p50_ms"),
    "32 decodes, an 8000-token prompt each second: ITL p99, ms": (["http storm"], "itl_p99_ms"),
    "the TTFT of those prompts, p50, ms": (["http storm"], "storm_ttft_p50_ms"),
    "8000-token prefix again: TTFT, ms": (["http reuse"], "warm_ttft_p50_ms"),
    "process to first token, caches empty, s": (["start cold"], "seconds"),
    "the same, with what the first start left, s": (["start warm"], "seconds"),
}  # fmt: skip


def between(page: str, mark: str) -> str:
    return page.split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0]


HTTP_ROWS = tuple(name for name in GPU_ROWS if GPU_ROWS[name][0][0].startswith("http"))
OFFLINE_ROWS = tuple(name for name in GPU_ROWS if name not in HTTP_ROWS)
GPU_TABLES = {  # where it stands: what was recorded, the page's part, its rows
    "h200": ("gpu-h200-2026-11-29.md", between(README, "gpu"), OFFLINE_ROWS),
    "h200 http": ("gpu-h200-http-2026-11-29.md", between(README, "gpu http"), HTTP_ROWS),
    "h100": (
        "gpu-h100-80gb-hbm3-2026-11-28.md",
        between(MEASURED, "h100"),
        (*OFFLINE_ROWS[:-1], *HTTP_ROWS),  # it was not started warm
    ),
}


@pytest.mark.parametrize("which", GPU_TABLES)
def test_tables_of_gpus_hold_what_is_compared(which: str) -> None:
    _, page, names = GPU_TABLES[which]
    told = [cells(line)[0] for line in page.splitlines() if line.startswith("| ")]
    assert sorted(told) == sorted(["work", *names])


@pytest.mark.parametrize(
    ("which", "name"),
    [(which, name) for which, (_, _, names) in GPU_TABLES.items() for name in names],
)
def test_one_gpu_beside_its_peer(which: str, name: str) -> None:
    """headrace's figure, the share of the limit, vLLM's figure and their ratio, work by work."""
    works, kind = GPU_ROWS[name]
    file, page, _ = GPU_TABLES[which]
    found = [row((RESULTS / file).read_text(), f"{work} | {kind}")[1:] for work in works]
    ours, limits, theirs, _, _, ratios = zip(*(cut[:6] for cut in found), strict=True)
    told = [re.sub(r" ?\(.*?\)| %", "", cell) for cell in row(page, name)]  # later ones, %
    for cell, values in zip(told, (ours, limits, theirs, ratios), strict=True):
        if cell:
            for figure, value in zip(cell.split("/"), values, strict=True):
                if value == "-" or figure.strip() == "-":  # not run
                    assert figure.strip() == value
                else:
                    assert rounded(figure.strip(), float(value.rstrip("%"))), (figure, value)


def test_gemma_beside_its_peer() -> None:
    table = (RESULTS / "cpu_gemma-2026-11-28.md").read_text().split("## Milliseconds")[0]
    for name, where in (("headrace", "headrace"), ("llama-server", "llama-server Q4_1")):
        section = MEASURED.split("**Gemma-3-270M**")[1]
        told, found = row(section.split("\n## ")[0], name), row(table, where)
        assert told[:3] == found[1:4]
        assert told[3] == f"{found[4]} tok/s"
        assert told[4] == f"{float(found[5]):.1f} s"
        assert told[5] == f"{found[6]} MiB"
