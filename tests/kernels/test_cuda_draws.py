"""Everything that a row may ask of its draws, through the CUDA runner in Triton's interpreter:
tokens and log-probabilities are those that `sampling.reference` finds in the same logits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.protocol import Masks
from headrace.messages import (
    Dry,
    Grow,
    Join,
    Logprobs,
    Lz,
    Output,
    Repetition,
    Rules,
    Sampling,
    StepPlan,
    StepResult,
)
from headrace.sampling import reference
from headrace.sources.files import ModelFiles
from tests.golden.families import save
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import BLOCK_SIZE, files, interpreted, small

__all__ = ["files", "small"]
pytestmark = pytest.mark.skipif(CUDA, reason="the backend suite runs on the GPU itself")

VOCAB = 67
PROMPT = [11, 7, 3, 11, 7]


@dataclasses.dataclass
class Sequence:
    row: int
    sampling: Sampling
    ids: list[int]
    prompt: int
    choice: int = 0
    computed: int = 0


class Engine:
    """Plans for a runner, whose draws are compared with the reference as they come."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.step = runner, 0
        self.live: dict[int, Sequence] = {}
        self.joins: list[Join] = []
        self.leaves: list[int] = []
        self.grows: list[Grow] = []
        self.copies: list[tuple[int, int]] = []

    def join(
        self, row: int, sampling: Sampling, blocks: list[int], ids: list[int], choice: int = 0
    ) -> Sequence:
        history = list(ids) if sampling.needs_history else []
        self.joins.append(
            Join(row, sampling, choice, [blocks], prompt_tokens=len(ids), history=history)
        )
        self.live[row] = Sequence(row, sampling, list(ids), len(ids), choice)
        return self.live[row]

    def run(
        self,
        *rows: int,
        chunk: int = 99,
        into: list[tuple[int, int]] | None = None,
        masks: dict[int, list[int]] | None = None,
        prompts: list[tuple[int, int, int]] | None = None,
    ) -> StepResult:
        """into: (forward row, device row) of each draw; masks: draw -> ids."""
        self.step += 1
        starts, counts, ids = [], [], []
        for row in rows:
            one = self.live[row]
            count = min(chunk, len(one.ids) - one.computed)
            starts.append(one.computed)
            counts.append(count)
            drawn = one.computed >= one.prompt
            ids.append(None if drawn else one.ids[one.computed : one.computed + count])
            one.computed += count
        draws = [(i, row) for i, row in enumerate(rows)] if into is None else into
        drawn_from = {at for at, _ in draws}
        kinds = [Output.SAMPLE if i in drawn_from else Output.NONE for i in range(len(rows))]
        for at, _, _ in prompts or []:
            kinds[at] = Output.PROMPT_LOGPROBS
        plan = StepPlan(
            self.step, self.leaves, self.joins, self.grows, [self.copies], list(rows), starts,
            counts, ids, kinds, [], [i for i, _ in draws], [row for _, row in draws],
            prompts=prompts or [],
        )  # fmt: skip
        self.leaves, self.joins, self.grows, self.copies = [], [], [], []
        ticket = self.runner.launch(plan)
        logits = self.runner._forward.place.buffers.logits.clone()
        ticket.finish(self._masks(masks or {}))
        result: StepResult = ticket.result()
        sources = list(dict.fromkeys(plan.draw_from))
        for j, (at, row) in enumerate(draws):
            self._check(j, row, logits[sources.index(at)], result, (masks or {}).get(j))
        return result

    def _masks(self, masks: dict[int, list[int]]) -> Masks | None:
        if not masks:
            return None
        bits = np.zeros((len(masks), -(-VOCAB // 32) * 32), np.bool_)
        for at, ids in enumerate(masks.values()):
            bits[at, ids] = True
        return Masks(list(masks), np.packbits(bits, axis=1, bitorder="little").view(np.int32))

    def _check(
        self, j: int, row: int, logits: torch.Tensor, result: StepResult, ids: list[int] | None
    ) -> None:
        one, z = self.live[row], logits.double().numpy()
        mask = None
        if ids is not None:
            mask = np.zeros(VOCAB, np.bool_)
            mask[ids] = True
        want = reference.draw(z, one.sampling, one.choice, one.ids, one.prompt, mask)
        if want is None:
            assert result.tokens[j] == -1
            assert (j, "no token is allowed") in result.failed
            return
        assert result.tokens[j] == want, f"step {self.step}, row {row}: {one}"
        if one.sampling.logprobs >= 0:
            alike(result.logprobs[j], reference.logprobs(z, want, one.sampling.logprobs))
        elif result.logprobs:
            assert result.logprobs[j] is None
        one.ids.append(want)


def alike(one: Logprobs | None, want: Logprobs) -> None:
    assert one is not None
    assert (one.rank, one.top_ids) == (want.rank, want.top_ids)
    assert one.logprob == pytest.approx(want.logprob, abs=1e-5)
    assert one.top == pytest.approx(want.top, abs=1e-5)


PENALISED = Sampling(
    temperature=0.9,
    seed=3,
    repetition=Repetition(1.3, 0.2, 0.4),
    dry=Dry(2.0, 1.5, 1, breakers=[60]),
    lz=Lz(0.4),
    logprobs=3,
)
RULED = Sampling(
    temperature=0.0,
    rules=Rules(
        bias=[(5, 3.0), (9, -100.0)],
        allowed=list(range(0, VOCAB, 2)),
        banned=[8],
        bad_words=[[7, 20], [44]],
        min_tokens=2,
        held=[0, 2, 4],
    ),
)
CUT = Sampling(seed=9, top_n_sigma=1.2, typical_p=0.8, logprobs=0)


def test_rows_of_every_kind_together(files: ModelFiles) -> None:
    """Chunks, steady steps, a shared first block, masks, a row that is taken again."""
    engine = Engine(interpreted(files))
    engine.join(0, PENALISED, [3, 1, 8, 12], PROMPT)
    engine.run(0, chunk=3, into=[])
    engine.run(0)
    engine.join(1, RULED, [5, 2, 9], PROMPT)
    engine.join(2, Sampling(seed=4), [6, 7, 10], PROMPT[:2])
    engine.run(0, 1, 2)
    engine.run(0, 1, 2, masks={2: [1, 5, 33, 66], 0: list(range(40))})
    engine.leaves = [1]
    del engine.live[1]
    engine.join(1, CUT, [2, 5], PROMPT[:3])
    engine.run(0, 2, 1)
    engine.leaves = [0, 1]
    engine.join(0, Sampling(temperature=0.0), [11, 13], PROMPT)
    engine.join(1, Sampling(seed=1), [1, 3], PROMPT[:1])
    plain = engine.run(2, 0, 1)
    assert plain.logprobs == []
    engine.runner.close()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Every layer has a window: no KV group keeps all tokens."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    folder = tmp_path_factory.mktemp("windowed")
    return save("mistral", folder, sliding_window=4, vocab_size=VOCAB, **sizes, **heads)[1]


def test_history_outlives_a_window(windowed: ModelFiles) -> None:
    """Blocks that went back are another sequence's, whose ids are others; a hit names the blocks of
    the last window alone."""
    engine = Engine(interpreted(windowed))
    first = engine.join(0, PENALISED, [3, 1, 8], [*PROMPT, 60, 11])
    engine.run(0)
    engine.run(0)
    assert first.computed == 2 * BLOCK_SIZE, "its next query reads positions 5 to 8"
    engine.join(1, PENALISED, [3, 7], [20, 20, 41])
    engine.run(0, 1)
    engine.join(2, PENALISED, [3, 1, 9], first.ids[: 2 * BLOCK_SIZE + 1], choice=1)
    engine.live[2].computed = 2 * BLOCK_SIZE
    engine.run(0, 1, 2)
    engine.leaves = [0]
    engine.join(0, PENALISED, [4, 5], [33, 2, 33, 2, 33])
    engine.run(1, 2, 0)
    engine.runner.close()


def test_forks_share_what_was_said(files: ModelFiles) -> None:
    """n = 3 of one prompt, penalised: each sees its own copy of the last block."""
    engine = Engine(interpreted(files))
    engine.join(0, PENALISED, [3, 1], PROMPT)
    engine.join(1, PENALISED, [3, 1], PROMPT, choice=1).computed = len(PROMPT)
    engine.join(2, Sampling(), [3, 1], PROMPT, choice=2).computed = len(PROMPT)
    engine.run(0, into=[(0, 0), (0, 1), (0, 2)])
    engine.grows = [Grow(0, 0, 1, [9, 4]), Grow(1, 0, 1, [10, 5]), Grow(2, 0, 2, [6])]
    engine.copies = [(1, 9), (1, 10)]
    engine.run(0, 1, 2)
    engine.run(0, 1, 2)
    engine.runner.close()


def test_a_row_that_nothing_is_left_of_fails_alone(files: ModelFiles) -> None:
    engine = Engine(interpreted(files))
    engine.join(0, RULED, [3, 1], PROMPT)
    engine.join(1, PENALISED, [5, 2], PROMPT)
    result = engine.run(0, 1, masks={0: [1, 3]})
    assert [j for j, _ in result.failed] == [0]
    engine.runner.close()


def test_lists_that_find_no_room_refuse_their_row(files: ModelFiles) -> None:
    engine = Engine(interpreted(files))
    lists = engine.runner._state._lists
    assert lists.take(lists.size - 10) == 0
    engine.joins.append(Join(0, RULED, 0, [[3, 1]], prompt_tokens=3))
    engine.live[0] = Sequence(0, Sampling(), PROMPT[:3], 3)
    engine.join(1, PENALISED, [5, 2], PROMPT)
    plan = StepPlan(
        1, [], engine.joins, [], [[]], [0, 1], [0, 0], [3, 5], [PROMPT[:3], PROMPT],
        [1, 1], [], [0, 1], [0, 1],
    )  # fmt: skip
    ticket = engine.runner.launch(plan)
    ticket.finish()
    result = ticket.result()
    assert [j for j, _ in result.failed] == [0]
    assert "lists of ids" in result.failed[0][1]
    assert result.tokens[1] >= 0
    engine.runner.close()


def test_prompt_logprobs(files: ModelFiles) -> None:
    """In slices: six tokens, room for four rows of logits. A chunk names the id after it."""
    runner = interpreted(files)
    forward = runner._forward
    long = [5, 60, 42, 42, 9, 33]
    engine = Engine(runner)
    engine.join(0, Sampling(temperature=0.0), [3, 1], long)
    engine.run(0, prompts=[(0, 0, -1)])  # all tokens go through the last layer
    seen = [forward.logits_of(torch.tensor([i], dtype=torch.int32))[0].clone() for i in range(6)]
    engine.leaves = [0]
    asked = Sampling(seed=2, logprobs=2)
    engine.join(0, asked, [4, 2], long)
    engine.join(1, Sampling(temperature=0.0), [7, 8], long)
    result = engine.run(0, 1, chunk=4, into=[], prompts=[(0, 1, long[4]), (1, 0, -1)])
    first, short = result.prompt_logprobs
    assert [one.top_ids for one in short] == [[], [], []]
    result = engine.run(0, prompts=[(0, 1, -1)])
    whole = first + result.prompt_logprobs[0]
    assert len(whole) == len(long) - 1
    for i, one in enumerate(whole):
        want = reference.logprobs(seen[i].double().numpy(), long[i + 1], 1)
        assert one.top_ids == want.top_ids
        assert math.isclose(one.logprob, want.logprob, abs_tol=1e-4)
    assert [one.logprob for one in short] == pytest.approx([one.logprob for one in first[:3]])
    runner.close()
