"""What runs inside ranks: conversions, and logits of a converted model in megatron-core."""

import multiprocessing
from pathlib import Path

import numpy as np
import torch

from megatron_cp.training.checkpoint.writer import saving_in_this_process
from tests.mcore.packs import Pack, losses, planned
from tests.mcore.tiny_gpt import Case, enter_megatron, parallel_state
from tests.training.checkpoints import write_legacy


def convert(rank: int, world_size: int, to: str, load: Path, save: Path, options: dict):
    """The report of one conversion."""
    enter_megatron()
    from megatron_cp.models.hugging_face import convert

    request = convert.Request(load=load, save=save, show_progress=False, **options)
    direction = {"megatron": convert.to_megatron, "hf": convert.to_hugging_face}[to]
    report = direction(request)
    return {"left": report.left, "carried": report.carried, "num_tensors": report.num_tensors}


def refusal(rank: int, world_size: int, to: str, load: Path, save: Path, options: dict):
    """Why a conversion is refused; caught here, because a rank that fails is started anew."""
    enter_megatron()
    from megatron_cp.models.hugging_face.refusal import ConversionError

    try:
        convert(rank, world_size, to, load, save, options)
    except ConversionError as problem:
        return problem.reasons
    return None


def logits(
    rank: int, world_size: int, root: Path, case: Case, tokens: np.ndarray, lengths: tuple
) -> tuple[np.ndarray, np.ndarray] | None:
    """(global rows, logits of this rank's rows and part of the vocabulary), on a last stage."""
    with parallel_state(case) as groups:
        model, config, _ = load_model(root, case, groups)
        plans = planned(case, config, _pack(tokens, lengths))
        rows = np.asarray(plans.plans["full"].global_from_local)[groups.get_context_parallel_rank()]
        output = forward(model, plans, groups, rows.size)
        if not groups.is_pipeline_last_stage():
            return None
        assert output.shape[1] == rows.size
        return rows, output[0].numpy()


def predictions(
    rank: int, world_size: int, root: Path, case: Case, tokens: np.ndarray, lengths: tuple
) -> tuple[np.ndarray, np.ndarray]:
    """(global rows, logits of the prediction layer), of one stage."""
    with parallel_state(case) as groups:
        from megatron_cp.mcore.batch import local_batch

        model, config, _ = load_model(root, case, groups)
        plans = planned(case, config, _pack(tokens, lengths))
        rows = np.asarray(plans.plans["full"].global_from_local)[groups.get_context_parallel_rank()]
        cp_group = groups.get_context_parallel_group()
        local = local_batch(plans, cp_group.rank(), "cpu", cp_group=cp_group)
        seen = []  # of the prediction layer first, then of the model; the loss works in place
        model.output_layer.register_forward_hook(
            lambda module, given, out: seen.append(out[0].clone())
        )
        with torch.no_grad():
            losses(model, local)
        assert len(seen) == 2
        return rows, seen[0][:, 0].numpy()


def _pack(tokens: np.ndarray, lengths: tuple) -> Pack:
    return Pack(
        tokens=tokens,
        labels=tokens,
        loss_mask=np.ones(tokens.size, np.float32),
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        lengths=lengths,
    )


def load_model(root: Path, case: Case, groups):
    """(this rank's stage with the converted weights, its configuration, the arguments)."""
    from megatron.core import dist_checkpointing

    from megatron_cp.models.build import build_model
    from megatron_cp.models.gpt import Layout, transformer_config
    from megatron_cp.models.hugging_face.checks import with_stored_predictions
    from megatron_cp.models.hugging_face.config_file import arguments_of, read_config
    from megatron_cp.models.hugging_face.rows import PREDICTIONS
    from megatron_cp.models.hugging_face.torch_dist_folder import TorchDistReader

    arguments = with_stored_predictions(
        arguments_of(read_config(root / "hugging_face"), make_vocab_size_divisible_by=128),
        TorchDistReader(root / "iter_0000001").tensors,
        PREDICTIONS,
        (),
    )
    layout = Layout(tensor=case.tp, pipeline=case.pp, context=case.cp, expert=case.ep)
    config = transformer_config(arguments, layout=layout, **dict(case.options))
    model = build_model(
        config,
        arguments,
        vocab_size=arguments["padded_vocab_size"],
        pre_process=groups.is_pipeline_first_stage(),
        post_process=groups.is_pipeline_last_stage(),
    ).eval()
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True),
    }
    wanted = {"model": model.sharded_state_dict(metadata=metadata)}
    loaded = dist_checkpointing.load(wanted, str(root / "iter_0000001"))
    model.load_state_dict(loaded["model"], strict=True)
    return model, config, arguments


def forward(model, plans, groups, num_rows: int) -> torch.Tensor | None:
    """The stage's output after one micro-batch went through the pipeline."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_cp.mcore.batch import local_batch

    cp_group = groups.get_context_parallel_group()
    local = local_batch(plans, cp_group.rank(), "cpu", cp_group=cp_group)

    def step(_, model):
        output = model(local.tokens, local.position_ids, None, packed_seq_params=local.params)
        return output, lambda output, non_loss_data: output

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=num_rows * cp_group.size(),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return outputs[0] if outputs else None


def flags(rank: int, world_size: int, folder: Path) -> list[str]:
    """The command line of pretrain_gpt.py for a Hugging Face folder, as the tool prints it."""
    enter_megatron()
    from megatron_cp.models.hugging_face.checks import with_stored_predictions
    from megatron_cp.models.hugging_face.config_file import arguments_of, family_of, read_config
    from megatron_cp.models.hugging_face.safetensors_folder import SafetensorsReader
    from tools.convert_checkpoint import training_flags

    config = read_config(folder)
    names, family = SafetensorsReader(folder).infos, family_of(config)
    arguments = arguments_of(config)
    at = family.first_prediction(arguments)
    return training_flags(with_stored_predictions(arguments, names, at, ()))


def said_differently(rank: int, world_size: int, config: dict) -> list[str]:
    """What Megatron's configuration has otherwise from the printed flags than from the converted arguments."""
    enter_megatron()
    from megatron_cp.models.gpt import transformer_config
    from megatron_cp.models.hugging_face.config_file import arguments_of
    from megatron_cp.training.arguments import parse_arguments
    from tools.convert_checkpoint import training_flags

    arguments = arguments_of(config)
    run = ["--mock-data", "--seq-length", "64", "--micro-batch-size", "1", "--train-iters", "1"]
    run += ["--vocab-size", str(config["vocab_size"]), "--lr", "0.1"]
    parsed = parse_arguments([*training_flags(arguments), *run], {}).arguments
    one, other = (vars(transformer_config(said)) for said in (arguments, parsed))
    of_runs = {"use_cpu_initialization", "overlap_p2p_comm", "calculate_per_token_loss"}
    of_runs |= {"init_method", "output_layer_init_method", "embedding_init_method"}
    return [name for name in one if one[name] != other[name] and name not in of_runs]


def taken_differently(rank: int, world_size: int, config: dict, folder: Path) -> dict:
    """What --use-checkpoint-args makes of a converted checkpoint's arguments otherwise than the printed flags."""
    enter_megatron()
    from megatron_cp.models.hugging_face import convert
    from megatron_cp.models.hugging_face.config_file import arguments_of
    from megatron_cp.training.arguments import judge_arguments
    from megatron_cp.training.arguments.machine import GPU_MACHINE
    from tools.convert_checkpoint import training_flags

    arguments = arguments_of(config, make_vocab_size_divisible_by=128)
    request = convert.Request(load=folder, save=folder)
    saved = convert._saved_arguments(request, arguments, torch.bfloat16)
    write_legacy(folder, {}, args=saved)
    run = ["--mock-data", "--seq-length", "64", "--micro-batch-size", "1", "--train-iters", "1"]
    run += ["--vocab-size", str(config["vocab_size"]), "--lr", "0.1", "--load", str(folder)]
    printed, refused = judge_arguments([*training_flags(arguments), *run], {}, GPU_MACHINE)
    taken, also = judge_arguments([*run, "--use-checkpoint-args"], {}, GPU_MACHINE)
    assert not refused and not also, (refused, also)
    # The second is an older word for --position-embedding-type rope; the others are said nowhere in flags.
    others = {"use_checkpoint_args", "use_rotary_position_embeddings"}
    others |= {"notes", "machine", "tokenizer_type", "padded_vocab_size"}
    return {
        name: (value, getattr(taken, name))
        for name, value in vars(printed).items()
        if name not in others and value != getattr(taken, name)
    }


def load_and_save(rank: int, world_size: int, root: Path, saved: Path, case: Case) -> None:
    """Loads the converted model at this layout and saves it with megatron-core."""
    with parallel_state(case) as groups:
        from megatron.core import dist_checkpointing

        model, _, _ = load_model(root, case, groups)
        metadata = {
            "singleton_local_shards": False,
            "dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True),
        }
        content = {"model": model.sharded_state_dict(metadata=metadata), "iteration": 7}
        folder = saved / "iter_0000007"
        if rank == 0:
            folder.mkdir(parents=True)
            (saved / "latest_checkpointed_iteration.txt").write_text("7")
        torch.distributed.barrier()
        # The pool's workers are daemons, which may not have children; Megatron's writers are.
        process = multiprocessing.current_process()
        process._config["daemon"] = False
        try:
            with saving_in_this_process():  # Megatron's own way leaves a process in this rank
                dist_checkpointing.save(content, str(folder))
        finally:
            process._config["daemon"] = True
