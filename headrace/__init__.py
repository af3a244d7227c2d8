"""headrace: an LLM inference server.

`headrace serve` starts it; `headrace.LLM` is the same engine offline.
"""

__version__ = "0.1.0"
