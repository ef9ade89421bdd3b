"""A stand-in for Transformer Engine 2.2: its documented constructors, computed by plain torch on one
tensor-parallel rank. Megatron takes it for the real one; `events` tells what ran in which context.
"""

__version__ = "2.2.0"
events: list[tuple[str, bool]] = []  # (kind of layer, whether an fp8 recipe was on)

from transformer_engine import common, pytorch  # noqa: E402

__all__ = ["common", "events", "pytorch"]
