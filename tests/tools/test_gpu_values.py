"""The values of the GPU check without a GPU: right ones pass, and its checks can fail."""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from megatron_cp.attn.hopper.verdicts import Verdict
from tests.attn.on_host import host_device
from tests.kernels import host_backward
from tests.kernels import host_device as host
from tools.gpu import values


@pytest.mark.parametrize("index", [3, 6, 8])
def test_value_check_accepts_right_results(index):
    small = list(values.small_checks(quick=False))[index]
    with host_device() as device:
        device.block_n = int(small.variant.value("MCP_BLOCK_N"))
        assert values.check_small(small, "cpu").startswith("out ")


def _without_last_key(row, segs):
    return _keys_of(row, segs)[:-1]


_keys_of = host._keys_of


def test_value_check_refuses_a_kernel_that_forgets_a_key(monkeypatch):
    small = list(values.small_checks(quick=False))[2]
    monkeypatch.setattr(host, "_keys_of", _without_last_key)
    with host_device(), pytest.raises(AssertionError):
        values.check_small(small, "cpu")


def test_value_check_refuses_rows_that_are_not_written(monkeypatch):
    small = list(values.small_checks(quick=False))[2]
    write = host._write_row
    monkeypatch.setattr(
        host, "_write_row", lambda p, row, *rest: None if row == 5 else write(p, row, *rest)
    )
    with host_device(), pytest.raises(AssertionError, match="not written, or holds NaN"):
        values.check_small(small, "cpu")


@pytest.mark.parametrize("index", [4, 6])
def test_gradient_check_accepts_right_gradients(index):
    small = list(values.small_checks(quick=False))[index]
    with host_device():
        assert values.check_gradients(small, "cpu").startswith("dq ")


def test_gradient_check_refuses_wrong_gradients(monkeypatch):
    small = list(values.small_checks(quick=False))[6]
    slopes = host_backward._slopes
    monkeypatch.setattr(host_backward, "_slopes", lambda *x: (slopes(*x)[0], 1.1 * slopes(*x)[1]))
    with host_device(), pytest.raises(AssertionError, match=r"dq .* outside its error budget"):
        values.check_gradients(small, "cpu")


def test_merge_check_accepts_right_results_and_refuses_wrong_ones(monkeypatch):
    variant = values.build.variants()["fwd_fp16_64"]
    with host_device():
        assert values.check_merge(variant, "cpu").startswith("out ")
        monkeypatch.setattr(host, "_keys_of", _without_last_key)
        with pytest.raises(AssertionError):
            values.check_merge(variant, "cpu")


@pytest.mark.parametrize("name", ["fwd_fp16_64", "fwd_bf16_192_128", "fwd_bf16_64_softcap"])
def test_check_of_long_rows_accepts_right_results_and_refuses_wrong_ones(name, monkeypatch):
    variant = values.build.variants()[name]
    with host_device():
        assert values.check_long(variant, "cpu", 280).startswith("largest relative error ")
        monkeypatch.setattr(host, "_keys_of", _without_last_key)
        with pytest.raises(AssertionError):
            values.check_long(variant, "cpu", 280)


@pytest.mark.parametrize("passed", [True, False])
def test_what_stages_call_is_judged_as_the_self_test_does(monkeypatch, passed):
    asked = []
    verdict = Verdict(passed, "out of the last stage under documents", 0.001, 0.004)
    monkeypatch.setattr(values.judge, "judge", lambda *given: asked.append(given) or verdict)
    variant = values.build.variants()["fwd_fp16_64_softcap"]
    if passed:
        assert "0.001" in values.check_stages(variant, "cpu")
    else:
        with pytest.raises(AssertionError, match="out of the last stage"):
            values.check_stages(variant, "cpu")
    ((passes, kind, device),) = asked
    assert passes is values.hopper and device == torch.device("cpu")
    assert kind == values.judge.Kind(torch.float16, 64, 64, "softcap", needs_grad=True)


def test_row_check_of_large_cases_finds_one_missing_key():
    mask = masks.sliding_window(300, 20)
    q, k, v = (torch.randn(300, heads, 16) for heads in (4, 2, 2))
    out, _ = attend(q, k, v, mask, backend="reference")
    values.check_rows(out, (q, k, v), mask)
    wrong, _ = attend(q, k, v, masks.sliding_window(300, 19), backend="reference")
    with pytest.raises(AssertionError, match=r"row \d+, head \d: relative error"):
        values.check_rows(wrong, (q, k, v), mask)


def test_quick_checks_are_some_of_all_and_meet_every_variant():
    full, quick = (list(values.small_checks(q)) for q in (False, True))
    assert {s.name for s in quick} < {s.name for s in full}
    assert {s.variant.name for s in quick} == {s.variant.name for s in full}


def test_shares_are_all_variants_once():
    assert values.read_share("2/6") == (2, 6)
    parts = [values.forward_variants((index, 5)) for index in range(5)]
    names = [variant.name for part in parts for variant in part]
    assert sorted(names) == sorted(variant.name for variant in values.forward_variants())
