"""The process that renders templates of requests. See `stranger`.

stdin: the parent's process id, then an Order a line. stdout: a Reply a line.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys

import msgspec

from headrace.children import die_with_parent
from headrace.errors import HeadraceError, InvalidRequest
from headrace.sources.card import ModelCard
from headrace.text.stranger import Order, Reply
from headrace.text.template import ChatTemplate

MOST_BYTES = 2**30  # address space


def rendered(order: Order) -> Reply:
    """The prompt, or why there is none."""
    special = order.special_tokens
    card = ModelCard(0, None, (), None, order.template, special)
    try:
        return Reply(ChatTemplate(card, "the request's").prompt(order.asked))
    except InvalidRequest as error:
        return Reply(error=error.message, param=error.param)
    except HeadraceError as error:  # it does not parse
        return Reply(error=error.message, param="chat_template")
    except (MemoryError, RecursionError):
        return Reply(error="chat_template: it takes too much memory", param="chat_template")


def main() -> None:
    """Until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = sys.stdin.buffer
    die_with_parent(signal.SIGKILL, msgspec.json.decode(lines.readline(), type=int))
    decode = msgspec.json.Decoder(Order).decode
    for line in lines:
        sys.stdout.buffer.write(msgspec.json.encode(rendered(decode(line))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
