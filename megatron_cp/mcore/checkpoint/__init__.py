"""Checkpoints of every version: read without executing anything, and state of optimizers that goes on exactly."""
