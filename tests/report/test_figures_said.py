"""Numbers in words on the page of a run, against what the run logged."""

import json
import math

import pytest

from megatron_cp.report.run.bought import bought_tiles
from megatron_cp.report.run.kept_packs import KeptPacks
from megatron_cp.report.run.record import read_run
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


def test_tiles_say_balance_and_the_share_of_a_rings_bytes(run):
    balance, volume = bought_tiles(run, KeptPacks(run.packs))
    assert balance.value == f"{METRICS['cp/area_max_over_mean']:.3f}"
    assert f"zigzag {METRICS['cp/zigzag_area_max_over_mean']:.3f} on the same" in balance.detail
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
