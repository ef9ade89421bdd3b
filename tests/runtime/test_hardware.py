"""A row of hardware that is not the GPU's is told once, and nothing else is."""

import pytest
import torch

from megatron_cp.plan.hardware.topology import TOPOLOGIES, get_topology
from megatron_cp.runtime import hardware

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("topology", "name", "is_told"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", False),
        ("h100", "NVIDIA H100 PCIe", True),
        ("h100", "NVIDIA H100 NVL", True),
        ("h100", "NVIDIA H200", True),
        ("h200", "NVIDIA H200", False),
        ("h100", "NVIDIA B200", True),
        ("a800", "NVIDIA A100-SXM4-80GB", False),
        ("h100", "NVIDIA GeForce RTX 4090", True),
        ("cpu", "NVIDIA H100 80GB HBM3", True),
        (get_topology("h100"), "NVIDIA B200", False),
    ],
)
def test_plans_for_another_gpu_are_told_once(monkeypatch, caplog, topology, name, is_told):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    hardware.tell_of_other_hardware.cache_clear()
    for _ in range(3):
        hardware.tell_of_other_hardware(topology, GPU)
    assert len(caplog.records) == is_told
    for record in caplog.records:
        assert (
            name in record.getMessage() and "python -m megatron_cp measure" in record.getMessage()
        )


def test_every_row_of_a_gpu_knows_its_name():
    assert set(hardware.GPUS_OF) == set(TOPOLOGIES) - {"cpu"}
