"""Megatron's Mamba-2 mixer, over the whole context and inside documents, on the rows of this rank.

    in_proj -> z | x B C | dt                  as Megatron's layer: its parameters, names and checkpoints
    x B C -> short causal convolution, SiLU             cp_causal_conv1d
    dt = softplus(dt + dt_bias); g = -exp(A_log) dt
    S = exp(g) S + B (dt x)^T; y = S^T C + D x          cp_linear_attention: q is C, k is B, v is dt x
    norm by groups of y SiLU(z) -> out_proj

All between the projections is computed once more in the backward pass, and states travel once more, unless
`config.use_mamba_mem_eff_path` is off: so does Megatron's.

Tokens stay where the plan of the softmax layers has put them. Every document of the mask begins from an empty state;
its tokens must see all before them. Megatron's own mixer exchanges heads over the context ranks, which must divide
heads and groups, and needs the kernels of mamba_ssm.

Source: Mamba-2 (arXiv 2405.21060); names, ranges of the start and order of rows are Megatron-Core's `MambaMixer`.
"""

# s rows of this rank, b batch; of one tensor rank: n heads, P head dim, G groups, N state dim, C channels of x, B and C

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch.utils.checkpoint import checkpoint

from megatron_cp.api import cp_causal_conv1d, cp_linear_attention
from megatron_cp.mcore import layers
from megatron_cp.mcore.documents.micro_batch import PlanFinder, prepare_layer
from megatron_cp.mcore.mixing.layer_calls import refuse_inference, weight_of
from megatron_cp.mcore.mixing.recurrence import Recurrence, Stream, split_over_tensor_ranks
from megatron_cp.mcore.settings.mixers import MAMBA_TAPS, mamba_sizes

_IN_PROJ = ("z", "x", "B", "C", "dt")
_CHANNELS = ("x", "B", "C")
_STEPS = (1e-3, 0.1)  # range of dt where training starts, and the least of it
_LEAST_STEP = 1e-4


class ContextMambaMixer(Recurrence, MegatronModule):
    """Computes a Mamba-2 mixer over the whole context, on the rows of this rank.

    The constructor takes Megatron's arguments: `config`, `submodules` (`in_proj`, `out_proj`), `d_model`,
    `layer_number`, and `pg_collection` with `tp` and `cp`; others that its layers pass are not needed. `thd_split` is
    that of `ContextParallelAttention`. Weights drawn on the CPU start the same at every tensor-parallel size; of those
    drawn on a GPU `in_proj` and `out_proj` do not. In 16 bits on a GPU the recurrence is that of flash-linear-attention
    where it is installed and right there; else plain torch computes. **It has never run on a GPU.**

    Raises NotImplementedError or ValueError for settings that it cannot honour.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        d_model: int,
        layer_number: int = 1,
        *,
        pg_collection: Any,
        thd_split: str | None = None,
        **unneeded: Any,
    ) -> None:
        super().__init__(config=config)
        prepare_layer(config, thd_split, pg_collection.cp)
        self.layer_number, self.pg_collection = max(1, layer_number), pg_collection
        self.tp_size = pg_collection.tp.size()
        self._set_sizes()
        sizes = layers.attention_sizes(config, self.tp_size)
        self._plans = PlanFinder(config, self.layer_number, sizes, thd_split=thd_split)
        self.in_proj = self._built_in_proj(submodules.in_proj, d_model)
        self._make_own_parameters()
        self.norm = _GroupedGatedNorm(self._inner, self._groups, config)
        inner = self._inner * self.tp_size
        self.out_proj = self._built_out_proj(submodules.out_proj, inner, d_model)
        if config.perform_initialization:
            self.reset_parameters()
        layers.register_stage(config)

    def _set_sizes(self) -> None:
        heads, self._head_dim, groups, self._state_dim = mamba_sizes(self.config)
        self._heads, self._groups = heads // self.tp_size, groups // self.tp_size
        self._inner = self._heads * self._head_dim
        shared = self._groups * self._state_dim
        self._channel_sections = (self._inner, shared, shared)
        self.in_proj_split_sections = (self._inner, *self._channel_sections, self._heads)
        self.in_proj_dim = sum(self.in_proj_split_sections) * self.tp_size

    def _make_own_parameters(self) -> None:
        """Makes the parameters beside the projections; `reset_parameters` draws them for all tensor ranks."""
        where = {"device": torch.cuda.current_device(), "dtype": self.config.params_dtype}
        exact = {**where, "dtype": torch.float32}
        channels = sum(self._channel_sections)
        self.conv1d = torch.nn.utils.skip_init(
            torch.nn.Conv1d, channels, channels, MAMBA_TAPS, groups=channels, **where
        )
        self.dt_bias = torch.nn.Parameter(torch.ones(self._heads, **where))
        self.A_log = torch.nn.Parameter(torch.zeros(self._heads, **exact))
        self.D = torch.nn.Parameter(torch.ones(self._heads, **exact))
        split_over_tensor_ranks(*self.conv1d.parameters(), self.dt_bias, self.A_log, self.D)

    def reset_parameters(self) -> None:
        """Draws convolution, decays and steps for all heads, of which each tensor rank keeps its own.

        Ranges are Megatron's: those of `torch.nn.Conv1d`, decays of 1 to 16, steps of .001 to .1.
        """
        bound, sections = MAMBA_TAPS**-0.5, self._channel_sections
        low, high = map(math.log, _STEPS)
        with torch.no_grad():
            for parameter in self.conv1d.parameters():
                drawn = self._drawn_like(parameter, -bound, bound)
                parameter.copy_(self._own_part(self._by_rank(drawn, sections)))
            steps = self._own_part(self._drawn_like(self.A_log, low, high)).exp().clamp(_LEAST_STEP)
            self.dt_bias.copy_(steps + (-torch.expm1(-steps)).log())  # softplus turned round
            self.A_log.copy_(self._own_part(self._drawn_like(self.A_log, 1.0, 16.0)).log())

    def forward(
        self,
        hidden_states: torch.Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the mixer's output `[s, b, hidden]` and its bias, None.

        `hidden_states` is `[s, b, hidden]`, s divided by the tensor ranks under sequence parallelism.
        `packed_seq_params` is as in `ContextParallelAttention`.

        Collective: every rank of the context group calls it, forward and backward.
        """
        refuse_inference(inference_context, inference_params)
        projected, _ = self.in_proj(hidden_states)
        stream = self._stream(projected, None, packed_seq_params)
        if self.config.use_mamba_mem_eff_path:
            # Of all that follows `projected` alone is kept. Nothing in it is random.
            gated = checkpoint(self._mixed, stream, use_reentrant=False, preserve_rng_state=False)
        else:
            gated = self._mixed(stream)
        return self.out_proj(stream.rows.unfold(gated))

    def _mixed(self, stream: Stream) -> torch.Tensor:
        """Returns what goes into the output projection, in the rows and heads of the stream.

        Collective over its group.
        """
        batch = stream.folded.shape[1]  # samples that share the plan are more heads
        z, channels, dt = stream.folded.split(
            [self._inner, sum(self._channel_sections), self._heads], dim=-1
        )
        channels = cp_causal_conv1d(
            channels.flatten(1),
            weight_of(self.conv1d).squeeze(1).repeat(batch, 1),
            stream.plan,
            stream.group,
            document_lengths=stream.document_lengths,
            bias=self.conv1d.bias.repeat(batch),
            activation="silu",
        ).view_as(channels)
        x, keys, queries = channels.split(list(self._channel_sections), dim=-1)
        steps = F.softplus(dt.float() + self.dt_bias.float())
        x_TnP = x.reshape(len(x), -1, self._head_dim)
        y_TnP = cp_linear_attention(
            self._of_heads(queries),
            self._of_heads(keys),
            (x_TnP * steps.reshape(len(x), -1, 1)).to(x.dtype),
            stream.plan,
            stream.group,
            document_lengths=stream.document_lengths,
            g=(-self.A_log.float().exp() * steps).flatten(1),
            scale=1.0,
        )
        y_TnP = y_TnP.float() + self.D.float().repeat(batch)[:, None] * x_TnP
        return self.norm(y_TnP.reshape(z.shape), z).to(z.dtype)

    def _of_heads(self, shared: torch.Tensor) -> torch.Tensor:
        """Returns `[T, b * n, N]` of `[T, b, G * N]`: the heads of a group share its rows."""
        by_group = shared.reshape(len(shared), -1, self._state_dim)
        return by_group.repeat_interleave(self._heads // self._groups, dim=1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the sharded tensors under the keys of Megatron's mixer, each section by itself."""
        return self._sharded(
            prefix,
            sharded_offsets,
            metadata,
            by_rank=("conv1d", "norm"),
            sections={
                "in_proj.weight": (_IN_PROJ, self.in_proj_split_sections),
                "conv1d.weight": (_CHANNELS, self._channel_sections),
                "conv1d.bias": (_CHANNELS, self._channel_sections),
            },
        )


class _GroupedGatedNorm(torch.nn.Module):
    """RMSNorm of y SiLU(z), each group of channels by itself; in fp32."""

    def __init__(self, width: int, num_groups: int, config: Any) -> None:
        super().__init__()
        where = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.ones(width, **where))
        split_over_tensor_ranks(self.weight)
        self._num_groups = num_groups
        self._eps = 1e-5  # Megatron's, whatever layernorm_epsilon is

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Returns the norm `[..., width]` in fp32."""
        gated = (y.float() * F.silu(z.float())).unflatten(-1, (self._num_groups, -1))
        scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + self._eps)
        return (gated * scale).flatten(-2) * self.weight.float()
