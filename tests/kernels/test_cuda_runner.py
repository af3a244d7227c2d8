"""The CUDA runner in Triton's interpreter, against the CPU runner: one scenario, no graphs.

The interpreter runs each program of a grid in Python, so everything is as small as it goes. On a
machine with a GPU the contract suite runs the runner as users do; see `tests/backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from headrace.config import Settings
from headrace.engine.protocol import Capacity, Runner, Ticket
from headrace.messages import Grow, Sampling, StepPlan
from headrace.models.kv_layout import layout_of
from headrace.runner.build import read_facts
from headrace.runner.weights import load_model
from headrace.sources.files import ModelFiles
from tests.backend.runner_contract import Steps
from tests.backend.tap_contract import ALLOWED, EDITED
from tests.devices import load
from tests.golden.reference import tiny_model
from tests.kernels.conftest import CUDA
from tests.kernels.test_flash_chunks import CALLS, fwd

pytestmark = pytest.mark.skipif(CUDA, reason="the contract suite runs on the GPU itself")

BLOCKS, BLOCK_SIZE, ROWS, MAX_MODEL_LEN, MAX_TOKENS = 16, 4, 4, 32, 12
FIRST = [11, 7, 3]
INNER = [9, 1, 30, 2, 2, 66, 0, 8, 51]  # more than a graph holds, and of no interest
LONG = [5, 60, 42, 42, 9, 33, 2]  # a block and three quarters
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 67,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
DRAWN = Sampling(temperature=0.9, top_p=0.8, seed=7)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that pad little; a sampler that looks at few logits at a time."""
    from headrace.kernels.edited import Wide
    from headrace.kernels.logprobs import LogprobScratch
    from headrace.kernels.sampling import Scratch
    from headrace.runner import draws, forward

    monkeypatch.setattr(forward, "ALONE_SIZES", (1, 4))
    monkeypatch.setattr(forward, "MIXED_SIZES", (8,))
    monkeypatch.setattr(forward, "MIXED_SINGLES", 1)
    sizes: list[tuple[Any, dict[str, int]]] = [
        (Scratch, {"chunk": 32, "sample": 16}),
        (LogprobScratch, {"chunk": 128}),
        (Wide, {"chunk": 32, "positions": 4}),
    ]
    for memory, small_sizes in sizes:
        monkeypatch.setattr(memory, "allocate", functools.partial(memory.allocate, **small_sizes))
    monkeypatch.setattr(draws, "WIDE_ROWS", 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    _, files = tiny_model("qwen2", tmp_path_factory.mktemp("interpreted"), **SIZES)
    return files


def interpreted(
    files: ModelFiles,
    *,
    folded: bool = False,
    graphed: bool = True,
    blocks: int = 0,
    tiles: Any = None,
) -> Any:
    """A CudaRunner on CPU tensors; `folded`: norms in the weights, products of the library. blocks:
    of its cache; 0 = BLOCKS a KV group. tiles: of gate and up, from 4 tokens on."""
    from headrace.backends.cuda import buffers as memory
    from headrace.backends.cuda.device import Card
    from headrace.kernels.tuned import default, of_heads
    from headrace.runner.build_cuda import Plan, forward_on
    from headrace.runner.cuda_runner import CudaRunner
    from headrace.runner.taps import NOTE

    facts = read_facts(Settings(dtype="float32"), files)
    model = load_model(facts.spec, facts.checkpoint, torch.float32)
    if folded:
        model.fold_norms()
    plan = Plan(ROWS, MAX_TOKENS, BLOCK_SIZE, MAX_MODEL_LEN)
    card = Card("interpreter", 0, 1, (0, 0))
    with mock.patch.object(memory, "MLP_TOKENS", 5 if folded else MAX_TOKENS):  # by pieces
        buffers = memory.Buffers(facts.spec, MAX_TOKENS, ROWS, torch.float32, torch.device("cpu"))

    def choose(kind: str, m: int, n: int, k: int) -> Any:
        """As on a card that somebody measured, with another shape."""
        if folded:
            return None
        heads = of_heads(m, n, k, facts.spec.head_dim) if facts.spec.qk_norm else None
        return heads if kind == "qkv" and heads is not None else default(m, n, k)

    windows = layout_of(facts.spec).windows
    blocks = blocks or BLOCKS * len(windows)
    forward = forward_on(
        model,
        plan,
        blocks,
        card,
        buffers,
        choose=choose,
        choose_tiles=lambda tokens, n, k: tiles if tokens >= 4 else None,
        graphed=graphed,
    )
    vocab = facts.spec.vocab_size
    capacity = Capacity(
        [blocks], BLOCK_SIZE, ROWS, MAX_MODEL_LEN, vocab, draws_note=NOTE, windows=windows
    )
    return CudaRunner(forward, capacity)


def on_the_cpu(files: ModelFiles, kv_groups: int = 1) -> Runner:
    runner: Runner = load(
        "cpu",
        files,
        dtype="float32",
        kv_blocks=kv_groups * BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=ROWS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        threads=1,
    )
    return runner


def scenario(runner: Runner) -> dict[str, list[int]]:
    """What happens -> the tokens drawn in those steps, in their order."""
    steps, said = Steps(runner), {}

    def decode(*rows: int, times: int = 1) -> list[int]:
        tokens: list[int] = []
        for _ in range(times):
            for row in rows:
                steps.forward(row, None)
            tokens += steps.run()
        return tokens

    steps.join(0, [3, 1, 8])
    steps.forward(0, FIRST)
    said["a prompt"] = steps.run()
    said["its first decode"] = decode(0)
    said["steady"] = decode(0, times=2)

    steps.join(1, [5, 2], DRAWN, choice=0)
    steps.forward(0, None)
    steps.forward(1, LONG[:6], draw_into=())
    said["a chunk beside a decode"] = steps.run()
    steps.join(2, [5, 2], DRAWN, choice=1)
    steps.forward(0, None)
    steps.forward(1, LONG[6:], draw_into=(1, 2))
    said["two draws from one row"] = steps.run()
    steps.length[2] = len(LONG)
    steps.grows = [Grow(1, 0, 1, [9, 10]), Grow(2, 0, 2, [11])]
    steps.copies = [(2, 9)]
    said["a fork writes into its copy"] = decode(0, 1, 2)
    said["three steady"] = decode(0, 1, 2, times=2)

    first = said["a prompt"][0]
    steps.join(3, [3, 12])  # the first block of row 0 holds FIRST and the first token drawn
    for row in (0, 1, 2):
        steps.forward(row, None)
    steps.forward(3, [first], start=len(FIRST), written=False)
    said["a fully cached prompt"] = steps.run()
    assert said["a fully cached prompt"][-1] == said["its first decode"][0]

    steps.leaves = [1]
    said["after a leave"] = decode(0, 2, 3)
    steps.join(1, [10, 9, 7], Sampling(temperature=1.1, seed=2**64 - 1))
    for row in (0, 2, 3):
        steps.forward(row, None)
    steps.forward(1, LONG[:5])
    said["a row taken again"] = steps.run()
    steps.leaves = [2]
    steps.join(2, [2, 5, 11])
    for row in (0, 1, 3):
        steps.forward(row, None)
    steps.forward(2, LONG)
    said["more than a graph holds"] = steps.run()
    steps.leaves = [3]
    steps.join(3, [0, 4, 6])
    steps.forward(3, INNER, draw_into=())
    assert steps.run() == []
    steps.forward(3, [7])
    said["after a chunk that draws nothing"] = steps.run()
    for row in (0, 1):
        steps.forward(row, None)
    steps.forward(3, [7], draw_into=(), start=steps.length[3] - 1, written=False)
    said["beside a cached prompt that draws nothing"] = steps.run()
    steps.forward(3, [7], draw_into=(), start=steps.length[3] - 1, written=False)
    assert steps.run() == []
    for row in (0, 1, 2, 3):
        steps.forward(row, None)
    ahead = steps.launch()
    for row in (0, 1, 2, 3):
        steps.forward(row, None)
    behind = steps.launch()
    said["two in flight"] = [*ahead.result().tokens, *behind.result().tokens]
    return said


def test_a_scenario_draws_the_tokens_of_the_cpu(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.backends.cuda.ops import CudaOps

    passed: set[tuple[int, int]] = set()  # tokens of a step, those that go through the last layer
    add_mlp = CudaOps.add_mlp

    def noted(self: Any, x: torch.Tensor, *of_layer: Any) -> torch.Tensor:
        passed.add((self._ids.shape[0], x.shape[0]))
        return add_mlp(self, x, *of_layer)

    monkeypatch.setattr(CudaOps, "add_mlp", noted)
    runner = interpreted(files)
    said = scenario(runner)
    assert said == scenario(on_the_cpu(files))
    assert passed == {(1, 1), (4, 4), (8, 4), (10, 4)}, "none of the step that draws nothing"
    ways = {name: count for name, count in runner.counters().items() if name.startswith("steps_")}
    assert ways == {"steps_alone": 15, "steps_mixed": 1, "steps_crowd": 1, "steps_eager": 2}
    runner.close()


def test_chunks_of_graphs_by_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In graphs from a size on, and no token changes. What does not fit is launched call by
    call, and too long a sequence is our kernel's."""
    from headrace.backends.cuda import chunk_choice, flash_chunks
    from headrace.kernels.gather_keys import room_of
    from headrace.runner import forward

    monkeypatch.setattr(forward, "ALONE_PAIRS", 8)
    monkeypatch.setattr(forward, "LIBRARY_TOKENS", 8)
    monkeypatch.setattr(flash_chunks, "LEAST_ROWS", 8)  # four tokens
    monkeypatch.setattr(flash_chunks, "BUFFER_BYTES", 1)
    monkeypatch.setattr(flash_chunks, "load", lambda: fwd)
    monkeypatch.setattr(flash_chunks, "unsupported", lambda *args: "")
    monkeypatch.setattr(chunk_choice, "find_spec", lambda name: name == "fa3_fwd" or None)
    _, files = tiny_model("qwen2", tmp_path, **SIZES | {"num_hidden_layers": 2})
    ours = interpreted(files)
    assert ours._forward.prepare_attention().value == "flash"
    assert ours._forward._attention.choice.library.room == room_of(MAX_TOKENS)
    CALLS.clear()
    drawn: list[list[int]] = []
    for runner in (ours, on_the_cpu(files)):
        steps = Steps(runner)
        steps.join(0, [3, 1, 8, 6])
        steps.join(1, [5, 2, 9, 7])
        steps.forward(0, LONG, draw_into=())
        assert steps.run() == []
        steps.forward(1, LONG[:3])
        tokens = steps.run()
        steps.forward(1, None)
        steps.forward(0, LONG[:5])  # behind seven
        tokens += steps.run()
        steps.forward(1, LONG[:3])
        steps.forward(0, LONG[2:5])
        tokens += steps.run()
        drawn.append(tokens)
        runner.close()
    assert drawn[0] == drawn[1]
    told = [(call["counts"], call["lengths"]) for call in CALLS]
    # Of the one layer that is not the last; two sequences have no room, and are too short alone.
    assert told == [([7], [7]), ([3], [3]), ([5], [12])]


def test_recorded_rows_show_what_the_cpu_shows(files: ModelFiles) -> None:
    """Of the stages that the kernels can show; the contract suite has the rest."""
    shown = []
    for runner in (interpreted(files), on_the_cpu(files)):
        steps = Steps(runner)
        steps.join(0, [3, 1, 8], EDITED, known=FIRST)
        steps.joins[0] = msgspec.structs.replace(steps.joins[0], record=True)
        steps.forward(0, FIRST)
        results = [steps.launch().result()]
        steps.forward(0, None)
        results.append(steps.launch(steps.allow({0: ALLOWED})).result())
        shown.append([(result.tokens, tap) for result in results for tap in result.taps])
        runner.close()
    assert len(shown[0]) == len(shown[1]) == 2
    for (tokens, tap), (others, other), last in zip(*shown, ("penalties", "mask"), strict=True):
        assert tokens == others
        assert (tap.draw, tap.greedy, tap.uniform) == (0, False, -1.0)
        assert [stage.name for stage in tap.stages] == ["logits", last]
        known = {stage.name: stage for stage in other.stages}
        for stage in tap.stages:
            assert (stage.kept, stage.ids) == (known[stage.name].kept, known[stage.name].ids)
            assert stage.values == pytest.approx(known[stage.name].values, abs=1e-5)


def test_folded_norms_change_no_token(files: ModelFiles) -> None:
    drawn = []
    for runner in (interpreted(files, folded=True), on_the_cpu(files)):
        steps = Steps(runner)
        steps.join(0, [3, 1, 8])
        steps.join(1, [5, 2], DRAWN)
        steps.forward(0, FIRST)
        steps.forward(1, LONG)
        tokens = steps.run()
        for _ in range(2):
            steps.forward(0, None)
            steps.forward(1, None)
            tokens += steps.run()
        drawn.append(tokens)
        runner.close()
    assert drawn[0] == drawn[1]


def test_steady_steps_send_nothing(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second decode step of a batch on: neither columns nor deltas."""
    from headrace.backends.cuda.upload import Upload

    sent: list[int] = []
    send = Upload.send

    def noted(self: Upload, target: torch.Tensor, count: int) -> None:
        sent.append(count)
        send(self, target, count)

    monkeypatch.setattr(Upload, "send", noted)
    steps = Steps(interpreted(files))
    uploads: list[int] = []

    def step(ids: list[int] | None = None) -> None:
        sent.clear()
        steps.forward(0, ids)
        steps.run()
        uploads.append(len(sent))

    steps.join(0, [3, 1])
    step(FIRST)
    for _ in range(3):
        step()
    steps.grows = [Grow(0, 0, 2, [8])]
    step()
    step([4])
    step()
    assert uploads == [2, 1, 0, 0, 1, 1, 0]
    steps.runner.close()


def repeated(graphs: Any, key: tuple[Any, int]) -> Any:
    """Stands for a captured graph: does again what it would hold."""
    return SimpleNamespace(replay=functools.partial(graphs._work, *key))


def share_a_prefix(runner: Runner, between: Callable[[], object]) -> list[int]:
    """Tokens of two sequences over one prefix; `between` is called before each step."""
    steps, prompt = Steps(runner), [*LONG, 66, 0]
    launch = runner.launch

    def launch_after(plan: StepPlan) -> Ticket:
        between()
        return launch(plan)

    with mock.patch.object(runner, "launch", launch_after):
        steps.join(0, [3, 1, 8, 6])
        steps.forward(0, prompt)
        tokens = steps.run()
        for _ in range(3):
            steps.forward(0, None)
            tokens += steps.run()
        steps.join(1, [3, 12, 5, 2], DRAWN)  # its first block is what row 0 has written
        steps.forward(0, None)
        steps.forward(1, prompt[BLOCK_SIZE:], start=BLOCK_SIZE)
        tokens += steps.run()
        flying = []
        for _ in range(2):
            for row in (0, 1):
                steps.forward(row, None)
            flying.append(steps.launch())
        for ticket in flying:
            tokens += ticket.result().tokens
    return tokens


def test_without_graphs_nothing_is_captured_and_steps_are_the_same(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.runner.graphs import Graphs

    monkeypatch.setattr(Graphs, "_record", None)  # whoever captures fails
    runner = interpreted(files, graphed=False)
    monkeypatch.setattr(runner._forward.graphs, "_stream", "a stream")  # as on a device
    runner._forward.graphs.capture(runner._forward.needed_graphs)
    assert not runner.idle()
    assert runner.counters()["graphs_planned"] == 0
    steps = Steps(runner)
    steps.join(0, [3, 1, 8])
    steps.forward(0, FIRST)
    said = steps.run()
    steps.forward(0, None)
    said += steps.run()
    plain = Steps(on_the_cpu(files))
    plain.join(0, [3, 1, 8])
    plain.forward(0, FIRST)
    wanted = plain.run()
    plain.forward(0, None)
    assert said == wanted + plain.run()
    assert runner.counters()["graphs_captured"] == 0


def test_captures_between_steps_change_nothing(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs, is cached or in flight; each size, and each of them again and again."""
    from headrace.runner import graphs as module
    from headrace.runner.graphs import Graphs

    monkeypatch.setattr(Graphs, "_record", repeated)
    monkeypatch.setattr(module, "OFTEN", 2)
    monkeypatch.setattr(module, "RARELY", 2)
    runner = interpreted(files)
    forward = runner._forward
    graphs, store = forward.graphs, forward.store
    monkeypatch.setattr(graphs, "_stream", "a stream")  # as on a device

    def between() -> None:
        if graphs.captured in (0, graphs.planned):
            graphs._graphs.clear()
            graphs.capture(0)
        assert runner.idle()

    assert graphs.planned == 4
    expected = share_a_prefix(on_the_cpu(files), lambda: None)
    assert share_a_prefix(runner, between) == expected

    kept = [store._all, store.ids, forward.state._all, forward._inputs["eager"]._device]
    before = [tensor.clone() for tensor in kept]
    graphs._graphs.clear()
    graphs.capture(0)
    for captured in range(graphs.planned):
        assert runner.counters()["graphs_captured"] == captured
        assert runner.idle()
    assert not runner.idle()
    assert runner.counters()["graphs_captured"] == runner.counters()["graphs_planned"] == 4
    assert all(torch.equal(old, new) for old, new in zip(before, kept, strict=True))

    graphs._graphs.clear()
    graphs.capture(0)
    steps = Steps(runner)
    steps.leaves = [0, 1]
    assert steps.run() == []
    assert share_a_prefix(runner, lambda: None) == expected
    assert set(graphs._graphs) == {("alone", 1), ("alone", 4)}, "what comes a second time"
    runner.close()
