"""The `flex` backend: PyTorch's FlexAttention, compiled to a few graphs for all masks of a run."""
