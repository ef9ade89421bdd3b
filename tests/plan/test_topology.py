"""Hardware rows and measured profiles: what is read, what is refused, and what measured rates change."""

import json
import re

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Level, Topology
from megatron_cp.plan import make_plan
from megatron_cp.plan.hardware.makespan import (
    makespan_seconds,
    slowdown,
    stage_areas,
    weighted_areas,
)
from megatron_cp.plan.hardware.topology import TOPOLOGIES, get_topology, load_profile


def profile(**changes):
    """A complete profile, with entries replaced; None leaves one out."""
    cells = [
        {"rows": rows, "keys": keys, "forward_tflops": rate, "backward_tflops": rate / 2}
        for rows, keys, rate in (
            (128, 128, 50.0), (128, 2048, 100.0), (1024, 128, 200.0), (1024, 2048, 400.0),
        )
    ]  # fmt: skip
    whole = {
        "name": "measured",
        "node_size": 8,
        "inner_gbytes_per_s": 300,
        "outer_gbytes_per_s": 40.5,
        "latency_us": 0,
        "kernel": cells,
    }
    whole |= changes
    return {key: value for key, value in whole.items() if value is not None}


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "profile.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_a_profile_holds_what_its_file_says(write):
    row = load_profile(write(profile()))
    assert (row.name, row.node_size, row.latency_us) == ("measured", 8, 0.0)
    assert (row.inner_gbytes_per_s, row.outer_gbytes_per_s) == (300.0, 40.5)
    assert (row.forward_tflops, row.backward_tflops) == (400.0, 200.0)  # the peaks
    assert row.contention == 0 and load_profile(write(profile(contention=0.2))).contention == 0.2
    boxes = ((50.0, 100.0), (200.0, 400.0))
    assert row.kernels.forward_tflops == (boxes, boxes)
    assert get_topology(row) is row


def test_a_profile_may_have_wider_levels_shared_ports_and_ranks_of_different_speed(write):
    levels = [
        {"size": 32, "gbytes_per_s": 20},
        {"size": 128, "gbytes_per_s": 9.5, "latency_us": 40},
    ]
    more = {"outer_levels": levels, "nics_per_node": 4, "rank_speeds": [1, 0.5]}
    row = load_profile(write(profile(**more)))
    assert row.outer_levels == (Level(32, 20.0, None), Level(128, 9.5, 40.0))
    assert (row.nics_per_node, row.rank_speeds) == (4, (1.0, 0.5))
    plain = load_profile(write(profile()))
    assert (plain.outer_levels, plain.nics_per_node, plain.rank_speeds) == ((), None, None)


def test_a_profile_without_a_name_has_that_of_its_file(write):
    assert load_profile(write(profile(name=None))).name == "profile"


def cells_without(index, **entries):
    cells = profile()["kernel"]
    changed = {**cells[index], **entries}
    cells[index] = {key: value for key, value in changed.items() if value is not None}
    return profile(kernel=cells)


BAD_PROFILES = {
    "no JSON": ("{", ["is not JSON", "docs/simulate.md"]),
    "a list": ([], ["must be a JSON object"]),
    "no kernel": (profile(kernel=None), ["entry 'kernel'", "forward_tflops"]),
    "empty kernel": (profile(kernel=[]), ["entry 'kernel' is []"]),
    "cell no object": (profile(kernel=[3]), ["kernel[0] is 3"]),
    "no link": (profile(inner_gbytes_per_s=None), ["'inner_gbytes_per_s' is missing"]),
    "negative link": (profile(outer_gbytes_per_s=-4), ["'outer_gbytes_per_s' is -4", "positive"]),
    "no latency": (profile(latency_us=None), ["'latency_us' is missing"]),
    "negative latency": (profile(latency_us=-1), ["'latency_us' is -1"]),
    "negative share": (profile(contention=-0.1), ["'contention' is -0.1"]),
    "all of it": (profile(contention=1), ["'contention' is 1;", "from 0 to below 1"]),
    "text": (profile(outer_gbytes_per_s="fast"), ["'outer_gbytes_per_s' is 'fast'"]),
    "true": (profile(inner_gbytes_per_s=True), ["'inner_gbytes_per_s' is True"]),
    "no node": (json.dumps(profile() | {"node_size": None}), ["'node_size' is missing"]),
    "half a node": (profile(node_size=2.5), ["'node_size' is 2.5", "whole number"]),
    "infinite": (profile(inner_gbytes_per_s=float("inf")), ["'inner_gbytes_per_s' is inf"]),
    "negative rate": (cells_without(2, forward_tflops=-1), ["kernel[2]", "'forward_tflops' is -1"]),
    "no rate": (cells_without(1, backward_tflops=None), ["kernel[1]", "'backward_tflops' is missing"]),
    "no rows": (cells_without(0, rows=0), ["kernel[0]", "'rows' is 0"]),
    "slanted once": (cells_without(1, slanted_forward_tflops=5), ["kernel[0]", "'slanted_forward_tflops' is missing"]),
    "repeated": (cells_without(3, rows=128), ["kernel[3] repeats rows=128, keys=2048"]),
    "huge node": (profile(node_size=10**400), ["'node_size' is 1000", "whole number, at most 2147483648"]),
    "more than a node": (profile(node_size=2**31 + 1), ["'node_size' is 2147483649", "at most 2147483648"]),
    "huge link": (profile(inner_gbytes_per_s=10**400), ["'inner_gbytes_per_s' is 1000", "a positive number"]),
    "latency of text": (profile(latency_us="x"), ["'latency_us' is 'x'; it must be 0 or a positive number"]),
    "latency left out": (profile(latency_us=None), ["give 0 or a positive number"]),
    "misspelt": (profile(node_sizes=8), ["entry 'node_sizes' is unknown", "nearest: node_size)"]),
    "misspelt in a cell": (cells_without(1, row=5), ["kernel[1]: entry 'row' is unknown", "nearest: rows)"]),
    "name no string": (profile(name=[1, 2]), ["entry 'name' is [1, 2]; it must be a string"]),
    "levels no list": (profile(outer_levels={"size": 16}), ["entry 'outer_levels' is {'size': 16}", "list of levels"]),
    "level no object": (profile(outer_levels=[16]), ["outer_levels[0] is 16; it must have size"]),
    "level without size": (profile(outer_levels=[{"gbytes_per_s": 4}]), ["outer_levels[0]", "'size' is missing"]),
    "level of half a node": (profile(outer_levels=[{"size": 12, "gbytes_per_s": 4}]), ["size=12", "multiple of 8"]),
    "misspelt in a level": (profile(outer_levels=[{"sizes": 16}]), ["[0]: entry 'sizes'", "nearest: size)"]),
    "level without rate": (profile(outer_levels=[{"size": 16}]), ["outer_levels[0]", "'gbytes_per_s' is missing"]),
    "latency of a level": (profile(outer_levels=[{"size": 16, "gbytes_per_s": 4, "latency_us": -2}]),
                           ["outer_levels[0]", "'latency_us' is -2"]),
    "too many ports": (profile(nics_per_node=9), ["nics_per_node=9 ", "from 1 to node_size=8"]),
    "half a port": (profile(nics_per_node=0.5), ["'nics_per_node' is 0.5", "whole number"]),
    "speeds of text": (profile(rank_speeds="1,1"), ["rank_speeds='1,1' must be one number per context rank"]),
    "a speed of 0": (profile(rank_speeds=[1, 0]), ["rank_speeds[1]=0 ", "from 0.01 to 100"]),
    "hole": (profile(kernel=profile()["kernel"][:3]), ["no entry for rows=1024, keys=2048"]),
}  # fmt: skip


def test_null_is_an_entry_left_out(write):
    optional = dict.fromkeys(("contention", "nics_per_node", "outer_levels", "rank_speeds"))
    assert load_profile(write(profile() | optional)) == load_profile(write(profile()))
    level = {"size": 16, "gbytes_per_s": 4}
    wide, told = (profile(outer_levels=[one]) for one in (level, level | {"latency_us": None}))
    assert load_profile(write(told)) == load_profile(write(wide))


@pytest.mark.parametrize("name", sorted(BAD_PROFILES))
def test_a_bad_profile_is_refused_in_one_line_with_entry_and_file(write, name):
    content, fragments = BAD_PROFILES[name]
    path = write(content)
    with pytest.raises(ValueError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) < 400
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("name", "near"), [("H100", "h100"), ("h20", "h200"), ("gpu", "cpu"), ("A-800", "a800")]
)
def test_an_unknown_topology_names_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"nearest: {near}"):
        get_topology(name)


@pytest.mark.parametrize(
    "change",
    [{"forward_tflops": 0.0}, {"node_size": 0}, {"outer_gbytes_per_s": -1.0}, {"latency_us": -1.0}],
)
def test_a_topology_with_a_rate_that_is_not_positive_is_refused(change):
    row = {**vars(TOPOLOGIES["h100"]), **change}
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.*of topology 'h100'"):
        Topology(**row)


@pytest.mark.parametrize(
    "change",
    [
        {"forward_tflops": "300"},
        {"inner_gbytes_per_s": None},
        {"latency_us": True},
        {"contention": [0.1]},
        {"node_size": 8.0},
        {"kernels": {}},
        {"name": 3},
    ],
)
def test_a_topology_of_other_types_is_refused_by_name(change):
    row = {**vars(TOPOLOGIES["h100"]), **change}
    name, value = next(iter(change.items()))
    with pytest.raises(TypeError, match=re.escape(f"{name}={value!r} of ")):
        Topology(**row)


def test_rates_are_interpolated_over_the_logarithm_of_rows_and_keys(write):
    kernels = load_profile(write(profile())).kernels

    def rate(rows, keys):
        box = np.array([[0, rows, 0, keys, -rows, keys]])
        return 400.0 / slowdown(kernels, box, "forward")[0]

    assert rate(128, 128) == pytest.approx(50) and rate(1024, 2048) == pytest.approx(400)
    assert rate(1024, 512) == pytest.approx(300)  # half way from 128 to 2048
    assert rate(256, 128) == pytest.approx(100)  # a third of the way from 128 to 1024
    assert rate(1, 1) == pytest.approx(50) and rate(9999, 99999) == pytest.approx(400)  # clamped
    half = np.array([[0, 1024, 0, 1023 + 1, -1023, 0]])  # a triangle: 512.5 keys per row
    assert 400.0 / slowdown(kernels, half, "forward")[0] == pytest.approx(
        200 + 200 * np.log2(512.5 / 128) / 4
    )


def test_slices_that_a_diagonal_cuts_have_rates_of_their_own(write):
    cell = {"rows": 64, "keys": 64, "forward_tflops": 80, "backward_tflops": 60}
    slanted = {"slanted_forward_tflops": 20, "slanted_backward_tflops": 90}
    row = load_profile(write(profile(kernel=[cell | slanted])))
    assert (row.forward_tflops, row.backward_tflops) == (80.0, 90.0)
    slices = np.array([m.array[0] for m in (masks.full(8), masks.causal(8), masks.causal(1))])
    assert slowdown(row.kernels, slices, "forward").tolist() == [1.0, 4.0, 1.0]
    assert slowdown(row.kernels, slices, "backward").tolist() == [1.5, 1.0, 1.5]
    window = masks.sliding_window(9, 2).array[:1]
    assert slowdown(row.kernels, window, "forward").tolist() == [4.0]


def test_measured_rates_slow_a_plan_down_slice_by_slice(write):
    row = load_profile(write(profile()))
    options = CPConfig(planner="contiguous", topology=row, head_dim=64)
    plan = make_plan(masks.documents([1024, 3072], "full"), 4, options)
    weighted, areas = weighted_areas(plan, "forward"), stage_areas(plan, "forward")
    assert weighted[0, 0] == pytest.approx(areas[0, 0] * 400 / 350)  # 1024 keys: 3/4 of the way
    assert weighted[1, 2] == pytest.approx(areas[1, 2])  # 2048 keys: the peak
    assert makespan_seconds(plan, "forward") >= 3 * 1024 * 1024 * 4 * 64 / 400e12
    flat = {**vars(row), "kernels": None}
    without = make_plan(plan.mask, 4, CPConfig(**{**vars(options), "topology": Topology(**flat)}))
    assert np.array_equal(weighted_areas(without, "forward"), stage_areas(without, "forward"))


def test_a_table_of_one_rate_changes_nothing(write):
    cell = {"rows": 64, "keys": 64, "forward_tflops": 80, "backward_tflops": 60}
    row = load_profile(write(profile(kernel=[cell])))
    options = CPConfig(planner="zigzag", topology=row, num_heads=2, num_kv_heads=1)
    plan = make_plan(masks.causal(500), 4, options)
    assert np.allclose(weighted_areas(plan, "backward"), stage_areas(plan, "backward"), rtol=1e-12)
