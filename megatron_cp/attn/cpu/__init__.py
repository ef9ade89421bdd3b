"""The `cpu` backend: slices cut into boxes, computed by PyTorch's operator or by products of small tiles."""
