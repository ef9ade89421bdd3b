"""Every order between the compute and the side stream that a transfer needs, said once: a log of fakes.

`test_streams.py` looks for races of real transfers; memory that is used again too early, and a first message that
attention holds up, are no races there.
"""

import contextlib
from types import SimpleNamespace

import pytest

from megatron_cp.comm import streams


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Rows:
    """A tensor as far as its device and the streams that keep its memory."""

    device = "a gpu"

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_stream(self, stream):
        self.log.append(f"{stream.name} keeps {self.name}")


@pytest.fixture
def log(monkeypatch):
    said = []
    compute, side = Stream("compute", said), Stream("side", said)

    @contextlib.contextmanager
    def on(stream):
        said.append(f"on {stream.name}")
        yield
        said.append("on compute")

    module = SimpleNamespace(
        Stream=lambda device, priority: side, current_stream=lambda device: compute, stream=on
    )
    monkeypatch.setattr(streams, "_streams_of", lambda device: module)
    monkeypatch.setattr(streams, "_side_streams", {})
    return said


def chain(num_collectives, log):
    for number in range(1, num_collectives + 1):
        log.append(f"pack and send {number}")
        yield (Rows(f"buffer {number}", log),)
    return "rows"


@pytest.mark.parametrize("num_collectives", [1, 3])
def test_a_transfer_says_every_order_that_it_needs(num_collectives, log):
    inputs = Rows("keys", log), Rows("index", log)
    pending = streams.start_chain(chain(num_collectives, log), num_collectives, inputs)
    started, log[:] = list(log), []
    later = [f"pack and send {number}" for number in range(2, num_collectives + 1)]
    aside = [
        "side waits for compute",  # the rows are there
        "side keeps keys",
        "side keeps index",
        "side keeps buffer 1",
        "on side",
        *later,
        "on compute",
    ]
    # Attention begins behind the first message, not in front of it, and waits for no other.
    assert started == ["pack and send 1", *(aside if later else [])]
    assert pending.wait() == "rows"
    assert log == ([f"compute keeps buffer {num_collectives}"] if later else [])


def test_a_transfer_of_nothing_touches_no_stream(log):
    pending = streams.start_chain(chain(0, log), 0, (Rows("keys", log),))
    assert pending.wait() == "rows" and log == []
