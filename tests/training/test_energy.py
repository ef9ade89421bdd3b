"""Energy per step, with a meter in place of NVML."""

import sys
import types

from tests.child import fresh_process


class Meter(types.ModuleType):
    """What Megatron-Core imports of pynvml; each reading is 3 J more."""

    NVMLError = RuntimeError
    millijoules = 0

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    nvmlShutdown = nvmlInit  # noqa: N815

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self.millijoules += 3000
        return self.millijoules


def _joules_and_watts():
    """What the meter reports of steps; Megatron-Core looks for NVML once, when it is imported."""
    sys.modules["pynvml"] = Meter("pynvml")
    from megatron_cp.mcore import cpu

    cpu.install()
    import torch.distributed as dist

    from megatron_cp.training.logging.energy import EnergyMeter

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        meter = EnergyMeter()
        first = meter.report(num_steps=2, seconds=0.5, world_size=1)
        meter.start()  # what an evaluation used is not that of a step
        return first, meter.report(num_steps=3, seconds=1.0, world_size=1)
    finally:
        dist.destroy_process_group()


def test_joules_and_watts_are_those_of_a_step_on_one_gpu():
    with fresh_process() as call:
        (line, row), (_, later) = call(_joules_and_watts)
    assert row == {"iter-energy/gpu": 1.5, "power/gpu": 3.0}
    assert line == " energy per GPU (J/iter/GPU): 1.5 | power per GPU (W/GPU): 3.0 |"
    assert later["iter-energy/gpu"] == 1.0
