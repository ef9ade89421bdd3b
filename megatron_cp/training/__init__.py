"""The training loop around a Megatron-Core model.

Arguments, schedule, optimizer, checkpoints, log, tracking.
"""
