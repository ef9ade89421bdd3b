"""The served flags, as a table; those of the model are in `model_flag_table.py`.

Names, types and defaults are Megatron-LM's, so that its scripts mean here what they mean there. A row reads

    names  kind  default | help

with `on` for a switch, `maybe` for one whose default is None, `off:dest` for one that sets `dest` to
False, `words`, `ints` and `floats` for any number of values, `kind:dest` where the attribute has another name,
`numbers` for one or more with a list as default, `names` for one or more words, and `-` for no default. The defaults of
--distributed-backend, --transformer-impl and --wandb-project differ from Megatron-LM's, whose own need
a GPU, a package or a key; that of --dist-ckpt-strictness is the strictest.

Source: the parser of Megatron-LM core_v0.19.0 (names, types and defaults are its interface).
"""

from megatron_cp.training.arguments.model_flag_table import MODEL_TABLE

_RANKS = """
[parallelism]
--tensor-model-parallel-size int 1 | ranks that share each weight matrix
--pipeline-model-parallel-size int 1 | pipeline stages
--pipeline-model-parallel-layout str - | layers of each stage, e.g. Et*3|(tt|)*6mL
--decoder-first-pipeline-num-layers int - | layers of the first stage
--decoder-last-pipeline-num-layers int - | layers of the last stage
--account-for-embedding-in-pipeline-split on - | the embedding counts as a layer of its stage
--account-for-loss-in-pipeline-split on - | the loss counts as a layer of its stage
--microbatch-group-size-per-virtual-pipeline-stage int:microbatch_group_size_per_vp_stage - | micro-batches in a row
--num-layers-per-virtual-pipeline-stage int - | layers per interleaved stage
--num-virtual-stages-per-pipeline-rank int - | interleaved stages per rank
--context-parallel-size int 1 | ranks that share the tokens of a pack
--hybrid-context-parallel on:spans_replicas - | all replicas' packs on all their ranks, where sure to be faster
--sequence-parallel on - | shard norm and dropout over the tensor-parallel ranks
--expert-model-parallel-size int 1 | ranks that share the experts of a layer
--expert-tensor-parallel-size int - | ranks that share each expert; default --tensor-model-parallel-size
--use-tp-pp-dp-mapping on - | number ranks tensor, context, pipeline, data
--num-distributed-optimizer-instances int 1 | groups of replicas that each hold all optimizer shards
--use-distributed-optimizer on - | shard optimizer state over data-parallel ranks
--overlap-grad-reduce on - | reduce gradients while backward runs
--overlap-param-gather on - | gather parameters while forward runs
--no-overlap-p2p-communication off:overlap_p2p_comm - | blocking pipeline sends
--ddp-bucket-size int - | parameters per gradient bucket
--distributed-backend one-of:nccl,gloo - | default: nccl with a GPU, gloo without
--distributed-timeout-minutes int 10 | time after which a collective is an error
--local-rank int - | as older launchers pass it; LOCAL_RANK of torchrun wins
--use-cpu-initialization on - | initialise weights on the CPU (always so without a GPU)

"""

TABLE = (
    _RANKS
    + MODEL_TABLE
    + """
[training]
--micro-batch-size int - | packs per replica and micro-batch
--global-batch-size int - | packs per step; default micro-batch x replicas
--rampup-batch-size ints - | start, increment and packs of a batch size that grows to --global-batch-size
--step-batch-size-schedule words - | batch sizes by tokens consumed, e.g. "0:384 200B:768"
--iterations-to-skip numbers - | steps that are left out, counted from 1; their packs are consumed
--train-iters int - | steps to train
--train-samples int - | packs to train on, instead of --train-iters
--exit-interval int - | stop after an iteration divisible by this
--exit-duration-in-mins int - | stop after this many minutes since the program began
--exit-signal-handler on - | on a signal to any rank, save and leave with code 0
--exit-signal one-of:SIGTERM,SIGINT,SIGUSR1,SIGUSR2 SIGTERM | which signal
--seed int 1234 | seed of weights, dropout and shuffling
--data-parallel-random-init on - | different weights per replica before the first step
--bf16 on - | train in bfloat16
--fp16 on - | train in float16
--loss-scale float - | factor on the loss in float16; default found while training
--initial-loss-scale float 4294967296 | where that begins
--min-loss-scale float 1.0 | the smallest
--loss-scale-window int 1000 | steps without overflow before it doubles
--hysteresis int 2 | overflows before it halves
--first-last-layers-bf16 on - | first and last layers not in fp8
--num-layers-at-start-in-bf16 int 1 | how many first ones
--num-layers-at-end-in-bf16 int 1 | how many last ones
--fp8-param-gather on - | parameters in fp8
--calculate-per-token-loss on - | divide the summed loss by all tokens of the step
--accumulate-allreduce-grads-in-fp32 on - | fp32 gradient buffers (always so with --bf16)
--grad-reduce-in-bf16 on - | bf16 gradient buffers
--no-check-for-nan-in-loss-and-grad off:check_for_nan_in_loss_and_grad - | apply steps that are not finite
--check-for-spiky-loss on - | tell a loss of 10 times the largest of the first 100 steps
--check-for-large-grads on - | tell a gradient norm of 10 times the largest of the first 100 steps
--rerun-mode one-of:disabled,validate_results,report_stats validate_results | compute bad steps, or all, twice
--on-bad-step one-of:stop,skip stop | after a loss or gradient that is not finite; skip leaves the step out
--bad-steps-in-a-row int 10 | so many of them end a run that leaves them out
--check-weight-hash-across-dp-replicas-interval int - | steps between comparisons of replicas
--manual-gc on - | run the garbage collector only between steps
--manual-gc-interval int 0 | steps between collections; 0 is never
--deterministic-mode on - | the same bits on every run

[optimizer]
--optimizer one-of:adam,sgd,muon,dist_muon adam | optimizer function
--qk-clip on - | scale queries and keys down after a step in which a logit passed the threshold
--qk-clip-alpha float 0.5 | share of that which queries take
--qk-clip-threshold float 100 | largest logit that is let be
--muon-momentum float 0.9 | momentum of muon
--muon-nesterov on - | Nesterov's momentum in muon
--muon-no-split-qkv off:muon_split_qkv - | queries, keys and values as one matrix in muon
--muon-scale-mode one-of:spectral,unit_rms_norm,shape_scaling spectral | scale of muon's updates
--muon-extra-scale-factor float 1.0 | further factor on them
--muon-fp32-matmul-prec one-of:low,medium,high medium | precision of muon's products
--muon-num-ns-steps int 5 | Newton-Schulz steps of muon
--muon-tp-mode one-of:blockwise,duplicated,distributed blockwise | muon on tensor-parallel shards
--weight-decay float 0.01 | decoupled weight decay
--start-weight-decay float - | initial weight decay of a growing one
--end-weight-decay float - | final weight decay of a growing one
--weight-decay-incr-style one-of:constant,linear,cosine constant | its growth
--clip-grad float 1.0 | largest gradient norm; 0 is no clipping
--adam-beta1 float 0.9 | decay of the first moment
--adam-beta2 float 0.999 | decay of the second moment
--adam-eps float 1e-08 | term in the denominator
--sgd-momentum float 0.9 | momentum of sgd
--apply-wd-to-qk-layernorm on - | weight decay on the norms of queries and keys
--use-precision-aware-optimizer on - | optimizer state in the formats below
--main-grads-dtype one-of:fp32,bf16 fp32 | format of its gradients
--main-params-dtype one-of:fp32,fp16 fp32 | format of its parameters
--exp-avg-dtype one-of:fp32,fp16,bf16,fp8 fp32 | format of the first moment
--exp-avg-sq-dtype one-of:fp32,fp16,bf16,fp8 fp32 | format of the second moment
--optimizer-cpu-offload on - | optimizer state on the CPU
--optimizer-offload-fraction float 1.0 | how much of it
--use-torch-optimizer-for-cpu-offload on - | torch's optimizer there
--overlap-cpu-optimizer-d2h-h2d on - | copies beside the update
--no-pin-cpu-grads off:pin_cpu_grads - | gradients there in pageable memory
--no-pin-cpu-params off:pin_cpu_params - | parameters there in pageable memory

[learning rate]
--lr float - | largest learning rate
--min-lr float 0.0 | smallest learning rate
--decoupled-lr float - | largest learning rate of embedding and output layer
--decoupled-min-lr float - | smallest learning rate of those
--lr-decay-style one-of:constant,linear,cosine,inverse-square-root,WSD linear | after the warm-up
--lr-wsd-decay-style one-of:exponential,linear,cosine,minus_sqrt exponential | WSD's last phase
--lr-decay-iters int - | default --train-iters
--lr-decay-samples int - | default --train-samples
--lr-wsd-decay-iters int - | length of WSD's last phase
--lr-wsd-decay-samples int - | the same in packs
--lr-warmup-fraction float - | share of the decay that warms up
--lr-warmup-iters int 0 | linear warm-up
--lr-warmup-samples int 0 | the same in packs
--lr-warmup-init float 0.0 | learning rate before the first step
--override-opt-param-scheduler/--override-opt_param-scheduler on - | flags win over checkpoint
--use-checkpoint-opt-param-scheduler/--use-checkpoint-opt_param-scheduler on - | or it wins

[memory]
--recompute-granularity one-of:full,selective - | what backward computes again
--recompute-method one-of:uniform,block - | how layers are chosen
--recompute-num-layers int - | how many
--recompute-modules words - | modules of selective recompute
--recompute-activations on - | short for --recompute-granularity selective
--mlp-chunks-for-training int 1 | parts in which an MLP computes its rows; backward computes each again
--loss-chunk-size int - | rows of logits that a rank holds at once; backward computes them again; default all
--offload-recompute-inputs on - | what recomputed layers start from waits in the host's memory

[data]
--data-path words - | prefix of .bin/.idx, or several, or a weight before each
--data-args-path str - | file with the words of --data-path
--per-split-data-args-path str - | JSON file with the words of train, valid and test
--train-data-path words - | the same, for training alone
--valid-data-path words - | the same, for validation alone
--test-data-path words - | the same, for the test alone
--split str - | shares of documents for training, validation and test; default 969,30,1
--data-cache-path str - | folder that keeps indices (--packing megatron) and tokenized chats (--sft)
--mid-level-dataset-surplus float 0.005 | surplus samples of each corpus of a blend, --packing megatron
--sft on - | --data-path and its kin name chat files (.jsonl); answers are learned, packed whole
--sft-tokenizer-prompt-format str nemotron-h-aligned | how messages become text, see docs/data.md
--mock-data on - | documents of a seeded generator
--fim-data on - | rearrange documents so that the model learns to fill in their middle
--fim-rate float 0.5 | share of documents that are rearranged
--fim-spm-rate float 0.5 | share of those in the order suffix, prefix, middle
--fim-split-sample str - | token that divides a document into fragments, rearranged one by one
--fim-fragment-rate float - | share of the fragments that are rearranged
--fim-no-prefix str - | documents or fragments that begin so stay as they are
--fim-prefix-token str <fim_prefix> | stands before the prefix
--fim-middle-token str <fim_middle> | stands before the middle
--fim-suffix-token str <fim_suffix> | stands before the suffix
--fim-pad-token str <fim_pad> | fills up packs
--fim-eod-token str <|endoftext|> | ends a document
--seq-length int - | tokens per pack
--num-workers int 2 | loader workers; they also make the plans
--dataloader-type one-of:single,cyclic,external - | order of samples: with --packing megatron single, else our own
--reset-position-ids on - | positions restart in each document
--reset-attention-mask on - | tokens look at their own document only
--dataloader-inter-document-masking on - | the two above, from the documents' true lengths
--eod-mask-loss on - | no loss on the end-of-document token

[tokenizer]
--tokenizer-type str - | HuggingFaceTokenizer, GPT2BPETokenizer, TikTokenizer, ByteLevel, ...: see docs/data.md
--tokenizer-model str - | file or folder of the tokenizer
--vocab-file str - | vocab.json of GPT2BPETokenizer, which it and --merge-file choose
--merge-file str - | merges.txt of GPT2BPETokenizer
--tiktoken-pattern one-of:v1,v2 - | how TikTokenizer cuts words; default v2
--tiktoken-num-special-tokens int 1000 | ids of TikTokenizer's special tokens, named ones and fillers
--tokenizer-special-tokens/--tiktoken-special-tokens words - | names of TikTokenizer's first ids
--vocab-size int - | vocabulary before padding; default the tokenizer's
--padded-vocab-size int - | vocabulary of the model; default --vocab-size, padded to --make-vocab-size-divisible-by

[checkpoint]
--save str - | folder of checkpoints; the run's records go there too
--save-interval/--persistent-save-interval int - | steps between checkpoints
--save-retain-interval int - | older checkpoints kept: multiples of this
--load str - | folder of checkpoints to go on from
--pretrained-checkpoint str - | folder of the weights to begin with, at iteration 0, while --load has no checkpoint
--use-checkpoint-args on - | the model's arguments are those of the checkpoint (docs/training.md)
--use-mp-args-from-checkpoint-args on - | tensor, pipeline and expert sizes too
--no-use-tokenizer-model-from-checkpoint-args off:use_tokenizer_model_from_checkpoint_args - | not its tokenizer
--disable-use-tokenizer-model-from-checkpoint-args off:use_tokenizer_model_from_checkpoint_args - | the same
--dist-ckpt-optim-fully-reshardable on - | sharded optimizer state that any layout can load
--ckpt-step int - | iteration to load; default the latest
--ckpt-format one-of:torch_dist,torch torch_dist | format to save in; --load reads the folder's own
--no-ckpt-fully-parallel-save off:ckpt_fully_parallel_save - | the first replica writes all
--verify-integrity on - | refuse to load a checkpoint that holds no SHA-256 of its files
--no-verify-checkpoint off:verify_checkpoint - | load without comparing files with their SHA-256
--ckpt-fallback maybe - | a damaged checkpoint: load the last good one; the default after a restart
--no-ckpt-fallback off:ckpt_fallback - | a damaged checkpoint is an error, also after a restart
--on-save-error one-of:continue,stop stop | after a save that failed; the last save always stops
--async-save on - | a forked process writes checkpoints while training goes on
--dist-ckpt-strictness str raise_all | which tensors model and checkpoint need not share
--exit-on-missing-checkpoint on - | an empty --load is an error
--finetune on - | load the weights alone and start at iteration 0
--no-save-optim on - | leave the optimizer out of checkpoints
--no-save-rng on - | leave the random states out of checkpoints
--no-load-optim on - | do not load the optimizer
--no-load-rng on - | do not load the random states

[evaluation]
--eval-iters int 100 | batches per evaluation
--eval-interval int - | steps between evaluations; default none before the end
--start-eval-at-iter int - | no evaluation before this step
--eval-global-batch-size int - | packs per evaluated batch; default --global-batch-size
--eval-micro-batch-size int - | packs per replica and micro-batch of it; default --micro-batch-size
--full-validation on - | an evaluation is over all of validation, every token once
--multiple-validation-sets on - | one loss for each corpus of --valid-data-path, with --full-validation
--validation-set-names names - | their names in the log, tensorboard and wandb; default 0, 1, ...
--skip-train on - | evaluate only

[logging]
--log-interval int 100 | steps between log lines
--log-energy on - | joules and watts per GPU in the log line (NVML)
--log-throughput on - | TFLOP/s per GPU in the log line
--log-straggler on - | name the slowest ranks below the log line
--straggler-minmax-count int 1 | how many of them
--timing-log-level one-of-int:0,1,2 0 | timers: 0 none, 1 once a step, 2 every micro-batch and send
--timing-log-option one-of:max,minmax,all minmax | which ranks' times are printed
--log-timers-to-tensorboard on - | largest times beside the other metrics
--no-barrier-with-level-1-timing off:barrier_with_L1_time - | ranks need not wait for timers
--log-memory-interval int - | steps between lines about memory
--profile on - | write a trace of some steps into --tensorboard-dir, or --run-dir
--use-pytorch-profiler on - | the same: traces are always those of torch.profiler
--profile-step-start int 10 | steps before the trace
--profile-step-end int 12 | last step of the trace
--profile-ranks numbers 0 | ranks that write one
--record-memory-history on - | record allocations of the last rank's GPU
--memory-snapshot-path str snapshot.pickle | where they are written at the end
--log-params-norm on - | norm of the parameters in the log line
--log-num-zeros-in-grad on - | zeros of the gradient in the log line
--log-max-attention-logit on - | largest attention logit of each step in tensorboard and wandb
--log-progress on - | append to progress.txt in --save
--tensorboard-dir str - | folder of tensorboard events
--tensorboard-log-interval int 1 | steps between tensorboard and wandb rows
--tensorboard-queue-size int 1000 | events kept before they are written
--log-validation-ppl-to-tensorboard on - | perplexity beside the validation loss
--log-memory-to-tensorboard on - | GPU memory
--log-world-size-to-tensorboard on - | world size
--wandb-project str - | project; default megatron_cp (logged offline without a key)
--wandb-exp-name str - | name of the run
--wandb-save-dir str - | folder of the wandb run; default <save>/wandb
--wandb-entity str - | owner of the run

[beyond Megatron-LM]
--packing one-of:split,keep,megatron - | how documents become packs (docs/data.md); default split, or keep with --sft
--verify-token-files on - | compare token files with the SHA-256 of their manifests before training; reads them once
--allow-custom-spec on - | let --spec import a module that is not ours
--plan-only on - | print the plans of the first batches and leave; builds no model
--plan-batches int 4 | batches that --plan-only shows
--run-dir str - | folder of run.json, metrics.jsonl and plan.json; default --save
--log-text-samples int 0 | held-out documents that the model goes on writing, at evaluations and at the end
--wandb-run-id str - | go on with this wandb run
--no-wandb off:wandb - | do not log to wandb
"""
)
