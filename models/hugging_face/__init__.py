"""Hugging Face checkpoints to Megatron's and back; the tool is tools/convert_checkpoint.py.

    config_file.py                    config.json as Megatron-LM's arguments, and back
    settings.py, rope_settings.py     the tables for it
    rows.py, orders.py                tables of weights: names, and how tensors are joined and cut
    families.py                       the families' tables and settings, some in files of their own: deepseek.py,
                                      qwen.py, kimi.py, nemotron.py; what they have in common: common.py
    safetensors_folder.py             Hugging Face folders
    torch_dist_folder.py              Megatron folders
    checks.py, convert.py             the two directions

Two libraries were looked at first and do not serve without a GPU: mbridge 0.15.1 fills a GPTModel
that it builds from Transformer Engine's layer specs (without it: `NameError: TENorm`), puts
tensors on the current CUDA device and has no gpt-oss; megatron-bridge 0.3.1 requires
transformer-engine, mamba-ssm and causal-conv1d, and its import fails without the first.
"""
