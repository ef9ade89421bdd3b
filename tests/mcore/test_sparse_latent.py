"""Sparse latent attention: against its definition and `transformers`, document by document, under every layout."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.mcore.recurrent import (
    LENGTHS,
    assert_near,
    in_order,
    params_of,
    parts_on_ranks,
    rows_and_upstream,
)
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.oracles.plans import tokens_of
from tests.oracles.sparse_latent import attended_by_definition, attended_by_transformers
from tests.ranks import run_on_ranks

SIZES = {
    "heads": 4,
    "qk_head_dim": 8,
    "rope": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "v_head_dim": 12,
    "index_heads": 16,  # with few, scores are equal, all 0, and `transformers` takes any of them
    "index_head_dim": 16,
    "topk": 6,
}
COEFFICIENT = 30.0  # the gradient of the index is then as large as the others
OPTIONS = {
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "qk_layernorm": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "rope_type": "rope",
    "apply_rope_fusion": False,
    "dsa_indexer_n_heads": 16,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 6,
    "dsa_indexer_loss_coeff": COEFFICIENT,
    "init_method_std": 0.2,
}
COLUMNS = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]


def config_of(case: Case, **later):
    fields = {**OPTIONS, **dict(case.options)}
    config = make_config(dataclasses.replace(case, options=tuple(fields.items())))
    config.experimental_attention_variant = "dsa"  # Megatron-Core refuses it beside context ranks
    for name, value in {"dsa_indexer_k_norm_epsilon": 1e-6, **later}.items():
        setattr(config, name, value)
    return config


def build_layer(case: Case, layer_number=1, config=None, **later):
    """Returns the attention of our spec, every norm and bias unlike its start; `config` where layers share one."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from megatron_cp.mcore.parts.rope import install_position_rotary
    from megatron_cp.mcore.spec import gpt_block_spec

    config = config or config_of(case, **later)
    torch.manual_seed(7)
    (layer, *_) = gpt_block_spec(config).layer_specs
    attention = build_module(
        layer.submodules.self_attention,
        config=config,
        layer_number=layer_number,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
    )
    install_position_rotary(torch.nn.ModuleDict({"self_attention": attention}))
    with torch.no_grad():
        for name, weight in attention.named_parameters():
            if "norm" in name:
                weight.add_(torch.linspace(-0.5, 0.5, len(weight)))
    return attention.to(config.params_dtype)  # norms are made in fp32


def run_layer(rank, world_size, case: Case, planner: str, later=()):
    """(plan, output rows, gradient rows, weights, gradients of weights, the loss logged) of this rank."""
    with parallel_state(case):
        from megatron_cp.mcore.mixing.indexer import IndexerLoss

        layer = build_layer(case, **dict(later))
        IndexerLoss.scale = IndexerLoss.total = None
        cp, tp = layer.pg_collection.cp, layer.pg_collection.tp
        params, plan = params_of(LENGTHS, case.cp, planner)
        tokens = tokens_of(plan, "q")[cp.rank()].copy()
        positions = np.concatenate([np.arange(length) for length in LENGTHS])
        params.positions, params.max_seqlen_q = torch.from_numpy(positions[tokens]), sum(LENGTHS)
        dtype = layer.linear_proj.weight.dtype
        x, upstream = rows_and_upstream(sum(LENGTHS)).to(dtype)[:, tokens]
        own = slice(None)
        if case.sequence_parallel:
            share = len(x) // case.tp
            own = slice(tp.rank() * share, (tp.rank() + 1) * share)
        x = x[own].clone().requires_grad_()
        out, bias = layer(x, None, packed_seq_params=params)
        assert bias is None
        out.backward(upstream[own])
        gradients = {}
        for name, weight in layer.named_parameters():
            gradient = weight.grad.clone()
            torch.distributed.all_reduce(gradient, group=cp)
            if case.sequence_parallel and getattr(weight, "sequence_parallel", False):
                torch.distributed.all_reduce(gradient, group=tp)
            gradients[name] = gradient
        weights = {name: weight.detach() for name, weight in layer.named_parameters()}
        rows = (out.detach()[:, 0], x.grad[:, 0])
        return plan, *rows, weights, gradients, float(IndexerLoss.total)


def joined(parts, name):
    """Returns a weight of all tensor ranks."""
    own = [part[name] for part in parts]
    module = name.split(".")[0]
    if len(own) > 1 and module in COLUMNS:
        return torch.cat(own)
    if len(own) > 1 and module == "linear_proj":
        return torch.cat(own, dim=1)
    assert all(torch.equal(one, own[0]) for one in own), name
    return own[0]


def exact(weights, **options):
    """Returns output, gradient of the rows and of the weights in float64, and the mean divergence."""
    whole = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    x, upstream = rows_and_upstream(sum(LENGTHS))[:, :, 0].double()
    x.requires_grad_()
    outs, losses = zip(
        *(attended_by_definition(whole, part, SIZES, **options) for part in x.split(list(LENGTHS))),
        strict=True,
    )
    out, loss = torch.cat(outs), sum(losses) / len(x)
    ((out * upstream).sum() + COEFFICIENT * loss).backward()
    gradients = {name: weight.grad for name, weight in whole.items()}
    return out.detach(), x.grad, gradients, float(loss.detach())


def assert_layer_is(ranks, case: Case, **options):
    tensor_ranks = ranks[: case.tp]
    weights = {name: joined([r[3] for r in tensor_ranks], name) for name in tensor_ranks[0][3]}
    out, dx, gradients, loss = exact(weights, **options)
    ours_out, ours_dx, order = in_order(ranks, case)
    assert_near(ours_out, out[order])
    assert_near(ours_dx, dx[order])
    for name, wanted in gradients.items():
        ours = joined([r[4] for r in tensor_ranks], name)
        if (
            "indexer" in name
        ):  # a mean over ranks, whose parts were added here, or a sum over tokens
            ours = ours / (sum(LENGTHS) if case.per_token else case.cp)
        assert wanted.abs().max() > 0, name
        assert_near(ours, wanted)
    logged = [r[5] for r in ranks[:: case.tp]]
    assert sum(logged) / case.cp == pytest.approx(COEFFICIENT * loss, rel=1e-5)


@pytest.mark.parametrize(
    ("case", "planner", "over"),
    [
        (Case(), "auto", "visible"),
        (Case(cp=2), "auto", "picked"),
        (Case(cp=3, per_token=False), "zigzag", "visible"),
        (Case(tp=2), "auto", "visible"),
        (Case(tp=2, sequence_parallel=True, per_token=False), "auto", "picked"),
        (Case(tp=2, cp=2, sequence_parallel=True), "zigzag", "visible"),
    ],
    ids=lambda value: f"tp{value.tp} cp{value.cp}" if isinstance(value, Case) else value,
)
def test_layer_equals_its_definition_document_by_document(case, planner, over):
    later = (("dsa_indexer_use_sparse_loss", over == "picked"),)
    ranks = run_on_ranks(case.tp * case.cp, run_layer, case, planner, later, timeout=110)
    assert_layer_is(ranks, case, over=over)


@pytest.mark.parametrize("interleaved", [False, True], ids=["DeepSeek-V3.2", "GLM-5"])
def test_layer_equals_that_of_transformers(interleaved):
    case = Case(cp=2)
    later = (("dsa_indexer_rope_interleaved", interleaved),)
    ranks = run_on_ranks(2, run_layer, case, "auto", later, timeout=110)
    assert_layer_is(ranks, case, index_interleaved=interleaved)
    x = rows_and_upstream(sum(LENGTHS))[0, :, 0].double()
    parts = (
        attended_by_transformers(ranks[0][3], part, SIZES, index_interleaved=interleaved)
        for part in x.split(list(LENGTHS))
    )
    out, _, order = in_order(ranks, case)
    assert_near(out, torch.cat(list(parts))[order])


def test_heads_of_an_index_without_relu_count_where_negative():
    case = Case()
    ranks = run_on_ranks(1, run_layer, case, "auto", (("dsa_indexer_scoring_relu", False),))
    assert_layer_is(ranks, case, has_relu=False)


def test_a_layer_in_16_bits_is_near_its_definition():
    case = Case(cp=2).with_options(params_dtype=torch.bfloat16, bf16=True, dsa_indexer_topk=64)
    ranks = run_on_ranks(2, run_layer, case, "zigzag", timeout=110)
    weights = ranks[0][3]
    assert ranks[0][1].dtype == weights["linear_proj.weight"].dtype == torch.bfloat16
    x, upstream = rows_and_upstream(sum(LENGTHS))[:, :, 0].double()
    x.requires_grad_()
    sizes = {**SIZES, "topk": 64}  # all keys: rounding chooses none
    weights = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    outs = [attended_by_definition(weights, part, sizes)[0] for part in x.split(list(LENGTHS))]
    out = torch.cat(outs)
    out.backward(upstream)
    ours_out, ours_dx, order = in_order(ranks, case)
    for ours, wanted in ((ours_out, out.detach()[order]), (ours_dx, x.grad[order])):
        assert (ours.double() - wanted).abs().max() < 0.03 * wanted.abs().max()
    for name, weight in weights.items():
        if "indexer" not in name:
            wanted = weight.grad
            assert (ranks[0][4][name].double() - wanted).abs().max() < 0.03 * wanted.abs().max(), (
                name
            )


def run_in_batch(rank, world_size, sequences):
    """Output rows of these of two sequences side by side, as Megatron cuts them."""
    case = Case(cp=world_size)
    with parallel_state(case):
        layer = build_layer(case)
        x = rows_and_upstream(32, batch=2)[0]
        pieces = torch.arange(32).reshape(2 * world_size, -1)
        rows = torch.cat([pieces[rank], pieces[2 * world_size - 1 - rank]])
        return rows, layer(x[rows][:, sequences], None)[0].detach()


def test_sequences_that_megatron_cut_are_one_document_each():
    together = run_on_ranks(2, run_in_batch, [0, 1], timeout=110)
    for sequence in (0, 1):
        alone = run_on_ranks(2, run_in_batch, [sequence], timeout=110)
        (one_rank,) = run_on_ranks(1, run_in_batch, [sequence], timeout=110)
        whole = torch.empty_like(one_rank[1])
        whole[one_rank[0]] = one_rank[1]
        for (rows, both), (_, single) in zip(together, alone, strict=True):
            assert_near(both[:, sequence], single[:, 0].double())
            assert_near(single, whole[rows].double())


def run_stream(rank, world_size):
    """Two samples of one stream, as the hooks cut them: `[s, b]` holds the rows of the plan column by column."""
    with parallel_state(Case()):
        layer = build_layer(Case())
        x = rows_and_upstream(96)[0]
        params, _ = params_of(LENGTHS, 1, "auto", num_samples=2)
        params.positions, params.max_seqlen_q = torch.arange(96), 96
        folded = layer(x.reshape(2, 48, -1).transpose(0, 1), None, packed_seq_params=params)[0]
        params.num_samples = 1
        return folded.detach(), layer(x, None, packed_seq_params=params)[0].detach()


def test_samples_of_one_stream_are_one_pack():
    ((folded, flat),) = run_on_ranks(1, run_stream)
    assert_near(folded.transpose(0, 1).reshape(flat.shape), flat.double())


def bring(weight, kept):
    """Returns a hook that gives a weight its value."""

    def hook(*_):
        weight.data.copy_(kept)

    return hook


def run_gathered(rank, world_size):
    """Output of the layer, and of one whose weights are no numbers until a hook before their module brings them."""
    with parallel_state(Case()):
        layer = build_layer(Case())
        x = rows_and_upstream(sum(LENGTHS))[0]
        whole = layer(x, None)[0].detach()
        for module in layer.modules():
            for weight in module.parameters(recurse=False):
                module.register_forward_pre_hook(bring(weight, weight.detach().clone()))
                weight.data.fill_(torch.nan)
        return whole, layer(x, None)[0].detach()


def test_weights_are_read_after_the_hooks_that_gather_them():
    ((whole, gathered),) = run_on_ranks(1, run_gathered)
    assert whole.isfinite().all()
    assert torch.equal(gathered, whole)


def test_checkpoints_name_and_cut_tensors_as_megatrons():
    alone, of_two = (run_on_ranks(tp, parts_on_ranks, build_layer)[0] for tp in (1, 2))
    assert alone.keys() == of_two.keys()
    tensors = {key: shape for key, (_, shape) in of_two.items() if "_extra_state" not in key}
    assert tensors == {
        "x.linear_q_down_proj.weight": (24, 64),
        "x.linear_q_up_proj.weight": (64, 24),
        "x.linear_kv_down_proj.weight": (24, 64),
        "x.linear_kv_up_proj.weight": (80, 16),
        "x.linear_proj.weight": (64, 48),
        "x.q_layernorm.weight": (24,),
        "x.kv_layernorm.weight": (16,),
        "x.core_attention.indexer.linear_wq_b.weight": (256, 24),
        "x.core_attention.indexer.linear_wk.weight": (16, 64),
        "x.core_attention.indexer.k_norm.weight": (16,),
        "x.core_attention.indexer.k_norm.bias": (16,),
        "x.core_attention.indexer.linear_weights_proj.weight": (16, 64),
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"multi_latent_attention": False}, "multi_latent_attention"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"dsa_indexer_topk": None}, "dsa_indexer_topk=None"),
        ({"dsa_indexer_head_dim": 4}, "dsa_indexer_head_dim=4"),
        ({"fp8": "hybrid"}, "fp8='hybrid'"),
        ({"window_size": (8, 0)}, "window_size"),
        ({"softmax_type": "learnable"}, "softmax_type"),
        ({"dsa_indexer_topk_freq": 0}, "dsa_indexer_topk_freq=0 must be at least 1"),
        (
            {"dsa_indexer_skip_topk_offset": -1},
            "dsa_indexer_skip_topk_offset=-1 must be at least 0",
        ),
        ({"dsa_indexer_topk_freq": 2, "mtp_num_layers": 2}, "mtp_num_layers=2"),
    ],
    ids=str,
)
def test_what_sparse_attention_does_not_honour_is_refused_by_name(settings, words):
    from types import SimpleNamespace

    from megatron_cp.mcore.settings.sparse_settings import check_sparse

    good = {**OPTIONS, "softmax_type": "vanilla", "window_size": None, "num_layers": 4}
    check_sparse(SimpleNamespace(**good))
    with pytest.raises((ValueError, NotImplementedError), match=words):
        check_sparse(SimpleNamespace(**{**good, **settings}))
