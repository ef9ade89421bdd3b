"""--use-checkpoint-args and --pretrained-checkpoint: the model is the checkpoint's, by Megatron-LM's rules."""

import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.training.checkpoints import write_legacy
from tests.training.commands import DATA, MODEL, SMALL_RUN, STEPS, metrics, stopped, train
from tests.training.verdicts import parse, refusal

# What Megatron-LM 0.20 keeps of a small Llama, by its own names.
LLAMA = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "seq_length": 128,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "max_position_embeddings": 256,
    "position_embedding_type": "rope",
    "add_position_embedding": True,
    "use_rotary_position_embeddings": True,
    "rotary_base": 500000,
    "rotary_percent": 1.0,
    "add_bias_linear": False,
    "swiglu": True,
    "normalization": "RMSNorm",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
    "layernorm_epsilon": 1e-6,
    "padded_vocab_size": 640,
    "num_experts": None,
    "moe_router_topk": 2,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": 1,
    "tokenizer_type": None,
    "spec": None,
}
# DATA says a length, which would be the command line's.
NO_SIZES = [
    *shlex.split("--mock-data --vocab-size 512 --reset-attention-mask --reset-position-ids"),
    *shlex.split("--num-workers 0 --no-wandb"),
    *STEPS,
]


def saved(folder: Path, change: dict[str, object] | None = None, **entries: object) -> str:
    """A folder with a checkpoint of Megatron-LM that was saved with LLAMA, changed; None takes an argument out."""
    arguments = LLAMA | (change or {})
    kept = {name: value for name, value in arguments.items() if value is not ...}
    write_legacy(folder, {}, args=Namespace(**kept), **entries)
    return str(folder)


def taking(folder: str, *flags: str) -> list[str]:
    return [*NO_SIZES, "--use-checkpoint-args", "--load", folder, *flags]


def notes_of(args) -> list[str]:
    return [note for note in args.notes if note.startswith("--use-checkpoint-args: ")]


def test_a_command_line_without_a_model_has_the_checkpoints(tmp_path):
    folder = saved(tmp_path)
    args = parse(*taking(folder))
    for name in set(LLAMA) - {name for name in LLAMA if "parallel" in name or "virtual" in name}:
        assert getattr(args, name) == LLAMA[name], name
    assert args.tensor_model_parallel_size == args.pipeline_model_parallel_size == 1
    (note,) = notes_of(args)
    assert note.startswith(f"--use-checkpoint-args: {folder}/iter_0000005 gives --num-query-groups")
    assert "--norm-epsilon=1e-06" in note and "--disable-bias-linear" in note


# flag, its argument, the value that is used, and whose that is: `load_args_from_checkpoint` of Megatron-LM 0.20.
@pytest.mark.parametrize(
    ("flags", "name", "used"),
    [
        ("--rotary-base 10007", "rotary_base", 500000),
        ("--normalization LayerNorm", "normalization", "RMSNorm"),
        ("--attention-dropout 0.5", "attention_dropout", 0.0),
        ("--position-embedding-type none", "position_embedding_type", "rope"),
        ("--num-query-groups 4", "num_query_groups", 2),
        ("--seq-length 64", "seq_length", 64),
        ("--num-layers 3", "num_layers", 3),
        ("--kv-channels 32", "kv_channels", 32),
        ("--padded-vocab-size 768", "padded_vocab_size", 768),
        ("--norm-epsilon 1e-3", "layernorm_epsilon", 1e-3),  # which Megatron-LM never looks at
    ],
)
def test_where_both_speak_megatrons_rule_decides_and_a_note_names_both(tmp_path, flags, name, used):
    folder = saved(tmp_path)
    args = parse(*taking(folder, *flags.split()))
    assert getattr(args, name) == used
    whose = "checkpoint" if used == LLAMA[name] else "command line"
    (note,) = [note for note in notes_of(args) if "of the command line" in note]
    flag, value = flags.split()
    assert note.startswith(
        f"--use-checkpoint-args: {flag}={float(value) if '.' in value or 'e-' in value else value}"
    )
    assert f"={LLAMA[name]} of {folder}/iter_0000005: the {whose}'s is used" in note


def test_what_an_older_checkpoint_lacks_stays_as_the_flags_say(tmp_path):
    change = {"rotary_base": ..., "layernorm_epsilon": ..., "add_bias_linear": ..., "swiglu": ...}
    old = {"norm_epsilon": 1e-4, "disable_bias_linear": True, "apply_layernorm_1p": True}
    args = parse(*taking(saved(tmp_path, change | old), "--rotary-base", "777"))
    assert (args.rotary_base, args.layernorm_epsilon, args.swiglu) == (777, 1e-4, False)
    assert not args.add_bias_linear
    assert args.layernorm_zero_centered_gamma


def test_losses_that_the_checkpoint_was_trained_with_are_told_and_not_taken(tmp_path):
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 64, "moe_aux_loss_coeff": 0.01}
    folder = saved(tmp_path, experts | {"moe_router_bias_update_rate": 1e-3})
    args = parse(*taking(folder))
    assert (args.num_experts, args.moe_ffn_hidden_size, args.moe_aux_loss_coeff) == (8, 64, 0.0)
    (note,) = [note for note in notes_of(args) if "was trained with" in note]
    assert "iter_0000005 was trained with --moe-aux-loss-coeff 0.01, which is" in note
    args = parse(*taking(folder, "--moe-aux-loss-coeff", "0.02"))
    assert args.moe_aux_loss_coeff == 0.02
    assert not [note for note in notes_of(args) if "was trained with" in note]


def test_an_older_name_of_the_pattern_says_the_layers(tmp_path):
    hybrid = {"hybrid_override_pattern": "M*M-", "num_layers": 9, "mamba_head_dim": 16}
    args = parse(*taking(saved(tmp_path, hybrid | {"position_embedding_type": "none"})))
    assert (args.hybrid_layer_pattern, args.num_layers, args.mamba_head_dim) == ("M*M-", 4, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"position_embedding_type": "mrope"},
            "argument --position-embedding-type: invalid choice",
        ),
        ({"num_layers": "two"}, "argument --num-layers: invalid int value: 'two'"),
        ({"num_layers": torch.float32}, "--num-layers takes no value of type dtype"),
        ({"swiglu": "yes"}, "--swiglu has no value 'yes'"),
        ({"use_mup": True}, "--use-mup is an argument of Megatron-LM that is not served here"),
        ({"moe_single_grouped_weight": True}, "--moe-single-grouped-weight is an argument of"),
        ({"spec": ["os", "system"]}, "--spec os system, with which"),
        ({"tokenizer_model": "/nowhere/t.json"}, "--tokenizer-model /nowhere/t.json, with which"),
    ],
)
def test_what_is_not_served_is_refused_as_if_it_had_been_given(tmp_path, capsys, change, reason):
    line = refusal(capsys, *taking(saved(tmp_path, change), "--allow-custom-spec"))
    assert line.startswith(reason)
    assert f"{tmp_path}/iter_0000005" in line


def test_a_checkpoint_that_asks_for_code_is_refused_and_nothing_runs(tmp_path, capsys):
    trap = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (trap,))

    folder = tmp_path / "ckpt"
    write_legacy(folder, {}, args=Trap())
    line = refusal(capsys, *taking(str(folder)))
    assert "would execute code of the file" in line
    assert not trap.exists()


def test_of_a_damaged_checkpoint_the_one_before_is_asked_where_a_run_goes_back(tmp_path, capsys):
    folder = saved(tmp_path, {"rotary_base": 11})
    (tmp_path / "iter_0000005").rename(tmp_path / "iter_0000003")
    saved(tmp_path, {"rotary_base": 12})
    assert parse(*taking(folder)).rotary_base == 12
    newest = tmp_path / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert "model_optim_rng.pt is damaged" in refusal(capsys, *taking(folder))
    assert parse(*taking(folder, "--ckpt-fallback")).rotary_base == 11
    assert parse(*taking(folder, "--ckpt-step", "3")).rotary_base == 11


def test_the_layout_is_taken_where_it_is_asked_for(tmp_path):
    flags = taking(saved(tmp_path / "new"), "--use-mp-args-from-checkpoint-args")
    args = parse(*flags, "--num-layers", "4", world_size=4)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert args.virtual_pipeline_model_parallel_size == 2
    old = saved(tmp_path / "old", checkpoint_version=2.0)
    args = parse(*taking(old, "--use-mp-args-from-checkpoint-args"))
    assert args.tensor_model_parallel_size == args.pipeline_model_parallel_size == 1
    assert any("is of a version before 3.0" in note for note in args.notes)


def test_the_tokenizer_is_the_checkpoints_unless_that_is_declined(tmp_path):
    own, its = tmp_path / "own.json", tmp_path / "its.json"
    own.touch(), its.touch()
    change = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(its)}
    folder = saved(tmp_path / "ckpt", change)
    given = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(own)]
    assert parse(*taking(folder, *given)).tokenizer_model == str(its)
    given.append("--no-use-tokenizer-model-from-checkpoint-args")
    assert parse(*taking(folder, *given)).tokenizer_model == str(own)


def test_without_a_checkpoint_the_command_line_must_say_the_model(tmp_path, capsys):
    empty = str(tmp_path)
    line = refusal(capsys, *taking(empty))
    assert line.startswith(f"--use-checkpoint-args: {empty} hold no arguments, and the command")
    (note,) = notes_of(parse(*SMALL_RUN, "--use-checkpoint-args", "--load", empty))
    assert note == f"--use-checkpoint-args: {empty} holds no checkpoint to take any from"
    line = refusal(capsys, *NO_SIZES, "--use-checkpoint-args")
    assert line.startswith("--use-checkpoint-args needs --load <folder> or --pretrained-checkpoint")


def test_what_is_gone_on_from_has_the_last_word(tmp_path):
    first, second = (
        saved(tmp_path / "x"),
        saved(tmp_path / "y", {"rotary_base": 9, "seq_length": 64}),
    )
    args = parse(*taking(second), "--pretrained-checkpoint", first)
    assert args.rotary_base == 9
    assert args.seq_length == 128  # filled before; Megatron-LM asks the pretrained one first
    (note,) = [note for note in notes_of(args) if "'s is used" in note]
    assert "--seq-length=128 of --pretrained-checkpoint, --seq-length=64 of" in note
    assert note.endswith(f"{second}/iter_0000005: --pretrained-checkpoint's is used")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--load y --finetune",
            "--finetune with --pretrained-checkpoint x would begin at iteration 0",
        ),
        ("--load y --ckpt-step 3", "--ckpt-step 3 with --pretrained-checkpoint x is not served"),
        ("--load ./x", "--load ./x and --pretrained-checkpoint x are the same folder"),
        ("--load y --save x/", "--save x/ and --pretrained-checkpoint x are the same folder"),
    ],
)
def test_what_would_not_go_on_is_refused(capsys, flags, reason):
    line = refusal(capsys, *SMALL_RUN, "--pretrained-checkpoint", "x", *flags.split())
    assert line.startswith(reason)


def test_a_run_begins_with_pretrained_weights_and_goes_on_with_its_own(tmp_path):
    """As with `--finetune --load`, to the bit, on two context ranks; then from its own checkpoint."""
    x, y = str(tmp_path / "x"), str(tmp_path / "y")
    others = [*DATA, *STEPS, "--eval-iters", "0", "--no-wandb", "--train-iters", "3"]
    train(1, *MODEL, "--norm-epsilon", "1e-3", *others, "--exit-interval", "1", "--save", x)
    by_hand = [*MODEL, "--norm-epsilon", "1e-3", *others, "--run-dir", str(tmp_path / "hand")]
    train(1, *by_hand, "--finetune", "--load", x)
    wanted = metrics(tmp_path / "hand")

    run = ["--pretrained-checkpoint", x, "--use-checkpoint-args", "--load", y, "--save", y]
    run += [*others, "--context-parallel-size", "2"]
    first = train(2, *run, "--exit-interval", "2")
    assert f"with the weights of --pretrained-checkpoint {x}, as --load {y} holds no" in first
    second = train(2, *run)
    assert f"loading distributed checkpoint from {y} (iter_0000002)" in second
    losses = metrics(tmp_path / "y")
    assert set(losses) == set(wanted) == {1, 2, 3}
    assert losses == pytest.approx(wanted, rel=2e-6)


def test_weights_that_are_nowhere_are_told_on_every_rank(tmp_path):
    x, y = tmp_path / "x", tmp_path / "y"
    line = stopped(2, *SMALL_RUN, "--pretrained-checkpoint", str(x), "--load", str(y))
    assert f"--pretrained-checkpoint {x} holds no checkpoint, and nor does --load {y};" in line
