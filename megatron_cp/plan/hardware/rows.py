"""How large a row is that travels: key and value, or query-side, there and back."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_cp.config import CPConfig
from megatron_cp.plan.schema import OwnRows, PassName, Side

FP32_BYTES = 4


@dataclass(frozen=True)
class RowSize:
    """One row on its way to the rank that computes, and its result on the way back."""

    there: int
    """Bytes."""
    back: int
    """Bytes."""
    units_there: float
    """Elements over those of one query row of all heads, whatever their bytes: the unit of volumes."""
    units_back: float

    @property
    def both_ways(self) -> int:
        """Returns the bytes there and back."""
        return self.there + self.back

    @property
    def units(self) -> float:
        """Returns the elements there and back."""
        return self.units_there + self.units_back


class RowCost(NamedTuple):
    """What a query row and a key row cost, in any unit."""

    query: float
    key: float


def row_size(
    config: CPConfig,
    pass_name: PassName,
    side: Side,
    head_degree: int = 1,
    gradient_bytes: int = FP32_BYTES,
) -> RowSize:
    """Returns the size of a key-side or query-side row under a head split of `head_degree`.

    Partial results and gradients travel in fp32; `lse` and `delta` are fp32 scalars per head. `gradient_bytes`: of an
    element of those that go home in backward, for comparisons with what sends them in 16 bits.
    """
    value_dim = config.value_dim
    heads = max(1, config.num_heads // head_degree)
    keys = max(1, config.num_kv_heads // head_degree) * (config.head_dim + value_dim)
    keys = config.latent_dim or keys
    if side == "k":
        there, scalars, back = keys, 0, keys if pass_name == "backward" else 0
    elif pass_name == "forward":
        there, scalars, back = heads * config.head_dim, 0, heads * (value_dim + 1)
    else:
        there, scalars = heads * (config.head_dim + value_dim), 2 * heads
        back = heads * config.head_dim
    unit = config.num_heads * config.head_dim
    return RowSize(
        there=there * config.element_bytes + scalars * FP32_BYTES,
        back=back * (gradient_bytes if pass_name == "backward" else FP32_BYTES),
        units_there=(there + scalars) / unit,
        units_back=back / unit,
    )


def exchange_elements(config: CPConfig, pass_name: PassName, degree: int, own: OwnRows) -> float:
    """Returns what a rank's rows hold in a head split of `degree`, over a whole pass, for each of its queries.

    In units of one query row. forward: q, k, v there and out back; backward: those and dout there, dq, dk, dv back.
    """
    unit = config.num_heads * config.head_dim
    keys = max(config.num_kv_heads, degree) * (config.head_dim + config.value_dim) / unit
    keys *= own.k / own.q
    out = config.value_dim / config.head_dim
    return 1 + keys + out if pass_name == "forward" else 2 * (1 + keys) + out


def head_split_bytes(own: OwnRows, degree: int, config: CPConfig, pass_name: PassName) -> float:
    """Returns what each rank sends to exchange tokens against heads and back, over a whole pass.

    `lse` returns forward; it and `delta` go there backward, in fp32. Gradients of copied key/value heads are added
    up in fp32.
    """
    query_bytes = config.num_heads * config.head_dim * config.element_bytes
    per_token = query_bytes * exchange_elements(config, pass_name, degree, own)
    per_token += FP32_BYTES * config.num_heads * (1 if pass_name == "forward" else 2)
    if pass_name == "backward" and config.num_kv_heads < degree:
        copied = degree * (config.head_dim + config.value_dim) * (FP32_BYTES - config.element_bytes)
        per_token += copied * (own.k / own.q)
    return own.q * per_token * (degree - 1) / degree
