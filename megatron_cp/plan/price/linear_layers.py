"""What layers of linear attention ask of a placement: few pieces of documents, as a state travels for each."""

import functools
from collections.abc import Sequence

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.linked import document_bounds
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.segments import states_received


def linear_seconds(tokens: IntArray, masks: Sequence[AttentionMask], config: CPConfig) -> float:
    """Returns the time that states of linear layers travel, there and back, on the links of the rank that gets most.

    `tokens` `[P, T]` of each rank. Documents are those that no mask links. All ranks exchange at once.
    """
    assert config.linear_state_bytes is not None
    gbytes, _ = Links.of(get_topology(config.topology)).exchange([tuple(range(len(tokens)))])
    bounds = functools.reduce(np.intersect1d, map(document_bounds, masks))
    states = int(states_received(tokens, bounds).max())
    return 2 * states * config.linear_state_bytes / (gbytes * 1e9)
