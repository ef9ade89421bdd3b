"""What cannot be computed a few rows at a time is refused, before it trains on anything wrong."""

from types import SimpleNamespace

import pytest
import torch

from tests.mcore.tiny_gpt import Case, Trainer, enter_megatron, parallel_state
from tests.ranks import run_on_ranks


def _said_of_dropout(rank, world_size, case):
    with parallel_state(case) as groups:
        from megatron_cp.mcore import chunk_mlps

        trainer = Trainer(case, groups)
        (model,) = (chunk.module for chunk in trainer.chunks)
        chunk_mlps(model, 3)
        mlp = model.decoder.layers[0].mlp
        mlp.linear_fc2.adapter = torch.nn.Dropout(0.1)  # put there later, by another library
        with pytest.raises(NotImplementedError) as refusal:
            trainer.step()
        mlp.linear_fc2.adapter.p = 0.0
        assert trainer.step()[0] > 0
        return str(refusal.value)


def test_an_adapter_that_drops_at_random_is_refused():
    (said,) = run_on_ranks(1, _said_of_dropout, Case(attention="planned"))
    assert "an MLP in chunks with dropout inside" in said


def _refused(rank, world_size, fields):
    config = SimpleNamespace(
        **{"use_mup": False, "defer_embedding_wgrad_compute": False, "fp8": None, **fields}
    )
    enter_megatron()
    from megatron.core.transformer.mlp import MLP

    from megatron_cp.mcore import chunk_loss, chunk_mlps

    mlp = MLP.__new__(MLP)
    torch.nn.Module.__init__(mlp)
    mlp.config, mlp.forward = config, None
    said = []
    for call in (
        lambda: chunk_loss(SimpleNamespace(config=config, post_process=True), 8),
        lambda: chunk_mlps(mlp, 2),
        lambda: chunk_loss(SimpleNamespace(config=config, post_process=True), 0),
        lambda: chunk_mlps(mlp, 0),
    ):
        try:
            call()
            said.append("")
        except (ValueError, NotImplementedError) as refusal:
            said.append(f"{type(refusal).__name__}: {refusal}")
        except AttributeError:
            said.append("")  # it is accepted, and the stub has no layer
    return said


@pytest.mark.parametrize(
    ("fields", "loss", "mlps"),
    [
        ({"use_mup": True}, "beside use_mup", ""),
        ({"defer_embedding_wgrad_compute": True}, "beside use_mup or defer_embedding", ""),
        ({"fp8": "hybrid"}, "", "MLPs in chunks in fp8"),
        ({"delay_wgrad_compute": True}, "", "MLPs in chunks beside delay_wgrad_compute"),
    ],
)
def test_what_cannot_be_done_in_chunks_is_refused(fields, loss, mlps):
    ((of_loss, of_mlps, no_row, no_part),) = run_on_ranks(1, _refused, fields)
    assert loss in of_loss and bool(of_loss) == bool(loss)
    assert mlps in of_mlps and bool(mlps) == ("NotImplementedError" in of_mlps)
    assert no_row.startswith("ValueError") and no_part.startswith("ValueError")


def test_a_model_that_has_none_of_megatrons_mlps_is_refused():
    enter_megatron()
    from megatron_cp.mcore import chunk_mlps

    with pytest.raises(TypeError, match="model=Sequential is no module of Megatron-Core"):
        chunk_mlps(torch.nn.Sequential(torch.nn.Linear(2, 2)), 2)


def test_an_mlp_of_another_class_is_refused_and_shared_experts_stay():
    enter_megatron()
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    from megatron_cp.mcore import chunk_mlps

    class FusedMLP(MLP):
        """As Transformer Engine's, which runs no part of Megatron's forward."""

    for kind in (SharedExpertMLP, FusedMLP):
        mlp = kind.__new__(kind)
        torch.nn.Module.__init__(mlp)
        if kind is SharedExpertMLP:
            chunk_mlps(mlp, 2)
            assert "forward" not in vars(mlp)
            continue
        with pytest.raises(NotImplementedError, match="an MLP of the class FusedMLP in chunks"):
            chunk_mlps(mlp, 2)
