"""The command line of `pretrain_gpt.py`: words in, one checked `TrainConfig` out.

flag_table.py, model_flag_table.py   what is served known_flags.py   what is noted or refused
parse.py        words -> draft -> TrainConfig       complete.py      the draft, completed and checked
"""

from megatron_cp.training.arguments.flags import defaults_of_flags, flags_of
from megatron_cp.training.arguments.parse import build_parser, judge_arguments, parse_arguments

__all__ = ["build_parser", "defaults_of_flags", "flags_of", "judge_arguments", "parse_arguments"]
