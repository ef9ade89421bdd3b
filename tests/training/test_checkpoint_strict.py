"""What model and checkpoint do not share is told by name and shape, and refused unless asked otherwise."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from megatron_cp.training.checkpoint.compare import STRICTNESS
from tests.ranks import run_on_ranks
from tests.training import checkpoints as made

NORMS = {"q_layernorm.weight": (16,), "k_layernorm.weight": (16,)}
OUTPUT = "output_layer.weight"


def richer_weights() -> dict[str, torch.Tensor]:
    """The weights of a model with norms on queries and keys and an output matrix of its own."""
    weights = made.local_weights() | {OUTPUT: made.value(OUTPUT, (made.VOCABULARY, 64))}
    for layer in range(made.NUM_LAYERS):
        for name, shape in NORMS.items():
            full = f"decoder.layers.{layer}.self_attention.{name}"
            weights[full] = made.value(full, shape)
    return weights


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under the keys of the format torch_dist."""
    renamed = {}
    for name, tensor in weights.items():
        for local, other in made.FUSED_OF.items():
            name = name.replace(f".{local}", f".{other}")
        renamed[name] = tensor
    return made.stacked(renamed)


def write(folder: Path, form: str, weights: dict[str, torch.Tensor]) -> None:
    """The weights as a checkpoint of Megatron-LM, by hand."""
    if form == "torch":
        made.write_legacy(folder, weights)
        return
    with made.parallel_state(made.Case()):
        made.allow_children()
        made.write_dist(folder, fused(weights), {})


def attempt(rank, world_size, folder, form, weights, flags):
    """Loads; returns the refusal or None, what was said, and the weights before and after."""
    if rank == 0:
        write(Path(folder), form, weights)
    torch.distributed.barrier()
    flags = ("--load", folder, *flags)
    said = io.StringIO()
    with made.run_state(*flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        before, refusal = made.weights_of(state), None
        with contextlib.redirect_stdout(said):
            try:
                load_checkpoint(state)
            except ValueError as problem:
                refusal = str(problem)
        return refusal, said.getvalue(), before, made.weights_of(state)


def only(folder, form, weights, *flags, world_size=1):
    """One rank's attempt."""
    return run_on_ranks(world_size, attempt, str(folder), form, weights, flags)[0]


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize("strictness", STRICTNESS)
def test_what_only_the_checkpoint_holds(tmp_path, form: str, strictness: str):
    refusal, said, before, after = only(
        tmp_path, form, richer_weights(), "--finetune", "--dist-ckpt-strictness", strictness
    )
    shape = r"\[2, 16\]" if form == "torch_dist" else r"\[16\]"
    told = refusal if strictness == "raise_all" else said
    assert re.search(rf"only in the checkpoint: decoder.*k_layernorm.weight {shape}", told)
    assert f"{OUTPUT} [512, 64]" in told
    if strictness == "raise_all":
        assert all(torch.equal(before[name], after[name]) for name in before)
    else:
        assert refusal is None
        assert f"--dist-ckpt-strictness {strictness}: " in said and "are left out" in said
        assert all(torch.equal(after[n], x) for n, x in made.local_weights().items())


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize("strictness", STRICTNESS)
def test_what_only_the_model_has(tmp_path, form: str, strictness: str):
    refused = strictness in ("raise_all", "raise_unexpected", "assume_ok_unexpected")
    flags = ("--finetune", "--qk-layernorm", "--dist-ckpt-strictness", strictness)
    refusal, said, before, after = only(tmp_path, form, made.local_weights(), *flags)
    shape = "[2, 16]" if form == "torch_dist" else "[16]"
    told = refusal if refused else said
    assert "not in the checkpoint: decoder" in told
    assert f"self_attention.q_layernorm.weight {shape}" in told
    if refused:
        assert all(torch.equal(before[name], after[name]) for name in before)
    else:
        assert refusal is None
        assert "keep their initial values" in said
        assert all(torch.equal(after[n], x) for n, x in made.local_weights().items())
        kept = after.keys() - made.local_weights().keys()
        assert len(kept) == 4 and all(torch.equal(after[n], before[n]) for n in kept)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize("strictness", ["raise_all", "ignore_all"])
def test_other_shapes_are_named_with_both_and_always_refused(tmp_path, form, strictness):
    flags = ("--finetune", "--ffn-hidden-size", "192", "--dist-ckpt-strictness", strictness)
    refusal, _, before, after = only(tmp_path, form, made.local_weights(), *flags)
    head = "2, " if form == "torch_dist" else ""
    assert (
        f"linear_fc1.weight [{head}256, 64] in the checkpoint, [{head}384, 64] in the model"
        in refusal
    )
    assert "strictness" not in refusal, "no value of it would help"
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_every_rank_refuses_alike(tmp_path):
    answers = run_on_ranks(
        2,
        attempt,
        str(tmp_path),
        "torch",
        richer_weights(),
        ("--finetune", "--context-parallel-size", "2"),
    )
    refusals = [refusal for refusal, *_ in answers]
    assert refusals[0] and refusals[0] == refusals[1]


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_the_advice_of_a_refusal_loads_it(tmp_path, form):
    refusal, *_ = only(tmp_path / "a", form, richer_weights(), "--finetune")
    advice = re.search(r"--dist-ckpt-strictness \w+", refusal)[0].split()
    refusal, *_ = only(tmp_path / "b", form, richer_weights(), "--finetune", *advice)
    assert refusal is None
    flags = ("--finetune", "--qk-layernorm", "--untie-embeddings-and-output-weights")
    refusal, _, _, after = only(tmp_path / "c", form, richer_weights(), *flags)
    assert refusal is None, "the arguments it was saved with"
    assert all(torch.equal(after[name], x) for name, x in richer_weights().items())


def save_richer(rank, world_size, folder):
    with made.run_state("--save", folder, "--qk-layernorm") as state:
        from megatron_cp.training.checkpoint.save import Saver

        Saver(state).save()


def test_the_advice_on_a_checkpoint_of_ours_loads_it(tmp_path):
    run_on_ranks(1, save_richer, str(tmp_path))
    refusal = run_on_ranks(1, load_again, str(tmp_path), ())[0]
    assert "was saved with --qk-layernorm True, this run has False" in refusal
    advice = re.search(r"--dist-ckpt-strictness \w+", refusal)[0].split()
    assert run_on_ranks(1, load_again, str(tmp_path), (*advice, "--finetune"))[0] is None
    assert run_on_ranks(1, load_again, str(tmp_path), (*advice, "--no-load-optim"))[0] is None


def load_again(rank, world_size, folder, flags):
    """The refusal of a load, None if it succeeds."""
    with made.run_state("--load", folder, *flags) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        try:
            load_checkpoint(state)
        except ValueError as refusal:
            return str(refusal)


def test_an_optimizer_that_megatron_core_cannot_ask_for_is_refused_and_left_out_on_advice(tmp_path):
    run_on_ranks(1, save_richer, str(tmp_path))
    same = ("--qk-layernorm", "--optimizer", "sgd")
    (refusal,) = run_on_ranks(1, load_again, str(tmp_path), same)
    assert "--no-load-optim" in refusal
    assert run_on_ranks(1, load_again, str(tmp_path), (*same, "--no-load-optim"))[0] is None


def attempt_with_fp8(rank, world_size, folder, form):
    """A checkpoint whose `_extra_state` entries hold something."""
    extra = made.extra_states("with fp8")
    if form == "torch":
        made.write_legacy(Path(folder), made.fused_weights() | extra)
    else:
        with made.parallel_state(made.Case()):
            made.allow_children()
            made.write_dist(Path(folder), made.stacked(made.fused_weights()), extra)
    with made.run_state("--load", folder, "--finetune") as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        return made.answer(lambda: load_checkpoint(state))


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_fp8_state_is_not_dropped_in_silence(tmp_path, form):
    (refusal,) = run_on_ranks(1, attempt_with_fp8, str(tmp_path), form)
    assert "only in the checkpoint: decoder" in refusal
    assert "linear_fc1._extra_state" in refusal


def resume_without_optimizer(rank, world_size, folder, form):
    """Saves without the optimizer, then resumes with and without asking for it."""
    with made.run_state("--save", folder, "--no-save-optim", "--ckpt-format", form) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint
        from megatron_cp.training.checkpoint.save import Saver

        made.step(state, 1)
        Saver(state).save()
    with made.run_state("--load", folder) as state:
        refusal = made.answer(lambda: load_checkpoint(state))
    with made.run_state("--load", folder, "--no-load-optim") as state:
        load_checkpoint(state)
        return refusal, state.iteration


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_checkpoint_without_optimizer_says_so_and_its_advice_works(tmp_path, form):
    ((refusal, iteration),) = run_on_ranks(1, resume_without_optimizer, str(tmp_path), form)
    assert "holds no optimizer state; give --no-load-optim" in refusal
    assert iteration == 1


def leave_out_the_optimizer(rank, world_size, folder):
    with made.run_state("--save", folder) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint
        from megatron_cp.training.checkpoint.save import Saver

        made.step(state, 1)
        Saver(state).save()
    said = []
    for flag in ("--finetune", "--no-load-optim"):
        text = io.StringIO()
        with made.run_state("--load", folder, flag) as state, contextlib.redirect_stdout(text):
            load_checkpoint(state)
        said.append(text.getvalue())
    return said


def test_an_optimizer_that_is_left_out_is_one_note_and_no_difference(tmp_path):
    (said,) = run_on_ranks(1, leave_out_the_optimizer, str(tmp_path))
    for flag, text in zip(("--finetune", "--no-load-optim"), said, strict=True):
        assert text.count(f"note: {flag}: the checkpoint's optimizer state is not loaded") == 1
        assert "only in the checkpoint" not in text


def go_on_with_another_model(rank, world_size, folder):
    """What two loads of one checkpoint say: with a flag that changes what its tensors compute, and without."""
    from megatron_cp.training.checkpoint.load import load_checkpoint
    from megatron_cp.training.checkpoint.save import Saver

    said = []
    with made.run_state("--save", folder, rank=rank, world_size=world_size) as state:
        made.step(state, 1)
        Saver(state).save()
    for flags in (("--rotary-base", "20000", "--norm-epsilon", "1e-3"), ()):
        text = io.StringIO()
        with (
            made.run_state("--load", folder, *flags, rank=rank, world_size=world_size) as state,
            contextlib.redirect_stdout(text),
        ):
            load_checkpoint(state)
        said.append(text.getvalue())
    return said


def test_flags_that_change_what_the_weights_compute_are_told(tmp_path):
    ((changed, same),) = run_on_ranks(1, go_on_with_another_model, str(tmp_path))
    assert "note: --rotary-base was 10000, and is 20000 from here on: the weights of" in changed
    assert "note: --norm-epsilon was 1e-05, and is 0.001 from here on" in changed
    assert "from here on" not in same
