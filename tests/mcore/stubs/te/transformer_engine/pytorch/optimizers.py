import torch


class FusedAdam(torch.optim.AdamW):
    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
        adam_w_mode=True, weight_decay=0.0, amsgrad=False, **precision,
    ):  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class FusedSGD(torch.optim.SGD):
    pass


def multi_tensor_applier(op, noop_flag, tensor_lists, *args):
    return op(2048 * 32, noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    total = torch.stack([x.float().square().sum() for x in tensor_lists[0]]).sum().sqrt()
    return total.view(1), torch.zeros(1)


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
