"""FlexAttention as one function of tensors, compiled once per kind of call.

A kind is: number of heads, head dims, dtype, scale, softcap, and one of two numbers of intervals. A model has
one of the former, so that a run compiles at most two graphs per head count, each with its backward pass:
the forward pass is compiled for gradients, too, and the backward pass runs it again. Where torch would fall
back to uncompiled code, which holds all scores in memory, this raises.
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

from megatron_cp.attn.flex.tables import BLOCK_SIZE, Part
from megatron_cp.attn.options import AttendOptions

# Graphs before torch gives up; 8 by default, which models of several softcaps or head counts may pass.
MAX_GRAPHS = 64
fx_config: Any = _fx_config  # its `patch` is made when it is imported
COMPILER: str | Callable[..., Any] = "inductor"

Call = Callable[..., tuple[Tensor, Tensor]]


def call_compiled(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, part: Part, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv] in the dtype of q, lse [Q, N])`, differentiable; (0, -inf) without keys.

    Raises: NotImplementedError where torch.compile is switched off, or has no room for one more graph.
    """
    function = _compiled(options.softmax_scale, options.softcap, COMPILER)
    # A scale is a constant of the graph; a graph for any scale is built and dropped otherwise.
    settings: dict[str, Any] = {
        "recompile_limit": MAX_GRAPHS,
        "suppress_errors": False,
        "specialize_float": True,
    }
    try:
        # Sizes that are equal by chance in the first call are not so in the next.
        with torch._dynamo.config.patch(**settings), fx_config.patch(use_duck_shape=False):
            return function(q_QNH, k_KGH, v_KGH, part.blocks, part.starts, part.ends)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise NotImplementedError(
            f"backend='flex' has compiled {MAX_GRAPHS} graphs, as many as allowed, for other head counts, dtypes, "
            "scales or softcaps; it does not run uncompiled, which holds all scores in memory: use "
            "backend='flash', or call torch._dynamo.reset() between models"
        ) from error


def call_uncompiled(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, part: Part, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns what `call_compiled` does, without gradients, holding all scores: small calls on a CPU."""
    function = _function(options.softmax_scale, options.softcap, compiled=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without torch.compile.*")
        return function(q_QNH, k_KGH, v_KGH, part.blocks, part.starts, part.ends)


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
def _compiled(softmax_scale: float, softcap: float, compiler: str | Callable[..., Any]) -> Call:
    function = _function(softmax_scale, softcap, compiled=True)
    compiled: Call = torch.compile(function, dynamic=True, fullgraph=True, backend=compiler)
    return compiled


def _function(softmax_scale: float, softcap: float, *, compiled: bool) -> Call:
    def attention(
        q_QNH: Tensor,
        k_KGH: Tensor,
        v_KGH: Tensor,
        blocks: tuple[Tensor, ...],
        starts: tuple[Tensor, ...],
        ends: tuple[Tensor, ...],
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
        return out[0].transpose(0, 1), lse[0].t()

    def _cap(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del batch, head, q, k
        return softcap * torch.tanh(score / softcap)

    return attention


def _with_lse(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns `(out, lse)`, asking for lse in the way of this torch (it changed in 2.9)."""
    if hasattr(flex_attention_module, "AuxRequest"):
        request = flex_attention_module.AuxRequest(lse=True)
        out, aux = flex_attention(q, k, v, **arguments, return_aux=request)
        return out, aux.lse
    out, lse = flex_attention(q, k, v, **arguments, return_lse=True)
    return out, lse
