"""SVG and HTML as text, escaped by construction.

`Markup` is text that may stand in the page as it is; `str` is anything else, for instance a run's
name. Only Markup can become a child of a tag; `escape`, `tag` and `join` make it, and what is trusted
as it stands says `Markup(...)` in plain sight. The type checker refuses the rest.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

Markup = NewType("Markup", str)
Value = str | int | float | None

EMPTY = Markup("")
_VOID = frozenset({"br", "hr", "meta"})


def escape(text: object) -> Markup:
    """Returns `str(text)` with everything that HTML could misread replaced; control codes go."""
    plain = "".join(c for c in str(text) if c in "\n\t" or c.isprintable())
    return Markup(html.escape(plain, quote=True))


def join(parts: Iterable[Markup], between: str = "") -> Markup:
    """Returns the parts one after the other; `between` is escaped."""
    return Markup(escape(between).join(parts))


def tag(name: str, /, *children: Markup, **attributes: Value) -> Markup:
    """Returns an element. `stroke_width` is written stroke-width, `class_` class; None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{''.join(children)}</{name}>")


def _number(value: Value) -> str:
    """Floats with at most two decimals: a picture needs no more, and the page stays small."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"
    return str(value)


# ---------------------------------------------------------------------- elements


def picture(width: float, height: float, label: str, *children: Markup, **more: Value) -> Markup:
    """Returns a picture that scales with its column; `label` is what a screen reader says."""
    return tag(
        "svg",
        *children,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_label=label,
        style=f"max-width:{_number(width * 1.25)}px",
        **more,
    )


def text(x: float, y: float, content: object, class_: str = "", anchor: str = "start") -> Markup:
    """Returns a line of text; `class_` "muted", "strong" or "tiny" as in style.py."""
    return tag("text", escape(content), x=x, y=y, class_=class_ or None, text_anchor=anchor)


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    class_: str,
    hint: str | None = None,
    **more: Value,
) -> Markup:
    """Returns a rectangle; `hint` is shown when the pointer rests on it."""
    children = () if hint is None else (tag("title", escape(hint)),)
    return tag("rect", *children, x=x, y=y, width=width, height=height, class_=class_, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Returns a straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def path(points: Iterable[tuple[float, float]], class_: str, closed: bool = False) -> Markup:
    """Returns a line through the points, or the polygon that they bound."""
    words = " L".join(f"{_number(x)} {_number(y)}" for x, y in points)
    return tag("path", d=f"M{words}{'Z' if closed else ''}", class_=class_)


# ---------------------------------------------------------------------- scales and words


@dataclass(frozen=True)
class Scale:
    """Maps values `[low, high]` to pixels `[start, end]`; straight, or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Returns the pixel of a value."""
        low, high = self._of(self.low), self._of(self.high)
        share = (self._of(value) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def _of(self, value: float) -> float:
        return math.log(max(value, 1e-300)) if self.log else value


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round values (1, 2, 2.5 or 5 times a power of ten) in `[low, high]`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_words(ticks: Sequence[float]) -> list[str]:
    """Returns ticks for people, with as many digits as tell one from the next."""
    digits = 3
    if len(ticks) > 1:
        largest, step = max(abs(tick) for tick in ticks), ticks[1] - ticks[0]
        # one digit more than those from the largest to the step, which may be 2.5
        digits = max(digits, math.floor(math.log10(largest)) - math.floor(math.log10(step)) + 2)
    return [short(tick, digits) for tick in ticks]


def short(value: float, digits: int = 3) -> str:
    """Returns a number for people: 12.4k, 3.05M, 0.0042."""
    if value is None or not math.isfinite(value):
        return "n/a"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (1 - 10.0**-digits / 2):
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def plain(value: float, digits: int = 3) -> str:
    """Returns a number for people, without letters or powers of ten: 2,808, 36.1, 0.42."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def aligned(values: Sequence[float], digits: int = 3) -> list[str]:
    """Returns a column of numbers with the same decimals: as many as give the smallest `digits` digits, at most 4.

    Thousands have commas; what is not finite is "".
    """
    sizes = [abs(value) for value in values if math.isfinite(value) and value]
    leading = math.floor(math.log10(min(sizes))) + 1 if sizes else digits
    decimals = min(4, max(0, digits - leading))
    return [f"{value:,.{decimals}f}" if math.isfinite(value) else "" for value in values]


def exact(count: int) -> str:
    """Returns a count with commas, all digits of it; from ten million on three."""
    return f"{count:,}" if count < 10_000_000 else short(count)


def count_of(count: int, noun: str) -> str:
    """Returns a count and what is counted: 1 step, 2,048 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_bytes(value: float) -> str:
    """Returns bytes for people: 1.5 MB (powers of 1000)."""
    return f"{short(value)}B".replace("kB", " kB").replace("MB", " MB").replace("GB", " GB")


def short_tokens(value: float) -> str:
    """Returns a token count for people, in powers of 1024: 512, 8K, 1M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return plain(value, 4)
