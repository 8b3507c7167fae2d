"""What a machine said, made safe and short to look at. Data and evidence keep it as it came; this is for whoever reads.

WHY: a terminal obeys an escape sequence, a browser turns text around at a bidi override, and neither shows a zero-width blank:
a hostile line could hide a finding, or write another one over it.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["SENTENCE", "capped", "json_text", "short_digests", "visible"]

#: The most characters of one sentence that a view shows (a reason, an advice); who wants the rest finds it in record.json.
SENTENCE = 1500

_DIGEST = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")

#: Control characters but newline and tab; marks and overrides of direction; blanks without a width; separators that only some
#: programs take for a new line; half characters and tags.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """``text`` with everything that acts instead of being read in its visible form: ESC as ``␛``, U+202E as ``\\u202e``."""
    return _HIDDEN.sub(lambda found: _picture(found[0]), text)


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def capped(text: str, most: int = SENTENCE) -> str:
    """At most ``most`` characters of ``text``, and how many more there are."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters in record.json)"


def short_digests(text: str) -> str:
    """``text`` with every 64-digit digest cut to 12 digits: a line that is read is not a line that is compared."""
    return _DIGEST.sub(lambda found: f"{found[0][:12]}…", text)


def json_text(value: Any) -> str:
    """JSON in one line, of the same value, in which nothing acts on a terminal."""
    return _HIDDEN.sub(lambda found: _escape(ord(found[0])), json.dumps(value, ensure_ascii=False))


def _escape(code: int) -> str:
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
