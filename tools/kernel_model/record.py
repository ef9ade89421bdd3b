"""The model's figures of every kernel, kept beside the sources that they are of.

`python -m tools.kernel_model --record` writes those anew whose sources have changed (nvcc; three minutes for all), and
all where the file is gone: remove it after a change of the model. The pages quote them, and `tools/gpu_check.py`
predicts from them on machines without nvcc.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_cp.kernels import build

PATH = Path(__file__).with_name("record.json")


def write(
    figures: Mapping[str, Mapping[str, Any]], variants: Mapping[str, build.Variant], compiler: str
) -> None:
    """Writes the figures of kernels, by the variants that they are of."""
    kept = {
        name: {**figures[name], "source": build.source_key(variant)[:16]}
        for name, variant in variants.items()
    }
    text = json.dumps({"model, not measured": kept, "compiler": compiler}, indent=1)
    PATH.write_text(text + "\n", encoding="utf-8")


def read(compiler: str | None = None) -> dict[str, dict[str, Any]]:
    """Returns the recorded figures by kernel (`fwd_128`); none if they must be of a compiler and are of another."""
    if not PATH.exists():
        return {}
    kept = json.loads(PATH.read_text(encoding="utf-8"))
    if compiler not in (None, kept["compiler"]):
        return {}
    found: dict[str, dict[str, Any]] = kept["model, not measured"]
    return found


def stale(
    figures: Mapping[str, Mapping[str, Any]], variants: Mapping[str, build.Variant]
) -> set[str]:
    """Returns the kernels whose figures are of other sources than today's, and those without any."""
    return {
        name
        for name, variant in variants.items()
        if figures.get(name, {}).get("source") != build.source_key(variant)[:16]
    }
