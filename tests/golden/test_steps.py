"""What one StepPlan does: forks, full cache hits, copies, failures, overlap."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.cpu.ops import TorchOps
from headrace.engine.protocol import Runner
from headrace.errors import EngineError
from headrace.messages import Grow, Join, Output, Sampling, StepPlan
from headrace.sources.files import ModelFiles
from tests.devices import PROCESSORS, WITHOUT_CUDA, kv_tensors, load
from tests.golden.reference import tiny_model
from tests.golden.stepping import GREEDY, Job, generate, plan, run

BLOCK = 8
SETTINGS = {
    "dtype": "float32", "kv_blocks": 128, "max_num_seqs": 24, "block_size": BLOCK, "threads": 1,
}  # fmt: skip
KNOWN_IDS = 97  # the tokenizer's, of 131 rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("steps")
    tiny_model("llama-gqa", folder)
    vocab = {f"t{i}": i for i in range(KNOWN_IDS - 2)}
    added = [{"id": KNOWN_IDS - 2, "content": "<a>"}, {"id": KNOWN_IDS - 1, "content": "<b>"}]
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added})
    )
    return folder


@pytest.fixture
def files(folder: Path) -> ModelFiles:
    return ModelFiles("steps", "hf", folder)


@pytest.fixture
def runner(backend: str, files: ModelFiles) -> Iterator[Any]:
    runner = load(backend, files, **SETTINGS)
    yield runner
    runner.close()


@pytest.fixture
def twin(backend: str, files: ModelFiles) -> Iterator[Runner]:
    """A second runner over the same weights, with its own cache."""
    twin: Runner = load(backend, files, **SETTINGS)
    yield twin
    twin.close()


def ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(KNOWN_IDS) for _ in range(n)]


def prefill(
    row: int, prompt: list[int], table: list[int], start: int = 0, step: int = 0
) -> StepPlan:
    """Row joins with `table` and computes prompt[start:], drawing greedily into itself."""
    return plan(
        step,
        joins=[Join(row, GREEDY, 0, [table])],
        rows=[row],
        starts=[start],
        counts=[len(prompt) - start],
        ids=[prompt[start:]],
        outputs=[Output.SAMPLE],
        draw_from=[0],
        draw_into=[0 + row],
    )


def decode(rows: list[int], starts: list[int], step: int = 1) -> StepPlan:
    n = len(rows)
    return plan(
        step,
        rows=rows,
        starts=starts,
        counts=[1] * n,
        ids=[None] * n,
        outputs=[Output.SAMPLE] * n,
        draw_from=list(range(n)),
        draw_into=rows,
    )


def test_n_draws_from_one_forward_row(runner: Runner) -> None:
    sampling = Sampling(temperature=1.5, seed=9)
    prompt = ids(21)
    joins = [Join(row, sampling, row, [[0, 1, 2]]) for row in range(5)]
    first = run(
        runner,
        plan(
            0,
            joins=joins,
            rows=[0],
            starts=[0],
            counts=[21],
            ids=[prompt],
            outputs=[Output.SAMPLE],
            draw_from=[0] * 5,
            draw_into=list(range(5)),
        ),
    )
    assert len(set(first.tokens)) > 1, "choices of one request draw different numbers"
    leave = plan(1, leaves=list(range(5)))
    run(runner, leave)
    for row in range(5):  # each choice alone draws the same
        step = prefill(0, prompt, [3, 4, 5])
        step = plan(0, **_fields(step) | {"joins": [Join(0, sampling, row, [[3, 4, 5]])]})
        assert run(runner, step).tokens == [first.tokens[row]]
        run(runner, plan(1, leaves=[0]))


def _fields(step: StepPlan) -> dict[str, object]:
    return {name: getattr(step, name) for name in StepPlan.__struct_fields__ if name != "step"}


def test_a_fully_cached_prompt_writes_nothing(runner: Runner) -> None:
    prompt = ids(2 * BLOCK)
    expected = run(runner, prefill(0, prompt, [5, 6])).tokens
    before = [tensor.clone() for tensor in kv_tensors(runner)]
    again = prefill(1, prompt, [5, 6], start=len(prompt) - 1, step=1)
    result = run(runner, plan(1, **_fields(again) | {"unwritten": [0]}))
    assert result.tokens == expected
    for old, new in zip(before, kv_tensors(runner), strict=True):
        assert torch.equal(old, new)


def test_unwritten_rows_do_not_stop_others_from_writing(runner: Runner, twin: Runner) -> None:
    shared, other = ids(2 * BLOCK), ids(13, seed=1)
    expected = run(runner, prefill(0, shared, [5, 6])).tokens
    (alone,) = generate(twin, [Job(other, 2)])
    both = plan(
        1,
        joins=[Join(1, GREEDY, 0, [[5, 6]]), Join(2, GREEDY, 0, [[9, 8]])],
        rows=[1, 2],
        starts=[len(shared) - 1, 0],
        counts=[1, len(other)],
        ids=[shared[-1:], other],
        outputs=[Output.SAMPLE] * 2,
        unwritten=[0],
        draw_from=[0, 1],
        draw_into=[1, 2],
    )
    assert run(runner, both).tokens == [*expected, alone[0]]
    assert run(runner, decode([2], [len(other)], step=2)).tokens == [alone[1]]


def test_copy_on_write_of_a_shared_block(runner: Runner, twin: Runner) -> None:
    prompt = ids(BLOCK + 3)
    (expected,) = generate(twin, [Job(prompt, 6)])
    first = run(runner, prefill(0, prompt, [1, 2])).tokens
    assert first == expected[:1]
    # Row 1 shares both blocks, then both rows write into copies or the original of block 2.
    fork = plan(
        1,
        joins=[Join(1, GREEDY, 0, [[1, 2]])],
        grows=[Grow(1, 0, 1, [7])],
        copies=[[(2, 7)]],
        rows=[0, 1],
        starts=[len(prompt)] * 2,
        counts=[1, 1],
        ids=[None, [(first[0] + 1) % KNOWN_IDS]],  # row 1 goes its own way
        outputs=[Output.SAMPLE] * 2,
        draw_from=[0, 1],
        draw_into=[0, 1],
    )
    tokens = [run(runner, fork).tokens[0]]
    for i in range(2, 5):
        tokens.append(run(runner, decode([0, 1], [len(prompt) + i - 1] * 2, step=i)).tokens[0])
    assert first + tokens == expected[:5]


def test_not_finite_logits_fail_their_draw_alone(runner: Runner, twin: Runner) -> None:
    good, bad = ids(BLOCK + 2), ids(2 * BLOCK + 1, seed=2)
    (expected,) = generate(twin, [Job(good, 3)])
    for tensor in kv_tensors(runner):
        tensor[[20, 21, 22]] = torch.nan
    both = plan(
        0,
        joins=[Join(3, GREEDY, 0, [[1, 2]]), Join(4, GREEDY, 0, [[20, 21, 22]])],
        rows=[3, 4],
        starts=[0, 2 * BLOCK],  # the bad row's "cached" blocks are poisoned
        counts=[len(good), 1],
        ids=[good, bad[-1:]],
        outputs=[Output.SAMPLE] * 2,
        draw_from=[0, 1],
        draw_into=[3, 4],
    )
    result = run(runner, both)
    assert result.tokens == [expected[0], -1]
    assert [draw for draw, _ in result.failed] == [1]
    assert "not finite" in result.failed[0][1]
    # A step planned before the host learnt of it still computes the failed row.
    result = run(runner, decode([3, 4], [len(good), len(bad)]))
    assert result.tokens[0] == expected[1]
    # Its blocks, NaN and all, serve the next sequence.
    run(runner, plan(2, leaves=[3, 4]))
    run(runner, prefill(0, good, [20, 22], step=3))
    assert run(runner, decode([0], [len(good)], step=4)).tokens == [expected[1]]


def test_ids_that_the_tokenizer_lacks_are_never_drawn(runner: Runner) -> None:
    """bugs B041: the output layer has 131 rows, the tokenizer 97 ids."""
    assert runner.capacity.vocab_size == KNOWN_IDS
    jobs = [Job(ids(5), 25, sampling=Sampling(temperature=50.0, seed=s)) for s in range(20)]
    drawn = Counter(token for tokens in generate(runner, jobs) for token in tokens)
    assert max(drawn) < KNOWN_IDS
    assert len(drawn) > KNOWN_IDS * 0.9, "at this temperature nearly every id comes up"


def test_draws_depend_on_seed_choice_and_position_only(runner: Runner) -> None:
    def jobs() -> list[Job]:
        return [
            Job(ids(3 + s, seed=s), 8, sampling=Sampling(1.3, 0, 0.9, 0.01, s)) for s in range(9)
        ]

    together = generate(runner, jobs())
    alone = [generate(runner, [job])[0] for job in jobs()]
    assert together == alone
    late = jobs()
    for i, job in enumerate(late):
        job.arrives, job.chunk = i % 3, 2
    assert generate(runner, late) == alone


def test_a_resumed_sequence_continues_its_draws(runner: Runner) -> None:
    """After preemption the engine prefills prompt and tokens again: the next draw is the same."""
    sampling = Sampling(temperature=1.0, seed=1234567890123456789)
    (whole,) = generate(runner, [Job(ids(10), 9, sampling=sampling)])
    (rest,) = generate(runner, [Job(ids(10) + whole[:4], 5, sampling=sampling)])
    assert whole[4:] == rest


def test_two_steps_in_flight(runner: Runner, twin: Runner) -> None:
    prompt = ids(11)
    (expected,) = generate(twin, [Job(prompt, 6)])
    tickets = [runner.launch(prefill(0, prompt, [1, 2, 3]))]
    tickets[0].finish()
    tokens = []
    for i in range(1, 6):
        tickets.append(runner.launch(decode([0], [len(prompt) + i - 1], step=i)))
        tickets[-1].finish()
        tokens += tickets.pop(0).result().tokens
    last = tickets[0].result()
    assert tokens + last.tokens == expected
    assert last.busy_s > 0.0
    assert last.step == 5


@pytest.mark.parametrize("backend", PROCESSORS, indirect=True, scope="session")
def test_launch_does_not_wait_for_the_device(backend: str, files: ModelFiles) -> None:
    """Where the engine would not wait either; else the thread that launches computes."""
    runner: Any = load(backend, files, **SETTINGS | {"overlap": "on"})
    gate = threading.Event()
    held = runner.worker.submit(gate.wait)
    ticket = runner.launch(prefill(0, ids(20), [1, 2, 3]))  # returns although the worker is busy
    ticket.finish()
    assert not held.done()
    gate.set()
    assert len(ticket.result().tokens) == 1
    runner.close()


def test_an_output_that_is_not_offered_is_refused(runner: Runner) -> None:
    step = prefill(0, ids(4), [1])
    with pytest.raises(EngineError, match="output kind 4"):
        runner.launch(plan(0, **_fields(step) | {"outputs": [4], "draw_from": []}))
    assert len(run(runner, step).tokens) == 1, "the refused plan changed nothing"


def test_a_broken_plan_raises_from_result(runner: Runner) -> None:
    with pytest.raises(AssertionError, match="which is free"):
        run(runner, decode([7], [3]))
    assert len(run(runner, prefill(0, ids(4), [1])).tokens) == 1


def test_a_step_without_rows_applies_its_deltas(runner: Runner) -> None:
    run(runner, plan(0, joins=[Join(2, GREEDY, 0, [[1]])]))
    with pytest.raises(AssertionError, match="joined twice"):
        run(runner, plan(1, joins=[Join(2, GREEDY, 0, [[1]])]))
    assert run(runner, plan(2, leaves=[2])).tokens == []
    run(runner, plan(3, leaves=[2]))  # named again, as after a step that broke
    run(runner, plan(4, joins=[Join(2, GREEDY, 0, [[1]])]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_runs(files: ModelFiles, backend: str, dtype: str) -> None:
    runner = load(backend, files, **SETTINGS | {"dtype": dtype})
    jobs = [Job(ids(n, seed=n), 6, chunk=5) for n in (3, 9, 30)]
    assert all(0 <= token < KNOWN_IDS for out in generate(runner, jobs) for token in out)
    assert str(kv_tensors(runner)[0].dtype) == f"torch.{dtype}"
    runner.close()


@pytest.mark.parametrize("draws", [(0, 2), (2, 0, 1), ()])
def test_only_tokens_that_are_drawn_from_pass_the_last_layer(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, draws: tuple[int, ...]
) -> None:
    passed: list[int] = []
    add_mlp = TorchOps.add_mlp

    def noted(self: TorchOps, x: torch.Tensor, *of_layer: Any) -> torch.Tensor:
        passed.append(x.shape[0])
        return add_mlp(self, x, *of_layer)

    runner = load("cpu", files, **SETTINGS)
    monkeypatch.setattr(TorchOps, "add_mlp", noted)  # the start has run steps of its own
    step = plan(
        0,
        joins=[Join(row, GREEDY, 0, [[2 * row, 2 * row + 1]]) for row in range(3)],
        rows=[0, 1, 2],
        starts=[0, 0, 0],
        counts=[1, 9, 7],
        ids=[ids(1), ids(9), ids(7)],
        outputs=[Output.SAMPLE if i in draws else Output.NONE for i in range(3)],
        draw_from=list(draws),
        draw_into=list(draws),
    )
    assert len(run(runner, step).tokens) == len(draws)
    layers = runner._forward._model.spec.layers
    runner.close()
    assert passed == [17] * (layers - 1) + [len(draws)] * bool(draws)


@pytest.mark.on_cuda
@pytest.mark.skipif(bool(WITHOUT_CUDA), reason=f"needs cuda: {WITHOUT_CUDA}")
def test_graphs_captured_beside_running_rows_change_nothing(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens before, while and after; cache, ids and tables; memory; nothing is compiled."""
    from headrace.runner import build_cuda

    rooms: list[Any] = []
    measure = build_cuda.measure_room

    def noted(*args: Any) -> Any:
        rooms.append(measure(*args))
        return rooms[-1]

    monkeypatch.setattr(build_cuda, "measure_room", noted)
    plain, runner = (load("cuda", files, **SETTINGS) for _ in range(2))
    plain._forward.graphs.close()  # each step of its is launched call by call
    jobs = [(ids(n, seed=n), 9, 12, Sampling(0.9, seed=n), n % 5) for n in range(3, 23)]
    expected = generate(plain, [Job(*job) for job in jobs])
    assert generate(runner, [Job(*job) for job in jobs]) == expected, "some are captured on use"

    prompt, tables = ids(2 * BLOCK + 3), ([5, 6, 7, 8], [5, 6, 9, 10])
    starts = (0, 2 * BLOCK)  # the second finds two blocks of the first
    for each in (runner, plain):
        for row, (table, start) in enumerate(zip(tables, starts, strict=True)):
            run(each, prefill(row, prompt, table, start, step=100 + row))
    forward = runner._forward
    kept = [*kv_tensors(runner), forward.store.ids, forward.state._all]
    free_bytes, _ = torch.cuda.mem_get_info()
    position, left = len(prompt), True
    while left or position < len(prompt) + 4:
        before = [tensor.clone() for tensor in kept]
        left = runner.idle()
        torch.cuda.synchronize()
        assert all(torch.equal(old, new) for old, new in zip(before, kept, strict=True))
        if position < 4 * BLOCK:
            step = decode([0, 1], [position] * 2, step=200 + position)
            assert run(runner, step).tokens == run(plain, step).tokens
            position += 1
    counts = runner.counters()
    assert counts["graphs_captured"] == counts["graphs_planned"] > 20
    assert counts["jit_compiles"] == 0
    assert free_bytes - torch.cuda.mem_get_info()[0] <= rooms[-1].graphs + (64 << 20)
    run(runner, plan(300, leaves=[0, 1]))
    assert generate(runner, [Job(*job) for job in jobs]) == expected
    for each in (runner, plain):
        each.close()
