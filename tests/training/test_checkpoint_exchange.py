"""Weights between Megatron's own layers, Transformer Engine's and ours: the rows of the table in docs/megatron.md.

Transformer Engine is not installed here. Its side is a checkpoint, or a module, with the names and values that
`tests/training/checkpoints.py` lists by hand.
"""

import contextlib
import io
from pathlib import Path

import pytest
import torch

from tests.faults.program import Launch, run_program
from tests.ranks import run_on_ranks
from tests.training import checkpoints as made
from tests.training.commands import SMALL_RUN, metrics

FINETUNE = ("--finetune",)


def load_into_ours(rank, world_size, folder, *flags):
    """Loads a checkpoint into our model; returns its weights and what was said."""
    said = io.StringIO()
    with made.run_state("--load", folder, *flags) as state, contextlib.redirect_stdout(said):
        from megatron_cp.training.checkpoint.load import load_checkpoint

        assert load_checkpoint(state)
        return made.weights_of(state), said.getvalue()


def load_from_dist(rank, world_size, folder, layers, kind):
    """Writes by hand, with the keys that both kinds of layers have in torch_dist, and loads."""
    with made.parallel_state(made.Case()):
        made.allow_children()
        extra = made.extra_states(kind) if layers == "Transformer Engine" else {}
        extra |= {"rerun_state_machine_state": {"mode": "disabled"}}  # as Megatron-LM saves it
        made.write_dist(Path(folder), made.stacked(made.fused_weights()), extra)
    return load_into_ours(rank, world_size, folder, *FINETUNE)


@pytest.mark.parametrize(
    ("layers", "kind"),
    [("local", ""), ("Transformer Engine", "version 1"), ("Transformer Engine", "version 2")],
)
def test_a_torch_dist_checkpoint_of_either_layers_loads_into_ours(tmp_path, layers, kind):
    ((weights, said),) = run_on_ranks(1, load_from_dist, str(tmp_path), layers, kind)
    expected = made.local_weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert said.count("note: the state of Megatron-LM's rerun machine is not loaded") == 1
    assert ("_extra_state entries hold no fp8 state" in said) == bool(kind)


OF_TWO_NAMES = {
    "experts": "--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq 2 --use-distributed-optimizer "
    "--dist-ckpt-optim-fully-reshardable",
    "latent attention": "--multi-latent-attention --q-lora-rank 16 --qk-layernorm",
}


@pytest.mark.parametrize("model", OF_TWO_NAMES)
def test_a_run_of_transformer_engines_layers_goes_on_in_local_ones_with_its_optimizer(
    tmp_path: Path, model: str
):
    """Norms before experts and of latent attention have other names there, in torch_dist too."""
    latent = model == "latent attention"
    base = [word for word in SMALL_RUN if not (latent and word == "--group-query-attention")]
    run = (*base, *OF_TWO_NAMES[model].split(), "--untie-embeddings-and-output-weights")
    saves = ("--save", str(tmp_path / "te"), "--save-interval", "2", "--save-retain-interval", "2")
    loads = ("--load", str(tmp_path / "te"), "--ckpt-step", "2", "--run-dir", str(tmp_path / "on"))
    plant = "tests.faults.plants.saves_as_transformer_engine"
    for launch in (Launch((*run, *saves), plant=plant), Launch((*run, *loads))):
        ((rank,),) = run_program([launch])
        assert rank.code == 0, rank.stderr[-3000:]
    for key in ("lm loss", "grad-norm"):
        whole, found = metrics(tmp_path / "te", key), metrics(tmp_path / "on", key)
        assert found == {step: whole[step] for step in (3, 4)}, key


@pytest.mark.parametrize(
    ("layers", "kind"),
    [("local", ""), ("Transformer Engine", "version 1"), ("Transformer Engine", "version 2")],
)
def test_a_torch_checkpoint_of_either_layers_loads_into_ours(tmp_path, layers, kind):
    weights = made.fused_weights() | made.extra_states(kind) if kind else made.local_weights()
    made.write_legacy(tmp_path, weights)
    ((found, said),) = run_on_ranks(1, load_into_ours, str(tmp_path), *FINETUNE)
    expected = made.local_weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    count = len(made.extra_states(kind)) if kind else 0
    assert (f"{count} _extra_state entries hold no fp8 state" in said) == bool(kind)
    assert "is in the format torch and is read as such" in said


def train_by_megatron(rank, world_size, folder, form, adam):
    """Trains Megatron's own layers and saves by Megatron-Core and torch alone; goes on with our loop."""
    with pytest.MonkeyPatch.context() as patch, made.run_state() as _:
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.utils import unwrap_model

        from megatron_cp.training import gpt, optim
        from megatron_cp.training.checkpoint.writer import saving_in_this_process

        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        patch.setattr(gpt, "_custom_spec", lambda *_: spec)
        if adam == "torch's":  # as Megatron takes it without Transformer Engine and apex
            from megatron.core import optimizer

            patch.setattr(optim, "install_fused_adam", lambda: False)
            patch.setattr(optimizer, "Adam", torch.optim.AdamW)
            patch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", True)
        with made.run_state() as theirs:
            made.step(theirs, 1)
            model = unwrap_model(theirs.model)[0]
            own = Path(folder) / "iter_0000005"
            content = {"iteration": 5, "checkpoint_version": 3.0, "args": theirs.config.namespace()}
            content["opt_param_scheduler"] = theirs.scheduler.state_dict()
            if form == "torch":
                content |= {"model": model.state_dict_for_save_checkpoint()}
                content |= {"optimizer": theirs.optimizer.state_dict()}
                (own / "mp_rank_00").mkdir(parents=True)
                torch.save(content, own / "mp_rank_00" / "model_optim_rng.pt")
            else:
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                metadata = {"singleton_local_shards": False, "dp_cp_group": group}
                content["model"] = model.sharded_state_dict(metadata=metadata)
                content["optimizer"] = theirs.optimizer.sharded_state_dict(
                    content, metadata=metadata
                )
                own.mkdir(parents=True)
                with saving_in_this_process():
                    dist_checkpointing.save(content, str(own))
            made.step(theirs, 2)
            expected = made.weights_of(theirs)
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("5")
    with made.run_state("--load", folder, "--no-load-rng") as ours:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        load_checkpoint(ours)
        made.step(ours, 2)
        return expected, made.weights_of(ours)


@pytest.mark.parametrize("adam", ["ours", "torch's"])
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_run_of_megatrons_own_layers_goes_on_in_ours_with_its_optimizer(tmp_path, form, adam):
    """torch's AdamW counts steps for every parameter; its sums have another order."""
    ((expected, found),) = run_on_ranks(1, train_by_megatron, str(tmp_path), form, adam)
    assert expected.keys() == found.keys()
    for name in expected:
        if adam == "ours":
            assert torch.equal(found[name], expected[name])
        else:  # were it the first step, the rate being 1e-3, weights would be off by 2e-4
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


def save_ours(rank, world_size, folder, form):
    """Saves our model in a format; returns its weights."""
    with made.run_state("--save", folder, "--ckpt-format", form) as state:
        from megatron_cp.training.checkpoint.save import Saver

        state.iteration = 5
        Saver(state).save()
        return made.weights_of(state)


def load_by_megatron(rank, world_size, folder, form):
    """Loads into a model of Megatron's own local layers by Megatron-Core alone; returns its weights."""
    with made.run_state() as state:
        from megatron.core import dist_checkpointing
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        config = state.model[0].module.config
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            512,
            128,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
        )
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, -1.0)
        own = Path(folder) / "iter_0000005"
        if form == "torch_dist":
            wanted = {"model": model.sharded_state_dict()}
            found = dist_checkpointing.load(wanted, str(own))["model"]
        else:
            path = own / "mp_rank_00" / "model_optim_rng.pt"
            found = torch.load(path, weights_only=True)["model"]
        model.load_state_dict(found, strict=True)
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_ours_loads_into_megatrons_own_layers(tmp_path, form):
    (ours,) = run_on_ranks(1, save_ours, str(tmp_path), form)
    (theirs,) = run_on_ranks(1, load_by_megatron, str(tmp_path), form)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def saved_tensors(rank, world_size, folder):
    """The tensors of a torch_dist checkpoint as torch reads them, without Megatron."""
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state = {n: torch.zeros(m.size) for n, m in entries.items() if hasattr(m, "size")}
    load(state, storage_reader=reader)
    return state


def test_ours_in_torch_dist_has_transformer_engines_keys(tmp_path):
    (ours,) = run_on_ranks(1, save_ours, str(tmp_path), "torch_dist")
    (saved,) = run_on_ranks(1, saved_tensors, str(tmp_path / "iter_0000005"))
    weights = {name: x for name, x in saved.items() if not name.startswith("optimizer.")}
    fused_of = dict(zip(made.local_weights(), made.fused_weights(), strict=True))
    expected = made.stacked({fused_of[name]: tensor for name, tensor in ours.items()})
    assert weights.keys() == expected.keys() == made.stacked(made.fused_weights()).keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


class FusedModel(torch.nn.Module):
    """A module with the names of Transformer Engine's layers, and nothing else of them."""

    def __init__(self):
        super().__init__()
        self.table = {name: torch.zeros_like(x) for name, x in made.fused_weights().items()}

    def state_dict_for_save_checkpoint(self):
        return {**self.table, **made.extra_states("version 2")}

    def load_state_dict(self, found, strict):
        for name, tensor in found.items():
            self.table[name].copy_(tensor)
        return torch.nn.modules.module._IncompatibleKeys(list(self.table.keys() - found.keys()), [])


def load_into_fused(rank, world_size, folder):
    """Loads into the module with Transformer Engine's names; returns its weights."""
    with made.run_state("--load", folder, *FINETUNE) as state:
        from megatron_cp.training.checkpoint import content, legacy_format

        state.model = [FusedModel()]
        found = legacy_format.load(state, Path(folder) / "iter_0000005")
        content.put_into_model(state, found, {"model": state.model[0]})
        return state.model[0].table


@pytest.mark.parametrize("layers", ["local", "Transformer Engine", "ours"])
def test_a_torch_checkpoint_loads_into_transformer_engines_layers(tmp_path, layers):
    expected = made.fused_weights()
    if layers == "ours":
        (ours,) = run_on_ranks(1, save_ours, str(tmp_path), "torch")
        renamed = dict(zip(made.local_weights(), made.fused_weights(), strict=True))
        expected = {renamed[name]: tensor for name, tensor in ours.items()}
    else:
        made.write_legacy(tmp_path, made.local_weights() if layers == "local" else expected)
    (found,) = run_on_ranks(1, load_into_fused, str(tmp_path))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
