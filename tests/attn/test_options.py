"""Every refusal names the thing, the value received, what is allowed and what to do."""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import AttendOptions, attend, resolve_options


def _tensors(rows=6, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32):
    q = torch.zeros(rows, num_heads, head_dim, dtype=dtype)
    k = torch.zeros(rows, num_kv_heads, head_dim, dtype=dtype)
    return q, k, k.clone()


def test_defaults_are_the_scale_of_the_head_dim_and_the_backend_of_the_device():
    assert resolve_options(*_tensors(head_dim=16)) == AttendOptions(0.25, 0.0, "cpu", False)
    assert resolve_options(*_tensors(), softmax_scale=2.0, backend="reference").softmax_scale == 2.0
    on_meta = [x.to("meta") for x in _tensors()]
    assert resolve_options(*on_meta).backend == "flex"


WRONG = {
    "three heads over two": (
        lambda q, k, v: (q[:, :3], k, v),
        r"num_heads=3 must be a positive multiple of num_kv_heads=2; .*use",
    ),
    "no kv heads": (lambda q, k, v: (q, k[:, :0], v[:, :0]), r"num_kv_heads=0"),
    "four dimensions": (lambda q, k, v: (q[None], k, v), r"q of shape \(1, 6, 4, 8\) must be"),
    "head dims differ": (lambda q, k, v: (q, k[..., :4], v), r"head_dim of q=8 .* k=4"),
    "rows of k and v differ": (lambda q, k, v: (q, k, v[1:]), r"k \(6, 2, 8\) and v \(5, 2, 8\)"),
    "dtypes differ": (lambda q, k, v: (q, k.double(), v), r"must be equal; cast them"),
    "integers": (
        lambda q, k, v: (q.long(), k.long(), v.long()),
        r"dtype=torch.int64 must be one of torch.float32, .*; cast",
    ),
    "devices differ": (lambda q, k, v: (q, k.to("meta"), v), r"meta, cpu must be equal; move"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_refused_with_values_and_advice(case):
    change, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        resolve_options(*change(*_tensors()))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"softmax_scale": float("nan")}, "softmax_scale=nan must be finite; pass None"),
        ({"softcap": -1.0}, "softcap=-1.0 must be finite and >= 0; pass 0.0"),
        ({"softcap": float("inf")}, "softcap=inf"),
        ({"backend": "cuda"}, r"backend='cuda' must be one of reference, cpu, flex.*; pass None"),
    ],
)
def test_wrong_settings_are_refused_with_values_and_advice(setting, message):
    with pytest.raises(ValueError, match=message):
        resolve_options(*_tensors(), **setting)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
def test_a_number_that_is_a_tensor_is_refused_as_it_would_get_no_gradient(name):
    value = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(
        TypeError, match=f"{name} is Parameter; it must be a number, .*multiply q by"
    ):
        attend(*_tensors(), masks.causal(6), **{name: value})
    with pytest.raises(TypeError, match=f"{name}='0.5' is str; it must be a number"):
        attend(*_tensors(), masks.causal(6), **{name: "0.5"})


def test_a_backend_of_16_bit_types_names_those_that_take_others():
    message = r"backend='emulated'.*torch.float32, only torch.bfloat16.*use backend='cpu' or 'ref"
    with pytest.raises(NotImplementedError, match=message):
        resolve_options(*_tensors(), backend="emulated")


def test_a_wish_that_a_backend_cannot_serve_names_those_that_can():
    tensors = _tensors()
    resolve_options(*tensors, backend="flex", deterministic=True)  # no gradients
    tensors[0].requires_grad_()
    with pytest.raises(
        NotImplementedError, match=r"deterministic=True.*use backend='cpu' or 'reference'"
    ):
        resolve_options(*tensors, backend="flex", deterministic=True)
    with pytest.raises(NotImplementedError, match=r"no backward pass on device=cpu.*'cpu' or"):
        resolve_options(*tensors, backend="flex")
    on_meta = [x.to("meta") for x in _tensors()]
    with pytest.raises(NotImplementedError, match="only on cpu; use backend='flash', 'flex' or"):
        resolve_options(*on_meta, backend="cpu")


def test_torch_s_switch_asks_for_determinism_too():
    tensors = _tensors()
    assert not resolve_options(*tensors).deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert not resolve_options(*tensors).deterministic
        torch.use_deterministic_algorithms(True)
        assert resolve_options(*tensors).deterministic
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_mask_and_sink_must_fit_the_tensors():
    q, k, v = _tensors()
    with pytest.raises(ValueError, match="mask grid 5 x 5 must equal the rows of q and k, 6 x 6"):
        attend(q, k, v, masks.causal(5))
    for sink in (torch.zeros(3), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 1)):
        with pytest.raises(ValueError, match=r"sink .* \(4,\) on cpu; pass one logit per query"):
            attend(q, k, v, masks.causal(6), sink=sink)
    with pytest.raises(TypeError, match=r"sink is float; it must be a torch.Tensor"):
        attend(q, k, v, masks.causal(6), sink=1.0)
