"""Lines of every process of a server: one handler on stderr, one form; and what is for people."""

from __future__ import annotations

import logging
import sys


class OneLine(logging.Formatter):
    """What is printed of a message stays on its line, and is text: names that a worker or a client
    made up begin no line of their own and move no terminal's cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`; what follows it, a traceback, keeps its lines."""
        if not record.message.isprintable():
            record.message = "".join(
                c if c.isprintable() else c.encode("unicode_escape").decode()
                for c in record.message
            )
        return super().formatMessage(record)


def print_line(text: str) -> None:
    """A line for people, on stderr. In one write, so that no line of another process, or thread,
    begins before its end: `print` takes two where Python buffers nothing. Raises OSError."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def configure_logging(level: str) -> None:
    """Print `headrace.*` from `level` on, and warnings of everybody else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("headrace").setLevel(level.upper())
