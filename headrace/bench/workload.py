"""What a load run sends: request bodies, the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

# Short everyday words: nearly every BPE vocabulary has each of them, with its leading space, as one
# token, so `prompt_tokens` words are about as many tokens. The exact number comes back in `usage`.
_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea kid body information back
parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy
music market sense nation plan college interest death experience effect use class control
care field development role effort rate heart drug show leader light voice wife police mind
price report decision son view relationship town road arm difference value building action
model season society tax director position player record paper space ground form event
matter center couple site project activity star table need court oil situation cost industry
figure street image phone data picture practice piece land product doctor wall patient
worker news test movie north love support technology step baby computer type attention film
tree source organization hair look window culture chance brother energy period course summer
plant term
"""
WORDS = tuple(_TEXT.split())


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request, many times over.

    `single` set: every request carries that text. Otherwise each has its own random prompt of
    about `prompt_tokens` words, or of exactly that many ids from `id_range`.
    """

    requests: int = 64
    max_tokens: int = 75
    prompt_tokens: int = 64
    single: str = ""
    kind: Literal["words", "ids"] = "words"
    id_range: tuple[int, int] = (1000, 10_000)  # half open; "ids" only
    endpoint: Literal["chat", "completions"] = "chat"
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0

    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def bodies(self, model: str, part: str) -> Iterator[dict[str, Any]]:
        """`requests` bodies. `part` names the level: two levels share no random prompt, so that
        one cannot find the other's prefixes in the server's cache.
        """
        for index in range(self.requests):
            yield self.body(model, self.prompt(f"{self.seed}/{part}/{index}"))

    def prompt(self, key: str) -> str | list[int]:
        """The prompt that `key` draws: a pure function of the workload and the key."""
        if self.single:
            return self.single
        draw = random.Random(key)
        if self.kind == "ids":
            return [draw.randrange(*self.id_range) for _ in range(self.prompt_tokens)]
        return " ".join(draw.choice(WORDS) for _ in range(self.prompt_tokens))

    def body(self, model: str, prompt: str | list[int]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": self.stream,
        }
        if self.ignore_eos:  # left out when off: servers other than vLLM's kin refuse the field
            body["ignore_eos"] = True
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            assert isinstance(prompt, str), "chat messages hold text; ids go to completions"
            return body | {"messages": [{"role": "user", "content": prompt}]}
        return body | {"prompt": prompt}
