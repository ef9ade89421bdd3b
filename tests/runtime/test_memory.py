"""What a pass allocates, storage by storage, against what the plan says, over every planner."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_cp import mask as masks
from megatron_cp.attn.options import resolve_options
from megatron_cp.config import CPConfig
from megatron_cp.plan import PLANNERS, make_plan
from megatron_cp.plan.hardware.memory import peak_bytes
from megatron_cp.runtime import dist_attn
from megatron_cp.runtime.session import open_session
from tests.ranks import run_on_ranks

WORLD, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 4, 1024, 8, 4, 32
TOLERANCE = 0.15
ATTENDS = "auto"
"""The planner whose stages attend; those of the others hand out as much, and compute nothing."""
MASKS = {
    "causal": lambda: masks.causal(TOKENS),
    "documents": lambda: masks.documents([375, 137, 222, 1, 256, 33], within="causal"),
}
CROSS = {
    "few keys": lambda: masks.full(TOKENS, 225),
    "few queries": lambda: masks.full(75, TOKENS),
    "clips": lambda: masks.from_cu_seqlens([0, 175, 750, TOKENS], "full", [0, 15, 125, 300]),
}
CASES = [
    pytest.param(name, planner, marks=[pytest.mark.slow] if name == "causal" else [])
    for name in MASKS
    for planner in sorted(PLANNERS)
]
CASES += [pytest.param(name, planner) for name in CROSS for planner in ("auto", "contiguous")]


def plan_of(name: str, planner: str, element_bytes: int):
    config = CPConfig(
        planner=planner, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        element_bytes=element_bytes,
    )  # fmt: skip
    return make_plan({**MASKS, **CROSS}[name](), WORLD, config)


def attend_forward(q, k, v, work, options, max_logits=None):
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=torch.float32)
    return out, out.new_zeros(out.shape[:2])


def attend_forward_onto_(held, *asked):
    return None


def attend_forward_last(held, q, k, v, work, options, sink, max_logits=None):
    out, lse = held or attend_forward(q, k, v, work, options)
    return out.to(q.dtype), lse


def attend_backward(dout, q, k, v, *asked, rounded, stats):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def attend_backward_onto_(dq, dkeys, dout, q, k, v, *asked):
    dkeys = dkeys or (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    return torch.zeros_like(q, dtype=torch.float32) if dq is None else dq, *dkeys


STAND_INS = {
    f.__name__: f
    for f in (
        *(attend_forward, attend_forward_onto_, attend_forward_last),
        *(attend_backward, attend_backward_onto_),
    )
}


def measured(rank, world_size, plan, dtype):
    """Peak bytes of forward and of backward on this rank, outside of what a backend computes."""
    group = torch.distributed.group.WORLD
    own, keys = plan.own_rows, (KV_HEADS, HEAD_DIM)
    shapes = [(own.q, HEADS, HEAD_DIM), (own.k, *keys), (own.k, *keys)]
    q, k, v = (torch.randn(*shape).to(dtype) for shape in shapes)
    session = open_session(plan, group, q.device)
    options = resolve_options(q, k, v, backend="cpu", deterministic=False)
    kept = {name: getattr(dist_attn, name) for name in (*STAND_INS, "merging", "dq_factor")}

    memory = Allocations()

    def quiet(function):
        def called(*args, **options):
            memory.is_quiet = True
            try:
                results = function(*args, **options)
            finally:
                memory.is_quiet = False
            memory.look()  # what was given is held beside what came of it
            return results

        return called

    def quietly(combination):
        changed = {name: quiet(getattr(combination, name)) for name in ("span_", "rows_")}
        return replace(combination, **changed)

    try:
        for name, stand_in in STAND_INS.items():
            setattr(dist_attn, name, quiet(kept[name] if plan.planner == ATTENDS else stand_in))
        dist_attn.dq_factor = lambda options: 0.5  # as of kernels that leave the scale to the end
        dist_attn.merging = lambda joiner: quietly(kept["merging"](joiner))
        out, lse = dist_attn.forward_pass(q, (k, v), None, session, options)
        dout, delta = torch.randn_like(out), torch.zeros_like(lse)
        peaks = []
        for run in (
            lambda: dist_attn.forward_pass(q, (k, v), None, session, options),
            lambda: dist_attn.backward_pass(dout, q, (k, v), lse, delta, session, options),
        ):
            found = []
            for _ in range(6):  # gloo's threads give a message back a moment late: the least counts
                memory.begin()
                with memory:
                    run()
                found.append(memory.peak)
            peaks.append(min(found))
    finally:
        for name, function in kept.items():
            setattr(dist_attn, name, function)
    return peaks


class Allocations(TorchDispatchMode):
    """The most bytes of storages alive at once among those made by operations, but not while it is quiet."""

    def __init__(self):
        super().__init__()
        self.is_quiet = False
        self.begin()

    def begin(self):
        self.peak, self.alive = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)
        }
        result = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if not self.is_quiet:
            self.look()
        return result

    def look(self):
        self.alive = {k: one for k, one in self.alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))


@pytest.mark.parametrize(("name", "planner"), CASES)
def test_the_plan_predicts_what_the_runtime_allocates(name: str, planner: str):
    for dtype in (torch.float32, torch.bfloat16):
        plan = plan_of(name, planner, dtype.itemsize)
        found = np.array(run_on_ranks(WORLD, measured, plan, dtype))
        predicted = np.stack(
            [peak_bytes(plan, p).allocated for p in ("forward", "backward")], axis=1
        )
        ratios = predicted / found
        assert abs(ratios - 1).max() < TOLERANCE, (dtype, ratios.round(3).tolist(), found.tolist())
