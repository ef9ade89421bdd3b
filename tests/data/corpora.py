"""Small corpora whose every token is known."""

import numpy as np

from megatron_cp.data.document_set import open_documents, write_prefix_lengths
from megatron_cp.data.indexed_writer import IndexedWriter


def write_corpus(prefix, lengths, prefix_lengths=None, eod=None):
    """Documents of counting tokens, so that a token tells its document: 100 * document + position.

    With `eod`, that id ends each non-empty document.
    """
    with IndexedWriter(prefix, dtype=np.int32) as writer:
        for document, length in enumerate(lengths):
            tokens = 1000 * (document + 1) + np.arange(length)
            if eod is not None and length:
                tokens[-1] = eod
            writer.add_document(tokens)
        writer.finish()
    if prefix_lengths is not None:
        write_prefix_lengths(prefix, np.array(prefix_lengths))
    return open_documents(prefix)
