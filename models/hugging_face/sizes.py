"""The sizes that the letters of the tables of weights stand for.

V vocabulary, H hidden, N query heads, D head width, Q = N x D, K = kv heads x D, F width of the
MLP, M of an expert, G = 2 x M, S of the shared experts, E experts. Multi-latent attention: A and
C low ranks of queries and of keys and values, B = C + rotary width, U and T rows of the two up
projections, O = N x value width. Gated delta nets: J value heads, I width of a value head, L = key
heads x key width, R = J x I, X = 2 x L + 2 x R, Y = 2 x J, Z = 2 x L + R, W taps; P = 2 x Q. Stored
as one: f = 2 x F, q = Q + 2 x K. Prediction layers: h = 2 x H. Mamba-2: a heads, b = a x head width, c groups x
state width, d = b + 2 x c, e = 2 x b + 2 x c + a, w taps; k width of what experts see. Sparse attention: j heads of
its index, i width of one, x = j x i.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_cp.mcore.settings.mixers import MAMBA_TAPS, linear_layers_of, mamba_sizes
from megatron_cp.mcore.settings.sparse_settings import is_sparse
from megatron_cp.models.hugging_face.orders import Sizes

Arguments = dict[str, Any]


def sizes_of(arguments: Arguments) -> Sizes:
    """Returns the sizes that the letters of the tables stand for, and `padded`: the vocabulary's rows."""
    get = arguments.get
    heads, width = arguments["num_attention_heads"], arguments["kv_channels"]
    sizes = {
        "V": arguments["vocab_size"],
        "H": arguments["hidden_size"],
        "N": heads,
        "D": width,
        "Q": heads * width,
        "K": arguments["num_query_groups"] * width,
        "F": arguments["ffn_hidden_size"],
        "M": get("moe_ffn_hidden_size") or 0,
        "G": 2 * (get("moe_ffn_hidden_size") or 0),
        "S": get("moe_shared_expert_intermediate_size") or 0,
        "E": get("num_experts") or 0,
        "P": 2 * heads * width,
        "f": 2 * arguments["ffn_hidden_size"],
        "q": (heads + 2 * arguments["num_query_groups"]) * width,
        "h": 2 * arguments["hidden_size"],
        "1": 1,
        "padded": arguments["padded_vocab_size"],
    }
    if get("multi_latent_attention"):
        sizes |= _latent_sizes(arguments)
    if any(linear_layers_of(arguments)):
        values, key_heads = arguments["linear_num_value_heads"], arguments["linear_num_key_heads"]
        keys = key_heads * arguments["linear_key_head_dim"]
        all_values = values * arguments["linear_value_head_dim"]
        sizes |= {
            "key heads": key_heads,
            "J": values,
            "I": arguments["linear_value_head_dim"],
            "L": keys,
            "R": all_values,
            "X": 2 * keys + 2 * all_values,
            "Y": 2 * values,
            "Z": 2 * keys + all_values,
            "W": arguments["linear_conv_kernel_dim"],
        }
    if get("hybrid_layer_pattern"):
        mamba = mamba_sizes(Namespace(**arguments))
        inner, shared = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
        sizes |= {
            "a": mamba.num_heads,
            "b": inner,
            "c": shared,
            "d": inner + 2 * shared,
            "e": 2 * inner + 2 * shared + mamba.num_heads,
            "w": MAMBA_TAPS,
            "k": get("moe_latent_size") or arguments["hidden_size"],
        }
    return sizes


def _latent_sizes(arguments: Arguments) -> Sizes:
    heads, key_width = arguments["num_attention_heads"], arguments["qk_head_dim"]
    rank, rotary = arguments["kv_lora_rank"], arguments["qk_pos_emb_head_dim"]
    sizes = {
        "A": arguments["q_lora_rank"] or 0,
        "C": rank,
        "B": rank + rotary,
        "U": heads * (key_width + rotary),
        "T": heads * (key_width + arguments["v_head_dim"]),
        "O": heads * arguments["v_head_dim"],
    }
    if is_sparse(Namespace(**arguments)):
        index_heads, width = arguments["dsa_indexer_n_heads"], arguments["dsa_indexer_head_dim"]
        sizes |= {"j": index_heads, "i": width, "x": index_heads * width}
    return sizes
