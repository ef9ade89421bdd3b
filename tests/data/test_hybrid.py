"""Batches that span replicas: the same tokens and pairs as replica by replica, resumable, chosen where faster."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.config import CPConfig, Topology
from megatron_cp.data.batch import PlanRequest
from megatron_cp.data.hybrid import HybridBuilder, hybrid_request, is_hybrid_faster
from megatron_cp.data.loader import PackedLoader
from megatron_cp.plan.schema import PASSES
from tests.data.corpora import write_corpus
from tests.data.test_loader import changed, fingerprint

SIZE, REPLICAS = 64, 2
# Computing is slow and links are free: what is even is fast.
EVEN = Topology(
    name="even", forward_tflops=1e-4, backward_tflops=1e-4, node_size=4, inner_gbytes_per_s=1e6,
    outer_gbytes_per_s=1e6, latency_us=0.0, contention=0.0,
)  # fmt: skip
# Nothing may be sent without a long wait.
FAR = replace(EVEN, name="far", inner_gbytes_per_s=1e-6, outer_gbytes_per_s=1e-6, latency_us=1e6)
FIXED = changed(
    seq_length=SIZE,
    global_batch_size=8,
    micro_batch_size=1,
    reset_position_ids=True,
    policy="split",
)
HYBRID = replace(FIXED, spans_replicas=True)


def request(topology, planner="auto", **more):
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    config = CPConfig(planner=planner, topology=topology, **shape)
    return PlanRequest(cp_size=2, config=config, **more)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    lengths = [*np.random.default_rng(5).integers(1, 12, 60).tolist(), 64, 3, 64, 50]
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths)


def loaders(documents, config, wanted):
    return [
        PackedLoader(documents, config, wanted, dp_rank=rank, dp_size=REPLICAS)
        for rank in range(REPLICAS)
    ]


@pytest.mark.parametrize("planner", ["allgather", "document_groups", "magi"])
def test_joined_packs_that_memory_does_not_hold_stay_on_fixed_groups(documents, planner):
    asked = request(EVEN, planner)
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 256, "max_received_mb": 1}
    asked = replace(asked, config=replace(asked.config, **sizes))
    for fixed, hybrid in zip(
        loaders(documents, FIXED, asked), loaders(documents, HYBRID, asked), strict=True
    ):
        for _ in range(8):
            assert fingerprint(next(hybrid)) == fingerprint(next(fixed))


def test_a_batch_over_replicas_holds_the_tokens_and_pairs_of_theirs_in_turn(documents):
    fixed = loaders(documents, FIXED, request(EVEN))
    hybrid = loaders(documents, HYBRID, request(EVEN))
    kinds = set()
    for _ in range(12):
        parts = [next(loader) for loader in fixed]
        mine, other = (next(loader) for loader in hybrid)
        kinds.add(mine.spans_replicas)
        if not mine.spans_replicas:
            assert [fingerprint(mine), fingerprint(other)] == [*map(fingerprint, parts)]
            continue
        assert fingerprint(mine) == fingerprint(other)
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            joined = np.concatenate([getattr(part.batch, name) for part in parts])
            assert (getattr(mine.batch, name) == joined).all()
        sees = np.zeros((REPLICAS * SIZE,) * 2, dtype=bool)
        for place, part in enumerate(parts):
            rows = slice(place * SIZE, (place + 1) * SIZE)
            sees[rows, rows] = part.batch.mask.to_dense()
        assert (mine.batch.mask.to_dense() == sees).all()
        plan = mine.plans["full"]
        assert (plan.cp_size, plan.tokens_per_rank) == (4, SIZE // 2)
    assert True in kinds


@pytest.mark.parametrize("topology", [EVEN, FAR], ids=["even", "far"])
def test_resuming_after_every_step_replays_the_same_stream(documents, topology):
    """By a planner with which even links serve one layout in some steps and the other in the next."""
    wanted, layouts = request(topology, "per_document_zigzag"), set()

    def steps(loader, count):
        found = []
        for _ in range(count):
            step = [next(loader) for _ in range(loader.num_microbatches)]
            layouts.update(planned.spans_replicas for planned in step)
            found.append([*map(fingerprint, step)])
        return found

    states, stream = [], []
    with PackedLoader(documents, HYBRID, wanted, dp_rank=1, dp_size=2) as loader:
        states.append(loader.state_dict())
        for _ in range(5):
            stream += steps(loader, 1)
            states.append(json.loads(json.dumps(loader.state_dict())))
    for num_workers in (0, 2):
        config = replace(HYBRID, num_workers=num_workers)
        with PackedLoader(documents, config, wanted, dp_rank=1, dp_size=2) as loader:
            for step in (3, 0, 1):
                loader.load_state_dict(states[step])
                assert steps(loader, 2) == stream[step : step + 2], num_workers
                assert loader.state_dict() == states[step + 2], num_workers
    assert layouts == ({True, False} if topology is EVEN else {False})
    # The state is that of the fixed layout: a run may change between them.
    with PackedLoader(documents, FIXED, wanted, dp_rank=0, dp_size=2) as loader:
        steps(loader, 5)
        assert loader.state_dict() == states[5]


def test_all_micro_batches_of_a_step_have_one_layout(documents):
    """Links at which some micro-batches alone would be hybrid and others not; the first step is, the second is not."""
    wanted = request(replace(EVEN, name="between", latency_us=100.0))
    fixed, builder = (
        loaders(documents, FIXED, wanted),
        HybridBuilder(documents, FIXED.batch, wanted, 0, REPLICAS),
    )
    hybrid = PackedLoader(documents, HYBRID, wanted, dp_size=REPLICAS)
    taken = []
    for _ in range(2):
        count = hybrid.num_microbatches
        both = [builder.layouts([next(one).batch for one in fixed]) for _ in range(count)]
        assert len({one.hybrid_seconds <= max(one.fixed_seconds) for one in both}) == 2
        together = sum(one.hybrid_seconds for one in both)
        apart = [sum(one.fixed_seconds[rank] for one in both) for rank in range(REPLICAS)]
        spans = {next(hybrid).spans_replicas for _ in range(count)}
        assert spans == {together <= max(apart)}
        taken += spans
    assert taken == [True, False]


def test_where_sending_takes_long_steps_stay_fixed(documents):
    with PackedLoader(documents, HYBRID, request(FAR), dp_size=REPLICAS) as loader:
        assert not any(next(loader).spans_replicas for _ in range(12))


def test_no_hybrid_step_is_predicted_slower_than_its_fixed_layout(documents):
    """Also with window layers, and with measured rates of kernels."""
    windows = {"num_window_layers": 3, "window": (7, 0)}
    for wanted in (request(EVEN), request("cpu"), request(EVEN, **windows)):
        fixed = loaders(documents, FIXED, wanted)
        hybrid = PackedLoader(documents, HYBRID, wanted, dp_size=REPLICAS)
        layers = {"full": wanted.num_full_layers, "window": wanted.num_window_layers}

        def milliseconds(planned, layers=layers):
            return sum(
                layers[kind] * plan.stats(name)["makespan_ms"]
                for kind, plan in planned.plans.items()
                for name in PASSES
            )

        for _ in range(3):
            count = hybrid.num_microbatches
            step = [next(hybrid) for _ in range(count)]
            slowest = max(sum(milliseconds(next(one)) for _ in range(count)) for one in fixed)
            if step[0].spans_replicas:
                assert sum(map(milliseconds, step)) <= slowest * (1 + 1e-9)


@given(
    fixed=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=4),
    hybrid=st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
def test_replicas_of_the_fixed_layout_meet_at_the_end_of_the_step_alone(fixed, hybrid):
    times = [float(ms) for ms in hybrid[: len(fixed)]]
    slowest = 0
    for replica in range(3):
        total = 0
        for part in fixed:
            total += part[replica]
        slowest = max(slowest, total)
    assert is_hybrid_faster(times, fixed) == (sum(times) < slowest)


def test_bounds_of_measured_kernels_are_too_low_to_choose_by(documents, tmp_path):
    """A kernel that is slow on short slices: the fixed layout is judged by its plans."""
    from megatron_cp.plan.hardware.topology import load_profile

    rates = [(1, 1, 1e-5), (1, 512, 1e-4), (512, 1, 1e-4), (512, 512, 1e-3)]
    kernel = [
        {"rows": rows, "keys": keys, "forward_tflops": rate, "backward_tflops": rate}
        for rows, keys, rate in rates
    ]
    links = {"node_size": 4, "inner_gbytes_per_s": 1e6, "outer_gbytes_per_s": 1e6, "latency_us": 0}
    path = tmp_path / "slow.json"
    path.write_text(json.dumps({"name": "slow", **links, "contention": 0, "kernel": kernel}))
    wanted = request(load_profile(path))
    loader = PackedLoader(documents, FIXED, wanted, dp_size=1)
    parts = [next(loader).batch for _ in range(REPLICAS)]
    builder = HybridBuilder(documents, FIXED.batch, wanted, 0, REPLICAS)
    both = builder.layouts(parts)
    own = sum(both.fixed.plans["full"].stats(name)["makespan_ms"] for name in PASSES) * 1e-3
    assert both.fixed_seconds[0] >= own * (1 - 1e-9)
    assert hybrid_request(wanted, REPLICAS).cp_size == 4
