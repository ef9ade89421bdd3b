"""Machines drawn at random: nodes and wider levels, shared network ports, ranks of different speed."""

from hypothesis import strategies as st

from megatron_cp.config import Level, Topology


@st.composite
def machines(draw, node_sizes=(1, 2, 3, 4, 8)):
    """Returns a topology of up to two levels beyond nodes, with or without shared ports and contention."""
    node = size = draw(st.sampled_from(node_sizes))
    levels, latency = [], 5.0
    for _ in range(draw(st.integers(0, 2))):
        size *= draw(st.sampled_from([2, 3]))
        own = draw(st.sampled_from([None, 0.0, 7.5]))
        latency += own or 0.0
        rate = draw(st.sampled_from([40.0, 8.0, 1.0]))
        levels.append(Level(size, rate, None if own is None else latency))
    return Topology(
        f"nodes of {node}", 300.0, 250.0, node, 200.0, 20.0, 5.0,
        contention=draw(st.sampled_from([0.0, 0.1, 0.4])),
        outer_levels=tuple(levels),
        nics_per_node=draw(st.none() | st.integers(1, node)),
    )  # fmt: skip


def speeds_of(cp_size):
    """Returns a strategy for the speeds of so many ranks, None among them."""
    speed = st.sampled_from([1.0, 1.0, 0.5, 0.25, 0.9, 2.0])
    return st.none() | st.lists(speed, min_size=cp_size, max_size=cp_size).map(tuple)
