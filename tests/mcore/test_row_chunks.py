"""Rows that a layer computes a few at a time: the same values and gradients, and less at once."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.mcore.packs import SEQUENCE, VOCABULARY
from tests.mcore.test_loss_fusion import our_loss
from tests.mcore.test_parity import LOSS_DRIFT, NORM_DRIFT, megatrons_own
from tests.mcore.tiny_gpt import (
    Case,
    Trainer,
    parallel_state,
    tensors_of_pack,
)
from tests.ranks import run_on_ranks


def _a_layer(dtype, generator):
    """Rows `[13, 2, 5]`, two weights, and the gradient of what `_of_rows` makes of them."""
    sizes = ((13, 2, 5), (5, 7), (7, 4), (13, 2, 4))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def _of_rows(rows, first, second):
    return torch.nn.functional.silu(rows @ first) @ second


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 13, 40])
@pytest.mark.parametrize("learned", [(True, True, True), (False, True, False), (True, False, True)])
def test_values_and_gradients_are_those_of_all_rows_together(num_chunks, learned):
    from megatron_cp.mcore.memory.row_chunks import in_chunks

    *tensors, grad = _a_layer(torch.float64, torch.Generator().manual_seed(0))
    plain = [
        tensor.clone().requires_grad_(flag) for tensor, flag in zip(tensors, learned, strict=True)
    ]
    chunked = [
        tensor.clone().requires_grad_(flag) for tensor, flag in zip(tensors, learned, strict=True)
    ]
    seen = []

    def of_chunk(rows, first, stop):
        seen.append((first, stop))
        assert torch.equal(rows, chunked[0][first:stop])
        return _of_rows(rows, *chunked[1:])

    expected = _of_rows(*plain)
    result = in_chunks(of_chunk, chunked[0], num_chunks, chunked[1:])
    assert [stop - first for first, stop in seen] == pytest.approx(
        [13 / min(num_chunks, 13)] * min(num_chunks, 13), abs=1
    )
    torch.testing.assert_close(result, expected)
    expected.backward(grad)
    result.backward(grad)
    for mine, theirs, flag in zip(chunked, plain, learned, strict=True):
        assert (mine.grad is not None) == flag
        if flag:
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_rows_may_lie_along_another_dimension_of_the_result():
    from megatron_cp.mcore.memory.row_chunks import in_chunks

    rows, weight, *_ = _a_layer(torch.float64, torch.Generator().manual_seed(1))
    rows.requires_grad_()
    result = in_chunks(lambda part, *_: (part @ weight).permute(1, 2, 0), rows, 4, [], dim=-1)
    torch.testing.assert_close(result, (rows @ weight).permute(1, 2, 0))
    result.square().sum().backward()
    mine, rows.grad = rows.grad, None
    (rows @ weight).square().sum().backward()
    torch.testing.assert_close(mine, rows.grad)


def test_gradients_of_half_precision_weights_are_rounded_once():
    from megatron_cp.mcore.memory.row_chunks import in_chunks

    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(512, 1, 16, generator=generator).bfloat16()
    grad = torch.randn(512, 1, 8, generator=generator).bfloat16()
    weight = torch.randn(16, 8, generator=generator).bfloat16().requires_grad_()
    exact = rows.double().flatten(0, 1).T @ grad.double().flatten(0, 1)
    in_chunks(lambda part, *_: part @ weight, rows, 128, [weight]).backward(grad)
    # Each chunk's product is rounded to bf16, and their sum once: not once for each of them.
    error = (weight.grad.double() - exact).abs().max() / exact.abs().max()
    assert error < 2**-8, error
    summed_in_bf16 = torch.zeros_like(weight)
    for part, part_grad in zip(rows.split(4), grad.split(4), strict=True):
        summed_in_bf16 += part.flatten(0, 1).T @ part_grad.flatten(0, 1)
    worse = (summed_in_bf16.double() - exact).abs().max() / exact.abs().max()
    assert worse > 2 * error


def test_weights_that_have_one_gradient_get_it_each():
    from megatron_cp.mcore.memory.row_chunks import in_chunks

    rows, grad = torch.zeros(6, 1, 3), torch.randn(6, 1, 3)
    first, second = torch.zeros_like(rows[0], requires_grad=True), torch.zeros_like(rows[0])
    second.requires_grad_()
    in_chunks(lambda part, *_: part + (first + second), rows, 3, [first, second]).backward(grad)
    torch.testing.assert_close(first.grad, grad.sum(0))
    torch.testing.assert_close(second.grad, grad.sum(0))


def test_a_weight_that_was_changed_since_is_an_error():
    from megatron_cp.mcore.memory.row_chunks import in_chunks

    rows, first, second, grad = _a_layer(torch.float64, torch.Generator().manual_seed(3))
    first.requires_grad_()
    result = in_chunks(lambda part, *_: _of_rows(part, first, second), rows, 3, [first])
    with torch.no_grad():
        first += 1
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        result.backward(grad)


def test_a_weight_that_is_not_given_is_an_error_and_its_gradient_not_lost():
    from megatron_cp.mcore.memory.row_chunks import in_chunks

    rows, first, second, grad = _a_layer(torch.float64, torch.Generator().manual_seed(5))
    first.requires_grad_(), second.requires_grad_()
    result = in_chunks(lambda part, *_: _of_rows(part, first, second), rows, 3, [first])
    with pytest.raises(RuntimeError, match=r"shape \(7, 4\).* its gradient would be lost"):
        result.backward(grad)
    doubled = 2 * second  # one that is no leaf is known where it is given
    result = in_chunks(lambda part, *_: _of_rows(part, first, doubled), rows, 3, [first, doubled])
    result.backward(grad)
    mine = second.grad
    second.grad = None
    _of_rows(rows, first, 2 * second).backward(grad)
    torch.testing.assert_close(mine, second.grad)


def test_a_hook_on_a_weight_runs_once_on_its_whole_gradient():
    from megatron_cp.mcore.memory.row_chunks import in_chunks

    rows, first, second, grad = _a_layer(torch.float64, torch.Generator().manual_seed(6))
    first.requires_grad_()
    first.register_hook(lambda gradient: 2 * gradient + 1)
    found = []
    for _ in range(2):  # it is still there
        in_chunks(lambda part, *_: _of_rows(part, first, second), rows, 3, [first]).backward(grad)
        found.append(first.grad)
        first.grad = None
    _of_rows(rows, first, second).backward(grad)
    torch.testing.assert_close(found, [first.grad, first.grad])


def test_the_product_of_one_chunk_is_gone_when_the_next_is_made():
    from megatron_cp.mcore.memory.row_chunks import in_chunks

    made, held = [], []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, weight):
            ctx.save_for_backward(rows)
            return rows @ weight

        @staticmethod
        def backward(ctx, grad):
            held.append(sum(not product.expired() for product in made))
            product = ctx.saved_tensors[0].flatten(0, 1).T @ grad.flatten(0, 1)
            made.append(StorageWeakRef(product.untyped_storage()))
            return None, product

    rows, weight, _, _ = _a_layer(torch.float32, torch.Generator().manual_seed(7))
    weight.requires_grad_()
    in_chunks(lambda part, *_: Product.apply(part, weight), rows, 4, [weight]).sum().backward()
    assert held == [0, 0, 0, 0]
    torch.testing.assert_close(weight.grad, rows.sum((0, 1))[:, None].expand(5, 7))


def test_a_gradient_that_the_layer_adds_to_its_buffer_itself_is_not_added_again():
    from megatron_cp.mcore.memory.row_chunks import in_chunks

    class Fused(torch.autograd.Function):
        """As Megatron's linear layer under gradient_accumulation_fusion: what it returns is no gradient."""

        @staticmethod
        def forward(ctx, rows, weight):
            ctx.rows, ctx.weight = rows, weight
            return rows @ weight

        @staticmethod
        def backward(ctx, grad):
            ctx.weight.main_grad += ctx.rows.flatten(0, 1).T @ grad.flatten(0, 1)
            ctx.weight.grad_added_to_main_grad = True
            return grad @ ctx.weight.T, torch.full_like(ctx.weight, float("nan"))

    rows, weight, _, _ = _a_layer(torch.float64, torch.Generator().manual_seed(4))
    weight.requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False

    def backward():
        result = in_chunks(lambda part, *_: Fused.apply(part, weight), rows, 4, [weight])
        result.backward(torch.ones_like(result))

    backward()
    wanted = rows.flatten(0, 1).T @ torch.ones(26, 7, dtype=torch.float64)
    torch.testing.assert_close(weight.main_grad, wanted)
    assert weight.grad.isnan().all()  # as the layer left it: nobody reads it
    weight.overwrite_main_grad = True  # as Megatron-FSDP says that a layer shall not add
    with pytest.raises(NotImplementedError, match="under Megatron-FSDP"):
        backward()


class Widest(TorchDispatchMode):
    """The most rows of logits, and of activations inside an MLP, that any tensor holds."""

    def __init__(self, widths):
        super().__init__()
        self.rows = dict.fromkeys(widths, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            shape = tensor.shape if isinstance(tensor, torch.Tensor) else ()
            if len(shape) == 3 and shape[1] == 1 and shape[2] in self.rows:  # no scores of heads
                self.rows[shape[2]] = max(self.rows[shape[2]], shape[0])
        return result


def _train_in_chunks(rank, world_size, case, num_rows, num_mlp_chunks):
    """Losses and norms of each step, and the widest tensors by their width."""
    with our_loss(), parallel_state(case) as groups:
        from megatron_cp.mcore import chunk_loss, chunk_mlps

        trainer = Trainer(case, groups)
        for chunk in trainer.chunks:
            chunk_loss(chunk.module, num_rows)
            chunk_mlps(chunk.module, num_mlp_chunks)
        widths = (VOCABULARY // case.tp, trainer.config.ffn_hidden_size // case.tp)
        with Widest(widths) as widest:
            steps = [trainer.step() for _ in range(case.steps)]
        is_last = groups.get_pipeline_model_parallel_rank() == case.pp - 1
        return (steps if is_last else []), list(widest.rows.values())


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({}, {}),
        ({"cp": 2}, {"cross_entropy_loss_fusion": True}),
        ({"tp": 2}, {}),
        ({"tp": 2, "sequence_parallel": True}, {}),
        ({"pp": 2, "cp": 2}, {}),
        (
            {"cp": 2},
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        ({"cp": 2}, {"gated_linear_unit": True, "add_bias_linear": False}),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_trains_as_it_does_on_all_rows_at_once(layout, options):
    options = {"hidden_size": 48, **options}  # another width than those that are looked for
    case = Case(attention="planned", steps=4, **layout).with_options(**options)
    plain = {k: v for k, v in options.items() if not k.startswith(("recompute", "cross"))}
    reference = megatrons_own(Case(steps=4).with_options(**plain))
    num_rows, num_mlp_chunks = 24, 5
    answers = run_on_ranks(
        case.tp * case.pp * case.cp, _train_in_chunks, case, num_rows, num_mlp_chunks
    )
    steps = [found for found, _ in answers if found]
    for found in steps:
        assert found == [
            (pytest.approx(loss, rel=LOSS_DRIFT), pytest.approx(norm, rel=NORM_DRIFT))
            for loss, norm in reference
        ]
    assert steps
    rows_of_rank = SEQUENCE // case.cp
    for found, (logits, activations) in answers:
        assert 0 < logits <= num_rows if found else logits == 0, logits
        assert 0 < activations <= -(-rows_of_rank // num_mlp_chunks)


def _logits(rank, world_size, case):
    """Logits of a model without labels, before and after its loss is computed in chunks."""
    with parallel_state(case) as groups:
        from megatron_cp.mcore import chunk_loss

        trainer = Trainer(case, groups)
        (model,) = (chunk.module for chunk in trainer.chunks)
        inputs = tensors_of_pack(case, trainer.config, next(trainer.stream), groups)
        given = (inputs.tokens, inputs.position_ids, None)
        before = model(*given, packed_seq_params=inputs.params, runtime_gather_output=True)
        chunk_loss(model, 16)
        after = model(*given, packed_seq_params=inputs.params, runtime_gather_output=True)
        return before.detach(), after.detach()


def _logits_of_gathered_rows(rank, world_size, case):
    """Logits of rows that inference has gathered: it turns the layer's own gathering off for the call alone."""
    with parallel_state(case) as groups:
        from megatron_cp.mcore import chunk_loss

        trainer = Trainer(case, groups)
        (model,) = (chunk.module for chunk in trainer.chunks)
        chunk_loss(model, 16)
        layer, rows = model.output_layer, torch.linspace(-1, 1, 3 * 64).view(3, 1, 64)
        layer.sequence_parallel = False
        logits, _ = layer(rows)
        layer.sequence_parallel = True
        torch.testing.assert_close(logits.transpose(0, 1), (rows @ layer.weight.T).transpose(0, 1))


def test_inference_that_gathers_rows_itself_finds_logits_of_each_once():
    case = Case(attention="planned", tp=2, sequence_parallel=True)
    run_on_ranks(2, _logits_of_gathered_rows, case)


@pytest.mark.parametrize("tp", [1, 2])
def test_without_labels_a_model_returns_all_logits(tp: int):
    case = Case(attention="planned", tp=tp, sequence_parallel=tp > 1)
    for before, after in run_on_ranks(tp, _logits, case):
        assert torch.equal(before, after) and before.shape == (1, SEQUENCE, VOCABULARY)
