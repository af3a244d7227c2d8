"""Where a model's files lie on this machine, once its source is resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class ModelFiles(msgspec.Struct, frozen=True):
    """A model on disk. `path` is the GGUF file, the Hugging Face folder, or unused for "fake".

    The fake model has a byte-level tokenizer and no weights; it goes with `--backend fake`.
    """

    name: str  # default served name
    kind: Literal["gguf", "hf", "fake"]
    path: Path

    @property
    def has_text(self) -> bool:
        """It comes with a tokenizer."""
        return self.kind != "hf" or (self.path / "tokenizer.json").exists()
