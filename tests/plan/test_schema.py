"""The schema's own rules: what `validate` finds, what a digest covers, how rows are counted."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.plan import (
    HeadSplit,
    Hop,
    Pass,
    Transfer,
    make_plan,
    plan_on_placement,
    planner,
)
from tests.oracles.plans import held_ids
from tests.plan.cases import PLANNERS, config

replace = dataclasses.replace


@pytest.fixture
def plan():
    """A contiguous plan of 4 ranks in two stages, whose second stage moves rows."""
    return make_plan(masks.causal(32), 4, config("contiguous"))


def with_stage(plan, index, **changes):
    stages = list(plan.forward.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(plan, forward=replace(plan.forward, stages=tuple(stages)))


def with_messages(plan, change):
    messages = plan.forward.stages[1].k_cast.hops[0].messages.copy()
    return with_stage(plan, 1, k_cast=Transfer((Hop(change(messages)),)))


def set_first(column, value):
    def change(messages):
        messages[0, column] = value
        return messages

    return change


def with_ids(plan, change):
    ids = plan.global_from_local.copy()
    change(ids)
    return replace(plan, global_from_local=ids)


def drop_first_slice(plan):
    work = list(plan.forward.stages[0].work)
    work[2] = masks.AttentionMask(work[2].num_queries, work[2].num_keys, work[2].array[1:])
    return with_stage(plan, 0, work=tuple(work))


def with_split(plan, *groups):
    return replace(plan, forward=replace(plan.forward, head_split=HeadSplit(groups)))


FAULTS = {
    "a token owned twice": (
        lambda p: with_ids(p, lambda ids: ids.__setitem__((0, 0), 5)),
        "every token id",
    ),
    "a negative token": (
        lambda p: with_ids(p, lambda ids: ids.__setitem__((0, 0), -1)),
        "every token id",
    ),
    "too few tokens": (
        lambda p: replace(p, global_from_local=np.arange(28).reshape(4, 7)),
        "at least 32",
    ),
    "a slice lost": (drop_first_slice, "exactly once"),
    "work computed twice": (
        lambda p: replace(p, forward=Pass((p.forward.stages[0], *p.forward.stages))),
        "exactly once",
    ),
    "a row sent beyond those held": (lambda p: with_messages(p, set_first(3, 9)), "rows held"),
    "a negative row": (lambda p: with_messages(p, set_first(2, -1)), "rows held"),
    "an unknown reader": (lambda p: with_messages(p, set_first(1, 4)), "leaves the ranks"),
    "an unknown sender": (lambda p: with_messages(p, set_first(0, -1)), "leaves the ranks"),
    "a rank that sends to itself": (lambda p: with_messages(p, set_first(1, 0)), "leaves the ranks"),
    "a row sent twice": (
        lambda p: with_messages(p, lambda m: np.concatenate([m, m[:1] - np.array([0, 0, 0, 1])])),
        "sends a row twice",
    ),
    "a message lost": (lambda p: with_messages(p, lambda m: m[1:]), "do not match the rows held"),
    "no cast for received keys": (lambda p: with_stage(p, 1, k_cast=None), "do not match"),
    "a rank without work": (
        lambda p: with_stage(p, 0, work=p.forward.stages[0].work[:3]),
        "do not match",
    ),
    "a head group in two sizes": (lambda p: with_split(p, (0, 1, 2), (3,)), "equal ascending"),
    "a rank in no head group": (lambda p: with_split(p, (0, 1)), "cover all 4 ranks"),
    "a head group out of order": (lambda p: with_split(p, (1, 0), (2, 3)), "equal ascending"),
}  # fmt: skip


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_validate_finds_a_planted_fault(fault, plan):
    plan.validate()
    plant, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        plant(plan).validate()


def test_validate_finds_a_fault_in_the_backward_pass(plan):
    broken = replace(plan, backward=Pass(plan.forward.stages[:1]))
    with pytest.raises(ValueError, match="contiguous backward: stages compute"):
        broken.validate()


DIGESTS = """
from megatron_cp import mask as masks
from megatron_cp.plan import make_plan
from tests.plan.cases import config, packed
for planner in {planners!r}:
    for mask in (masks.causal(37), packed("log-normal", 3000, 17)):
        print(make_plan(mask, 4, config(planner, num_heads=4, num_kv_heads=2)).digest())
"""


def test_the_digest_is_equal_in_another_process_with_another_hash_seed():
    program = DIGESTS.format(planners=PLANNERS)
    outputs = set()
    for seed in ("1", "77"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        run = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) == 2 * len(PLANNERS)


CHANGES = {
    "mask": lambda p: replace(p, mask=masks.full(32)),
    "config": lambda p: replace(p, config=replace(p.config, head_dim=128)),
    "planner": lambda p: replace(p, planner="other"),
    "placement": lambda p: with_ids(p, lambda ids: ids[0].sort() or ids.__setitem__(0, ids[0][::-1])),
    "a slice": drop_first_slice,
    "a message": lambda p: with_messages(p, set_first(2, 1)),
    "a transfer": lambda p: with_stage(p, 1, k_cast=None),
    "key rows sent as query rows": lambda p: with_stage(
        p, 1, k_cast=None, q_cast=p.forward.stages[1].k_cast
    ),
    "rows in two hops": lambda p: with_stage(
        p, 1, k_cast=Transfer((*p.forward.stages[1].k_cast.hops, Hop(np.zeros((0, 4)))))
    ),
    "the order of stages": lambda p: replace(p, forward=Pass(p.forward.stages[::-1])),
    "the backward pass": lambda p: replace(p, backward=Pass(p.backward.stages[::-1])),
    "passes exchanged": lambda p: replace(p, forward=p.backward, backward=Pass(p.forward.stages[::-1])),
    "the head split": lambda p: with_split(p, (0, 1), (2, 3)),
    "keys that a stage keeps": lambda p: with_stage(p, 1, keeps_k=not p.forward.stages[1].keeps_k),
    "queries that a stage keeps": lambda p: with_stage(p, 1, keeps_q=not p.forward.stages[1].keeps_q),
    "the work of a rank": lambda p: with_stage(p, 0, work=p.forward.stages[0].work[::-1]),
}  # fmt: skip


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_the_digest_differs_after_any_change(change):
    plan = make_plan(masks.documents([7, 12, 13]), 4, config("contiguous"))
    changed = CHANGES[change](plan)
    assert changed.digest() != plan.digest()
    assert changed != plan


def test_rows_arrive_source_by_source_and_hops_forward_what_came_before():
    first = Hop([(2, 0, 1, 3), (1, 0, 0, 1), (0, 1, 2, 3)])
    second = Hop([(0, 1, 3, 6), (1, 2, 3, 4)])
    own = np.arange(9).reshape(3, 3)
    transfer = Transfer((first, second))
    held = [ids.tolist() for ids in transfer.held_ids(own)]
    # Rank 0 got row 0 of rank 1, then rows 1 and 2 of rank 2; rank 1 got id 2, then all of those.
    assert held == [[0, 1, 2, 3, 7, 8], [3, 4, 5, 2, 3, 7, 8], [6, 7, 8, 2]]
    assert held == held_ids(own.tolist(), transfer)


def test_a_hop_keeps_the_order_of_messages_between_two_ranks_and_drops_empty_ones():
    hop = Hop([(1, 0, 4, 6), (0, 1, 2, 2), (1, 0, 0, 2)])
    assert hop.messages.tolist() == [[1, 0, 4, 6], [1, 0, 0, 2]]
    assert not hop.messages.flags.writeable


def test_local_from_global_undoes_global_from_local():
    plan = make_plan(masks.documents([100, 28, 61]), 4, config())
    owner, row = plan.local_from_global
    ids = np.arange(plan.global_from_local.size)
    assert np.array_equal(plan.global_from_local[owner, row], ids)


def test_a_plan_prints_its_digest_each_rank_and_both_passes(plan):
    text = str(plan)
    assert plan.digest()[:12] in text
    assert "forward: 2 stages" in text
    assert "backward: 2 stages" in text
    shares = [float(line.split()[2]) for line in text.splitlines() if line.startswith("     ")]
    expected = [sum(range(8 * r + 1, 8 * r + 9)) / 132 for r in range(4)]  # causal rows, mean 132
    assert np.allclose(shares, expected * 2, atol=1e-3)


def test_a_plan_is_made_without_torch():
    program = (
        "import sys; from megatron_cp.plan import make_plan; from megatron_cp.mask import causal; "
        "make_plan(causal(64), 4).digest(); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.parametrize(
    "copied", [lambda plan: plan, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_nobody_can_write_into_a_plan(copied):
    plan = copied(make_plan(masks.causal(7), 2))
    cross = copied(make_plan(masks.full(4, 6), 2))
    messages = [hop.messages for _, cast in plan.forward.transfers() for hop in cast.hops]
    arrays = [one.array for one in (plan.mask, *plan.forward.stages[0].work)]
    assert messages
    for array in (
        plan.global_from_local, *plan.local_from_global, cross.key_tokens, *messages, *arrays,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_placement_is_copied_and_may_be_anything_that_numpy_reads():
    buffer = np.array([[0, 1, 6, 7], [2, 3, 4, 5]])
    plans = [
        plan_on_placement(masks.causal(8), given, CPConfig())
        for given in (
            buffer,
            buffer.astype(np.int32),
            buffer.tolist(),
            torch.from_numpy(buffer.copy()),
        )
    ]
    buffer[:] = 0  # a loader's, used for the next pack
    for plan in plans:
        assert plan.global_from_local.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
        assert plan.global_from_local.dtype == np.int64
        assert plan == plans[0]


def test_a_plan_is_one_short_line_in_messages():
    plan = make_plan(masks.causal(640), 64)
    assert repr(plan) == f"AttentionPlan(auto, 64 ranks x 10 tokens, {plan.digest()[:12]})"


def test_threads_may_plan_at_once(monkeypatch):
    """More masks than are remembered: each thread drops what another is about to read."""
    monkeypatch.setattr(planner, "MAX_RECENT", 2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            sizes = [1 + i % 5 for i in range(400)]
            made = list(
                pool.map(
                    lambda n: make_plan(masks.causal(n), 1, CPConfig(planner="contiguous")), sizes
                )
            )
    finally:
        sys.setswitchinterval(interval)
    assert [plan.num_tokens for plan in made] == sizes
