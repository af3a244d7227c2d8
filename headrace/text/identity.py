"""What makes a prompt's tokens: two programs with the same identity make the same ones."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from headrace import __version__
from headrace.sources.card import ModelCard
from headrace.text.tokenizer import Tokenizer


def prompt_identity(tokenizer: Tokenizer, card: ModelCard, native: bool) -> str:
    """Of this version of headrace, the tokenizer, the chat template and what it is given.

    native: the template shows tools. It takes some tenths of a second for a large vocabulary.
    """
    facts = (
        __version__,
        tokenizer.definition,
        tokenizer.prefix_ids,
        card.chat_template,
        sorted(card.special_tokens.items()),
        native,
    )
    return blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest()
