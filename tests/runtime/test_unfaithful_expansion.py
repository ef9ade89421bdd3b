"""Functions of latent rows that are not the same in backward, or not the same for all rows: refused, or right."""

from unittest import mock

import pytest
import torch

import megatron_cp as mcp

TOKENS, HEADS, WIDTH, LATENT = 17, 4, 8, 6
PLAN = mcp.make_plan(
    mcp.mask.causal(TOKENS),
    1,
    mcp.CPConfig(num_heads=HEADS, num_kv_heads=HEADS, head_dim=WIDTH, latent_dim=LATENT),
)


def drawn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


Q, ROWS = drawn(0, TOKENS, HEADS, WIDTH), drawn(1, TOKENS, LATENT)


def weights(count, wants=True):
    return [drawn(2 + i, LATENT, 2 * HEADS * WIDTH).requires_grad_(wants) for i in range(count)]


def keys_and_values(made):
    return made.view(-1, HEADS, 2 * WIDTH).split(WIDTH, dim=-1)


def attend(expand, q=Q, rows=ROWS):
    return mcp.cp_attention(q, rows, None, PLAN, None, expand=expand, backend="reference")[0]


def dense(made, q=Q):
    """Causal attention over all rows at once, in plain torch."""
    k, v = keys_and_values(made)
    logits = torch.einsum("qnh,knh->nqk", q, k) * WIDTH**-0.5
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return torch.einsum("nqk,knh->qnh", logits.masked_fill(later, -torch.inf).softmax(-1), v)


def a_loop_variable(latent, wants):
    out = 0
    for weight in weights(3, wants):
        out = out + attend(lambda x: keys_and_values(x @ weight), rows=latent)  # noqa: B023
    return out


def a_scratch_buffer(latent, as_bias=False):
    fixed, scratch, out = weights(1, wants=False)[0], torch.zeros_like(weights(1)[0]), 0
    for weight in weights(2, wants=False):
        scratch.copy_(weight)
        if as_bias:
            out = out + attend(lambda x: keys_and_values(x @ fixed + scratch[0]), rows=latent)
        else:
            out = out + attend(lambda x: keys_and_values(x @ scratch), rows=latent)
    return out


CHANGED = {
    "a variable of a loop": lambda latent: a_loop_variable(latent, wants=True),
    "a buffer filled anew": a_scratch_buffer,
    "a frozen variable of a loop": lambda latent: a_loop_variable(latent, wants=False),
    "a bias filled anew": lambda latent: a_scratch_buffer(latent, as_bias=True),
}
SEEN_WITHOUT_VALUES = ("a variable of a loop", "a buffer filled anew")


@pytest.mark.parametrize("name", CHANGED)
def test_a_function_that_is_another_one_in_backward_is_refused(name):
    """Its gradients were those of the other function."""
    out = CHANGED[name](ROWS.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="not the function of forward"):
        out.sum().backward()


@pytest.mark.parametrize("name", SEEN_WITHOUT_VALUES)
def test_versions_and_weights_tell_it_where_no_values_are_compared(name):
    out = CHANGED[name](ROWS.clone().requires_grad_())
    with (
        mock.patch.object(torch, "allclose", return_value=True),  # as on a GPU
        pytest.raises(RuntimeError, match="expand"),
    ):
        out.sum().backward()


def test_a_bound_variable_of_a_loop_gives_every_weight_its_gradient():
    found, expected = weights(3), weights(3)
    out = 0
    for weight in found:
        out = out + attend(lambda x, w=weight: keys_and_values(x @ w))
    out.sum().backward()
    sum(dense(ROWS @ w) for w in expected).sum().backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_a_hook_of_a_weight_gets_its_whole_gradient_once_in_each_backward_pass():
    """It ran for each piece of rows, and once more on the sum: a gradient that it halves was a quarter."""
    (found,), (expected,), seen = weights(1), weights(1), []

    def halved(grad):
        seen.append(grad)
        return grad / 2

    found.register_hook(halved)
    out = attend(lambda x: keys_and_values(x @ found))
    dense(ROWS @ expected).sum().backward()
    for times in (1, 2):
        out.sum().backward(retain_graph=True)
        assert len(seen) == times
        torch.testing.assert_close(seen[-1], expected.grad, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.grad, times * expected.grad / 2, rtol=1e-9, atol=1e-9)


def test_numbers_that_are_none_are_the_same_numbers_in_backward():
    (weight,) = weights(1)
    rows = ROWS.index_fill(0, torch.tensor([0]), torch.nan)
    attend(lambda x: keys_and_values(x @ weight), rows=rows).sum().backward()
    assert bool(weight.grad.isnan().any())


ROUTED = torch.cat([(torch.arange(TOKENS) % 2).double()[:, None], ROWS[:, 1:]], dim=1)


def by_experts(rows, experts):
    """Rows by the expert that their first column names."""
    made = rows.new_zeros(len(rows), experts[0].shape[1])
    for number, expert in enumerate(experts):
        chosen = (rows[:, 0] == number).nonzero()[:, 0]
        if len(chosen):
            made = made.index_copy(0, chosen, rows[chosen] @ expert)
    return made


def test_a_weight_that_the_first_row_does_not_use_is_refused():
    """It got no gradient."""
    experts = weights(2)
    out = attend(lambda x: keys_and_values(by_experts(x, experts)), rows=ROUTED)
    with pytest.raises(RuntimeError, match="times zero"):
        out.sum().backward()


def test_experts_that_each_row_uses_if_only_times_zero_get_their_gradients():
    found, expected = weights(2), weights(2)

    def expand(x):
        return keys_and_values(by_experts(x, found) + 0 * sum(one.sum() for one in found))

    attend(expand, rows=ROUTED).sum().backward()
    dense(by_experts(ROUTED, expected)).sum().backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_queries_get_their_gradient_where_keys_and_values_are_frozen():
    (weight,) = weights(1, wants=False)
    latent, found, expected = (x.clone().requires_grad_() for x in (ROWS, Q, Q))
    frozen = torch.no_grad()(lambda x: keys_and_values(x @ weight))
    attend(frozen, found, latent).sum().backward()
    dense(ROWS @ weight, expected).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)
    assert not latent.grad.any()
