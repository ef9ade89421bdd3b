"""Recipes of scaling, as documented."""

import enum
from dataclasses import dataclass


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Recipe:
    pass


class DelayedScaling(Recipe):
    def __init__(
        self, margin=0, fp8_format=Format.HYBRID, amax_history_len=1024, amax_compute_algo="max",
        override_linear_precision=(False, False, False), fp8_dpa=False, fp8_mha=False, **ignored,
    ):  # fmt: skip
        self.fp8_format, self.fp8_dpa, self.fp8_mha = fp8_format, fp8_dpa, fp8_mha


@dataclass
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
