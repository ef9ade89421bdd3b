"""What Megatron-LM's command line knows and this one does not serve: refused by name, or noted.

Nothing of a user's script is dropped in silence. A flag that would change the model or the run and
is not served here is an error that says what to do; a flag that merely asks for what happens anyway
is noted; any other name is unknown. To leave a flag out is advised only where no result depends on it.
"""

from __future__ import annotations

import re

from megatron_cp.training.arguments.megatron_names import MEGATRON_NAMES

_STRAGGLERS = "--log-straggler looks for slow ranks from the first step to the last"
_ONE_LOGGER = "one-logger is never used"
_ONE_WRITER = "with --async-save a process forked for each save writes it and ends"
_NCCL = "it tunes how NCCL sends, not what; NCCL's own environment variables do that here"
_NOT_OVERLAPPED = "it hides time of sends, which is not hidden here; results are the same"
_ORDER = "only how and in which order ranks send would differ"
_PLANNED = "the planner chooses how ranks exchange rows; --cp-planner names a scheme"
_NO_GRAPH = "nothing is captured in graphs, because plans change with the documents; it is the same"
_STAYS = (
    "activations stay on the GPU: more memory, the same results; --recompute-granularity full and "
    "--offload-recompute-inputs save more"
)
_NOT_TURNED = "queries and keys of the index are never turned by a Hadamard matrix: their products are the same"
_SENDERS = "how many parts of a GPU send tokens to experts changes how fast they travel, not where"
_UNSHARDED = (
    "it says how --use-megatron-fsdp shards, and without that flag nothing, in Megatron-LM too"
)
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
    "--fp16-lm-cross-entropy": (0, "Megatron-Core reads it nowhere; the loss is computed in fp32"),
    "--use-dist-ckpt": (0, "--ckpt-format torch_dist, the default, is the distributed format"),
    "--auto-detect-ckpt-format": (0, "the format is read from the checkpoint"),
    "--ckpt-fully-parallel-save": (
        0,
        "a save is spread over the replicas unless --no-ckpt-fully-parallel-save is given",
    ),
    "--ckpt-fully-parallel-load": (0, "every rank reads what it needs"),
    "--no-save-tokenizer-assets": (0, "no file of a tokenizer is put beside checkpoints"),
    "--disable-save-tokenizer-assets": (0, "no file of a tokenizer is put beside checkpoints"),
    "--ckpt-assume-constant-structure": (0, "the save plan is made anew each time"),
    "--dist-ckpt-format": (1, "--ckpt-format says in which format checkpoints are saved"),
    "--no-mmap-bin-files": (0, "token files are always mapped"),
    "--num-dataset-builder-threads": (1, "no indices are built ahead"),
    "--dataloader-fast-cache-load": (0, "no index caches are read"),
    "--no-one-logger": (0, "one-logger is never used"),
    "--disable-msc": (0, "the multi-storage client is never used"),
    "--enable-experimental": (0, "nothing experimental of Megatron-Core is switched by it here"),
    "--openai-gelu": (
        0,
        "Megatron-LM reads it nowhere with models of Megatron-Core; --no-bias-gelu-fusion chooses between two GELUs",
    ),
    "--tokenizer-hf-use-fast": (0, "a tokenizer.json is always read by the fast library"),
    "--tokenizer-hf-no-include-special-tokens": (0, "no special token is ever added to a text"),
    "--lazy-mpu-init": (0, "groups are made at the start"),
    # what is logged
    "--log-batch-size-to-tensorboard": (0, "the batch size is always logged"),
    "--no-log-loss-scale-to-tensorboard": (0, "the loss scale is logged"),
    "--disable-log-loss-scale-to-tensorboard": (0, "the loss scale is logged"),
    "--logging-level": (1, "log lines have no levels; all are printed"),
    "--disable-straggler-on-startup": (0, _STRAGGLERS),
    "--straggler-ctrlr-port": (1, _STRAGGLERS),
    "--log-device-memory-used": (0, "--log-memory-interval prints what torch holds of the device"),
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
    "--dist-ckpt-workers": (1, _ONE_WRITER),
    "--async-ckpt-io-priority": (1, _ONE_WRITER),
    "--ckpt-drop-redundant-extra-state": (
        0,
        "states of Transformer Engine that say nothing are saved and read like all others",
    ),
    "--ckpt-fully-parallel-load-per-rank-objects": (0, "every rank reads what it needs"),
    "--no-ckpt-load-validate-sharding-integrity": (
        0,
        "what ranks read of a checkpoint is always checked against each other",
    ),
    "--exit-signal-handler-for-dataloader": (0, "loader workers never see the exit signal"),
    # where ranks lie and how they send
    "--cp-comm-type": (-1, _PLANNED),
    "--hierarchical-context-parallel-sizes": (-1, _PLANNED),
    "--max-seqlen-per-dp-cp-rank": (
        1,
        "every rank holds --seq-length / --context-parallel-size tokens, in every layout",
    ),
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
    "--reuse-grad-buf-for-mxfp8-param-ag": (
        0,
        "with --fp8-recipe mxfp8 weights stay in their format, and none is gathered in the buffer of a gradient",
    ),
    "--data-parallel-sharding-strategy": (1, _UNSHARDED),
    "--moe-flex-dispatcher-num-sms": (1, _SENDERS),
    "--moe-hybridep-num-sms": (1, _SENDERS),
    "--moe-deepep-num-sms": (1, _SENDERS),
    "--ddp-num-buckets": (1, "--ddp-bucket-size alone sets the size of gradient buckets"),
    "--ddp-pad-buckets-for-high-nccl-busbw": (0, _NCCL),
    "--ddp-average-in-collective": (0, "gradients are scaled, then summed: the same mean"),
    "--no-gradient-reduce-div-fusion": (0, "gradients are scaled, then summed: the same mean"),
    # when things are computed
    "--use-fused-weighted-squared-relu": (
        0,
        "squared ReLU and the weights of experts are computed one after the other: the same results",
    ),
    "--no-align-grad-reduce": (0, "each pipeline stage reduces gradients when they are ready"),
    "--disable-align-grad-reduce": (0, "each pipeline stage reduces gradients when they are ready"),
    "--no-use-layer-wise-param-layout": (
        0,
        "layers of muon's state lie as Megatron-Core lays them",
    ),
    "--no-align-param-gather": (0, "each pipeline stage gathers parameters when it needs them"),
    "--overlap-param-gather-with-optimizer-step": (0, _NOT_OVERLAPPED),
    "--overlap-p2p-communication-warmup-flush": (0, _NOT_OVERLAPPED),
    "--no-async-tensor-model-parallel-allreduce": (0, _ORDER),
    "--disable-async-tensor-model-parallel-allreduce": (0, _ORDER),
    "--no-scatter-gather-tensors-in-pipeline": (0, _ORDER),
    "--overlap-moe-expert-parallel-comm": (0, _NOT_OVERLAPPED),
    "--delay-wgrad-compute": (0, _NOT_OVERLAPPED),
    "--defer-embedding-wgrad-compute": (0, _NOT_DEFERRED),
    "--wgrad-deferral-limit": (1, _NOT_DEFERRED),
    "--no-dsa-indexer-rotate-activation": (0, _NOT_TURNED),
    "--disable-dsa-indexer-rotate-activation": (0, _NOT_TURNED),
    "--dsa-kernel-backend": (1, "sparse attention is always that of megatron_cp"),
    "--tp-comm-overlap": (0, _NOT_OVERLAPPED),
    "--tp-comm-overlap-cfg": (1, _NOT_OVERLAPPED),
    "--tp-comm-overlap-rs-dgrad": (0, _NOT_OVERLAPPED),
    "--tp-comm-bootstrap-backend": (1, _NOT_OVERLAPPED),
    "--train-sync-interval": (1, "how far the CPU runs ahead of the GPU changes no result"),
    "--use-transformer-engine-op-fuser": (
        0,
        "the operations of an MLP run one by one; it is the same",
    ),
    "--cuda-graph-impl": (1, _NO_GRAPH),
    "--cuda-graph-modules": (-1, _NO_GRAPH),
    "--cuda-graph-scope": (-1, _NO_GRAPH),
    "--cuda-graph-warmup-steps": (1, _NO_GRAPH),
    "--enable-cuda-graph": (0, _NO_GRAPH),
    "--external-cuda-graph": (0, _NO_GRAPH),
    "--optimizer-cuda-graph": (0, _NO_GRAPH),
    "--te-rng-tracker": (
        0,
        "it is for graphs; Megatron-Core's own tracker draws the random numbers",
    ),
    "--use-ring-exchange-p2p": (0, _ORDER),
    "--high-priority-a2a-comm-stream": (0, _NOT_OVERLAPPED),
    "--ep-overlap-early-attn-memory-release": (0, _NOT_OVERLAPPED),
    # memory
    "--fine-grained-activation-offloading": (0, _STAYS),
    "--offload-modules": (-1, _STAYS),
    "--activation-offload-fraction": (1, _STAYS),
    "--min-offloaded-tensor-size": (1, _STAYS),
    "--delay-offload-until-cuda-graph": (0, _STAYS),
    "--delta-offload-bytes-across-pp-ranks": (1, _STAYS),
    "--fine-grained-offloading-max-inflight-offloads": (1, _STAYS),
    "--cpu-offloading": (0, _STAYS),
    "--cpu-offloading-num-layers": (1, _STAYS),
    "--cpu-offloading-retain-pinned-cpu-buffers": (0, _STAYS),
    "--distribute-saved-activations": (0, _STAYS),
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
    "Megatron-LM's own pretrain_gpt.py has it, and takes our attention by --spec megatron_cp.mcore.spec "
    "gpt_layer_spec (docs/megatron.md)"
)
_SAME_RESULTS = "leave it out: results stay the same"
_NO_EQUIVALENT = (
    "nothing here does what it asks for, and results without it may differ; " + _UNDER_MEGATRON_LM
)
_EXPERTS = "of experts, the flags of docs/flags.md are served; " + _UNDER_MEGATRON_LM
_NO_PREDICTION = (
    "of multi-token prediction, --mtp-num-layers, its factor, --mtp-use-repeated-layer and the / of "
    "--hybrid-layer-pattern are served; " + _UNDER_MEGATRON_LM
)
_OTHER_MODEL = (
    "it belongs to models that are no GPT, which neither this program nor our attention serves"
)
_OTHER_ATTENTION = (
    "it chooses attention or layers that ours does not stand for, here or in Megatron-LM's program"
)
_NO_INFERENCE = "there is no inference here"
_NO_REINFORCEMENT = "reinforcement learning is not part of this loop"
_SENDS_OF_TENSORS = "overlap of tensor-parallel sends needs transformer-engine; " + _SAME_RESULTS
_FSDP = "--use-distributed-optimizer shards the optimizer, with the same results"
_UNREAD = (
    "Megatron-Core reads it nowhere, and the residual would start in front of the norm all the same; leave it out: "
    "results stay those that Megatron-LM has with it"
)
_OF_TOKENIZERS = "--tokenizer-type and --tokenizer-model describe the tokenizer"
_RESTARTS = (
    "torchrun restarts ranks that died, and the run goes on from its last checkpoint "
    "(docs/reliability.md); " + _SAME_RESULTS
)
_STACKS = (
    "a rank that hangs leaves the stacks of all in --run-dir (docs/reliability.md); "
    + _SAME_RESULTS
)

# first match of the words at the start of the name wins, without no-, disable-, enable- or use- before them; the
# sentence completes "... is an argument of Megatron-LM that is not served here: "
_REASONS: tuple[tuple[str, str], ...] = (
    ("moe- overlap-dispatch-backward-with-experts", _EXPERTS),
    ("apply-residual", _UNREAD),
    ("fp8", "of fp8, --fp8-format, --fp8-recipe and their scaling flags are served"),
    ("fp4", "linear layers compute in --bf16 or fp8 (--fp8-format)"),
    (
        "mtp-detach",
        "predictions send their gradients through the model here, as without it; "
        + _UNDER_MEGATRON_LM,
    ),
    ("mtp-", _NO_PREDICTION),
    (
        "ckpt-fully-parallel-load ckpt-pg-tensors",
        "every rank reads what it needs; " + _SAME_RESULTS,
    ),
    ("ckpt-fully-parallel-save-", "replicas share the work of a save; " + _SAME_RESULTS),
    ("ckpt-fully-parallel-save", "use --no-ckpt-fully-parallel-save"),
    ("muon-use-nesterov", "use --muon-nesterov"),
    ("weight-decay-cond", "use --apply-wd-to-qk-layernorm"),
    ("ckpt-convert", "--load reads torch_dist and torch; --ckpt-format says what --save writes"),
    ("rl- grpo- langrl- perform-rl", _NO_REINFORCEMENT),
    (
        "inference- flash-decode decode-only chunked-prefill cache-mla-latents mlp-chunks-for-prefill "
        "nccl-all-reduce-for-prefill num-speculative max-tokens-to-oom legacy-static-engine symmetric-ar",
        _NO_INFERENCE,
    ),
    (
        "bert- biencoder- block-data-path classes-fraction data-per-class dino- embedding-path evidence- head-lr "
        "ict- img- indexer- iter-per-epoch mask-factor mask-prob mask-type mrope- num-channels num-classes "
        "output-bert patch-dim query-in-block retriever- retro- sample-rate short-seq swin- titles- "
        "one-sent-docs vision- vocab-extra data-sharding decoder-num-layers decoder-seq "
        "encoder-pipeline encoder-tensor",
        _OTHER_MODEL,
    ),
    ("encoder-num-layers", "use --num-layers"),
    ("encoder-seq-length", "use --seq-length"),
    (
        "hybrid-attention-ratio hybrid-mlp-ratio",
        "--hybrid-layer-pattern says of each layer what it is; Megatron-LM prints the pattern of these ratios",
    ),
    ("mamba-inference-", _NO_INFERENCE),
    ("mamba-training-", "states of Mamba-2 are fp32 here, as without it where --bf16 is not given"),
    ("dsa-", "of sparse attention, the flags of docs/flags.md are served"),
    (
        "kitchen heterogeneous-layers relative-attention flash-attention-version mhc- gdp-",
        _OTHER_ATTENTION,
    ),
    ("inprocess- ft- calc-ft adlr- replication", _RESTARTS),
    (
        "result-rejected-tracker",
        "Megatron-LM leaves out the steps that such a file names, for other results; bad steps are told "
        "in --run-dir, bad_steps/, and --on-bad-step skip leaves them out as they come",
    ),
    (
        "error-injection fault-injector-",
        "it plants faults, to try a run's defences; " + _SAME_RESULTS,
    ),
    ("flight-recorder", _STACKS),
    (
        "config-logger- gpu-sniff- run-workload-inspector record-shapes save-activations save-dgrads save-wgrads "
        "save-params save-tokens dump-param otel-",
        "it looks at a run and changes nothing in it; " + _SAME_RESULTS,
    ),
    ("msc object-storage", "files are read from folders of the machine; mount the storage there"),
    (
        "trust-remote",
        "a tokenizer would run code that comes with it; tokenizers are read from files here, and nothing of them is "
        "executed: give a folder with a tokenizer.json",
    ),
    (
        "tokenizer-hf-no-use-fast",
        "a tokenizer.json is read by the fast library alone; token files that another one made are read all the same",
    ),
    (
        "tokenizer-hf-include-special",
        "a run reads token files as they are; tools/preprocess_data.py has the flag, and puts special tokens into them",
    ),
    (
        "override-ckpt-iteration",
        "each start would go back to that step, a restarted one with newer weights; --ckpt-step loads the checkpoint "
        "of a step, and its data go on where they stood",
    ),
    ("pad-vocab-size", "give --padded-vocab-size with the size of the tokenizer's vocabulary"),
    (
        "phase-transition",
        "each phase would have documents of its own, and a run has the same from its start to its end; "
        + _UNDER_MEGATRON_LM,
    ),
    (
        "tokenizer- tiktoken- allow-ambiguous-pad null-tokenizer legacy-tokenizer gigatoken",
        _OF_TOKENIZERS,
    ),
    ("tp-comm", _SENDS_OF_TENSORS),
    ("pytorch-profiler", "--profile writes a trace without it; " + _SAME_RESULTS),
    ("nvtx-ranges", "--profile writes a trace of torch.profiler; " + _SAME_RESULTS),
    ("megatron-fsdp-grad-comm megatron-fsdp-main", _NO_EQUIVALENT),
    (
        "megatron-fsdp fsdp- torch-fsdp2 outer-dp-sharding full-sharding-in-hsdp "
        "create-all-gather-group strict-fsdp init-model-with-meta",
        _FSDP,
    ),
    ("wandb", "see --wandb-project, --wandb-exp-name, --wandb-save-dir, --wandb-entity"),
    ("checkpoint-activations", "use --recompute-granularity selective"),
    ("model-parallel-size", "use --tensor-model-parallel-size"),
    ("batch-size", "use --micro-batch-size"),
    ("warmup", "use --lr-warmup-fraction"),
)
_PREFIX = re.compile("(no|disable|enable|use)-")


# refused flag -> values that it would have decided: they are not judged without it
_DECIDES: dict[str, tuple[str, ...]] = {
    "--batch-size": ("micro_batch_size",),
    "--model-parallel-size": ("tensor_model_parallel_size",),
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
    spoken = (name, _PREFIX.sub("", name, count=1))
    advice = next(
        (
            text
            for words, text in _REASONS
            if any(n.startswith(tuple(words.split())) for n in spoken)
        ),
        _NO_EQUIVALENT,
    )
    return f"{flag} is an argument of Megatron-LM that is not served here: {advice}"
