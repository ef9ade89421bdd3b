"""MLPs that compute their rows in parts, and each part again in backward (row_chunks.py).

    chunk_mlps(model, 8)         an eighth of the rows at once

Rows do not meet in an MLP. They do in experts, whose losses and capacities count them: those stay whole.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch.nn.modules.dropout import _DropoutNd

from megatron_cp.mcore.memory.row_chunks import in_chunks


def chunk_mlps(model: torch.nn.Module, num_chunks: int) -> None:
    """Lets each MLP of a model compute its rows in `num_chunks` parts. Experts stay as they are.

    Megatron-Core's own `mlp_chunks_for_training` keeps the activations of all parts for backward, and so saves
    little; here backward computes them once more.

    Raises:
        TypeError: if the model is none of Megatron-Core.
        ValueError: if there is no part.
        NotImplementedError: in fp8, whose scales are found over all rows together; where an MLP is of another class;
            where the gradients of weights are computed later (`delay_wgrad_compute`); and at the first step, where an
            MLP drops at random, as an adapter in it may.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks={num_chunks} must be at least 1")
    if not isinstance(model, MegatronModule):
        raise TypeError(
            f"model={type(model).__name__} is no module of Megatron-Core, whose MLPs alone are computed in chunks"
        )
    module: Any
    for module in model.modules():
        if type(module) is MLP:
            if module.config.fp8 or getattr(module.config, "fp4", None):
                raise NotImplementedError(
                    "MLPs in chunks in fp8 or fp4; use no chunks: the same results"
                )
            if getattr(module.config, "delay_wgrad_compute", False):
                raise NotImplementedError(
                    "MLPs in chunks beside delay_wgrad_compute; leave out one of the two"
                )
            _chunk_mlp(module, num_chunks)
        elif isinstance(module, MLP) and not isinstance(module, SharedExpertMLP):
            raise NotImplementedError(
                f"an MLP of the class {type(module).__name__} in chunks; use no chunks: the same results"
            )


def _chunk_mlp(mlp: Any, num_chunks: int) -> None:
    plain_forward = mlp.forward

    def forward(rows: torch.Tensor, *options: Any, **named: Any) -> tuple[torch.Tensor, Any]:
        named.pop("padding_mask", None)  # for experts
        if any(option is not None for option in (*options, *named.values())):
            result: tuple[torch.Tensor, Any] = plain_forward(rows, *options, **named)
            return result
        if mlp.training and any(isinstance(x, _DropoutNd) and x.p > 0 for x in mlp.modules()):
            raise NotImplementedError(
                "an MLP in chunks with dropout inside, as an adapter may have: backward would drop something else; "
                "use no chunks"
            )
        biases: list[Any] = []

        def of_chunk(chunk: torch.Tensor, _first: int, _stop: int) -> torch.Tensor:
            out: torch.Tensor
            out, bias = plain_forward(chunk)
            biases.append(bias)
            return out

        weights = [weight for weight in mlp.parameters() if weight.requires_grad]
        out = in_chunks(of_chunk, rows, num_chunks, weights)
        bias = biases[0]  # is added outside
        if bias is not None and not any(bias is weight for weight in mlp.parameters()):
            raise NotImplementedError(
                "an MLP in chunks whose bias is no parameter of its own; use no chunks"
            )
        return out, bias

    mlp.forward = forward
