"""How a model for embeddings was made to pool: what sentence-transformers writes beside it."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.errors import ModelError

_MODES = "pooling_mode_"
_NAMES = {"mean_tokens": "mean", "lasttoken": "last"}


def pooling_of(folder: Path) -> str:
    """mean, last, or another mode by the file's own name; several joined by +; "" = no word of it.

    Raises ModelError for a 1_Pooling/config.json that cannot be read.
    """
    path = folder / "1_Pooling" / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        modes = [name for name, value in config.items() if name.startswith(_MODES) and value]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    found = [_NAMES.get(name.removeprefix(_MODES), name.removeprefix(_MODES)) for name in modes]
    return "+".join(found)
