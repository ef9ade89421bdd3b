import torch
import torch.nn.functional as F


class FusedLayerNormAffineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps, memory_efficient=False):
        raise AssertionError("named in Megatron's inspection of the arguments alone")

    @classmethod
    def apply(cls, x, weight, bias, shape, eps, memory_efficient=False):
        return F.layer_norm(x, shape, weight, bias, eps)
