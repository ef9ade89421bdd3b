"""Megatron's gated delta net, over the whole context and inside documents, on the rows of this rank.

    in_proj -> q k v | z | beta | alpha        as Megatron's layer: its parameters, names and checkpoints
    q k v   -> short causal convolution, SiLU           cp_causal_conv1d
    q, k to length 1; g = -exp(A_log) softplus(alpha + dt_bias); beta = sigmoid(beta)
    q k v g beta -> gated delta rule                    cp_linear_attention
    norm, times SiLU(z) -> out_proj

Tokens stay where the plan of the softmax layers has put them. Every document of the mask begins from an empty state;
its tokens must see all before them. Megatron's own layer knows no documents (0.16), or wants heads and lengths that the
context size divides (0.20).
"""

# s rows of this rank, b batch; of one tensor rank: n value heads, K key dim, V value dim, C channels of q, k and v

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_cp.api import cp_causal_conv1d, cp_linear_attention
from megatron_cp.mcore import layers
from megatron_cp.mcore.documents.micro_batch import PlanFinder, prepare_layer
from megatron_cp.mcore.mixing.layer_calls import refuse_inference, weight_of
from megatron_cp.mcore.mixing.recurrence import Recurrence, Stream, split_over_tensor_ranks

_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")


class ContextGatedDeltaNet(Recurrence, GatedDeltaNet):
    """Computes a layer of gated delta net over the whole context, on the rows of this rank.

    The constructor takes Megatron's arguments: `config`, `submodules` (`in_proj`, `out_norm`, `out_proj`),
    `layer_number`, and `pg_collection` with `tp` and `cp`; others that its layers pass are not needed. `thd_split` is
    that of `ContextParallelAttention`. Weights drawn on the CPU start the same at every tensor-parallel size; of those
    drawn on a GPU `in_proj` and `out_proj` do not. It trained on one H200, two context ranks on the one GPU.

    Raises NotImplementedError or ValueError for settings that it cannot honour.
    """

    tensor_model_parallel, partition_dim = True, 0  # as in ContextParallelAttention

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int = 1,
        *,
        pg_collection: Any,
        thd_split: str | None = None,
        **unneeded: Any,
    ) -> None:
        # Not that of Megatron's layer, which asks for kernels that are not used here.
        MegatronModule.__init__(self, config=config)
        prepare_layer(config, thd_split, pg_collection.cp)
        if config.activation_func is not F.silu:
            raise NotImplementedError(
                f"activation_func={config.activation_func.__name__} with gated delta net layers, which take that of "
                "the MLP and are made for SiLU; give --swiglu (another model)"
            )
        self.layer_number, self.pg_collection = max(1, layer_number), pg_collection
        self.tp_size = pg_collection.tp.size()
        self._set_sizes()
        sizes = layers.attention_sizes(config, self.tp_size)
        self._plans = PlanFinder(config, self.layer_number, sizes, thd_split=thd_split)
        self.in_proj = self._built_in_proj(submodules.in_proj, config.hidden_size)
        self._make_taps_and_decays()
        self.out_norm = build_module(
            submodules.out_norm,
            config=config,
            hidden_size=self.value_head_dim,
            eps=config.layernorm_epsilon,
        )
        self._sum_gradients_of_norm()
        self.out_proj = self._built_out_proj(submodules.out_proj, self.v_dim, config.hidden_size)
        if config.perform_initialization:
            self.reset_parameters()
        layers.register_stage(config)

    def _make_taps_and_decays(self) -> None:
        """Makes the parameters of convolution and gates; `reset_parameters` draws them for all tensor ranks."""
        where = {"device": torch.cuda.current_device(), "dtype": self.config.params_dtype}
        channels, width = self.conv_dim_local_tp, self.config.linear_conv_kernel_dim
        self.conv1d = torch.nn.utils.skip_init(
            torch.nn.Conv1d, channels, channels, width, groups=channels, bias=False, **where
        )
        self.dt_bias = torch.nn.Parameter(torch.ones(self._own_heads, **where))
        self.A_log = torch.nn.Parameter(torch.zeros(self._own_heads, **where))
        split_over_tensor_ranks(self.conv1d.weight, self.dt_bias, self.A_log)

    def _set_sizes(self) -> None:
        """Sets what Megatron's layer knows of its sizes; its checkpoints are made from them."""
        config, tp = self.config, self.tp_size
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        self.num_key_heads = config.linear_num_key_heads
        self.num_value_heads = config.linear_num_value_heads
        self.qk_dim = self.key_head_dim * self.num_key_heads
        self.v_dim = self.value_head_dim * self.num_value_heads
        self.qk_dim_local_tp, self.v_dim_local_tp = self.qk_dim // tp, self.v_dim // tp
        self._own_heads = self.num_value_heads // tp
        self.in_proj_dim = 2 * self.qk_dim + 2 * self.v_dim + 2 * self.num_value_heads
        self.conv_dim_local_tp = 2 * self.qk_dim_local_tp + self.v_dim_local_tp
        self.conv_bias = False
        self.in_proj_split_names = list(_SECTIONS)
        self.in_proj_split_sections = (
            *(self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp),
            *(self.v_dim_local_tp, self._own_heads, self._own_heads),
        )

    def reset_parameters(self) -> None:
        """Draws convolution and decays for all heads, of which each tensor rank keeps its own.

        Ranges are Megatron's: those of `torch.nn.Conv1d`, and decays of 1 to 16.
        """
        bound = self.conv1d.kernel_size[0] ** -0.5
        taps = self._drawn_like(self.conv1d.weight, -bound, bound)
        decays = self._drawn_like(self.A_log, 1.0, 16.0)
        with torch.no_grad():
            sections = self.in_proj_split_sections[:3]
            self.conv1d.weight.copy_(self._own_part(self._by_rank(taps, sections)))
            self.A_log.copy_(self._own_part(decays).log())

    def _sum_gradients_of_norm(self) -> None:
        """Lets tensor ranks add their gradients of the one norm of all heads.

        Under sequence parallelism Megatron does; without, it sums those of query and key norms alone.
        """
        if self.tp_size == 1 or self.config.sequence_parallel:
            return
        group = self.pg_collection.tp

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.float().contiguous().clone()
            torch.distributed.all_reduce(total, group=group)
            return total.to(gradient.dtype)

        for parameter in self.out_norm.parameters():
            parameter.register_hook(summed)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        attention_bias: torch.Tensor | None = None,
        inference_context: Any = None,
        inference_params: Any = None,
        **positions: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the layer's output `[s, b, hidden]` and its bias, None.

        `hidden_states` is `[s, b, hidden]`, s divided by the tensor ranks under sequence parallelism.
        `attention_mask` is None or the causal mask, as in `ContextParallelAttention`; `packed_seq_params` likewise.
        Positions are not needed: order is in the recurrence.

        Collective: every rank of the context group calls it, forward and backward.
        """
        if attention_bias is not None:
            raise NotImplementedError("attention_bias is for softmax attention; leave it None")
        refuse_inference(inference_context, inference_params)
        projected, _ = self.in_proj(hidden_states)
        stream = self._stream(projected, attention_mask, packed_seq_params)
        channels, others = stream.folded.split(
            [self.conv_dim_local_tp, stream.folded.shape[-1] - self.conv_dim_local_tp], dim=-1
        )
        q, k, v = self._convolved(channels, stream)
        repeats = self.num_value_heads // self.num_key_heads
        q, k = (_of_length_one(x, self.key_head_dim).repeat_interleave(repeats, 1) for x in (q, k))
        decays, beta, gate = self._gates(others)
        out = cp_linear_attention(
            q,
            k,
            v.reshape(len(v), -1, self.value_head_dim),
            stream.plan,
            stream.group,
            document_lengths=stream.document_lengths,
            g=decays,
            beta=beta.sigmoid().flatten(1),
        )
        gated = self.out_norm(out) * gate.reshape(out.shape)
        return self.out_proj(stream.rows.unfold(gated.to(out.dtype)))

    def _convolved(self, channels: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, ...]:
        """Returns q, k and v `[rows, b, ...]` after the short convolution."""
        convolved = cp_causal_conv1d(
            channels.flatten(1),
            weight_of(self.conv1d).squeeze(1).repeat(channels.shape[1], 1),
            stream.plan,
            stream.group,
            document_lengths=stream.document_lengths,
            activation="silu",
        ).view_as(channels)
        return convolved.split(list(self.in_proj_split_sections[:3]), dim=-1)

    def _gates(self, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the logarithm of decays, beta before its sigmoid, and what multiplies the normed output, in fp32.

        `others` is what is projected beside q, k and v, `[rows, b, ...]`.
        """
        z, beta, alpha = others.split(list(self.in_proj_split_sections[3:]), dim=-1)
        decays = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        return decays.flatten(1), beta, F.silu(z.float())


def _of_length_one(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns the heads `[rows, heads, head_dim]`, each of length 1; the epsilon is flash-linear-attention's."""
    heads = x.reshape(len(x), -1, head_dim)
    squares = heads.float().square().sum(-1, keepdim=True)
    return (heads * torch.rsqrt(squares + 1e-6)).to(x.dtype)


def gated_delta_net_layer(
    layer: Any, plain: Any, norm: Any, module: type[ContextGatedDeltaNet] = ContextGatedDeltaNet
) -> Any:
    """Returns the spec of a decoder layer with a gated delta net in place of its attention.

    Args:
        layer: Megatron's spec of the layer; its MLP or experts stay.
        plain: the same with plain attention, whose projections (and norm, where they hold it) are taken.
        norm: module of the norm of heads.
        module: the kind of gated delta net.
    """
    attention, parts = plain.submodules.self_attention.submodules, plain.submodules
    own = GatedDeltaNetSubmodules(
        in_proj=attention.linear_qkv, out_norm=norm, out_proj=attention.linear_proj
    )
    # Where the norm before attention is a module of its own, checkpoints have it under that of the fused one.
    names = dict(layer.submodules.sharded_state_dict_keys_map)
    for name, place in parts.sharded_state_dict_keys_map.items():
        if name.startswith("input_layernorm"):
            names[name] = place.replace("linear_qkv", "in_proj")
    submodules = replace(
        layer.submodules,
        input_layernorm=parts.input_layernorm,
        self_attention=ModuleSpec(
            module=module,
            params={"attn_mask_type": AttnMaskType.causal},  # multi-token prediction asks for it
            submodules=own,
        ),
        sharded_state_dict_keys_map=names,
    )
    return replace(layer, submodules=submodules)
