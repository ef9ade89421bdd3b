"""Which pairs attention dropout keeps, whoever computes them: a hash of a word of the query row and one of the key.

    row word   of the seed of the head and the row's place in the whole context     int32 [Q, N]
    key word   of the key's place                                                   int32 [K]
    kept       mix(key word, row word) >= threshold(rate)

The words travel with the rows. So a pair is kept or dropped alike in forward and backward, whose plans differ, and
under every plan, number of ranks and split of heads; and nothing of the size of the mask is held.

The mixing is the finaliser of MurmurHash3 (A. Appleby, public domain), with the key added where its last shift was:
two pairs whose words have the same exclusive or would be kept or dropped together.
"""

# Q query rows, K key rows, N query heads

from dataclasses import dataclass

import torch
from torch import Tensor

_WORDS = 1 << 32
_MULTIPLIERS = (0x85EBCA6B - _WORDS, 0xC2B2AE35 - _WORDS)
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # between the seeds of heads: odd, 2^64 / the golden ratio


@dataclass(frozen=True)
class Dropout:
    """The rate at which pairs are dropped, and the words of the rows `[Q, N]` and keys `[K]` at hand."""

    rate: float
    row_words: Tensor
    key_words: Tensor

    def of_heads(self, heads: slice) -> "Dropout":
        """Returns the same for some of the heads."""
        return Dropout(self.rate, self.row_words[:, heads], self.key_words)

    def factors(self, rows: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """Returns what probabilities are multiplied by, `[N, Q, K]`: 1/(1 - rate) where kept, else 0."""
        row_words = self.row_words[rows].t().contiguous().unsqueeze(-1)
        kept = keeps(row_words, self.key_words[keys], threshold(self.rate))
        return kept.to(dtype).mul_(1.0 / (1.0 - self.rate))


def check_rate(rate: float, name: str = "dropout_p") -> None:
    """Raises ValueError, with what the caller calls it, unless `rate` leaves something."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(
            f"{name}={rate} must lie in [0, 1); it is the probability that a query does not see a key"
        )


def head_seeds(seed: Tensor | None, q: Tensor) -> Tensor:
    """Returns a seed for each head of `q` `[Q, N, H]`, int64 `[N]`, given one seed `[1]`, or these, or None.

    None draws from the default generator of the device, as dropout of torch does. Raises ValueError for other tensors,
    TypeError for what is none.
    """
    num_heads = q.shape[1]
    if seed is None:
        seed = draw_seed(q.device)
    if not isinstance(seed, Tensor):
        raise TypeError(
            f"dropout_seed={seed!r} must be a tensor, so that a graph can hold it; give torch.tensor([{seed!r}])"
        )
    shapes = ((1,), (num_heads,))
    if seed.dtype != torch.int64 or tuple(seed.shape) not in shapes or seed.device != q.device:
        raise ValueError(
            f"dropout_seed {seed.dtype} {tuple(seed.shape)} on {seed.device} must be int64 (1,) or ({num_heads},) on "
            f"{q.device}; pass one seed, or one for each query head"
        )
    if len(seed) == num_heads:
        return seed.clone()  # it is read again in backward; the caller's may be another by then
    return seeds_of_heads(seed, torch.arange(num_heads, device=q.device))


def draw_seed(device: torch.device) -> Tensor:
    """Returns a seed, int64 `[1]`, from the default generator of a device, without waiting for it."""
    return torch.randint(-(1 << 62), 1 << 62, (1,), dtype=torch.int64, device=device)


def seeds_of_heads(seed: Tensor, heads: Tensor) -> Tensor:
    """Returns the seeds of the heads with these numbers, int64 `[N]`: the first has the seed `[1]` itself."""
    return seed + heads * _STEP


def row_words(seeds: Tensor, places: Tensor) -> Tensor:
    """Returns the words of query rows at `places` `[Q]` for the seeds of heads `[N]`: int32 `[Q, N]`."""
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    return _mix(_mix(places.to(torch.int32).unsqueeze(-1), low), high)


def key_words(places: Tensor) -> Tensor:
    """Returns the words of keys at `places` `[K]`: int32 `[K]`, no two the same."""
    return _mix(places.to(torch.int32), torch.zeros_like(places, dtype=torch.int32))


def keeps(row_words: Tensor, key_words: Tensor, threshold: int) -> Tensor:
    """Returns which pairs are kept, for words that broadcast against each other."""
    return _mix(key_words, row_words) >= threshold


def threshold(rate: float) -> int:
    """Returns the number, an int32, below which a pair's hash drops it."""
    return min(round(rate * _WORDS), _WORDS - 1) - _WORDS // 2


def _mix(word: Tensor, key: Tensor) -> Tensor:
    """Returns int32 `word` mixed under `key`: for each key another permutation. Products wrap."""
    x = word ^ key
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _MULTIPLIERS[0]
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= _MULTIPLIERS[1]
    x += key
    return x
