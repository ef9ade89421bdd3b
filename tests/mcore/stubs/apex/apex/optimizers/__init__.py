import torch


class FusedAdam(torch.optim.AdamW):
    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
        adam_w_mode=True, weight_decay=0.0, amsgrad=False, **options,
    ):  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class FusedSGD(torch.optim.SGD):
    pass
