from transformer_engine.pytorch import distributed, float8_tensor, fp8, ops, optimizers, tensor
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.layers import (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm",
    "distributed", "float8_tensor", "fp8", "fp8_autocast", "fp8_model_init", "ops",
    "optimizers", "tensor",
]  # fmt: skip
