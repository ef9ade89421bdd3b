"""The verdict on a run: what it says of curves that are drawn up to be well, worth a look or ill."""

import json

import numpy as np
import pytest

from megatron_cp.report.run.health import verdict_of
from megatron_cp.report.run.record import read_run
from tests.report.runs import write_run

STEPS = 40
NOISE = np.random.default_rng(0).normal(0, 0.05, STEPS)


def run_with(folder, *, wanted=STEPS, finished=True, held_out=(), interval=1, **columns):
    """A run whose metrics are these columns, one value every `interval` steps."""
    write_run(folder, steps=0)
    record = json.loads((folder / "run.json").read_text())
    record["arguments"] |= {"train_iters": wanted, "tensorboard_log_interval": interval}
    record["finished"] = {"iteration": STEPS * interval} if finished else None
    (folder / "run.json").write_text(json.dumps(record))
    rows = [{"iteration": interval * (step + 1)} for step in range(STEPS)]
    for key, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[key.replace("__", "/").replace("_norm", "-norm").replace("lm_", "lm ")] = value
    rows += [{"iteration": step, "lm loss validation": loss} for step, loss in held_out]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(folder)


FALLING = np.linspace(9, 6, STEPS) + NOISE
GOOD = {
    "held_out": [(20, 7.6), (40, 6.3)],
    "lm_loss": FALLING,
    "grad_norm": np.ones(STEPS),
    "grad__skipped": np.zeros(STEPS),
}


def test_a_run_that_falls_evenly_is_healthy(tmp_path):
    verdict = verdict_of(run_with(tmp_path / "run", **GOOD))
    assert verdict.state == "well" and len(verdict.reasons) == 5
    assert verdict.lines()[0] == "Healthy"


def test_of_several_sets_of_validation_the_first_is_judged(tmp_path):
    folder = tmp_path / "run"
    run_with(folder, **GOOD)
    text = (folder / "metrics.jsonl").read_text().replace("validation", "validation-wiki")
    other = {"iteration": 40, "lm loss validation-code": 9.5}
    (folder / "metrics.jsonl").write_text(f"{text}{json.dumps(other)}\n")
    words = [reason.words for reason in verdict_of(read_run(folder)).reasons]
    (said,) = [text for text in words if text.startswith("held-out loss")]
    assert said.startswith("held-out loss 6.300")


def test_the_large_gradients_of_a_beginning_are_no_spikes(tmp_path):
    beginning = np.r_[np.full(4, 9.0), np.ones(STEPS - 4)]
    verdict = verdict_of(run_with(tmp_path / "run", **(GOOD | {"grad_norm": beginning})))
    assert verdict.state == "well"


CASES = {
    "a loss that rises": ({"lm_loss": FALLING[::-1]}, "ill", "rises"),
    "a loss that ends as no number": ({"lm_loss": [*FALLING[:-2], None, None]}, "ill", "not finite in 2 steps logged"),
    "a held-out loss that is no number": ({"held_out": [(20, 7.6), (40, None)]}, "ill", "not finite at step 40"),
    "a loss that stands still": ({"lm_loss": 7 + NOISE}, "look", "does not move"),
    "a held-out loss that turns": ({"held_out": [(20, 6.2), (40, 6.5)]}, "look", "rises: 6.500 after 6.200 at step 20"),
    "no held-out loss": ({"held_out": []}, "look", "no held-out loss"),
    "a spike": ({"grad_norm": np.r_[np.ones(4), 9.0, np.ones(STEPS - 5)]}, "look", "1 step above 5 times"),
    "gradients that grow": ({"grad_norm": np.r_[np.ones(30), np.full(10, 4.0)]}, "look", "it grows"),
    "gradients that are not finite": ({"grad__nonfinite": np.r_[np.zeros(STEPS - 1), 1.0]}, "ill", "not finite in 1"),
    "a few skipped steps": ({"grad__skipped": np.r_[1.0, np.zeros(STEPS - 1)]}, "look", "1 of 40 steps were skipped"),
    "many skipped steps": ({"grad__skipped": np.r_[np.ones(5), np.zeros(STEPS - 5)]}, "ill", "5 of 40"),
    "an early end": ({"wanted": 100}, "look", "ended early, after 40 of 100"),
    "no end": ({"finished": False}, "look", "not finished"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_one_fault_decides_the_verdict_and_is_named(tmp_path, name):
    change, state, words = CASES[name]
    verdict = verdict_of(run_with(tmp_path / "run", **(GOOD | change)))
    assert verdict.state == state
    (reason,) = [one for one in verdict.reasons if one.state != "well"]
    assert words in reason.words


def test_a_loss_that_was_no_number_once_is_judged_without_that_step(tmp_path):
    once = {"lm_loss": [*FALLING[:9], None, *FALLING[10:]], "held_out": [(20, None), (40, 6.3)]}
    assert verdict_of(run_with(tmp_path / "run", **(GOOD | once))).state == "well"


def words_of(run):
    return [one.words for one in verdict_of(run).reasons]


def test_the_gap_is_that_to_the_training_loss_at_the_time_of_the_evaluation(tmp_path):
    # evaluated at step 20 only, 0.2 above the training loss there and 1.3 above that of the end
    line = np.linspace(9, 6, STEPS)
    there = line[17:21].mean()  # steps 18 to 21: a tenth of all, the nearest to step 20
    run = run_with(tmp_path / "run", **(GOOD | {"lm_loss": line, "held_out": [(20, there - 0.2)]}))
    said = f"held-out loss {there - 0.2:.3f}, 0.200 below the training loss around step 20"
    assert said in words_of(run)


def test_skipped_steps_are_counted_and_not_rows(tmp_path):
    skipped = np.r_[np.zeros(STEPS - 2), 9.0, 6.0]
    run = run_with(tmp_path / "run", **(GOOD | {"grad__skipped": skipped}), interval=10, wanted=400)
    assert "15 of 400 steps were skipped" in words_of(run)
    assert verdict_of(run).state == "look"


def test_spikes_are_judged_in_the_steps_logged_and_the_verdict_says_so(tmp_path):
    for interval, judged in ((1, "first tenth"), (10, "first tenth, of the steps logged")):
        run = run_with(tmp_path / f"{interval}", **GOOD, interval=interval)
        assert any(words.endswith(judged) for words in words_of(run))


def test_a_run_that_logged_nothing_is_not_called_healthy(tmp_path):
    write_run(tmp_path / "run", steps=0)
    assert verdict_of(read_run(tmp_path / "run")).state == "look"
