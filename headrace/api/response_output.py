"""What a model says as items of /v1/responses, and the events by which they grow."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec

from headrace.api.answer import Answer
from headrace.api.events import Events
from headrace.api.logprobs import Entry, Reporter
from headrace.errors import HeadraceError
from headrace.text.parts import Arguments, Call, Part, Reasoning, Text

Status = Literal["in_progress", "completed", "incomplete", "failed"]
# How a choice ended -> why its response is not complete
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
Event = tuple[str, dict[str, Any]]  # its type and its members
# The items of an ended answer -> the whole object, which was kept if that was asked for.
Save = Callable[[Answer, list[dict[str, Any]]], Awaitable[dict[str, Any]]]
_encode = msgspec.json.Encoder().encode


class Reply(msgspec.Struct, frozen=True):
    """A response object but for what the model says. `fixed`: members that never change."""

    id: str
    fixed: dict[str, Any]

    def body(self, status: Status, output: list[Any], **members: Any) -> dict[str, Any]:
        """The object. members: of those that have a default here."""
        return {
            "id": self.id,
            "object": "response",
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            **self.fixed,
            **members,
        }

    def ended(self, answer: Answer, output: list[Any], *, stored: bool) -> dict[str, Any]:
        """The object once the model has ended."""
        members: dict[str, Any] = {"usage": usage_of(answer), "store": stored}
        reason = INCOMPLETE.get(answer.choices[0].finish or "")
        if reason is None:
            return self.body("completed", output, **members)
        details = {"reason": reason}
        return self.body("incomplete", output, incomplete_details=details, **members)


def usage_of(answer: Answer) -> dict[str, Any]:
    """Counts by the names of this protocol."""
    usage = answer.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }


class Output:
    """The items of an answer as they grow: parts in, events out. One item is open at a time."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._logprobs: list[Any] = []
        self._open: type[Part] | None = None  # the parts that go on with the open item

    def add(self, part: Part, logprobs: list[Any] | None = None) -> list[Event]:
        """One part, and what is said of the tokens of a Text."""
        out: list[Event] = []
        if isinstance(part, Call) or self._open is not type(part):
            out += self.close()
            out += self._begin(part)
        if isinstance(part, Call):
            return out
        self._pieces.append(part.text)
        members: dict[str, Any] = {"delta": part.text}
        if isinstance(part, Text):
            self._logprobs += logprobs or ()
            members["logprobs"] = logprobs or []
        return [*out, (f"{_KIND[type(part)]}.delta", self._placed(**members))]

    def close(self, finish: str = "stop") -> list[Event]:
        """The end of the open item, which may have been cut short."""
        if self._open is None:
            return []
        kind, text = _KIND[self._open], "".join(self._pieces)
        item = self.items[-1]
        status = "incomplete" if finish in INCOMPLETE else "completed"
        out: list[Event] = []
        if self._open is Arguments:
            item |= {"arguments": text, "status": status}
            done = {**self._placed(arguments=text), "name": item["name"]}
            out.append((f"{kind}.done", done))
        else:
            part = {**_PART[self._open], "text": text}
            members: dict[str, Any] = {"text": text}
            if self._open is Text:
                part["logprobs"] = members["logprobs"] = self._logprobs
            out.append((f"{kind}.done", self._placed(**members)))
            out.append(("response.content_part.done", self._placed(part=part)))
            item |= {"content": [part], "status": status}
        placed = {"output_index": len(self.items) - 1, "item": dict(item)}
        out.append(("response.output_item.done", placed))
        self._open, self._pieces, self._logprobs = None, [], []
        return out

    def _begin(self, part: Part) -> list[Event]:
        self._open = Arguments if isinstance(part, Call) else type(part)
        name = f"{_PREFIX[self._open]}_{secrets.token_hex(12)}"
        item: dict[str, Any] = {"id": name, "status": "in_progress"}
        if isinstance(part, Call):
            item |= {"type": "function_call", "call_id": part.id, "name": part.name}
            item["arguments"] = ""
        elif isinstance(part, Reasoning):
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        self.items.append(item)
        added = {"output_index": len(self.items) - 1, "item": dict(item)}
        out: list[Event] = [("response.output_item.added", added)]
        if self._open is not Arguments:
            placed = self._placed(part={**_PART[self._open], "text": ""})
            out.append(("response.content_part.added", placed))
        return out

    def _placed(self, **members: Any) -> dict[str, Any]:
        """Members of an event that belongs to the open item."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        if self._open is not Arguments:
            place["content_index"] = 0
        return {**place, **members}


_KIND: dict[type[Part], str] = {
    Text: "response.output_text",
    Reasoning: "response.reasoning_text",
    Arguments: "response.function_call_arguments",
}
_PREFIX: dict[type[Part], str] = {Text: "msg", Reasoning: "rs", Arguments: "fc"}
_PART: dict[type[Part], dict[str, Any]] = {
    Text: {"type": "output_text", "annotations": [], "logprobs": []},
    Reasoning: {"type": "reasoning_text"},
}


def logprobs_of(reporter: Reporter, entries: Sequence[Entry], count: int) -> list[Any]:
    """As chat has them; `bytes` are a list here also where there are none."""
    said = reporter.chat(entries, count)["content"]
    for one in said:
        for entry in (one, *one["top_logprobs"]):
            entry["bytes"] = entry["bytes"] or []
    return list(said)


class ResponseEvents(Events):
    """created, in_progress, items one after another, then completed, incomplete or failed; each
    with its sequence number. `save`, before the last of them, says whether the object was kept.
    """

    def __init__(self, reply: Reply, reporter: Reporter, count: int, save: Save) -> None:
        self._reply, self._reporter, self._count, self._save = reply, reporter, count, save
        self._output = Output()
        self._number = 0
        self._last: dict[str, Any] = {}

    def begin(self, answer: Answer) -> list[bytes]:
        body = {"response": self._reply.body("in_progress", [])}
        return [self._event("response.created", body), self._event("response.in_progress", body)]

    def text(self, index: int, text: str) -> bytes:
        return self._all(self._output.add(Text(text)))

    def parts(self, index: int, parts: Sequence[Part]) -> list[bytes]:
        return [self._all(self._output.add(part)) for part in parts]

    def told(
        self, index: int, parts: Sequence[Part], entries: list[Entry], offset: int
    ) -> list[bytes]:
        """Only text is told of: see `responses.create`."""
        assert len(parts) <= 1, "no parser, so no more than one Text"
        said = logprobs_of(self._reporter, entries, self._count)
        return [self._all(self._output.add(parts[0] if parts else Text(""), said))]

    def finish(self, index: int, reason: str, stop_reason: str | int | None) -> bytes:
        return self._all(self._output.close(reason))

    async def ended(self, answer: Answer) -> None:
        self._last = await self._save(answer, self._output.items)

    def end(self, answer: Answer) -> bytes:
        return self._event(f"response.{self._last['status']}", {"response": self._last})

    def failed(self, error: HeadraceError) -> bytes:
        self._output.close("length")  # the object shows how far it came
        cause = {"code": error.code, "message": error.message}
        body = self._reply.body("failed", self._output.items, error=cause, store=False)
        return self._event("response.failed", {"response": body})

    def _all(self, events: list[Event]) -> bytes:
        return b"".join(self._event(*event) for event in events)

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
