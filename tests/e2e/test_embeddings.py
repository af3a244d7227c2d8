"""/v1/embeddings, /classify and /score: the official client, every shape, every refusal."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from tokenizers.processors import TemplateProcessing

from headrace.api.pooled import MAX_INPUTS
from headrace.backends.fake.model import advance, root
from headrace.backends.fake.vectors import LABELS, WIDTH, hidden, pooled
from headrace.messages import Pool
from headrace.text import fake_tokenizer
from tests.e2e.serve_process import ServeProcess
from tests.e2e.serving import Server
from tests.golden.classifiers import head_scores, tiny_classifier

MAX_LEN, ROWS = 512, 8
TEXTS = ["a cat", "Grüße 😀", "x" * 300]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(max_num_seqs=ROWS, max_model_len=MAX_LEN, block_size=16) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as made:
        yield made


def expected(text: str, kind: Pool = "sum") -> npt.NDArray[np.float32]:
    """What the fake model gives, of length 1."""
    states = [root("")]
    for byte in text.encode():
        states.append(advance(states[-1], byte))
    vector = pooled(kind, states[1:])
    return vector / np.linalg.norm(vector)


def close(got: Any, want: npt.NDArray[np.float32]) -> None:
    np.testing.assert_allclose(np.array(got, np.float32), want, rtol=1e-5, atol=1e-6)


def test_the_official_client(client: OpenAI) -> None:
    """It asks for base64 by itself and gives floats; both forms are the same bits."""
    answer = client.embeddings.create(model="fake", input=TEXTS, user="me")
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "fake", "embedding")
    tokens = sum(len(text.encode()) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    for one, text in zip(answer.data, TEXTS, strict=True):
        close(one.embedding, expected(text))
    floats = client.embeddings.create(model="fake", input=TEXTS, encoding_format="float")
    assert [x.embedding for x in floats.data] == [x.embedding for x in answer.data]


def test_async_and_a_large_batch(server: Server) -> None:
    """More texts than may run or wait, beside another such request."""

    async def both() -> None:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
            batches = [[f"{name} {i}" for i in range(5 * ROWS + 3)] for name in ("one", "two")]
            asked = [client.embeddings.create(model="fake", input=batch) for batch in batches]
            for batch, answer in zip(batches, await asyncio.gather(*asked), strict=True):
                assert len(answer.data) == len(batch)
                for one, text in zip(answer.data, batch, strict=True):
                    close(one.embedding, expected(text))

    asyncio.run(both())


def embed(server: Server, **body: Any) -> Any:
    status, answer = server.post("/v1/embeddings", body)
    assert status == 200, answer
    return [one["embedding"] for one in answer["data"]]


def test_shapes_of_input(server: Server) -> None:
    ids = list(b"a cat")
    for given in ("a cat", ["a cat"], ids, [ids]):
        (vector,) = embed(server, input=given)
        close(vector, expected("a cat"))
    assert len(embed(server, input=["a", "b"])) == len(embed(server, input=[[97], [98]])) == 2


def test_pooling_length_and_dimensions(server: Server) -> None:
    close(embed(server, input="a cat", pooling="last")[0], expected("a cat", "last"))
    (raw,) = embed(server, input="a cat", pooling="last", normalize=False)
    state = root("")
    for byte in b"a cat":
        state = advance(state, byte)
    close(raw, hidden(state))
    (short,) = embed(server, input="a cat", dimensions=3)
    want = expected("a cat")[:3]
    close(short, want / np.linalg.norm(want))
    assert len(embed(server, input="a cat", dimensions=WIDTH)[0]) == WIDTH
    (text,) = embed(server, input="a cat", dimensions=3, encoding_format="base64")
    close(np.frombuffer(base64.b64decode(text), "<f4"), np.array(short, np.float32))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [1, -1]}, "input"),
        ({"input": [259]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "x" * (MAX_LEN + 1)}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "normalize": "yes"}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "priority": 1}, "priority"),
    ],
)
def test_refusals(server: Server, body: dict[str, Any], param: str) -> None:
    status, answer = server.post("/v1/embeddings", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param


def test_refusals_have_the_clients_own_class(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="width of this model"):
        client.embeddings.create(model="fake", input="a", dimensions=WIDTH + 1)


def test_the_longest_input_and_an_unknown_field(server: Server) -> None:
    status, headers, _ = server.request(
        "POST", "/v1/embeddings", {"input": "x" * MAX_LEN, "colour": 1}
    )
    assert status == 200
    assert headers["x-headrace-ignored-fields"] == "colour"
    assert server.post("/v1/embeddings", {"input": "a", "model": "other"})[0] == 404


def test_cached_prompts(server: Server) -> None:
    """The last state reads the cache that others filled, a mean does not."""
    cached = []
    for pooling in ("mean", "mean", "last", "last"):
        _, answer = server.post("/v1/embeddings", {"input": "y" * 64, "pooling": pooling})
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        close(
            answer["data"][0]["embedding"],
            expected("y" * 64, "sum" if pooling == "mean" else "last"),
        )
    assert cached == [0, 0, 64, 64]
    _, salted = server.post(
        "/v1/embeddings", {"input": "y" * 64, "pooling": "last", "cache_salt": "s"}
    )
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def scores_of(text: str) -> npt.NDArray[np.float32]:
    states = [root("")]
    for byte in text.encode():
        states.append(advance(states[-1], byte))
    return pooled("scores", states)


def test_classify(server: Server) -> None:
    status, answer = server.post("/classify", {"input": ["a cat", "dogs"]})
    assert status == 200, answer
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert answer["id"].startswith("classify-")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 9
    for at, (one, text) in enumerate(zip(answer["data"], ("a cat", "dogs"), strict=True)):
        scores = scores_of(text)
        probs = np.exp(scores) / np.exp(scores).sum()
        assert (one["index"], one["num_classes"]) == (at, LABELS)
        assert one["label"] == f"LABEL_{probs.argmax()}"
        close(one["probs"], probs)
    _, raw = server.post("/classify", {"input": "a cat", "use_activation": False})
    close(raw["data"][0]["probs"], scores_of("a cat"))


def test_classify_a_conversation(server: Server) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    _, tokens = server.post("/tokenize", {"messages": said, "add_generation_prompt": False})
    _, want = server.post("/classify", {"input": tokens["tokens"]})
    status, got = server.post("/classify", {"messages": said})
    assert status == 200, got
    assert got["data"] == want["data"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/classify", {}, "input"),
        ("/classify", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ("/classify", {"messages": []}, "messages"),
        ("/classify", {"input": [300]}, "input"),
        ("/score", {"text_1": "a", "text_2": "b"}, "model"),  # three labels
        ("/score", {"text_1": "a"}, "text_2"),
    ],
)
def test_more_refusals(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = server.post(path, body)
    assert status == 400, answer
    assert answer["error"]["param"] == param


@pytest.mark.model
def test_the_default_model(default_server: ServeProcess) -> None:
    """A model made to write gives vectors too: texts that are alike lie closer than others."""
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "def main(): return 0"]
    server = default_server
    with OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        model = client.models.list().data[0].id
        answer = client.embeddings.create(model=model, input=texts)
        vectors = np.array([one.embedding for one in answer.data])
        assert vectors.shape == (3, 576)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
        alike = vectors @ vectors.T
        assert alike[0, 1] > alike[0, 2] + 0.05
        status, said = server.post("/score", {"text_1": texts[0], "text_2": texts[1:]})
        assert status == 200, said
        scores = [one["score"] for one in said["data"]]
        np.testing.assert_allclose(scores, alike[0, 1:], atol=1e-4)  # another batch
        assert server.post("/classify", {"input": "a"})[0] == 400


def test_a_reward_model(tmp_path: Path) -> None:
    """One label: /score reads both texts at once; there is no text to be had of it."""
    model, _ = tiny_classifier("llama", tmp_path, 1, vocab_size=259)
    tokenizer = fake_tokenizer.build()
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B <|im_end|>",
        special_tokens=[("<|im_start|>", 257), ("<|im_end|>", 258)],
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said = tokenizer.encode("ask", "answer").ids
    want = float(head_scores(model, said)[0])
    options = ("--dtype", "float32", "--kv-blocks", "64")
    with ServeProcess(str(tmp_path), "--served-model-name", "reward", *options) as server:
        pair = {"text_1": "ask", "text_2": "answer"}
        status, answer = server.post("/score", {**pair, "use_activation": False})
        assert status == 200, answer
        assert answer["data"][0]["score"] == pytest.approx(want, rel=1e-4)
        assert answer["usage"]["prompt_tokens"] == len(said)
        _, likely = server.post("/score", {"text_1": "ask", "text_2": ["answer", "no"]})
        assert likely["data"][0]["score"] == pytest.approx(1 / (1 + np.exp(-want)), rel=1e-4)
        assert len(likely["data"]) == 2
        _, one = server.post("/classify", {"input": "ask", "use_activation": False})
        reward = float(head_scores(model, tokenizer.encode("ask").ids)[0])
        assert one["data"][0]["probs"] == [pytest.approx(reward, rel=1e-4)]
        assert one["data"][0]["label"] == "LABEL_0"
        status, vector = server.post("/v1/embeddings", {"input": "ask"})
        assert (status, len(vector["data"][0]["embedding"])) == (200, 48)
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            status, refused = server.post(path, body)
            assert (status, refused["error"]["param"]) == (400, "model"), refused
        for wrong in (
            {**pair, "pooling": "last"},
            {"text_1": ["a", "b"], "text_2": ["c"]},
            {"text_1": "", "text_2": "a"},
            {"text_1": "a", "text_2": []},
        ):
            assert server.post("/score", wrong)[0] == 400, wrong
