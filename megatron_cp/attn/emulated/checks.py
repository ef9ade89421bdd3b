"""What the emulated kernels can serve: refused at the call, with what is allowed and who else can."""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from torch import Tensor

from megatron_cp.attn.features import Feature
from megatron_cp.attn.hopper import checks as hopper_checks
from megatron_cp.attn.hopper.checks import Refuser

# The same kernels as those of hopper: the same limits, other ways out.
EMULATED = Refuser("emulated", "backend='cpu' or 'reference'")


def check_supported(
    q: Tensor, v: Tensor, softmax_scale: float, feature: Feature, needs_grad: bool
) -> tuple[int, int]:
    """Returns the dims of the kernels that serve a call, as `hopper.checks.built_dims`.

    Raises NotImplementedError for a valid call that the kernels do not serve, naming what does.
    """
    if q.device.type != "cpu":
        raise NotImplementedError(
            f"backend='emulated' cannot compute on device={q.device}, only on cpu; use backend='flex' or 'reference'"
        )
    asked = (q.dtype, q.shape[2], v.shape[2], feature, needs_grad)
    dims = hopper_checks.built_dims(*asked, EMULATED)
    if softmax_scale < 0:
        raise NotImplementedError(
            f"backend='emulated' cannot use softmax_scale={softmax_scale} < 0; negate q and the scale"
        )
    return dims
