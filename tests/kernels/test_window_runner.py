"""Layers with a window on the CUDA runner in Triton's interpreter, under the engine's own scheduler
and a cache too small for all tokens: the tokens are those of the CPU runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import Settings
from headrace.engine.loop import Engine
from headrace.kv.groups import GroupedCache
from headrace.launch import make_cache
from headrace.messages import Sampling, Submit
from tests.devices import load
from tests.golden.families import save
from tests.kernels import test_cuda_runner
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    ROWS,
    interpreted,
)

pytestmark = pytest.mark.skipif(CUDA, reason="the golden tests run on the GPU itself")
small = test_cuda_runner.small
VOCAB, BLOCKS = 35, 11
TINY: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": VOCAB,
    "num_key_value_heads": 1, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 5,
    "max_position_embeddings": MAX_MODEL_LEN,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
SIZES: dict[str, Any] = {
    "kv_blocks": BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": ROWS,
    "max_num_batched_tokens": MAX_TOKENS, "max_model_len": MAX_MODEL_LEN, "dtype": "float32",
}  # fmt: skip
GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=0.8, seed=5)
LONG = [(7 * j * j + 3) % VOCAB for j in range(13)]  # a chunk and one more


def answers(runner: Any) -> tuple[list[list[int]], list[int], int]:
    """The tokens of each choice, the cached tokens of each request, the preemptions."""
    kv = make_cache(runner.capacity, prefix_caching=True)
    assert isinstance(kv, GroupedCache)
    engine = Engine(Settings(**SIZES), kv, runner, overlap=True)
    engine.scheduler.headroom_tokens = 0  # who leaves room is preempted less
    said: dict[tuple[int, int], list[int]] = {}
    cached: list[int] = []
    preemptions = 0
    for turn in range(2):
        if turn == 0:
            engine.submit(0, Submit(0, LONG, 5, DRAWN, n=2))
            engine.submit(0, Submit(1, [5, 9], 8, GREEDY))
        else:
            engine.submit(0, Submit(2, [5, 9, *said[1, 0]], 1, GREEDY))
        while engine.has_work:
            for out in engine.turn().values():
                for handle, choice, token in zip(out.handles, out.choices, out.tokens, strict=True):
                    said.setdefault((handle, choice), []).append(token)
                for done in out.dones:
                    assert not done.error, done
                    cached.append(done.cached_tokens)
                    preemptions += done.preemptions
        kv.check()
        assert kv.used_blocks == 0
    engine.close()
    return [said[key] for key in sorted(said)], cached, preemptions


def test_tokens_of_the_cpu_in_a_small_cache(tmp_path: Path) -> None:
    """Forks, chunks, blocks that go back and are another group's or sequence's next, preemption and
    a hit."""
    _, files = save("gemma3", tmp_path, **TINY)
    ours = interpreted(files, blocks=BLOCKS)
    assert ours.capacity.windows == (0, 5)
    got = answers(ours)
    wanted = answers(load("cpu", files, threads=1, **SIZES))
    assert got == wanted
    tokens, cached, preemptions = got
    assert [len(choice) for choice in tokens] == [5, 5, 8, 1]
    assert preemptions > 0
    assert max(cached) > 0
