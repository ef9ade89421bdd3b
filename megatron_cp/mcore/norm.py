"""Layer norm for sequence parallelism without Transformer Engine or apex.

Megatron's own fall-back (`WrappedTorchNorm`) refuses sequence parallelism. The computation is per
token and needs nothing new; only the gradients of the norm's weights do, because each
tensor-parallel rank sees a part of the tokens. Megatron sums them over the tensor-parallel group
for every parameter whose `sequence_parallel` attribute is set.
"""

from __future__ import annotations

from typing import Any

import torch


class TorchNorm:
    """Builds torch's LayerNorm or RMSNorm, its parameters marked for sequence parallelism.

    The constructor is that of Megatron's norms, so it serves as `input_layernorm`,
    `pre_mlp_layernorm`, query and key norm, and final norm of a block.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """Returns a LayerNorm or RMSNorm over the last dimension.

        Raises:
            NotImplementedError: for a normalisation or an option that torch's norms do not have.
        """
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds:
            raise NotImplementedError(
                f"normalization={config.normalization!r}; without Transformer Engine it must be "
                "one of "
                f"{sorted(kinds)}; choose one of them"
            )
        for option in (
            "layernorm_zero_centered_gamma",
            "persist_layer_norm",
            "memory_efficient_layer_norm",
        ):
            if getattr(config, option, False):
                raise NotImplementedError(
                    f"{option}=True; without Transformer Engine or apex it must be False; switch "
                    "it off"
                )
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
