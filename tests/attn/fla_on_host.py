"""What flash-linear-attention's operator computes, on a CPU, behind its exact signature; and how ours finds it."""

import contextlib

import torch

from megatron_cp.attn import linear_fla


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    """The recurrence, token by token, in float64; checks what the kernels demand. flash-linear-attention 0.6."""
    assert not (use_qk_l2norm_in_kernel or state_v_first or kwargs)
    return _recurrence(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    """The same without beta; flash-linear-attention 0.6."""
    assert g_gamma is None and not (state_v_first or kwargs)
    return _recurrence(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens)


def _recurrence(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    gates = (g,) if beta is None else (g, beta)
    assert all(x.is_contiguous() and x.shape[0] == 1 for x in (q, k, v, *gates))
    assert g.dtype == torch.float32 and initial_state.dtype == torch.float32
    assert initial_state.shape == (len(cu_seqlens) - 1, v.shape[2], q.shape[3], v.shape[3])
    assert cu_seqlens.dtype == torch.int64 and (cu_seqlens.diff() > 0).all()
    assert int(cu_seqlens[-1]) == q.shape[1] and q.shape[2] == v.shape[2]
    q_, k_, v_, g_ = (x[0].double() for x in (q, k, v, g))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs, states, bounds = [], [], cu_seqlens.tolist()
    for run, start in enumerate(bounds[:-1]):
        state = initial_state[run].double()
        for token in range(start, bounds[run + 1]):
            state = state * g_[token].exp()[:, None, None]
            value = v_[token]
            if beta is not None:
                value = value - (state * k_[token][:, :, None]).sum(1)
                value = beta[0, token].double()[:, None] * value
            state = state + k_[token][:, :, None] * value[:, None, :]
            outputs.append(scale * (state * q_[token][:, :, None]).sum(1))
        states.append(state)
    out = torch.stack(outputs)[None].to(v.dtype)
    return out, torch.stack(states).float() if output_final_state else None


@contextlib.contextmanager
def installed(rule=None):
    """Inside, the operators are found, or `rule` in their place, and tensors of a CPU may go to them."""
    names = ("chunk_rule", "why_not", "_verdicts")
    before = {name: getattr(linear_fla, name) for name in names}

    def why_not(k, v, g, beta):
        device = k.device
        return before["why_not"](_OnGpu(k), v, g, beta) if device.type == "cpu" else "no CPU"

    def chunk_rule(is_delta):
        return rule or (chunk_gated_delta_rule if is_delta else chunk_simple_gla)

    linear_fla.chunk_rule, linear_fla.why_not = chunk_rule, why_not
    linear_fla._verdicts = {}
    try:
        yield
    finally:
        vars(linear_fla).update(before)


class _OnGpu:
    """A tensor that says it is on a GPU, and goes to the CPU when it is asked to go there."""

    def __init__(self, x):
        self.dtype, self.shape = x.dtype, x.shape

    class _Device(str):
        type = "cuda"

    device = _Device("cpu")
