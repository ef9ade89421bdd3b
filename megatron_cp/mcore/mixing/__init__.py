"""Layers that mix tokens, over the whole context: softmax, sparse and linear attention, Mamba-2."""
