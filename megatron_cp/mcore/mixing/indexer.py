"""The index of DeepSeek's sparse attention: which keys a query attends to, and the loss that trains it.

    q  from the compressed queries    |
    k  from the layer's input, normed |  both rotated in their first columns
    weights of heads, from the input  |

Names and shapes of parameters are those of Megatron-Core's `DSAIndexer`; what is computed is that of Megatron-LM 0.20
and of DeepSeek's own (0.16 rotated the last columns, and neighbours). The orthogonal (Hadamard) rotation before a
product changes nothing but rounding and is left out. The index sees its inputs without gradients: the loss alone trains
it, and nothing else.
"""

# s rows of this rank, b batch, J heads of the index with I columns

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from megatron_cp.mcore.parts.norm import LocalNorm
from megatron_cp.mcore.versions.duplicated_linear import DuplicatedLinear


class Indexer(MegatronModule):
    """Makes queries, keys and weights of the index; every tensor rank has all of it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.num_heads, self.head_dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.rotary_dim = config.qk_pos_emb_head_dim
        self.is_interleaved = bool(getattr(config, "dsa_indexer_rope_interleaved", False))
        queries, hidden = config.q_lora_rank or config.hidden_size, config.hidden_size
        self.linear_wq_b = self._linear(queries, self.num_heads * self.head_dim)
        self.linear_wk = self._linear(hidden, self.head_dim)
        layer_norm = copy.copy(config)
        layer_norm.normalization = "LayerNorm"
        epsilon = getattr(config, "dsa_indexer_k_norm_epsilon", None)
        self.k_norm = LocalNorm(layer_norm, self.head_dim, epsilon)
        self.linear_weights_proj = self._linear(hidden, self.num_heads)
        for (
            parameter
        ) in self.parameters():  # all rows on every tensor rank: the same gradient there
            parameter.sequence_parallel = False

    def _linear(self, inputs: int, outputs: int) -> DuplicatedLinear:
        config = self.config
        return DuplicatedLinear(
            inputs, outputs, config=config, init_method=config.init_method, bias=False
        )

    def forward(
        self, hidden: torch.Tensor, queries: torch.Tensor, angles: torch.Tensor, mscale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q `[s, b, J, I]`, k `[s, b, I]` and weights `[s, b, J]`.

        `hidden` is the layer's input `[s, b, hidden]`, `queries` the compressed ones `[s, b, q_lora_rank]`; `angles`
        and `mscale` those of the layer's rotary embedding.
        """
        q, _ = self.linear_wq_b(queries)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k, _ = self.linear_wk(hidden)
        k = self.k_norm(k).unsqueeze(2)
        q, k = (self._rotated(x, angles, mscale) for x in (q, k))
        weights, _ = self.linear_weights_proj(hidden)
        return q, k.squeeze(2), weights * (self.num_heads * self.head_dim) ** -0.5

    def _rotated(self, x: torch.Tensor, angles: torch.Tensor, mscale: float) -> torch.Tensor:
        turning, still = x.split([self.rotary_dim, self.head_dim - self.rotary_dim], dim=-1)
        turned = rotated(turning, angles, mscale, is_interleaved=self.is_interleaved)
        return torch.cat([turned, still], dim=-1)


def rotated(
    x: torch.Tensor, angles: torch.Tensor, mscale: float, *, is_interleaved: bool
) -> torch.Tensor:
    """Returns rows `[s, b, heads, D]` turned by `angles` `[s, b or 1, 1, D]`, whose halves are equal.

    Column i turns with column i + D/2. Interleaved columns, of which 2i turns with 2i + 1, are sorted first, for good.
    """
    if is_interleaved:
        x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    cos, sin = ((f(angles) * mscale).to(x.dtype) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class IndexerLoss(torch.autograd.Function):
    """Adds a loss to the gradient, beside what it is attached to; and keeps its sum for the log."""

    scale: torch.Tensor | None = None
    """What a loss of one micro-batch weighs in the gradient; set before each backward pass."""
    total: torch.Tensor | None = None
    """Sum over layers and micro-batches since it was last read, of this rank."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Returns `output` as it is."""
        ctx.like = loss
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradient as it is, and that of the loss."""
        scale = 1.0 if IndexerLoss.scale is None else IndexerLoss.scale.to(ctx.like)
        return gradient, torch.ones_like(ctx.like) * scale


def attach_indexer_loss(
    output: torch.Tensor, divergence: torch.Tensor, num_tokens: int, cp_size: int, config: Any
) -> torch.Tensor:
    """Returns `output` with the loss of the index attached.

    Args:
        output: what goes on through the model.
        divergence: of each of this rank's rows, 0 for padding.
        num_tokens: tokens of the micro-batch on all context ranks.
        cp_size: context ranks.
        config: Megatron's. Its `calculate_per_token_loss` says whether gradients are added over ranks and divided by
            tokens later: then the loss is a sum over tokens, else their mean.
    """
    total = divergence.sum() * config.dsa_indexer_loss_coeff
    mean = total * cp_size / num_tokens  # ranks are averaged
    kept = IndexerLoss.total
    IndexerLoss.total = mean.detach() if kept is None else kept + mean.detach()
    loss = total if config.calculate_per_token_loss else mean
    attached: torch.Tensor = IndexerLoss.apply(output, loss)
    return attached


def set_loss_scale(config: Any, num_micro_batches: int) -> None:
    """Says what the loss of one micro-batch weighs in the gradient, as Megatron's schedules do for other losses."""
    scale = torch.ones(1, device=torch.cuda.current_device())
    if config.grad_scale_func is not None:
        scale = torch.as_tensor(config.grad_scale_func(scale)).detach().reshape(1)
    IndexerLoss.scale = scale if config.calculate_per_token_loss else scale / num_micro_batches


def take_indexer_loss(num_indexes: int, num_micro_batches: int) -> float:
    """Returns the mean loss over indexes and micro-batches, and begins anew. Collective over all ranks."""
    total = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    if IndexerLoss.total is not None:
        total += IndexerLoss.total.double()
    IndexerLoss.total = None
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    rows = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(total, group=rows)
    return float(total) / (rows.size() * num_indexes * num_micro_batches)
