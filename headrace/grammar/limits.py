"""How large a grammar may be, and what it may cost, for those who check and compile it."""

from __future__ import annotations

MAX_TEXT = 256 * 1024  # characters of a schema, regular expression, choice list or grammar
MAX_DEPTH = 64  # nested objects and arrays in a schema's own text
MAX_CHOICES = 4096
CHECK_S = 5.0  # wall clock of one check; what takes longer is refused
CHECK_BYTES = 3 * 2**30  # address space of the process that checks
CACHED = 64  # compiled grammars that an engine keeps
LEXER_STATES = 100_000  # of one grammar; each takes 1 to 2 kB

# Whitespace between the tokens of JSON: nothing, a space, or one or two newlines and an indent.
# Bounded, so that no model can fill its max_tokens with blanks.
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
