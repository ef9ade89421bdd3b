"""flash-attn 2, 3 and 4 by their published signatures, made of the float64 formulas of flash_on_host.py."""

import sys
from types import ModuleType

import pytest
import torch

from megatron_cp.attn.flash import libraries, operators
from tests.attn import flash_on_host

LOADERS = (libraries._flash2, libraries._flash3, libraries._flash4, operators.torch_operator)


@pytest.fixture
def loaded_anew(monkeypatch):
    """Whatever is installed here is not seen, and nothing is remembered."""
    for load in LOADERS:
        load.cache_clear()
    for name in ("flash_attn", "flash_attn_3"):
        monkeypatch.setitem(sys.modules, name, None)
    yield
    for load in LOADERS:
        load.cache_clear()


# Parameters by their published names, in their order; `*` begins those with defaults.
FLASH2_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
FLASH2_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, "
    "Tensor(c!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) "
    "-> Tensor"
)
FLASH3_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, "
    "float softcap=0.0, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
FLASH3_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
    "Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _window(o):
    left, right = o.get("window_size_left", -1), o.get("window_size_right", -1)
    causal = o.get("causal", o.get("is_causal"))
    assert causal == (left in (-1, None) and right == 0)
    return tuple(None if side in (-1, None) else side for side in (left, right))


def _run_forward(q, k, v, **o):
    cu = (o["cu_seqlens_q"], o["cu_seqlens_k"])
    return flash_on_host.varlen_forward(
        q, k, v, *cu, _window(o), o["softmax_scale"], o.get("softcap") or 0.0
    )


def _run_backward(dout, q, k, v, out, lse, o):
    cu = (o["cu_seqlens_q"], o["cu_seqlens_k"])
    parts = flash_on_host.varlen_backward(
        *(dout, q, k, v, out, lse, *cu),
        *(_window(o), o["softmax_scale"], o.get("softcap") or 0.0),
    )
    for name, part in zip(("dq", "dk", "dv"), parts, strict=True):
        o[name].copy_(part)


def _named(schema, arguments, keywords):
    """Returns all arguments by name, as the dispatcher leaves them: some by place, defaults left out."""
    names = [
        part.split("=")[0].split()[-1] for part in schema[1 : schema.rindex(") ->")].split(", ")
    ]
    return {**dict(zip(names, arguments, strict=False)), **keywords}


@pytest.fixture
def flash2(monkeypatch):
    """flash-attn 2.8 as far as we see it: registered operators, here float64 formulas."""
    library = torch.library.Library("flash_attn", "DEF")
    library.define("_flash_attn_varlen_forward" + FLASH2_FORWARD)
    library.define("_flash_attn_varlen_backward" + FLASH2_BACKWARD)

    def forward(*arguments, **keywords):
        o = _named(FLASH2_FORWARD, arguments, keywords)
        out, lse = _run_forward(o.pop("q"), o.pop("k"), o.pop("v"), **o)
        return out, lse, out.new_zeros(0), out.new_zeros(0)

    def backward(*arguments, **keywords):
        o = _named(FLASH2_BACKWARD, arguments, keywords)
        _run_backward(o["dout"], o["q"], o["k"], o["v"], o["out"], o["softmax_lse"], o)
        return o["dq"].new_zeros(0)

    library.impl("_flash_attn_varlen_forward", forward, "CPU")
    library.impl("_flash_attn_varlen_backward", backward, "CPU")
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    yield "flash-attn 2", (8, 0)
    library._destroy()


@pytest.fixture
def flash3(monkeypatch):
    """flash-attn 3 as far as we see it."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define("fwd" + FLASH3_FORWARD)
    library.define("bwd" + FLASH3_BACKWARD)

    def forward(*arguments, **keywords):
        o = _named(FLASH3_FORWARD, arguments, keywords)
        assert o["num_splits"] == 1
        out, lse = _run_forward(o.pop("q"), o.pop("k"), o.pop("v"), **o)
        return out, lse, out.new_zeros(0), out.new_zeros(0)

    def backward(*arguments, **keywords):
        o = _named(FLASH3_BACKWARD, arguments, keywords)
        _run_backward(o["dout"], o["q"], o["k"], o["v"], o["out"], o["softmax_lse"], o)
        return tuple(o["dq"].new_zeros(0) for _ in range(5))

    library.impl("fwd", forward, "CPU")
    library.impl("bwd", backward, "CPU")
    for name in ("flash_attn_3", "flash_attn_3._C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    yield "flash-attn 3", (9, 0)
    library._destroy()


@pytest.fixture
def flash4(monkeypatch):
    """flash-attn 4 as far as we see it: plain functions, None for an open side."""

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
        return_lse=False,
    ):  # fmt: skip
        assert return_lse
        o = dict(locals())
        return (*_run_forward(o.pop("q"), o.pop("k"), o.pop("v"), **o), None, None)

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        _run_backward(dout, q, k, v, out, lse, dict(locals()))
        return dq, dk, dv

    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return "flash-attn 4", (10, 0)
