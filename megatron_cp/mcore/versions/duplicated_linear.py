"""The linear layer in front of and behind latent experts, where Transformer Engine is not installed.

Megatron-Core has it as Transformer Engine's alone. Every tensor rank holds the whole weight; under sequence parallelism
ranks see other tokens, and Megatron adds their gradients as it does those of norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class DuplicatedLinear(torch.nn.Linear):
    """Stands for `TELinear` with `parallel_mode="duplicated"`: its arguments, names and checkpoint."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        **unneeded: Any,
    ) -> None:
        where = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        super().__init__(input_size, output_size, bias=bias, **where)
        if config.perform_initialization:
            with torch.no_grad():
                init_method(self.weight)
                if bias:
                    self.bias.zero_()
        for parameter in self.parameters():
            parameter.allreduce = True  # type: ignore[attr-defined]
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Draws nothing: `init_method` does, or a checkpoint is loaded."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Returns the output, and no bias to be added later."""
        return super().forward(x), None

    def get_extra_state(self) -> None:
        """Returns nothing; Transformer Engine keeps what fp8 needs under this name."""

    def set_extra_state(self, state: Any) -> None:
        """Takes what Transformer Engine has saved, and forgets it."""


def install() -> None:
    """Lets Megatron's layer of experts build its latent projections from it."""
    from megatron.core.transformer.moe import moe_layer

    module: Any = moe_layer
    module.TELinear, module.HAVE_TE = DuplicatedLinear, True  # the latter is asked for these alone
