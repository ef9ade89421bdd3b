"""What tests ask of a kernel with a feature: the options of its call, and what the oracle needs to know of them."""

from dataclasses import replace

import numpy as np
import torch

from megatron_cp.attn.dropout import Dropout, head_seeds, key_words, row_words
from tests.oracles.dropout import dropout_factors

SEED, RATE, SOFTCAP = 2**45 + 9, 0.3, 3.0


def wishes(feature, device="cpu"):
    """Arguments of `attend` that take a kernel of this feature."""
    if feature == "dropout":
        return {"dropout_p": RATE, "dropout_seed": torch.tensor([SEED], device=device)}
    return {"softcap": SOFTCAP} if feature else {}


def with_feature(options, feature, q, k, keys=slice(None)):
    """Options of the raw passes for these rows and some of the keys."""
    if feature == "dropout":
        rows, columns = (torch.arange(len(x), device=q.device) for x in (q, k))
        words = row_words(head_seeds(torch.tensor([SEED], device=q.device), q), rows)
        dropout = Dropout(RATE, words, key_words(columns)[keys])
        return replace(options, dropout_p=RATE, dropout=dropout)
    return replace(options, softcap=SOFTCAP) if feature else options


def of_oracle(feature, q, k):
    """Arguments of the dense oracle for the same rows."""
    if feature == "dropout":
        places = np.arange(len(q)), np.arange(len(k))
        return {"factors": dropout_factors(SEED, q.shape[1], *places, RATE)}
    return {"softcap": SOFTCAP} if feature else {}
