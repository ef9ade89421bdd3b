"""Which text may be written down: what is on a list, without parts that are shaped like keys.

Nothing beyond the standard library: command lines are refused before anything is imported.
"""

from __future__ import annotations

import re

REMOVED = "<removed>"

_ALLOWED_TEXT = re.compile(r"[\w .,:;+*/|()\[\]<>%~^-]*")
_PARTS = re.compile(r"[^/ ,:;|()\[\]]+")
_BEARER = re.compile(r"(?i)\b(?:(?:bearer|basic|authorization)\b|token\s)")

# What begins keys and may begin names too (sk_text_document), and what begins keys alone.
_OF_KEYS_OR_NAMES = "hf|sk|pk|rk|pat|npm|pypi"
_OF_KEYS = "gh[posu]|github_pat|glpat|xox[a-z]|dop_v1|nvapi|wandb_v1|sk[-_](?:ant|proj|svcacct|or)"
# Letters and digits without a break, as no word of a name is: 12 of them, or 8 in which aB, a1 or 1a stand.
_NO_WORD = (
    r"(?:[A-Za-z0-9]{12,}|(?=[A-Za-z0-9]*(?:[a-z][A-Z]|[A-Za-z]\d|\d[A-Za-z]))[A-Za-z0-9]{8,})"
)
_KEYS = re.compile(
    rf"^(?i:{_OF_KEYS_OR_NAMES})[-_]\w{{8,}}"
    rf"|(?<![A-Za-z])(?:(?i:{_OF_KEYS_OR_NAMES})[-_][\w-]{{0,64}}?(?<![A-Za-z0-9]){_NO_WORD}|(?i:{_OF_KEYS})[-_][\w-]{{8,}}"
    r"|(?:AKIA|ASIA|AIza|ya29\.|eyJ)[\w.-]{8,})"
    # As long as the keys of wandb, clouds and hubs are, of digits and letters without a break.
    r"|(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{20,}"
)
# pathlib makes one slash of two. A user and a password may hold any sign before the @.
_URL = re.compile(r"""(?i)\b[a-z][a-z0-9+.-]+:/+(?:[^@\n]*@)?[^\s'"]*[^\s'".,:;)]""")

# All but the tab and the end of a line.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def loggable_text(text: str) -> str:
    """Returns the text; without the parts that look like keys, and nothing of it where its form is not allowed."""
    if not _ALLOWED_TEXT.fullmatch(text) or _BEARER.search(text):
        return REMOVED
    return _PARTS.sub(lambda part: REMOVED if is_key(part[0]) else part[0], text)


def is_key(part: str) -> bool:
    """Whether a part of a text, without blanks and slashes, is shaped like a key or holds what is."""
    return _KEYS.search(part) is not None


def is_url(text: str) -> bool:
    """Whether a text begins as a URL does; a path of this machine does not."""
    return _URL.match(text) is not None


def without_secrets(line: str) -> str:
    """Returns a line that is said to a person: of its URLs those that may be written down, and no control signs."""
    return without_controls(_URL.sub(lambda url: loggable_text(url[0]), line))


def without_controls(text: str) -> str:
    """Returns text of which a terminal does nothing but show it: a name in a file may hold what moves its cursor."""
    return _CONTROLS.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text)
