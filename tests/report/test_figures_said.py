"""Numbers in words on the page of a run, against what the run logged."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_cp import make_plan
from megatron_cp.plan.hardware.memory import peak_bytes
from megatron_cp.report.draw.svg import aligned
from megatron_cp.report.figures.planners import planner_table
from megatron_cp.report.run.bought import bought_table, bought_tiles
from megatron_cp.report.run.curves import step_time_figure
from megatron_cp.report.run.health import verdict_of
from megatron_cp.report.run.kept_packs import KeptPacks, plan_again
from megatron_cp.report.run.limits import limits_figure, measured_shares
from megatron_cp.report.run.page import run_page
from megatron_cp.report.run.record import config_of, read_run
from megatron_cp.report.run.trace import MeasuredStages
from megatron_cp.report.run.trained import bits_per_byte, held_out_words, trained_tiles
from tests.report.runs import METRICS, write_run


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return read_run(tmp_path / "run")


def test_a_loss_in_nats_is_bits_over_the_bytes_of_a_token(run):
    data = json.loads(json.dumps(run.section("data")))
    assert data["train"]["bytes_over_tokens"] == 2.0
    # a token of 2 bytes that is one of 16 alike: 4 bits, so 2 for each byte
    assert bits_per_byte(run, math.log(16)) == pytest.approx(2.0)
    assert held_out_words(run, math.log(16)).startswith("perplexity 16; 2.00 bits per byte; ")
    assert held_out_words(run, 1.0).endswith(f"among 512 tokens: {math.log(512):.2f}")
    run.description["arguments"]["padded_vocab_size"] = 640
    assert held_out_words(run, 1.0).endswith(f"among 640 tokens: {math.log(640):.2f}")


def test_tiles_say_balance_and_the_share_of_a_rings_bytes(run):
    balance, volume = bought_tiles(run, KeptPacks(run.packs))
    assert balance.value == f"{METRICS['cp/area_max_over_mean']:.3f}"
    others = "; on the same packs: zigzag 1.250, Transformer Engine (THD) 1.062"
    assert balance.detail.endswith(others)
    assert volume.value == "3 MB" and volume.detail.startswith("50% of the 6 MB of a ring")
    METRICS_OF_A_FIFTH = {**METRICS, "cp/comm_bytes_sent": 1.2e6}
    for row in run.rows:
        row.update({k: v for k, v in METRICS_OF_A_FIFTH.items() if k in row})
    _, volume = bought_tiles(run, KeptPacks(run.packs))
    assert volume.detail.startswith("20% of the 6 MB of a ring")


def test_the_tile_of_the_loss_is_the_mean_of_the_last_tenth(run):
    training, held_out = trained_tiles(run)[:2]
    assert training.value == f"{(9 - 0.1 * 19 + 9 - 0.1 * 20) / 2:.3f}"
    assert "from 8.90; mean of the last 2 steps" in training.detail
    assert held_out.value == "7.500"


def cells_of(markup):
    """The rows of a table, as a reader sees them."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", markup.split("<tbody>")[1].split("</tbody>")[0])
    return [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in rows]


def test_the_table_shows_the_balance_of_split_documents_that_was_logged(run):
    rows = cells_of(bought_table(run, KeptPacks(run.packs), None))
    assert rows == [
        ["this run", "40.0", "", "1.010", "3 MB"],
        ["per document (Transformer Engine, THD)", "≥ 50.0", "≥ 1.25 ×", "1.062", "6 MB"],
        ["zigzag ring", "≥ 60.0", "≥ 1.50 ×", "1.250", "6 MB"],
        ["bound", "38.0", "0.95 ×", "", ""],
    ]


def test_a_balance_that_was_not_logged_in_every_step_is_not_shown_and_the_page_says_so(run):
    del run.rows[3]["cp/per_document_area_max_over_mean"]
    figure = bought_table(run, KeptPacks(run.packs), None)
    assert cells_of(figure)[1][3] == "" and "so it is left out" in figure
    assert "Transformer Engine" not in bought_tiles(run, KeptPacks(run.packs))[0].detail


def test_memory_of_one_rank_stands_beside_that_of_a_rank(run):
    kept = plan_again(run, lambda words: None)
    (words,) = re.findall(r"<li>(memory[^<]*)", bought_table(run, kept, None))
    config = replace(config_of(run), chunk_size=None)
    plans = [make_plan(run.packs[0].mask, ranks, config) for ranks in (1, 4)]
    alone, ours = (
        max(peak_bytes(plan, name).allocated.max() for name in ("forward", "backward")) / 1e6
        for plan in plans
    )
    assert f"allocate {alone:.3g} MB (predicted)" in words
    assert f"and allocates at most {ours:.3g} MB;" in words
    assert "a rank holds 256 of 1K tokens" in words


def test_plans_that_were_built_say_their_sample_beside_the_table_of_all_steps(run):
    kept = plan_again(run, lambda words: None)
    figure = bought_table(run, kept, None)
    assert "plans built on the kept pack, one layer, predicted: " in figure
    assert "The table above prices from below, over all steps" in figure
    assert " x faster" not in figure and " x as fast" not in figure


def test_shares_of_a_step_leave_its_first_step_out_and_divide_what_a_trace_divides(run):
    for row in run.rows:  # a first step that makes caches: ten seconds, nine of them waiting
        if row["iteration"] == 1 and "iteration-time" in row:
            row |= {"iteration-time": 10.0, "data/wait_s": 9.0}
    shares = dict(measured_shares(run, None))
    assert shares["waiting for the loader"] == pytest.approx(0.05 / 0.5)
    assert shares.pop(
        "compute and communication of the model (--profile divides them)"
    ) == pytest.approx(0.9)
    traced = MeasuredStages({}, "11 to 12", shares={"attend": 0.3, "wait": 0.2})
    divided = dict(measured_shares(run, traced))
    assert divided["attention, computing"] == pytest.approx(0.3)
    assert divided["attention, waiting for rows"] == pytest.approx(0.2)
    assert divided["the rest of the model, and sending"] == pytest.approx(0.9 - 0.5)
    assert sum(divided.values()) == pytest.approx(1.0)


@pytest.fixture
def sparse(tmp_path):
    """A run whose rows tell of ten steps each."""
    write_run(tmp_path / "sparse", steps=100, interval=10)
    return read_run(tmp_path / "sparse")


def with_saves(run, *saves):
    rows = [{"iteration": step, "ckpt/blocked_s": seconds} for step, seconds in saves]
    return replace(run, rows=(*run.rows, *rows))


def test_a_row_counts_as_often_as_the_steps_that_it_tells_of(sparse):
    # 90 steps of half a second, a tenth of it waiting; 5 s of saves, of which one lies between two rows
    run = with_saves(sparse, (10, 100.0), (40, 3.0), (55, 2.0))
    shares = dict(measured_shares(run, None))
    assert shares["waiting for checkpoints"] == pytest.approx(5 / 50)
    assert shares["waiting for the loader"] == pytest.approx(4.5 / 50)
    figure = limits_figure(run, KeptPacks(run.packs))
    assert "mean over all 90 steps logged but the first 10." in figure


def test_a_save_counts_whether_its_step_was_logged_or_not(run):
    shares = dict(measured_shares(with_saves(run, (1, 9.0), (10, 0.25), (11, 0.25)), None))
    assert shares["waiting for checkpoints"] == pytest.approx(0.5 / (19 * 0.5 + 0.5))


def test_a_step_time_that_is_a_mean_of_steps_says_so(run, sparse):
    assert "a mean of" not in step_time_figure(run).caption
    assert "Each point is the mean of 10 steps." in step_time_figure(sparse).caption
    sparse.rows[3]["iteration-time"] = 50.0
    assert "1 point above the frame is drawn" in step_time_figure(sparse).caption


def test_tokens_read_are_those_of_the_samples_consumed(run):
    amount = trained_tiles(run)[2]
    assert (amount.value, amount.detail) == ("81,920", "20 steps of 4,096, packs full")
    for row in run.rows:  # a batch that grows from 2 packs to 4
        if "lm loss" in row:
            steps = row["iteration"]
            row |= {"samples vs steps": 2 * min(steps, 10) + 4 * max(steps - 10, 0)}
            row |= {"tokens-per-second": 1234.0 + steps}
    amount, speed = trained_tiles(run)[2:]
    assert amount.value == "61,440"
    assert amount.detail == "20 steps of 3,072 on average, packs full"
    assert speed.value == "1,244" and speed.label == "Tokens per second"
    assert speed.detail == "step of 0.5 s on 4 ranks, medians; measured, padding excluded"


def test_a_page_has_one_number_format(run):
    page = run_page(run)
    words = re.sub(
        r"<(?:style|script|pre|title)>.*?</(?:style|script|pre|title)>|<[^>]*>",
        " ",
        page,
        flags=re.S,
    )
    assert "1K tokens per pack" in words and "1024 tokens per pack" not in words
    assert "81,920" in words and "20 steps of 4,096" in words  # tokens read, all digits
    assert not re.search(r"\d x ", words)
    assert "1 steps" not in words and "1 packs" not in words


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([82.66, 85.3, 8.3], ["82.66", "85.30", "8.30"]),
        ([10.75, 1234.5], ["10.8", "1,234.5"]),
        ([0.00421, 3.0], ["0.0042", "3.0000"]),
        ([280.0, math.nan, 0.0], ["280", "", "0"]),
    ],
)
def test_a_column_has_the_same_decimals_in_every_row(values, expected):
    assert aligned(values) == expected


def test_times_of_planners_are_aligned_and_those_of_their_outcomes(run):
    kept = plan_again(run, lambda words: None)
    served = sorted(
        (one for one in kept.outcomes if not one.refusal), key=lambda one: one.predicted_ms
    )
    rows = cells_of(planner_table(kept.ours, kept.outcomes, "t"))[: len(served)]
    for column, name in ((1, "predicted_ms"), (2, "simulated_ms")):
        shown = [row[column].removeprefix("≥ ").replace(",", "") for row in rows]
        assert len({len(cell.partition(".")[2]) for cell in shown}) == 1
        values = [getattr(one, name) for one in served]
        assert np.array(shown, float) == pytest.approx(np.array(values), rel=0.01, abs=1e-4)


def test_a_run_that_ended_between_two_rows_has_all_its_steps(tmp_path):
    """Nine steps of two packs, the last row at step eight."""
    write_run(tmp_path / "run", steps=9, interval=4)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["arguments"] |= {"train_iters": 9, "global_batch_size": 2, "seq_length": 1000}
    record["finished"] |= {"iteration": 9, "consumed_samples": 18}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    run = read_run(tmp_path / "run")
    assert run.rows[-1]["iteration"] == 8
    assert "  all 9 steps done" in verdict_of(run).lines()
    (read,) = [tile for tile in trained_tiles(run) if tile.label == "Tokens read"]
    assert read.value == "18,000" and read.detail.startswith("9 steps of 2,000, packs full")
    assert "DP 1, 9 steps" in run_page(run)


def test_a_loss_that_ends_as_no_number_is_not_said_by_an_earlier_one(run):
    held_out = {"iteration": 20, "lm loss validation": None}
    rows = [*run.rows[:-1], {**run.rows[-1], "lm loss": None}, held_out]
    loss, evaluated, *_ = trained_tiles(replace(run, rows=tuple(rows)))
    assert loss.value == evaluated.value == "nan"
    assert loss.detail == "nats per token, from 8.90; mean of the last 2 steps"
    assert evaluated.detail == "not finite at the last evaluation"
