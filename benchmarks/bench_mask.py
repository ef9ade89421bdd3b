"""Times of the mask floor at 1M tokens in 10^4 documents: build, algebra, area, conversions, pictures.

python benchmarks/bench_mask.py --output benchmarks/results/mask_<hardware>_<date>

`timing.py` says what is measured; everything here runs in one thread.
"""

from collections.abc import Callable

import numpy as np
from timing import Table, argument_parser, environment, interleaved, publish

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


def main() -> None:
    """Prints the table and writes it when asked to."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    named = steps(arguments.tokens, arguments.documents)
    results = {name: step() for name, step in named.items()}
    counts = {n: r.num_slices if isinstance(r, AttentionMask) else "" for n, r in results.items()}
    times = interleaved(named, arguments.rounds, warmup=1)
    facts = {
        "what": f"{arguments.tokens} tokens in {arguments.documents} documents (exponential lengths)",
        **environment(),
        "protocol": f"{arguments.rounds} interleaved rounds after one warm-up round, one thread",
        "command": "python benchmarks/bench_mask.py",
    }
    table = Table(
        "Milliseconds",
        ("step", "slices of the result", "processor, median", "clock, best"),
        [(name, counts[name], took.cpu_ms, took.best_ms) for name, took in times.items()],
    )
    publish("Masks", facts, [table], arguments.output)


if __name__ == "__main__":
    main()
