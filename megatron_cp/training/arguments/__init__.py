"""The command line of `pretrain_gpt.py`: words in, one checked `TrainConfig` out.

flags.py        the table of served flags          known_flags.py    what is noted or refused
parse.py        words -> draft -> TrainConfig      complete.py, ...  completes and checks a draft
"""

from megatron_cp.training.arguments.parse import build_parser, judge_arguments, parse_arguments

__all__ = ["build_parser", "judge_arguments", "parse_arguments"]
