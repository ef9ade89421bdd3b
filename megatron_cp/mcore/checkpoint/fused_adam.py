"""Adam for Megatron's distributed optimizer where neither Transformer Engine nor apex is installed.

Megatron then falls back to torch's AdamW, whose step count is one tensor per parameter. On resume
the distributed optimizer gives *all* parameters the same tensor, torch advances it once per
parameter, and training goes on silently wrong (measured: loss 4.7571 instead of 4.7471 two steps
later). apex's FusedAdam keeps one count per parameter group; Megatron's code paths for it are
right. This module is that optimizer over torch's own fused kernels, and the switch that makes Megatron use it.

It concerns GPUs without Transformer Engine just as much as CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_cp.mcore.checkpoint.optimizer import repair_padded_buckets
from megatron_cp.mcore.versions import compat, program


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with apex's interface: the step count lives in the parameter group.

    The state of a parameter is `exp_avg` and `exp_avg_sq`, in the parameter's dtype. Bias is
    corrected as in torch.

    Source: Kingma and Ba (arXiv 1412.6980), Loshchilov and Hutter (arXiv 1711.05101).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise NotImplementedError(
                "capturable=True is not served: the step count is a Python number; switch "
                "optimizer_cuda_graph off"
            )
        self.adam_w_mode = adam_w_mode
        # A group that never stepped has its count too: a checkpoint of it is loaded like any other.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Raises:
            ValueError: if a closure is given; Megatron never does.
        """
        if closure is not None:
            raise ValueError(f"closure={closure!r} is not served; call step() without arguments")
        for group in self.param_groups:
            # Counted also for a group without parameters here: groups are compared across ranks.
            group["step"] = int(group.get("step", 0)) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        # torch's kernels read the count of each parameter and do not advance it: one tensor serves all.
        count = torch.full((), group["step"], dtype=torch.float32, device=params[0].device)
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        update(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [count] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def install_fused_adam() -> bool:
    """Returns True if Megatron now builds `FusedAdam`, False where TE or apex serve it.

    Call it before `get_megatron_optimizer`. It calls `repair_padded_buckets`. A second call changes nothing.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    repair_padded_buckets()
    if compat.has_fused_adam() and optimizer.Adam is not FusedAdam:
        return False
    if optimizer.Adam is FusedAdam:
        return True
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    # In fp32 its shards are views of leaf parameters, which it then copies into: needs no_grad.
    plain_load = distrib_optimizer.DistributedOptimizer.load_state_dict

    @functools.wraps(plain_load)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        with torch.no_grad():
            plain_load(self, state_dict)

    distrib_optimizer.DistributedOptimizer.load_state_dict = load_state_dict
    return True


def install_in_program() -> None:
    """Installs it in a Megatron-LM program whose flags ask for the distributed optimizer, built after the model."""
    if getattr(program.arguments(), "use_distributed_optimizer", False):
        install_fused_adam()
