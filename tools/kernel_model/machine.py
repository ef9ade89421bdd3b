"""What the model assumes of the machine. Two sets: figures are given under both, as a band.

How many products may wait for the tensor cores and what each step costs is not documented; `DEFAULT` is kind
and `TIGHT` is not. None of this was measured by us.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Cycles, unless said otherwise; of a quarter of a multiprocessor (SM), unless said otherwise."""

    mufu_interval: int = 8  # exponentials: 16 lanes a cycle and SM
    mufu_latency: int = 22
    alu_interval: int = 2  # maxima, conversions, integers: 16 lanes
    fma_interval: int = 1  # 32 lanes
    imad_interval: int = 2
    shuffle_interval: int = 2
    shuffle_latency: int = 24
    shared_latency: int = 30
    constant_latency: int = 30
    register_latency: int = 20  # special registers
    global_latency: int = 500  # from the second-level cache
    wait_latency: int = 22  # a try_wait that succeeds
    barrier_latency: int = 16  # from the last arrival to the first instruction after it
    fence_latency: int = 20
    read_latency: int = 10  # until a memory instruction has read its operands
    result_latency: int = 4  # of what has no entry above
    product_start: int = 14  # from a product's issue to its first cycle in the tensor cores
    product_drain: int = 24  # from its last cycle to the end of the wait for it
    product_queue: int = 4  # products of one warp that may wait for the tensor cores
    shared_bytes: int = 128  # a cycle and SM
    product_flops: int = 4096  # a cycle and SM, 16-bit operands


DEFAULT = Machine()
TIGHT = Machine(
    product_queue=1, product_start=30, product_drain=40, mufu_latency=26, barrier_latency=30
)
MACHINES = {"default": DEFAULT, "tight": TIGHT}

_PIPES = {
    "mufu": "MUFU",
    "fma": "FFMA FMUL FADD",
    "imad": "IMAD",
    "alu": (
        "FMNMX FMNMX3 F2FP FSEL FSETP ISETP SEL LOP3 IADD3 VIADD VIMNMX LEA SHF PLOP3 PRMT MOV I2FP"
    ),
    "mio": "SHFL LDS STS STSM LDSM",
}
PIPE = {base: pipe for pipe, bases in _PIPES.items() for base in bases.split()}
