"""The served flags of the model, as `flag_table.py` describes them."""

MODEL_TABLE = """
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
--experimental-attention-variant str - | gated_delta_net, kimi_delta_attention: linear; dsa: keys picked by an index
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
--apply-query-key-layer-scaling on - | divide scores by the layer number, and undo it in the softmax: the same results
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
--rope-type one-of:rope,yarn,none - | kind of rotation of latent attention; default yarn
--rotary-scaling-factor float 1.0 | YaRN's factor
--mscale float 1.0 | YaRN's scale of scores
--mscale-all-dim float 0.0 | YaRN's scale of all dimensions
--beta-fast float 32.0 | upper bound of rotations of latent attention's YaRN
--beta-slow float 1.0 | its lower bound
--original-max-position-embeddings int 4096 | positions before it
--llama-4-scaling-beta float - | queries grow by 1 + beta ln(1 + floor(position / positions before YaRN))
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
--moe-router-padding-for-quantization on - | fill experts up to the rows that fp8 needs
--moe-router-padding-for-fp8 on:moe_router_padding_for_quantization - | old spelling of that
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
--dsa-indexer-n-heads int - | heads of the index that picks keys
--dsa-indexer-head-dim int - | their size
--dsa-indexer-topk int - | keys that a query attends to
--dsa-indexer-topk-freq int 1 | every so many layers one picks, for those behind it too
--dsa-indexer-skip-topk-offset int 0 | up to this one every layer picks
--dsa-indexer-loss-coeff float - | weight of the loss that trains the index; none without it
--dsa-indexer-use-sparse-loss on - | compare index and attention over the picked keys alone, not over all
--dsa-indexer-rope-interleaved on - | rotate neighbours in the index, not halves
--no-dsa-indexer-scoring-relu off:dsa_indexer_scoring_relu - | heads of the index count where negative too
--disable-dsa-indexer-scoring-relu off:dsa_indexer_scoring_relu - | the same
--dsa-indexer-k-norm-epsilon float - | epsilon of its norm; default that of the others

[multi-token prediction]
--mtp-num-layers int - | further tokens that are predicted
--mtp-loss-scaling-factor float 0.1 | weight of their loss
--mtp-use-repeated-layer on - | the same weights make all predictions of a hybrid model

"""
