"""No operator computes before a first small call on the GPU at hand was right."""

import math
import re

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from megatron_cp.attn.flash import checks, trial
from tests.attn import flash_libraries, flash_on_host
from tests.attn.flash_libraries import flash2, flash3, loaded_anew
from tests.attn.flash_on_host import on_host
from tests.attn.formula import random_case

__all__ = ["flash2", "flash3", "loaded_anew"]
pytestmark = pytest.mark.usefixtures("loaded_anew")


def _attend_as_on(capability, dtype=torch.bfloat16):
    """Attention with gradients as on such a GPU; returns whose operator computed these, and what was passed over."""
    inputs, _ = random_case(24, 24, (4, 2), (16, 16), dtype)
    leaves = [x.requires_grad_() for x in inputs]
    with on_host(capability, trial.find_fault):
        attend(*leaves, masks.causal(24), backend="flash")
        ((operator, reasons),) = (
            found for key, found in checks._found.items() if key[0].needs_grad
        )
    return operator.name, reasons


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_library_that_is_right_on_this_gpu_is_taken(flash2, dtype):
    assert _attend_as_on((8, 0), dtype)[0] == "flash-attn 2"


def _no_image(right):
    def forward(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available")

    return forward


def _blind_to_windows(right):
    def forward(q, k, v, **o):
        return right(
            q, k, v, **{**o, "window_size_left": -1, "window_size_right": -1, "causal": False}
        )

    return forward


def _lse_in_base_2(right):
    def forward(q, k, v, **o):
        out, lse = right(q, k, v, **o)
        return out, lse / math.log(2)

    return forward


def _one_row_is_nan(right):
    def forward(q, k, v, **o):
        out, lse = right(q, k, v, **o)
        out[7] = torch.nan
        return out, lse

    return forward


def _loses_a_row_of_dv(right):
    def backward(dout, q, k, v, out, lse, o):
        right(dout, q, k, v, out, lse, o)
        o["dv"][5] = 0.0

    return backward


DEFECTS = {
    "_run_forward": {
        _no_image: "fails a first call: CUDA error: no kernel image",
        _blind_to_windows: "out of a row is",
        _lse_in_base_2: "lse of a row is|d. of a row is",
        _one_row_is_nan: "out of a row is nan off float64",
    },
    "_run_backward": {_loses_a_row_of_dv: "dv of a row is 1 off float64, at most 0.023"},
}


@pytest.mark.parametrize(
    ("name", "defect"), [(name, defect) for name in DEFECTS for defect in DEFECTS[name]]
)
def test_a_library_that_is_wrong_on_this_gpu_is_passed_over(
    flash2, monkeypatch, caplog, name, defect
):
    """Nothing of what it computed is used: torch's operator, the next, computes the call."""
    monkeypatch.setattr(flash_libraries, name, defect(getattr(flash_libraries, name)))
    operator, reasons = _attend_as_on((8, 0))
    assert operator == "torch"
    assert re.search(f"flash-attn 2 .*({DEFECTS[name][defect]})", reasons[2])
    assert reasons[2] in caplog.text


def test_a_gpu_on_which_all_are_wrong_is_told_so(monkeypatch):
    right = flash_on_host.varlen_forward

    def wrong(*arguments):
        out, lse = right(*arguments)
        return out * 1.05, lse

    monkeypatch.setattr(flash_on_host, "varlen_forward", wrong)
    with pytest.raises(
        NotImplementedError, match=r"torch is wrong on this GPU: out of a row is 0.05"
    ):
        _attend_as_on((8, 0))


def test_a_library_is_tried_once_where_another_serves_wider_rows(flash3, monkeypatch, caplog):
    """Each call asks for the dims as they are again; flash-attn 3 has them, and fails."""
    monkeypatch.setattr(flash_libraries, "_run_forward", _no_image(None))
    inputs, _ = random_case(24, 24, (2, 2), (144, 104), torch.bfloat16)
    tried = []

    def find_fault(operator, wish, *asked):
        tried.append((operator.name, wish.head_dim, wish.value_dim))
        return trial.find_fault(operator, wish, *asked)

    with on_host((9, 0), find_fault):
        for _ in range(3):
            attend(*inputs, masks.causal(24), backend="flash")
    assert tried.count(("flash-attn 3", 144, 104)) == 1
    assert sum("no kernel image" in said for said in caplog.messages) == 2  # also at 144 and 144


def test_a_full_gpu_condemns_no_library(flash2, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(flash_libraries, "_run_forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        _attend_as_on((8, 0))
