"""Linear layers and norms on one rank; every module has Transformer Engine's `_extra_state`."""

import torch
import torch.nn.functional as F

import transformer_engine
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager


class _Module(torch.nn.Module):
    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def record(self):
        event = (type(self).__name__, FP8GlobalStateManager.is_fp8_enabled())
        transformer_engine.events.append(event)


class Linear(_Module):
    def __init__(
        self, in_features, out_features, *, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True,
        return_bias=False, parallel_mode=None, params_dtype=None, device=None,
        rng_tracker_name=None, **overlap,
    ):  # fmt: skip
        assert tp_size == 1, "the stand-in knows one tensor-parallel rank"
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.tp_size, self.tp_rank, self._tp_group = 1, 0, tp_group
        self.use_bias, self.return_bias = bias, return_bias
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        init_method(self.weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype))

    def set_tensor_parallel_group(self, group):
        self._tp_group = group

    def forward(self, x, is_first_microbatch=None):
        self.record()
        bias = self.bias if self.use_bias else None
        if self.return_bias:
            return F.linear(x, self.weight), bias
        return F.linear(x, self.weight, bias)


class LayerNormLinear(Linear):
    def __init__(
        self, in_features, out_features, *, eps=1e-5, normalization="LayerNorm",
        return_layernorm_output=False, zero_centered_gamma=False, **linear,
    ):  # fmt: skip
        super().__init__(in_features, out_features, **linear)
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features))
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features))

    def forward(self, x, is_first_microbatch=None):
        shape, weight = (self.in_features,), self.layer_norm_weight
        if self.normalization == "LayerNorm":
            x = F.layer_norm(x, shape, weight, self.layer_norm_bias, self.eps)
        else:
            x = F.rms_norm(x, shape, weight, self.eps)
        return super().forward(x, is_first_microbatch)


class GroupedLinear(_Module):
    pass


class DotProductAttention(_Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        del args, kwargs

    def forward(self, *args, **kwargs):
        raise AssertionError("attention is megatron_cp's")


class LayerNorm(torch.nn.LayerNorm):
    def __init__(
        self, normalized_shape=None, eps=1e-5, sequence_parallel=False, params_dtype=None,
        zero_centered_gamma=False, hidden_size=None, device=None, **kernels,
    ):  # fmt: skip
        super().__init__(normalized_shape or hidden_size, eps=eps)


class RMSNorm(torch.nn.RMSNorm):
    def __init__(
        self, normalized_shape=None, eps=1e-5, sequence_parallel=False, params_dtype=None,
        zero_centered_gamma=False, hidden_size=None, device=None, **kernels,
    ):  # fmt: skip
        super().__init__(normalized_shape or hidden_size, eps=eps)
