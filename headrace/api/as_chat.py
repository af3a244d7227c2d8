"""Other protocols' bodies become chat requests: one set of checks, one way to a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace.api.schemas import Chat, parse
from headrace.draws import Draws
from headrace.errors import InvalidRequest

# Of ours, beside the fields of `Draws`, that mean the same in every protocol.
SHARED = ("model", "stream", "priority", "cache_salt", "chat_template_kwargs", "stop_token_ids",
          "ignore_eos", "skip_special_tokens", "structured_outputs", "prompt_ids")  # fmt: skip


def as_chat(body: Mapping[str, Any], chat: Mapping[str, Any]) -> Chat:
    """A chat request of what another protocol's checked `body` shares with one, and of `chat`.

    None in `chat`: not given. Raises InvalidRequest with chat's names: see `renamed`.
    """
    kept = {name: body[name] for name in (*Draws.__struct_fields__, *SHARED) if name in body}
    given = {name: value for name, value in chat.items() if value is not None}
    return parse(Chat, {**kept, **given})[0]


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside name the caller's field, not the one of chat that it became."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            first = re.split(r"[.\[]", error.param, maxsplit=1)[0]
            if first in names:
                error.param = names[first]
        raise
