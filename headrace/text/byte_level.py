"""GPT-2's alphabet: one printable character for each byte, so that a vocabulary file is text."""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_MOVED = [byte for byte in range(256) if byte not in _PRINTABLE]

# Printable Latin-1 stands for itself; the other bytes, in order, are U+0100 and up.
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + n): byte for n, byte in enumerate(_MOVED)
}
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}


def token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one with a character outside the alphabet is plain text."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()
