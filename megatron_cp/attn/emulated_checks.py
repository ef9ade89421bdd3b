"""What the emulated kernels can serve: refused at the call, with what is allowed and who else can."""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from torch import Tensor

from megatron_cp.attn.hopper_checks import DTYPES, forward_variants
from megatron_cp.kernels import build

ABLE = "use backend='cpu' or 'reference'"
NO_BACKWARD = (
    "backend='emulated' has no backward pass yet, only the forward kernel is built; "
    f"{ABLE}, or call under torch.no_grad()"
)


def check_wish(
    q: Tensor, v: Tensor, softmax_scale: float, softcap: float, needs_grad: bool
) -> None:
    """Raises NotImplementedError for a valid call that the kernels do not serve, naming what does."""
    if q.device.type != "cpu":
        raise NotImplementedError(
            f"backend='emulated' cannot compute on device={q.device}, only on cpu; use backend='flex' or 'reference'"
        )
    find_variant(q, v, softcap)
    if softmax_scale < 0:
        raise NotImplementedError(
            f"backend='emulated' cannot use softmax_scale={softmax_scale} < 0; negate q and the scale"
        )
    if needs_grad:
        raise NotImplementedError(NO_BACKWARD)


def find_variant(q: Tensor, v: Tensor, softcap: float) -> build.Variant:
    """Returns the forward kernel of this call. Raises NotImplementedError naming backends that can."""
    if q.dtype not in DTYPES:
        allowed = " and ".join(str(dtype) for dtype in DTYPES)
        raise NotImplementedError(
            f"backend='emulated' cannot compute dtype={q.dtype}, only {allowed}; cast q, k and v, or {ABLE}"
        )
    key = (DTYPES[q.dtype], q.shape[-1], v.shape[-1], softcap > 0)
    variant = forward_variants().get(key)
    if variant is None:
        pairs = sorted({(h, hv) for _, h, hv, _ in forward_variants()})
        raise NotImplementedError(
            f"backend='emulated' has no kernel for head_dim={key[1]} with a value head_dim={key[2]}, only for "
            f"{', '.join(str(pair) for pair in pairs)}; {ABLE}"
        )
    return variant
