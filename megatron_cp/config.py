"""CPConfig and Topology: everything a planner may know besides the mask and the number of ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral


@dataclass(frozen=True)
class KernelRates:
    """Measured TFLOP/s of local attention by the shape of a slice; see `plan/hardware/topology.py: load_profile`.

    Tables are `[box, slanted][rows][keys]`: slices that a diagonal cuts have rates of their own.
    """

    rows: tuple[int, ...]
    """Query rows of the measured slices, ascending."""
    keys: tuple[int, ...]
    """Mean keys per row of the measured slices, ascending."""
    forward_tflops: tuple[tuple[tuple[float, ...], ...], ...]
    backward_tflops: tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class Level:
    """What lies beyond groups of `size` consecutive ranks that are wider than a node: racks, rails, pods."""

    size: int
    """Ranks of a group: a multiple of the level inside, whole nodes."""
    gbytes_per_s: float
    """At which one rank's rows leave, or enter, its group; they take its link between nodes besides."""
    latency_us: float | None = None
    """Of a transfer that leaves a group; None: that of the level inside."""

    def __post_init__(self) -> None:
        for name in ("gbytes_per_s", "latency_us"):
            if _is_number(getattr(self, name)):  # a topology says what else is wrong
                object.__setattr__(self, name, float(getattr(self, name)))


_RATES = ("forward_tflops", "backward_tflops", "inner_gbytes_per_s", "outer_gbytes_per_s")
_NUMBERS = (*_RATES, "latency_us", "contention")


@dataclass(frozen=True)
class Topology:
    """One kind of machine: rates per rank, bandwidth of its levels, latency per transfer.

        inner_gbytes_per_s     inside a node of `node_size` consecutive ranks
        outer_gbytes_per_s     out of a node, wherever to
        outer_levels           and out of wider groups besides, from the inside to the outside

    A bandwidth is what one rank can send and, at the same time, receive on that level.
    `megatron_cp.plan.hardware.topology` holds the rows we ship. Raises ValueError for a rate, bandwidth or node size
    that is not positive, for levels that do not contain each other, and for more network ports than ranks; TypeError
    for what is no name, number or rates.
    """

    name: str
    forward_tflops: float
    backward_tflops: float
    node_size: int
    inner_gbytes_per_s: float
    outer_gbytes_per_s: float
    latency_us: float
    contention: float = 0.0
    """Share of its compute that a rank loses while rows move: collectives run on the same processors."""
    kernels: KernelRates | None = None
    """Measured rates by slice shape; None: every slice runs at `forward_tflops` or `backward_tflops`."""
    outer_levels: tuple[Level, ...] = ()
    """Groups wider than a node, the smallest first."""
    nics_per_node: int | None = None
    """Network ports that the ranks of a node share, each of `outer_gbytes_per_s`; None: one for every rank."""
    rank_speeds: tuple[float, ...] | None = None
    """As `CPConfig.rank_speeds`, where that says nothing."""

    def __post_init__(self) -> None:
        self._check_types()
        for name in _NUMBERS:
            object.__setattr__(self, name, float(getattr(self, name)))  # equal rows are said alike
        for name in _RATES:
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(
                    f"{name}={value!r} of topology {self.name!r} must be positive and finite; "
                    "give what one rank reaches"
                )
        if self.node_size < 1:
            raise ValueError(
                f"node_size={self.node_size!r} of topology {self.name!r} must be positive; give the ranks of a node"
            )
        if not 0 <= self.contention < 1:
            raise ValueError(
                f"contention={self.contention!r} of topology {self.name!r} must be at least 0 and below 1; "
                "use 0 if moving rows costs no compute"
            )
        if not 0 <= self.latency_us < float("inf"):
            raise ValueError(
                f"latency_us={self.latency_us!r} of topology {self.name!r} must not be negative; "
                "use 0 for none"
            )
        self._check_levels()
        nics = self.nics_per_node
        if nics is not None and not (_is_count(nics) and nics <= self.node_size):
            raise ValueError(
                f"nics_per_node={nics!r} of topology {self.name!r} must be a whole number from 1 to "
                f"node_size={self.node_size}; where a rank has several, leave it out and give outer_gbytes_per_s of "
                "all of them"
            )
        object.__setattr__(self, "rank_speeds", _checked_speeds(self.rank_speeds))

    def _check_types(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r} of a topology must be a name; give a string")
        for name in _NUMBERS:
            if not _is_number(getattr(self, name)):
                raise TypeError(
                    f"{name}={getattr(self, name)!r} of topology {self.name!r} must be a number; give an int or a float"
                )
        if not isinstance(self.node_size, int) or isinstance(self.node_size, bool):
            raise TypeError(
                f"node_size={self.node_size!r} of topology {self.name!r} must be an integer; give the ranks of a node"
            )
        if not isinstance(self.kernels, KernelRates | None):
            raise TypeError(
                f"kernels={self.kernels!r} of topology {self.name!r} must be KernelRates; load_profile reads them, or "
                "leave it out"
            )

    def _check_levels(self) -> None:
        levels = self.outer_levels
        if not isinstance(levels, list | tuple) or not all(
            isinstance(one, Level) for one in levels
        ):
            raise TypeError(
                f"outer_levels={levels!r} of topology {self.name!r} must be levels, the smallest first; give a tuple "
                "as (Level(size=64, gbytes_per_s=20),)"
            )
        object.__setattr__(self, "outer_levels", tuple(levels))
        inside, latency = self.node_size, self.latency_us
        for index, level in enumerate(self.outer_levels):
            where = f"outer_levels[{index}] of topology {self.name!r}"
            if not _is_count(level.size) or level.size <= inside or level.size % inside:
                raise ValueError(
                    f"size={level.size!r} of {where} must be a larger multiple of {inside}, the ranks of a group "
                    "inside; name levels from the inside to the outside"
                )
            if not _is_number(level.gbytes_per_s) or not 0 < level.gbytes_per_s < math.inf:
                raise ValueError(
                    f"gbytes_per_s={level.gbytes_per_s!r} of {where} must be positive and finite; give what one rank "
                    "reaches"
                )
            own = latency if level.latency_us is None else level.latency_us
            if not _is_number(own) or not latency <= own < math.inf:
                raise ValueError(
                    f"latency_us={own!r} of {where} must be at least {latency}, that of the level inside; leave it "
                    "out for the same"
                )
            inside, latency = level.size, own


@dataclass(frozen=True, kw_only=True)
class CPConfig:
    """Settings of `make_plan`; equal settings and an equal mask give equal plan bytes on every rank.

    Raises ValueError on construction for values that no planner can serve.
    """

    planner: str = "auto"
    """Name of the planner; `megatron_cp.plan.PLANNERS` lists them, "auto" is ours."""

    chunk_size: int | None = None
    """Tokens per unit of dispatch; None lets the planner choose from the length and the rank count."""

    num_heads: int = 1
    """Query heads N of the attention that will run (per tensor-parallel rank)."""

    num_kv_heads: int = 1
    """Key/value heads G; divides num_heads."""

    head_dim: int = 128
    """Width of one query or key head."""

    value_head_dim: int | None = None
    """Width of one value head; None = head_dim."""

    latent_dim: int | None = None
    """Width of the one row per token that travels in place of keys and values, which `cp_attention(expand=...)` makes
    of it (the key/value latent and the rotated key of latent attention); None: keys and values travel."""

    linear_state_bytes: int | None = None
    """Bytes of a document's states in all layers of linear attention for each attention layer that is planned for, or
    for all of `make_plans`: a layer's are heads x K x (V + 1) x 4, under the delta rule heads x K x (V + K) x 4.
    Placements that cut documents often cost more then."""

    topology: str | Topology = "h100"
    """Hardware of the cost model: cpu, a800, h100, h200, or a row of your own."""

    rank_speeds: tuple[float, ...] | None = None
    """How fast each context rank computes, in the rates of the topology: (1, 1, .5, 1) gives the third rank half of the
    others' pairs. Tokens stay equal. None: those of the topology, all 1 if it has none."""

    token_multiple: int = 1
    """Tokens per rank are a multiple of this (tensor parallel size under sequence parallelism)."""

    element_bytes: int = 2
    """Bytes of one activation element on the wire."""

    num_stages: int | None = None
    """Stages of overlap for remote keys, at most 4096; None lets the cost model choose."""

    max_received_mb: int | None = None
    """Most megabytes that a rank may hold at once because others sent them, in a pass of an attention layer; None: no
    limit. States and halos of linear layers are not counted."""

    head_degree: int | None = None
    """Ranks that exchange tokens against heads in planner "usp"; None: the most that fit into a node."""

    @property
    def value_dim(self) -> int:
        """Returns the width of one value head."""
        return self.value_head_dim or self.head_dim

    def __post_init__(self) -> None:
        if not isinstance(self.planner, str):
            raise TypeError(f"planner={self.planner!r} must be a name; give a string")
        if not isinstance(self.topology, str | Topology):
            raise TypeError(
                f"topology={self.topology!r} must be the name of a row or a Topology; leave it out for h100"
            )
        object.__setattr__(self, "rank_speeds", _checked_speeds(self.rank_speeds))
        known = self.topology.rank_speeds if isinstance(self.topology, Topology) else None
        if self.rank_speeds and known and self.rank_speeds != known:
            raise ValueError(
                f"rank_speeds={self.rank_speeds!r} differ from rank_speeds={known!r} of the topology; only one of the "
                "two may say them: leave them out here or there"
            )
        for name in ("num_heads", "num_kv_heads", "head_dim", "token_multiple", "element_bytes"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        for name in (
            "chunk_size", "value_head_dim", "latent_dim", "linear_state_bytes", "num_stages",
            "max_received_mb", "head_degree",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _positive(name, getattr(self, name)))
        if self.num_stages is not None and self.num_stages > MAX_STAGES:
            raise ValueError(
                f"num_stages={self.num_stages} must be at most {MAX_STAGES}; leave it out for the default"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}; "
                "give the head counts of one tensor-parallel rank"
            )


MAX_STAGES = 1 << 12
MAX_RANKS = 1 << 13  # a table of ranks by ranks has 512 MB then, and a search makes several
_MOST = 1 << 31
_LEAST_SPEED, _MOST_SPEED = 0.01, 100.0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_speeds(speeds: object) -> tuple[float, ...] | None:
    """Returns the speeds of ranks as numbers; TypeError for what is no sequence of numbers, ValueError for others."""
    if speeds is None:
        return None
    if (
        not isinstance(speeds, Sequence)
        or isinstance(speeds, str)
        or not all(map(_is_number, speeds))
    ):
        raise TypeError(
            f"rank_speeds={speeds!r} must be one number per context rank; give a tuple as (1, 1, 0.5, 1), or leave it "
            "out"
        )
    for rank, speed in enumerate(speeds):
        if not _LEAST_SPEED <= speed <= _MOST_SPEED:  # NaN is not either
            raise ValueError(
                f"rank_speeds[{rank}]={speed!r} must be from {_LEAST_SPEED} to {_MOST_SPEED:g} times the rates of the "
                "topology; leave out of the group a rank that is slower"
            )
    if not speeds:
        raise ValueError(
            "rank_speeds=() must be one number per context rank; leave it out where all are equal"
        )
    return tuple(map(float, speeds))


def _positive(name: str, value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise ValueError(
            f"{name}={value!r} must be a positive integer; leave it out for the default"
        )
    if int(value) > _MOST:
        raise ValueError(f"{name}={value!r} must be at most 2^31; leave it out for the default")
    return int(value)
