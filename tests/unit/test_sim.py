"""The simulator: a worker's arithmetic, conservation, generators, and which policy wins where."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli.sim import command
from headrace.engine.protocol import StepCost
from headrace.errors import ConfigError
from headrace.gateway.policy import POLICIES
from headrace.sim.device import DEVICES, H100_14B, PREFILL_ONLY, Device, fit, read_device
from headrace.sim.generate import GENERATORS, generate
from headrace.sim.run import Fleet, Outcome, simulate
from headrace.sim.sweep import own_load
from headrace.sim.worker import Job, Worker
from headrace.sim.workload import Request, Workload, load_trace, save_trace

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PLAIN = Device(  # a token of a prompt 1 ms, a step at least 10 ms, a token read 1 us
    name="plain",
    cost=StepCost(floor_s=0.01, token_s=0.001, base_s=0.0, pair_s=0.0, read_s=1e-6, tile=1),
    kv_tokens=100 * 512,
    max_step_tokens=1000,
)


def alone(prompt: int, output: int, chain: tuple[int, ...] = (), at_s: float = 0.0) -> Request:
    return Request(at_s, prompt, output, chain)


def one_worker(*requests: Request, device: Device = PLAIN) -> Outcome:
    return simulate(Workload("w", requests), Fleet(device=device, workers=1), "round_robin")


def test_one_prompt_and_its_answer() -> None:
    """1500 tokens in two steps; then 9 steps of 10 ms, each reading the context."""
    got = one_worker(alone(1500, 10))
    assert got.ttft_s.mean == pytest.approx(1.5)
    reads = sum(1500 + k for k in range(1, 10))
    assert got.e2e_s.mean == pytest.approx(1.5 + 9 * 0.01 + reads * 1e-6)


def test_a_prompt_cuts_into_steps_of_decoding() -> None:
    """It joins behind the step that runs when it comes, and the other one decodes beside it."""
    first, second = alone(100, 1001), alone(500, 1, at_s=1.005)
    worker = Worker(PLAIN, 100, 512)
    jobs = [Job(0, first), Job(1, second)]
    worker.add(jobs[0], 0.0)
    assert worker.advance() == ([jobs[0]], [])
    worker.add(jobs[1], 1.005)
    worker.advance()
    joined_s = 0.1 + 90 * 0.01 + sum(101 + k for k in range(90)) * 1e-6
    assert worker.advance() == ([jobs[1]], [jobs[1]])
    assert joined_s >= 1.005
    assert jobs[1].first_s == pytest.approx(joined_s + 0.501 + 191e-6)
    assert jobs[0].generated == 92


def test_a_cached_prefix_is_not_computed_again() -> None:
    chain = (1, 2)
    got = one_worker(alone(1024, 1, chain), alone(1100, 1, chain, at_s=5.0))
    assert got.hit_share == pytest.approx(1024 / 2124)
    assert got.ttft_s.mean == pytest.approx((1.024 + 0.076) / 2)
    again = one_worker(alone(1024, 1, chain), alone(1024, 1, chain, at_s=5.0))
    assert again.hit_share == 0.25, "the last token is always computed"


def test_little_memory_preempts_and_all_end() -> None:
    small = msgspec.structs.replace(PLAIN, kv_tokens=4 * 512)
    asked = [alone(500, 600, at_s=0.1 * i) for i in range(4)]
    got = one_worker(*asked, device=small)
    assert got.preemptions > 0
    assert one_worker(*asked).preemptions == 0


def test_a_request_that_fits_nowhere_is_the_callers_fault() -> None:
    with pytest.raises(ConfigError, match="the largest request needs 102"):
        one_worker(alone(51_500, 600))


requests = st.builds(
    lambda gap, blocks, tail, out, root: (gap, blocks * 512 + tail, out, root, blocks),
    st.sampled_from([0.0, 0.0, 0.01, 0.3, 2.0]),
    st.integers(0, 3),
    st.integers(1, 511),
    st.integers(1, 700),
    st.integers(0, 3),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(requests, min_size=1, max_size=12), st.sampled_from(sorted(POLICIES)))
def test_every_request_ends_and_memory_comes_back(
    drawn: list[tuple[float, int, int, int, int]], policy: str
) -> None:
    now_s, asked = 0.0, []
    for gap_s, prompt, output, root, blocks in drawn:
        now_s += gap_s
        chain = tuple(root * 10 + i for i in range(blocks))
        asked.append(Request(now_s, prompt, output, chain))
    workload = Workload("w", tuple(asked))
    small = msgspec.structs.replace(PLAIN, kv_tokens=6 * 512, target_s=0.05)
    fleet = Fleet(device=small, workers=2)
    got = simulate(workload, fleet, policy)
    assert got.ttft_s.count == len(asked)
    assert got.hit_share <= got.ideal_share + 1e-9
    again = simulate(workload, fleet, policy)
    same = msgspec.structs.replace(again, cpu_s=got.cpu_s)
    assert same == got, "the same arguments give the same outcome"


def test_steps_taken_together_are_the_steps_one_by_one() -> None:
    worker = Worker(PLAIN, 100, 512)
    for i in range(3):
        worker.add(Job(i, alone(100 + i, 400)), 0.0)
    worker.advance()
    while not worker.running or any(not job.decodes for job in worker.running):
        worker.advance()
    assert worker.ends_s is not None
    together = worker.ends_s - worker._began_s
    contexts = [job.computed + 1 for job in worker._rows]
    one_by_one = sum(
        PLAIN.cost.seconds(3, 0.0, sum(contexts) + 3 * step) for step in range(worker._steps)
    )
    assert worker._steps > 300
    assert together == pytest.approx(one_by_one)


def test_the_built_in_card_is_the_measured_one() -> None:
    got = read_device(RESULTS / "gpu-h100-80gb-hbm3-2026-11-28-later.jsonl")
    for field in ("floor_s", "token_s", "pair_s", "read_s"):
        want = getattr(H100_14B.cost, field)
        assert getattr(got.cost, field) == pytest.approx(want, rel=0.01), field
    assert got.kv_tokens == H100_14B.kv_tokens


def test_devices_from_files(tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    file.write_bytes(msgspec.json.encode(PLAIN))
    assert read_device(file) == PLAIN
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"card\.json"):
        read_device(file)
    with pytest.raises(ConfigError, match="a fit needs"):
        fit("x", [{"work": "prefill 1x(2048->1)", "seconds": 1.0}])


@pytest.mark.parametrize("name", GENERATORS)
def test_generators(name: str, tmp_path: Path) -> None:
    made = generate(name, requests=300, seed=3)
    assert made == generate(name, requests=300, seed=3)
    assert made != generate(name, requests=300, seed=4)
    assert len(made.requests) == 300
    assert [r.arrival_s for r in made.requests] == sorted(r.arrival_s for r in made.requests)
    assert all(len(r.chain) == r.prompt_tokens // 512 for r in made.requests)
    save_trace(made, tmp_path / "made.jsonl")
    back = load_trace(tmp_path / "made.jsonl")
    for one, other in zip(made.requests, back.requests, strict=True):
        assert one.arrival_s == pytest.approx(other.arrival_s)
        assert (one.chain, one.prompt_tokens) == (other.chain, other.prompt_tokens)


@pytest.mark.parametrize(
    ("name", "seconds", "tokens", "median", "output", "reuse"),
    [("conversation", 3537, 12035, 6909, 343, 0.373), ("synthetic", 1022, 15325, 11587, 149, 0.65)],
)
def test_generated_traces_have_the_statistics_of_the_real_ones(
    name: str, seconds: float, tokens: float, median: float, output: float, reuse: float
) -> None:
    made = generate(name, seed=0)
    count = len(made.requests)
    assert made.duration_s == pytest.approx(seconds, rel=0.05)
    assert made.prompt_tokens / count == pytest.approx(tokens, rel=0.25)
    lengths = sorted(r.prompt_tokens for r in made.requests)
    assert lengths[count // 2] == pytest.approx(median, rel=0.25)
    assert sum(r.output_tokens for r in made.requests) / count == pytest.approx(output, rel=0.1)
    assert made.ideal_tokens() / made.prompt_tokens == pytest.approx(reuse, rel=0.15)
    common = {r.chain[0] for r in made.requests if r.chain} == {0}
    assert common == (name == "conversation")


# ---------------------------------------------------------------- who wins where, in small


def at_load(name: str, load: float, pressure: float, count: int) -> tuple[Workload, Fleet]:
    workload = generate(name, requests=count, seed=1)
    fleet = Fleet(device=PREFILL_ONLY).under_pressure(workload, pressure)
    return workload.faster(load / own_load(workload, fleet)).prompts_only(), fleet


def test_cold_traffic_goes_as_by_least_tokens() -> None:
    asked, fleet = at_load("cold", 0.8, 1.0, 400)
    ours, theirs = (simulate(asked, fleet, p) for p in ("token_cost", "least_tokens"))
    assert ours.ttft_s.mean <= 1.02 * theirs.ttft_s.mean


def test_shared_prefixes_are_hit() -> None:
    asked, fleet = at_load("shared_prefix", 0.9, 0.73, 1000)
    got = simulate(asked, fleet, "token_cost")
    assert got.of_ideal >= 0.9


def test_one_common_block_pulls_nobody_to_one_worker() -> None:
    asked, fleet = at_load("shared_block_0", 0.8, 1.0, 400)
    got = simulate(asked, fleet, "token_cost")
    assert got.imbalance < 1.15
    least = simulate(asked, fleet, "least_tokens")
    assert got.ttft_s.mean <= 1.02 * least.ttft_s.mean


def test_where_contexts_decode_requests_are_the_wrong_unit() -> None:
    """SGLang's rule counts requests, of which most only decode: prompts queue behind each other."""
    workload = generate("synthetic", requests=700, seed=1)
    fleet = Fleet(device=H100_14B).under_pressure(workload, 0.7)
    asked = workload.faster(0.9 / own_load(workload, fleet))
    ours, theirs = (simulate(asked, fleet, p) for p in ("token_cost", "prefix_affinity"))
    assert 1.25 * ours.ttft_s.mean <= theirs.ttft_s.mean


@pytest.mark.parametrize("name", ["hot_spot", "flood", "conversation"])
def test_token_cost_beats_load_alone_and_requests(name: str) -> None:
    asked, fleet = at_load(name, 0.9, 0.7, 700)
    ours = simulate(asked, fleet, "token_cost").ttft_s.mean
    assert ours < simulate(asked, fleet, "least_tokens").ttft_s.mean
    assert ours < simulate(asked, fleet, "round_robin").ttft_s.mean


def test_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "study.json"
    args = "--workload multi_turn --requests 120 --policy token_cost,random --pressure 0.7"
    done = CliRunner().invoke(
        command, [*args.split(), "--load", "0.5,0.9", "--out", str(out), "--plot"]
    )
    assert done.exit_code == 0, done.output
    study = msgspec.json.decode(out.read_bytes())
    assert [p["outcome"]["policy"] for p in study["points"]] == ["token_cost", "random"] * 2
    assert [round(p["load"], 2) for p in study["points"]] == [0.5, 0.5, 0.9, 0.9]
    assert out.with_suffix(".svg").exists()
    assert "| token_cost |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--policy best", "is none of"),
        ("--load 0", "numbers above 0"),
        ("--plot", "--plot needs --out"),
        ("--policy all --plot --out none.json", "at most 7 policies, and here are 10"),
        ("--kv-blocks 5 --pressure 1", "both set the cache"),
        ("--trace /nowhere.jsonl", "No such file"),
        ("--device nothing", "nothing: "),
        ("--workload cold --requests 1 --load 1 --seed 5", ""),
    ],
)
def test_what_the_command_refuses(args: str, said: str) -> None:
    done = CliRunner().invoke(command, args.split())
    told = done.output + str(done.exception)
    assert (done.exit_code != 0) == bool(said), told
    assert said in told


def test_names() -> None:
    assert set(DEVICES) == {"h100-14b", "prefill-only"}
