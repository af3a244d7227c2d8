"""The tokenizer of the fake model: one token a byte, and three special tokens.

Ids 0..255 are bytes, 256 <|endoftext|>, 257 <|im_start|>, 258 <|im_end|>.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headrace.text.byte_level import CHAR_OF

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build() -> tokenizers.Tokenizer:
    """A byte-level BPE without merges."""
    vocab = {CHAR_OF[byte]: byte for byte in range(256)}
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return built
