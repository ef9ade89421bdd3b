"""The flash and flex backends on a real GPU, against float64. All pass on an H100 (2026-11-22)."""

import itertools

import numpy as np
import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import (
    attend,
    attend_backward,
    attend_forward,
    merge_partials,
    resolve_options,
)
from tests.attn.formula import assert_attention, random_case
from tests.oracles.dropout import dropout_factors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
BACKENDS = ("flash", "flex")
MASKS = {
    "causal": masks.causal(700),
    "full": masks.full(300, 900),
    "documents, some of one token": masks.documents([300, 1, 1, 250, 148], "causal"),
    "one token each": masks.documents([1] * 40, "causal"),
    "window over documents": masks.documents([300, 5, 395], ("window", 64)),
    "window to both sides": masks.documents([300, 400], ("window", 64, 30)),
    "one question, answers": masks.shared_question([300, 200, 100, 100]),
    "more queries than keys, both sides cut": masks.from_slices(
        700, 200, [(0, 700, 0, 200, -450, 20)]
    ),
    "more queries than keys, lower side cut": masks.from_slices(
        700, 200, [(100, 650, 10, 200, -400, None)]
    ),
    "rows without keys": masks.from_slices(
        400, 400, [(10, 90, 20, 300, None, 40), (200, 210, 0, 1, None, None)]
    ),
}


def _on_device(inputs, arguments):
    return [x.to(DEVICE) for x in inputs], {name: x.to(DEVICE) for name, x in arguments.items()}


def _check(results, inputs, mask, arguments, dtype):
    dense = torch.as_tensor(mask.to_dense())
    results = [x.detach().cpu() for x in results]
    assert_attention(results, inputs, dense, plain_dtype=dtype, **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_attention_with_sinks_equals_float64(name, head_dim, dtype, backend):
    mask = MASKS[name]
    sizes = (mask.num_queries, mask.num_keys)
    inputs, arguments = random_case(*sizes, (4, 2), (head_dim, head_dim), dtype, sink=True)
    on_device, given = _on_device(inputs, arguments)
    leaves = [x.requires_grad_() for x in (*on_device, given["sink"])]
    out, lse = attend(*leaves[:3], mask, sink=leaves[3], backend=backend)
    gradients = torch.autograd.grad((out, lse), leaves, (given["dout"], given["dlse"].float()))
    _check((out, lse, *gradients), inputs, mask, arguments, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_parts", [2, 5])
@pytest.mark.parametrize("name", MASKS)
def test_parts_of_the_keys_add_up_to_attention_over_all(name, num_parts, backend):
    mask = MASKS[name]
    sizes, dtype = (mask.num_queries, mask.num_keys), torch.bfloat16
    inputs, arguments = random_case(*sizes, (4, 2), (64, 64), dtype)
    (q, k, v), given = _on_device(inputs, arguments)
    options = resolve_options(q, k, v, backend=backend)
    cuts = [mask.num_keys * i // num_parts for i in range(num_parts + 1)]
    parts = [(k[a:b], v[a:b], mask.crop(k=(a, b))) for a, b in itertools.pairwise(cuts)]
    out, lse = attend_forward(q, *parts[0], options)
    for part in parts[1:]:
        out, lse = merge_partials(out, lse, *attend_forward(q, *part, options))
    delta = (given["dout"].float() * out).sum(dim=-1) - given["dlse"].float()
    gradients = [
        attend_backward(given["dout"], q, part[0], part[1], lse, delta, part[2], options)
        for part in parts
    ]
    dq = sum(part[0] for part in gradients)
    dk, dv = (torch.cat([part[i] for part in gradients]) for i in (1, 2))
    _check((out, lse, dq, dk, dv), inputs, mask, arguments, dtype)


@pytest.mark.parametrize("backend", ["flex", "hopper"])
@pytest.mark.parametrize("name", MASKS)
def test_dropout_equals_float64(name, backend):
    mask = MASKS[name]
    sizes, dtype = (mask.num_queries, mask.num_keys), torch.bfloat16
    inputs, arguments = random_case(*sizes, (4, 2), (64, 64), dtype)
    on_device, given = _on_device(inputs, arguments)
    leaves = [x.requires_grad_() for x in on_device]
    seed = torch.tensor([2**45 + 9], device=DEVICE)
    out, lse = attend(*leaves, mask, dropout_p=0.3, dropout_seed=seed, backend=backend)
    gradients = torch.autograd.grad((out, lse), leaves, (given["dout"], given["dlse"].float()))
    factors = dropout_factors(int(seed), 4, *map(np.arange, sizes), 0.3)
    _check((out, lse, *gradients), inputs, mask, {**arguments, "factors": factors}, dtype)
