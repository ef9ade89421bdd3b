"""Whether plans were made for the GPU that executes them."""

import logging
from functools import lru_cache

import torch

from megatron_cp.config import Topology

# What the rows of plan/hardware/topology.py describe, as drivers name it.
GPUS_OF = {"a800": ("A800", "A100"), "h100": ("H100", "H800", "GH200"), "h200": ("H200",)}
# Boards without the links of those rows.
OTHER_LINKS = ("PCIe", "NVL")
_log = logging.getLogger("megatron_cp")


@lru_cache(maxsize=64)
def tell_of_other_hardware(topology: str | Topology, device: torch.device) -> None:
    """Says once in the log that a built-in row is of another GPU; rows of the user's own are taken as they are."""
    if isinstance(topology, Topology):
        return
    name = torch.cuda.get_device_name(device)
    is_known = any(known in name for known in GPUS_OF.get(topology, ()))
    if is_known and not any(links in name for links in OTHER_LINKS):
        return
    _log.warning(
        "plans are priced for topology=%r, and %s is %s: results are the same, but other plans may be faster; "
        "`python -m megatron_cp measure` writes a row of this machine, for CPConfig(topology=...) or --cp-topology",
        topology, device, name,
    )  # fmt: skip
