"""How many bytes of text a token stands for: what turns a loss per token into bits per byte.

Losses of different tokenizers cannot be compared per token; per byte they can.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.data.document_set import Documents
from megatron_cp.data.tokenizer import Tokenizer

# The ratio of a mixed corpus is then known to about a per cent, in tens of milliseconds.
SAMPLE_TOKENS = 1 << 16


def bytes_per_token(documents: Documents, tokenizer: Tokenizer | None) -> float | None:
    """Returns UTF-8 bytes per token over the first documents, about SAMPLE_TOKENS tokens of them.

    End-of-document tokens count as tokens and hold no bytes, as in the loss. None without a tokenizer, without a
    token, or for token files of another vocabulary.
    """
    if tokenizer is None:
        return None
    num_tokens = num_bytes = 0
    for number, length in enumerate(documents.lengths.tolist()):
        ids = documents.read(number, 0, min(length, SAMPLE_TOKENS - num_tokens))
        if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
            return None
        text = tokenizer.detokenize(np.asarray(ids)[ids != tokenizer.eod].tolist())
        num_tokens += len(ids)
        num_bytes += len(text.encode("utf-8", errors="replace"))
        if num_tokens >= SAMPLE_TOKENS:
            break
    return num_bytes / num_tokens if num_bytes else None
