"""A million tokens in ten thousand documents: memory follows the slices, and torch is not needed."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.mask import draw

TOKENS, DOCUMENTS = 1 << 20, 10_000
LENGTHS = np.random.default_rng(0).multinomial(TOKENS, np.ones(DOCUMENTS) / DOCUMENTS)
CHUNKS = np.random.default_rng(1).permutation(TOKENS // 512)[:256] * 512
PARENTS = np.maximum(-1, (np.arange(DOCUMENTS) - 1) // 8)

LARGE = {
    "documents": lambda: masks.documents(LENGTHS),
    "documents of many kinds": lambda: masks.documents(
        LENGTHS, ["causal", "full", ("prefix", 3), ("window", 64)] * (DOCUMENTS // 4)
    ),
    "prefix documents": lambda: masks.prefix_lm_documents(LENGTHS, 16),
    "from cu_seqlens": lambda: masks.from_cu_seqlens(np.cumsum(np.r_[0, LENGTHS])),
    "shared question": lambda: masks.shared_question(LENGTHS),
    "tree": lambda: masks.prefix_tree(LENGTHS, PARENTS),
    "video": lambda: masks.block_causal_documents(LENGTHS, 64),
    "window": lambda: masks.sliding_window(TOKENS, 4095, 0, 4),
    "documents and window": lambda: masks.documents(LENGTHS) & masks.sliding_window(TOKENS, 63),
    "union": lambda: masks.documents(LENGTHS, "full") | masks.sliding_window(TOKENS, 63),
    "difference": lambda: masks.causal(TOKENS) - masks.documents(LENGTHS),
    "slices": lambda: masks.from_slices(TOKENS, TOKENS, masks.documents(LENGTHS).slices),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_million_tokens_build_crop_and_measure_in_little_memory(name):
    tracemalloc.start()
    try:
        mask = LARGE[name]()
        areas = mask.area_of_rows(np.arange(0, TOKENS + 1, 512))
        cropped = mask.crop(q=(TOKENS // 4, TOKENS // 2))
        held = np.stack([CHUNKS, CHUNKS + 512], axis=1)
        local = mask.gather(held, mask.needed_keys(held))
        mask.merged().digest()
        picture = draw.svg(mask)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mask.num_queries == TOKENS
    assert areas.sum() == mask.area() > 0
    assert cropped.area() == areas[TOKENS // 4 // 512 : TOKENS // 2 // 512].sum()
    assert local.area() == areas[CHUNKS // 512].sum()
    assert len(picture) < 3_000_000
    assert peak < 150e6, "a dense row of blocks would be as large; the dense mask has 10^12 pairs"


def test_block_table_of_a_million_tokens_looks_at_no_pairs():
    mask = masks.documents(LENGTHS)
    tracemalloc.start()
    try:
        table = masks.block_table(mask, 128, 128)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50e6
    assert len(table.partial) + (table.full[:, 2] - table.full[:, 1]).sum() < 3 * DOCUMENTS + 8192


def test_masks_work_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import megatron_cp.mask as masks\n"
        "from megatron_cp.mask import draw\n"
        "assert masks.documents([3, 4]).area() == 16\n"
        "assert 'megatron' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
