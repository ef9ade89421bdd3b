"""The `hopper` backend: from a mask and tensors to launches of our sm_90a kernels."""
