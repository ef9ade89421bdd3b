"""An optimizer's state is that of one kind of optimizer."""

import pytest

from tests.ranks import run_on_ranks
from tests.training.test_checkpoint_formats import FOLDER, refused, resume, save_and_go_on


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_another_kind_of_optimizer_is_refused_with_the_flags_that_differ(tmp_path, form: str):
    """Adam's state was taken for that of SGD from the format torch, up to the first step."""
    shards, sgd = "--use-distributed-optimizer", ("--optimizer", "sgd")
    kinds = {"plain": (), "sharded": (shards,), "sgd": sgd}
    for name, flags in kinds.items():
        run_on_ranks(1, save_and_go_on, str(tmp_path / name), ("--ckpt-format", form, *flags))
    fresh = "or give --no-load-optim to go on with a fresh optimizer"
    told = {
        ("plain", "sharded"): f"without {shards}; drop {shards}, {fresh}",
        ("sharded", "plain"): f"with {shards}; give {shards}, {fresh}",
        ("plain", "sgd"): f"with --optimizer adam; give --optimizer adam, {fresh}",
        ("sgd", "plain"): f"with --optimizer sgd; give --optimizer sgd, {fresh}",
        ("sharded", "sgd"): (
            f"with --optimizer adam and with {shards}; give --optimizer adam and give {shards}, {fresh}"
        ),
    }
    for (saved, run), words in told.items():
        text = refused(tmp_path / saved, *kinds[run])
        assert text == f"{tmp_path / saved / FOLDER} was saved {words}"
        run_on_ranks(1, resume, str(tmp_path / saved), (*kinds[run], "--no-load-optim"))
