"""A full record as JSON: what the engine told is read, tokens get their text. Done when somebody
looks, in a thread; the shape is in docs/recording.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.api.record import Full, Record
from headrace.messages import BlockNote, DrawNote, EngineInfo, Recorded, StepView
from headrace.text.tokenizer import Tokenizer
from headrace.text.trace import bytes_of

_ORIGIN = {"shared": "shared", "allocated": "new", "copied": "copied"}  # of blocks, by event
_read = msgspec.msgpack.Decoder(Recorded).decode


def whole(record: Record, tokenizer: Tokenizer, info: EngineInfo | None) -> dict[str, Any]:
    """One record, all there is of it. From any thread: what is appended meanwhile is left out."""
    shown = record.whole()
    full = record.full
    if full is None:
        return shown
    told = [_read(part) for part in list(full.told)]
    namer = _Namer(tokenizer)
    note = "" if info is None else info.draws_note
    if info is not None and not info.records:
        note = "this engine records neither steps nor blocks nor draws"
    cut = full.cut
    if any(part.cut for part in told):
        cut = cut or f"only the first {sum(len(part.steps) for part in told)} steps were recorded"
    blocks = [block for part in told for block in part.blocks]
    draws = [_draw(one, namer) for part in told for one in part.draws]
    return shown | {
        "cut": cut,
        "prompt": None
        if full.text is None
        else {"text": full.text, "spans": [span._asdict() for span in full.spans]},
        "tokens": {
            "prompt": [namer.named(token) for token in full.prompt],
            "output": [
                namer.named(token.id)
                | {"choice": token.choice, "t_ms": _ms(token.at_s, record.arrived_s)}
                for token in list(full.tokens)
            ],
        },
        "positions": _positions(record, info),
        "steps": [
            step_json(step, record.arrived_s, part.number) for part in told for step in part.steps
        ],
        "blocks": _blocks(blocks, 0 if info is None else info.block_size),
        "draws": draws,
        "draws_note": note,
        "text": _text(full),
    }


def step_json(step: StepView, since_s: float, mine: int = -1) -> dict[str, Any]:
    """A step; times from `since_s` on. mine: the number of the request whose rows are marked."""
    columns = zip(step.requests, step.starts, step.counts, step.draws, strict=True)
    return {
        "step": step.step,
        "start_ms": _ms(step.launched_s, since_s),
        "ms": _ms(step.landed_s, step.launched_s) if step.landed_s else None,
        "device_ms": round(step.device_s * 1000, 3),
        "tokens": sum(step.counts),
        "prefill_tokens": sum(step.counts[step.decodes :]),
        "waiting": step.waiting,
        "kv_used": step.kv_used,
        "rows": [
            {
                "request": f"r{number}",
                "mine": number == mine,
                "start": start,
                "count": count,
                "kind": "decode" if row < step.decodes else "prefill",
                "draws": draws,
            }
            for row, (number, start, count, draws) in enumerate(columns)
        ],
    }


class _Namer:
    """Ids with their text, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, str]] = {}

    def of(self, token: int) -> tuple[str, str]:
        """Its text, with U+FFFD for what is no whole character, and its bytes in hex."""
        found = self._known.get(token)
        if found is None:
            raw = bytes_of(self._tokenizer, token) if token >= 0 else b""
            found = self._known[token] = raw.decode("utf-8", "replace"), raw.hex()
        return found

    def named(self, token: int) -> dict[str, Any]:
        """As a part of the record."""
        text, raw = self.of(token)
        return {"id": token, "text": text, "bytes": raw}


def _draw(draw: DrawNote, namer: _Namer) -> dict[str, Any]:
    tap = draw.tap
    return {
        "step": draw.step,
        "choice": draw.choice,
        "index": draw.index,
        "token": draw.token,
        "text": namer.of(draw.token)[0],
        "uniform": tap.uniform if tap.uniform >= 0 else None,
        "greedy": tap.greedy,
        "stages": [
            {
                "name": stage.name,
                "kept": stage.kept if stage.kept >= 0 else None,
                "top": [
                    {"id": token, "text": namer.of(token)[0], "value": value}
                    for token, value in zip(stage.ids, stage.values, strict=True)
                ],
            }
            for stage in tap.stages
        ],
    }


def _positions(record: Record, info: EngineInfo | None) -> dict[str, Any] | None:
    """How positions are told to the model, and which ones this request has."""
    if info is None or info.positions is None:
        return None
    known = info.positions
    return {
        "kind": known.kind,
        "theta": known.theta or None,
        "scaling": known.scaling or None,
        "rotary_dim": known.rotary_dim or None,
        "first": 0,
        "last": max(0, record.prompt_tokens + record.output_tokens - 1),
    }


def _blocks(notes: Sequence[BlockNote], block_size: int) -> dict[str, Any]:
    """Events as they were told, and the table of each choice as it was last."""
    tables: dict[int, dict[int, list[Any]]] = {}
    for note in notes:
        table = tables.setdefault(note.choice, {})
        if note.kind in ("shared", "allocated", "copied"):
            origin = _ORIGIN[note.kind]
            table |= {i: [block, origin] for i, block in enumerate(note.blocks, note.first)}
        elif note.kind == "preempted":
            table.clear()
    lists = {choice: [table[i] for i in sorted(table)] for choice, table in sorted(tables.items())}
    return {
        "block_size": block_size,
        "table": lists.get(0, []),
        "tables": [{"choice": choice, "table": table} for choice, table in lists.items()],
        "events": [
            {
                "step": note.step,
                "choice": note.choice,
                "kind": note.kind,
                "first": note.first if note.first >= 0 else None,
                "blocks": note.blocks,
            }
            for note in notes
        ],
    }


def _text(full: Full) -> list[dict[str, Any]]:
    return [
        {
            "choice": one.choice,
            "token_index": one.token_index,
            "emitted": one.emitted,
            "held": {"text": one.held, "bytes": one.held_bytes.hex()}
            if one.held or one.held_bytes
            else None,
        }
        for one in list(full.emitted)
    ]


def _ms(at_s: float, since_s: float) -> float:
    return round((at_s - since_s) * 1000, 3)
