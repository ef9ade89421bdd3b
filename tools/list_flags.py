#!/usr/bin/env python
"""Writes docs/flags.md: every flag of Megatron-LM that is known, and what becomes of it here.

python tools/list_flags.py          writes the page
python tools/list_flags.py --print  prints it
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.training.arguments import build_parser
from megatron_cp.training.arguments.known_flags import NOTED, refusal
from megatron_cp.training.arguments.megatron_names import MEGATRON_NAMES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
_HEAD = """# Flags of Megatron-LM

Written by `python tools/list_flags.py`. The page has every flag that Megatron-LM's parser has had since core_v0.16, and
what `pretrain_gpt.py` does with it. **Served**: with Megatron-LM's meaning. **Noted**: it changes neither model, data,
optimizer nor results here. **Refused**: by name, with what to do. Ours alone are in [training.md](training.md).

"""


def rows() -> list[tuple[str, str, str]]:
    """Returns (flag, what becomes of it, why) for every known flag of Megatron-LM, sorted by flag."""
    helps = {
        name: action.help or ""
        for action in build_parser()._actions
        for name in action.option_strings
    }
    names = {f"--{name}" for name in MEGATRON_NAMES}
    return [_row(name, helps.get(name)) for name in sorted(names, key=str.lower)]


def _row(flag: str, served: str | None) -> tuple[str, str, str]:
    """Returns the row of one flag."""
    if served is not None:
        return flag, "served", served
    if flag in NOTED:
        return flag, "noted", NOTED[flag][1]
    line = refusal(flag)
    assert line is not None, flag
    return flag, "refused", line.partition("not served here: ")[2]


def page() -> str:
    """Returns the page: totals, then the table."""
    table = rows()
    counts = Counter(kind for _, kind, _ in table)
    totals = ", ".join(f"{counts[kind]} {kind}" for kind in ("served", "noted", "refused"))
    lines = [f"{len(table)} flags: {totals}.", "", "| flag | | why |", "|---|---|---|"]
    lines += [
        f"| `{flag}` | {kind} | {why.replace('|', chr(92) + '|')} |" for flag, kind, why in table
    ]
    return _HEAD + "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or prints the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--print", action="store_true", help="print the page, write nothing")
    if parser.parse_args(argv).print:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
