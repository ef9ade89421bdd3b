"""Layers that share picked keys: each takes those of its own micro-batch, recomputed and interleaved too."""

import re

import pytest
import torch

from tests.mcore.recurrent import LENGTHS, params_of, rows_and_upstream
from tests.mcore.test_sparse_latent import build_layer, config_of
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.oracles.plans import tokens_of
from tests.ranks import run_on_ranks

SHARING = {"num_layers": 6, "dsa_indexer_topk_freq": 3, "dsa_indexer_skip_topk_offset": 0}


def layers_of(world_size):
    """Returns the attention of the first two layers; the second has no index."""
    case = Case(cp=world_size)
    config = config_of(case, **SHARING)
    first, second = (build_layer(case, layer_number=number, config=config) for number in (1, 2))
    assert first.core_attention.indexer is not None
    assert not [name for name, _ in second.named_parameters() if "indexer" in name]
    return first, second


def _run(layers, x, params, recomputed):
    from megatron.core.tensor_parallel import checkpoint

    for layer, is_recomputed in zip(layers, recomputed, strict=True):

        def call(rows, layer=layer):
            return layer(rows, None, packed_seq_params=params)[0]

        x = x + (checkpoint(call, False, x) if is_recomputed else call(x))
    return x


def _gradients_of_two_micro_batches(rank, world_size, recomputed):
    """Both run forward before the first runs backward, as in a pipeline."""
    with parallel_state(Case(cp=world_size)):
        layers = layers_of(world_size)
        outs, inputs = [], []
        for number in range(2):
            params, plan = params_of(LENGTHS, world_size, "zigzag")
            tokens = tokens_of(plan, "q")[rank].copy()
            rows, upstream = rows_and_upstream(sum(LENGTHS))[:, tokens]
            params.positions, params.max_seqlen_q = torch.from_numpy(tokens), sum(LENGTHS)
            inputs.append((rows + number * upstream).requires_grad_())
            outs.append(_run(layers, inputs[-1], params, recomputed))
        for out in outs:
            out.square().sum().backward()
        weights = [weight.grad for layer in layers for weight in layer.parameters()]
        return [x.detach() for x in outs], [*(x.grad for x in inputs), *weights]


@pytest.mark.parametrize("recomputed", [(True, True), (False, True), (True, False)])
def test_recomputed_layers_take_the_picks_of_their_own_micro_batch(recomputed):
    plain = run_on_ranks(2, _gradients_of_two_micro_batches, (False, False))
    found = run_on_ranks(2, _gradients_of_two_micro_batches, recomputed)
    for (outs, gradients), (same_outs, same_gradients) in zip(plain, found, strict=True):
        assert not torch.equal(*outs)
        for one, other in zip((*outs, *gradients), (*same_outs, *same_gradients), strict=True):
            assert (one - other).abs().max() <= 1e-6 * one.abs().max()


def _refusals(rank, world_size):
    with parallel_state(Case()):
        from megatron_cp.mcore.documents.cut import forget_batch

        forget_batch()
        layers, (params, _) = layers_of(1), params_of(LENGTHS, 1, "auto")
        params.positions, params.max_seqlen_q = torch.arange(sum(LENGTHS)), sum(LENGTHS)
        x = rows_and_upstream(sum(LENGTHS))[0].requires_grad_()
        said = []
        for wrong in (
            lambda: layers[1](x, None, packed_seq_params=params),
            lambda: [_run(layers[:1], x, params, [True]) for _ in range(2)],
            lambda: [_run(layers, x + i, params, [False, True]) for i in range(2)],
            lambda: _run(layers, x, None, [False, True]),
            lambda: build_layer(Case(), layer_number=6, config=layers[1].core_attention.config),
            lambda: build_layer(Case(), layer_number=3, **SHARING),  # of another model
        ):
            with pytest.raises((RuntimeError, NotImplementedError, ValueError)) as problem:
                wrong()
            said.append(str(problem.value))
        return said


def test_picks_that_are_not_there_or_of_which_micro_batch_is_unknown_are_refused():
    (said,) = run_on_ranks(1, _refusals)
    for found, words in zip(
        said,
        (
            "layer 2 takes the keys that a layer before it picks, which has not run",
            "layer 1 runs checkpointed twice with one packed_seq_params",
            "layer 2 runs checkpointed twice with one packed_seq_params",
            "need packed_seq_params, which tell micro-batches apart",
            "layer 6 takes the keys that a layer before it has picked, on another pipeline stage",
            "layer 3 takes the keys that a layer before it has picked, on another pipeline stage",
        ),
        strict=True,
    ):
        assert re.search(re.escape(words), found), found
