"""Layer norm for sequence parallelism without Transformer Engine.

Megatron's own fall-back (`WrappedTorchNorm`) refuses sequence parallelism. The computation is per
token and needs nothing new; only the gradients of the norm's weights do, because each
tensor-parallel rank sees a part of the tokens. Megatron sums them over the tensor-parallel group
for every parameter whose `sequence_parallel` attribute is set.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_cp.mcore.versions import compat

MEGATRONS_OWN: tuple[type, ...] = (WrappedTorchNorm, FusedLayerNorm)
"""The norms of Megatron's local specs; the second is apex's, for LayerNorm alone."""


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm that also takes a residual stream in fp32 between layers of 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm in the dtype of the weight."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        shape, weight, bias = self.normalized_shape, self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), shape, weight, bias, self.eps).to(self.weight.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that also takes a residual stream in fp32 between layers of 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm in the dtype of the weight."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        weight = self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(self.weight.dtype)


class _ZeroCentredLayerNorm(torch.nn.LayerNorm):
    """LayerNorm whose weight is stored minus one, so that weight decay pulls it to one."""

    def reset_parameters(self) -> None:
        """Sets weight and bias to zero."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm in the dtype of the weight, made in fp32: 1 + weight would lose bits in bf16."""
        shape, weight, bias = self.normalized_shape, 1 + self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), shape, weight, bias, self.eps).to(self.weight.dtype)


class _ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is stored minus one."""

    def reset_parameters(self) -> None:
        """Sets the weight to zero."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm in the dtype of the weight, made in fp32."""
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(self.weight.dtype)


_KINDS: dict[tuple[str, bool], Any] = {
    ("LayerNorm", False): LayerNorm,
    ("RMSNorm", False): RMSNorm,
    ("LayerNorm", True): _ZeroCentredLayerNorm,
    ("RMSNorm", True): _ZeroCentredRMSNorm,
}


class TorchNorm:
    """Builds torch's LayerNorm or RMSNorm, its parameters marked for sequence parallelism.

    The constructor is that of Megatron's norms, so it serves as `input_layernorm`,
    `pre_mlp_layernorm`, query and key norm, and final norm of a block.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float | None = None, **unused: Any) -> Any:
        """Returns a LayerNorm or RMSNorm over the last dimension; without `eps` with the configuration's.

        A Mamba layer of Megatron-Core 0.16 to 0.18 names none.

        Raises:
            NotImplementedError: for a normalisation or an option that torch's norms do not have.
        """
        centred = bool(getattr(config, "layernorm_zero_centered_gamma", False))
        kind = _KINDS.get((config.normalization, centred))
        if kind is None:
            raise NotImplementedError(
                f"normalization={config.normalization!r}; without Transformer Engine it must be "
                "'LayerNorm' or 'RMSNorm'; choose the one that the model was made for"
            )
        for option, flag in (
            ("persist_layer_norm", "--no-persist-layer-norm"),
            ("memory_efficient_layer_norm", "no --memory-efficient-layer-norm"),
        ):
            if getattr(config, option, False):
                raise NotImplementedError(
                    f"{option}=True names a kernel of apex, and torch's {config.normalization} is "
                    f"used here; it must be False; give {flag} (same results)"
                )
        norm = kind(hidden_size, eps=config.layernorm_epsilon if eps is None else eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class LocalNorm:
    """Builds apex's fused LayerNorm where it is installed and can, else `TorchNorm`.

    It stands wherever Megatron's local specs name one of `MEGATRONS_OWN`.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float | None = None, **unused: Any) -> Any:
        """Returns the norm over the last dimension; the apex branch never ran on a GPU."""
        eps = config.layernorm_epsilon if eps is None else eps
        if config.normalization == "LayerNorm" and compat.has_apex_norm():
            return FusedLayerNorm(config=config, hidden_size=hidden_size, eps=eps)
        return TorchNorm(config, hidden_size, eps)
