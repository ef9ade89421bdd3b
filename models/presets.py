"""Sizes of known GPTs, as data: what a published configuration says, with its source.

A preset becomes flags (`shape.flags()`, for a script) or a model (`models.gpt.build_gpt`); it
knows nothing of ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """Every number that decides the weights of a decoder-only transformer."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    position: Literal["rope", "learned_absolute", "none"] = "rope"
    rotary_base: int = 10000
    rope_scaling_factor: float | None = None
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-5
    activation: Literal["swiglu", "gelu", "squared_relu"] = "swiglu"
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    window: tuple[int, int] | None = None
    """(left, right) of the sliding window; a query sees itself and `left` keys before it."""
    full_attention_every: int | None = None
    """Layers n, 2n, ... attend in full, the others through the window; None.

    All through the window.
    """
    softmax: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"

    def num_parameters(self) -> int:
        """Parameters of the model, counted from the shape (vocabulary unpadded)."""
        query, key_value = self.num_heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim
        gates = 2 if self.activation == "swiglu" else 1
        matrices = self.hidden_size * (2 * query + key_value)
        matrices += (gates + 1) * self.hidden_size * self.ffn_hidden_size
        norm = self.hidden_size * (1 if self.normalization == "RMSNorm" else 2)
        vectors = 2 * norm
        if self.linear_bias:
            vectors += 2 * self.hidden_size + gates * self.ffn_hidden_size
        if self.linear_bias or self.qkv_bias:
            vectors += query + key_value
        if self.qk_norm:
            vectors += 2 * self.head_dim * (1 if self.normalization == "RMSNorm" else 2)
        if self.softmax == "learnable":
            vectors += self.num_heads
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        if self.position == "learned_absolute":
            embeddings += self.max_positions * self.hidden_size
        return self.num_layers * (matrices + vectors) + norm + embeddings

    def flags(self) -> list[str]:
        """The command line of `pretrain_gpt.py` for this shape, without the vocabulary."""
        flags = [
            f"--num-layers={self.num_layers}",
            f"--hidden-size={self.hidden_size}",
            f"--ffn-hidden-size={self.ffn_hidden_size}",
            f"--num-attention-heads={self.num_heads}",
            f"--kv-channels={self.head_dim}",
            f"--max-position-embeddings={self.max_positions}",
            f"--position-embedding-type={self.position}",
            f"--rotary-base={self.rotary_base}",
            f"--normalization={self.normalization}",
            f"--norm-epsilon={self.norm_epsilon}",
            "--attention-dropout=0.0",
            "--hidden-dropout=0.0",
            f"--softmax-type={self.softmax}",
        ]
        if self.num_kv_heads != self.num_heads:
            flags += ["--group-query-attention", f"--num-query-groups={self.num_kv_heads}"]
        if self.window is not None:
            flags += [f"--window-size={self.window[0]},{self.window[1]}"]
        if self.full_attention_every is not None:
            flags += [f"--window-attn-skip-freq={self.full_attention_every}"]
        if self.rope_scaling_factor is not None:
            flags += ["--use-rope-scaling", f"--rope-scaling-factor={self.rope_scaling_factor}"]
        switches = {
            "--swiglu": self.activation == "swiglu",
            "--squared-relu": self.activation == "squared_relu",
            "--disable-bias-linear": not self.linear_bias,
            "--add-qkv-bias": self.qkv_bias and not self.linear_bias,
            "--qk-layernorm": self.qk_norm,
            "--untie-embeddings-and-output-weights": not self.tied_embeddings,
        }
        return flags + [flag for flag, on in switches.items() if on]

    def as_dict(self) -> dict[str, Any]:
        """The shape as JSON values, for the records of a run."""
        return asdict(self)


# A few million parameters: trains on two CPU cores in minutes. Ours.
TINY = GPTShape(
    num_layers=4,
    hidden_size=192,
    ffn_hidden_size=512,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=4096,
    max_positions=8192,
    tied_embeddings=True,
)

# The smallest GPT-3. Source: Brown et al. 2020, table 2.1 (12 layers, width 768, 12 heads of 64,
# context 2048);
# vocabulary of GPT-2. With GPT-2's own 1024 positions this is GPT-2 small.
GPT_125M = GPTShape(
    num_layers=12,
    hidden_size=768,
    ffn_hidden_size=3072,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    vocab_size=50257,
    max_positions=2048,
    position="learned_absolute",
    normalization="LayerNorm",
    activation="gelu",
    linear_bias=True,
    tied_embeddings=True,
)

# Source: Llama Team 2024 (arXiv 2407.21783), table 3; config.json of meta-llama/Meta-Llama-3-8B.
LLAMA3_8B = GPTShape(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_positions=8192,
    rotary_base=500000,
)

# Source: Yang et al. 2025 (arXiv 2505.09388), table 1; config.json of Qwen/Qwen3-8B-Base.
QWEN3_8B = GPTShape(
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_positions=32768,
    rotary_base=1000000,
    norm_epsilon=1e-6,
    qk_norm=True,
)

# The attention of gpt-oss-20b: alternating 128-token windows and full layers, learned sinks, 64
# heads of 64 over 8
# key/value heads. Its MLP is a mixture of 32 experts of width 2880 with 4 active; this loop trains
# dense models, so the
# MLP here is dense with the width of the active experts (4 x 2880), and its clamped SwiGLU is a
# plain one.
# Source: OpenAI 2025 (arXiv 2508.10925), section 2; config.json of openai/gpt-oss-20b
# (sliding_window 128).
GPT_OSS_20B_DENSE = GPTShape(
    num_layers=24,
    hidden_size=2880,
    ffn_hidden_size=11520,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=201088,
    max_positions=131072,
    rotary_base=150000,
    qkv_bias=True,
    window=(127, 0),
    full_attention_every=2,
    softmax="learnable",
)

PRESETS: dict[str, GPTShape] = {
    "tiny": TINY,
    "gpt-125m": GPT_125M,
    "llama3-8b": LLAMA3_8B,
    "qwen3-8b": QWEN3_8B,
    "gpt-oss-20b-dense": GPT_OSS_20B_DENSE,
}
