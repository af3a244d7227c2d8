"""headrace: an LLM inference server.

`headrace serve` starts it; `headrace.LLM` is the same engine offline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.completion import Completion as Completion
    from headrace.grammar.asked import StructuredOutputs as StructuredOutputs
    from headrace.llm import LLM as LLM
    from headrace.params import BeamParams as BeamParams
    from headrace.params import SamplingParams as SamplingParams
    from headrace.pooled import Classification as Classification
    from headrace.pooled import Embedding as Embedding

__version__ = "0.1.0"

_LAZY = {
    "LLM": "headrace.llm",
    "Completion": "headrace.completion",
    "BeamParams": "headrace.params",
    "Classification": "headrace.pooled",
    "Embedding": "headrace.pooled",
    "SamplingParams": "headrace.params",
    "StructuredOutputs": "headrace.grammar.asked",
}


def __getattr__(name: str) -> Any:
    """Import on use: `import headrace` stays light."""
    if name not in _LAZY:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
