"""An error as its client reads it, in the shape of the protocol that was asked by path: for the
server and the gateway alike."""

from __future__ import annotations

from typing import Any

from headrace.errors import HeadraceError

ANTHROPIC = "/v1/messages"  # paths that answer as Anthropic's do
LARGE = "request_too_large"
MAX_MESSAGE = 1000  # characters


def openai_body(error: HeadraceError) -> dict[str, Any]:
    """OpenAI's error body; gateways and clients look for the top-level `error`.

    A message may quote the client: it is cut, and holds nothing that cannot be encoded.
    """
    message = error.message or type(error).__name__
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    return {
        "error": {
            "message": message.encode("utf-8", "replace").decode(),
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_body(error: HeadraceError, request_id: str | None = None) -> dict[str, Any]:
    """The error body of /v1/messages."""
    kinds = {"server_error": "api_error"} | ({error.kind: LARGE} if error.status == 413 else {})
    message = openai_body(error)["error"]["message"]
    return {
        "type": "error",
        "error": {"type": kinds.get(error.kind, error.kind), "message": message},
        "request_id": request_id,
    }


def body_of(error: HeadraceError, path: str, request_id: str | None = None) -> dict[str, Any]:
    """The error as the clients of `path` read it."""
    if path.startswith(ANTHROPIC):
        return anthropic_body(error, request_id)
    return openai_body(error)
