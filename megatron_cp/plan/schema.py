"""The intermediate language between planners and the runtime: who computes what on which rows.

    PlanData
      global_from_local[rank]      which tokens a rank owns, in its local order
      key_tokens[rank]             cross attention: which keys it owns, as they are other tokens than the queries
      forward, backward : Pass
    Pass
      head_split                   optional exchange of tokens against heads before and after (Ulysses)
      stages                       the transfers of stage i+1 run while stage i computes
    Stage
      k_cast, q_cast : Transfer    key/value rows and query-side rows that ranks receive for this stage
      work[rank] : AttentionMask   what the rank computes, on the rows that it then holds

**Rows that a rank holds.** A rank starts a pass with its own rows of a side: `own_rows` of them, or, under a
head split, those of all members of its group one after the other. A transfer appends what each hop brings,
hop by hop, source by source:

    [ own rows | received in hop 0 | received in hop 1 | ... ]

Key columns of `work[rank]` count in the row space of `k_cast`, query rows in that of `q_cast`; without a
cast the space is the own rows. A hop may forward rows that an earlier hop brought.

A stage that *keeps* a side does not start from its own rows but from all that the stage before held, so a
row used in several stages travels once. Such stages form a chain; what they compute for received rows is
summed up and goes home once, after the last of them.

Everything is pure data: frozen, comparable, hashable by `digest()`, made without torch. The runtime does
what is written here and decides nothing.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, to_indices

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
SRC, DST, START, STOP = range(4)
PassName = Literal["forward", "backward"]
PASSES: tuple[PassName, PassName] = ("forward", "backward")
Side = Literal["k", "q"]
SIDES: tuple[Side, Side] = ("q", "k")
ANSWERED: dict[PassName, tuple[Side, ...]] = {"forward": ("q",), "backward": SIDES}
"""The sides for whose rows there are results, which go home."""


class OwnRows(NamedTuple):
    """How many rows of each side a rank owns."""

    q: int
    k: int
    are_same: bool = False
    """Whether its queries and keys are the same tokens: so everywhere but in cross attention."""

    @classmethod
    def of_tokens(cls, count: int) -> "OwnRows":
        """Returns the rows of a rank whose tokens are queries and keys."""
        return cls(count, count, are_same=True)

    def of(self, side: Side) -> int:
        """Returns the rows of one side."""
        return self.q if side == "q" else self.k

    def times(self, degree: int) -> "OwnRows":
        """Returns the rows of so many ranks together."""
        return self._replace(q=self.q * degree, k=self.k * degree)


@dataclass(frozen=True, eq=False)
class Hop:
    """One all-to-all-v: int64 `[m, 4]` messages (src, dst, start, stop), rows of the source's row space.

    Messages are kept sorted by (src, dst); a destination appends them source by source, each source's
    messages in their order here. A rank never sends to itself, nor a row twice to one destination.
    """

    messages: IntArray

    def __post_init__(self) -> None:
        messages = np.asarray(self.messages, dtype=np.int64).reshape(-1, 4)
        messages = messages[messages[:, START] < messages[:, STOP]]
        order = np.lexsort(
            (messages[:, DST], messages[:, SRC])
        )  # stable: keeps the order of a pair
        messages = np.ascontiguousarray(messages[order])
        messages.setflags(write=False)
        object.__setattr__(self, "messages", messages)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.messages.setflags(write=False)  # as in PlanData

    def sent_by(self, rank: int) -> IntArray:
        """Returns the messages that `rank` sends, by destination."""
        return self.messages[self.messages[:, SRC] == rank]

    def received_by(self, rank: int) -> IntArray:
        """Returns the messages that `rank` receives, in the order in which their rows are appended."""
        return self.messages[self.messages[:, DST] == rank]

    def rows_at(self, end: int, num_ranks: int) -> IntArray:
        """Returns the rows that each rank sends (`end` SRC) or receives (DST): int64 `[num_ranks]`."""
        rows = self.messages[:, STOP] - self.messages[:, START]
        return np.bincount(self.messages[:, end], rows, num_ranks).astype(np.int64)

    def rows_received(self, num_ranks: int) -> IntArray:
        """Returns the rows that each rank receives: int64 `[num_ranks]`."""
        return self.rows_at(DST, num_ranks)


@dataclass(frozen=True)
class Transfer:
    """Row movement in one or more hops; `group_reduce` runs the same hops backwards."""

    hops: tuple[Hop, ...]

    def held_ids(self, before: Sequence[IntArray]) -> list[IntArray]:
        """Returns, for each rank, the ids of all rows it holds, given those that it held before."""
        held = list(before)
        for hop in self.hops:
            arrived = [
                [held[src][start:stop] for src, _, start, stop in hop.received_by(rank).tolist()]
                for rank in range(len(held))
            ]
            held = [np.concatenate([rows, *new]) for rows, new in zip(held, arrived, strict=True)]
        return held


@dataclass(frozen=True)
class Stage:
    """One step of a pass: what arrives, and what each rank then computes."""

    work: tuple[AttentionMask, ...]
    k_cast: Transfer | None = None
    q_cast: Transfer | None = None
    keeps_k: bool = False
    """Whether key rows held in the stage before are still there, at the same places."""
    keeps_q: bool = False

    def cast(self, side: Side) -> Transfer | None:
        """Returns the transfer of one side."""
        return self.k_cast if side == "k" else self.q_cast

    def hops(self, side: Side) -> tuple[Hop, ...]:
        """Returns the hops of one side; none without a transfer."""
        cast = self.cast(side)
        return () if cast is None else cast.hops

    def keeps(self, side: Side) -> bool:
        """Returns whether one side goes on with the rows of the stage before."""
        return self.keeps_k if side == "k" else self.keeps_q


@dataclass(frozen=True)
class HeadSplit:
    """Groups of ranks that exchange tokens against heads; all of one size, covering every rank once.

    The member at position j of a group keeps query heads `[j N/h, (j+1) N/h)` and the key/value heads
    they use, for the tokens of the whole group. Members at the same position of different groups run the
    stages together. Source: DeepSpeed-Ulysses (arXiv 2309.14509); the outer factor of USP (2405.07719).
    """

    groups: tuple[tuple[int, ...], ...]

    @property
    def degree(self) -> int:
        """Returns the group size h."""
        return len(self.groups[0])

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Returns the group that holds `rank`."""
        return next(group for group in self.groups if rank in group)


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass: optional head split, then stages in order."""

    stages: tuple[Stage, ...]
    head_split: HeadSplit | None = None

    @property
    def head_degree(self) -> int:
        """Returns how many ranks exchange tokens against heads; 1 without a head split."""
        return self.head_split.degree if self.head_split else 1

    def transfers(self) -> Iterator[tuple[Side, Transfer]]:
        """Yields every transfer of the pass with the side it moves."""
        for stage in self.stages:
            for side in SIDES:
                cast = stage.cast(side)
                if cast is not None:
                    yield side, cast

    def chain(self, index: int, side: Side) -> range:
        """Returns the stages up to `index` whose rows of one side are held in stage `index`."""
        first = index
        while first and self.stages[first].keeps(side):
            first -= 1
        return range(first, index + 1)

    def ends_chain(self, index: int, side: Side) -> bool:
        """Returns whether results for received rows of one side go home after stage `index`."""
        return index + 1 == len(self.stages) or not self.stages[index + 1].keeps(side)

    def whole_chain(self, index: int, side: Side) -> range:
        """Returns the stages of the chain of one side in which stage `index` is."""
        while not self.ends_chain(index, side):
            index += 1
        return self.chain(index, side)

    def hops_of_chain(self, index: int, side: Side) -> list[Hop]:
        """Returns the hops that brought the rows of one side that are held in stage `index`."""
        return [hop for i in self.chain(index, side) for hop in self.stages[i].hops(side)]

    def held_ids(self, side: Side, own_ids: IntArray) -> list[list[IntArray]]:
        """Returns the token ids that each rank holds in each stage: `[stages][P]`, of `own_ids` `[P, R]`."""
        held: list[list[IntArray]] = []
        for stage in self.stages:
            before = held[-1] if stage.keeps(side) else list(own_ids)
            cast = stage.cast(side)
            held.append(before if cast is None else cast.held_ids(before))
        return held

    def own_ids(self, global_from_local: IntArray) -> IntArray:
        """Returns the token ids of each rank's own rows at the start of the stages: `[P, h * T]`."""
        if self.head_split is None:
            return global_from_local
        groups = [self.head_split.group_of(rank) for rank in range(len(global_from_local))]
        return np.stack([global_from_local[list(group)].reshape(-1) for group in groups])


@dataclass(frozen=True, eq=False, repr=False)
class PlanData:
    """Who owns, computes and sends what, for one mask on `cp_size` ranks; equal by `digest()`.

    Planners make it; users get it as an `AttentionPlan`, which has the same data and can give its figures.
    """

    mask: AttentionMask
    config: CPConfig
    planner: str
    global_from_local: IntArray
    """int64 `[cp_size, tokens_per_rank]`; ids >= num_tokens are padding at the tail of the pack."""
    forward: Pass
    backward: Pass
    plan_ms: float = field(default=0.0, compare=False)
    key_tokens: IntArray | None = None
    """Of cross attention: the keys of each rank, int64 `[cp_size, keys per rank]`, padded like the queries. None where
    queries and keys are the same tokens."""

    def __post_init__(self) -> None:
        self._freeze()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._freeze()  # NumPy does not pickle that an array is not to be written to

    def _freeze(self) -> None:
        found = self.__dict__.get("local_from_global", ())
        for tokens in (self.global_from_local, self.key_tokens, *found):
            if tokens is not None:
                tokens.setflags(write=False)

    @property
    def cp_size(self) -> int:
        """Returns the number of ranks."""
        return len(self.global_from_local)

    @property
    def tokens_per_rank(self) -> int:
        """Returns the number of rows that each rank owns, padding included; the same on every rank."""
        return self.global_from_local.shape[1]

    @property
    def num_tokens(self) -> int:
        """Returns the number of real tokens; of cross attention that of the queries."""
        return self.mask.num_queries

    def length_of(self, side: Side) -> int:
        """Returns the number of real tokens on one side."""
        return self.mask.num_queries if side == "q" else self.mask.num_keys

    def tokens_of(self, side: Side) -> IntArray:
        """Returns the tokens of each rank on one side: int64 `[cp_size, rows]`."""
        return self.global_from_local if side == "q" or self.key_tokens is None else self.key_tokens

    @cached_property
    def own_rows(self) -> OwnRows:
        """How many rows of each side every rank owns."""
        queries, keys = (self.tokens_of(side).shape[1] for side in SIDES)
        return OwnRows(queries, keys, are_same=self.key_tokens is None)

    def get_pass(self, name: PassName) -> Pass:
        """Returns the pass called `name`."""
        return self.forward if name == "forward" else self.backward

    def digest(self) -> str:
        """Returns a SHA-256 over everything that decides the execution; equal bytes on equal plans."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.sha256()
        head = {"planner": self.planner, "config": _said(self.config), "ranks": self.cp_size}
        state.update(json.dumps(head, sort_keys=True, default=str).encode())
        state.update(self.mask.digest().encode())
        state.update(self.global_from_local.astype("<i8").tobytes())
        if self.key_tokens is not None:
            state.update(b"keys" + self.key_tokens.astype("<i8").tobytes())
        for pass_ in (self.forward, self.backward):
            groups = pass_.head_split.groups if pass_.head_split else ()
            state.update(f"pass {groups} {len(pass_.stages)}".encode())
            for stage in pass_.stages:
                for work in stage.work:
                    state.update(f"{work.num_queries} {work.num_keys} {work.num_slices};".encode())
                    state.update(work.array.astype("<i8").tobytes())
                state.update(f"keeps {stage.keeps_k} {stage.keeps_q};".encode())
                for cast in (stage.k_cast, stage.q_cast):
                    state.update(b"none" if cast is None else f"{len(cast.hops)}".encode())
                    for hop in cast.hops if cast else ():
                        state.update(f"{len(hop.messages)}:".encode())
                        state.update(hop.messages.astype("<i8").tobytes())
        return state.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanData) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    @cached_property
    def local_from_global(self) -> tuple[IntArray, IntArray]:
        """Owner rank and local row of every token id, padding included: two int64 `[P * T]`."""
        owner, row = owners_and_rows(self.global_from_local)
        owner.setflags(write=False)
        row.setflags(write=False)
        return owner, row

    def __repr__(self) -> str:
        shape = f"{self.cp_size} ranks x {self.tokens_per_rank} tokens"
        return f"AttentionPlan({self.planner}, {shape}, {self.digest()[:12]})"


_LATER = ("rank_speeds", "outer_levels", "nics_per_node")  # fields of a topology


def _said(config: CPConfig) -> dict[str, Any]:
    """Returns a config as words for a digest; wishes that came later and are not used leave no trace."""
    said = asdict(config)
    topology = said["topology"] if isinstance(said["topology"], dict) else {}
    for words, names in (
        (said, ("rank_speeds", "latent_dim", "linear_state_bytes")),
        (topology, _LATER),
    ):
        for name in names:
            if name in words and not words[name]:
                del words[name]
    return said


def owners_and_rows(tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Returns owner rank and local row of every token id, given the ids `[P, T]` of each rank: two int64 `[P * T]`."""
    num_ranks, num_rows = tokens.shape
    owner = np.empty(tokens.size, dtype=np.int64)
    row = np.empty_like(owner)
    owner[tokens] = np.arange(num_ranks)[:, None]
    row[tokens] = np.arange(num_rows)[None, :]
    return owner, row


def message_rows(messages: IntArray) -> IntArray:
    """Returns the row indices that messages name, one after the other: int64."""
    return to_indices(messages[:, START:])
