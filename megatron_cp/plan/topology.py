"""Hardware rows of the cost model: how fast a rank computes and how fast its links carry rows.

The only place with hardware constants; sources stand beside the rows.
"""

import difflib

from megatron_cp.config import Topology

TOPOLOGIES = {
    row.name: row
    for row in (
        # Two gloo ranks on a 2-core machine; loopback TCP.
        Topology("cpu", 0.05, 0.04, 1 << 30, 1.0, 1.0, 500.0),
        # UltraAttn (SC'25) raw A800 points: 216 TFLOP/s, 164 GB/s inside, 23 GB/s between nodes.
        Topology("a800", 216.0, 190.0, 8, 164.0, 23.0, 20.0),
        # FlashAttention-3 class kernels on H100; NVLink 370 GB/s and 400 Gb/s InfiniBand, achievable.
        Topology("h100", 550.0, 450.0, 8, 370.0, 45.0, 20.0),
        Topology("h200", 600.0, 500.0, 8, 370.0, 45.0, 20.0),
    )
}


def get_topology(name: str | Topology) -> Topology:
    """Returns the hardware row called `name` (a row passes through); ValueError lists the names."""
    if isinstance(name, Topology):
        return name
    if name not in TOPOLOGIES:
        near = difflib.get_close_matches(str(name), TOPOLOGIES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"topology={name!r} is unknown; choose one of {', '.join(sorted(TOPOLOGIES))} "
            f"(nearest: {near}) or pass a Topology of your own"
        )
    return TOPOLOGIES[name]
