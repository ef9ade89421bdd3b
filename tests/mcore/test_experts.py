"""Experts with our attention: the same training as with Megatron's own, at every layout."""

import dataclasses

import pytest

from tests.mcore.test_parity import assert_same_training
from tests.mcore.tiny_gpt import Case, Trainer, parallel_state
from tests.ranks import run_on_ranks

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
}


def _experts(steps: int = 4, **options) -> Case:
    """A model with experts, trained by Megatron's own attention on one rank."""
    return Case(steps=steps).with_options(**{**EXPERTS, **options})


def _ours(reference: Case, attention: str = "planned", **layout) -> Case:
    return dataclasses.replace(reference, attention=attention, **layout)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("layout", [{"cp": 1}, {"cp": 2}, {"cp": 2, "ep": 2}], ids=str)
def test_twenty_steps_with_experts_equal_megatrons_own_attention(layout: dict, dispatcher: str):
    reference = _experts(20)
    ours = _ours(reference, **layout, command_line=True)
    assert_same_training(ours.with_options(moe_token_dispatcher_type=dispatcher), reference)


LOSSES = {
    "aux_loss": {"moe_aux_loss_coeff": 0.5},
    "seq_aux_loss": {"moe_aux_loss_coeff": 0.5},
    "global_aux_loss": {"moe_aux_loss_coeff": 0.5},
    "none": {"moe_z_loss_coeff": 0.2},
}


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("kind", LOSSES)
def test_auxiliary_losses_weigh_the_same_at_every_context_parallel_size(kind: str, per_token: bool):
    reference = _experts(moe_router_load_balancing_type=kind, **LOSSES[kind])
    own = dataclasses.replace(reference, per_token=per_token)
    for layout in ({"cp": 4}, {"cp": 2, "ep": 2}):
        assert_same_training(_ours(own, **layout), own)
    assert_same_training(_ours(own, "split", cp=2), own)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_auxiliary_losses_weigh_the_same_at_every_tensor_parallel_size(layout: dict):
    """Megatron before 0.19 divides their weight by tp under sequence parallelism."""
    reference = _experts(moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.2)
    assert reference.per_token
    assert_same_training(_ours(reference, **layout, sequence_parallel=True), reference)


def test_sinkhorn_balances_the_rows_of_all_ranks_that_hold_a_pack():
    balanced = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1}
    reference = _experts(**balanced)
    for layout in ({"cp": 2}, {"tp": 2}, {"tp": 2, "cp": 2}):
        assert_same_training(
            _ours(reference, **layout, sequence_parallel="tp" in layout), reference
        )


@pytest.mark.parametrize(
    "options",
    [
        {"moe_layer_freq": (0, 1), "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 32},
        {"moe_shared_expert_intermediate_size": 32, "qk_layernorm": True},
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "normalization": "RMSNorm"},
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.05,
            "moe_router_topk_scaling_factor": 2.5,
        },
        {
            "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
            "moe_aux_loss_coeff": (0.2, 0.3),
        },
        {"recompute_granularity": "selective", "recompute_modules": ("moe", "core_attn")},
    ],
    ids=str,
)
def test_settings_of_experts_mean_what_they_mean_to_megatron(options: dict):
    reference = _experts(**options)
    assert_same_training(_ours(reference, cp=2, ep=2, command_line=True), reference)


def _expert_bias(rank, world_size, case):
    with parallel_state(case) as groups:
        trainer = Trainer(case, groups)
        for _ in range(3):
            trainer.step()
        layers = trainer.chunks[0].module.decoder.layers
        return [layer.mlp.router.expert_bias.tolist() for layer in layers]


def test_the_bias_of_experts_is_updated_from_the_tokens_of_all_ranks():
    reference = _experts(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.05,
    )
    (own,) = run_on_ranks(1, _expert_bias, reference)
    for answer in run_on_ranks(2, _expert_bias, _ours(reference, cp=2)):
        assert answer == own
    assert any(value != 0.0 for value in own[0])


def test_experts_train_over_pipeline_stages_that_begin_with_a_dense_layer():
    reference = dataclasses.replace(_experts(2, moe_layer_freq=(0, 1, 1, 0)), num_layers=4)
    for command_line in (True, False):
        case = _ours(reference, pp=2, vpp=2, cp=2, command_line=command_line)
        assert_same_training(case, reference)


def _refusal_of_padding(rank, world_size, case):
    from tests.mcore import packs, tiny_gpt

    with parallel_state(case) as groups:
        trainer = Trainer(case, groups)
        plain = packs.plans_of

        def three_rows_short(lengths, *args):
            return plain((lengths[0] - 3, *lengths[1:]), *args)

        packs.plans_of = three_rows_short
        try:
            tiny_gpt.Trainer.step(trainer)
        except NotImplementedError as error:
            return str(error)
        finally:
            packs.plans_of = plain
        return "no error"


def test_rows_that_fill_up_are_never_counted_as_tokens_of_experts():
    case = _ours(_experts(moe_aux_loss_coeff=0.1), cp=2)
    for message in run_on_ranks(2, _refusal_of_padding, case):
        assert "moe_aux_loss_coeff=0.1" in message and "125 tokens on 128 rows" in message
