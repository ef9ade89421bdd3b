"""RoPE by one compiled kernel, against Megatron's own rotation in float64."""

import pytest
import torch

from tests.mcore.compiled import needs_headers, run_compiled
from tests.mcore.tiny_gpt import Case, enter_megatron, parallel_state, train
from tests.ranks import run_on_ranks

SHAPES = {  # rows, samples, heads, columns, columns that rotate, samples of the angles
    "one sample": (7, 1, 4, 16, 16, 1),
    "some columns": (5, 1, 2, 16, 6, 1),
    "samples share positions": (3, 2, 2, 8, 8, 1),
    "samples have their own": (3, 2, 2, 8, 8, 2),
    "no rows": (0, 1, 2, 8, 8, 1),
}


def _rotations(rank, world_size, shape):
    """(value, gradient) of our rotation in bfloat16 and of Megatron's in float64, of a strided tensor."""
    enter_megatron()
    from megatron.core.models.common.embeddings import rope_utils

    from megatron_cp.mcore.parts import rope_fusion

    S, B, H, D, R, angle_B = shape
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(S, B, H, 3 * D, generator=generator).bfloat16()
    # The halves have angles of their own: nothing may rest on Megatron's repeating them.
    freqs = 1e4 * torch.rand(S, angle_B, 1, R, generator=generator)
    grad = torch.randn(S, B, H, D, generator=generator).bfloat16()
    results = []
    for rotate, dtype in (
        (rope_fusion.rotate, torch.bfloat16),
        (rope_utils._apply_rotary_pos_emb_bshd, torch.float64),
    ):
        leaf = qkv.detach().to(dtype, copy=True).requires_grad_()
        angles = freqs.to(dtype) if dtype is torch.float64 else freqs
        out = rotate(leaf[..., D : 2 * D], angles)
        out.backward(grad.to(dtype))
        results.append((out.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_megatrons_rounded_once(name):
    ((ours, megatrons),) = run_on_ranks(1, _rotations, SHAPES[name])
    for mine, exact in zip(ours, megatrons, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == exact.shape
        # Half a unit in the last place of 8 bits, and what fp32 loses where terms cancel.
        torch.testing.assert_close(mine.double(), exact, rtol=2**-8, atol=2e-6)


COMPILED = """
import megatron_cp.mcore.cpu as cpu
cpu.install()
import torch
from torch._inductor import metrics
from megatron_cp.mcore.parts import rope_fusion

t = torch.randn(6, 1, 4, 3 * 32, dtype=torch.bfloat16)
freqs = torch.rand(6, 1, 1, 32)
a, b = t[..., 32:48].float(), t[..., 48:64].float()
cos, sin = freqs.cos(), freqs.sin()
first, second = a * cos[..., :16] - b * sin[..., :16], b * cos[..., 16:] + a * sin[..., 16:]
leaf = t[..., 32:64].detach().requires_grad_()
out = rope_fusion.rotate(leaf, freqs)
out.backward(out.detach())
torch.testing.assert_close(out.detach(), torch.cat([first, second], -1).bfloat16())
print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"], "kernels", metrics.generated_kernel_count)
"""


@needs_headers
def test_compiled_it_is_one_kernel_for_each_layout_of_the_tensor():
    out = run_compiled(COMPILED)
    _, graphs, _, kernels = out.splitlines()[-1].split()
    assert (graphs, kernels) == ("2", "2"), out


def _train_fused(rank, world_size, case):
    from megatron_cp.mcore.parts import rope_fusion

    with parallel_state(case):
        from megatron.core.models.common.embeddings import rope_utils
    before = rope_utils.fused_apply_rotary_pos_emb
    rope_fusion.install()
    assert rope_fusion.is_installed()
    try:
        return train(rank, world_size, case.with_options(apply_rope_fusion=True))
    finally:
        rope_utils.fused_apply_rotary_pos_emb = before


@pytest.mark.parametrize("attention, cp", [("split", 1), ("planned", 2)])
def test_a_model_trains_as_it_does_unfused(attention: str, cp: int):
    case = Case(attention=attention, cp=cp, steps=4, packed=attention == "planned")
    plain = run_on_ranks(cp, train, case)
    fused = run_on_ranks(cp, _train_fused, case)
    for steps, expected in zip(fused, plain, strict=True):
        for step, wanted in zip(steps, expected, strict=True):
            assert step == pytest.approx(wanted, rel=2e-5)


def _on_a_gpu(rank, world_size, flags):
    """(what the configuration fuses, whether our rotation is in place, what two samples of documents are told)."""
    enter_megatron()
    from types import SimpleNamespace

    from megatron.core.models.common.embeddings import rope_utils

    from megatron_cp.mcore import model_hooks
    from megatron_cp.mcore.parts import rope_fusion
    from megatron_cp.models.gpt import transformer_config
    from megatron_cp.models.presets import LLAMA3_8B

    before, is_available = rope_utils.fused_apply_rotary_pos_emb, torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    told = []
    try:
        config = transformer_config({**LLAMA3_8B, **flags}, dtype=torch.bfloat16)
        found = config.apply_rope_fusion, rope_fusion.is_installed()
        for function in (rope_utils.fused_apply_rotary_pos_emb, lambda *_, **__: None):
            rope_utils.fused_apply_rotary_pos_emb = function
            try:
                model_hooks._check_samples(
                    SimpleNamespace(apply_rope_fusion=config.apply_rope_fusion), 2
                )
                told.append("")
            except NotImplementedError as error:
                told.append(str(error))
        return *found, told
    finally:
        rope_utils.fused_apply_rotary_pos_emb, torch.cuda.is_available = before, is_available


@pytest.mark.parametrize(
    "flags, is_fused",
    [({}, True), ({"apply_rope_fusion": False}, False), ({"rotary_interleaved": True}, False)],
)
def test_it_is_on_where_a_gpu_is_and_only_transformer_engines_refuses_samples(flags, is_fused):
    ((fuses, is_ours, (of_ours, of_theirs)),) = run_on_ranks(1, _on_a_gpu, flags)
    assert (fuses, is_ours) == (is_fused, is_fused)
    assert of_ours == ""
    assert ("give --no-rope-fusion" in of_theirs) == is_fused
