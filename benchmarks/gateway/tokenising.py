"""What tokenising in the gateway and KV events cost, in CPU milliseconds: best of several runs.

    python -m benchmarks.gateway.tokenising [SOURCE]

SOURCE: a model as `headrace serve` takes it; default: the default model. Prompts have 64,000
characters of English text. Threads of the tokenizer are kept to one, so that CPU time is work.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import msgspec

from headrace.engine.kv_wire import Wire
from headrace.gateway.block_index import BlockIndex
from headrace.gateway.event_feed import Feed
from headrace.gateway.prefix_index import root_of, text_chain, token_chain
from headrace.gateway.tokenising import ModelTokens, load_models
from headrace.kv.cache import KVCache
from headrace.kv.events import KVEvent, Scope, Stored
from headrace.sources.resolve import resolve
from headrace.text.pieces import PieceCache
from headrace.text.samples import SAMPLES
from headrace.text.tokenizer import Tokenizer, load_tokenizer

CHARS = 64_000
RUNS = 15
BLOCK = 16


def best_ms(work: Callable[[int], object], runs: int = RUNS) -> float:
    """CPU time of the cheapest run; each gets its number."""
    taken = []
    for run in range(runs):
        begun_s = time.process_time()
        work(run)
        taken.append(time.process_time() - begun_s)
    return min(taken) * 1000


def document() -> str:
    text = "".join(f"{n}. {SAMPLES['prose']}" for n in range(200))
    return text[:CHARS]


def body(text: str, question: int) -> bytes:
    turn = {"role": "user", "content": f"{text}\n\nQuestion {question}: who turned the stones?"}
    return msgspec.json.encode({"model": "m", "messages": [turn]})


def commit(log_events: bool) -> Callable[[int], object]:
    """The blocks of a prompt of 8192 tokens are published in the prefix index."""
    tokens = list(range(8192))

    def work(run: int) -> object:
        kv = KVCache(1024, BLOCK, log_events=log_events)
        table = kv.open("", "")
        grant = kv.reserve(table, len(tokens), 0)
        kv.commit(table, tokens, len(tokens))
        return kv.take_events() if log_events else grant

    return work


def rows(model: ModelTokens, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    text = document()
    pieces = model.pieces
    path = "/v1/chat/completions"
    ids = model.read(path, body(text, 0))
    assert not isinstance(ids, str), ids
    out = [("tokenise it whole", best_ms(lambda run: tokenizer.encode(text)))]
    fresh = [PieceCache(tokenizer, 2**26) for _ in range(RUNS)]
    out.append(
        ("the same in pieces, none known",
         best_ms(lambda run: fresh[run].encode(text, add_special=False)))
    )  # fmt: skip
    out.append(
        ("body to ids, only the question is new",
         best_ms(lambda run: model.read(path, body(text, run + 1))))
    )  # fmt: skip
    root = root_of("m")
    out.append(("chain of its token blocks", best_ms(lambda run: token_chain(ids, root, BLOCK))))
    out.append(("chain of its text", best_ms(lambda run: text_chain(text.encode(), root))))
    out.append(
        ("ids into the body", best_ms(lambda run: msgspec.json.encode({"ids": ids.tolist()})))
    )
    raw = msgspec.json.encode({"ids": ids.tolist()})
    out.append(("ids out of the body (worker)", best_ms(lambda run: msgspec.json.decode(raw))))
    plain, logged = best_ms(commit(False)), best_ms(commit(True))
    out.append(("engine: events of 512 blocks, logged", logged - plain))
    digests = [n.to_bytes(16, "big") for n in range(512)]
    events: list[KVEvent] = [Stored(Scope(), None, digests, list(range(8192)))]
    wire = Wire("array", BLOCK)
    out.append(
        ("engine's thread: the same, encoded", best_ms(lambda run: wire.encode(1.0, events)))
    )
    payload = wire.encode(1.0, events)

    def feed(run: int) -> object:
        index = BlockIndex(2**24)
        index.add_worker("w")
        Feed(index, "w", replays=False, now_s=0.0).live(0, payload, 0.0)
        return index

    out.append(("gateway: the same, read and indexed", best_ms(feed)))
    print(f"{len(text)} characters, {len(ids)} tokens; pieces: {pieces.cuts}")
    return out


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = sys.argv[1] if len(sys.argv) > 1 else ""
    (model,) = load_models([f"m={source}"], 2**26, print).values()
    tokenizer = load_tokenizer(resolve(source, say=print, weights=False))
    for name, cost_ms in rows(model, tokenizer):
        print(f"{name:40} {cost_ms:8.2f} ms")


if __name__ == "__main__":
    main()
