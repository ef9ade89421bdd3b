"""Times of the kernels' work lists at 1M tokens, forward (128 x 128) and backward (64 x 128), in one thread.

python benchmarks/bench_worklist.py --output benchmarks/results/worklist_<hardware>_<date>

Counted beside the times: tiles, segments, what share of the computed pairs is wanted, and bytes of the arrays.
"""

import numpy as np
from timing import Table, argument_parser, environment, interleaved, publish

from megatron_cp import mask as masks
from megatron_cp.attn.hopper.worklist import backward_work, forward_work
from megatron_cp.mask import AttentionMask

BM, BN, BACKWARD_BM = 128, 128, 64


def cases(num_tokens: int) -> dict[str, AttentionMask]:
    """Returns the masks by name; document lengths are log-normal (sigma 1)."""
    rng = np.random.default_rng(0)

    def lengths(mean: int) -> np.ndarray:
        drawn = rng.lognormal(np.log(mean) - 0.5, 1.0, size=2 * num_tokens // mean).astype(int) + 1
        ends = np.cumsum(drawn)
        inside = drawn[ends < num_tokens]
        return np.append(inside, num_tokens - inside.sum())

    return {
        "causal": masks.causal(num_tokens),
        "sliding window 1024": masks.sliding_window(num_tokens, 1024),
        "causal documents, mean 2048": masks.documents(lengths(2048)),
        "causal documents, mean 256": masks.documents(lengths(256)),
        "causal documents, mean 10": masks.documents(lengths(10)),
        "shared question, answers of mean 64": masks.shared_question(lengths(64)),
        "video, blocks of 1560 and 8 back": masks.block_causal(num_tokens, 1560)
        & masks.sliding_window(num_tokens, 8 * 1560, 1560),
    }


def main() -> None:
    """Prints the tables and writes them when asked to."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    named = cases(arguments.tokens)
    steps = {}
    for name, mask in named.items():
        steps[f"{name}|forward"] = lambda mask=mask: forward_work(mask, BM, BN)
        steps[f"{name}|backward"] = lambda mask=mask: backward_work(mask, BACKWARD_BM, BN)
    times = interleaved(steps, arguments.rounds)
    time_rows, size_rows = [], []
    for name, mask in named.items():
        parts = [times[f"{name}|{step}"] for step in ("forward", "backward")]
        time_rows.append((name, mask.num_slices, *(t.cpu_ms for t in parts), parts[0].best_ms))
        work = forward_work(mask, BM, BN)
        useful = mask.area() / (work.num_visits * BM * BN)
        partial = 1 - work.num_full / work.num_visits
        size_rows.append((name, len(work.tiles), len(work.segs), useful, partial, work.nbytes))
    facts = {
        "what": f"work lists of {arguments.tokens} tokens",
        **environment(),
        "protocol": f"{arguments.rounds} interleaved rounds, medians of processor time",
        "command": "python benchmarks/bench_worklist.py",
    }
    tables = [
        Table(
            "Milliseconds",
            ("mask", "slices", "forward", "backward", "forward, best on the clock"),
            time_rows,
        ),
        Table(
            "What the forward list holds",
            ("mask", "tiles", "segments", "wanted share of pairs", "partial visits", "bytes"),
            size_rows,
        ),
    ]
    publish("Work lists of the kernels", facts, tables, arguments.output)


if __name__ == "__main__":
    main()
