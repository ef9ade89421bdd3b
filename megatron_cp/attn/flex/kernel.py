"""FlexAttention as one function of tensors, compiled once per kind of call.

A kind is: number of heads, head dims, dtype, scale, softcap, dropout, and one of two numbers of intervals. A model has
one of the former, so that a run compiles at most two graphs per head count, each with its backward pass:
the forward pass is compiled for gradients, too, and the backward pass runs it again. Where torch would fall
back to uncompiled code, which holds all scores in memory, this raises.

FlexAttention changes scores, not probabilities, so dropout takes two of its calls, one over all pairs and one over
those that are kept:

    out = out_kept * exp(lse_kept - lse) / (1 - dropout_p)
"""

# Q padded query rows, K padded key rows, N query heads, G kv heads, H head dim, Hv value head dim

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as _fx_config
from torch.nn.attention import flex_attention as flex_attention_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_cp.attn.dropout import keeps, threshold
from megatron_cp.attn.flex.tables import BLOCK_SIZE, Part
from megatron_cp.attn.options import AttendOptions

# Graphs before torch gives up; 8 by default, which models of several softcaps or head counts may pass.
MAX_GRAPHS = 64
fx_config: Any = _fx_config  # its `patch` is made when it is imported
COMPILER: str | Callable[..., Any] = "inductor"

Call = Callable[..., tuple[Tensor, Tensor]]
Words = tuple[Tensor, ...]
"""Of dropout: int32 of rows `[N, Q]` and of keys `[K]`; or none."""


def call_compiled(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, part: Part, options: AttendOptions, words: Words
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv] in the dtype of q, lse [Q, N])`, differentiable; (0, -inf) without keys.

    Raises: NotImplementedError where torch.compile is switched off, or has no room for one more graph.
    """
    dropout_p = options.dropout_p if words else 0.0
    function = _compiled(options.softmax_scale, options.softcap, dropout_p, COMPILER)
    # A scale is a constant of the graph; a graph for any scale is built and dropped otherwise.
    settings: dict[str, Any] = {
        "recompile_limit": MAX_GRAPHS,
        "suppress_errors": False,
        "specialize_float": True,
    }
    try:
        # Sizes that are equal by chance in the first call are not so in the next.
        with torch._dynamo.config.patch(**settings), fx_config.patch(use_duck_shape=False):
            return function(q_QNH, k_KGH, v_KGH, part.blocks, part.starts, part.ends, words)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise NotImplementedError(
            f"backend='flex' has compiled {MAX_GRAPHS} graphs, as many as allowed, for other head counts, dtypes, "
            "scales, softcaps or dropout rates; it does not run uncompiled, which holds all scores in memory: use "
            "another backend, or call torch._dynamo.reset() between models"
        ) from error


def call_uncompiled(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, part: Part, options: AttendOptions, words: Words
) -> tuple[Tensor, Tensor]:
    """Returns what `call_compiled` does, without gradients, holding all scores: small calls on a CPU."""
    dropout_p = options.dropout_p if words else 0.0
    function = _function(options.softmax_scale, options.softcap, dropout_p, compiled=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without torch.compile.*")
        return function(q_QNH, k_KGH, v_KGH, part.blocks, part.starts, part.ends, words)


def block_mask(
    blocks: tuple[Tensor, ...], starts: tuple[Tensor, ...], ends: tuple[Tensor, ...], sizes: Any
) -> BlockMask:
    """Returns the BlockMask of a part's tables for `sizes = (Q, K)`."""

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del batch, head  # one mask serves all
        allowed = (starts[0][q] <= k) & (k < ends[0][q])
        for start, end in zip(starts[1:], ends[1:], strict=True):
            allowed = allowed | ((start[q] <= k) & (k < end[q]))
        return allowed

    make: Callable[..., BlockMask] = BlockMask  # eight tensors in the order of its constructor
    return make(sizes, *blocks, BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE), mask_mod=sees)


@lru_cache(maxsize=MAX_GRAPHS)
def _compiled(
    softmax_scale: float, softcap: float, dropout_p: float, compiler: str | Callable[..., Any]
) -> Call:
    function = _function(softmax_scale, softcap, dropout_p, compiled=True)
    compiled: Call = torch.compile(function, dynamic=True, fullgraph=True, backend=compiler)
    return compiled


def _function(softmax_scale: float, softcap: float, dropout_p: float, *, compiled: bool) -> Call:
    def attention(
        q_QNH: Tensor,
        k_KGH: Tensor,
        v_KGH: Tensor,
        blocks: tuple[Tensor, ...],
        starts: tuple[Tensor, ...],
        ends: tuple[Tensor, ...],
        words: Words,
    ) -> tuple[Tensor, Tensor]:
        if compiled and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "backend='flex' runs compiled only, and torch.compile is switched off here (TORCHDYNAMO_DISABLE, "
                "set_stance): uncompiled it holds all scores in memory; switch it on, or use backend='flash' or "
                "'reference'"
            )
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_QNH, k_KGH, v_KGH))
        mask = block_mask(blocks, starts, ends, (q.shape[2], k.shape[2]))
        arguments: dict[str, Any] = {
            "score_mod": _cap if softcap else None,
            "block_mask": mask,
            "scale": softmax_scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        out, lse = _with_lse(q, k, v, arguments)
        if dropout_p:
            arguments["score_mod"] = _kept(*words)
            kept = _rescaled(*_with_lse(q, k, v, arguments), lse)
            # Inductor (torch 2.11) cannot differentiate a call of which lse alone is used; so a zero is, too.
            out = kept + 0.0 * out
        return out[0].transpose(0, 1), lse[0].t()

    def _cap(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del batch, head, q, k
        return softcap * torch.tanh(score / softcap)

    def _kept(rows_NQ: Tensor, keys_K: Tensor) -> Callable[..., Tensor]:
        """Returns how scores become those of a softmax over the kept pairs."""

        def keep(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if softcap:
                score = _cap(score, batch, head, q, k)
            kept = keeps(rows_NQ[head, q], keys_K[k], threshold(dropout_p))
            return torch.where(kept, score, -torch.inf)

        return keep

    def _rescaled(out: Tensor, kept_lse: Tensor, lse: Tensor) -> Tensor:
        """Returns `out` over the kept pairs, brought from their softmax to that over all pairs."""
        shift = (kept_lse - lse).masked_fill(kept_lse == -torch.inf, -torch.inf)
        weight = torch.exp(shift) / (1.0 - dropout_p)
        return (out * weight.unsqueeze(-1)).to(out.dtype)

    return attention


def _with_lse(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns `(out, lse)`, asking for lse in the way of this torch (it changed in 2.9)."""
    if hasattr(flex_attention_module, "AuxRequest"):
        request = flex_attention_module.AuxRequest(lse=True)
        out, aux = flex_attention(q, k, v, **arguments, return_aux=request)
        return out, aux.lse
    out, lse = flex_attention(q, k, v, **arguments, return_lse=True)
    return out, lse
