"""Runs that nothing has launched stand beside each other on one machine."""

import os

from torch.distributed import TCPStore


def test_each_run_of_one_rank_has_a_port_of_its_own_and_says_which(monkeypatch):
    from megatron_cp.training import setup  # after the stand-ins of conftest.py

    monkeypatch.setenv("MASTER_ADDR", "localhost")
    stores, ports = [], []
    for run in ("first", "second"):
        monkeypatch.delenv("MASTER_PORT", raising=False)
        stores.append(setup._store(1))
        ports.append(int(os.environ["MASTER_PORT"]))
        stores[-1].set("run", run)
    read = [TCPStore("localhost", port, is_master=False).get("run") for port in ports]
    assert read == [b"first", b"second"]
    assert setup._store(1) is None  # the port was given: torch takes it
