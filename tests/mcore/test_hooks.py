"""Documents under a stock Megatron-LM: batches cut by its own functions, hooked, against its own attention."""

import contextlib
import io
import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests.mcore.packs import dense_mask
from tests.mcore.stock import cut_by_megatron, stock_program
from tests.mcore.tiny_gpt import Case, Trainer, enter_megatron, parallel_state, train
from tests.ranks import run_on_ranks

STEPS = 6
# Every batch has documents of its own: with `auto` these runs would mostly plan. One of two ranks does.
ZIGZAG = {"planner": "zigzag"}


@pytest.fixture(scope="module")
def megatrons_own() -> list[tuple[float, float]]:
    return run_on_ranks(1, train, Case(packed=True, steps=STEPS))[0]


def _flags_of(source: str) -> dict[str, object]:
    return {
        "mask": {"reset_attention_mask": True},
        "positions": {"reset_attention_mask": True, "reset_position_ids": True},
        "cu_seqlens": {"dataloader_inter_document_masking": True},
    }[source]


def _train_hooked(rank, world_size, case: Case):
    with stock_program(**_flags_of(case.documents)):
        from megatron_cp.mcore import layers

        layers.wish(planner=case.planner)
        return train(rank, world_size, case)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {"documents": "mask"}),
        (2, {"cp": 2, "documents": "mask"}),
        (2, {"cp": 2, "documents": "positions", "per_token": False, **ZIGZAG}),
        (4, {"cp": 4, "documents": "cu_seqlens", **ZIGZAG}),
        (4, {"cp": 2, "tp": 2, "sequence_parallel": True, "documents": "positions", **ZIGZAG}),
        (4, {"cp": 2, "pp": 2, "documents": "positions", "per_token": False, **ZIGZAG}),
    ],
)
def test_losses_of_hooked_batches_are_those_of_megatrons_own_attention(
    world_size, layout, megatrons_own
):
    case = Case(attention="hooked", packed=True, steps=STEPS, **layout)
    expected = megatrons_own
    if not case.per_token:
        expected = run_on_ranks(1, train, Case(packed=True, steps=STEPS, per_token=False))[0]
    answers = run_on_ranks(world_size, _train_hooked, case)
    for steps in filter(None, answers):
        for (loss, norm), (own_loss, own_norm) in zip(steps, expected, strict=True):
            assert math.isclose(loss, own_loss, abs_tol=2e-6), (steps, expected)
            assert math.isclose(norm, own_norm, rel_tol=2e-4), (steps, expected)


def _window_and_sink(rank, world_size, attention, cp):
    options = (
        ("window_size", (9, 0)),
        ("window_attn_skip_freq", 2),
        ("softmax_type", "off-by-one"),
    )
    case = Case(attention=attention, packed=True, steps=3, cp=cp, options=options)
    if attention == "planned":
        return train(rank, world_size, case)
    return _train_hooked(rank, world_size, case)


def test_window_layers_get_their_window_inside_each_document():
    planned = run_on_ranks(1, _window_and_sink, "planned", 1)[0]
    for steps in run_on_ranks(2, _window_and_sink, "hooked", 2):
        np.testing.assert_allclose(steps, planned, rtol=2e-5)


def _cut(rank, world_size, num_samples):
    """(rows, batch, positions) of this rank for a batch whose tokens are their own places."""
    size = 8 * world_size
    with (
        stock_program(reset_attention_mask=True, reset_position_ids=True),
        parallel_state(Case(cp=world_size)) as groups,
    ):
        Trainer(Case(attention="hooked", cp=world_size), groups)
        whole = torch.arange(num_samples * size).view(num_samples, size)
        starts = whole % 5 == 0  # documents of at most five tokens
        starts[:, 0] = True
        positions = torch.zeros_like(whole)
        for place in range(1, size):
            follows = ~starts[:, place]
            positions[follows, place] = positions[follows, place - 1] + 1
        batch = {
            "tokens": whole, "labels": whole + 1, "loss_mask": (whole % 3).float(),
            "position_ids": positions, "attention_mask": None,
        }  # fmt: skip
        order = list(batch)
        cut_by_megatron(batch)
        assert list(batch) == order  # Megatron-LM 0.16 unpacks the values by place
        params = batch["tokens"]._megatron_cp_params
        rows = params.plans["full"].global_from_local[rank]
        return rows, batch, params.positions, positions.flatten()


@pytest.mark.parametrize(("cp", "num_samples"), [(1, 1), (2, 1), (2, 3), (3, 2), (4, 1)])
def test_all_tensors_are_cut_alike_and_nothing_is_lost(cp, num_samples):
    shares = run_on_ranks(cp, _cut, num_samples)
    everything = np.sort(np.concatenate([rows for rows, *_ in shares]))
    np.testing.assert_array_equal(everything, np.arange(8 * cp * num_samples))
    for rows, batch, positions, whole_positions in shares:
        assert batch["tokens"].shape == (num_samples, 8)
        np.testing.assert_array_equal(batch["tokens"].flatten(), rows)
        np.testing.assert_array_equal(batch["labels"].flatten(), rows + 1)
        np.testing.assert_array_equal(batch["loss_mask"].flatten(), rows % 3)
        np.testing.assert_array_equal(batch["position_ids"].flatten(), whole_positions[rows])
        np.testing.assert_array_equal(positions, whole_positions[rows])


def _samples_side_by_side(rank, world_size):
    """Logits of a micro-batch of three samples with documents of their own, in global order; and of each alone."""
    size = 16 * world_size
    case = Case(attention="hooked", cp=world_size)
    with stock_program(reset_attention_mask=True), parallel_state(case) as groups:
        model = Trainer(case, groups).chunks[0]
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(64, (3, size), generator=generator)
        lengths = [(size - 3, 3), (size,), (1, 6, size - 7)]

        def logits(which: list[int]) -> torch.Tensor:
            masks = torch.cat([dense_mask(lengths[i]) for i in which])
            batch = {
                "tokens": tokens[which],
                "position_ids": tokens[which] * 0,
                "attention_mask": masks,
            }
            cut_by_megatron(batch)
            out = model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
            group = groups.get_context_parallel_group()
            params = getattr(batch["tokens"], "_megatron_cp_params", None)
            parts = [torch.empty_like(out) for _ in range(world_size)]
            torch.distributed.all_gather(parts, out.contiguous(), group=group)
            rows = params.plans["full"].global_from_local.flatten()
            result = torch.empty(len(which) * size, out.shape[-1])
            result[torch.from_numpy(rows)] = torch.cat(
                [p.reshape(-1, out.shape[-1]) for p in parts]
            )
            return result.view(len(which), size, -1)

        with torch.no_grad():
            together = logits([0, 1, 2])
            return [(together[i] - logits([i])[0]).abs().max().item() for i in (0, 2)]


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_samples_of_a_micro_batch_do_not_touch_each_other(cp):
    for differences in run_on_ranks(cp, _samples_side_by_side):
        assert max(differences) < 2e-6, differences


def _tensor_ranks(rank, world_size, newer: bool, **flags):
    """The documents that each tensor rank is told, where only the first one loads the batch."""
    with (
        stock_program(**flags, seq_length=8, micro_batch_size=2) as program,
        parallel_state(Case(tp=world_size)) as groups,
    ):
        from megatron_cp.mcore import hooks

        program._GLOBAL_TOKENIZER = SimpleNamespace(eod=5, pad=0)
        tokens = torch.tensor([[1, 5, 2, 2, 5, 5, 1, 1], [3, 3, 3, 3, 3, 3, 3, 5]])
        positions = torch.tensor([[0, 1, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]])
        loaded = {"tokens": tokens, "position_ids": positions, "labels": tokens}
        loaded["attention_mask"] = torch.cat([dense_mask((2, 3, 1, 2)), dense_mask((8,))])

        def old(data_iterator, mtp_on_this_rank=False):
            batch = dict(next(data_iterator)) if rank == 0 else {"labels": tokens}
            return {
                name: batch.get(name) for name in ("labels",)
            }  # the last stage keeps labels only

        def new(batch, has_cu_seqlens=False):
            if batch:
                batch["tokens"] = batch["position_ids"] = None
            return batch or {"labels": tokens}

        utils = ModuleType("megatron.training.utils")
        utils.get_batch_on_this_tp_rank = new if newer else old
        utils.is_first_or_last_pipeline_stage = lambda vp_stage: False
        for function in vars(utils).values():
            if callable(function):
                function.__module__ = "megatron.training.utils"
        script = ModuleType("a_script_that_imports_by_name")
        script.get_batch_on_this_tp_rank = utils.get_batch_on_this_tp_rank
        sys.modules |= {utils.__name__: utils, script.__name__: script}
        try:
            hooks.install()
            before = utils.is_first_or_last_pipeline_stage(None)
            Trainer(Case(attention="hooked", tp=world_size), groups)
            source = (loaded if newer else iter([loaded])) if rank == 0 else ({} if newer else None)
            batch = script.get_batch_on_this_tp_rank(source)
        finally:
            del sys.modules[utils.__name__], sys.modules[script.__name__]
        return batch["megatron_cp_documents"], before, utils.is_first_or_last_pipeline_stage(None)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        {"reset_attention_mask": True, "reset_position_ids": True},
        {"reset_attention_mask": True},
        {"reset_attention_mask": True, "create_attention_mask_in_dataloader": False},
    ],
)
def test_every_tensor_rank_and_stage_is_told_the_documents_of_the_one_that_loads(newer, flags):
    for lengths, before, after in run_on_ranks(2, _tensor_ranks_with, newer, flags):
        assert lengths == (2, 3, 1, 2, 8)
        assert (before, after) == (
            False,
            True,
        )  # middle stages load too, once our attention is built


def _tensor_ranks_with(rank, world_size, newer, flags):
    return _tensor_ranks(rank, world_size, newer, **flags)


def _thd_of_old_megatron(rank, world_size):
    with stock_program(sft=True), parallel_state(Case(cp=world_size)) as groups:
        from megatron.core import utils

        Trainer(Case(attention="hooked", cp=world_size), groups)
        cut = getattr(utils, "get_thd_batch_on_this_cp_rank", None)
        if cut is None:
            return None
        tokens = torch.arange(16)[None]
        ends = torch.tensor([[0, 3, 9, 16]], dtype=torch.int32)
        batch = {"tokens": tokens, "labels": tokens, "attention_mask": None}
        batch, params = cut(batch, ends, None, torch.tensor([7]))
        return batch["tokens"][0].tolist(), params.positions.tolist()


def test_thd_batches_of_any_document_length_are_cut_without_transformer_engine():
    shares = run_on_ranks(2, _thd_of_old_megatron)
    if shares[0] is None:
        pytest.skip("this Megatron-Core cuts thd batches in get_batch_on_this_cp_rank")
    assert sorted(shares[0][0] + shares[1][0]) == list(range(16))
    places = [*range(3), *range(6), *range(7)]
    for tokens, positions in shares:
        assert positions == [places[token] for token in tokens]


def _refusals(rank, world_size):
    messages: dict[str, str] = {}

    def note(name, call):
        try:
            messages[name] = f"no error: {call()}"
        except (ValueError, NotImplementedError, RuntimeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"

    case = Case(attention="hooked", cp=world_size)
    tokens = torch.arange(128)[None] % 64
    half = slice(64 * rank, 64 * rank + 64)
    with stock_program(reset_attention_mask=True), parallel_state(case) as groups:
        from megatron.core.packed_seq_params import PackedSeqParams

        model = Trainer(case, groups).chunks[0]
        # A loop that cuts its batch with a copy of Megatron's function has no documents to show.
        note("own cut", lambda: model(tokens[:, half], tokens[:, half], None))
        ends = torch.tensor([0, 64, 128], dtype=torch.int32)
        sizes = {"max_seqlen_q": 64, "max_seqlen_kv": 64}
        thd = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **sizes)
        note(
            "unknown cut",
            lambda: model(tokens[:, half], tokens[:, half], None, packed_seq_params=thd),
        )
        odd = {"tokens": torch.zeros(1, 9, dtype=torch.int64), "attention_mask": dense_mask((4, 5))}
        note("odd length", lambda: cut_by_megatron(odd))
        other = Trainer(Case(attention="megatron", cp=1), groups).chunks[0]
        batch = {"tokens": tokens.clone(), "attention_mask": dense_mask((100, 28))}
        cut_by_megatron(batch)
        note("Megatron's attention", lambda: other(batch["tokens"], batch["tokens"], None))
    return messages


def test_what_would_be_silently_wrong_is_an_error_on_every_rank():
    for messages in run_on_ranks(2, _refusals):
        assert "--reset-attention-mask asks for documents" in messages["own cut"]
        assert "does not say how the rows were cut" in messages["unknown cut"]
        assert "cannot be cut into equal shares" in messages["odd length"]
        assert "core_attention is DotProductAttention" in messages["Megatron's attention"]


def _said(rank, world_size):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        _train_hooked(rank, world_size, Case(attention="hooked", packed=True, steps=1, cp=2))
    return out.getvalue()


def test_one_line_says_what_was_found():
    first, second = run_on_ranks(2, _said)
    assert first == (
        "megatron_cp: documents: from the dense attention mask, 5 in the first pack; planner auto\n"
    )
    assert second == ""


def _other_megatron(rank, world_size):
    """What installing says where Megatron's functions are not as the hooks know them."""
    enter_megatron()
    from megatron.core import utils
    from megatron.core.pipeline_parallel import schedules

    from megatron_cp.mcore import hooks

    messages = []
    for module, name, other in (
        (utils, "get_batch_on_this_cp_rank", lambda data, group=None: data),
        (utils, "get_batch_on_this_cp_rank", lambda batch, process_group=None: batch),
        (schedules, "forward_step_calc_loss", None),
    ):
        plain = getattr(module, name)
        try:
            if other is None:
                delattr(module, name)
            else:
                setattr(module, name, other)
            hooks.install()
            messages.append("no error")
        except ImportError as error:
            messages.append(str(error))
        finally:
            setattr(module, name, plain)
    return messages


def test_another_megatron_is_refused_by_version_and_function():
    (messages,) = run_on_ranks(1, _other_megatron)
    assert "its first parameter is data, the hook knows batch" in messages[0]
    assert "it has no parameter cp_group" in messages[1]
    assert (
        "has no forward_step_calc_loss in megatron.core.pipeline_parallel.schedules" in messages[2]
    )
    assert all("doctor --megatron" in text for text in messages[:2])


def _versions(rank, world_size, found, is_candidate):
    enter_megatron()
    import logging

    from megatron_cp.mcore.versions import compat

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    plain = compat.megatron_version, compat.is_candidate
    compat.megatron_version, compat.is_candidate = lambda: found, lambda: is_candidate
    logging.getLogger("megatron_cp.mcore.versions.compat").addHandler(handler)
    try:
        compat.check_megatron_version()
    except ImportError as error:
        lines.append(f"error: {error}")
    finally:
        compat.megatron_version, compat.is_candidate = plain
        logging.getLogger("megatron_cp.mcore.versions.compat").removeHandler(handler)
    return lines


@pytest.mark.parametrize(
    ("version", "is_candidate", "expected"),
    [
        ((0, 16, 1), False, None),
        ((0, 20, 3), False, None),
        ((0, 21, 0), False, "megatron-core 0.21.0 is installed; megatron_cp was tested with 0.16"),
        # slime's, which is newer than 0.16.0
        ((0, 16, 0), True, "megatron-core 0.16.0 is installed; megatron_cp was tested with 0.16.1"),
        ((0, 16, 0), False, "error: megatron-core 0.16.0 is installed; megatron_cp needs 0.16.1"),
        ((0, 15, 3), True, "error: megatron-core 0.15.3 is installed; megatron_cp needs 0.16.1"),
    ],
)
def test_a_version_that_was_not_tested_is_one_line_and_one_too_old_an_error(
    version, is_candidate, expected
):
    (lines,) = run_on_ranks(1, _versions, version, is_candidate)
    assert len(lines) == (expected is not None)
    assert not lines or lines[0].startswith(expected)
