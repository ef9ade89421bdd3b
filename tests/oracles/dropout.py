"""Which pairs attention dropout keeps, from its definition, in unsigned NumPy; no code of the package is used.

    row word = hash(hash(place, low half of the head's seed), high half)       key word = hash(place, 0)
    kept     = hash(key word, row word) >= 2^32 rate, read as signed numbers from -2^31 on

`hash(word, key)` is the finaliser of MurmurHash3 on `word ^ key` with `+ key` in place of its last shift. Head n has
the seed `seed + n * 0x9E3779B97F4A7C15`.
"""

import numpy as np
import torch

GOLDEN = 0x9E3779B97F4A7C15


def dropout_factors(seed, num_heads, places_q, places_k, rate):
    """Returns float64 `[Q, N, K]`: 0 for dropped pairs, 1/(1 - rate) for the others; `seed` is an int."""
    seeds = [(seed + head * GOLDEN) % 2**64 for head in range(num_heads)]
    low, high = (np.array([s >> shift & 0xFFFFFFFF for s in seeds]) for shift in (0, 32))
    rows = _hash(_hash(np.asarray(places_q)[:, None], low), high)
    keys = _hash(np.asarray(places_k), 0)
    number = _hash(keys[None, None, :], rows[:, :, None])
    signed = np.where(number >= 2**31, number - 2**32, number)
    kept = signed + 2**31 >= round(rate * 2**32)
    return torch.from_numpy(kept / (1 - rate))


def _hash(word, key):
    """Python's own numbers would do; int64 holds every product of 32 bits by halves of 16."""
    x = np.asarray(word) ^ key
    x = _times(x ^ (x >> 16), 0x85EBCA6B)
    x = _times(x ^ (x >> 13), 0xC2B2AE35)
    return (x + key) % 2**32


def _times(x, factor):
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + ((x * high) % 2**16 << 16)) % 2**32
