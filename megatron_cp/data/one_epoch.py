"""The packs of every token once, for an evaluation over all of a corpus.

    split   | aaaa bb | bbbb cc | c dd - - | x x x |      the last pack is filled with padding
    keep    | aaaa cc | bbbbbb  | dd       | x x x |      x: a copy of the last pack that fills up the last batch,
                                                          whose tokens carry no loss

Every rank then has as many micro-batches, and each token that has a label counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_cp.data.blend import BlendedDocuments
from megatron_cp.data.document_set import Documents
from megatron_cp.data.packing import Pack, Packer, PackingConfig, Piece


def packs_of_all_tokens(documents: Documents, config: PackingConfig) -> list[Pack]:
    """Returns packs that hold every token once, corpus after corpus; weights of corpora have no say."""
    corpora = documents.corpora if isinstance(documents, BlendedDocuments) else (documents,)
    packs: list[Pack] = []
    first = 0
    for corpus in corpora:
        packer = Packer(corpus.lengths, config)
        own = _cut(packer) if config.policy == "split" else _kept(packer)
        packs += [pack.shifted(first) for pack in own]
        first += len(corpus)
    return packs


def _kept(packer: Packer) -> Iterator[Pack]:
    """Yields whole documents in packs until their epoch ends."""
    pack = next(packer)
    while not packer.epoch:
        yield pack
        pack = next(packer)


def _cut(packer: Packer) -> Iterator[Pack]:
    """Yields the stream of the epoch, cut; its last pack is as long as what is left, and nothing follows it."""
    left = packer.num_tokens
    while left > packer.config.seq_length:
        pack = next(packer)
        left -= pack.num_tokens
        yield pack
    pieces: list[Piece] = []
    for piece in next(packer).pieces:
        if left:
            pieces.append(piece._replace(stop=min(piece.stop, piece.start + left)))
            left -= pieces[-1].length
    yield Pack(tuple(pieces))


class OneEpoch:
    """An iterator of packs that ends, in whole batches: what fills up the last one does not count.

    Args:
        packs: at least one.
        batch_size: packs of a batch, over all ranks.
        identity: what says which packs these are, in JSON values.
    """

    def __init__(self, packs: Sequence[Pack], batch_size: int, identity: dict[str, Any]) -> None:
        filling = replace(packs[-1], counts=False)
        self._packs = [*packs, *[filling] * (-len(packs) % batch_size)]
        self._identity, self._position = {**identity, "epochs": 1}, 0

    def __len__(self) -> int:
        """Returns the number of packs, with those that fill up."""
        return len(self._packs)

    def identity(self) -> dict[str, Any]:
        """Returns the settings that a state belongs to."""
        return self._identity

    def state(self) -> dict[str, Any]:
        """Returns the number of packs drawn."""
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken."""
        self._position = int(state["position"])

    def __iter__(self) -> Iterator[Pack]:
        return self

    def __next__(self) -> Pack:
        if self._position == len(self._packs):
            raise StopIteration
        self._position += 1
        return self._packs[self._position - 1]
