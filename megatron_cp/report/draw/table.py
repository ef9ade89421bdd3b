"""Tables on a terminal: columns as wide as what stands in them, so that no two values touch."""

from collections.abc import Sequence

GAP = "  "


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], remarks: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """Returns the lines of a table: names to the left, figures to the right.

    `remarks` are (name, words) below the rows: names keep to the first column, words run over the others.
    """
    lines = [header, *rows]
    names = max(len(name) for name in [line[0] for line in lines] + [name for name, _ in remarks])
    widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[1:]]
    drawn = [
        GAP.join(
            [
                line[0].ljust(names),
                *(cell.rjust(width) for cell, width in zip(line[1:], widths, strict=True)),
            ]
        )
        for line in lines
    ]
    drawn += [name.ljust(names) + GAP + words for name, words in remarks]
    return [line.rstrip() for line in drawn]
