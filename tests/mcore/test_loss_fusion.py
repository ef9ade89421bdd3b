"""Cross entropy without logits in fp32, against torch's own in float64."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.mcore.compiled import needs_headers, run_compiled
from tests.mcore.tiny_gpt import Case, enter_megatron, train
from tests.ranks import run_on_ranks

ROWS, SAMPLES, WORDS = 37, 2, 48


def drawn(scale):
    """Returns logits in bfloat16, of which one row is far from the others, right words, and gradients of the losses."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(ROWS, SAMPLES, WORDS, generator=generator)
    logits[3, 1] += 3e4
    target = torch.randint(WORDS, (ROWS, SAMPLES), generator=generator)
    target[0], target[1] = 0, WORDS - 1
    return logits.bfloat16(), target, torch.randn(ROWS, SAMPLES, generator=generator)


def _loss_and_gradient(rank, world_size, scale):
    enter_megatron()  # not compiled
    from megatron_cp.mcore.parts import loss_fusion

    logits, target, grad = drawn(scale)
    leaf = logits.chunk(world_size, -1)[rank].contiguous().requires_grad_()
    losses = loss_fusion.cross_entropy(leaf, target, dist.group.WORLD)
    losses.backward(grad)
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_losses_and_gradients_are_torchs_rounded_once(num_ranks, scale):
    logits, target, grad = drawn(scale)
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(exact.view(-1, WORDS), target.view(-1), reduction="none")
    expected.backward(grad.view(-1).double())
    found = run_on_ranks(num_ranks, _loss_and_gradient, scale)
    for losses, _ in found:
        assert losses.dtype == torch.float32 and torch.equal(losses, found[0][0])
        # Of logits of 3e4, fp32 knows 2e-3.
        assert (losses.double().view(-1) - expected).abs().max() < 4e-3
        torch.testing.assert_close(losses[4:].double().view(-1), expected[8:], rtol=1e-6, atol=1e-5)
    gradient = torch.cat([part for _, part in found], -1)
    assert gradient.dtype == torch.bfloat16
    wanted = exact.grad.view_as(gradient)
    torch.testing.assert_close(gradient[4:].double(), wanted[4:], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=2e-2, atol=1e-6)


COMPILED = """
import megatron_cp.mcore.cpu as cpu
cpu.install()
from types import SimpleNamespace
import re
import torch
from torch._inductor.utils import run_and_get_code
from megatron_cp.mcore.parts import loss_fusion

logits = torch.randn(6, 1, 40, dtype=torch.bfloat16)
target = torch.arange(6).view(6, 1)
one = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
leaf = logits.detach().requires_grad_()

def both():
    losses = loss_fusion.cross_entropy(leaf, target, one)
    losses.backward(torch.ones_like(losses))
    return losses

losses, code = run_and_get_code(both)
exact = logits.double().requires_grad_()
expected = torch.nn.functional.cross_entropy(exact.view(6, 40), target.view(6), reduction="none")
expected.sum().backward()
torch.testing.assert_close(losses.double().view(6), expected, rtol=1e-6, atol=1e-6)
torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)
print(len(code), *re.findall(r"= empty_strided_cpu\\(\\(6, 1, 40\\).*torch\\.(.*)\\)", "".join(code)))
"""


@needs_headers
def test_compiled_it_makes_nothing_of_the_size_of_the_logits_but_their_gradient():
    out = run_compiled(COMPILED)
    assert out.split() == ["2", "bfloat16"], out


@contextlib.contextmanager
def our_loss():
    """Our loss in the place of Megatron's fused one, whose gradients are always bf16."""
    enter_megatron()
    from megatron.core.models.common.language_module import language_module

    from megatron_cp.mcore.parts import loss_fusion

    before = language_module.fused_vocab_parallel_cross_entropy
    loss_fusion.install()
    assert language_module.fused_vocab_parallel_cross_entropy is loss_fusion.cross_entropy
    try:
        yield
    finally:
        language_module.fused_vocab_parallel_cross_entropy = before


def _train_fused(rank, world_size, case):
    with our_loss():
        return train(rank, world_size, case.with_options(cross_entropy_loss_fusion=True))


@pytest.mark.parametrize("tp, cp", [(1, 2), (2, 1)])
def test_a_model_trains_as_it_does_unfused(tp: int, cp: int):
    case = Case(attention="planned", tp=tp, cp=cp, steps=4, packed=True)
    plain = run_on_ranks(tp * cp, train, case)
    fused = run_on_ranks(tp * cp, _train_fused, case)
    for steps, expected in zip(fused, plain, strict=True):
        for step, wanted in zip(steps, expected, strict=True):
            assert step == pytest.approx(wanted, rel=2e-5)


def _on_a_gpu(rank, world_size, flags):
    """(what the configuration fuses, whose kernels it says, whether our loss is in place)."""
    enter_megatron()
    from megatron.core.models.common.language_module import language_module

    from megatron_cp.mcore.parts import loss_fusion
    from megatron_cp.models.gpt import transformer_config
    from megatron_cp.models.presets import LLAMA3_8B

    before, is_available = (
        language_module.fused_vocab_parallel_cross_entropy,
        torch.cuda.is_available,
    )
    torch.cuda.is_available = lambda: True
    try:
        model = {**LLAMA3_8B, "apply_rope_fusion": False, **flags}
        config = transformer_config(model, dtype=torch.bfloat16)
        is_ours = language_module.fused_vocab_parallel_cross_entropy is loss_fusion.cross_entropy
        return config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl, is_ours
    finally:
        language_module.fused_vocab_parallel_cross_entropy = before
        torch.cuda.is_available = is_available


@pytest.mark.parametrize("implementation", ["native", "te"])
@pytest.mark.parametrize("flag", [False, True])
def test_it_is_on_where_a_gpu_is(flag, implementation):
    flags = {"cross_entropy_loss_fusion": flag, "cross_entropy_fusion_impl": implementation}
    ((fuses, whose, is_ours),) = run_on_ranks(1, _on_a_gpu, flags)
    assert (fuses, whose, is_ours) == (True, implementation if flag else "native", True)
