"""Documents under a stock Megatron-LM: stages without layers, and layers that are not plain attention."""

import math

import numpy as np
import pytest

from tests.mcore.stock import stock_program
from tests.mcore.test_batch import LENGTHS, make_planned
from tests.mcore.tiny_gpt import Case, build_chunks, make_config, parallel_state, train
from tests.ranks import run_on_ranks

RESET = {"reset_attention_mask": True, "reset_position_ids": True}


def _train_hooked(rank, world_size, case: Case):
    with stock_program(**RESET):
        return train(rank, world_size, case)


@pytest.mark.parametrize("layout", ["Ett|L", "E|ttL"])
@pytest.mark.parametrize("command_line", [True, False])
def test_a_stage_without_layers_cuts_its_batches_like_those_with_layers(layout, command_line):
    own = Case(packed=True, steps=3, per_token=False)
    expected = run_on_ranks(1, train, own)[0]
    case = Case(
        attention="hooked", documents="positions", packed=True, steps=3, per_token=False, cp=2, pp=2,
        command_line=command_line, options=(("pipeline_model_parallel_layout", layout),),
    )  # fmt: skip
    losses = [steps for steps in run_on_ranks(4, _train_hooked, case) if steps]
    last = [steps for steps in losses if not math.isnan(steps[0][0])]
    assert len(last) == 2
    for steps in last:
        for (loss, norm), (own_loss, own_norm) in zip(steps, expected, strict=True):
            assert math.isclose(loss, own_loss, abs_tol=2e-6), (steps, expected)
            assert math.isclose(norm, own_norm, rel_tol=2e-4), (steps, expected)


def _request(rank, world_size, options):
    """(what the layers ask for, what a stage without them asks for) in one process that has layers."""
    from tests.mcore.tiny_gpt import Trainer, parallel_state

    case = Case(attention="hooked", tp=world_size, command_line=True, options=options)
    with stock_program(**RESET), parallel_state(case) as groups:
        from megatron_cp.mcore import layers

        Trainer(case, groups)
        return layers._requests == layers._requests_without_layers, len(layers._requests)


LATENT = (
    ("multi_latent_attention", True), ("q_lora_rank", None), ("kv_lora_rank", 32), ("qk_head_dim", 16),
    ("qk_pos_emb_head_dim", 8), ("v_head_dim", 16), ("rope_type", "rope"), ("apply_rope_fusion", False),
    ("num_query_groups", 4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, ()),
        (2, (("sequence_parallel", True),)),
        (1, (("window_size", (9, 0)), ("window_attn_skip_freq", 2))),
        (1, LATENT),
    ],
)
def test_a_stage_without_layers_asks_for_the_plan_of_the_layers(world_size, options):
    assert run_on_ranks(world_size, _request, options) == [(True, 1)] * world_size


def test_latent_attention_takes_the_documents_of_hooked_batches():
    planned = Case(attention="planned", packed=True, steps=3, options=LATENT)
    expected = run_on_ranks(1, train, planned)[0]
    hooked = Case(
        attention="hooked", documents="positions", packed=True, steps=3, cp=2, options=LATENT
    )
    for steps in run_on_ranks(2, _train_hooked, hooked):
        np.testing.assert_allclose(steps, expected, rtol=2e-5)


def _labels_rolled_where_the_loss_is(rank, world_size):
    """Each label's successor as the loss of predictions takes it, on a stage that has that loss and no layer."""
    case = Case(attention="hooked", pp=2, command_line=True).with_options(
        pipeline_model_parallel_layout="Ettm|L", mtp_num_layers=1
    )
    with stock_program(**RESET), parallel_state(case):
        from megatron.core.models.gpt import gpt_model
        from megatron.core.transformer import multi_token_prediction

        from megatron_cp.mcore.batch import local_batch
        from megatron_cp.mcore.versions.wrapping import without_hook

        # An earlier test may have put hooks here.
        for module in (multi_token_prediction, gpt_model):
            for name in {"roll_tensor", "process_mtp_loss"} & vars(module).keys():
                setattr(module, name, without_hook(getattr(module, name)))
        (stage,) = build_chunks(case, make_config(case))  # Megatron shares embeddings: both ranks
        if rank == 0:
            return None
        assert stage.post_process and len(stage.decoder.layers) == 0
        local = local_batch(make_planned(1), 0, "cpu")
        roll = multi_token_prediction.roll_tensor
        rolled, _ = roll(local.labels, packed_seq_params=local.params)
        return local.labels[0].numpy(), rolled[0].numpy()


def test_a_stage_with_the_loss_of_predictions_alone_follows_documents():
    _, (labels, rolled) = run_on_ranks(2, _labels_rolled_where_the_loss_is)
    expected = np.append(labels[1:], 0)
    expected[np.cumsum(LENGTHS) - 1] = 0
    np.testing.assert_array_equal(rolled, expected)
