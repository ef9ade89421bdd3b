"""Pictures: every cell of the text is right, and the shapes of the SVG cover the mask's area."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.mask import draw
from tests.strategies import attention_masks

SVG = "{http://www.w3.org/2000/svg}"


@given(attention_masks(), st.integers(1, 30))
def test_ascii_marks_full_partial_and_empty_cells(drawn, max_size):
    mask, dense = drawn
    lines = [line.split(" ") for line in draw.ascii(mask, max_size).split("\n")]
    rows, columns = (min(n, max_size) for n in dense.shape)
    assert [len(line) for line in lines] == [columns] * rows
    for i, j in np.ndindex(rows, columns):
        q, k = (
            slice(at * n // c, (at + 1) * n // c)
            for at, n, c in ((i, dense.shape[0], rows), (j, dense.shape[1], columns))
        )
        cell = dense[q, k]
        assert lines[i][j] == ("#" if cell.all() else "+" if cell.any() else ".")


def painted_area(picture: str) -> float:
    """Returns the area of all outlines, by the shoelace formula."""
    total = 0.0
    for path in ElementTree.fromstring(picture).iter(f"{SVG}path"):
        for outline in re.findall(r"M([^Mz]*)z", path.get("d").replace("h1v1h-1", "L0 0")):
            x, y = np.array([p.split() for p in outline.split("L")], dtype=float).T
            total += abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
    return total


@given(attention_masks())
def test_svg_stairs_cover_exactly_the_allowed_pairs(drawn):
    mask, dense = drawn
    scale = 640 / max(dense.shape)
    assert painted_area(draw.svg(mask)) == pytest.approx(dense.sum() * scale**2, rel=1e-3)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(5000),
        masks.sliding_window(5000, 700, 300, 100),
        masks.documents([2000, 1000, 2000], ["full", "causal", ("prefix", 700)]),
        masks.global_sliding_window(5000, 500, 300),
        masks.causal(3000, 5000).transpose(),
    ],
)
def test_svg_polygons_cover_the_allowed_pairs_to_a_percent(mask):
    scale = 640 / max(mask.num_queries, mask.num_keys)
    assert painted_area(draw.svg(mask)) == pytest.approx(mask.area() * scale**2, rel=0.01)


def test_svg_of_many_small_documents_is_small():
    mask = masks.documents(np.full(10_000, 104))
    picture = draw.svg(mask, np.arange(mask.num_queries) % 8)
    assert len(picture) < 300_000
    assert ElementTree.fromstring(picture).find(f"{SVG}title").text.count("10000 slices") == 1


def test_svg_bands_show_the_owner_of_every_token():
    owners = np.array([0, 0, 1, 1, 1, 1, 0])
    picture = draw.svg(masks.causal(7), owners, max_pixels=70)
    left = [
        (rect.find(f"{SVG}title").text, float(rect.get("y")), float(rect.get("height")))
        for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect")
        if rect.get("x") == "-14"
    ]
    assert left == [("rank 0", 0, 20), ("rank 1", 20, 40), ("rank 0", 60, 10)]


def test_svg_escapes_its_title():
    picture = draw.svg(masks.causal(3), title="<a & b>")
    assert ElementTree.fromstring(picture).find(f"{SVG}title").text.startswith("<a & b>")


def test_empty_masks_can_be_drawn():
    empty = masks.full(0)
    assert draw.ascii(empty) == ""
    assert ElementTree.fromstring(draw.svg(empty, np.zeros(0))) is not None
