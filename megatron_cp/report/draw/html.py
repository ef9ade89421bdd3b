"""A page: header with links, sections of figures and tables, foot. One file, no network.

The only script is `chart.js`, which shows the values of line charts; the content security policy names it by its
hash, so that no other can run.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_cp.report.draw.style import style_sheet
from megatron_cp.report.draw.svg import EMPTY, Markup, escape, join, tag

MAX_PAGE_BYTES = 3_000_000
MAX_CSV_ROWS = 1000
PREDICTED = tag("span", Markup("predicted"), class_="badge")


@dataclass(frozen=True)
class Table:
    """The numbers behind a picture."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[object]]

    def as_csv(self) -> str:
        """Returns comma-separated values; beyond MAX_CSV_ROWS every n-th row, and the last."""
        stride = -(-len(self.rows) // MAX_CSV_ROWS) if self.rows else 1
        kept = [*self.rows[::stride]]
        if stride > 1 and self.rows[-1] is not kept[-1]:
            kept.append(self.rows[-1])
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([[_cell(value) for value in row] for row in kept])
        note = f"# one row in {stride} of {len(self.rows)}\n" if stride > 1 else ""
        return note + stream.getvalue()


def _cell(value: object) -> object:
    return f"{value:.7g}" if isinstance(value, float) else value


@dataclass(frozen=True)
class Figure:
    """A picture, what to see in it, and its numbers."""

    title: str
    caption: str
    picture: Markup
    table: Table
    columns: int = 6
    """Width of 12."""
    predicted: bool = False

    def markup(self) -> Markup:
        """Returns the figure as HTML."""
        badge = Markup(f" {PREDICTED}") if self.predicted else EMPTY
        words = Markup(f"Numbers (CSV){tag('span', escape(f' of {self.title}'), class_='hidden')}")
        numbers = scrolling(tag("pre", escape(self.table.as_csv())), f"Numbers of {self.title}")
        return tag(
            "figure",
            tag("h3", escape(self.title), badge),
            tag("figcaption", escape(self.caption)),
            scrolling(self.picture, self.title, "plot"),
            tag("details", tag("summary", words), numbers),
            class_=f"w{self.columns}",
        )


def scrolling(content: Markup, label: str, class_: str = "scroll") -> Markup:
    """Returns the content in a frame that scrolls where it is too wide, with the keyboard too."""
    return tag("div", content, class_=class_, tabindex=0, role="region", aria_label=label)


@dataclass(frozen=True)
class Tile:
    """One number of the headline strip."""

    label: str
    value: str
    detail: str
    predicted: bool = False

    def markup(self) -> Markup:
        """Returns the tile as HTML."""
        badge = Markup(f" {PREDICTED}") if self.predicted else EMPTY
        return tag(
            "div",
            tag("span", escape(self.label), badge),
            tag("b", escape(self.value)),
            tag("small", escape(self.detail)),
            class_="tile",
        )


def strip(tiles: Iterable[Tile]) -> Markup:
    """Returns the headline strip."""
    return tag("section", *(tile.markup() for tile in tiles), class_="strip")


def row(*figures: Figure | Markup) -> Markup:
    """Returns figures side by side."""
    drawn = (one.markup() if isinstance(one, Figure) else one for one in figures)
    return tag("div", *drawn, class_="row")


def note(words: str) -> Markup:
    """Returns a remark as wide as the page."""
    return tag("p", escape(words), class_="note")


@dataclass(frozen=True)
class Section:
    """A part of the page that the links at its top lead to."""

    name: str
    """What stands behind the # of its address: letters and dashes."""
    title: str
    parts: Sequence[Markup]

    def markup(self) -> Markup:
        """Returns the section as HTML."""
        label = f"{self.name}-title"
        return tag(
            "section",
            tag("h2", escape(self.title), id=label),
            *self.parts,
            id=self.name,
            aria_labelledby=label,
        )


def page(
    title: str, subtitle: str, sections: Sequence[Section], foot: Mapping[str, object]
) -> Markup:
    """Returns the whole page."""
    terms = [Markup(tag("dt", escape(k)) + tag("dd", escape(v))) for k, v in foot.items()]
    script = Path(__file__).with_name("chart.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width,initial-scale=1"),
            # Belt and braces: even if something slipped through, nothing could be fetched or run.
            tag(
                "meta",
                http_equiv="Content-Security-Policy",
                content=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
            ),
            tag("title", escape(title)),
            tag("style", Markup(style_sheet())),
        ]
    )
    links = [tag("li", tag("a", escape(one.title), href=f"#{one.name}")) for one in sections]
    body = join(
        [
            tag("a", Markup("Skip to the figures"), href=f"#{sections[0].name}", class_="skip"),
            tag("header", tag("h1", escape(title)), tag("p", escape(subtitle))),
            tag("nav", tag("ul", *links), aria_label="Sections"),
            tag("main", *(one.markup() for one in sections)),
            tag("footer", tag("dl", *terms)),
            tag("script", Markup(script)),
        ]
    )
    return Markup(
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'
    )


def write_page(path: Path, content: Markup) -> int:
    """Writes the page and returns its bytes; ValueError above MAX_PAGE_BYTES, nothing is written."""
    data = content.encode("utf-8")
    if len(data) > MAX_PAGE_BYTES:
        raise ValueError(
            f"the page for {path} has {len(data):,} bytes, allowed {MAX_PAGE_BYTES:,}; "
            "report a run with fewer ranks or give fewer packs"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return len(data)
