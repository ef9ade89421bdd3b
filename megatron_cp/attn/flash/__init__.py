"""The `flash` backend: a mask's slices as few variable-length calls of torch's or flash-attn's operators."""
