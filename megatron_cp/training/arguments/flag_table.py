"""The served flags, as a table.

Names, types and defaults are Megatron-LM's, so that its scripts mean here what they mean there. A row reads

    names  kind  default | help

with `on` for a switch, `maybe` for one whose default is None, `off:dest` for one that sets `dest` to
False, `words`, `ints` and `floats` for any number of values, `kind:dest` where the attribute has another name,
`ranks` for one or more numbers with a list as default, and `-` for no default. The defaults of
--distributed-backend, --transformer-impl and --wandb-project differ from Megatron-LM's, whose own need
a GPU, a package or a key; that of --dist-ckpt-strictness is the strictest.

Source: the parser of Megatron-LM core_v0.19.0 (names, types and defaults are its interface).
"""

TABLE = """
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

[model]
--num-layers int - | transformer layers
--hidden-size int - | width of the residual stream
--ffn-hidden-size int - | default: 4 x hidden, 8/3 x hidden with --swiglu
--num-attention-heads int - | query heads
--group-query-attention on - | fewer key/value heads than query heads
--num-query-groups int 1 | key/value heads with --group-query-attention
--kv-channels int - | head size; default hidden / heads
--normalization one-of:LayerNorm,RMSNorm LayerNorm | norm of every layer
--norm-epsilon float:layernorm_epsilon 1e-05 | epsilon of the norms
--swiglu on - | gated SiLU in the MLP
--squared-relu on - | squared ReLU in the MLP
--quick-geglu on - | gated GELU in its sigmoid form in the MLP
--glu-linear-offset float 0.0 | added to the linear part of a gated activation
--activation-func-clamp-value float - | bound on the inputs of the activation
--disable-bias-linear off:add_bias_linear - | linear layers without bias
--add-qkv-bias on - | bias on the QKV projection alone
--qk-layernorm on - | norm on queries and keys
--qk-l2-norm on - | L2 norm on queries and keys
--attention-output-gate on - | a gate on the output of attention
--experimental-attention-variant str - | gated_delta_net (or gdn): layers of linear attention
--linear-attention-freq layers - | which layers: N, every Nth is softmax attention, or a list of 0 and 1 (linear)
--linear-conv-kernel-dim int 4 | tokens that the convolution of a linear layer sees
--linear-key-head-dim int 128 | head size of queries and keys of linear layers
--linear-value-head-dim int 128 | head size of their values
--linear-num-key-heads int 16 | their query and key heads
--linear-num-value-heads int 32 | their value heads
--hybrid-layer-pattern str - | kind of each layer: M Mamba-2, * attention, - an MLP, E experts; | next stage
--hybrid-override-pattern str - | its older name
--is-hybrid-model on - | as older scripts say it beside the pattern
--mamba-state-dim int 128 | size of a Mamba-2 head's state
--mamba-head-dim int 64 | its head size
--mamba-num-groups int 8 | groups of heads that share keys and queries
--mamba-num-heads int - | its heads; default 2 x hidden / head size
--disable-mamba-mem-eff-path off:use_mamba_mem_eff_path - | keep what mixers compute, instead of computing it twice
--fp32-residual-connection on - | keep the residual stream in fp32
--untie-embeddings-and-output-weights on - | a separate output matrix
--attention-dropout float 0.1 | probability that a query does not see a key
--hidden-dropout float 0.1 | dropout on the residual branches
--apply-layernorm-1p on:layernorm_zero_centered_gamma - | store the weights of norms minus one
--softmax-type one-of:vanilla,off-by-one,learnable vanilla | attention sink
--window-size window - | left,right of a sliding window; -1 is open
--window-attn-skip-freq layers - | which layers attend in full
--apply-query-key-layer-scaling on - | divide scores by the layer number
--init-method-std float 0.02 | standard deviation of initial weights
--init-method-xavier-uniform on - | initial weights of Glorot and Bengio instead
--embedding-init-method-std float - | that of the embedding; default --init-method-std
--test-mode on - | Megatron-Core compares query and key norms of tensor-parallel ranks
--make-vocab-size-divisible-by int 128 | padding of the vocabulary
--transformer-impl one-of:local,transformer_engine - | default: the second where it is installed
--spec words - | module and name of a layer spec; ours, or --allow-custom-spec

[engine]
--no-bias-gelu-fusion off:bias_gelu_fusion - | bias and GELU in two kernels, GELU by erf instead of tanh
--no-bias-swiglu-fusion off:bias_swiglu_fusion - | bias and SwiGLU in two kernels
--no-bias-dropout-fusion off:bias_dropout_fusion - | bias and dropout in two kernels
--no-rope-fusion off:apply_rope_fusion - | rotary embedding by torch, operation by operation
--cross-entropy-loss-fusion on - | the loss without a copy of the logits in fp32; on a GPU always
--cross-entropy-fusion-impl one-of:native,te native | whose kernels: torch.compile's or Transformer Engine's
--no-gradient-accumulation-fusion off:gradient_accumulation_fusion - | not apex's kernel for it
--no-persist-layer-norm on - | not apex's persistent LayerNorm kernel
--fp8-format one-of:e4m3,hybrid:fp8 - | linear layers of Transformer Engine in fp8; attention is not
--fp8-recipe one-of:delayed,tensorwise,mxfp8,blockwise delayed | how fp8 scales are found
--fp8-margin int 0 | margin of delayed scaling
--fp8-amax-history-len int 1 | steps that delayed scaling looks back
--fp8-amax-compute-algo one-of:most_recent,max most_recent | what it takes from them
--no-fp8-wgrad off:fp8_wgrad - | weight gradients in higher precision

[position embedding]
--max-position-embeddings int - | longest position; default --seq-length
--position-embedding-type one-of:learned_absolute,rope,yarn,none learned_absolute | their kind
--no-position-embedding off:add_position_embedding - | old; changes nothing with rotary positions
--use-rotary-position-embeddings on - | old spelling of --position-embedding-type rope
--rotary-base int 10000 | base of the rotary frequencies
--rotary-percent float 1.0 | share of the head that rotates
--rotary-interleaved on - | rotate neighbours, not halves
--no-rope-freq layers - | which layers rotate nothing
--rope-type one-of:rope,yarn - | kind of rotation of latent attention; default yarn
--rotary-scaling-factor float 1.0 | YaRN's factor
--mscale float 1.0 | YaRN's scale of scores
--mscale-all-dim float 0.0 | YaRN's scale of all dimensions
--yarn-original-max-position-embeddings int - | positions before YaRN
--yarn-beta-fast float - | YaRN's upper bound of rotations
--yarn-beta-slow float - | YaRN's lower bound of rotations
--yarn-correction-range-round-to-int maybe - | round YaRN's bounds; the default
--no-yarn-correction-range-round-to-int off:yarn_correction_range_round_to_int - | or not
--rotary-seq-len-interpolation-factor int - | linear position interpolation
--use-rope-scaling on - | Llama 3.1 scaling of the frequencies
--rope-scaling-factor float 8.0 | factor of that scaling

[experts]
--num-experts int - | experts of a layer; none without it
--moe-layer-freq layers 1 | which layers have experts: every Nth from the first, or a list
--moe-ffn-hidden-size int - | width of an expert; default --ffn-hidden-size
--moe-shared-expert-intermediate-size int - | width of the experts that see every token
--moe-latent-size int - | width of what experts see, behind a projection; default the model's
--moe-shared-expert-gate on - | a gate on their output
--moe-shared-expert-overlap on - | compute them while tokens travel
--moe-grouped-gemm on - | all experts of a rank in one matrix product
--moe-router-topk int 2 | experts of a token
--moe-router-load-balancing-type words aux_loss | what keeps experts equally busy
--moe-aux-loss-coeff floats 0.0 | weight of its loss
--moe-z-loss-coeff float - | weight of the loss on large logits
--moe-input-jitter-eps float - | noise on the router's input
--moe-router-score-function one-of:softmax,sigmoid softmax | scores of the router
--moe-router-dtype one-of:fp32,fp64 - | precision of the router
--moe-router-pre-softmax on - | softmax before the choice
--moe-router-num-groups int - | groups of experts
--moe-router-group-topk int - | groups that a token may choose from
--moe-router-topk-scaling-factor float - | factor on the chosen scores
--moe-router-enable-expert-bias on - | biases instead of a loss
--moe-router-bias-update-rate float 0.001 | step of the biases
--moe-router-force-load-balancing on - | random choice, for benchmarks
--moe-router-fusion on - | the router in fewer kernels
--moe-permute-fusion on - | permutation in fewer kernels
--moe-token-dispatcher-type one-of:allgather,alltoall,flex allgather | how tokens travel to experts
--moe-flex-dispatcher-backend one-of:deepep,hybridep deepep | library of the flex dispatcher
--moe-enable-deepep on - | old spelling of --moe-flex-dispatcher-backend deepep
--moe-expert-capacity-factor float - | tokens that an expert takes, over the mean
--moe-pad-expert-input-to-capacity on - | fill each expert up to its capacity
--moe-token-drop-policy one-of:probs,position probs | which tokens it drops
--moe-apply-probs-on-input on - | weigh tokens before the expert
--moe-layer-recompute on - | old spelling of --recompute-modules moe
--moe-per-layer-logging on - | losses of each layer in the records

[latent attention]
--multi-latent-attention on - | queries, keys and values from latent vectors
--q-lora-rank int - | width of the queries' latent vector; none without it
--kv-lora-rank int 32 | width of that of keys and values
--qk-head-dim int 128 | head size of queries and keys without positions
--qk-pos-emb-head-dim int 64 | head size of their rotating part
--v-head-dim int 128 | head size of values

[multi-token prediction]
--mtp-num-layers int - | further tokens that are predicted
--mtp-loss-scaling-factor float 0.1 | weight of their loss

[training]
--micro-batch-size int - | packs per replica and micro-batch
--global-batch-size int - | packs per step; default micro-batch x replicas
--rampup-batch-size ints - | start, increment and packs of a batch size that grows to --global-batch-size
--step-batch-size-schedule words - | batch sizes by tokens consumed, e.g. "0:384 200B:768"
--eval-global-batch-size int - | packs per evaluated batch; default --global-batch-size
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

[recompute]
--recompute-granularity one-of:full,selective - | what backward computes again
--recompute-method one-of:uniform,block - | how layers are chosen
--recompute-num-layers int - | how many
--recompute-modules words - | modules of selective recompute
--recompute-activations on - | short for --recompute-granularity selective

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

[checkpoint]
--save str - | folder of checkpoints; the run's records go there too
--save-interval/--persistent-save-interval int - | steps between checkpoints
--save-retain-interval int - | older checkpoints kept: multiples of this
--load str - | folder of checkpoints to go on from
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
--profile-ranks ranks 0 | ranks that write one
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
