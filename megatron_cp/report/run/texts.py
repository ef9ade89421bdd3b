"""What the model wrote while it was trained: samples of text, newest first, read and shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from megatron_cp.data.prompts import TextSample
from megatron_cp.report.draw.html import Table, note, row
from megatron_cp.report.draw.svg import Markup, escape, tag

MOST_CHARACTERS = 4000  # of one field; a sample of training has a few hundred
MOST_SAMPLES = 400
_SPLITS = {"valid": "held-out", "test": "held-out (test)", "train": "training"}


def read_texts(path: Path) -> tuple[TextSample, ...]:
    """Returns the newest samples of a run, in the order of the file; what is no sample is left out."""
    if not path.is_file():
        return ()
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(_text(json.loads(line)))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # the last line of a run that was killed while it wrote
    return tuple(found[-MOST_SAMPLES:])


def _text(record: Mapping[str, object]) -> TextSample:
    words = {name: record[name] for name in ("split", "prompt", "continuation", "original")}
    numbers = {name: record[name] for name in ("iteration", "document")}
    if not all(isinstance(value, str) for value in words.values()):
        raise TypeError("a text is not a text")
    if not all(type(value) is int for value in numbers.values()):
        raise TypeError("a number is not a number")
    cut = {name: str(value)[:MOST_CHARACTERS] for name, value in words.items()}
    return TextSample(**cut, **numbers, ended=record["ended"] is True)  # type: ignore[arg-type]


def texts_parts(texts: Sequence[TextSample], said: Mapping[str, object]) -> list[Markup]:
    """Returns the parts of the page's section; none where no sample was asked for.

    `said` is what run.json says of samples.
    """
    if isinstance(said.get("refused"), str):
        return [note(f"No samples of text: {said['refused']}.")]
    if not texts:
        return [note("No samples of text yet.")] if said else []
    newest = max(one.iteration for one in texts)
    ordered = sorted(texts, key=lambda one: (one.document, -one.iteration))
    figures = [_figure(list(same)) for _, same in groupby(ordered, key=lambda one: one.document)]
    kind = _SPLITS.get(texts[0].split, texts[0].split)
    words = (
        f"The model after step {newest} goes on from the beginnings of {len(figures)} {kind} documents. Every token is "
        "drawn from the probabilities that the model gives, with the same random numbers at every step. A model that "
        "has seen little text writes words that look right and mean nothing."
    )
    return [note(words), row(*figures)]


def _figure(same: Sequence[TextSample]) -> Markup:
    """Returns one prompt with its texts, newest first."""
    newest, *earlier = same
    end = tag("small", Markup(" (the model ended the document)")) if newest.ended else Markup("")
    parts = [
        tag("h3", escape(f"Document {newest.document}, step {newest.iteration}")),
        _passage(newest.prompt, newest.continuation),
        end,
        _folded("What the document says", [_passage(newest.prompt, newest.original)]),
    ]
    if earlier:
        drawn = [
            part
            for one in earlier
            for part in (tag("b", escape(f"step {one.iteration}")), _passage("", one.continuation))
        ]
        parts.append(_folded("At earlier steps", drawn))
    return tag("figure", *parts, class_="w6 sample")


def _passage(prompt: str, written: str) -> Markup:
    return tag("p", tag("span", escape(prompt)), tag("mark", escape(written)), class_="text")


def _folded(title: str, parts: Sequence[Markup]) -> Markup:
    return tag("details", tag("summary", escape(title)), *parts)


def texts_table(texts: Sequence[TextSample]) -> Table:
    """Returns the samples as a table for a tracker."""
    columns = ("step", "document", "prompt", "continuation", "what the document says")
    rows = [
        (one.iteration, one.document, one.prompt, one.continuation, one.original) for one in texts
    ]
    return Table(columns, rows)
