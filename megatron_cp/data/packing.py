"""Documents to packs of a fixed number of tokens, without touching a token.

    split   | aaaa bb | bbbb cc | c dddd e |     one stream, cut every seq_length tokens:
                                                 Megatron's way
    keep    | aaaa cc | bbbbbb  | dddd eee |     documents stay whole; the waiting one that fits
                                                 best goes next, the rest is padding

A `Packer` is a pure function of (document lengths, settings, state): it only moves integers, so
every data-parallel rank runs the same one, and its whole state is an epoch, a cursor and the pieces
that were drawn but not yet packed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

PACKING_POLICIES = ("split", "keep")
PackingPolicy = Literal["split", "keep"]
MAX_EPOCHS_OF_A_PACK = 1000


class Piece(NamedTuple):
    """Tokens `[start, stop)` of a document."""

    document: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Pack:
    """The pieces of one pack in order.

    `following` is where the stream goes on (`split` only), for the label of the last token. A loader
    numbers the packs of its stream from 0, over all epochs and ranks. Where it does not count, it fills up a batch, and
    none of its tokens carries loss.
    """

    pieces: tuple[Piece, ...]
    following: tuple[int, int] | None = None
    number: int = 0
    counts: bool = True

    @property
    def num_tokens(self) -> int:
        """Real tokens, at most seq_length."""
        return sum(piece.length for piece in self.pieces)

    def shifted(self, by: int) -> Pack:
        """Returns the pack with every document number raised by `by`."""
        return Pack(
            tuple(piece._replace(document=piece.document + by) for piece in self.pieces),
            None if self.following is None else (self.following[0] + by, self.following[1]),
        )


class PackSource(Protocol):
    """A stream of packs that can be taken up again: what a loader draws from."""

    def identity(self) -> dict[str, Any]:
        """Returns the settings that a state belongs to, in JSON values."""

    def state(self) -> dict[str, Any]:
        """Returns what the rest of the stream depends on beside corpus and settings: JSON values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken. Raises ValueError if it is not of this stream."""

    def __iter__(self) -> Iterator[Pack]:
        """Returns itself."""

    def __next__(self) -> Pack:
        """Returns the next pack; StopIteration behind the last one."""


def document_order(
    num_documents: int, *, seed: int, epoch: int, shuffle: bool = True
) -> NDArray[np.int64]:
    """Returns the order in which an epoch visits the documents.

    They are sorted by a 64-bit hash of (seed, epoch, document). A library's generator may change
    with its version; a hash gives a resumed run the same stream under any NumPy.

    Source: SplitMix64, Steele, Lea and Flood 2014.
    """
    ids = np.arange(num_documents, dtype=np.uint64)
    if not shuffle:
        return ids.astype(np.int64)
    start = splitmix64(
        splitmix64(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(epoch % 2**64)
    )
    return np.argsort(splitmix64(ids ^ start), kind="stable").astype(np.int64)


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns a 64-bit hash of each value."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How documents become packs.

    `keep_buffer`: documents that may wait for a pack they fit (`keep` only).
    """

    seq_length: int
    policy: PackingPolicy = "split"
    seed: int = 1234
    shuffle: bool = True
    keep_buffer: int = 512

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ValueError(f"seq_length={self.seq_length} must be at least 1; set --seq-length")
        if self.policy not in PACKING_POLICIES:
            raise ValueError(
                f"packing policy {self.policy!r} must be one of {PACKING_POLICIES}; set --packing"
            )
        if self.keep_buffer < 1:
            raise ValueError(
                f"keep_buffer={self.keep_buffer} must be at least 1; 512 is a good value"
            )


def check_epochs(num_tokens: int, seq_length: int, where: str) -> None:
    """Raises ValueError if one pack would take the tokens of `where` more than 1,000 times.

    That is a slip in one of the numbers, and the pieces of a pack are all in memory.
    """
    most = MAX_EPOCHS_OF_A_PACK * num_tokens
    if 0 < most < seq_length:
        raise ValueError(
            f"--seq-length {seq_length} takes {num_tokens} tokens {seq_length // num_tokens} times in one pack, those "
            f"of {where}; at most {MAX_EPOCHS_OF_A_PACK} are allowed: give more documents, another --split, or "
            f"--seq-length {most} at most"
        )


class Packer:
    """An endless iterator of `Pack`s over epochs; every token appears exactly once per epoch.

    With `split` a pack may run across the end of an epoch; with `keep` an epoch ends with what is
    left. A document longer than `seq_length` is cut under both policies.

    Raises:
        ValueError: the corpus has no tokens.
    """

    def __init__(self, document_lengths: NDArray[np.int64], config: PackingConfig) -> None:
        if not len(document_lengths) or int(document_lengths.max()) == 0:
            raise ValueError(
                f"{len(document_lengths)} documents hold no token; give a corpus (or a --split) "
                "with at least one token"
            )
        self.config = config
        self._lengths = document_lengths
        self._carry: dict[int, Piece] = {}  # arrival number -> piece, oldest first
        # (length, -arrival), sorted: among equals the oldest is last
        self._by_length: list[tuple[int, int]] = []
        self._arrivals = 0
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._cursor = epoch, 0
        self._order = document_order(
            len(self._lengths), seed=self.config.seed, epoch=epoch, shuffle=self.config.shuffle
        )

    @property
    def epoch(self) -> int:
        """The epoch from which the next document will be drawn."""
        return self._epoch

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self._lengths.sum())

    def identity(self) -> dict[str, Any]:
        """Returns the settings that a state belongs to, in JSON values."""
        config = self.config
        return {
            "seq_length": config.seq_length,
            "packing": config.policy,
            "seed": config.seed,
            "shuffle": config.shuffle,
            "keep_buffer": config.keep_buffer if config.policy == "keep" else 0,
        }

    def state(self) -> dict[str, Any]:
        """Returns what the rest of the stream depends on beside corpus and settings: JSON values."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "carry": [list(piece) for piece in self._carry.values()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken.

        Raises:
            ValueError: the state cannot be of this corpus.
        """
        cursor, carry = int(state["cursor"]), [Piece(*map(int, piece)) for piece in state["carry"]]
        if not 0 <= cursor <= len(self._lengths) or int(state["epoch"]) < 0:
            raise ValueError(
                f"loader state: cursor={cursor} must be in [0, {len(self._lengths)}]; it belongs "
                "to another corpus"
            )
        for piece in carry:
            known = 0 <= piece.document < len(self._lengths)
            if not known or not 0 <= piece.start < piece.stop <= self._lengths[piece.document]:
                raise ValueError(
                    f"loader state: {piece} is not in this corpus; resume with the corpus of the "
                    "checkpoint"
                )
        self._start_epoch(int(state["epoch"]))
        self._cursor = cursor
        self._carry, self._by_length = {}, []
        for piece in carry:
            self._wait(piece)

    def __iter__(self) -> Iterator[Pack]:
        return self

    def __next__(self) -> Pack:
        return self._next_split() if self.config.policy == "split" else self._next_kept()

    def _draw(self) -> Piece | None:
        """Returns the next non-empty document of the epoch, whole; None at its end."""
        while self._cursor < len(self._order):
            document = int(self._order[self._cursor])
            self._cursor += 1
            if self._lengths[document]:
                return Piece(document, 0, int(self._lengths[document]))
        return None

    def _draw_across_epochs(self) -> Piece:
        piece = self._draw()
        while piece is None:
            self._start_epoch(self._epoch + 1)
            piece = self._draw()
        return piece

    def _wait(self, piece: Piece) -> None:
        self._carry[self._arrivals] = piece
        bisect.insort(self._by_length, (piece.length, -self._arrivals))
        self._arrivals += 1

    def _take(self, arrival: int) -> Piece:
        piece = self._carry.pop(arrival)
        del self._by_length[bisect.bisect_left(self._by_length, (piece.length, -arrival))]
        return piece

    def _next_split(self) -> Pack:
        pieces: list[Piece] = []
        room = self.config.seq_length
        while room:
            piece = (
                self._take(next(iter(self._carry))) if self._carry else self._draw_across_epochs()
            )
            part = piece._replace(stop=min(piece.stop, piece.start + room))
            pieces.append(part)
            room -= part.length
            if part.stop < piece.stop:
                self._wait(piece._replace(start=part.stop))
        if not self._carry:  # the label of the last token is the first token of what comes next
            self._wait(self._draw_across_epochs())
        ahead = next(iter(self._carry.values()))
        return Pack(tuple(pieces), (ahead.document, ahead.start))

    def _next_kept(self) -> Pack:
        self._fill_buffer()
        if not self._carry:
            self._start_epoch(self._epoch + 1)
            self._fill_buffer()
        # The piece that waited longest opens the pack, so nothing waits for more than keep_buffer
        # packs.
        pieces = [self._take(next(iter(self._carry)))]
        room = self.config.seq_length - pieces[0].length
        while fitting := bisect.bisect_right(self._by_length, (room, 0)):
            pieces.append(self._take(-self._by_length[fitting - 1][1]))
            room -= pieces[-1].length
        return Pack(tuple(pieces))

    def _fill_buffer(self) -> None:
        size = self.config.seq_length
        while len(self._carry) < self.config.keep_buffer and (piece := self._draw()) is not None:
            for start in range(0, piece.stop, size):
                self._wait(piece._replace(start=start, stop=min(start + size, piece.stop)))


def packs_of_one_epoch(document_lengths: NDArray[np.int64], config: PackingConfig) -> list[Pack]:
    """Returns the packs of epoch 0 in order; with `split` without the last, incomplete one.

    A run does not need them; they are for planning one on paper.
    """
    packer = Packer(document_lengths, config)
    if config.policy == "split":
        return [next(packer) for _ in range(int(document_lengths.sum()) // config.seq_length)]
    packs: list[Pack] = []
    while True:
        pack = next(packer)
        if packer.epoch:
            return packs
        packs.append(pack)
