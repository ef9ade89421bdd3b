"""What Megatron-LM's command line knows and this one does not serve: refused by name, or noted.

Nothing of a user's script is dropped in silence. A flag that would change the model or the run and
is not served here is an error that says what to do; a flag that merely asks for what happens anyway
is noted; any other name is unknown. To leave a flag out is advised only where no result depends on it.
"""

from __future__ import annotations

from megatron_cp.training.arguments.megatron_names import MEGATRON_NAMES

_STRAGGLERS = "--log-straggler looks for slow ranks from the first step to the last"
_ONE_LOGGER = "one-logger is never used"
_ONE_WRITER = "with --async-save a process forked for each save writes it and ends"
_NCCL = "it tunes how NCCL sends, not what; NCCL's own environment variables do that here"
_NOT_OVERLAPPED = "it hides time of sends, which is not hidden here; results are the same"
_NOT_DEFERRED = "the embedding's gradient is computed in its own backward pass; it is the same"

# flag -> (number of values that follow it, -1 for any, why it changes nothing here)
NOTED: dict[str, tuple[int, str]] = {
    "--use-mcore-models": (0, "models are always those of Megatron-Core"),
    "--use-flash-attn": (0, "attention is always that of megatron_cp"),
    "--attention-backend": (
        1,
        "attention is always that of megatron_cp; --cp-backend chooses its kernel",
    ),
    "--attention-softmax-in-fp32": (0, "softmax is always computed in fp32 or better"),
    "--no-create-attention-mask-in-dataloader": (0, "no dense mask is ever built"),
    "--no-masked-softmax-fusion": (0, "softmax is part of the attention kernel"),
    "--use-dist-ckpt": (0, "--ckpt-format torch_dist, the default, is the distributed format"),
    "--auto-detect-ckpt-format": (0, "the format is read from the checkpoint"),
    "--ckpt-fully-parallel-save": (
        0,
        "a save is spread over the replicas unless --no-ckpt-fully-parallel-save is given",
    ),
    "--ckpt-fully-parallel-load": (0, "every rank reads what it needs"),
    "--ckpt-assume-constant-structure": (0, "the save plan is made anew each time"),
    "--dist-ckpt-format": (1, "--ckpt-format says in which format checkpoints are saved"),
    "--no-mmap-bin-files": (0, "token files are always mapped"),
    "--data-cache-path": (1, "no index caches are written"),
    "--num-dataset-builder-threads": (1, "no indices are built ahead"),
    "--dataloader-fast-cache-load": (0, "no index caches are read"),
    "--dataloader-type": (1, "packs are drawn in a shuffled order by a loader of its own"),
    "--no-one-logger": (0, "one-logger is never used"),
    "--disable-msc": (0, "the multi-storage client is never used"),
    "--rerun-mode": (1, "there is no rerun machine; bad steps stop the run"),
    "--enable-experimental": (0, "nothing experimental of Megatron-Core is switched by it here"),
    "--lazy-mpu-init": (0, "groups are made at the start"),
    # what is logged
    "--log-batch-size-to-tensorboard": (0, "the batch size is always logged"),
    "--no-log-loss-scale-to-tensorboard": (0, "the loss scale is always 1 and logged as such"),
    "--disable-log-loss-scale-to-tensorboard": (0, "the loss scale is always 1 and logged as such"),
    "--logging-level": (1, "log lines have no levels; all are printed"),
    "--disable-straggler-on-startup": (0, _STRAGGLERS),
    "--straggler-ctrlr-port": (1, _STRAGGLERS),
    "--enable-one-logger": (0, _ONE_LOGGER),
    "--one-logger-project": (1, _ONE_LOGGER),
    "--one-logger-run-name": (1, _ONE_LOGGER),
    "--one-logger-async": (0, _ONE_LOGGER),
    "--app-tag-run-name": (1, _ONE_LOGGER),
    "--app-tag-run-version": (1, _ONE_LOGGER),
    # how checkpoints are written
    "--async-strategy": (1, _ONE_WRITER),
    "--use-persistent-ckpt-worker": (0, _ONE_WRITER),
    "--async-ckpt-use-cpu-shm": (0, _ONE_WRITER),
    "--async-ckpt-cpu-priority": (1, _ONE_WRITER),
    "--async-ckpt-io-priority": (1, _ONE_WRITER),
    "--exit-signal-handler-for-dataloader": (0, "loader workers never see the exit signal"),
    # where ranks lie and how they send
    "--use-tp-pp-dp-mapping": (
        0,
        "ranks are numbered tensor, context, data, pipeline; their order changes speed alone",
    ),
    "--num-distributed-optimizer-instances": (
        1,
        "the optimizer is sharded over all replicas; that changes memory and speed alone",
    ),
    "--expert-tensor-parallel-size": (1, "it splits experts alone, and no model here has any"),
    "--disable-gloo-process-groups": (0, "groups for the CPU are made all the same"),
    "--enable-gloo-process-groups": (0, "groups for the CPU are always made"),
    "--distributed-timeout-seconds-after-init": (
        1,
        "--distributed-timeout-minutes holds from start to end",
    ),
    "--nccl-communicator-config-path": (1, _NCCL),
    "--high-priority-stream-groups": (-1, _NCCL),
    "--use-nccl-ub": (0, _NCCL),
    "--disable-symmetric-registration": (0, _NCCL),
    "--use-sharp": (0, _NCCL),
    "--sharp-enabled-group": (1, _NCCL),
    "--ddp-num-buckets": (1, "--ddp-bucket-size alone sets the size of gradient buckets"),
    "--ddp-pad-buckets-for-high-nccl-busbw": (0, _NCCL),
    "--ddp-average-in-collective": (0, "gradients are scaled, then summed: the same mean"),
    "--no-gradient-reduce-div-fusion": (0, "gradients are scaled, then summed: the same mean"),
    # when things are computed
    "--no-align-grad-reduce": (0, "each pipeline stage reduces gradients when they are ready"),
    "--disable-align-grad-reduce": (0, "each pipeline stage reduces gradients when they are ready"),
    "--no-align-param-gather": (0, "each pipeline stage gathers parameters when it needs them"),
    "--overlap-param-gather-with-optimizer-step": (0, _NOT_OVERLAPPED),
    "--overlap-p2p-communication-warmup-flush": (0, _NOT_OVERLAPPED),
    "--no-async-tensor-model-parallel-allreduce": (0, "only the order of sends would differ"),
    "--defer-embedding-wgrad-compute": (0, _NOT_DEFERRED),
    "--wgrad-deferral-limit": (1, _NOT_DEFERRED),
    "--tp-comm-overlap": (0, _NOT_OVERLAPPED),
    "--tp-comm-overlap-cfg": (1, _NOT_OVERLAPPED),
    "--tp-comm-overlap-rs-dgrad": (0, _NOT_OVERLAPPED),
    "--tp-comm-bootstrap-backend": (1, _NOT_OVERLAPPED),
    "--train-sync-interval": (1, "how far the CPU runs ahead of the GPU changes no result"),
    # memory
    "--empty-unused-memory-level": (
        1,
        "torch keeps the memory that it freed; results are the same",
    ),
    "--no-clone-scatter-output-in-embedding": (
        0,
        "the embedding's output is always copied, so that its memory is freed",
    ),
    "--disable-clone-scatter-output-in-embedding": (
        0,
        "the embedding's output is always copied, so that its memory is freed",
    ),
    "--no-scaled-masked-softmax-fusion": (0, "softmax is part of the attention kernel"),
    "--no-manual-gc-eval": (0, "--manual-gc-interval counts training steps alone"),
    "--disable-manual-gc-eval": (0, "--manual-gc-interval counts training steps alone"),
}

_UNDER_MEGATRON_LM = (
    "Megatron-LM trains it with our attention: give its pretrain_gpt.py --spec "
    "megatron_cp.mcore.spec gpt_layer_spec (docs/megatron.md)"
)
_SAME_RESULTS = "leave it out: results stay the same"
_NO_EQUIVALENT = (
    "nothing here does what it asks for, and results without it may differ; " + _UNDER_MEGATRON_LM
)
_EXPERTS = "mixture of experts is not part of this loop; " + _UNDER_MEGATRON_LM
_LATENT = "latent attention is not part of this loop; " + _UNDER_MEGATRON_LM
_LOSS_SCALE = "fp16 and its loss scaling are not served; " + _UNDER_MEGATRON_LM
_CONSTANT_BATCH = "the batch size of this loop is constant; " + _UNDER_MEGATRON_LM

# first match by prefix wins; the sentence completes "... is an argument of Megatron-LM that is not
# served here: "
_REASONS: tuple[tuple[str, str], ...] = (
    ("moe-", _EXPERTS),
    ("num-experts", _EXPERTS),
    ("expert-", _EXPERTS),
    ("fp16", _LOSS_SCALE),
    ("loss-scale", _LOSS_SCALE),
    ("initial-loss-scale", _LOSS_SCALE),
    ("fp8-param-gather", "parameters stay in 16 bits; linear layers compute in fp8 without it"),
    ("fp8", "of fp8, --fp8-format, --fp8-recipe and their scaling flags are served"),
    ("fp4", "linear layers compute in --bf16 or fp8 (--fp8-format)"),
    ("multi-latent-attention", _LATENT),
    ("q-lora-rank", _LATENT),
    ("kv-lora-rank", _LATENT),
    ("qk-head-dim", _LATENT),
    ("qk-pos-emb-head-dim", _LATENT),
    ("v-head-dim", _LATENT),
    ("mscale", _LATENT),
    (
        "mtp-",
        "multi-token prediction is not built by this loop; use with_context_parallel in a model of "
        "your own",
    ),
    (
        "cp-comm-type",
        "the planner chooses the exchange; --cp-planner names one (ring, allgather, ulysses, usp)",
    ),
    ("hierarchical-context-parallel", "the planner knows the topology; " + _SAME_RESULTS),
    ("hybrid-context-parallel", "the planner balances packs of any lengths; " + _SAME_RESULTS),
    ("max-seqlen-per-dp-cp-rank", "the planner balances packs of any lengths; " + _SAME_RESULTS),
    ("rampup-batch-size", _CONSTANT_BATCH),
    ("step-batch-size", _CONSTANT_BATCH),
    ("ckpt-convert", "--load reads torch_dist and torch; --ckpt-format says what --save writes"),
    ("rl-", "reinforcement learning is not part of this loop"),
    ("grpo-", "reinforcement learning is not part of this loop"),
    ("inference-", "there is no inference here"),
    ("mamba-", "only transformers are built here"),
    ("hybrid-", "only transformers are built here"),
    ("linear-", "only softmax attention is built here"),
    ("dsa-", "only softmax attention is built here"),
    ("tokenizer-", "--tokenizer-type and --tokenizer-model describe the tokenizer"),
    ("tp-comm", "overlap of tensor-parallel sends needs transformer-engine; " + _SAME_RESULTS),
    ("test-mode", "Megatron-LM's tests inside a run are not made; " + _SAME_RESULTS),
    ("pytorch-profiler", "--profile writes a trace without it; " + _SAME_RESULTS),
    ("nvtx-ranges", "--profile writes a trace of torch.profiler; " + _SAME_RESULTS),
    ("decoupled-lr", "one learning rate serves all parameters here; " + _UNDER_MEGATRON_LM),
    ("decoupled-min-lr", "one learning rate serves all parameters here; " + _UNDER_MEGATRON_LM),
    (
        "use-megatron-fsdp",
        "--use-distributed-optimizer shards the optimizer, with the same results",
    ),
    ("use-torch-fsdp2", "--use-distributed-optimizer shards the optimizer, with the same results"),
    ("cuda-graph", "CUDA graphs cannot hold plans that change per pack; " + _SAME_RESULTS),
    ("enable-cuda-graph", "CUDA graphs cannot hold plans that change per pack; " + _SAME_RESULTS),
    ("wandb", "see --wandb-project, --wandb-exp-name, --wandb-save-dir, --wandb-entity"),
    ("checkpoint-activations", "use --recompute-granularity selective"),
    ("model-parallel-size", "use --tensor-model-parallel-size"),
    ("batch-size", "use --micro-batch-size"),
    ("warmup", "use --lr-warmup-fraction"),
)


# refused flag -> values that it would have decided: they are not judged without it
_DECIDES: dict[str, tuple[str, ...]] = {
    "--batch-size": ("micro_batch_size",),
    "--data-args-path": ("data_path",),
    "--decoder-first-pipeline-num-layers": ("num_layers",),
    "--decoder-last-pipeline-num-layers": ("num_layers",),
    "--account-for-embedding-in-pipeline-split": ("num_layers",),
    "--account-for-loss-in-pipeline-split": ("num_layers",),
    "--fp16": ("bf16",),
    "--microbatch-group-size-per-virtual-pipeline-stage": (
        "num_layers_per_virtual_pipeline_stage",
    ),
    "--model-parallel-size": ("tensor_model_parallel_size",),
    "--per-split-data-args-path": ("data_path",),
    "--pipeline-model-parallel-layout": ("num_layers",),
    "--rampup-batch-size": ("global_batch_size",),
    "--step-batch-size-schedule": ("global_batch_size",),
    "--use-checkpoint-args": ("num_layers", "hidden_size", "num_attention_heads", "seq_length"),
    "--warmup": ("lr_warmup_fraction",),
}


def decided_by(flag: str) -> tuple[str, ...]:
    """Returns the names of the values that a refused flag would have decided."""
    return _DECIDES.get(flag, ())


def refusal(flag: str) -> str | None:
    """Returns the line that refuses a flag of Megatron-LM; None where Megatron-LM does not know it either."""
    name = flag.removeprefix("--")
    if name not in MEGATRON_NAMES:
        return None
    advice = next((text for prefix, text in _REASONS if name.startswith(prefix)), _NO_EQUIVALENT)
    return f"{flag} is an argument of Megatron-LM that is not served here: {advice}"
