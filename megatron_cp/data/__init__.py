"""From text to planned batches: token files, tokenizers, packing, balance, loader."""
