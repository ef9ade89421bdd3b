"""What recomputed layers start from waits on the host; a CPU stands for a device whose memory is another."""

from unittest import mock

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from tests.mcore.packs import SEQUENCE
from tests.mcore.tiny_gpt import Case, Trainer, make_config, parallel_state, train
from tests.ranks import run_on_ranks

RECOMPUTED = {
    "layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "two layers at once": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "attention": {"recompute_granularity": "selective"},
}


def _train_from_the_host(rank, world_size, case):
    """Losses and norms; shapes of what was put away; how much of it was still held when the first came back."""
    from megatron_cp.runtime import host_memory

    shapes, held, left = [], [], []
    plain_put, plain_back = host_memory.put_away, host_memory.Away.back

    def put_away(tensor):
        shapes.append(tuple(tensor.shape))
        held.append(StorageWeakRef(tensor.untyped_storage()))
        return plain_put(tensor)

    def back(away):
        left.append(sum(not ref.expired() for ref in held))
        return plain_back(away)

    with (
        mock.patch.object(host_memory, "_is_elsewhere", lambda device: True),
        mock.patch.object(host_memory, "put_away", put_away),
        mock.patch("megatron_cp.runtime.checkpoint.put_away", put_away),
        mock.patch.object(host_memory.Away, "back", back),
        parallel_state(case) as groups,
    ):
        from megatron_cp.mcore.memory.recompute_inputs import offload_recompute_inputs

        trainer = Trainer(case, groups)
        for chunk in trainer.chunks:
            offload_recompute_inputs(chunk.module)
        steps = [trainer.step() for _ in range(case.steps)]
    return steps, shapes, left[0]


@pytest.mark.parametrize("what", RECOMPUTED)
@pytest.mark.parametrize("cp", [1, 2])
def test_a_run_is_the_same_and_its_activations_leave_the_device(what: str, cp: int):
    case = Case(attention="planned", cp=cp, steps=2).with_options(**RECOMPUTED[what])
    expected = run_on_ranks(cp, train, case)
    found = run_on_ranks(cp, _train_from_the_host, case)
    rows, micro_batches = SEQUENCE // cp, 2 * case.steps
    attended = [(rows, 4, 16), (rows, 4)]  # out and lse
    inputs = {
        "layers": [(rows, 1, 64)] * 2,
        "two layers at once": [(rows, 1, 64)],
        "attention": [(rows, 1, 4, 16), (rows, 1, 2, 16), (rows, 1, 2, 16)] * 2,
    }[what]
    for (steps, shapes, still_held), plain in zip(found, expected, strict=True):
        assert steps == plain  # bit by bit
        assert sorted(shapes) == sorted(micro_batches * (inputs + 2 * attended))
        if what != "attention":  # the projection behind it keeps its result
            assert still_held == 0


def _refused(rank, world_size, options):
    from types import SimpleNamespace

    config = make_config(Case().with_options(**options))
    from megatron_cp.mcore.memory.recompute_inputs import offload_recompute_inputs

    config.fp8 = "hybrid" if config.recompute_granularity == "full" else None
    config.overlap_moe_expert_parallel_comm = True
    with pytest.raises((ValueError, NotImplementedError)) as refusal:
        offload_recompute_inputs(SimpleNamespace(config=config, forward=None))
    return str(refusal.value)


def test_what_it_cannot_do_is_refused():
    (said,) = run_on_ranks(1, _refused, {})
    assert "recompute_granularity=None recomputes nothing" in said
    (said,) = run_on_ranks(1, _refused, RECOMPUTED["layers"])
    assert "in fp8 or fp4" in said
    (said,) = run_on_ranks(1, _refused, RECOMPUTED["attention"])
    assert "beside overlap_moe_expert_parallel_comm" in said
