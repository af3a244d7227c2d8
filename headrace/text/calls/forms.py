"""Which form of tool calls a model writes: from its chat template, or by name."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.text.calls.calls import Calls
from headrace.text.calls.hermes import HermesCalls
from headrace.text.calls.llama import LlamaCalls
from headrace.text.calls.mistral import MistralCalls
from headrace.text.calls.pythonic import PythonicCalls

FORMS: Mapping[str, type[Calls]] = {
    "hermes": HermesCalls,
    "llama": LlamaCalls,
    "mistral": MistralCalls,
    "mistral-args": MistralCalls,
    "pythonic": PythonicCalls,
}
# What a template of the form holds, the surest first; a template with the third text is of none.
_SIGNS = (
    ("mistral-args", "[ARGS]", ""),
    ("mistral", "[TOOL_CALLS]", ""),
    ("pythonic", "<|tool_call_start|>", ""),
    ("pythonic", "<|python_start|>", ""),
    ("pythonic", "[func_name1(", ""),
    ("hermes", "<tool_call>", "<function="),
    ("llama", "<|python_tag|>", ""),
    ("llama", '{"name": function name, "parameters"', ""),
)
LIST_MARKS = (
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<|python_start|>", "<|python_end|>"),
)


def form_of(template: str | None) -> str:
    """The entry of FORMS that a chat template shows; "" if none of them."""
    for form, sign, unless in _SIGNS:
        if template and sign in template and not (unless and unless in template):
            return form
    return ""


def list_marks(template: str) -> tuple[str, str]:
    """What a template puts around a pythonic list; "" if nothing."""
    return next((pair for pair in LIST_MARKS if pair[0] in template), ("", ""))
