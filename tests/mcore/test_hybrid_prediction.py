"""Predictions of a hybrid model: against plain float64 code from the same weights, and what they may not see."""

import pytest
import torch

from tests.mcore.recurrent import LENGTHS, params_of
from tests.mcore.test_mamba_mixer import SIZES, config_of
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.oracles.mamba import mixed_by_recurrence
from tests.oracles.plans import tokens_of
from tests.ranks import run_on_ranks

VOCABULARY, HEADS, GROUPS, DEPTHS, SCALE = 32, 4, 2, 2, 0.7
PATTERN = "M-*/M*-/M*-"
NUM_TOKENS = sum(LENGTHS)


def batch_of_documents(changed_document=None, counted_document=None):
    """Returns tokens, labels and loss mask `[96]`; some tokens count in no loss."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    others = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    if changed_document is not None:
        tokens = torch.where(documents == changed_document, others, tokens)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    mask = (torch.arange(NUM_TOKENS) % 7 != 2).float()
    mask[ends] = 0.0
    if counted_document is not None:
        mask[documents != counted_document] = 0.0
    return tokens, tokens.roll(-1), mask


def options_of(repeated: bool, per_token: bool, cp: int):
    case = Case(cp=cp, per_token=per_token)
    config = config_of(
        case, num_layers=3, mtp_num_layers=DEPTHS, mtp_loss_scaling_factor=SCALE, kv_channels=16
    )
    config.hybrid_layer_pattern, config.mtp_use_repeated_layer = PATTERN, repeated
    return case, config


def losses_and_gradients(rank, world_size, repeated, per_token, batches):
    """For each batch: sum of the main losses, losses of predictions, weights and their gradients, over all ranks."""
    case, config = options_of(repeated, per_token, world_size)
    with parallel_state(case):
        from megatron.core.transformer import multi_token_prediction as megatrons

        from megatron_cp.mcore.batch import context_parallel_params
        from megatron_cp.models.hybrid import build_hybrid

        arguments = {"hybrid_layer_pattern": PATTERN, "max_position_embeddings": NUM_TOKENS}
        arguments |= {"untie_embeddings_and_output_weights": True}
        torch.manual_seed(5)
        config.init_method = config.output_layer_init_method = torch.nn.init.xavier_normal_
        arguments["position_embedding_type"] = "none"
        model = build_hybrid(config, arguments, vocab_size=VOCABULARY)
        plan = params_of(LENGTHS, world_size, "zigzag")[1]
        rows = torch.from_numpy(tokens_of(plan, "q")[rank].copy())
        megatrons.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
        found = []
        for changed, counted in batches:
            megatrons.MTPLossLoggingHelper.tracker.clear()
            tokens, labels, mask = batch_of_documents(changed, counted)
            params = context_parallel_params({"full": plan}, rank, "cpu")
            model.zero_grad()
            losses = model(
                tokens[None, rows],
                rows[None],
                None,
                labels=labels[None, rows],
                loss_mask=mask[None, rows],
                packed_seq_params=params,
            )
            total = (losses * mask[None, rows]).sum()
            total.backward()
            tracker = megatrons.MTPLossLoggingHelper.tracker
            ahead = tracker.get("values", tracker.get("loss_values")) / world_size
            summed = {"losses": torch.cat([total.detach()[None], ahead])}
            summed |= {name: weight.grad for name, weight in model.named_parameters()}
            for tensor in summed.values():
                torch.distributed.all_reduce(tensor)
            found.append({name: tensor.clone() for name, tensor in summed.items()})
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        return weights, found


# --- the oracle: one document after the other, float64


def normed(rows, weight):
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def attended(weights, x):
    """Grouped causal attention without positions; Megatron's rows of q, k, v lie group by group."""
    size, share = 16, HEADS // GROUPS
    qkv = (x @ weights["linear_qkv.weight"].T).view(len(x), GROUPS, share + 2, size)
    q = qkv[:, :, :share].reshape(len(x), HEADS, size)
    k, v = (qkv[:, :, i].repeat_interleave(share, dim=1) for i in (share, share + 1))
    scores = torch.einsum("qnh,knh->nqk", q, k) / size**0.5
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    out = torch.einsum("nqk,knh->qnh", scores.masked_fill(future, -torch.inf).softmax(-1), v)
    return out.flatten(1) @ weights["linear_proj.weight"].T


def below(weights, prefix):
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def through_layers(weights, prefix, letters, x):
    for i, letter in enumerate(letters):
        layer = below(weights, f"{prefix}layers.{i}.")
        if letter == "M":
            x = x + mixed_by_recurrence(
                below(layer, "mixer."), normed(x, layer["norm.weight"]), **SIZES
            )
        elif letter == "*":
            rows = normed(x, layer["input_layernorm.weight"])
            x = x + attended(below(layer, "self_attention."), rows)
        else:
            rows = normed(x, layer["pre_mlp_layernorm.weight"]) @ layer["mlp.linear_fc1.weight"].T
            x = x + torch.nn.functional.gelu(rows) @ layer["mlp.linear_fc2.weight"].T
    return x


def loss_sums(weights, tokens, mask, repeated):
    """Returns the summed loss of a document's next tokens and of each prediction, and how many tokens each counts."""
    words, head = weights["embedding.word_embeddings.weight"], weights["output_layer.weight"]
    x = through_layers(weights, "decoder.", PATTERN.split("/")[0], words[tokens])
    x = normed(x, weights["decoder.final_norm.weight"])
    sums, counts = [], []
    for depth in range(DEPTHS + 1):
        if depth:
            own = below(weights, f"mtp.layers.{0 if repeated else depth - 1}.")
            following = torch.cat([tokens[depth:], tokens.new_zeros(depth)])[: len(tokens)]
            parts = (normed(words[following], own["enorm.weight"]), normed(x, own["hnorm.weight"]))
            x = torch.cat(parts, dim=-1) @ own["eh_proj.weight"].T
            x = through_layers(own, "mtp_model_layer.", PATTERN.split("/")[1], x)
            x = normed(x, own["final_layernorm.weight"])
        wanted = tokens[depth + 1 :]
        # the token whose loss the mask is about is `depth` tokens ahead
        counted = mask[depth : depth + len(wanted)] if len(wanted) else mask[:0]
        chosen = (x @ head.T).log_softmax(-1)[: len(wanted)]
        chosen = chosen.gather(1, wanted[:, None])[:, 0]
        sums.append(-(chosen * counted).sum())
        counts.append(counted.sum())
    return torch.stack(sums), torch.stack(counts)


def by_definition(weights, repeated, per_token):
    """Returns the losses and the gradients of all weights."""
    weights = {name: w.double().requires_grad_() for name, w in weights.items()}
    tokens, _, mask = batch_of_documents()
    documents = zip(tokens.split(list(LENGTHS)), mask.double().split(list(LENGTHS)), strict=True)
    found = [loss_sums(weights, *document, repeated) for document in documents]
    sums = torch.stack([one for one, _ in found]).sum(0)
    counts = torch.stack([one for _, one in found]).sum(0)
    means = sums[1:] / counts[1:]
    whole = sums[0] + SCALE / DEPTHS * (means * (counts[0] if per_token else 1)).sum()
    whole.backward()
    losses = torch.cat([sums[:1], means]).detach()
    return {"losses": losses, **{name: weight.grad for name, weight in weights.items()}}


def error_of(found, exact):
    return (found.double() - exact).abs().max()


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("repeated", [False, True], ids=["own weights", "the same weights"])
def test_losses_and_gradients_are_those_of_the_definition(cp, repeated):
    ranks = run_on_ranks(cp, losses_and_gradients, repeated, True, [(None, None)], timeout=110)
    weights, (ours,) = ranks[0]
    num_sets = len({name.split(".")[2] for name in weights if name.startswith("mtp.")})
    assert num_sets == (1 if repeated else DEPTHS)
    wanted = by_definition(weights, repeated, True)
    assert ours.keys() == wanted.keys()
    for name, exact in wanted.items():
        assert exact.abs().max() > 0, name
        # In fp32, through seven layers: at most 7e-6 was measured, in gradients of decays, whose sums cancel.
        assert error_of(ours[name], exact) <= 1e-5 * exact.abs().max(), name


def test_a_mean_of_each_micro_batch_weighs_predictions_by_their_own_tokens():
    """Without per-token loss the schedule divides the main loss; each rank's part of a mean counts cp times."""
    ranks = run_on_ranks(2, losses_and_gradients, False, False, [(None, None)], timeout=110)
    weights, (ours,) = ranks[0]
    plain = by_definition(weights, False, False)
    name = "mtp.layers.1.eh_proj.weight"  # only a prediction's loss reaches it
    wanted = 2 * plain[name]
    assert error_of(ours[name], wanted) <= 1e-5 * wanted.abs().max() > 0


@pytest.mark.parametrize("cp", [1, 2])
def test_no_document_changes_a_loss_of_another(cp):
    """Losses of the last long document, and all gradients but the embedding's rows, whatever stands in the first."""
    batches = [(None, 3), (0, 3), (3, 3)]
    ranks = run_on_ranks(cp, losses_and_gradients, False, True, batches, timeout=110)
    plain, first_changed, itself_changed = ranks[0][1]
    for name, tensor in plain.items():
        torch.testing.assert_close(first_changed[name], tensor, rtol=1e-5, atol=1e-7)
    assert not torch.equal(itself_changed["losses"], plain["losses"])


def keys_of_checkpoint(rank, world_size, repeated):
    case, config = options_of(repeated, True, 1)
    with parallel_state(case):
        from megatron_cp.models.hybrid import build_hybrid

        arguments = {"hybrid_layer_pattern": PATTERN, "max_position_embeddings": NUM_TOKENS}
        model = build_hybrid(config, arguments, vocab_size=VOCABULARY)
        keys = set()
        for tensor in model.sharded_state_dict().values():
            pieces = tensor.build() if hasattr(tensor, "build") else [tensor]
            keys |= {p.key for p in (pieces if isinstance(pieces, list) else pieces.values())}
        return sorted(key for key in keys if key.startswith("mtp.") and "_extra_state" not in key)


MIXER = "A_log D conv1d.bias.B conv1d.bias.C conv1d.bias.x conv1d.weight.B conv1d.weight.C conv1d.weight.x dt_bias " \
    "in_proj.layer_norm_weight in_proj.weight.B in_proj.weight.C in_proj.weight.dt in_proj.weight.x in_proj.weight.z " \
    "norm.weight out_proj.weight"  # fmt: skip
OF_LAYERS = {
    "layers.0.mixer.": MIXER,
    "layers.1.self_attention.": "linear_proj.weight linear_qkv.layer_norm_weight linear_qkv.weight",
    "layers.2.mlp.": "linear_fc1.layer_norm_weight linear_fc1.weight linear_fc2.weight",
}


@pytest.mark.parametrize("repeated", [False, True], ids=["own weights", "the same weights"])
def test_keys_of_checkpoints_are_those_of_megatron_lm_0_20(repeated):
    """Written out: a model of Megatron-Core 0.20's own classes gave these, too (2026-11-28)."""
    of_one = {f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")}
    for prefix, names in OF_LAYERS.items():
        of_one |= {f"mtp_model_layer.{prefix}{name}" for name in names.split()}
    wanted = {f"mtp.layers.{i}.{name}" for i in range(1 if repeated else DEPTHS) for name in of_one}
    (found,) = run_on_ranks(1, keys_of_checkpoint, repeated, timeout=110)
    assert set(found) == wanted
