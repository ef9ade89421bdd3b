"""Times of the mask floor at 1M tokens in 10^4 documents: build, algebra, area, conversions, pictures.

python benchmarks/bench_mask.py --output benchmarks/results/mask_<hardware>_<date>

Writes `.md` and `.json` beside the table that it prints. Steps are interleaved: every round runs each step
once, so that a busy moment hits all steps alike. Reported are the median of the processor time, which other
work on the machine does not add to (everything here runs in one thread), and the best time on the clock.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from megatron_cp import mask as masks
from megatron_cp.mask import AttentionMask, draw

Step = Callable[[], object]


def steps(num_tokens: int, num_documents: int) -> dict[str, Step]:
    """Returns what is timed, by name; everything but the step itself is built here."""
    rng = np.random.default_rng(0)
    lengths = rng.multinomial(num_tokens, rng.dirichlet(np.ones(num_documents)))
    documents, window = masks.documents(lengths), masks.sliding_window(num_tokens, 4095, 0, 4)
    chunk = 512
    chunks = rng.permutation(num_tokens // chunk)[: num_tokens // chunk // 8] * chunk
    held = np.stack([chunks, chunks + chunk], axis=1)
    kinds = ["causal", "full", ("prefix", 0), ("window", 1023)] * (num_documents // 4 + 1)
    parents = np.maximum(-1, (np.arange(num_documents) - 1) // 8)
    flashmask, _ = masks.to_flashmask(documents)
    rows, slices = np.arange(0, num_tokens + 1, chunk), documents.slices
    half = num_tokens // 2
    return {
        "documents, causal": lambda: masks.documents(lengths),
        "documents, one kind each": lambda: masks.documents(lengths, kinds[:num_documents]),
        "prefix_lm_documents": lambda: masks.prefix_lm_documents(lengths, 64),
        "shared_question": lambda: masks.shared_question(lengths),
        "prefix_tree, 8 children each": lambda: masks.prefix_tree(lengths, parents),
        "block_causal_documents, block 1024": lambda: masks.block_causal_documents(lengths, 1024),
        "sliding_window with sinks": lambda: masks.sliding_window(num_tokens, 4095, 0, 4),
        "from_slices (checks overlap)": lambda: masks.from_slices(num_tokens, num_tokens, slices),
        "documents and window": lambda: documents & window,
        "documents or window": lambda: documents | window,
        "window minus documents": lambda: window - documents,
        "area": lambda: AttentionMask(num_tokens, num_tokens, documents.array).area(),
        "area_of_rows, chunks of 512": lambda: documents.area_of_rows(rows),
        "crop to half the rows": lambda: documents.crop(q=(half // 2, half // 2 + half)),
        "needed_keys of an eighth": lambda: documents.needed_keys(held),
        "gather of an eighth": lambda: documents.gather(held, np.array([[0, num_tokens]])),
        "merged": documents.merged,
        "digest": lambda: AttentionMask(num_tokens, num_tokens, documents.array).digest(),
        "block_table 128 x 128": lambda: masks.block_table(documents),
        "row_intervals": lambda: masks.row_intervals(documents),
        "to_flashmask": lambda: masks.to_flashmask(documents),
        "from_flashmask": lambda: masks.from_flashmask(flashmask, causal=True),
        "svg": lambda: draw.svg(documents),
    }


def measure(named: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Returns, per step, `cpu_ms` (median) and `wall_ms` (best) over interleaved rounds, after a warm-up."""
    cpu: dict[str, list[float]] = {name: [] for name in named}
    wall: dict[str, list[float]] = {name: [] for name in named}
    for current in range(rounds + 1):
        for name, step in named.items():
            started = time.perf_counter(), time.process_time()
            step()
            if current:
                wall[name].append((time.perf_counter() - started[0]) * 1e3)
                cpu[name].append((time.process_time() - started[1]) * 1e3)
    return {n: {"cpu_ms": statistics.median(cpu[n]), "wall_ms": min(wall[n])} for n in named}


def hardware() -> str:
    """Returns the name of the processor, as far as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def report(
    facts: dict[str, object], times: dict[str, dict[str, float]], counts: dict[str, int]
) -> str:
    """Returns the result page."""
    head = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    table = "\n".join(
        f"| {name} | {counts[name] or ''} | {ms['cpu_ms']:.2f} | {ms['wall_ms']:.2f} |"
        for name, ms in times.items()
    )
    columns = "| step | slices of the result | processor ms, median | clock ms, best |"
    return f"# Masks\n\n{head}\n\n{columns}\n|---|---:|---:|---:|\n{table}\n"


def main() -> None:
    """Prints the table and writes it when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="path without suffix")
    arguments = parser.parse_args()
    named = steps(arguments.tokens, arguments.documents)
    results = {name: step() for name, step in named.items()}
    counts = {n: r.num_slices if isinstance(r, AttentionMask) else 0 for n, r in results.items()}
    times = measure(named, arguments.rounds)
    facts = {
        "what": f"{arguments.tokens} tokens in {arguments.documents} documents (exponential lengths)",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "software": f"Python {platform.python_version()}, NumPy {np.__version__}, one thread",
        "protocol": f"{arguments.rounds} interleaved rounds after one warm-up round",
        "load of the machine": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "command": "python benchmarks/bench_mask.py",
    }
    page = report(facts, times, counts)
    print(page)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.with_suffix(".md").write_text(page)
        values = {"facts": facts, "times": times, "slices": counts}
        arguments.output.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
