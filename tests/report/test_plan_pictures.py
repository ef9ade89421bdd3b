"""What a reader sees in the pictures of a plan: which cell, which label, which bar, against the plan itself."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_cp import CPConfig, make_plan
from megatron_cp.mask import causal, documents
from megatron_cp.report.figures.mask import FINEST, SIZE, mask_picture
from megatron_cp.report.figures.packs import dispatch_figure
from megatron_cp.report.figures.plan import heat_maps, matrices
from megatron_cp.report.figures.view import (
    PackView,
    area_by_chunk,
    chunk_bounds,
    kv_bytes,
    needed_bytes,
    view_of_pack,
    view_of_plan,
)
from megatron_cp.report.figures.workers import workers_figure

CONFIG = CPConfig(planner="contiguous", num_heads=4, num_kv_heads=4, head_dim=8)
LENGTHS = (40, 24)
CELL = re.compile(r"rank (\d+) to rank (\d+): ")


def elements(markup):
    """(kind, attributes, title or text) of every drawn element."""
    for node in ElementTree.fromstring(f"<p>{markup}</p>").iter():
        kind = node.tag.rpartition("}")[2]
        title = next((one.text for one in node if one.tag.rpartition("}")[2] == "title"), None)
        yield kind, node.attrib, title if title is not None else node.text


def rects(markup):
    """(x, y, width, height, class, title) of every rectangle."""
    for kind, attributes, title in elements(markup):
        if kind == "rect":
            box = [float(attributes.get(name, 0)) for name in ("x", "y", "width", "height")]
            yield (*box, attributes.get("class"), title)


def texts(markup):
    """(x, y, words) of every line of text."""
    for kind, attributes, words in elements(markup):
        if kind == "text" and words:
            yield float(attributes["x"]), float(attributes["y"]), words


def plan_and_view(mask, cp_size=4):
    plan = make_plan(mask, cp_size, CONFIG)
    return plan, view_of_plan(plan)


def pack_of(mask, lengths):
    plan, view = plan_and_view(mask)
    kinds = ("causal",) * len(lengths)
    return PackView(mask, lengths, kinds, view, (), kv_bytes(plan.config))


def test_the_sender_is_the_row_and_the_receiver_the_column():
    matrix = np.array([[0, 7e6, 0], [0, 0, 2e6], [5e6, 0, 0]])
    markup = matrices([("a plan", "sent", matrix)])
    cells = {}
    for x, y, width, height, _, title in rects(markup):
        if title and (found := CELL.match(title)):
            cells[int(found[1]), int(found[2])] = (x, y, width, height)
    (board,) = [one for one in rects(markup) if one[4] == "empty"]
    assert sorted(cells) == [(0, 1), (1, 2), (2, 0)]
    size = board[2] / 3
    for (src, dst), (x, y, _, _) in cells.items():
        assert x == pytest.approx(board[0] + dst * size, abs=0.02)
        assert y == pytest.approx(board[1] + src * size, abs=0.02)
    numbers = {words: (x, y) for x, y, words in texts(markup) if re.fullmatch(r"\d\.\d", words)}
    assert sorted(numbers) == ["2.0", "5.0", "7.0"]
    for words, cell in (("7.0", (0, 1)), ("2.0", (1, 2)), ("5.0", (2, 0))):
        (x, y), (left, top, width, height) = numbers[words], cells[cell]
        assert left < x < left + width and top < y < top + height, words


def test_bars_and_labels_are_area_over_the_mean_and_the_dashed_line_is_the_mean():
    mask = causal(64)  # contiguous: each rank has more pairs than the one before
    plan, view = plan_and_view(mask)
    bounds = chunk_bounds([view])
    markup = heat_maps([("a plan", view, area_by_chunk(view, mask, bounds))], bounds)
    pairs = mask.to_dense().sum(axis=1).reshape(4, 16).sum(axis=1)
    shares = pairs / pairs.mean()
    bars = [(x, width) for x, _, width, _, kind, _ in rects(markup) if kind == "bar"]
    assert len(bars) == 4
    widths = np.array([width for _, width in bars])
    assert widths / widths.max() == pytest.approx(shares / shares.max(), abs=1e-3)
    labels = [words for _, _, words in texts(markup) if re.fullmatch(r"\d\.\d\d", words)]
    assert labels == [f"{share:.2f}" for share in shares]
    assert labels[-1] == f"{plan.stats('forward')['imbalance']:.2f}"
    (mean,) = [a for kind, a, _ in elements(markup) if kind == "line" and a["class"] == "mean"]
    one = bars[0][0] + widths.max() / shares.max()
    assert float(mean["x1"]) == float(mean["x2"]) == pytest.approx(one, abs=0.02)


def test_with_ranks_of_different_speed_bars_are_pairs_over_speed_as_the_title_is():
    speeds = (1, 1, 0.5, 1)
    config = replace(CONFIG, planner="auto", rank_speeds=speeds)
    plan = make_plan(causal(1 << 15), 4, config)
    figure = dispatch_figure(view_of_pack([plan]))
    pairs = view_of_plan(plan).area
    shares = pairs / speeds / (pairs.sum() / sum(speeds))
    assert pairs.max() / pairs.mean() > 1.1  # the slow rank has fewer
    labels = [words for _, _, words in texts(figure.picture) if re.fullmatch(r"\d\.\d\d", words)]
    assert labels == [f"{share:.2f}" for share in shares]
    assert f"busiest rank {max(labels)} × mean" in figure.picture
    assert "area / speed / mean" in figure.picture and "area / speed should" in figure.caption


def test_a_cell_of_the_heat_map_says_its_tokens_and_pairs_in_the_row_of_its_rank():
    mask = documents(list(LENGTHS))
    _, view = plan_and_view(mask)
    bounds = chunk_bounds([view])
    heat = area_by_chunk(view, mask, bounds)
    markup = heat_maps([("a plan", view, heat)], bounds)
    rows = {}
    for _, y, _, _, _, title in rects(markup):
        if title and (found := re.match(r"rank (\d+), tokens (\d+)–(\d+): (\S+) pairs", title)):
            rank, first, end = (int(found[i]) for i in (1, 2, 3))
            rows.setdefault(rank, y)
            assert rows[rank] == y
            expected = mask.to_dense()[first:end].sum()
            assert found[4] == f"{expected:.3g}"
    assert sorted(rows) == [0, 1, 2, 3] and sorted(rows.values()) == list(rows.values())


def test_pairs_of_a_later_query_are_drawn_further_down_and_of_a_later_key_further_right():
    mask = documents(list(LENGTHS))
    figure = workers_figure(pack_of(mask, LENGTHS))
    drawn = [(x, y, title) for x, y, _, _, _, title in rects(figure.picture) if title]
    (board,) = [one for one in rects(figure.picture) if one[4] == "empty"]
    dense, cells = mask.to_dense(), 48
    edges = np.linspace(0, 64, cells + 1).astype(int)
    expected = {
        (i, j)
        for i in range(cells)
        for j in range(cells)
        if dense[edges[i] : edges[i + 1], edges[j] : edges[j + 1]].any()
    }
    size = board[2] / cells
    found = {(round((y - board[1]) / size), round((x - board[0]) / size)) for x, y, _ in drawn}
    assert found == expected and any(i != j for i, j in found)


def test_bands_at_the_left_and_above_lie_at_the_tokens_of_their_rank():
    mask = documents(list(LENGTHS))
    pack = pack_of(mask, LENGTHS)
    markup = mask_picture(pack)
    board = next(one for one in rects(markup) if one[4] == "empty")
    bands = {}
    for x, y, width, height, _, title in rects(markup):
        if title and (found := re.match(r"rank (\d+) owns (\d+) tokens", title)):
            assert int(found[2]) == 16
            side = "left" if x < board[0] else "above"
            bands[side, int(found[1])] = (
                (y - board[1], height) if side == "left" else (x - board[0], width)
            )
    for rank, tokens in enumerate(pack.ours.tokens):
        first, count = int(tokens[0]), len(tokens)
        place = (first / 64 * board[2], count / 64 * board[2])
        assert bands["left", rank] == pytest.approx(place, abs=0.02)
        assert bands["above", rank] == pytest.approx(place, abs=0.02)


def test_bands_of_tokens_dealt_one_by_one_are_of_bounded_number_and_say_what_a_rank_owns():
    """Every fourth token: a rectangle for each would be megabytes of page."""
    plan = make_plan(causal(8192), 4, replace(CONFIG, planner="stripe"))
    pack = PackView(plan.mask, (8192,), ("causal",), view_of_plan(plan), (), kv_bytes(CONFIG))
    assert [list(ids[:2]) for ids in pack.ours.tokens] == [[r, r + 4] for r in range(4)]
    drawn = [one for one in rects(mask_picture(pack)) if one[5] and "owns 2048 tokens" in one[5]]
    assert 8 <= len(drawn) <= 2 * FINEST
    left = [(y, height) for x, y, _, height, _, _ in drawn if x < 40]
    assert sum(height for _, height in left) == pytest.approx(SIZE, rel=0.02)


def test_needed_bytes_are_the_keys_that_a_ranks_queries_see_and_another_owns():
    mask = documents(list(LENGTHS))
    _, view = plan_and_view(mask)
    dense, needed = mask.to_dense(), np.zeros((4, 4))
    for src in range(4):
        for dst in range(4):
            block = dense[dst * 16 : dst * 16 + 16, src * 16 : src * 16 + 16]
            needed[src, dst] = 0 if src == dst else block.any(axis=0).sum() * 10
    assert np.array_equal(needed_bytes(view, mask, 10), needed)
    assert not np.array_equal(needed, needed.T)
