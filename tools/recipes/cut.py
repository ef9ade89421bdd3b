"""A published recipe, made small enough for a few CPU ranks: decisions over words, nothing runs.

    cut(recipe, ranks=4) -> Cut(argv, ranks, changes)

What is kept is the shape: kinds of layers and their order, ratios of heads, experts and widths, stages,
parallel sizes where the ranks allow, schedules. Each change is one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.recipes.command_line import CommandLine
from tools.recipes.layout import Ranks, cut_layout, cut_stages
from tools.recipes.sizes import (
    cut_data,
    cut_experts,
    cut_layers,
    cut_steps,
    cut_width,
    least_layers,
)


def _flags(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PATHS = _flags(
    "--data-path --data-args-path --per-split-data-args-path --train-data-path --valid-data-path "
    "--test-data-path --data-cache-path --tokenizer-type --tokenizer-model --vocab-file --merge-file "
    "--tiktoken-pattern --packing --mid-level-dataset-surplus --no-mmap-bin-files --dataloader-type "
    "--fim-data --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix "
    "--fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token"
)
_CHECKPOINTS = _flags(
    "--save --load --save-interval --persistent-save-interval --save-retain-interval --ckpt-step --ckpt-format "
    "--finetune --no-load-optim --no-load-rng --no-save-optim --no-save-rng --dist-ckpt-strictness "
    "--exit-on-missing-checkpoint --use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler "
    "--override-opt_param-scheduler --override-opt-param-scheduler --async-save --use-persistent-ckpt-worker "
    "--ckpt-fully-parallel-load --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save "
    "--ckpt-assume-constant-structure --auto-detect-ckpt-format --async-strategy --async-ckpt-use-cpu-shm "
    "--use-dist-ckpt --verify-integrity"
)
_RECORDS = _flags(
    "--tensorboard-dir --tensorboard-log-interval --tensorboard-queue-size --wandb-project --wandb-exp-name "
    "--wandb-save-dir --wandb-entity --log-timers-to-tensorboard --log-memory-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --timing-log-level "
    "--timing-log-option --logging-level --log-throughput --log-progress"
)
_ON_A_GPU = _flags(
    "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-shared-expert-overlap "
    "--moe-router-padding-for-quantization --moe-router-padding-for-fp8 "
    "--moe-flex-dispatcher-backend --moe-enable-deepep --moe-layer-recompute "
    "--use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype "
    "--exp-avg-sq-dtype --optimizer-cpu-offload --optimizer-offload-fraction "
    "--use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads "
    "--no-pin-cpu-params --fp8-format --fp8-recipe --fp8-margin --fp8-amax-history-len "
    "--fp8-amax-compute-algo --no-fp8-wgrad --fp8-param-gather --first-last-layers-bf16"
)
_ROUNDING = _flags(
    "--bf16 --fp16 --fp32-residual-connection --grad-reduce-in-bf16 --fp16-lm-cross-entropy "
    "--loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl"
)
_DOCUMENTS = ("--reset-attention-mask", "--reset-position-ids")


@dataclass(frozen=True)
class Cut:
    """A small run: its words, its ranks, and how it differs from the recipe."""

    argv: tuple[str, ...]
    ranks: Ranks
    changes: tuple[str, ...]


def cut(
    argv: Sequence[str],
    most_ranks: int,
    *,
    steps: int = 3,
    context: int | None = None,
    documents: bool = False,
    keep_precision: bool = False,
) -> Cut:
    """Returns the recipe at a size that `most_ranks` CPU ranks run in seconds.

    Args:
        argv: its words, as a shell expanded them.
        most_ranks: ranks that may be started; its parallel sizes are halved until they fit.
        steps: steps to train.
        context: the context-parallel size, in place of its own.
        documents: whether each token sees its own document alone, in place of the whole pack.
        keep_precision: whether bf16 and fp16 stay; without them losses compare to rounding of fp32.
    """
    line = CommandLine.of(argv)
    _without_paths(line)
    _without_gpu(line)
    if not keep_precision:
        line.drop(_ROUNDING, "fp32, so that losses compare")
    ranks = cut_layout(line, most_ranks, context)
    cut_layers(line, cut_stages(line, ranks.pipeline, least_layers(line)))
    cut_width(line)
    cut_experts(line)
    cut_data(line)
    cut_steps(line, steps, ranks.pipeline)
    for flag in ("--attention-dropout", "--hidden-dropout"):
        line.set(flag, "0.0", why="without dropout losses compare")
    if documents:
        for flag in _DOCUMENTS:
            line.set(flag, why="documents see themselves alone")
    return Cut(tuple(line.argv), ranks, tuple(line.changes))


def _without_paths(line: CommandLine) -> None:
    line.drop(_PATHS, "mock documents")
    line.drop(_CHECKPOINTS, "nothing is loaded or saved")
    line.drop(_RECORDS, "the run's own records are read")
    line.set("--no-wandb")


def _without_gpu(line: CommandLine) -> None:
    """Takes out what only a GPU has; the mathematics stay."""
    line.drop(_ON_A_GPU, "it needs a GPU")
    line.set("--transformer-impl", "local", why="Transformer Engine needs a GPU")
    if line.has("--distributed-backend"):
        line.set("--distributed-backend", "gloo", why="nccl needs a GPU")
    if line.text("--moe-token-dispatcher-type") == "flex":
        line.set("--moe-token-dispatcher-type", "alltoall", why="flex needs a GPU")
    modules = line.values.get("--recompute-modules", [])
    if "moe_act" in modules:
        kept = [name for name in modules if name != "moe_act"]
        line.changes.append("--recompute-modules without moe_act: it needs grouped GEMM on a GPU")
        line.values["--recompute-modules"] = kept
        if not kept:
            line.drop(("--recompute-modules", "--recompute-granularity"), "nothing is left of it")
