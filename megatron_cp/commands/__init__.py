"""The commands, one file each: `add_arguments(parser)` and `run(args, words)`, which returns the exit code.

A file is imported when its command is asked for, so that the others cost nothing.
"""
