"""Assigns blocks with the multilevel hypergraph partitioner Mt-KaHyPar, as DCP (SOSP'25) does with KaHyPar.

Blocks are vertices that weigh their pairs; nets weigh their rows; every unit is one more vertex, fixed, in the nets
that it owns. The partitioner then minimises the rows that move, all together, under a limit on the areas. T
judges what it finds: fewest bytes in all need not be the least full link.

It runs in a process of its own (`mtkahypar_worker.py`), because it crashes on some repeated calls. A crash, or
more than TIMEOUT_SECONDS, which no admitted size comes near, means that nothing was found.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.compute.solvers.block_model import BlockModel

WORKER = Path(__file__).with_name("mtkahypar_worker.py")
TIMEOUT_SECONDS = 60
RESOLUTION = 1e6  # of all areas, and of the heaviest net
IMBALANCES = (0.01, 0.003, 0.03, 0.001, 0.1)  # a call each, about a second


def assign_blocks(model: BlockModel, effort: float) -> IntArray:
    """Returns the unit of each block `[blocks]`, never slower than `model.start`."""
    best = model.start
    for imbalance in IMBALANCES[: max(1, int(effort))]:
        parts = _partition(model, imbalance)
        if parts is not None and model.seconds(parts) < model.seconds(best):
            best = parts
    return best


def _partition(model: BlockModel, imbalance: float) -> IntArray | None:
    count, speed = model.units.count, model.units.speed
    area = 1 + model.compute * (RESOLUTION / model.compute.sum())
    weight = 1 + model.travel * (RESOLUTION / model.travel.max())
    opens = np.flatnonzero(np.diff(model.pins[:, 0], prepend=-1))
    nets = [one.tolist() for one in np.split(model.pins[:, 1], opens[1:])]
    for net, owner in zip(nets, model.owner.tolist(), strict=True):
        net.append(model.num_blocks + owner)  # a zero weight makes the partitioner crash
    share = speed / speed.sum() * (area.astype(np.int64).sum() + count)
    question = {
        "vertices": [*area.astype(int).tolist(), *[1] * count],
        "nets": nets,
        "net_weights": weight.astype(int).tolist(),
        "fixed": [*[-1] * model.num_blocks, *range(count)],
        "most": np.ceil(share * (1 + imbalance)).astype(int).tolist(),
        "imbalance": imbalance,
    }
    try:
        answer = subprocess.run(
            [sys.executable, str(WORKER)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    return np.array(json.loads(answer.stdout.splitlines()[-1])[: model.num_blocks], dtype=np.int64)
