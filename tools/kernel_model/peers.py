"""FlashAttention-3's kernels, read from a library that somebody else built, for a comparison under one model.

`flash_attn_3/_C.so` of the wheel xformers 0.0.34 has them. A kernel is found by the part of its name that holds
its template arguments: tiles of queries and keys, head dim, then switches (causal first).
"""

from dataclasses import dataclass

from tools.kernel_model.kernels import Shape

_ONE = "1CILi1EEES{n}_S{n}_EEENS{t}_IJ"
_FORWARD = "MainloopFwdSm90ILi2EN4cute5tupleIJNS5_" + _ONE.format(n=8, t=6)
_TYPE = "ENS_10bfloat16_tEfNS_4arch4Sm90E"
_NO, _YES = "Lb0E", "Lb1E"
_FULL, _CAUSAL = _NO * 5, _YES + _NO * 4


@dataclass(frozen=True)
class Peer:
    """One kernel of the library: what its name contains, and what it computes."""

    name: str
    fragment: str
    shape: Shape


def _forward(*numbers: int, switches: str, consumers: int = 2, turns: bool = True) -> Peer:
    block_m, block_n, head_dim = numbers
    sides = "".join(
        "SA_" if at and value == block_m else f"NS7_ILi{value}EEE"
        for at, value in enumerate(numbers)
    )
    fragment = f"{_FORWARD}{sides}EEELi{head_dim}{_TYPE}{switches}"
    kind = "causal" if switches == _CAUSAL else "full"
    shape = Shape(False, block_m, block_n, head_dim, consumers, turns)
    return Peer(f"fa3_fwd_{head_dim}_{kind}", fragment, shape)


def _backward(*numbers: int, stages: str, switches: str) -> Peer:
    block_m, block_n, head_dim = numbers
    seen: dict[int, str] = {}
    sides = ""
    for value in numbers:
        sides += seen.get(value, f"NS7_ILi{value}EEE")
        seen.setdefault(value, "S" + "ABCD"[len(seen)] + "_")
    one = f"MainloopBwdSm90{stages}N4cute5tupleIJNS5_" + _ONE.format(n=8, t=6)
    kind = "causal" if switches == _CAUSAL else "full"
    shape = Shape(True, block_m, block_n, head_dim)
    return Peer(f"fa3_bwd_{head_dim}_{kind}", f"{one}{sides}EEE{_TYPE[1:]}{switches}", shape)


_TWO, _ONE_STAGE = "ILi2ELi2ELi2E", "ILi2ELi1ELi1E"
PEERS = (
    _forward(192, 192, 64, switches=_FULL, consumers=3),
    _forward(192, 128, 64, switches=_CAUSAL, consumers=3),
    _forward(128, 176, 128, switches=_FULL),
    _forward(128, 128, 128, switches=_CAUSAL),
    _forward(128, 80, 256, switches=_FULL, turns=False),
    _forward(128, 80, 256, switches=_CAUSAL, turns=False),
    _backward(128, 128, 64, stages=_TWO, switches=_FULL),
    _backward(128, 128, 64, stages=_TWO, switches=_CAUSAL),
    _backward(80, 128, 128, stages=_TWO, switches=_FULL),
    _backward(64, 128, 128, stages=_TWO, switches=_CAUSAL),
    _backward(64, 80, 256, stages=_ONE_STAGE, switches=_FULL),
)
