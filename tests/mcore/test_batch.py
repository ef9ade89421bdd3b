"""A rank's share of a micro-batch, and multi-token prediction's roll, against plain indexing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.mcore import tiny_gpt
from tests.mcore.packs import Pack, losses
from tests.mcore.tiny_gpt import Case, parallel_state, train
from tests.ranks import run_on_ranks

LENGTHS = (7, 1, 13, 2, 18)  # 41 tokens: no multiple of any rank count used


def make_planned(cp: int) -> SimpleNamespace:
    from megatron_cp.config import CPConfig
    from megatron_cp.mask import packed
    from megatron_cp.plan.planner import make_plan

    total = sum(LENGTHS)
    batch = SimpleNamespace(
        tokens=np.arange(100, 100 + total),
        labels=np.arange(101, 101 + total),
        loss_mask=(np.arange(total) % 3 > 0).astype(np.float32),
        position_ids=np.concatenate([np.arange(length) for length in LENGTHS]),
        rope_positions=np.concatenate([np.arange(length) for length in LENGTHS]),
    )
    plan = make_plan(packed.documents(LENGTHS), cp, CPConfig(chunk_size=2, topology="cpu"))
    return SimpleNamespace(batch=batch, plans={"full": plan})


def _shares(rank, world_size):
    with parallel_state(Case(cp=world_size)) as groups:
        from megatron_cp.mcore.batch import local_batch

        planned = make_planned(world_size)
        group = groups.get_context_parallel_group()
        local = local_batch(planned, rank, "cpu", cp_group=group)
        assert local.params.cp_group is group and local.params.qkv_format == "sbhd"
        names = ("tokens", "labels", "loss_mask", "position_ids")
        fields = {name: getattr(local, name) for name in names}
        assert all(x.shape == (1, planned.plans["full"].tokens_per_rank) for x in fields.values())
        rows = planned.plans["full"].global_from_local[rank]
        return rows, fields, local.params.positions, local.num_loss_tokens


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_the_shares_of_all_ranks_are_the_pack_and_padding_is_zero(cp: int):
    shares = run_on_ranks(cp, _shares)
    batch, total = make_planned(cp).batch, sum(LENGTHS)
    rows = np.concatenate([share[0] for share in shares])
    assert sorted(rows[rows < total]) == list(range(total))
    for rows, fields, positions, num_loss_tokens in shares:
        real = rows < total
        for name, values in fields.items():
            whole = getattr(batch, name)
            expected = np.zeros(len(rows), whole.dtype)
            expected[real] = whole[rows[real]]
            assert values[0].numpy().dtype == whole.dtype
            np.testing.assert_array_equal(values[0].numpy(), expected, err_msg=name)
        assert positions.tolist() == fields["position_ids"][0].tolist()
        assert num_loss_tokens == batch.loss_mask.sum()


def _rolled(rank, world_size):
    with parallel_state(Case(cp=world_size)) as groups:
        from megatron.core.transformer import multi_token_prediction

        from megatron_cp.mcore.batch import local_batch
        from megatron_cp.mcore.parts.mtp import install_order_roll

        install_order_roll()
        install_order_roll()
        planned = make_planned(world_size)
        local = local_batch(planned, rank, "cpu", cp_group=groups.get_context_parallel_group())
        roll = multi_token_prediction.roll_tensor
        labels, _ = roll(local.labels, packed_seq_params=local.params)
        mask, count = roll(local.loss_mask, packed_seq_params=local.params)
        twice, _ = roll(labels, shifts=-1, dims=-1, packed_seq_params=local.params)
        plain = roll(torch.arange(1, 5))[0].tolist()
        return (
            planned.plans["full"].global_from_local[rank],
            labels,
            mask,
            float(count),
            twice,
            plain,
        )


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_a_roll_gives_the_successor_in_the_same_document_and_zero_behind_the_last(cp: int):
    batch, total = make_planned(cp).batch, sum(LENGTHS)
    is_last = np.zeros(total, bool)
    is_last[np.cumsum(LENGTHS) - 1] = True

    def rolled(values):
        return np.where(is_last, 0, np.roll(values, -1))

    for rows, labels, mask, count, twice, plain in run_on_ranks(cp, _rolled):
        real = rows < total
        for ours, expected in (
            (labels, rolled(batch.labels)),
            (mask, rolled(batch.loss_mask)),
            (twice, rolled(rolled(batch.labels))),
        ):
            np.testing.assert_array_equal(ours[0].numpy()[real], expected[rows[real]])
            assert not ours[0].numpy()[~real].any()
        assert count == pytest.approx(rolled(batch.loss_mask).sum() / cp)
        assert plain == [2, 3, 4, 0], "without our parameters Megatron's own roll must stay"


def _rolled_sequence(rank, world_size, mask, dtype=torch.float32):
    """A loss mask that Megatron has cut itself, zigzag, rolled once and once more, and its counts."""
    with parallel_state(Case(cp=world_size)) as groups:
        from megatron.core.transformer import multi_token_prediction

        from megatron_cp.mcore.parts.mtp import count_per_rank, install_order_roll

        install_order_roll()
        group = groups.get_context_parallel_group()
        pieces = torch.tensor(mask, dtype=dtype).chunk(2 * world_size)
        own = torch.cat([pieces[rank], pieces[2 * world_size - 1 - rank]])[None]
        once, first = multi_token_prediction.roll_tensor(own, cp_group=group)
        _, second = multi_token_prediction.roll_tensor(once, cp_group=group)
        counts = [float(count_per_rank(own, group)), float(first), float(second)]
        # What Megatron divides by since 0.17.
        bounded = [float(first.clamp(min=1)), float(torch.clamp(second, min=1))]
        return counts, bounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])  # slime's masks are int32
@pytest.mark.parametrize("cp", [1, 2])
def test_tokens_of_whole_sequences_are_counted_over_the_context_ranks(cp: int, dtype):
    mask = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]  # ranks hold other numbers of them
    for counts, bounded in run_on_ranks(cp, _rolled_sequence, mask, dtype):
        assert counts == [sum(mask[depth:]) / cp for depth in (0, 1, 2)]
        assert bounded == counts[1:]


@pytest.mark.parametrize("mask", [[0, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
def test_a_loss_token_weighs_alike_where_there_are_fewer_than_ranks(mask: list[int]):
    for _, bounded in run_on_ranks(2, _rolled_sequence, [float(m) for m in mask]):
        assert bounded == [0.5, 0.5], "of one token, or of none, which counts as one"
    ((counts, bounded),) = run_on_ranks(1, _rolled_sequence, [float(m) for m in mask])
    assert counts[1:] == bounded == [1, 1], "Megatron-Core 0.16 divides by it as it is"


def _losses_of_predictions(rank, world_size, mask, dtype=torch.float32):
    """What Megatron's loss of predictions is given where the ids alone are said, as in reinforcement learning."""
    with parallel_state(Case(cp=world_size)) as groups:
        from megatron.core.transformer import multi_token_prediction

        from megatron_cp.mcore.parts.mtp import install_order_roll

        def recorded(**given):
            return (
                given["labels"].tolist()[0],
                given["loss_mask"].tolist()[0],
                given["loss_mask"].sum(),
            )

        multi_token_prediction.process_mtp_loss = recorded  # since 0.17
        install_order_roll()
        ids, mask = torch.arange(1, 9), None if mask is None else torch.tensor(mask, dtype=dtype)
        pieces = [rank, 2 * world_size - 1 - rank]
        ids, mask = (
            None if x is None else torch.cat([x.chunk(2 * world_size)[i] for i in pieces])[None]
            for x in (ids, mask)
        )
        return multi_token_prediction.process_mtp_loss(
            labels=None, loss_mask=mask, input_ids=ids, cp_group=groups.get_context_parallel_group()
        )


@pytest.mark.parametrize("mask", [None, [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_predictions_learned_from_ids_alone_count_over_the_context_ranks(
    mask: list[float] | None, dtype: torch.dtype
):
    successors = [*([1.0] * 8 if mask is None else mask)[1:], 0.0]
    for rows, (labels, seen, count) in zip(
        ([0, 1, 6, 7], [2, 3, 4, 5]),
        run_on_ranks(2, _losses_of_predictions, mask, dtype),
        strict=True,
    ):
        assert all(isinstance(one, float) for one in seen), "what is rolled as a mask"
        assert labels == [[2, 3, 4, 5, 6, 7, 8, 0][row] for row in rows]
        assert seen == [successors[row] for row in rows]
        assert float(count) == sum(successors) / 2


def _train_mtp(rank, world_size, case):
    """Losses of a model with multi-token prediction; `tiny_gpt` builds none."""
    plain = tiny_gpt.build_chunks, tiny_gpt.Trainer.forward_step
    tiny_gpt.build_chunks = _mtp_chunks
    tiny_gpt.Trainer.forward_step = _mtp_forward_step
    try:
        return train(rank, world_size, case)
    finally:
        tiny_gpt.build_chunks, tiny_gpt.Trainer.forward_step = plain


def _mtp_chunks(case, config):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    from megatron_cp.mcore.parts.rope import install_position_rotary
    from megatron_cp.mcore.spec import with_context_parallel

    spec = get_gpt_layer_local_spec()
    if case.attention != "megatron":
        spec = with_context_parallel(spec)
    model = GPTModel(
        config,
        spec,
        tiny_gpt.VOCABULARY,
        tiny_gpt.SEQUENCE,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    if case.attention == "planned":
        install_position_rotary(model)
    tiny_gpt.fill_by_name(model)
    return [model]


def _mtp_forward_step(self, packs_of_rank, model):
    from megatron_cp.mcore.loss import make_loss_function

    inputs = tiny_gpt.tensors_of_pack(self.case, self.config, next(packs_of_rank), self.groups)
    output = losses(model, inputs, inputs.attention_mask)
    return output, make_loss_function(
        inputs.loss_mask,
        per_token=self.case.per_token,
        cp_group=self.groups.get_context_parallel_group(),
        num_loss_tokens=inputs.num_loss_tokens,
    )


@pytest.mark.parametrize("per_token", [True, False])
def test_multi_token_prediction_is_megatrons_at_every_context_parallel_size(per_token: bool):
    reference = Case(steps=4, per_token=per_token).with_options(mtp_num_layers=2)
    own = run_on_ranks(1, _train_mtp, reference)[0]
    for cp in (1, 2):
        case = Case(attention="planned", cp=cp, steps=4, per_token=per_token)
        case = case.with_options(mtp_num_layers=2)
        ours = run_on_ranks(cp, _train_mtp, case)[0]
        for step in range(4):
            assert ours[step] == pytest.approx(own[step], rel=5e-5), (cp, step)


PREFIX, LENGTH = 5, 9


def _gradients_of_one_prediction(rank, world_size, target):
    """Gradient of each token's embedding, from the predictions of token `target` by two layers alone."""
    case = Case(attention="planned", cp=world_size).with_options(mtp_num_layers=2)
    with parallel_state(case) as groups:
        from megatron_cp.config import CPConfig
        from megatron_cp.mask import packed
        from megatron_cp.mcore.batch import local_batch
        from megatron_cp.plan.planner import make_plan

        (model,) = _mtp_chunks(case, tiny_gpt.make_config(case))
        model.eval()  # no loss is kept for a log
        lengths, total = (LENGTH, 4), LENGTH + 4
        plan = make_plan(
            packed.documents(lengths, within=[("prefix", PREFIX), "causal"]),
            world_size,
            CPConfig(chunk_size=1, topology="cpu"),
        )
        positions = np.concatenate([np.arange(length) for length in lengths])
        batch = Pack(
            tokens=np.arange(total),
            labels=np.arange(1, total + 1),
            loss_mask=(np.arange(1, total + 1) == target).astype(np.float32),
            position_ids=positions,
            lengths=lengths,
        )
        group = groups.get_context_parallel_group()
        planned = SimpleNamespace(batch=batch, plans={"full": plan})
        local = local_batch(planned, rank, "cpu", cp_group=group)
        (
            losses(model, local) * 0
        ).sum().backward()  # what is left are the losses of the predictions
        gradient = model.embedding.word_embeddings.weight.grad
        torch.distributed.all_reduce(gradient, group=group)
        return gradient.norm(dim=1)[:total].tolist()


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("target", range(PREFIX, LENGTH))
def test_no_prediction_of_a_token_sees_it(cp: int, target: int):
    gradients = run_on_ranks(cp, _gradients_of_one_prediction, target)[0]
    assert gradients[target] == 0
    # The first layer predicts it from the row two tokens before, which must not lie inside the prefix.
    assert (sum(gradients) > 0) == (target - 2 >= PREFIX - 1)
