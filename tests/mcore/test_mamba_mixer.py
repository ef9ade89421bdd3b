"""The Mamba-2 mixer: against that of `transformers` and its recurrence document by document, under every layout."""

import dataclasses

import pytest
import torch

from tests.mcore.recurrent import (
    HIDDEN,
    LENGTHS,
    assert_near,
    assert_samples_stay_apart,
    assert_starts_alike,
    assert_stream_lies_column_by_column,
    in_order,
    joined,
    params_of,
    parts_of_checkpoint,
    refusal,
    rows_and_upstream,
    run_layer,
)
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.oracles.mamba import mixed_by_recurrence, mixer_of_transformers
from tests.ranks import run_on_ranks

SIZES = {"heads": 4, "head_dim": 8, "groups": 2, "state_dim": 16}
OPTIONS = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 16,
}
SECTIONS = {  # rows on one of two tensor ranks
    "in_proj.weight": (16, 16, 16, 16, 2),
    "conv1d.weight": (16, 16, 16),
    "conv1d.bias": (16, 16, 16),
}


def config_of(case: Case, **options):
    fields = {**OPTIONS, **dict(case.options), **options}
    config = make_config(dataclasses.replace(case, options=tuple(fields.items())))
    config.hybrid_layer_pattern = "M*"
    return config


def build_mixer(case: Case, **options):
    """Returns our mixer with weights that its seed draws, its states lasting for tens of tokens."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_cp.mcore.mixing.mamba_mixer import ContextMambaMixer

    config = config_of(case, **options)
    torch.manual_seed(7)
    layer = ContextMambaMixer(
        config,
        MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        d_model=config.hidden_size,
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
    )
    with torch.no_grad():
        rank = layer.pg_collection.tp.rank()
        width = len(layer.norm.weight)
        layer.norm.weight.add_(torch.linspace(-0.5, 0.5, width * case.tp)[rank * width :][:width])
        heads = len(layer.D)
        layer.D.add_(torch.linspace(0, 1, heads * case.tp)[rank * heads :][:heads])
        layer.A_log.sub_(2)
        layer.dt_bias.add_(2)
        layer.in_proj.weight.mul_(6)
    return layer


def of_documents(function, x):
    return torch.cat([function(part) for part in x.split(list(LENGTHS))])


def exact(weights, function_of):
    """Returns output, gradient of the rows and of the weights in float64."""
    whole = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    x, upstream = rows_and_upstream(sum(LENGTHS))[:, :, 0].double()
    x.requires_grad_()
    out = of_documents(function_of(whole), x)
    out.backward(upstream)
    return out.detach(), x.grad, {name: weight.grad for name, weight in whole.items()}


def by_transformers(weights):
    module = mixer_of_transformers(
        {name: weight.detach() for name, weight in weights.items()}, hidden=HIDDEN, **SIZES
    )
    return lambda x: torch.func.functional_call(module, weights, (x[None],))[0]


def by_recurrence(weights):
    return lambda x: mixed_by_recurrence(weights, x, **SIZES)


@pytest.mark.parametrize(
    ("case", "planner", "oracle"),
    [
        (Case(), "auto", by_recurrence),
        (Case(cp=2), "auto", by_transformers),
        (Case(cp=2), "zigzag", by_recurrence),
        (Case(cp=3), "stripe", by_transformers),
        (Case(tp=2), "auto", by_transformers),
        (Case(tp=2, sequence_parallel=True), "auto", by_recurrence),
        (Case(tp=2, cp=2, sequence_parallel=True), "zigzag", by_transformers),
    ],
    ids=lambda value: (
        f"tp{value.tp} cp{value.cp}"
        if isinstance(value, Case)
        else getattr(value, "__name__", value)
    ),
)
def test_mixer_equals_its_definition_document_by_document(case, planner, oracle):
    ranks = run_on_ranks(case.tp * case.cp, run_layer, build_mixer, case, planner, timeout=110)
    tensor_ranks = ranks[: case.tp]
    weights = {
        name: joined([r[3] for r in tensor_ranks], name, SECTIONS.get(name))
        for name in tensor_ranks[0][3]
    }
    out, dx, gradients = exact(weights, oracle)
    ours_out, ours_dx, order = in_order(ranks, case)
    assert_near(ours_out, out[order])
    assert_near(ours_dx, dx[order])
    for name, wanted in gradients.items():
        ours = joined([r[4] for r in tensor_ranks], name, SECTIONS.get(name))
        assert wanted.abs().max() > 0
        assert_near(ours, wanted)


def test_a_mixer_in_16_bits_is_near_its_definition():
    case = Case(cp=2).with_options(params_dtype=torch.bfloat16, bf16=True)
    ranks = run_on_ranks(2, run_layer, build_mixer, case, "zigzag", timeout=110)
    assert ranks[0][1].dtype == ranks[0][3]["in_proj.weight"].dtype == torch.bfloat16
    out, dx, gradients = exact(ranks[0][3], by_recurrence)
    ours_out, ours_dx, order = in_order(ranks, case)
    for ours, wanted in ((ours_out, out[order]), (ours_dx, dx[order])):
        assert (ours.double() - wanted).abs().max() < 0.03 * wanted.abs().max()
    for name, wanted in gradients.items():
        assert (ranks[0][4][name].double() - wanted).abs().max() < 0.03 * wanted.abs().max(), name


def run_kept(rank, world_size, case: Case, planner: str):
    """What `run_layer` returns, and the numbers that the forward pass keeps beside weights."""
    kept = []

    def keep(x):
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        answer = run_layer(rank, world_size, build_mixer, case, planner)
    return answer, sum(kept)


def test_what_is_computed_twice_is_not_kept_and_the_same():
    once, twice = (
        run_on_ranks(2, run_kept, Case(cp=2).with_options(use_mamba_mem_eff_path=on), "zigzag")
        for on in (False, True)
    )
    for (one, all_kept), (two, few_kept) in zip(once, twice, strict=True):
        for a, b in zip(one[1:3], two[1:3], strict=True):
            assert torch.equal(a, b)
        for name, gradient in one[4].items():
            assert torch.equal(gradient, two[4][name]), name
        assert few_kept < all_kept / 5


def test_weights_start_the_same_on_any_tensor_parallel_ranks():
    assert_starts_alike(
        build_mixer, lambda parts, name: joined(parts, name, SECTIONS.get(name)), "A_log"
    )


def fresh(rank, world_size):
    with parallel_state(Case()):
        layer = build_mixer(Case(), mamba_num_heads=512, mamba_num_groups=1)
        return {name: weight.detach() for name, weight in layer.named_parameters()}


def test_steps_and_decays_start_in_megatrons_ranges():
    (weights,) = run_on_ranks(1, fresh, timeout=110)
    steps = torch.nn.functional.softplus(weights["dt_bias"] - 2)  # what build_mixer added
    assert 1e-3 <= steps.min() < 2e-3
    assert 0.05 < steps.max() <= 0.1
    assert abs(steps.log().mean() - torch.tensor(1e-2).log()) < 0.2  # evenly in the logarithm
    decays = (weights["A_log"] + 2).exp()
    assert 1 <= decays.min() < 1.2
    assert 15.8 < decays.max() <= 16
    assert abs(weights["conv1d.weight"]).max() <= 0.5
    assert 0.4 < abs(weights["conv1d.bias"]).max() <= 0.5


def normed_by_each_layer(rank, world_size, eps: float):
    """Rows that are small beside `eps`, and what the norm of each layer, and the last one, makes of them."""
    with parallel_state(Case()):
        from megatron_cp.models.hybrid import build_hybrid

        config = config_of(Case(), layernorm_epsilon=eps, num_layers=3)
        arguments = {"hybrid_layer_pattern": "M*-", "max_position_embeddings": 16}
        decoder = build_hybrid(config, arguments, vocab_size=32).decoder
        mixer, attention, mlp = decoder.layers
        rows = 0.1 * torch.randn(5, HIDDEN)
        norms = (mixer.norm, attention.input_layernorm, mlp.pre_mlp_layernorm, decoder.final_norm)
        return rows, [norm(rows).detach() for norm in norms]


def test_the_norm_of_every_kind_of_layer_has_the_models_epsilon():
    ((rows, found),) = run_on_ranks(1, normed_by_each_layer, 1e-2, timeout=110)
    expected = rows / (rows.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    for normed in found:
        torch.testing.assert_close(normed, expected)


def test_samples_of_megatron_batches_do_not_see_each_other():
    assert_samples_stay_apart(build_mixer)


def test_samples_of_one_stream_lie_column_by_column():
    assert_stream_lies_column_by_column(build_mixer)


def keys_of_checkpoint(rank, world_size, case: Case):
    """(keys of the sharded checkpoint) of our mixer and of Megatron's own, which only its kernels' names are lent."""
    with parallel_state(case):
        from unittest import mock

        from megatron.core.ssm import mamba_context_parallel
        from megatron.core.ssm import mamba_mixer as megatrons

        ours = build_mixer(case)
        lent = {"HAVE_MAMBA_SSM": True, "HAVE_EINOPS": True, "ExtendedRMSNorm": LentNorm}
        with (
            mock.patch.multiple(megatrons, **lent),
            mock.patch.object(mamba_context_parallel, "HAVE_EINOPS", True),
        ):
            theirs = megatrons.MambaMixer(
                config_of(case),
                megatrons.MambaMixerSubmodules(
                    in_proj=type(ours.in_proj), out_proj=type(ours.out_proj)
                ),
                d_model=HIDDEN,
                layer_number=1,
                pg_collection=ours.pg_collection,
            )
        return parts_of_checkpoint(ours), parts_of_checkpoint(theirs)


class LentNorm(torch.nn.Module):
    """Stands for the norm of mamba_ssm, whose class Megatron derives from: its weight, sharded as Megatron does."""

    def __init__(self, width, **options):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        from megatron.core.parallel_state import get_tensor_model_parallel_group
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


@pytest.mark.parametrize("tp", [1, 2])
def test_checkpoints_are_those_of_megatrons_mixer(tp):
    for ours, theirs in run_on_ranks(tp, keys_of_checkpoint, Case(tp=tp), timeout=110):
        assert {key: shape for key, (_, shape) in ours.items()} == {
            key: shape for key, (_, shape) in theirs.items()
        }
        assert {"x.in_proj.weight.dt", "x.conv1d.bias.B", "x.norm.weight", "x.D"} <= set(ours)


def said_of_megatrons_mixer(rank, world_size):
    """What a model of our attention and Megatron's own mixer says to a planned batch."""
    with parallel_state(Case()):
        import copy
        from unittest import mock

        from megatron.core.ssm import mamba_context_parallel
        from megatron.core.ssm import mamba_mixer as megatrons

        from megatron_cp.mcore.hybrid import hybrid_stack_spec_of
        from megatron_cp.mcore.versions import hybrid_classes

        parts = hybrid_classes.hybrid_parts()
        config = config_of(Case())
        spec = copy.deepcopy(hybrid_stack_spec_of(config))
        spec.submodules.mamba_layer.submodules.mixer.module = megatrons.MambaMixer
        lent = {"HAVE_MAMBA_SSM": True, "HAVE_EINOPS": True, "ExtendedRMSNorm": LentNorm}
        with (
            mock.patch.multiple(megatrons, **lent),
            mock.patch.object(mamba_context_parallel, "HAVE_EINOPS", True),
        ):
            options = {parts.pattern: "M*", parts.spec: spec}
            model = parts.model(config, vocab_size=64, max_sequence_length=96, **options)
        params, _ = params_of(LENGTHS, 1, "auto")
        tokens = torch.zeros(1, 96, dtype=torch.int64)
        try:
            model(tokens, tokens, None, labels=tokens, packed_seq_params=params)
        except NotImplementedError as error:
            return str(error)
        return None


def test_megatrons_own_mixer_gets_no_planned_batch():
    (line,) = run_on_ranks(1, said_of_megatrons_mixer, timeout=110)
    assert "decoder.layers.0.mixer is MambaMixer of Megatron-Core" in line


@pytest.mark.parametrize(
    ("mask_name", "options", "said"),
    [
        ("causal", {}, None),
        ("one question, two answers", {}, "does not see all before it"),
        ("window", {}, "does not see all before it"),
        ("causal", {"mamba_num_groups": 3}, "a multiple of mamba_num_groups=3"),
        ("causal", {"mamba_num_heads": None, "mamba_head_dim": 48}, "must divide twice"),
        ("causal", {"mamba_num_heads": 0}, "mamba_num_heads=0 must be positive"),
        ("causal", {"mamba_state_dim": 0}, "mamba_state_dim=0 must be positive"),
        ("causal", {"mamba_num_heads": None}, None),
    ],
)
def test_what_a_state_would_show_and_sizes_that_do_not_fit_are_refused(mask_name, options, said):
    (line,) = run_on_ranks(1, refusal, build_mixer, mask_name, options, timeout=110)
    assert line is None if said is None else said in line
