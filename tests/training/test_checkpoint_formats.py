"""The two formats: exact resume in each, layouts, mixtures, damage, and files that would execute code."""

import contextlib
import io
import os
import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_cp.training.checkpoint import formats
from tests.ranks import run_on_ranks
from tests.training import checkpoints as made

FOLDER = "iter_0000001"


def save_and_go_on(rank, world_size, folder, flags):
    """One step, a checkpoint, another step; returns the weights after both, and at the checkpoint."""
    with made.run_state("--save", folder, *flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.save import Saver

        made.step(state, 1)
        Saver(state).save()
        saved = made.weights_of(state)
        made.step(state, 2)
        return made.weights_of(state), saved


def resume(rank, world_size, folder, flags):
    """Loads and takes the second step; returns the weights after it, and as they were loaded."""
    with made.run_state("--load", folder, *flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        with contextlib.redirect_stdout(io.StringIO()):
            load_checkpoint(state)
        assert state.iteration == 1
        loaded = made.weights_of(state)
        made.step(state, 2)
        return made.weights_of(state), loaded


LAYOUTS = {
    "one rank": (1, ()),
    "distributed optimizer": (2, ("--use-distributed-optimizer",)),
    "bf16, context ranks": (2, ("--bf16", "--context-parallel-size", "2")),
    "tensor ranks": (2, ("--tensor-model-parallel-size", "2")),
    "pipeline stages": (
        2,
        ("--pipeline-model-parallel-size", "2", "--num-layers", "4",
         "--num-layers-per-virtual-pipeline-stage", "1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_bitwise_from_the_format_torch(tmp_path, layout: str):
    world_size, flags = LAYOUTS[layout]
    saving = ("--ckpt-format", "torch", *flags)
    whole = run_on_ranks(world_size, save_and_go_on, str(tmp_path), saving)
    # Without --ckpt-format: the folder says what it is.
    resumed = run_on_ranks(world_size, resume, str(tmp_path), flags)
    names = {path.relative_to(tmp_path / FOLDER).as_posix() for path in tmp_path.rglob("*.pt")}
    first = "mp_rank_00_000" if layout == "pipeline stages" else "mp_rank_00"
    assert f"{first}/model_optim_rng.pt" in names
    assert (f"{first}/distrib_optim.pt" in names) == (layout == "distributed optimizer")
    for (expected, _), (found, _) in zip(whole, resumed, strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("sharding", [(), ("--dist-ckpt-optim-fully-reshardable",)])
def test_the_sharding_of_the_optimizer_is_read_from_the_checkpoint(tmp_path, sharding):
    flags = ("--use-distributed-optimizer",)
    whole = run_on_ranks(2, save_and_go_on, str(tmp_path), (*flags, *sharding))
    resumed = run_on_ranks(2, resume, str(tmp_path), flags)
    for (expected, _), (found, _) in zip(whole, resumed, strict=True):
        assert all(torch.equal(found[name], x) for name, x in expected.items())


# A step that a loss scale skips leaves the optimizer without state.
HALF = ("--fp16", "--initial-loss-scale", "1024", "--hysteresis", "1")
DISTRIBUTED = ("--use-distributed-optimizer",)
BEFORE_ANY_STEP = {
    "torch_dist": (1, ("--ckpt-format", "torch_dist")),
    "torch": (1, ("--ckpt-format", "torch")),
    "torch_dist, distributed": (2, ("--ckpt-format", "torch_dist", *DISTRIBUTED)),
    "torch, distributed": (2, ("--ckpt-format", "torch", *DISTRIBUTED)),
}


def skip_save_and_go_on(rank, world_size, folder, flags):
    """A step with a gradient that overflows, a checkpoint, an ordinary step; returns the weights."""
    with made.run_state("--save", folder, *flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.save import Saver

        before = made.weights_of(state)
        made.step(state, 1, overflows=True)
        assert all(torch.equal(x, before[n]) for n, x in made.weights_of(state).items())
        Saver(state).save()
        made.step(state, 2)
        return made.weights_of(state), before


@pytest.mark.parametrize("form", BEFORE_ANY_STEP)
def test_a_checkpoint_from_before_the_first_update_is_resumed_bitwise(tmp_path, form: str):
    world_size, flags = BEFORE_ANY_STEP[form]
    whole = run_on_ranks(world_size, skip_save_and_go_on, str(tmp_path), (*HALF, *flags))
    resumed = run_on_ranks(world_size, resume, str(tmp_path), (*HALF, *flags[2:]))
    for (expected, before), (found, _) in zip(whole, resumed, strict=True):
        assert all(torch.equal(found[name], x) for name, x in expected.items())
        assert not all(torch.equal(found[name], x) for name, x in before.items())


def through_both_formats(rank, world_size, folder):
    """From torch to torch_dist to torch; returns the weights and moments at both ends."""
    kept = []
    for number, (source, form) in enumerate((("", "torch"), ("0", "torch_dist"), ("1", "torch"))):
        flags = ["--save", f"{folder}/{number}", "--ckpt-format", form]
        flags += ["--load", f"{folder}/{source}"] if source else []
        with made.run_state(*flags) as state, contextlib.redirect_stdout(io.StringIO()):
            from megatron_cp.training.checkpoint.load import load_checkpoint
            from megatron_cp.training.checkpoint.save import Saver

            if source:
                load_checkpoint(state)
            else:
                made.step(state, 1)
            Saver(state).save()
            kept.append((made.weights_of(state), state.optimizer.state_dict()["state"]))
    return kept[0], kept[-1]


def test_weights_and_moments_survive_a_change_of_format_and_back(tmp_path):
    ((first, last),) = run_on_ranks(1, through_both_formats, str(tmp_path))
    assert all(torch.equal(last[0][name], x) for name, x in first[0].items())
    assert first[1].keys() == last[1].keys()
    for index, moments in first[1].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(moments[name], last[1][index][name])
    assert any(moments["exp_avg"].any() for moments in first[1].values())


def refusal_of(rank, world_size, folder, flags):
    """What a load refuses with, on each rank."""
    with made.run_state("--load", folder, *flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        before = made.weights_of(state)
        with contextlib.redirect_stdout(io.StringIO()):
            text = made.answer(lambda: load_checkpoint(state))
        assert state.iteration == 0 and not state.data
        return text, all(torch.equal(x, before[n]) for n, x in made.weights_of(state).items())


def refused(folder, *flags, world_size=1) -> str:
    """The one line with which every rank refuses; nothing of the run has changed."""
    answers = run_on_ranks(world_size, refusal_of, str(folder), flags)
    assert len({text for text, _ in answers}) == 1
    assert all(same for _, same in answers), "weights have changed"
    text = answers[0][0]
    assert "\n" not in text and len(text) < 600
    return text


def test_another_layout_of_the_format_torch_is_refused_and_the_advice_works(tmp_path):
    tp2 = ("--tensor-model-parallel-size", "2")
    whole = run_on_ranks(2, save_and_go_on, str(tmp_path / "a"), ("--ckpt-format", "torch", *tp2))
    text = refused(tmp_path / "a")
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1" in text
    assert "save it with --ckpt-format torch_dist" in text
    run_on_ranks(2, load_and_save, str(tmp_path / "a"), str(tmp_path / "b"), tp2)
    ((_, found),) = run_on_ranks(1, resume, str(tmp_path / "b"), ())
    saved = [weights for _, weights in whole]
    axes = {"word_embeddings": 0, "linear_qkv": 0, "linear_proj": 1, "linear_fc2": 1, "norm": None}
    for name, tensor in found.items():
        for part, axis in axes.items():
            if part in name:
                halves = [weights[name] for weights in saved]
                assert torch.equal(tensor, halves[0] if axis is None else torch.cat(halves, axis))


def load_and_save(rank, world_size, source, target, flags):
    flags = ("--load", source, "--save", target, *flags)
    with made.run_state(*flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint
        from megatron_cp.training.checkpoint.save import Saver

        with contextlib.redirect_stdout(io.StringIO()):
            load_checkpoint(state)
            Saver(state).save()


def test_another_number_of_virtual_stages_is_refused_with_the_flag_that_helps(tmp_path):
    world_size, flags = LAYOUTS["pipeline stages"]
    run_on_ranks(world_size, save_and_go_on, str(tmp_path), ("--ckpt-format", "torch", *flags))
    plain = ("--pipeline-model-parallel-size", "2", "--num-layers", "4")
    text = refused(tmp_path, *plain, world_size=2)
    assert "has 2 model chunks a pipeline stage, this run 1" in text
    advice = text.rpartition("give ")[2].split()
    run_on_ranks(2, resume, str(tmp_path), (*plain, *advice))


def test_optimizer_state_of_other_layers_is_refused(tmp_path):
    optimizer = {"state": {}, "param_groups": []}
    made.write_legacy(tmp_path / "fused", made.fused_weights(), optimizer=optimizer)
    text = refused(tmp_path / "fused")
    assert "ordered by those layers" in text and "--no-load-optim" in text


class Command:
    """Runs a command when it is unpickled the ordinary way."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def test_what_a_file_would_execute_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made.write_legacy(tmp_path / "torch", made.local_weights(), args=Command())
    text = refused(tmp_path / "torch", "--finetune")
    assert "holds posix.system" in text
    folder = run_on_ranks(1, hand_made, str(tmp_path / "dist"))[0]
    (Path(folder) / ".metadata").write_bytes(pickle.dumps(Command()))
    text = refused(tmp_path / "dist", "--finetune")
    assert ".metadata names posix system" in text
    assert not list(tmp_path.rglob("executed"))


def test_a_name_that_reaches_through_an_allowed_module_is_refused(tmp_path):
    folder = run_on_ranks(1, hand_made, str(tmp_path / "dist"))[0]
    # Protocol 4 resolves dots: torch's own module would lend its import of os.
    module, name = b"torch.distributed.checkpoint.filesystem", b"os.system"
    text = b"".join(b"\x8c" + bytes([len(part)]) + part for part in (module, name))
    (Path(folder) / ".metadata").write_bytes(b"\x80\x04" + text + b"\x93.")
    assert "names torch.distributed.checkpoint.filesystem os.system" in refused(
        tmp_path / "dist", "--finetune"
    )


def with_a_command(rank, world_size, folder, name):
    """A checkpoint in the format torch_dist with one object that runs a command."""
    with made.parallel_state(made.Case()):
        made.allow_children()
        weights = made.stacked(made.fused_weights())
        made.write_dist(Path(folder), weights, {name: Command()}, args=Namespace())


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("rng_state", ("--no-load-optim",)),
        ("decoder.final_layernorm._extra_state", ("--finetune",)),
    ],
)
def test_an_object_among_the_tensors_is_not_executed_either(tmp_path, monkeypatch, name, flags):
    monkeypatch.chdir(tmp_path)
    run_on_ranks(1, with_a_command, str(tmp_path), name)
    text = refused(tmp_path, *flags)
    assert f"{name} holds posix.system" in text
    assert not list(tmp_path.rglob("executed"))


def hand_made(rank, world_size, folder):
    """A good checkpoint in the format torch_dist."""
    with made.parallel_state(made.Case()):
        made.allow_children()
        return str(made.write_dist(Path(folder), made.stacked(made.fused_weights()), {}))


def test_arguments_as_megatron_keeps_them_are_read(tmp_path):
    run_on_ranks(1, megatron_arguments, str(tmp_path))


def megatron_arguments(rank, world_size, folder):
    """Loads a checkpoint whose args and random states hold what Megatron-LM's hold."""
    import enum
    import signal

    import numpy as np

    with made.run_state("--load", folder, "--no-load-optim") as state:
        from megatron.core.enums import ModelType
        from megatron.core.transformer import enums

        from megatron_cp.training.checkpoint.load import load_checkpoint
        from megatron_cp.training.random_states import own_random_states

        torch.manual_seed(7)
        states = own_random_states()
        expected = torch.rand(3)
        args = Namespace(
            consumed_train_samples=40, model_type=ModelType.encoder_or_decoder, params_dtype=torch.bfloat16,
            attention_backend=enums.AttnBackend.flash, exit_signal=signal.SIGTERM, start=np.float64(0.5),
            save=Path("somewhere"),
        )  # fmt: skip
        # Another version of Megatron-Core has choices that this one does not know.
        enums.Later = enum.Enum("Later", {"none": 0}, module=enums.__name__)
        args.later = [enums.Later.none]
        entries = {"args": args, "rng_state": [states], "opt_param_scheduler": {}}
        made.write_legacy(Path(folder), made.local_weights(), **entries)
        del enums.Later
        with contextlib.redirect_stdout(io.StringIO()):
            load_checkpoint(state)
        assert (state.iteration, state.consumed_samples) == (5, 40)
        assert torch.equal(torch.rand(3), expected)


def load_a_release(rank, world_size, folder):
    with made.run_state("--load", folder) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        with contextlib.redirect_stdout(io.StringIO()):
            assert load_checkpoint(state)
        return state.config.notes, state.iteration, made.weights_of(state)


def test_a_release_of_a_converter_gives_its_weights_alone(tmp_path):
    own = made.write_legacy(tmp_path, made.local_weights())
    own.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    ((notes, iteration, weights),) = run_on_ranks(1, load_a_release, str(tmp_path))
    assert iteration == 0
    assert [note for note in notes if "is a release" in note]
    assert all(torch.equal(weights[name], x) for name, x in made.local_weights().items())


def test_weights_without_an_iteration_are_for_finetuning(tmp_path):
    own = made.write_legacy(tmp_path, made.local_weights())
    file = own / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({"model": made.local_weights()}, file)
    text = refused(tmp_path, "--no-load-optim")
    assert "says no iteration number; give --finetune" in text
    run_on_ranks(1, load_weights_alone, str(tmp_path))


def load_weights_alone(rank, world_size, folder):
    with made.run_state("--load", folder, "--finetune") as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        load_checkpoint(state)


def test_damaged_files_are_named(tmp_path):
    own = made.write_legacy(tmp_path / "torch", made.local_weights())
    file = own / "mp_rank_00" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-200])
    assert "model_optim_rng.pt is damaged" in refused(tmp_path / "torch", "--finetune")
    torch.save({"weights": 1}, file)
    assert "no entry 'model'" in refused(tmp_path / "torch", "--finetune")
    folder = Path(run_on_ranks(1, hand_made, str(tmp_path / "dist"))[0])
    for name in (".metadata", "common.pt"):
        if not (folder / name).exists():
            continue  # from core 0.19 on a file of tensors holds it
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        assert f"{name} is damaged" in refused(tmp_path / "dist", "--finetune")
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (["metadata.json", "mp_rank_00/model_optim_rng.pt"], "holds two formats"),
        ([".metadata"], "torch_dcp or fsdp_dtensor"),
        (["stray"], "not a complete checkpoint"),
        (["mp_rank_00_000_001/model_optim_rng.pt"], "expert parallelism"),
        (["mp_rank_01/model_optim_rng.pt"], "--tensor-model-parallel-size 2"),
        (["mp_rank_00/stray"], r"no mp_rank_00/model_optim_rng\.pt"),
    ],
)
def test_a_folder_that_is_no_checkpoint_of_ours_is_refused(tmp_path, content, says):
    for name in content:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"sharded_backend": "torch_dist"}')
    config = made.arguments()
    with pytest.raises(ValueError, match=says):
        if formats.detect(tmp_path) == "torch":
            formats.check_legacy_layout(tmp_path, config)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "damaged"), ("[]", "damaged"), ('{"sharded_backend": "zarr"}', "'zarr'")],
)
def test_another_backend_or_a_damaged_description_is_refused(tmp_path, text, says):
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        formats.detect(tmp_path)
