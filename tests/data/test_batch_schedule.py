"""Batch sizes that change, against Megatron-Core's own calculator and against counting."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.batch_schedule import BatchSchedule, constant, parse_steps, ramp
from tests.data import megatron_oracle


@pytest.mark.parametrize(
    ("start", "increment", "packs", "final"),
    [(4, 4, 100, 16), (2, 2, 7, 8), (1, 1, 3, 9)],
)
def test_a_ramp_is_megatrons(start: int, increment: int, packs: int, final: int):
    consumed = list(range(packs + 40))
    schedule = ramp(start, increment, packs, final)
    found = [schedule.size_at(count) for count in consumed]
    expected = megatron_oracle.ramped_sizes(start, increment, packs, final, consumed)
    if expected is None:
        pytest.skip("this Megatron-Core has no ramps")
    assert found == expected


def test_a_ramp_without_packs_or_increments_is_no_ramp():
    assert ramp(8, 8, 0, 24) == constant(24)
    assert ramp(6, 3, 1000, 6) == constant(6)


def test_steps_are_read_as_megatron_reads_them():
    schedule = parse_steps("0:384 200B:768, 400b:1.152K", 4096)
    assert schedule.steps == ((0, 384), (48828125, 768), (97656250, 1152))


SCHEDULES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=5)


@given(SCHEDULES, st.integers(0, 200))
def test_the_number_of_steps_is_that_of_taking_them(gaps: list[tuple[int, int]], total: int):
    starts, at = [], 0
    for gap, size in gaps:
        starts.append((at, size))
        at += gap
    schedule = BatchSchedule(tuple(starts))
    consumed = count = 0
    while consumed + schedule.size_at(consumed) <= total:
        consumed += schedule.size_at(consumed)
        count += 1
    assert schedule.num_steps(total) == count


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: BatchSchedule(()),
        lambda: BatchSchedule(((1, 4),)),
        lambda: BatchSchedule(((0, 4), (0, 5))),
        lambda: constant(0),
        lambda: ramp(4, 3, 10, 12),
        lambda: ramp(8, 2, 10, 4),
        lambda: parse_steps("384", 10),
        lambda: parse_steps("0:many", 10),
        lambda: parse_steps("5:4", 1),
        lambda: parse_steps("", 10),
    ],
)
def test_what_is_no_schedule_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must|no number|reach"):
        wrong()


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(0, 120),
    st.integers(0, 120),
)
def test_steps_that_are_left_are_those_of_a_run_that_goes_on(parts, num_packs, consumed):
    starts = [0, *itertools.accumulate(length for length, _ in parts[:-1])]
    schedule = BatchSchedule(tuple(zip(starts, (size for _, size in parts), strict=True)))
    at, count = consumed, 0
    while at + schedule.size_at(at) <= num_packs:
        at, count = at + schedule.size_at(at), count + 1
    assert schedule.num_steps(num_packs, consumed) == count
