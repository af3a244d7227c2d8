"""Every family against transformers: logits at every position, whole, in chunks, after a cached
prefix and among others; greedy tokens; bfloat16 (bugs B099, B100)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.backends.choose import settled
from headrace.backends.cpu import computes
from headrace.backends.cpu.batch import Batch, Forward
from headrace.backends.cpu.forward import TorchForward
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.backends.cpu.kv_store import KvStore
from headrace.backends.cpu.native import NativeForward
from headrace.config import Settings
from headrace.engine.protocol import Capacity
from headrace.errors import ConfigError, ModelError
from headrace.models.features import missing
from headrace.models.kv_layout import layout_of
from headrace.models.layers import Decoder
from headrace.models.outline import Outline
from headrace.models.registry import own_layers
from headrace.models.spec import read_spec
from headrace.native.library import Library
from headrace.native.library import load as native_library
from headrace.native.pool import Pool
from headrace.runner.build import arranged, load_runner
from headrace.runner.checkpoint import open_checkpoint
from headrace.runner.pack_model import pack_model
from headrace.runner.runner import CpuRunner
from headrace.runner.weights import load_model
from headrace.runner.worker import InlineWorker
from headrace.sources.files import ModelFiles
from tests.devices import MARKS, WITHOUT_CUDA, WITHOUT_NATIVE, load
from tests.golden.families import FAMILIES, MIXTURES, VOCAB, lengths, save
from tests.golden.on_cuda import OnCuda
from tests.golden.product import Case, on_processor, run
from tests.golden.reference import NEAR_TIE, agree, greedy
from tests.golden.stepping import Job, generate

BLOCK = 8
WIDTH = 20  # blocks of a table
WHOLE = 1 << 30
OVERWRITTEN = 17000  # as bits of bfloat16, 640
GREEDY_TOKENS = 64
NATIVE = (
    "llama-biases", "llama-yarn", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "glm",
    "glm4",
)  # fmt: skip

# Refused by name at load: models without a file of ours.
NOT_ON_CUDA = ("gpt-neox", "olmo2", "stablelm", "starcoder2", "granite")


@dataclass
class Family:
    """A model of transformers, its files for ours, and what the first says of some prompts."""

    name: str
    theirs: Any
    files: ModelFiles
    prompts: list[list[int]]

    @cached_property
    def logits(self) -> list[Tensor]:
        """[tokens, vocab] of each prompt."""
        found = []
        for prompt in self.prompts:
            said(self.theirs, [1])  # "dynamic" turns by the longest prompt since a short one
            found.append(said(self.theirs, prompt))
        return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models so small are faster so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name: str = request.param
    model, files = save(name, tmp_path_factory.mktemp(name))
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths(FAMILIES[name])]
    return Family(name, model, files, prompts)


@torch.inference_mode()
def said(model: Any, prompt: list[int]) -> Tensor:
    """transformers' logits [tokens, vocab], without a cache."""
    logits: Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
    return logits


class Ours:
    """A loaded model and its cache; sequence i has the blocks i * WIDTH and following of each KV
    group. What no later position of a sequence reads is overwritten, as if others had got it."""

    def __init__(
        self, files: ModelFiles, dtype: torch.dtype, sequences: int, *, native: bool = False
    ) -> None:
        self.spec = spec = read_spec(files)
        checkpoint = arranged(files, spec, Settings())
        model = load_model(spec, checkpoint, dtype)
        self.ends: list[int] | None = None  # of prefixes that are to be hit later
        self.layout = layout = layout_of(spec)
        groups = len(layout.windows)
        self.memory = KvMemory(
            layers=layout.layers,
            places=layout.places,
            blocks=groups * sequences * WIDTH,
            kv_heads=spec.kv_heads,
            block_size=BLOCK,
            head_dim=spec.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            keys_are_values=spec.keys_are_values,
        )
        self.forward: Forward = TorchForward(model, KvStore(self.memory))
        if native:
            self.forward = native_forward(model, self.memory, rows=sequences * 16)
        self.tables = np.arange(self.memory.blocks).reshape(groups, sequences, WIDTH)
        self.capacity = Capacity(
            [self.memory.blocks],
            BLOCK,
            sequences,
            spec.max_positions,
            spec.vocab_size,
            windows=layout.windows,
        )

    @property
    def runner(self) -> CpuRunner:
        """Over the same cache."""
        return CpuRunner(self.forward, self.memory, self.capacity, InlineWorker())

    def close(self) -> None:
        self.forward.close()

    def logits(
        self, prompts: list[list[int]], chunk: int, starts: list[int] | None = None
    ) -> list[Tensor]:
        """Of every position from `starts` on, all prompts side by side, `chunk` tokens a step."""
        at = starts or [0] * len(prompts)
        found: list[list[Tensor]] = [[] for _ in prompts]
        while rows := [i for i, prompt in enumerate(prompts) if at[i] < len(prompt)]:
            parts = [prompts[i][at[i] : at[i] + chunk] for i in rows]
            counts = [len(part) for part in parts]
            batch = Batch(
                np.array(list(chain.from_iterable(parts))),
                self.tables,
                rows,
                [at[i] for i in rows],
                counts,
                [],
                [],
                whole=True,
                prompts=[len(prompts[i]) for i in rows],
            )
            self.forward.logits(batch)
            again = torch.from_numpy(self.forward.again(range(sum(counts))))
            pieces = torch.split(again, counts)
            for i, piece in zip(rows, pieces, strict=True):
                found[i].append(piece.clone())
                at[i] += piece.shape[0]
                self._pass_windows(i, at[i])
        return [torch.cat(pieces) for pieces in found]

    def _pass_windows(self, sequence: int, computed: int) -> None:
        if self.ends is not None:
            computed = min(computed, self.ends[sequence])
        for group, window in enumerate(self.layout.windows):
            gone = max(0, computed + 1 - window) // BLOCK if window else 0
            for array in self.memory.arrays():
                array[self.tables[group, sequence, :gone]] = OVERWRITTEN


def native_forward(model: Decoder, memory: KvMemory, rows: int) -> NativeForward:
    """The same model and cache on native kernels, float activations."""
    library = native_library()
    assert isinstance(library, Library), library
    weights = pack_model(model, library)
    return NativeForward(
        Outline(model.spec, weights.vectors),
        weights.packed,
        memory,
        Pool(library, 1),
        positions=WIDTH * BLOCK,
        rows=rows,
        exact=True,
    )


DEVICES = ["cpu"] + [pytest.param("cuda", marks=MARKS["cuda"])] * (not WITHOUT_CUDA)


@pytest.fixture(scope="module", params=DEVICES)
def ours(request: pytest.FixtureRequest, family: Family) -> Iterator[Ours | OnCuda]:
    if request.param == "cuda" and family.name in NOT_ON_CUDA:
        with pytest.raises(ModelError):
            on("cuda", family, "float32")
        pytest.skip(f"cuda refuses {family.name} by name")
    made = on(request.param, family, "float32")
    yield made
    made.close()


def on(device: str, family: Family, dtype: str) -> Ours | OnCuda:
    """The family's model with room for all of its prompts."""
    sequences = len(family.prompts)
    if device == "cpu":
        return Ours(family.files, getattr(torch, dtype), sequences)
    groups = len(layout_of(read_spec(family.files)).windows)
    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 600}
    sizes["kv_blocks"] = groups * sequences * WIDTH
    runner = load("cuda", family.files, dtype=dtype, block_size=BLOCK, max_model_len=128, **sizes)
    return OnCuda(runner, 128 // BLOCK)


def worst(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest error of any logit, in parts of its prompt's largest."""
    pairs = zip(got, wanted, strict=True)
    return max(float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs)


def typical(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest error of the middle token's logits, in parts of its prompt's largest."""
    pairs = zip(got, wanted, strict=True)
    errors = [(mine - theirs).abs().amax(1) / theirs.abs().max() for mine, theirs in pairs]
    return float(torch.cat(errors).median())


@pytest.mark.parametrize("chunk", [WHOLE, 1, 7, 16])
def test_logits_at_every_position(family: Family, ours: Ours | OnCuda, chunk: int) -> None:
    assert worst(ours.logits(family.prompts, chunk), family.logits) < 1e-4


def test_logits_after_a_cached_prefix(family: Family, ours: Ours | OnCuda) -> None:
    """Whole blocks of each prompt are there, as after another request with the same prompt."""
    starts = [(len(prompt) - 1) // BLOCK * BLOCK // 2 // BLOCK * BLOCK for prompt in family.prompts]
    assert max(starts) > 2 * BLOCK
    tails = [logits[at:] for logits, at in zip(family.logits, starts, strict=True)]
    for chunk in (WHOLE, 5):
        ours.ends = starts  # a window's blocks before the prefix's end may be gone
        ours.logits(family.prompts, WHOLE)
        ours.ends = None
        assert worst(ours.logits(family.prompts, chunk, starts.copy()), tails) < 1e-4


def test_greedy_tokens(family: Family, ours: Ours | OnCuda) -> None:
    check_greedy(family, ours)


def check_greedy(family: Family, ours: Ours | OnCuda) -> None:
    """64 of them, after a short and a longer prompt, side by side and in chunks: each is the most
    likely one to transformers, given those before it."""
    prompts = [family.prompts[0], family.prompts[-1][:40]]
    jobs = [Job(prompts[0], GREEDY_TOKENS), Job(prompts[1], GREEDY_TOKENS, chunk=9, arrives=3)]
    for prompt, tokens in zip(prompts, generate(ours.runner, jobs), strict=True):
        if read_spec(family.files).by_length is not None:
            said(family.theirs, [1])  # its frequencies are those of the longest since a short one
            compared = agree(tokens, greedy(family.theirs, prompt, GREEDY_TOKENS))
            assert compared > GREEDY_TOKENS / 2, "the rest hid behind a near-tie"
            continue
        logits = said(family.theirs, prompt + tokens[:-1])[len(prompt) - 1 :]
        taken = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(taken) == GREEDY_TOKENS
        assert float((logits.amax(1) - taken).max()) < NEAR_TIE


@pytest.mark.parametrize("name", ["llama-yarn", "glm"])
def test_what_is_settled_at_load_runs_on_every_backend(
    name: str, backend: str, tmp_path: Path
) -> None:
    """Fixed frequencies of any kind; partial and paired heads, which are reordered as they load."""
    model, files = save(name, tmp_path)
    runner = load(backend, files, dtype="float32", kv_blocks=40, block_size=BLOCK, threads=1)
    prompt = list(range(70))
    (tokens,) = generate(runner, [Job(prompt, 12, chunk=33)])
    runner.close()
    assert agree(tokens, greedy(model, prompt, 12)) == 12


def test_kernels_that_lack_something_say_so(tmp_path: Path) -> None:
    """auto goes on with torch and says why; what needs native kernels is refused."""
    _, files = save("llama-dynamic", tmp_path)
    fields: dict[str, Any] = {"backend": "cpu", "dtype": "float32", "kv_blocks": 8, "threads": 1}
    runner, info = load_runner(settled(Settings(**fields)), files, lambda phase, seconds: None)
    runner.close()
    assert "torch: native kernels do not compute rotary frequencies by length" in info.ledger[0]
    for asked in ({"cpu_kernels": "native"}, {"quantization": "int8"}, {"cpu_precision": "fast"}):
        with pytest.raises(ConfigError, match="rotary frequencies by length"):
            load_runner(settled(Settings(**fields | asked)), files, lambda phase, seconds: None)


@pytest.mark.skipif(bool(WITHOUT_NATIVE), reason=f"native kernels: {WITHOUT_NATIVE}")
@pytest.mark.parametrize("family", NATIVE, indirect=True, scope="module")
def test_native_kernels(family: Family) -> None:
    """The same of what they compute: logits at every position, and greedy tokens."""
    made = Ours(family.files, torch.float32, len(family.prompts), native=True)
    try:
        for chunk in (WHOLE, 7):
            assert worst(made.logits(family.prompts, chunk), family.logits) < 1e-4
        check_greedy(family, made)
    finally:
        made.forward.close()


def test_native_kernels_compute_no_more_than_that(family: Family) -> None:
    """What runs on torch instead is known here, so that a family does not slip there unseen."""
    spec = read_spec(family.files)
    lacks = missing(spec, computes.NATIVE)
    assert (not lacks) == (family.files.name in NATIVE)
    assert not own_layers(spec) or lacks, "layers of its own have a name"


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_mixtures_go_on_from_what_an_engine_keeps(name: str, tmp_path: Path) -> None:
    """Past window and original context, side by side, chunk by chunk, then from the cache."""
    model, files = save(name, tmp_path)
    spec = read_spec(files)
    ours = load_model(spec, arranged(files, spec, Settings()), torch.float32)
    base = [i * 37 % VOCAB for i in range(90)]
    prompts = [base[:20], base, [*base[:50], 99, 98], base[:64]]
    outcome = run(on_processor(ours, 1), Case("overlap", 7, "warm", "crowd", "roomy"), prompts, 12)
    assert outcome.cached_tokens == [16, 80, 48, 64], "whole blocks of 16"
    for prompt, tokens in zip(prompts, outcome.tokens, strict=True):
        assert agree(tokens, greedy(model, prompt, 12)) == 12


@pytest.mark.parametrize("name", ["llama-longrope", "llama-dynamic"])
def test_keys_turned_otherwise_are_not_reused(name: str, tmp_path: Path) -> None:
    """Prompts of both sides of the original context, and what they share, through one engine."""
    model, files = save(name, tmp_path)
    base = list(range(60))
    prompts = [base[:20], base, base[:30], base[:50], [*base[:48], 99, 98]]
    ours = load_model(read_spec(files), open_checkpoint(files), torch.float32)
    case = Case("plain", 7, "cold", "alone", "roomy")
    outcome = run(on_processor(ours, 1), case, prompts, 8)
    # Blocks of 16. Of long prompts those of another length are turned otherwise by "dynamic".
    assert outcome.cached_tokens == [0, 0, 16, 0 if "dynamic" in name else 48, 48]
    for prompt, tokens in zip(prompts, outcome.tokens, strict=True):
        said(model, [1])
        assert agree(tokens, greedy(model, prompt, 8)) == 8


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16(family: Family, device: str) -> None:
    """2 %, or what transformers' own bfloat16 is off by and half of that again.

    Of a mixture the middle token: where rounding turns the choice of an expert, and behind that,
    logits are far off by chance, theirs as ours.
    """
    if device == "cuda" and family.name in NOT_ON_CUDA:
        pytest.skip(f"cuda refuses {family.name} by name")
    made, exact = on(device, family, "bfloat16"), family.logits
    half = family.theirs.to(torch.bfloat16)
    theirs = [said(half, prompt) for prompt in family.prompts]
    family.theirs.float()
    off = typical if family.name in MIXTURES else worst
    bound = max(2e-2, 1.5 * off(theirs, exact))
    assert off(made.logits(family.prompts, 11), exact) < bound
    made.close()
