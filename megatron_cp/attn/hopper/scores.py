"""What the kernels make of products of queries and keys: scale, softcap or dropout, as their parameters say it."""

# Q query rows, K key rows, N query heads

import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megatron_cp.attn.dropout import Dropout, threshold
from megatron_cp.attn.features import Feature, feature_of
from megatron_cp.attn.options import AttendOptions
from megatron_cp.kernels.params import DropoutParams

LOG2_E = math.log2(math.e)
TINY_SCALE = 1e-30  # stands for softmax_scale = 0, with which masked scores would be -inf * 0
# Tiles of kernels with dropout have at most 192 queries and 128 keys; words of rows past the end are read for nothing.
ROOM = 256
_NO_DROPOUT = DropoutParams()


class Words(NamedTuple):
    """The words of dropout as the kernels read them: per head, int32 `[N, Q + ROOM]`, and `[K + ROOM]`."""

    rate: float
    rows: Tensor
    keys: Tensor

    @classmethod
    def of(cls, dropout: Dropout) -> "Words":
        """Returns the words of a call, to be kept until its launch."""
        rows = F.pad(dropout.row_words.t(), (0, ROOM)).contiguous()
        return cls(dropout.rate, rows, F.pad(dropout.key_words, (0, ROOM)).contiguous())


class Scores(NamedTuple):
    """What one call asks for."""

    softmax_scale: float
    softcap: float = 0.0
    words: Words | None = None

    @classmethod
    def of(cls, options: AttendOptions) -> "Scores":
        """Returns what the options of a call say."""
        words = None if options.dropout is None else Words.of(options.dropout)
        return cls(options.softmax_scale, options.softcap, words)

    @property
    def feature(self) -> Feature:
        """Returns the feature of the kernels that do it."""
        return feature_of(self.softcap > 0, self.words is not None)

    def scales(self) -> tuple[float, float, float]:
        """Returns `score_scale, cap, cap_scale` as params.h defines them."""
        scale = self.softmax_scale or TINY_SCALE
        if not self.softcap:
            return scale * LOG2_E, 0.0, 0.0
        return 1.0, self.softcap * LOG2_E, 2 * LOG2_E * scale / self.softcap

    def score_per_lse(self) -> float:
        """Returns the score whose exponential is that of an lse of 1: what rows that go on from a result start at."""
        return LOG2_E if self.softcap else 1.0 / (self.softmax_scale or TINY_SCALE)

    def dropout(self) -> DropoutParams:
        """Returns what a kernel is told about dropout; a kernel without it does not look."""
        words = self.words
        if words is None:
            return _NO_DROPOUT
        addresses = words.rows.data_ptr(), words.keys.data_ptr()
        kept_scale = 1.0 / (1.0 - words.rate)
        return DropoutParams(*addresses, words.rows.shape[1], threshold(words.rate), kept_scale)

    def touched(self) -> dict[str, Tensor]:
        """Returns what a kernel reads of it, by name."""
        words = self.words
        return {} if words is None else {"row words": words.rows, "key words": words.keys}
