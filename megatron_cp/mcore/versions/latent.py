"""Latent attention whose queries are not compressed: the keys' latent vector has a norm, queries have none.

So are DeepSeek-V2-Lite and its kin. Megatron-Core before 0.19 builds it from its local layers; since then it wants a
norm before the projection of queries, which Transformer Engine's layers have and these models have not.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class LatentAttentionOfPlainQueries(MLASelfAttention):
    """Megatron's latent attention with the parts that its spec names."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Returns the class of each part. Called by Megatron-Core from 0.19 on."""
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }
