"""What the Hopper host path finds once for all calls alike: no other call gets it, and it keeps no tensor."""

import gc
import weakref

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from tests.attn.on_host import draw, host_device
from tests.closeness import assert_within_budget
from tests.oracles.attention import exact_attention, plain_attention

USUAL = {
    "mask": masks.causal(40),
    "heads": (4, 2),
    "dims": (128, 128),
    "dtype": torch.float16,
    "softmax_scale": 0.25,
    "softcap": 0.0,
    "deterministic": False,
}


def _check(asked):
    """Compares a call and its gradients with float64."""
    asked = dict(asked)
    mask, shape = asked.pop("mask"), (asked.pop("heads"), asked.pop("dims"), asked.pop("dtype"))
    tensors = draw(mask.num_queries, mask.num_keys, *shape)
    dout = torch.randn(mask.num_queries, shape[0][0], shape[1][1]).to(shape[2])
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = attend(*leaves, mask, backend="hopper", **asked)
    made = (out, lse, *torch.autograd.grad(out, leaves, dout))
    del asked["deterministic"]
    given = (*(x.detach() for x in tensors), mask.to_dense())
    exact, plain = (f(*given, dout=dout, **asked) for f in (exact_attention, plain_attention))
    for name, x, y, z in zip(exact._fields, made, plain, exact, strict=False):
        size = max(1.0, z.abs().max().item()) if name.startswith("d") else None
        assert_within_budget(x, y, z, name, **({"size": size} if size else {}))


@pytest.mark.parametrize(
    "other",
    [
        {"mask": masks.causal(41)},
        {"mask": masks.from_slices(40, 40, [(0, 20, 0, 40, None, None)])},  # rows without keys
        {"heads": (4, 4)},
        {"heads": (2, 1)},
        {"dims": (64, 64)},
        {"dtype": torch.bfloat16},
        {"softmax_scale": 0.5},
        {"softcap": 1.5},
        {"deterministic": True},
    ],
    ids=lambda other: " ".join(other),
)
def test_a_call_that_differs_in_one_thing_gets_nothing_of_another(other):
    with host_device():
        for asked in (USUAL, USUAL | other, USUAL):
            _check(asked)


def test_nothing_that_is_found_once_keeps_a_tensor():
    with host_device():
        leaves = [x.requires_grad_() for x in draw(40, 40)]
        sink = torch.zeros(4, requires_grad=True)
        mask = masks.causal(40)
        out, lse = attend(*leaves, mask, backend="hopper", sink=sink)
        gradients = torch.autograd.grad((out, lse), (*leaves, sink), (out, lse))
        tensors = (*leaves, sink, out, lse, *gradients)
        seen = [weakref.ref(x.untyped_storage()) for x in tensors] + [weakref.ref(mask)]
        del leaves, sink, mask, out, lse, gradients, tensors
        gc.collect()
        assert [ref() for ref in seen] == [None] * len(seen)
