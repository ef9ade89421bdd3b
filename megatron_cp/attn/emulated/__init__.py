"""The `emulated` backend: the host code of `hopper`, its kernels' source run on the CPU."""
