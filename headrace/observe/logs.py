"""Log lines of every process of a server: one handler on stderr, one form."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str) -> None:
    """Print `headrace.*` from `level` on, and warnings of everybody else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("headrace").setLevel(level.upper())
