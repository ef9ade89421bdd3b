"""Models that transformers makes of a family where little or nothing is said: config.json, and their parameters.

The classes of Code World Model, Youtu-LLM, GLM-4 and ERNIE 4.5 have the sizes of the models they were written for.
"""

import json

import transformers

_SAID = {
    "cwm": {},
    "ministral": {"head_dim": 128},
    "youtu": {},
    "nemotron": {"num_key_value_heads": 8},
    "glm": {},
    "ernie4_5": {},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_window_layers": 40,
    },
    "exaone_moe": {"num_hidden_layers": 24, "num_key_value_heads": 8, "sliding_window": 128},
}
MADE = {
    name: json.loads(transformers.AutoConfig.for_model(name, **said).to_json_string())
    for name, said in _SAID.items()
}
# Elements of the tensors that transformers would save, tied ones once.
PARAMETERS_OF_MADE = {
    "cwm": 32_581_097_472,
    "ministral": 7_241_732_096,
    "youtu": 1_961_560_064,
    "glm": 9_399_951_360,
    "ernie4_5": 360_748_032,
    "nemotron": 15_628_775_424,
    "dots1": 161_206_283_840,
    "exaone_moe": 20_864_511_424,
}
