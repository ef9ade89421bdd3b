"""The `flash` backend: few variable-length calls per mask, on any CUDA GPU from compute capability 8.0 on.

    mask -> calls (grouping.py) -> both passes (passes.py) by one operator (operators.py, libraries.py)

Which operator is asked once per kind of call, and a first small trial on the GPU decides (checks.py, trial.py).

Ran on an H100 with torch's operator. On a CPU tests replace the operators by float64 formulas, or run them on tensors
without data.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from torch import Tensor

from megatron_cp.attn.flash.checks import operator_for
from megatron_cp.attn.flash.passes import backward_by, forward_by
from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import AttentionMask


def forward(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in the accumulation dtype, (0, -inf) without keys."""
    operator = operator_for(q_QNH, v_KGH, options, needs_grad=False)
    return forward_by(operator, q_QNH, k_KGH, v_KGH, mask, options)


def backward(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in the accumulation dtype for a given global `lse` and `delta`."""
    operator = operator_for(q_QNH, v_KGH, options, needs_grad=True)
    asked = (q_QNH, k_KGH, v_KGH, lse_QN, delta_QN, mask, options)
    return backward_by(operator, dout_QNH, *asked)
