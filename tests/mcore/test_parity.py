"""Training with our attention against Megatron's own without us: the same losses, step by step."""

import functools

import pytest

from tests.mcore.tiny_gpt import Case, train
from tests.ranks import run_on_ranks

# Both sides compute in fp32. Measured: 20 steps of Adam let two roundings of one run drift apart by
# at most 2e-6 in the loss and 2e-5 in the gradient norm.
LOSS_DRIFT, NORM_DRIFT = 2e-5, 2e-4


def losses_of(case: Case, data_parallel: int = 1) -> list[tuple[float, float]]:
    world_size = case.tp * case.pp * case.cp * data_parallel
    answers = [steps for steps in run_on_ranks(world_size, train, case) if steps]
    assert answers and all(steps == answers[0] for steps in answers), (
        "ranks report different losses"
    )
    return answers[0]


@functools.cache
def megatrons_own(case: Case) -> list[tuple[float, float]]:
    return losses_of(case)


def assert_same_training(case: Case, reference: Case, data_parallel: int = 1) -> None:
    ours, own = losses_of(case, data_parallel), megatrons_own(reference)
    assert own[-1][0] < own[0][0] - 0.3 or len(own) < 10, "the reference does not learn"
    for step, ((loss, norm), (own_loss, own_norm)) in enumerate(zip(ours, own, strict=True)):
        assert loss == pytest.approx(own_loss, rel=LOSS_DRIFT), f"loss at step {step}"
        assert norm == pytest.approx(own_norm, rel=NORM_DRIFT), f"gradient norm at step {step}"


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("attention", ["planned", "split"])
def test_twenty_steps_equal_megatrons_own_attention(attention: str, cp: int):
    steps = 8 if cp > 2 else 20
    assert_same_training(Case(attention=attention, cp=cp, steps=steps), Case(steps=steps))


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "cp": 2},
        {"tp": 2, "cp": 2, "sequence_parallel": True},
        {"pp": 2, "cp": 2},
        {"cp": 2, "distributed_optimizer": True},
    ],
    ids=str,
)
def test_steps_equal_megatrons_own_attention_beside_other_parallelism(layout: dict):
    data_parallel = 2 if layout.get("distributed_optimizer") else 1
    case = Case(attention="planned", steps=8, **layout)
    assert_same_training(case, Case(steps=8), data_parallel)


def test_interleaved_pipeline_stages_equal_one_stage():
    case = Case(attention="planned", pp=2, vpp=2, cp=2, num_layers=4, steps=6)
    assert_same_training(case, Case(num_layers=4, steps=6))


@pytest.mark.parametrize("planner", ["auto", "zigzag", "allgather", "ulysses"])
def test_packed_documents_equal_megatrons_own_attention_with_a_dense_mask(planner: str):
    case = Case(attention="planned", cp=2, packed=True, steps=8, planner=planner)
    assert_same_training(case, Case(packed=True, steps=8))


@pytest.mark.parametrize("attention", ["planned", "split"])
@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (16, 0), "window_attn_skip_freq": 2},
        {"window_size": (9, 0)},
        {"softmax_type": "learnable"},
        {"softmax_type": "off-by-one"},
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
        {"num_query_groups": 4, "qk_layernorm": True},
        {"num_query_groups": 1, "softmax_scale": 0.2, "normalization": "RMSNorm"},
        {"recompute_granularity": "selective", "num_query_groups": 4},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ],
    ids=str,
)
def test_settings_of_the_configuration_mean_what_they_mean_to_megatron(attention, options):
    recompute = {key: value for key, value in options.items() if key.startswith("recompute")}
    plain = {key: value for key, value in options.items() if key not in recompute}
    case = Case(attention=attention, cp=2, steps=6).with_options(**options)
    assert_same_training(case, Case(steps=6).with_options(**plain))


def test_a_learnable_sink_is_sharded_over_tensor_parallel_ranks():
    case = Case(attention="planned", tp=2, cp=2, steps=6).with_options(softmax_type="learnable")
    assert_same_training(case, Case(steps=6).with_options(softmax_type="learnable"))


@pytest.mark.parametrize(("cp", "data_parallel"), [(2, 1), (2, 2), (4, 1)])
def test_the_mean_per_micro_batch_is_the_same_at_every_context_parallel_size(cp, data_parallel):
    case = Case(attention="planned", cp=cp, per_token=False, steps=6)
    assert_same_training(case, Case(per_token=False, steps=6), data_parallel)


@pytest.mark.parametrize("attention", ["planned", "split"])
def test_learned_positions_follow_the_dispatch(attention: str):
    case = Case(attention=attention, cp=2, steps=4, position="learned_absolute")
    assert_same_training(case, Case(steps=4, position="learned_absolute"))
