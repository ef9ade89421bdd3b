"""What pretrain_gpt.py makes of a command line: the arguments, or why it refuses."""

from types import SimpleNamespace

import pytest

from megatron_cp.training.arguments import parse_arguments


def parse(*flags: str, world_size: int = 1, rank: int = 0):
    """The completed arguments, and the notes, of a command line that is accepted."""
    environment = {"WORLD_SIZE": str(world_size), "RANK": str(rank)}
    config = parse_arguments(flags, environment)
    return SimpleNamespace(**config.arguments, notes=config.notes)


def refusals(capsys, *flags: str, world_size: int = 1, rank: int = 0) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        parse(*flags, world_size=world_size, rank=rank)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("pretrain_gpt.py: error: ") for line in lines)
    return [line.removeprefix("pretrain_gpt.py: error: ") for line in lines]


def refusal(capsys, *flags: str, world_size: int = 1, rank: int = 0) -> str:
    lines = refusals(capsys, *flags, world_size=world_size, rank=rank)
    assert len(lines) == 1, "one fault is one line"
    return lines[0]
