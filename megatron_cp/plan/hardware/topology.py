"""Hardware rows of the cost model: how fast a rank computes and how fast its links carry rows.

The only place with hardware constants; where each comes from stands beside it. A file that was measured on
one's own machine takes the place of a row: `load_profile`.

    {"name": "my cluster", "node_size": 8, "inner_gbytes_per_s": 360, "outer_gbytes_per_s": 44,
     "latency_us": 18, "contention": 0.1,
     "kernel": [{"rows": 128,  "keys": 128,  "forward_tflops": 90,  "backward_tflops": 70},
                {"rows": 8192, "keys": 8192, "forward_tflops": 640, "backward_tflops": 540}, ...]}

`contention` (0 if left out) is the share of its compute that a rank loses while rows move. May be there as well
(null is left out):

     "outer_levels": [{"size": 64, "gbytes_per_s": 20, "latency_us": 30}, ...]     see config.py: Level
     "nics_per_node": 4,  "rank_speeds": [1, 1, 0.5, 1]                            see config.py: Topology

`kernel` is the measured rate of local attention on one slice of that many query rows and (mean) keys per
row: every pairing of the rows and the keys that the file names. Entries may also have `slanted_forward_tflops`
and `slanted_backward_tflops`, the rate of a slice that a diagonal cuts (all entries, or none).
"""

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_cp.config import KernelRates, Level, Topology

TOPOLOGIES = {
    row.name: row
    for row in (
        Topology(
            name="cpu",
            # two gloo ranks, one core each, loopback TCP: orders of magnitude; benchmarks/bench_prediction.py
            # measures them on the machine that it runs on
            forward_tflops=0.05,
            backward_tflops=0.04,
            node_size=1 << 30,
            inner_gbytes_per_s=1.0,
            outer_gbytes_per_s=1.0,
            latency_us=500.0,
        ),
        Topology(
            name="a800",
            # raw points of UltraAttn (SC'25), 512K tokens: 214-230 TFLOP/s full, 174 causal
            forward_tflops=216.0,
            # the same files, backward: 140-166 TFLOP/s with exposed links, 190 without
            backward_tflops=190.0,
            node_size=8,
            # per-pair tests in the same repository: about 164 GB/s inside, 23 GB/s between nodes
            inner_gbytes_per_s=164.0,
            outer_gbytes_per_s=23.0,
            # a grouped send and receive of NCCL, small message: order of magnitude
            latency_us=20.0,
            contention=0.1,  # as on H100
        ),
        Topology(
            name="h100",
            # FlashAttention-3 in LongCA-bench, GQA 64:8, head dim 128: 550-620 full, 558-602 causal. On one H100 our
            # kernels reached 688-726 and 578-605 (backward) on whole tiles; the margin is that of real slices.
            forward_tflops=550.0,
            # the same harness, backward: 434-585; a conservative choice
            backward_tflops=450.0,
            node_size=8,
            # NVLink 4: 450 GB/s per direction nominal, about 370 reached by all-to-all
            inner_gbytes_per_s=370.0,
            # one 400 Gb/s InfiniBand port per GPU: 50 GB/s nominal, about 45 reached
            outer_gbytes_per_s=45.0,
            latency_us=20.0,
            # NCCL moves rows with about 16 of 132 multiprocessors (MagiAttention's own kernels take up to 48)
            contention=0.1,
        ),
        Topology(
            name="h200",
            # the same compute units as H100, more memory bandwidth. On one H200 our kernels reached 667-744 and
            # 575-602 (backward); 600 and 500 leave the margin of real slices
            forward_tflops=600.0,
            backward_tflops=500.0,
            node_size=8,
            inner_gbytes_per_s=370.0,  # links as on H100
            outer_gbytes_per_s=45.0,
            latency_us=20.0,
            contention=0.1,
        ),
    )
}

_LINKS = ("inner_gbytes_per_s", "outer_gbytes_per_s", "latency_us")
_CELL = ("rows", "keys", "forward_tflops", "backward_tflops")
_SLANTED = ("slanted_forward_tflops", "slanted_backward_tflops")
_LEVEL = ("size", "gbytes_per_s", "latency_us")
_COUNTS = ("node_size", "rows", "keys", "size", "nics_per_node")
_SHARES = ("contention",)
_MAY_BE_0 = ("latency_us", *_SHARES)
_WIDER = ("outer_levels", "nics_per_node", "rank_speeds")
_ENTRIES = ("name", "node_size", *_LINKS, "contention", *_WIDER, "kernel")
_MOST = 2.0**31  # of a count; larger ones leave the integers that plans are made of


def get_topology(name: str | Topology) -> Topology:
    """Returns the hardware row called `name` (a row passes through); ValueError lists the names."""
    if isinstance(name, Topology):
        return name
    if name not in TOPOLOGIES:
        near = difflib.get_close_matches(str(name).lower(), TOPOLOGIES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"topology={name!r} is unknown; choose one of {', '.join(sorted(TOPOLOGIES))} "
            f"(nearest: {near}) or pass a Topology of your own"
        )
    return TOPOLOGIES[name]


def read_topology(word: str) -> str | Topology:
    """Returns a word of a command line for `CPConfig.topology`: the name of a row, or the row of a .json file.

    Raises ValueError for an unknown name or a file with a fault, OSError for one that cannot be read.
    """
    return load_profile(word) if word.endswith(".json") else get_topology(word).name


def load_profile(path: str | Path) -> Topology:
    """Returns the hardware row of a measured file, with its table of kernel rates.

    Raises ValueError, naming the entry and the file, for what is missing, unknown, not a number or not
    positive, and for a name that is no string.
    """
    where = f"profile {path}"
    try:
        content = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as problem:
        raise ValueError(
            f"{where} is not JSON ({problem}); write it as docs/simulate.md shows"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a JSON object; write it as docs/simulate.md shows")
    _check_keys(content, _ENTRIES, where)
    content = {key: value for key, value in content.items() if value is not None}  # null: left out
    name = content.get("name", Path(path).stem)
    if not isinstance(name, str):
        raise ValueError(
            f"{where}: entry 'name' is {_shown(name)}; it must be a string, as in \"my cluster\""
        )
    cells = content.get("kernel")
    if not isinstance(cells, list) or not cells:
        raise ValueError(
            f"{where}: entry 'kernel' is {_shown(cells)}; it must be a list of measured slices, each with "
            f"{', '.join(_CELL)}"
        )
    kernels = _kernel_rates(cells, where)
    numbers = {key: _number(content, key, where) for key in _LINKS}
    numbers["contention"] = _number({"contention": 0.0, **content}, "contention", where)
    node_size, levels = int(_number(content, "node_size", where)), _levels(content, where)
    nics = _number(content, "nics_per_node", where) if "nics_per_node" in content else None
    try:
        return Topology(
            name=name,
            forward_tflops=_peak(kernels.forward_tflops),
            backward_tflops=_peak(kernels.backward_tflops),
            node_size=node_size,
            kernels=kernels,
            outer_levels=levels,
            nics_per_node=None if nics is None else int(nics),
            rank_speeds=content.get("rank_speeds"),
            **numbers,
        )
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{where}: {problem}") from None


def _levels(content: Mapping[str, Any], where: str) -> tuple[Level, ...]:
    levels = content.get("outer_levels", [])
    if not isinstance(levels, list):
        raise ValueError(
            f"{where}: entry 'outer_levels' is {_shown(levels)}; it must be a list of levels, each with size and "
            "gbytes_per_s"
        )
    found = []
    for index, level in enumerate(levels):
        entry = f"{where}: outer_levels[{index}]"
        if not isinstance(level, dict):
            raise ValueError(f"{entry} is {_shown(level)}; it must have size and gbytes_per_s")
        _check_keys(level, _LEVEL, entry)
        size, rate = (_number(level, key, entry) for key in _LEVEL[:2])
        latency = (
            _number(level, "latency_us", entry) if level.get("latency_us") is not None else None
        )
        found.append(Level(int(size), rate, latency))
    return tuple(found)


def _peak(table: tuple[tuple[tuple[float, ...], ...], ...]) -> float:
    return max(rate for kind in table for row in kind for rate in row)


def _kernel_rates(cells: list[Any], where: str) -> KernelRates:
    has_slanted = any(set(_SLANTED) & set(cell) for cell in cells if isinstance(cell, dict))
    names = _CELL + (_SLANTED if has_slanted else ())
    rates: dict[tuple[int, int], list[float]] = {}
    for index, cell in enumerate(cells):
        entry = f"{where}: kernel[{index}]"
        if not isinstance(cell, dict):
            raise ValueError(f"{entry} is {_shown(cell)}; it must have {', '.join(_CELL)}")
        _check_keys(cell, _CELL + _SLANTED, entry)
        rows, keys, *measured = (_number(cell, key, entry) for key in names)
        shape = int(rows), int(keys)
        if shape in rates:
            raise ValueError(
                f"{entry} repeats rows={shape[0]}, keys={shape[1]}; keep one of the two"
            )
        rates[shape] = measured
    all_rows, all_keys = (sorted({shape[axis] for shape in rates}) for axis in (0, 1))
    for shape in ((r, k) for r in all_rows for k in all_keys):
        if shape not in rates:
            raise ValueError(
                f"{where}: kernel has no entry for rows={shape[0]}, keys={shape[1]}; measure every pairing "
                f"of rows {all_rows} and keys {all_keys}"
            )

    def table(which: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
        kinds = (which, which + len(names) - len(_CELL))  # box; slanted, or box again
        return tuple(
            tuple(tuple(rates[r, k][kind] for k in all_keys) for r in all_rows) for kind in kinds
        )

    return KernelRates(tuple(all_rows), tuple(all_keys), table(0), table(1))


def _check_keys(entries: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raises ValueError for the first key that is not known: a misspelt one would be left out silently."""
    for key in entries:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{where}: entry {_shown(key)} is unknown; use only {', '.join(known)} (nearest: {near})"
            )


def _number(entries: Mapping[str, Any], key: str, where: str) -> float:
    """Returns a positive entry; latency and contention may be 0, counts must be whole, a share is below 1."""
    value = entries.get(key)
    kind = "0 or a positive number" if key in _MAY_BE_0 else "a positive number"
    if key in _COUNTS:
        kind = f"a positive whole number, at most {_MOST:.0f}"
    if key in _SHARES:
        kind = "a number from 0 to below 1"
    if value is None:
        raise ValueError(f"{where}: entry {key!r} is missing; give {kind}")
    number = _finite(value)
    is_legal = number > 0 or (key in _MAY_BE_0 and number == 0)
    is_legal &= number < 1 or key not in _SHARES
    if not is_legal or (key in _COUNTS and (number > _MOST or number % 1)):
        raise ValueError(f"{where}: entry {key!r} is {_shown(value)}; it must be {kind}")
    return number


def _finite(value: object) -> float:
    """Returns a JSON number as a float, and -1 for all that is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return -1.0
    try:
        number = float(value)
    except OverflowError:  # JSON integers know no limit
        return -1.0
    return number if math.isfinite(number) else -1.0


def _shown(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
