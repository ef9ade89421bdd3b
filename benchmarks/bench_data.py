"""Times of the data floor on this machine: open, pack, build, plan, and the loader with workers.

python benchmarks/bench_data.py --documents 100000 --seq-length 131072
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.data import (
    IndexedDataset,
    IndexedWriter,
    LoaderConfig,
    PackedLoader,
    Packer,
    PackingConfig,
    PlanRequest,
    open_documents,
)
from megatron_cp.data.batch import BatchConfig, build_batch, plan_batch


def median_ms(action: Callable[[], object], repeats: int = 5) -> float:
    """Returns the median time of `action` after one warm-up call."""
    action()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def write_corpus(prefix: Path, num_documents: int) -> None:
    """Writes documents of log-normal lengths, median 1.9K tokens (workload W2)."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(7.55, 1.25, num_documents).astype(np.int64) + 1, 1 << 20)
    words = rng.integers(0, 32768, int(lengths.max()))
    with IndexedWriter(prefix, dtype=np.uint16) as writer:
        for length in lengths:
            writer.add_document(words[:length])
        writer.finish()


def main() -> None:
    """Prints one line per step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seq-length", type=int, default=131_072)
    parser.add_argument("--context-parallel-size", type=int, default=8)
    arguments = parser.parse_args()
    size = arguments.seq_length
    print(f"{platform.platform()}, Python {platform.python_version()}, NumPy {np.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        started = time.perf_counter()
        write_corpus(prefix, arguments.documents)
        documents = open_documents(prefix)
        seconds = time.perf_counter() - started
        print(f"{arguments.documents} documents, {documents.num_tokens / 1e6:.1f} M tokens")
        print(f"write                      {documents.num_tokens / seconds / 1e6:9.1f} M tokens/s")
        print(f"open, all checks           {median_ms(lambda: IndexedDataset(prefix)):9.2f} ms")
        request = PlanRequest(
            cp_size=arguments.context_parallel_size, config=CPConfig(num_heads=32, num_kv_heads=8)
        )
        for policy in ("split", "keep"):
            packer = Packer(documents.lengths, PackingConfig(seq_length=size, policy=policy))
            print(
                f"{policy:5} draw one pack        {median_ms(lambda p=packer: next(p), 50):9.3f} ms"
            )
        config = BatchConfig(seq_length=size, reset_attention_mask=True, reset_position_ids=True)
        pack = next(packer)
        batch = build_batch(documents, [pack], config)
        print(f"documents in the pack      {len(pack.pieces):9d}")
        print(
            f"build one batch            {median_ms(lambda: build_batch(documents, [pack], config)):9.2f} ms"
        )
        print(f"plan it                    {plan_batch(batch, request).plan_ms:9.2f} ms")
        for num_workers in (0, 1, 2):
            settings = LoaderConfig(
                packing=PackingConfig(seq_length=size, policy="keep"),
                batch=BatchConfig(seq_length=size, reset_attention_mask=True),
                global_batch_size=1,
                num_workers=num_workers,
            )
            with PackedLoader(documents, settings, request) as loader:
                milliseconds = median_ms(lambda each=loader: next(each), 6)
            print(f"loader, {num_workers} workers          {milliseconds:9.2f} ms per batch")


if __name__ == "__main__":
    main()
