"""What the gateway reads of a request's body: enough to place it. The worker checks it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.errors import InvalidRequest
from headrace.foreign_json import Malformed, read_json, refusal
from headrace.gateway.kept import RESPONSES, Kept, kept_at, kept_before
from headrace.gateway.prefix_index import (
    ALL_FINE,
    CHUNK_BYTES,
    FINE_CHUNKS,
    prompt_chain,
    root_of,
    token_chain,
    units_of,
)
from headrace.gateway.sse import MOST_TOKENS

GENERATES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
COMPLETIONS = "/v1/completions"
STREAM_OPTIONS = frozenset({"/v1/chat/completions", COMPLETIONS})  # have include_usage
MAX_CHAIN_BYTES = 2**20  # of a prompt's text; what lies behind counts as not held
BLOCK_TOKENS = 64  # of prompts that are token ids
DEFAULT_OUTPUT_TOKENS = 256  # of a request that names no limit
DEFAULT_COMPLETION_TOKENS = 16  # of one to COMPLETIONS, which OpenAI and all engines cut there
MOST_CHOICES = 1024  # of a prompt, and prompts of a request; more are refused by any worker
BYTES_PER_TOKEN = 4.0  # until a worker has said how long its prompts were
RATIO_SHARE = 0.05  # of a new measurement

PARTS = ("tools", "system", "instructions", "messages", "prompt", "input")  # in their order
_NONE = msgspec.Raw(b"")
_Id = Annotated[int, Meta(ge=0, lt=2**32)]


class _Body(msgspec.Struct):
    """Fields that matter here; any type, for their types are the worker's business."""

    model: Any = None
    stream: Any = False
    stream_options: Any = None
    tools: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    cache_salt: Any = None
    session_id: Any = None
    user: Any = None
    previous_response_id: Any = None


class Prompt(msgspec.Struct, kw_only=True):
    """One request as the router sees it. `text_bytes` is 0 where token ids came."""

    model: str
    body: bytes  # what the worker gets
    streams: bool
    strip_usage: bool  # the gateway asked for usage, the client did not
    text_bytes: int
    prompt_tokens: int
    output_tokens: int
    chain: list[int]
    chunk_tokens: float  # of one of the first `fine_chunks` chunks
    fine_chunks: int
    session: str
    ttft_target_s: float  # 0 = none
    prefix_key: bytes
    salt: str = ""
    parts: tuple[msgspec.Raw, ...] = ()  # PARTS as the body has them; b"" = it is not there
    ids: array[int] | None = None  # its tokens, where they are known
    tokenizer: str = ""  # which made them; "" = they came with the request
    untokenised: str = ""  # why they are not known
    token_chains: dict[int, list[int]] = {}  # by size of a block
    body_with_ids: bytes = b""  # for a worker that takes them; b"" = not made yet
    kept: Kept | None = None  # what one worker alone has
    waits: bool = True  # for a worker with room

    @property
    def computes(self) -> bool:
        """Its prompt is computed; else it gets what a worker keeps."""
        return self.kept is None or self.kept.computes

    @property
    def names_event(self) -> bool:
        """It goes on with a stream, by its Last-Event-ID; a worker that resumes none begins one."""
        return self.kept is not None and self.kept.kind == "stream" and self.waits

    @property
    def line(self) -> str:
        """Those that wait for the same workers stand in one line."""
        return self.model if self.kept is None else f"{self.model} at {self.kept.tag}"

    def tokens_of(self, chunks: int) -> int:
        """Tokens in so many leading chunks, as estimated."""
        units = units_of(chunks, self.fine_chunks)
        return min(int(units * self.chunk_tokens), self.prompt_tokens)


class PromptReader:
    """Bodies in, prompts out. Learns from workers how many bytes make a token, by model."""

    def __init__(self, ask_usage: bool) -> None:
        self._ask_usage = ask_usage
        self._ratios: dict[str, float] = {}

    def learn(self, prompt: Prompt, prompt_tokens: int) -> None:
        """A worker counted the tokens of a prompt."""
        if prompt.text_bytes >= CHUNK_BYTES and prompt_tokens > 0:
            ratio = min(64.0, max(0.5, prompt.text_bytes / prompt_tokens))
            old = self._ratios.get(prompt.model, ratio)
            self._ratios[prompt.model] = old + RATIO_SHARE * (ratio - old)

    def read(self, path: str, body: bytes, headers: Mapping[bytes, bytes]) -> Prompt:
        """Raises InvalidRequest for what is no JSON object, NotFound for an id of no worker."""
        generates = path in GENERATES
        kept = kept_at(path, headers if generates else {})  # no other begins a stream, or goes on
        if kept is not None and not (generates and body):
            return _fetching(kept, body, waits=generates)
        try:
            said = read_json(body, _Body)
            streams = said.stream is True
            sent, strip = self._asking(path, body, said) if streams else (body, False)
        except Malformed as error:
            raise refusal(body, error) from None
        model = said.model if isinstance(said.model, str) else ""
        salt = said.cache_salt if isinstance(said.cache_salt, str) else ""
        ratio = self._ratios.get(model, BYTES_PER_TOKEN)
        parts = (said.tools, said.system, said.instructions, said.messages, said.prompt, said.input)
        text = b"".join(parts)
        ids = _ids(bytes(said.prompt)) if said.prompt else None
        root = root_of(model, salt=salt)
        if ids is None:
            chain = prompt_chain(text[:MAX_CHAIN_BYTES], root)
            tokens, chunk_tokens = int(len(text) / ratio), CHUNK_BYTES / ratio
        else:
            chain = token_chain(ids, root, BLOCK_TOKENS)
            tokens, chunk_tokens = len(ids), float(BLOCK_TOKENS)
        if kept is None and path == RESPONSES:
            kept = kept_before(said.previous_response_id)
        session = headers.get(b"x-session-id", b"").decode("latin-1")
        target = headers.get(b"x-slo-ttft-ms")
        return Prompt(
            model=model,
            body=sent,
            streams=streams,
            strip_usage=strip,
            text_bytes=len(text) if ids is None else 0,
            prompt_tokens=max(1, tokens),
            output_tokens=_output_tokens(path, said, 1 if ids else _prompts(bytes(said.prompt))),
            chain=chain,
            chunk_tokens=chunk_tokens,
            fine_chunks=FINE_CHUNKS if ids is None else ALL_FINE,
            session=session or _text(said.session_id) or _text(said.user),
            ttft_target_s=_target_s(target) if target else 0.0,
            prefix_key=text[:CHUNK_BYTES],
            salt=salt,
            parts=parts,
            ids=ids,
            kept=kept,
        )

    def _asking(self, path: str, body: bytes, said: _Body) -> tuple[bytes, bool]:
        """The body with usage asked for, and whether the client has to be spared it. Raises
        Malformed."""
        options = said.stream_options
        if not self._ask_usage or path not in STREAM_OPTIONS:
            return body, False
        if options is None and b'"stream_options"' not in body:
            end = body.rindex(b"}")
            return body[:end] + b',"stream_options":{"include_usage":true}}', True
        options = {} if options is None else options
        said_so = options.get("include_usage") if isinstance(options, dict) else True
        if said_so is not None and said_so is not False:
            return body, False  # usage comes without us, or the worker refuses that value
        asked = {**options, "include_usage": True}
        if asked.get("continuous_usage_stats") is True:
            del asked["continuous_usage_stats"]  # it means nothing to who asks for no usage
        rest = read_json(body, dict[str, msgspec.Raw])  # all else goes as it came
        return msgspec.json.encode({**rest, "stream_options": asked}), True


def _fetching(kept: Kept, body: bytes, *, waits: bool) -> Prompt:
    """A request that asks no model anything."""
    return Prompt(
        model="",
        body=body,
        streams=False,
        strip_usage=False,
        text_bytes=0,
        prompt_tokens=0,
        output_tokens=0,
        chain=[],
        chunk_tokens=1.0,
        fine_chunks=FINE_CHUNKS,
        session="",
        ttft_target_s=0.0,
        prefix_key=b"",
        kept=kept,
        waits=waits,
    )


def _ids(prompt: bytes) -> array[int] | None:
    """The prompt's token ids, if that is what it is."""
    if not prompt.startswith(b"[") or prompt[1:2] not in b"0123456789":
        return None
    try:
        return array("I", read_json(prompt, list[_Id]))
    except Malformed:
        return None


def _prompts(prompt: bytes) -> int:
    """How many `prompt` holds, if it is no list of ids."""
    if not prompt.startswith(b"["):
        return 1
    try:
        items = read_json(prompt, list[msgspec.Raw])
    except Malformed:
        return 1
    many = bool(items) and bytes(items[0]).startswith((b'"', b"["))
    return min(len(items), MOST_CHOICES) if many else 1


def _output_tokens(path: str, said: _Body, prompts: int) -> int:
    """The most that it may generate, as it says: all choices that are drawn, of all prompts."""
    if path not in GENERATES:
        return 0
    most = -1
    default = DEFAULT_COMPLETION_TOKENS if path == COMPLETIONS else DEFAULT_OUTPUT_TOKENS
    for limit in (said.max_tokens, said.max_completion_tokens, said.max_output_tokens):
        if limit is not None and type(limit) is int and limit > most:
            most = limit
    drawn = max(_choices(said.n), _choices(said.best_of)) * prompts
    return drawn * (min(most, MOST_TOKENS) if most >= 0 else default)


def _choices(given: Any) -> int:
    return given if isinstance(given, int) and 1 <= given <= MOST_CHOICES else 1


def _target_s(text: bytes) -> float:
    if not text.isdigit() or len(text) > 9:
        raise InvalidRequest("x-slo-ttft-ms: whole milliseconds", param="x-slo-ttft-ms")
    return int(text) / 1000


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
