"""Attention dropout under Megatron: seeds that belong to heads, and samples that lie in a batch as heads."""

import contextlib
import itertools

import pytest
import torch

from tests.mcore.test_attention import HEAD_DIM, NUM_HEADS, make_attention, random_heads
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.oracles.attention import exact_attention
from tests.oracles.dropout import GOLDEN, dropout_factors
from tests.ranks import run_on_ranks

SEEDED_STREAMS = "seeded", "in a layer under sequence parallelism", "none"


def _seeds(rank, world_size, streams):
    with parallel_state(Case(tp=world_size)) as groups:
        from megatron.core import tensor_parallel

        from megatron_cp.mcore.parts.dropout import draw_head_seeds

        tracker, device = tensor_parallel.get_cuda_rng_tracker(), torch.device("cpu")
        asked = (NUM_HEADS // world_size, 3, groups.get_tensor_model_parallel_group(), device)
        if streams == "none":
            tracker.reset()
            torch.manual_seed(7)
        in_layer = streams == "in a layer under sequence parallelism"
        with tracker.fork() if in_layer else contextlib.nullcontext():
            return [draw_head_seeds(*asked).tolist() for _ in range(2)]


@pytest.mark.parametrize("streams", SEEDED_STREAMS)
def test_a_head_has_its_seed_whichever_rank_holds_it(streams):
    (alone,) = run_on_ranks(1, _seeds, streams)
    halves = run_on_ranks(2, _seeds, streams)
    assert alone[0] != alone[1]
    for draw, whole in enumerate(alone):
        in_turn = [torch.tensor(half[draw]).view(3, -1) for half in halves]
        assert torch.cat(in_turn, dim=1).flatten().tolist() == whole
        assert [seed % 2**64 for seed in whole] == [
            (whole[0] + number * GOLDEN) % 2**64 for number in range(len(whole))
        ]


def _two_samples(rank, world_size, dropout):
    with parallel_state(Case()):
        from megatron_cp.mcore.mixing import attention as module

        seeds = []

        def noted(*asked):
            seeds.append(draw(*asked))
            return seeds[-1]

        draw, module.draw_head_seeds = module.draw_head_seeds, noted
        try:
            attention = make_attention(Case().with_options(attention_dropout=dropout))
            q, k, v = (x.expand(-1, 2, -1, -1) for x in random_heads(24))
            dropped = attention(q, k, v, None)
            whole = attention.eval()(q, k, v, None)
        finally:
            module.draw_head_seeds = draw
        return dropped, whole, [seed.tolist() for seed in seeds]


def test_each_sample_of_a_batch_drops_pairs_of_its_own_and_an_evaluation_none():
    ((dropped, whole, seeds),) = run_on_ranks(1, _two_samples, 0.4)
    assert len(seeds) == 1, "an evaluation draws nothing"
    q, k, v = (x[:, 0] for x in random_heads(24))
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    for sample, expects in itertools.product(range(2), ("dropped", "whole")):
        seed = seeds[0][sample * NUM_HEADS] % 2**64
        factors = dropout_factors(seed, NUM_HEADS, range(24), range(24), 0.4)
        factors = factors if expects == "dropped" else None
        exact = exact_attention(q, k, v, causal, factors=factors).out
        found = (dropped if expects == "dropped" else whole)[:, sample]
        found = found.view(24, NUM_HEADS, HEAD_DIM).double()
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert not torch.equal(dropped[:, 0], dropped[:, 1])
