"""Kimi delta attention (KDA): a gated delta net that forgets by key channel, over the whole context.

    in_proj -> q k v | beta | forget, gate (narrow)
    q k v   -> short causal convolution, SiLU
    g = -exp(A_log) softplus(forget_up(forget) + dt_bias), one for each key channel
    q k v g beta -> gated delta rule                    cp_linear_attention
    norm, times sigmoid(gate_up(gate)) -> out_proj

Heads of keys are those of values. Forget and gate pass through as many columns as a value has, on every tensor rank.
Megatron-Core has no such layer; the names of parameters are ours.

Source: Kimi Linear (arXiv 2510.26692), section 3.
"""

# s rows of this rank, b batch; n heads of one tensor rank, K key dim, V value dim

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from megatron_cp.mcore.mixing.gated_delta_net import ContextGatedDeltaNet
from megatron_cp.mcore.mixing.recurrence import split_over_tensor_ranks

_LOG_STEPS = (math.log(1e-3), math.log(0.1))
_IN_PROJ = ("query", "key", "value", "beta", "forget", "gate")


class KimiDeltaAttention(ContextGatedDeltaNet):
    """Computes a layer of Kimi delta attention over the whole context, on the rows of this rank.

    Arguments, forward pass and errors are those of `ContextGatedDeltaNet`. **It has never run on a GPU.**
    """

    def _set_sizes(self) -> None:
        config, tp = self.config, self.tp_size
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        self.num_key_heads = self.num_value_heads = config.linear_num_value_heads
        self._own_heads = self.num_value_heads // tp
        self.qk_dim = self.key_head_dim * self.num_key_heads
        self.v_dim = self.value_head_dim * self.num_value_heads
        self.qk_dim_local_tp, self.v_dim_local_tp = self.qk_dim // tp, self.v_dim // tp
        narrow = self.value_head_dim
        self.in_proj_dim = 2 * self.qk_dim + self.v_dim + self.num_value_heads + 2 * narrow
        self.conv_dim_local_tp = 2 * self.qk_dim_local_tp + self.v_dim_local_tp
        self.in_proj_split_sections = (
            *(self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp),
            *(self._own_heads, narrow // tp, narrow // tp),
        )

    def _make_taps_and_decays(self) -> None:
        super()._make_taps_and_decays()
        where = {"device": torch.cuda.current_device(), "dtype": self.config.params_dtype}
        self.dt_bias = torch.nn.Parameter(torch.ones(self.qk_dim_local_tp, **where))
        self.forget_up, self.gate_up = (
            torch.nn.utils.skip_init(
                torch.nn.Linear, self.value_head_dim, columns, bias=False, **where
            )
            for columns in (self.qk_dim_local_tp, self.v_dim_local_tp)
        )
        split_over_tensor_ranks(self.dt_bias, self.forget_up.weight, self.gate_up.weight)

    def reset_parameters(self) -> None:
        """Draws convolution, decays and gates for all heads, of which each tensor rank keeps its own.

        Ranges are those of `ContextGatedDeltaNet`; `dt_bias` starts where softplus gives .001 to .1, as in
        flash-linear-attention.
        """
        super().reset_parameters()
        steps = self._drawn_like(self.dt_bias.float(), *_LOG_STEPS).exp()
        with torch.no_grad():
            self.dt_bias.copy_(self._own_part(steps + torch.log(-torch.expm1(-steps))))
            for module in (self.forget_up, self.gate_up):
                own = module.weight
                whole = own.new_empty(len(own) * self.tp_size, self.value_head_dim)
                self.config.init_method(whole)
                own.copy_(self._own_part(whole))

    def _gates(self, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what that of a gated delta net returns; decays are those of key channels, `[rows, heads, K]`."""
        beta, narrow = others.split([self._own_heads, sum(self.in_proj_split_sections[4:])], dim=-1)
        forget, gate = self._whole(narrow)
        steps = F.softplus(self.forget_up(forget).float() + self.dt_bias)
        decays = -self.A_log.float().exp().unsqueeze(1) * steps.unflatten(-1, (self._own_heads, -1))
        return decays.flatten(1, 2), beta, self.gate_up(gate).float().sigmoid()

    def _whole(self, narrow: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns forget and gate `[..., V]` of the columns that the tensor ranks have of each."""
        if self.tp_size > 1:
            group = self.pg_collection.tp
            columns = gather_from_tensor_model_parallel_region(narrow, group=group)
            # Each rank makes its own heads of them: their gradients are summed.
            columns = copy_to_tensor_model_parallel_region(columns, group=group)
            narrow = columns.unflatten(-1, (self.tp_size, 2, -1)).transpose(-3, -2).flatten(-3)
        forget, gate = narrow.chunk(2, dim=-1)
        return forget, gate

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """Returns the sharded tensors, each section by itself. `tp_group` is not needed: it is the layer's own."""
        channels = _IN_PROJ[:3], self.in_proj_split_sections[:3]
        return self._sharded(
            prefix,
            sharded_offsets,
            metadata,
            by_rank=("conv1d", "forget_up", "gate_up"),
            sections={
                "in_proj.weight": (_IN_PROJ, self.in_proj_split_sections),
                "conv1d.weight": channels,
            },
        )
