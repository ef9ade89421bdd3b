"""Configurations of known GPTs (presets.py) and their builder on Megatron-Core (gpt.py)."""
