"""CPConfig and Topology: everything a planner may know besides the mask and the number of ranks."""

from dataclasses import dataclass


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
class Topology:
    """One kind of machine: rates per rank, bandwidth inside and between nodes, latency per transfer.

    A bandwidth is what one rank can send and, at the same time, receive on that level; `node_size`
    consecutive ranks share the inner level. `megatron_cp.plan.hardware.topology` holds the rows we ship.
    Raises ValueError for a rate, bandwidth or node size that is not positive.
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

    def __post_init__(self) -> None:
        for name in (
            "forward_tflops",
            "backward_tflops",
            "node_size",
            "inner_gbytes_per_s",
            "outer_gbytes_per_s",
        ):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(
                    f"{name}={value!r} of topology {self.name!r} must be positive and finite; "
                    "give what one rank reaches"
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

    topology: str | Topology = "h100"
    """Hardware of the cost model: cpu, a800, h100, h200, or a row of your own."""

    token_multiple: int = 1
    """Tokens per rank are a multiple of this (tensor parallel size under sequence parallelism)."""

    element_bytes: int = 2
    """Bytes of one activation element on the wire."""

    num_stages: int | None = None
    """Stages of overlap for remote keys; None lets the cost model choose."""

    max_received_mb: int | None = None
    """Most megabytes that a rank may hold at once because others sent them, in a pass of a layer; None: no limit."""

    improver: str | None = None
    """Solver that goes on from the plan of planner "auto": cp_sat, milp or hypergraph (extra `solvers`); None: none."""

    improver_effort: int = 10
    """Work of the improver, about seconds of one core: counted, not clocked, so that all ranks find the same plan."""

    head_degree: int | None = None
    """Ranks that exchange tokens against heads in planner "usp"; None: the most that fit into a node."""

    def __post_init__(self) -> None:
        for name in ("planner", "improver"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "improver" and value is None):
                raise TypeError(f"{name}={value!r} must be a name; give a string")
        if not isinstance(self.topology, str | Topology):
            raise TypeError(
                f"topology={self.topology!r} must be the name of a row or a Topology; leave it out for h100"
            )
        for name in (
            "num_heads", "num_kv_heads", "head_dim", "token_multiple", "element_bytes", "improver_effort"
        ):  # fmt: skip
            _check_positive(name, getattr(self, name))
        for name in (
            "chunk_size", "value_head_dim", "latent_dim", "num_stages", "max_received_mb", "head_degree"
        ):  # fmt: skip
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}; "
                "give the head counts of one tensor-parallel rank"
            )

    @property
    def kv_ratio(self) -> float:
        """Elements of one key plus value row over twice those of one query row (rho of the papers)."""
        value_dim = self.value_head_dim or self.head_dim
        return (
            self.num_kv_heads * (self.head_dim + value_dim) / (2 * self.num_heads * self.head_dim)
        )


_MOST = 1 << 31


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name}={value!r} must be a positive integer; leave it out for the default"
        )
    if value > _MOST:
        raise ValueError(f"{name}={value!r} must be at most 2^31; leave it out for the default")
