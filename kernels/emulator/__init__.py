"""Runs kernels' own source on the CPU, with the documented semantics of the instructions; g++ only."""
