"""The default model under grammars: tokens are the same with and without masks that are spared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace import LLM, Completion, SamplingParams, StructuredOutputs
from headrace.grammar.compile import Compiler
from headrace.runner.runner import CpuTicket
from tests.devices import WITHOUT_NATIVE

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "newer", "old"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
ASKED = (
    StructuredOutputs(json=PERSON),
    StructuredOutputs(json={"type": "array", "items": PERSON, "minItems": 2}),
    StructuredOutputs(json_object=True),
    StructuredOutputs(json=PERSON, disable_any_whitespace=True),
    StructuredOutputs(regex=r"[A-Z][a-z]+ (is|was) [a-z ]{3,20}\."),
    StructuredOutputs(choice=["Paris", "Part of it", "Berlin"]),
    StructuredOutputs(grammar='start: item ("," item)*\nitem: /[a-z]+/ | "<" item ">"'),
)
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "n": 2, "repetition_penalty": 1.3},
    {"temperature": 0.8, "n": 2, "top_p": 0.9},
    {"temperature": 0, "ignore_eos": True, "min_tokens": 8},
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Few blocks: sequences lose theirs and come back. No cache: both runs compute the same steps.
    made = LLM(
        backend="cpu",
        cpu_kernels="native",
        overlap="off",
        kv_blocks=56,
        block_size=4,
        max_num_seqs=16,
        max_model_len=120,
        prefix_caching=False,
    )
    with made:
        # Grammars that are compiled are admitted at once: both runs then have the very same steps.
        params = [SamplingParams(max_tokens=1, structured_outputs=asked) for asked in ASKED]
        made.generate(["."] * len(ASKED), params, progress=False)
        yield made


def _said(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Completion], int]:
    """What pairs of ASKED and DRAWS yield, all at once, and how many masks were made."""
    masks = 0
    fill = Compiler.fill

    def counted(self: Compiler, matchers: Any, bits: Any) -> None:
        nonlocal masks
        masks += len(matchers)
        fill(self, matchers, bits)

    monkeypatch.setattr(Compiler, "fill", counted)
    prompts, params = [], []
    for i, asked in enumerate(ASKED):
        for j in range(2):
            prompts.append(f"Describe person {i} as asked: ")
            fields = {"max_tokens": 24, "seed": i * 10 + j, **DRAWS[(2 * i + j) % len(DRAWS)]}
            params.append(SamplingParams(structured_outputs=asked, **fields))
    done = llm.generate(prompts, params, progress=False)
    monkeypatch.undo()
    return done, masks


@pytest.mark.skipif(bool(WITHOUT_NATIVE), reason="torch's thread is asked too early")
def test_spared_masks_change_no_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = llm._engine.stats()
    spared, few = _said(llm, monkeypatch)
    preemptions = llm._engine.stats().preemptions - stats.preemptions
    with monkeypatch.context() as patched:
        patched.setattr(CpuTicket, "likely", lambda self: ())
        made, many = _said(llm, patched)
    assert preemptions > 0
    assert few < many, f"{few} masks with and {many} without"
    for one, other in zip(spared, made, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert (one.finish_reason, one.logprobs) == (other.finish_reason, other.logprobs)
