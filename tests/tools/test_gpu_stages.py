"""The part of the GPU check that times stages, without a GPU: its calls are those that a stage makes."""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from megatron_cp.attn.emulated import backend as _backend  # noqa: F401  its machine takes tensors of the CPU
from tools.gpu import measure, stages
from tools.gpu.measure import Times


@pytest.fixture(autouse=True)
def _few_heads(monkeypatch):
    monkeypatch.setattr(stages, "NUM_HEADS", 4)
    monkeypatch.setattr(stages, "NUM_KV_HEADS", 2)
    monkeypatch.setattr(stages, "HEAD_DIM", 64)


def _wanted(stage):
    leaves = [x.float().requires_grad_() for x in (stage.q, stage.k, stage.v)]
    out, _ = attend(*leaves, masks.causal(stage.num_tokens), backend="reference")
    return [out.detach(), *torch.autograd.grad(out, leaves, stage.dout.float())]


def test_stages_compute_the_attention_that_passes_alone_compute():
    stage = stages.Stage("cpu", 150)
    out, dq, dk, dv = _wanted(stage)
    forward, backward = stage.forward_calls(), stage.backward_calls()
    assert list(forward) == ["alone", "first", "between", "last"]
    for name in ("alone", "first"):
        torch.testing.assert_close(forward[name]()[0].float(), out, rtol=0.02, atol=0.02)
    forward["between"]()  # the same part once more: the mean stays, the weight doubles
    last, lse = forward["last"]()
    torch.testing.assert_close(last.float(), out, rtol=0.02, atol=0.02)
    single = forward["first"]()[1]
    torch.testing.assert_close(lse, single + torch.log(torch.tensor(3.0)), rtol=0, atol=1e-4)
    once = [x.clone() for x in backward["first"]()]
    twice = backward["later"]()
    for x, y, z in zip(backward["alone"]()[1:], once[1:], (dk, dv), strict=True):
        torch.testing.assert_close(x.float(), z, rtol=0.03, atol=0.03)
        torch.testing.assert_close(y, z, rtol=0.03, atol=0.03)
    for x, y in zip(twice, once, strict=True):
        torch.testing.assert_close(x, 2 * y, rtol=0.01, atol=0.01)
    torch.testing.assert_close(once[0] * stage.options.softmax_scale, dq, rtol=0.03, atol=0.03)


def test_joined_rows_are_counted_by_their_bytes(monkeypatch):
    rows = stages.Rows("cpu", 20)
    total = rows.out + rows.part_out[rows.by_row[2]].view(20, 2, 4, 64).sum(dim=1)
    rows.calls()["added rows of two parts"]()
    torch.testing.assert_close(rows.out, total)
    row, number = 4 * 64 * 4, 4 * 4  # bytes of a row, and of its lse
    assert rows.num_bytes() == {
        "merged spans": 20 * (3 * row + 3 * number),
        "merged rows of two parts": 20 * (4 * row + 4 * number),
        "added rows of two parts": 20 * 4 * row,
        "torch's copy": 20 * 4 * row,
    }
    times = {name: Times(1e-3, 1e-3, 1e-3) for name in rows.calls()}
    monkeypatch.setattr(measure, "interleaved", lambda _: times)
    said = stages._bandwidths(rows)
    assert f"added rows of two parts 0.001 ms ({20 * 4 * row / 1e6:.2f} TB/s)" in said


def test_a_time_is_told_beside_the_pass_alone(monkeypatch):
    times = {"alone": Times(2.0, 2, 2), "later": Times(2.5, 2, 3)}
    monkeypatch.setattr(measure, "interleaved", lambda _: times)
    assert stages._beside_first({}) == "alone 2.000 ms (+0.0%), later 2.500 ms (+25.0%)"
