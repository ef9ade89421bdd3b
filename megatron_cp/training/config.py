"""What a run is, decided once: the checked command line as frozen, typed sections.

    argv -> arguments/ (draft, completed, checked) -> TrainConfig -> everything else, which only reads

Every value that the loop reads has Megatron-LM's name and lies in one section. Flags that only help to
complete others (`--lr-warmup-fraction`) end in `arguments/`; the whole list stays in
`TrainConfig.arguments`, for what is logged, compared between ranks, kept in checkpoints, or handed
to Megatron-Core under the same name.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_cp.mcore.settings.layer_patterns import layer_pattern
from megatron_cp.mcore.settings.mixers import SOFTMAX, layer_mixers, prediction_mixers

Windows = int | list[int] | None


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Who this rank is, how ranks share the work, and how they exchange gradients."""

    rank: int
    world_size: int
    local_rank: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    spans_replicas: bool
    """--hybrid-context-parallel: under Megatron-LM's own name Megatron-Core would switch its scheduler on."""
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    use_tp_pp_dp_mapping: bool
    num_distributed_optimizer_instances: int
    data_parallel_size: int
    overlap_p2p_comm: bool
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    fp8_param_gather: bool
    accumulate_allreduce_grads_in_fp32: bool
    ddp_bucket_size: int | None
    distributed_backend: Literal["nccl", "gloo"] | None
    distributed_timeout_minutes: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What this loop itself must know of the model; Megatron-Core gets `TrainConfig.arguments`."""

    num_layers: int
    attention_dropout: float
    window_size: tuple[int, int] | None
    window_attn_skip_freq: Windows
    experimental_attention_variant: str | None
    linear_attention_freq: Windows
    hybrid_layer_pattern: str | None
    mtp_num_layers: int | None
    loss_chunk_size: int | None
    spec: list[str] | None
    bf16: bool
    fp16: bool
    fp8: str | None
    qk_clip: bool
    log_max_attention_logit: bool
    use_cpu_initialization: bool
    calculate_per_token_loss: bool
    cp_backend: str | None

    @property
    def dtype(self) -> torch.dtype:
        """Format of parameters and activations."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    def layers_by_mask(self) -> dict[str, int]:
        """Returns how many layers attend in full and how many through the window; others do neither.

        Layers of predictions follow those of the decoder.
        """
        mixers = layer_mixers(self) + prediction_mixers(self)
        is_window = [self.window_size is not None] * len(mixers)
        if self.window_size is not None and self.window_attn_skip_freq is not None:
            frequency = self.window_attn_skip_freq
            is_window = layer_pattern("window_attn_skip_freq", frequency, len(mixers))
        softmax = [one for one, mixer in zip(is_window, mixers, strict=True) if mixer == SOFTMAX]
        return {"full": softmax.count(False), "window": softmax.count(True)}

    @property
    def shown_mask(self) -> str:
        """Returns whose balance is logged and whose plans are kept: the full mask, unless all layers have a window."""
        layers = self.layers_by_mask()
        return "window" if layers["window"] and not layers["full"] else "full"


@dataclass(frozen=True, kw_only=True)
class StepsConfig:
    """Batches, number of steps, evaluation, and when to stop. Sizes count packs."""

    micro_batch_size: int
    global_batch_size: int
    batch_schedule: tuple[tuple[int, int], ...]
    """(packs consumed, packs per step from there on); the last size is `global_batch_size`."""
    eval_global_batch_size: int
    eval_micro_batch_size: int
    train_iters: int
    train_samples: int | None
    iterations_to_skip: list[int]
    skip_train: bool
    eval_iters: int
    eval_interval: int | None
    start_eval_at_iter: int | None
    full_validation: bool
    multiple_validation_sets: bool
    validation_set_names: list[str] | None
    exit_interval: int | None
    exit_duration_in_mins: int | None
    exit_signal_handler: bool
    exit_signal: str
    seed: int
    data_parallel_random_init: bool
    deterministic_mode: bool
    check_for_nan_in_loss_and_grad: bool
    check_for_spiky_loss: bool
    check_for_large_grads: bool
    rerun_mode: Literal["disabled", "validate_results", "report_stats"]
    on_bad_step: Literal["stop", "skip"]
    bad_steps_in_a_row: int
    check_weight_hash_across_dp_replicas_interval: int | None
    manual_gc: bool
    manual_gc_interval: int
    plan_only: bool
    plan_batches: int

    @property
    def looks_at_gradients(self) -> bool:
        """Whether anything asks for the norm of a rank's gradients before the update."""
        checks = self.check_for_nan_in_loss_and_grad or self.check_for_large_grads
        return checks or self.rerun_mode == "report_stats"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule; `*_steps` count packs, as Megatron-Core's scheduler does."""

    optimizer: str
    layer_wise_optimizer: bool
    """Whole layers of optimizer state are spread over replicas (muon)."""
    lr: float
    min_lr: float
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str
    wd_incr_steps: int
    lr_warmup_init: float
    lr_warmup_steps: float
    lr_decay_steps: int
    lr_decay_style: str
    wsd_decay_steps: int | None
    lr_wsd_decay_style: str
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where documents come from, how they are packed, and the vocabulary."""

    data_path: list[str] | None
    data_args_path: str | None
    per_split_data_args_path: str | None
    train_data_path: list[str] | None
    valid_data_path: list[str] | None
    test_data_path: list[str] | None
    split: str | None
    mock_data: bool
    sft: bool
    sft_tokenizer_prompt_format: str
    fim_data: bool
    fim_rate: float
    fim_spm_rate: float
    fim_split_sample: str | None
    fim_fragment_rate: float | None
    fim_no_prefix: str | None
    fim_prefix_token: str
    fim_middle_token: str
    fim_suffix_token: str
    fim_pad_token: str
    fim_eod_token: str
    packing: Literal["split", "keep", "megatron"]
    verify_token_files: bool
    data_cache_path: str | None
    mid_level_dataset_surplus: float
    seq_length: int
    num_workers: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    tokenizer_type: str | None
    tokenizer_model: str | None
    vocab_file: str | None
    merge_file: str | None
    tiktoken_pattern: str | None
    tiktoken_num_special_tokens: int
    tokenizer_special_tokens: list[str] | None
    make_vocab_size_divisible_by: int
    vocab_size: int | None
    """None until the tokenizer was read."""
    padded_vocab_size: int
    """0 until the tokenizer was read, unless it was given."""
    eod_token: int | None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is loaded and saved."""

    save: str | None
    save_interval: int | None
    save_retain_interval: int | None
    load: str | None
    pretrained_checkpoint: str | None
    ckpt_step: int | None
    ckpt_format: Literal["torch_dist", "torch"]
    async_save: bool
    ckpt_fully_parallel_save: bool
    verify_integrity: bool
    verify_checkpoint: bool
    ckpt_fallback: bool | None
    """None: after an elastic restart alone."""
    on_save_error: Literal["continue", "stop"]
    dist_ckpt_strictness: str
    dist_ckpt_optim_fully_reshardable: bool
    exit_on_missing_checkpoint: bool
    finetune: bool
    no_save_optim: bool
    no_save_rng: bool
    no_load_optim: bool
    no_load_rng: bool

    @property
    def wants_optimizer(self) -> bool:
        """Whether a load asks for the optimizer's state."""
        return not (self.finetune or self.no_load_optim)

    @property
    def wants_random_states(self) -> bool:
        """Whether a load asks for random states."""
        return not (self.finetune or self.no_load_rng)


@dataclass(frozen=True, kw_only=True)
class RecordsConfig:
    """What is logged, and where."""

    run_dir: str | None
    log_text_samples: int
    log_interval: int
    log_throughput: bool
    log_energy: bool
    log_params_norm: bool
    log_progress: bool
    log_straggler: bool
    straggler_minmax_count: int
    timing_log_level: int
    timing_log_option: str
    log_timers_to_tensorboard: bool
    barrier_with_L1_time: bool  # noqa: N815  Megatron-LM's name
    log_memory_interval: int | None
    profile: bool
    profile_step_start: int
    profile_step_end: int
    profile_ranks: list[int]
    record_memory_history: bool
    memory_snapshot_path: str
    tensorboard_dir: str | None
    tensorboard_log_interval: int
    tensorboard_queue_size: int
    log_validation_ppl_to_tensorboard: bool
    log_memory_to_tensorboard: bool
    log_world_size_to_tensorboard: bool
    wandb: bool
    wandb_project: str | None
    wandb_exp_name: str | None
    wandb_save_dir: str | None
    wandb_entity: str | None
    wandb_run_id: str | None


# What does not describe the run but this start of it.
_NOT_OF_THE_RUN = frozenset({"notes", "discarded", "machine", "local_world_size"})
_OF_THE_RANK = frozenset({"rank", "local_rank"})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A checked command line. Made by `arguments.parse_arguments`, read by everything else."""

    parallel: ParallelConfig
    model: ModelConfig
    steps: StepsConfig
    optimizer: OptimizerConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    records: RecordsConfig
    arguments: Mapping[str, Any]
    """Every argument by Megatron-LM's name, completed."""
    notes: tuple[str, ...]
    """Lines to print once."""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], notes: tuple[str, ...]) -> TrainConfig:
        """Returns the configuration that holds these completed arguments."""
        kept = {k: v for k, v in arguments.items() if k not in _NOT_OF_THE_RUN}
        kept["padded_vocab_size"] = kept.get("padded_vocab_size") or 0
        kept.setdefault("eod_token", None)
        sections = {
            name: kind(**{field.name: kept[field.name] for field in dataclasses.fields(kind)})
            for name, kind in SECTIONS.items()
        }
        return cls(**sections, arguments=kept, notes=notes)

    def with_arguments(self, **values: Any) -> TrainConfig:
        """Returns a copy in which these arguments have other values."""
        return TrainConfig.from_arguments({**self.arguments, **values}, self.notes)

    def with_note(self, note: str) -> TrainConfig:
        """Returns a copy that says one line more."""
        return dataclasses.replace(self, notes=(*self.notes, note))

    def namespace(self) -> Namespace:
        """Returns the arguments of the job, equal on all its ranks, as Megatron-LM keeps them."""
        return Namespace(**{k: v for k, v in self.arguments.items() if k not in _OF_THE_RANK})


SECTIONS: dict[str, Any] = {
    "parallel": ParallelConfig,
    "model": ModelConfig,
    "steps": StepsConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "records": RecordsConfig,
}
