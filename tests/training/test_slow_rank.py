"""Training on ranks of different speed: who computes changes, what is learned does not."""

import json

import numpy as np
import pytest

from megatron_cp.report.run.record import read_run
from tests.training.commands import AUTO, SMALL_RUN, metrics, train


def test_a_slow_rank_computes_less_and_the_losses_stay(tmp_path):
    """Packs are the same, and so is every pair of them; a rank at a quarter of the speed gets about a fifth."""
    cell = {"rows": 128, "keys": 128, "forward_tflops": 1e-4, "backward_tflops": 1e-4}
    links = {"inner_gbytes_per_s": 100, "outer_gbytes_per_s": 100, "latency_us": 0}
    machine = tmp_path / "slow.json"  # compute is all that counts, as it is for long packs
    machine.write_text(json.dumps({"node_size": 2, "kernel": [cell], **links}))
    losses, shares, tokens = [], [], set()
    for name, more in (("alike", []), ("slow", ["--cp-rank-speeds", "1,.25"])):
        folder = tmp_path / name
        flags = (*AUTO, "--context-parallel-size", "2", "--cp-topology", str(machine), *more)
        train(2, *SMALL_RUN, *flags, "--run-dir", str(folder))
        losses.append(metrics(folder))
        packs = read_run(folder).packs
        areas = np.array([pack.ours.area for pack in packs]).sum(axis=0)
        shares.append(areas[1] / areas.sum())
        tokens |= {pack.ours.tokens.shape for pack in packs}
    assert losses[0].keys() == losses[1].keys() and len(losses[0]) == 4
    assert list(losses[1].values()) == pytest.approx(list(losses[0].values()), rel=1e-4)
    assert shares == [pytest.approx(0.5, abs=0.05), pytest.approx(0.2, abs=0.05)]
    assert len(tokens) == 1
