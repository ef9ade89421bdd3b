"""The command line against Megatron-LM's parser, and refusals in one line for each reason."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_cp.training.arguments import (
    build_parser,
    judge_arguments,
    known_flags,
    parse_arguments,
)
from megatron_cp.training.arguments.flags import layers_of
from megatron_cp.training.arguments.machine import GPU_MACHINE
from megatron_cp.training.arguments.stages import stages_of
from tests.training.commands import DATA, MODEL, SMALL_RUN, STEPS
from tests.training.verdicts import parse, refusal

# What Megatron-LM core_v0.19.0's own parser answered, flag by flag.
MEGATRON = json.loads((Path(__file__).parent / "megatron_defaults.json").read_text())
OUR_DEFAULTS = {
    "--distributed-backend": None,  # Megatron-LM: nccl, which needs a GPU
    "--transformer-impl": None,  # Megatron-LM: transformer_engine, which needs a GPU
    "--local-rank": None,  # Megatron-LM: 0; the launcher's LOCAL_RANK decides
    "--use-cpu-initialization": False,  # Megatron-LM: None
    "--no-save-optim": False,
    "--no-save-rng": False,
    "--no-load-optim": False,
    "--no-load-rng": False,
}


@pytest.mark.parametrize("flag", sorted(MEGATRON))
def test_a_served_flag_has_megatrons_destination_and_default(flag: str):
    action = next(a for a in build_parser()._actions if flag in a.option_strings)
    assert action.dest == MEGATRON[flag]["dest"]
    assert action.default == OUR_DEFAULTS.get(flag, MEGATRON[flag]["default"])
    assert (action.nargs != 0) == MEGATRON[flag]["takes_value"]


def test_a_script_of_megatron_is_completed_as_megatron_completes_it():
    args = parse(*SMALL_RUN, "--lr-warmup-fraction", "0.5", world_size=2)
    assert args.data_parallel_size == 2
    assert args.kv_channels == 16
    assert args.ffn_hidden_size == 128  # int(4 * 64 * 2 / 3 / 64) * 64
    assert (args.lr_decay_steps, args.lr_warmup_steps) == (8, 4.0)
    assert args.max_position_embeddings == 128


@pytest.mark.parametrize("hidden", [64, 256, 4096])
def test_the_default_width_of_a_gated_mlp_is_two_thirds_in_multiples_of_64(hidden: int):
    args = parse(*SMALL_RUN, "--hidden-size", str(hidden))
    assert args.ffn_hidden_size % 64 == 0
    assert 0 <= 8 * hidden / 3 - args.ffn_hidden_size < 64


def test_two_files_choose_gpt_2s_tokenizer_as_in_megatron():
    files = ["--vocab-file", "v.json", "--merge-file", "m.txt"]
    assert parse(*SMALL_RUN, *files).tokenizer_type == "GPT2BPETokenizer"
    files += ["--tokenizer-type", "NullTokenizer", "--tokenizer-model", "t.json"]
    notes = parse(*SMALL_RUN, *files).notes
    assert [note[:24] for note in notes] == ["--vocab-file and --merge", "--tokenizer-model change"]


def test_an_old_switch_against_positions_changes_nothing_with_rotary_ones(capsys):
    assert parse(*SMALL_RUN, "--no-position-embedding").position_embedding_type == "rope"
    learned = ["--position-embedding-type", "learned_absolute"]
    line = refusal(capsys, *SMALL_RUN, *learned, "--no-position-embedding")
    assert "--position-embedding-type none" in line


@pytest.mark.parametrize(
    ("flags", "name", "advice"),
    [
        (["--moe-upcycling-granularity", "8"], "--moe-upcycling-granularity", "gpt_layer_spec"),
        (["--mtp-standalone"], "--mtp-standalone", "--mtp-num-layers"),
        (["--use-mup"], "--use-mup", "gpt_layer_spec"),
        (["--dsa-indexer-k-norm-fp32"], "--dsa-indexer-k-norm-fp32", "sparse attention"),
        (["--use-megatron-fsdp"], "--use-megatron-fsdp", "--use-distributed-optimizer"),
    ],
)
def test_what_megatron_knows_and_we_do_not_serve_is_refused_by_name(capsys, flags, name, advice):
    line = refusal(capsys, *SMALL_RUN, *flags)
    assert line.startswith(f"{name} is an argument of Megatron-LM that is not served here")
    assert advice in line


def test_the_engine_is_the_local_one_on_a_cpu_and_an_error_on_a_gpu_without_it(capsys, monkeypatch):
    wish = ["--transformer-impl", "transformer_engine"]
    assert parse(*SMALL_RUN).transformer_impl == "local"
    args = parse(*SMALL_RUN, *wish)
    assert args.transformer_impl == "local"
    assert [note for note in args.notes if "local layers" in note] == list(args.notes)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "--transformer-impl local" in refusal(capsys, *SMALL_RUN, *wish)


def test_a_layout_of_stages_is_written_out_as_megatron_does():
    assert stages_of("Et*3|(tt|)*2mL") == ["Ettt", "tt", "tt", "mL"]
    assert stages_of("E,t*2|t,L") == ["Ett", "tL"]
    flags = ["--num-layers", "7", "--pipeline-model-parallel-layout", "Et*3|(tt|)*2L"]
    args = parse(*SMALL_RUN, *flags, "--pipeline-model-parallel-size", "2", world_size=2)
    assert args.virtual_pipeline_model_parallel_size == 2


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        (["--decoder-first-pipeline-num-layers", "1"], None),
        (["--num-virtual-stages-per-pipeline-rank", "2", "--num-layers", "8"], 2),
        (
            ["--account-for-loss-in-pipeline-split", "--account-for-embedding-in-pipeline-split"],
            None,
        ),
    ],
)
def test_uneven_stages_are_accepted(flags: list[str], chunks: int | None):
    base = [*SMALL_RUN, "--num-layers", "4", "--pipeline-model-parallel-size", "2", *flags]
    assert parse(*base, world_size=2).virtual_pipeline_model_parallel_size == chunks


def test_muon_spreads_whole_layers_where_megatron_shards_its_state():
    flags = [*SMALL_RUN, "--bf16", "--use-distributed-optimizer", "--optimizer"]
    for name in ("muon", "dist_muon"):
        draft, reasons = judge_arguments([*flags, name], {}, GPU_MACHINE)
        assert not reasons
        assert (draft.optimizer, draft.layer_wise_optimizer) == ("muon", True)
        assert not draft.use_distributed_optimizer
    assert not judge_arguments([*flags, "adam"], {}, GPU_MACHINE)[0].layer_wise_optimizer
    missing = replace(GPU_MACHINE, has_emerging_optimizers=False)
    _, reasons = judge_arguments([*flags, "muon"], {}, missing)
    assert len(reasons) == 1 and "emerging-optimizers" in reasons[0]


def test_a_note_says_where_muon_depends_on_the_tensor_ranks():
    flags = [*SMALL_RUN, "--optimizer", "muon", "--tensor-model-parallel-size"]
    for size, mode, is_told in (("2", [], True), ("2", ["duplicated"], False), ("1", [], False)):
        given = [*flags, size, *(["--muon-tp-mode", *mode] if mode else [])]
        draft, reasons = judge_arguments(given, {"WORLD_SIZE": size}, GPU_MACHINE)
        assert not reasons
        assert any("--muon-tp-mode blockwise" in note for note in draft.notes) == is_told


def test_muon_does_not_cut_queries_with_a_gate_among_them():
    flags = [*SMALL_RUN, "--bf16", "--optimizer", "muon", "--attention-output-gate"]
    _, reasons = judge_arguments(flags, {}, GPU_MACHINE)
    assert len(reasons) == 1 and "give --muon-no-split-qkv" in reasons[0]
    _, reasons = judge_arguments([*flags, "--muon-no-split-qkv"], {}, GPU_MACHINE)
    assert not reasons


def test_equal_bits_are_not_promised_with_transformer_engines_loss():
    flags = [*SMALL_RUN, "--deterministic-mode", "--cross-entropy-loss-fusion"]
    assert not judge_arguments(flags, {}, GPU_MACHINE)[1]
    flags += ["--cross-entropy-fusion-impl", "te"]
    _, reasons = judge_arguments(flags, {}, replace(GPU_MACHINE, has_transformer_engine=True))
    assert len(reasons) == 1 and "give --cross-entropy-fusion-impl native" in reasons[0]


def test_equal_bits_fix_how_libraries_sum_unless_the_user_has():
    from megatron_cp.training.setup import fix_algorithms  # after the stand-ins of conftest.py

    environment = {"NCCL_ALGO": "Tree"}
    fix_algorithms(environment)
    assert environment == {"NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_a_run_shows_which_backend_computes_unless_the_user_has_set_up_logging():
    show = "from megatron_cp.training.setup import show_log_lines; show_log_lines(); show_log_lines(); "
    tell = "import logging; logging.getLogger('megatron_cp').info('backend hopper')"
    own = "import logging; logging.basicConfig(level=logging.ERROR); "
    install = "import megatron_cp.mcore.cpu as cpu; cpu.install(); "
    for before, expected in (("", "> backend hopper\n"), (own, "")):
        done = subprocess.run(
            [sys.executable, "-c", install + before + show + tell],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == expected


def test_optimizer_instances_divide_the_replicas():
    flags = ["--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"]
    _, reasons = judge_arguments([*SMALL_RUN, *flags], {}, GPU_MACHINE)
    assert len(reasons) == 1 and "1 x 1" in reasons[0]
    _, reasons = judge_arguments([*SMALL_RUN, *flags], {"WORLD_SIZE": "2"}, GPU_MACHINE)
    assert not reasons


def test_an_unknown_flag_is_refused_with_the_nearest_known_one(capsys):
    line = refusal(capsys, *SMALL_RUN, "--contxt-parallel-size", "2")
    assert "--contxt-parallel-size is unknown" in line
    assert "--context-parallel-size" in line


def test_a_flag_is_not_guessed_from_its_beginning(capsys):
    assert "--micro-batch is unknown" in refusal(capsys, *SMALL_RUN, "--micro-batch", "2")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_refuses_a_wrong_world_size_with_the_same_line(capsys, rank: int):
    line = refusal(capsys, *SMALL_RUN, "--context-parallel-size", "2", world_size=3, rank=rank)
    assert "world size 3" in line
    assert "1 x 2 x 1 = 2" in line


@pytest.mark.parametrize("missing", ["--num-layers", "--seq-length", "--micro-batch-size", "--lr"])
def test_a_missing_required_flag_is_named(capsys, missing: str):
    flags = [*MODEL, *DATA, *STEPS]
    place = flags.index(missing)
    assert missing in refusal(capsys, *flags[:place], *flags[place + 2 :])


def test_judging_opens_no_file(monkeypatch):
    def refuse_to_open(*args, **kwargs):
        raise AssertionError(f"opened {args[0]}")

    parse(*SMALL_RUN)  # imports are done
    monkeypatch.setattr("builtins.open", refuse_to_open)
    monkeypatch.setattr("io.open", refuse_to_open)
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/nowhere/t.json"]
    assert parse(*SMALL_RUN, *flags, "--load", "/nowhere", "--save", "/nowhere").save == "/nowhere"


def test_virtual_stages_need_a_pipeline_and_enough_micro_batches(capsys):
    flags = ["--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"]
    assert "--pipeline-model-parallel-size" in refusal(capsys, *SMALL_RUN, *flags)
    flags += ["--pipeline-model-parallel-size", "2"]
    assert parse(*SMALL_RUN, *flags, world_size=2).virtual_pipeline_model_parallel_size == 2
    evaluated = ["--eval-global-batch-size", "3"]
    told = refusal(capsys, *SMALL_RUN, *flags, *evaluated, world_size=2)
    assert "--eval-global-batch-size 3 is 3 micro-batches a replica" in told
    parse(*SMALL_RUN, *flags, *evaluated, "--eval-iters", "0", world_size=2)
    flags += ["--global-batch-size", "3"]
    told = refusal(capsys, *SMALL_RUN, *flags, world_size=2)
    assert "--global-batch-size 3 is 3 micro-batches a replica" in told
    ramp = ["--rampup-batch-size", "2", "1", "4", "--train-samples", "20"]
    steps = [*MODEL, *DATA, "--micro-batch-size", "1", "--lr", "1e-3", "--eval-iters", "1"]
    flags[-1] = "4"
    told = refusal(capsys, *steps, *flags, *ramp, world_size=2)
    assert "--global-batch-size 3 is 3 micro-batches a replica" in told
    ramp[2] = "2"
    parse(*steps, *flags, *ramp, world_size=2)


def test_groups_of_experts_change_nothing_without_experts(capsys):
    args = parse(*SMALL_RUN, *["--moe-router-num-groups", "2", "--moe-router-group-topk", "1"])
    assert args.moe_router_num_groups is args.moe_router_group_topk is None
    told = refusal(capsys, *SMALL_RUN, "--expert-model-parallel-size", "0")
    assert "--expert-model-parallel-size 0" in told


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--window-size 31,0", {"full": 0, "window": 3}),
        ("--window-size 31,0 --window-attn-skip-freq 4", {"full": 0, "window": 3}),
        ("--window-size 31,0 --window-attn-skip-freq 2", {"full": 1, "window": 2}),
        ("", {"full": 3, "window": 0}),
    ],
)
def test_layers_of_predictions_are_counted_with_those_of_the_decoder(flags, layers):
    predicted = ["--untie-embeddings-and-output-weights", "--mtp-num-layers", "1"]
    config = parse_arguments([*SMALL_RUN, *predicted, *flags.split()], {"WORLD_SIZE": "1"})
    assert config.model.layers_by_mask() == layers


@pytest.mark.parametrize(
    "name", ["num_experts", "mtp_num_layers", "exit_interval", "exit_duration_in_mins"]
)
def test_zero_is_none_where_megatron_takes_it_so(name: str):
    args = parse(*SMALL_RUN, "--" + name.replace("_", "-"), "0")
    assert getattr(args, name) is None


def test_our_own_layer_spec_is_allowed():
    args = parse(*SMALL_RUN, "--spec", "megatron_cp.mcore.spec", "gpt_layer_spec")
    assert args.spec == ["megatron_cp.mcore.spec", "gpt_layer_spec"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("[1,0,1]", [1, 0, 1]),
        ("([1]*3+[0]*1)*2", [1, 1, 1, 0, 1, 1, 1, 0]),
        ("[1]*2 + [0]", [1, 1, 0]),
    ],
)
def test_layer_lists_are_read_as_megatron_reads_them(text: str, value):
    assert layers_of(text) == value


@pytest.mark.parametrize("text", ["__import__('os')", "[1]*x", "", "[a]"])
def test_layer_lists_are_not_evaluated_as_python(text: str):
    with pytest.raises(ValueError):
        layers_of(text)


@pytest.mark.parametrize(
    ("gpus", "flags", "environment", "said"),
    [
        (1, (), {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, ["2 ranks on a machine that shows 1 GPU(s)"]),
        (2, (), {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, []),
        (1, (), {"LOCAL_RANK": "1"}, ["2 ranks on a machine that shows 1 GPU(s)"]),
        (None, (), {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, []),
        (2, ("--distributed-backend", "gloo"), {"WORLD_SIZE": "2"}, ["gloo sums no gradients on GPUs"]),
        (1, ("--distributed-backend", "gloo"), {}, []),
    ],
)  # fmt: skip
def test_ranks_need_a_gpu_each_and_a_backend_that_sums_there(gpus, flags, environment, said):
    machine = replace(GPU_MACHINE, num_gpus=gpus)
    flags = (*SMALL_RUN, "--global-batch-size", "8", *flags)
    _, reasons = judge_arguments(flags, environment, machine)
    assert len(reasons) == len(said), reasons
    assert all(part in reason for part, reason in zip(said, reasons, strict=True))


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_a_launcher_that_exports_nonsense_is_refused(capsys, name: str):
    with pytest.raises(SystemExit):
        parse_arguments(SMALL_RUN, {name: "-3"})
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_that_nobody_told_their_rank_do_not_train_alone(name: str):
    two_ranks = [*SMALL_RUN, "--context-parallel-size", "2"]
    _, (reason,) = judge_arguments(two_ranks, {name: "2", "SLURM_PROCID": "1"})
    assert f"{name}=2 is set and WORLD_SIZE is not" in reason and "torchrun" in reason
    assert judge_arguments(two_ranks, {name: "2", "WORLD_SIZE": "2", "RANK": "1"})[1] == []
    assert judge_arguments(SMALL_RUN, {name: "1", "SLURM_NTASKS": "8"})[1] == []


def test_leaving_a_flag_out_is_advised_only_where_no_result_depends_on_it():
    """Layouts, graphs, overlap, files and clocks; never a model, its data or its optimizer."""
    advised = {
        name
        for name in known_flags.MEGATRON_NAMES
        if "leave it out" in (known_flags.refusal(name) or "")
    }
    harmless = re.compile(
        r"((no|disable)-)?tp-comm-"
        r"|((enable|calc)-)?(ft|inprocess)-|error-injection-|fault-injector-|adlr-autoresume|replication"
        r"|((no|disable)-)?flight-recorder-|config-logger-dir|dump-param-to-param-group-map"
        r"|gpu-sniff-test-interval|run-workload-inspector-server|record-shapes"
        r"|save-(activations|[dw]grads|params|tokens-per-expert)-interval"
        r"|profile|(use-)?pytorch-profiler|nvtx-ranges|check-weight-hash|verify-integrity"
        r"|memory-snapshot-path|record-memory-history"
        r"|otel-|ckpt-fully-parallel-(load|save-)|ckpt-pg-tensors-cache-"
        r"|apply-residual-connection-post-layernorm"  # Megatron-Core reads it nowhere
    )
    assert advised and all(harmless.match(name) for name in advised)
    texts = [known_flags.refusal(name) for name in known_flags.MEGATRON_NAMES]
    assert not [text for text in texts if "drop the flag" in text]
    for name in (
        "openai-gelu",
        "rampup-batch-size",
        "use-mup",
    ):
        assert "--spec megatron_cp.mcore.spec gpt_layer_spec" in known_flags.refusal(f"--{name}")


def test_a_spec_is_named_once(capsys):
    ours = ["--spec", "megatron_cp.mcore.spec", "gpt_layer_spec"]
    assert parse(*SMALL_RUN, *ours).spec == ours[1:]
    assert "--spec is given twice" in refusal(capsys, *SMALL_RUN, *ours, *ours)
