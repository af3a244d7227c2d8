"""`headrace serve --engine naive` end to end, on a tiny random Llama with the byte tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import LLM, SamplingParams
from headrace.cli.child_server import ChildServer
from headrace.text import fake_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=258,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    fake_tokenizer.build().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with (
        ChildServer([str(folder), "--engine", "naive"], lambda line: None) as child,
        openai.OpenAI(base_url=child.url + "/v1", api_key="x", max_retries=0) as made,
    ):
        yield made


def ask(client: openai.OpenAI, prompt: str, **fields: Any) -> Any:
    model = client.models.list().data[0].id
    extra = {"ignore_eos": True}
    return client.completions.create(
        model=model, prompt=prompt, temperature=0, extra_body=extra, **fields
    )


def test_same_greedy_text_as_the_engine(client: openai.OpenAI, folder: Path) -> None:
    prompts = ["Once upon", "a time there was a mill by the river"]
    with LLM(str(folder), dtype="float32", kv_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        ours = [completion.text for completion in llm.generate(prompts, params)]
    naive = [ask(client, prompt, max_tokens=24) for prompt in prompts]
    assert [answer.choices[0].text for answer in naive] == ours
    assert naive[0].usage.prompt_tokens == len(prompts[0])
    assert naive[0].usage.completion_tokens == 24


def test_stream_and_stop_string(client: openai.OpenAI) -> None:
    whole = ask(client, "Once upon", max_tokens=40).choices[0].text
    stop = whole[10:12]
    pieces = [
        chunk.choices[0]
        for chunk in ask(client, "Once upon", max_tokens=40, stop=[stop], stream=True)
        if chunk.choices
    ]
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert pieces[-1].finish_reason == "stop"


def test_choices_and_leaving_early(client: openai.OpenAI) -> None:
    with ask(client, "Leave", max_tokens=400, stream=True) as stream:
        next(iter(stream))
    answer = ask(client, "Stay", max_tokens=6, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == answer.choices[1].text  # greedy
    assert answer.usage.completion_tokens == 12


def test_what_cannot_fit_is_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="512"):
        ask(client, "x" * 510, max_tokens=10)
