"""A `Driver` over the emulator: the launches of the Hopper backend run the kernels' own source on the CPU."""

from dataclasses import dataclass

from megatron_cp.attn.emulated.machine import source_of
from megatron_cp.kernels import build
from megatron_cp.kernels.emulator import library


@dataclass
class EmulatedDriver:
    """Has the methods of `Driver`; an image is the name of its variant."""

    seed: int = 1
    num_blocks: int = 3

    def __post_init__(self) -> None:
        self.kernels: list[library.Kernel] = []

    def load_kernel(self, image: bytes, name: str, shared_bytes: int, device: int) -> int:
        variant = build.variants()[image.decode()]
        assert variant.entry == name
        self.kernels.append(library.load(source_of(variant)))
        return len(self.kernels)

    def ensure_context(self, device: int) -> None:
        assert device == 0

    def encode_tensor_map(self, dtype, address, sizes, stride_bytes, box, swizzled=True) -> bytes:
        swizzle = 3 if swizzled else 0
        return self.kernels[0].encode_tiled(
            dtype, address, sizes, stride_bytes, box, swizzle=swizzle
        )

    def launch(self, kernel, num_blocks, num_threads, shared_bytes, stream, params) -> None:
        blocks = min(num_blocks, self.num_blocks)
        machine = library.Machine(blocks, num_threads, shared_bytes, seed=self.seed)
        self.kernels[kernel - 1].run(params, machine)
