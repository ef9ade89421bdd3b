"""When a number strikes, when two attempts are the same, and what one document's own batch holds."""

import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.batch import BatchConfig, build_batch
from megatron_cp.data.packing import Pack, Piece
from megatron_cp.training.bad_steps.attempt import Attempt, Ceiling
from tests.data.corpora import write_corpus


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=130))
def test_a_value_strikes_at_ten_times_the_largest_of_the_first_hundred(values):
    ceiling = Ceiling()
    struck = [ceiling.is_reached_by(value) for value in values]
    finite = [(i, v) for i, v in enumerate(values) if math.isfinite(v)]
    largest = max((abs(v) for _, v in finite[:100]), default=0.0)
    expected = {i for i, v in finite[100:] if abs(v) >= 10 * largest}
    assert {i for i, is_striking in enumerate(struck) if is_striking} == expected


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(1.5, 1.5, True), (math.nan, -math.nan, True), (1.5, math.nan, False), (0.0, -0.0, False)],
)
def test_attempts_are_the_same_by_their_bits_and_nan_is_nan(one, other, same):
    sums = torch.ones(2, 2, dtype=torch.float64)
    assert Attempt(None, 0, sums, one).equals(Attempt(None, 0, sums, other)) is same


def test_a_batch_of_some_documents_holds_their_tokens_their_loss_and_their_pairs_alone(tmp_path):
    documents = write_corpus(tmp_path / "corpus", [5, 4, 6, 3])
    config = BatchConfig(seq_length=12, reset_position_ids=True, reset_attention_mask=True)
    packs = [
        Pack((Piece(0, 0, 5), Piece(1, 0, 4))),  # three of padding, then the second pack
        Pack((Piece(2, 1, 6), Piece(3, 0, 3))),
    ]
    whole = build_batch(documents, packs, config)
    assert whole.document_starts == (0, 5, 12, 17)
    assert whole.document_names[2].endswith("tokens 1 to 6")
    part = whole.only((1, 2))
    inside = np.r_[5:9, 12:17]
    outside = np.setdiff1d(np.arange(24), inside)
    np.testing.assert_array_equal(part.tokens[inside], whole.tokens[inside])
    assert set(part.tokens[outside]) == {whole.tokens[5]}
    np.testing.assert_array_equal(part.loss_mask[inside], whole.loss_mask[inside])
    assert not part.loss_mask[outside].any()
    expected = np.zeros((24, 24), dtype=bool)
    for start, stop in ((5, 9), (12, 17)):
        expected[start:stop, start:stop] = np.tri(stop - start, dtype=bool)
    np.testing.assert_array_equal(part.mask.to_dense(), expected)
    assert part.document_starts == (5, 12)
    assert part.document_lengths == (4, 5)


def test_what_delayed_scaling_keeps_is_put_back_before_a_step_is_computed_again(monkeypatch):
    from megatron_cp.training.bad_steps import probe

    for name in ("own_random_states", "restore_random_states", "auxiliary_losses"):
        monkeypatch.setattr(probe, name, lambda *_: {})
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    runner = SimpleNamespace(model=[layers], config=None)

    def state(first):
        return SimpleNamespace(
            scale=torch.full((3,), first), amax_history=torch.arange(6.0).view(2, 3)
        )

    layers[0].fp8_meta = {"recipe": object(), "num_gemms": 1, "scaling_fwd": state(8.0)}
    before = probe.Before.of(runner)
    kept = layers[0].fp8_meta["scaling_fwd"]
    kept.scale.mul_(2)
    kept.amax_history.copy_(kept.amax_history.roll(1, 0))
    layers[0].fp8_meta["scaling_bwd"] = late = state(4.0)
    layers[1].running_mean.fill_(7.0)
    before.restore(runner, 1)
    assert kept.scale.tolist() == [8.0] * 3
    assert kept.amax_history.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert late.scale.tolist() == [4.0] * 3, "it was not there before"
    assert layers[1].running_mean.tolist() == [0.0, 0.0]


def test_a_loss_that_stands_out_is_an_alert_and_its_step_is_booked(monkeypatch):
    from megatron_cp.training import loop

    for name in ("check_same_batches", "update"):
        monkeypatch.setattr(loop, name, mock.MagicMock())
    monkeypatch.setattr(loop, "try_next_batches", lambda _: ([], None))
    run = mock.MagicMock()
    run.state.iteration, run.state.consumed_samples = 6, 0
    run.state.config.records.log_params_norm = False
    for striking, alerts in ((None, 0), ("step 8: the loss is at least 10 times", 1)):
        run.check.compute.return_value.striking = striking
        loop._step(run)
        assert run.journal.alert.call_count == alerts
    assert run.journal.alert.call_args.args == ("a step stands out", striking)
    assert run.journal.step.call_count == 2


def test_a_bad_step_that_ends_the_run_is_an_alert_before_it_is_an_error(monkeypatch):
    from megatron_cp.training import loop  # Megatron-Core, after what stands in for CUDA

    def ends(*_):
        raise loop.BadStepError("step 1: the loss is not finite")

    monkeypatch.setattr(loop, "try_next_batches", lambda _: ([], None))
    monkeypatch.setattr(loop, "check_same_batches", lambda *_, **__: [])
    run = mock.MagicMock()
    run.state.iteration, run.check.compute = 0, ends
    with pytest.raises(loop.BadStepError):
        loop._step(run)
    (told,) = run.journal.alert.call_args_list
    assert told.args == ("a bad step ended the run", "step 1: the loss is not finite")
    run.journal.step.assert_not_called()


@pytest.mark.parametrize("is_wanted", [True, False])
@pytest.mark.parametrize("overlaps", [True, False])
def test_gradients_are_read_where_somebody_looks_at_them(monkeypatch, is_wanted, overlaps):
    import megatron.core.distributed as core

    from megatron_cp.training.bad_steps.attempt import LocalGradients

    order = []
    monkeypatch.setattr(core, "finalize_model_grads", lambda *_: order.append("finalize"))
    buffer = mock.Mock(grad_data=torch.tensor([3.0, 4.0]))
    chunk = mock.Mock(buffers=[buffer], expert_parallel_buffers=[])
    gradients = LocalGradients(is_wanted, overlaps)
    gradients.finalize([chunk])
    assert order == ["finalize"] and float(gradients.norm) == (5.0 if is_wanted else 0.0)


def test_what_probes_changed_is_put_back_behind_a_step_that_is_left_out(monkeypatch):
    """Routers count tokens in buffers, for the update that is not made."""
    from megatron_cp.training.bad_steps import check
    from megatron_cp.training.bad_steps.attempt import Attempt, Verdict

    order = []
    before = mock.Mock(restore=lambda *_: order.append("restore"))
    probe = mock.Mock(culprit=lambda: order.append("probe"))
    monkeypatch.setattr(check, "Before", mock.Mock(of=lambda _: before))
    monkeypatch.setattr(check, "Probe", lambda *_: probe)
    monkeypatch.setattr(check, "any_rank", lambda *votes: votes)
    monkeypatch.setattr(check, "gathered", lambda view: [view])
    monkeypatch.setattr(check, "view_of", lambda *_, **__: None)
    bad = Attempt(math.nan, 8, None, 1.0)
    monkeypatch.setattr(check, "forward_backward", lambda *_: bad)
    monkeypatch.setattr(check.StepCheck, "_tell", lambda *_: order.append("tell"))
    config = mock.MagicMock()
    config.steps.rerun_mode = "disabled"
    step_check = check.StepCheck(config, mock.Mock())
    verdict = step_check.compute(mock.Mock(), mock.Mock(), 1, [mock.Mock()])
    assert verdict == Verdict(bad, is_applied=False)
    assert order == ["probe", "tell", "restore"]
