"""In which order rows of joined tensors stand, and which rows of one tensor a section is.

Sizes are by the letters of sizes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Sizes = Mapping[str, int]


def by_group(sizes: Sizes) -> np.ndarray:
    """Returns the order of query, key and value rows: each kv head behind the query heads that share it."""
    parts = np.split(np.arange(sizes["Q"] + 2 * sizes["K"]), [sizes["Q"], sizes["Q"] + sizes["K"]])
    num_groups = sizes["K"] // sizes["D"]
    return np.concatenate([part.reshape(num_groups, -1) for part in parts], axis=1).ravel()


def by_group_with_gate(sizes: Sizes) -> np.ndarray:
    """Returns the same where a head's gate lies behind its query: queries of a group, their gates, key, value."""
    width, num_groups = sizes["D"], sizes["K"] // sizes["D"]
    both, key, value = np.split(
        np.arange(sizes["P"] + 2 * sizes["K"]), [sizes["P"], sizes["P"] + sizes["K"]]
    )
    query, gate = both.reshape(num_groups, -1, 2, width).swapaxes(1, 2).swapaxes(0, 1)
    parts = [part.reshape(num_groups, -1) for part in (query, gate, key, value)]
    return np.concatenate(parts, axis=1).ravel()


def of_key_heads(section: int, *widths: str) -> Callable[[Sizes], np.ndarray]:
    """Returns what gives the rows of a section, where each key head has its part of every section, side by side."""

    def rows(sizes: Sizes) -> np.ndarray:
        heads = sizes["key heads"]
        edges = np.cumsum([0, *(sizes[width] // heads for width in widths)])
        places = np.arange(heads * edges[-1]).reshape(heads, -1)
        return places[:, edges[section] : edges[section + 1]].ravel()

    return rows


def section_of(section: int, *widths: str) -> Callable[[Sizes], np.ndarray]:
    """Returns what gives the rows of one of the sections that follow each other."""

    def rows(sizes: Sizes) -> np.ndarray:
        edges = np.cumsum([0, *(sizes[width] for width in widths)])
        return np.arange(edges[section], edges[section + 1])

    return rows


def evens_then_odds(sizes: Sizes) -> np.ndarray:
    """Returns the order of rows that alternate between gate and up: all gates, then all ups."""
    rows = np.arange(sizes["G"])
    return np.concatenate([rows[::2], rows[1::2]])
