"""How Megatron-Core's gradient buffers are cut."""

from types import SimpleNamespace

from megatron_cp.training.arguments import parse_arguments
from tests.training.commands import SMALL_RUN


def test_buckets_grow_with_the_ranks_that_share_weights_alone(monkeypatch):
    """Megatron-LM's rule; under another, optimizer state that one saves by buckets is none that the other loads."""
    from megatron_cp.training import setup  # after the stand-ins of conftest.py

    monkeypatch.setattr(setup, "DistributedDataParallel", lambda **given: given["ddp_config"])
    chunk = SimpleNamespace(config=None)
    for flags, size in (([], 40_000_000), (["--ddp-bucket-size", "77"], 77)):
        config = parse_arguments([*SMALL_RUN, *flags], {})
        assert setup._wrap(config, chunk, is_first=True).bucket_size == size
    layout = ["--tensor-model-parallel-size", "2", "--context-parallel-size", "4"]
    config = parse_arguments(
        [*SMALL_RUN, *layout, "--global-batch-size", "64"], {"WORLD_SIZE": "512"}
    )
    assert setup._wrap(config, chunk, is_first=True).bucket_size == 256_000_000
