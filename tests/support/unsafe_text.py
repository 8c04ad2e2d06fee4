"""Characters that do something to a terminal or a log instead of being seen, by Unicode's own table."""

from __future__ import annotations

import unicodedata


def is_unsafe(char: str) -> bool:
    """Control, format and separator characters, lone surrogates, tags."""
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") or 0xE0000 <= ord(char) <= 0xE007F
