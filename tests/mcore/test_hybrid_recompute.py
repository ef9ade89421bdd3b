"""Full recompute of a hybrid model under a Megatron-Core that knows none: the same gradients, and less that is kept."""

import pytest
import torch

from tests.mcore.recurrent import LENGTHS, params_of
from tests.mcore.test_hybrid_prediction import NUM_TOKENS, VOCABULARY, batch_of_documents
from tests.mcore.test_mamba_mixer import config_of
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.oracles.plans import tokens_of
from tests.ranks import run_on_ranks

PATTERN = "M-*M-"


def _kept_and_gradients(rank, world_size, recompute, is_frozen=False, tp=1):
    """Bytes that forward keeps for backward, and all gradients; of `is_frozen` embeddings there are none."""
    cp_size, rank = world_size // tp, rank // tp
    case = Case(cp=cp_size, tp=tp)
    config = config_of(case, num_layers=len(PATTERN), kv_channels=16)
    config.hybrid_layer_pattern = PATTERN
    config.distribute_saved_activations = tp > 1
    with parallel_state(case):
        from megatron_cp.mcore.batch import context_parallel_params
        from megatron_cp.models.hybrid import build_hybrid

        if recompute is not None:
            config.recompute_granularity = "full"
            config.recompute_method, config.recompute_num_layers = recompute
        torch.manual_seed(5)
        config.init_method = config.output_layer_init_method = torch.nn.init.xavier_normal_
        arguments = {"hybrid_layer_pattern": PATTERN, "max_position_embeddings": NUM_TOKENS}
        arguments |= {
            "untie_embeddings_and_output_weights": True,
            "position_embedding_type": "none",
        }
        model = build_hybrid(config, arguments, vocab_size=VOCABULARY)
        weights = {weight.data_ptr() for weight in model.parameters()}
        model.embedding.requires_grad_(not is_frozen)
        _, plan = params_of(LENGTHS, cp_size, "zigzag")
        rows = torch.from_numpy(tokens_of(plan, "q")[rank].copy())
        tokens, labels, mask = batch_of_documents()
        kept = {}

        def keep(tensor):
            if tensor.data_ptr() not in weights:
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = model(
                tokens[None, rows],
                rows[None],
                None,
                labels=labels[None, rows],
                packed_seq_params=context_parallel_params({"full": plan}, rank, "cpu"),
            )
        num_bytes = sum(kept.values())
        (losses * mask[None, rows]).sum().backward()
        return num_bytes, {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("recompute", [("uniform", 1), ("uniform", 2), ("block", 3)])
def test_recomputed_layers_give_the_same_gradients_and_keep_less(recompute: tuple[str, int]):
    plain = run_on_ranks(2, _kept_and_gradients, None)
    for (kept, gradients), (all_kept, expected) in zip(
        run_on_ranks(2, _kept_and_gradients, recompute), plain, strict=True
    ):
        assert kept < 0.6 * all_kept, (kept, all_kept)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name


def _recomputes_by_itself(rank, world_size):
    with parallel_state(Case()):
        from megatron_cp.mcore.versions.hybrid_classes import hybrid_parts

        return hybrid_parts().recomputes


@pytest.mark.parametrize(("is_frozen", "tp"), [(True, 1), (False, 2)])
def test_frozen_embeddings_and_parts_of_what_is_kept_change_no_gradient(is_frozen: bool, tp: int):
    if run_on_ranks(1, _recomputes_by_itself)[0]:
        pytest.skip("from 0.18 on Megatron-Core recomputes by itself, and does neither")
    plain = run_on_ranks(2, _kept_and_gradients, None, is_frozen, tp)
    found = run_on_ranks(2, _kept_and_gradients, ("block", 3), is_frozen, tp)
    for (_, gradients), (_, expected) in zip(found, plain, strict=True):
        assert sum(gradient is None for gradient in expected.values()) == is_frozen
        for name, gradient in gradients.items():
            same = expected[name]
            assert gradient is same is None or torch.equal(gradient, same), name


def test_what_megatron_recomputes_otherwise_is_refused():
    (said,) = run_on_ranks(1, _refusal)
    assert "in fp8 or fp4 needs megatron-core 0.18 or later" in said


def _refusal(rank, world_size):
    config = config_of(Case(), num_layers=1)
    config.recompute_granularity, config.fp8 = "full", "hybrid"
    with parallel_state(Case()):
        from megatron_cp.mcore.hybrid_recompute import RecomputedStack

        with pytest.raises(NotImplementedError) as refused:
            RecomputedStack(config, None)
        return str(refused.value)
