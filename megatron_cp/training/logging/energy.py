"""Energy of the GPUs per step, by Megatron-Core's monitor (NVML). It ran on one H100."""

from __future__ import annotations

from megatron.core.energy_monitor import EnergyMonitor


class EnergyMeter:
    """Joules of all GPUs since the last start. Every rank calls every method."""

    def __init__(self) -> None:
        """Starts counting."""
        self._monitor = EnergyMonitor()
        self._monitor.setup()
        self.start()

    def start(self) -> None:
        """Counts from now on."""
        self._monitor.resume()

    def report(
        self, num_steps: int, seconds: float, world_size: int
    ) -> tuple[str, dict[str, float]]:
        """Returns Megatron-LM's fields and keys for steps of `seconds` each. Collective."""
        joules = self._monitor.lap() / num_steps / world_size
        watts = joules / seconds
        line = f" energy per GPU (J/iter/GPU): {joules:.1f} | power per GPU (W/GPU): {watts:.1f} |"
        return line, {"iter-energy/gpu": joules, "power/gpu": watts}
