"""Every kind of mask as a picture: who sees whom, and which of four ranks computes it.

    python examples/mask_gallery.py                        # writes runs/mask_gallery.html

Proves: any of them is planned, and the plan is a picture that can be looked at before a GPU is paid for.
"""

import inspect
from pathlib import Path

import numpy as np

import megatron_cp as mcp
from megatron_cp import mask as masks
from megatron_cp.report.draw.html import Section, page, write_page
from megatron_cp.report.one_plan import draw_plan

NUM_TOKENS, NUM_RANKS = 32768, 4
CONFIG = mcp.CPConfig(num_heads=64, num_kv_heads=8, head_dim=128)


def packed_documents():
    """Packed documents: pretraining on documents of any length."""
    return masks.documents([10960, 1600, 328, 12000, 7880], within="causal")


def bidirectional_documents():
    """Documents that look both ways: encoders, diffusion transformers."""
    return masks.documents([10960, 1928, 12000, 7880], within="full")


def causal_text():
    """One long causal document."""
    return masks.causal(NUM_TOKENS)


def sliding_window():
    """A sliding window with sinks: Mistral, Gemma, gpt-oss, StreamingLLM."""
    return masks.sliding_window(NUM_TOKENS, left=4095, num_sink=512)


def windowed_documents():
    """Documents under a window: the local layers of a packed run."""
    return masks.documents([10960, 1928, 12000, 7880], within=("window", 2047, 0))


def chunked_causal():
    """Chunks of attention: Llama 4's local layers."""
    return masks.chunked_causal(NUM_TOKENS, 8192)


def prefix_documents():
    """Prefixes that look both ways, then causal text: T5, PaliGemma."""
    return masks.prefix_lm_documents([10960, 1928, 12000, 7880], [4000, 800, 8000, 1600])


def text_with_images():
    """Images that see themselves in causal text: Gemma 3."""
    return masks.image_spans(NUM_TOKENS, [(2400, 6496), (12000, 16096), (24000, 28096)])


def shared_question():
    """One question and its answers: DPO, reward models, rollouts."""
    return masks.shared_question([8192, 5600, 7200, 2976, 8800])


def tree_of_rollouts():
    """A tree of continuations, any depth: tree search, agents."""
    return masks.prefix_tree([8192, 4800, 4000, 5600, 3200, 6976], [-1, 0, 1, 1, 0, 4])


def video_blocks():
    """Blocks of frames that see themselves and earlier ones: MAGI-1, CausVid."""
    return masks.block_causal_documents([16384, 16384], 2048)


def block_diffusion():
    """Noisy blocks beside clean ones: block diffusion, BD3-LM."""
    return masks.block_diffusion(NUM_TOKENS // 2, 2048)


def near_and_global():
    """A window and a few tokens that everybody sees: Longformer, BigBird."""
    return masks.global_sliding_window(NUM_TOKENS, 2048, 1024)


def strided_blocks():
    """Every fourth block and the near ones: Sparse Transformer, LongNet."""
    return masks.strided(NUM_TOKENS, 64, 4, 4)


def every_second_key():
    """A window with holes: dilated attention of Sparse Transformer and LongNet."""
    return masks.dilated(NUM_TOKENS, 4095, dilation=128)


def in_context_examples():
    """Examples that see themselves, and a last document that sees them all: in-context learning."""
    return masks.causal_blockwise([8192, 5600, 7200, 2976, 8800])


def first_block_for_all():
    """Blocks that see themselves and the first one: Star Attention."""
    return masks.star(NUM_TOKENS, 8)


def near_and_first_blocks():
    """Blocks that see the ones before them and the first: StreamingLLM by blocks."""
    return masks.streaming(NUM_TOKENS)


def local_and_global_blocks():
    """Blocks that see their neighbours and a few global ones: UltraAttn's global_local."""
    return masks.global_local(NUM_TOKENS)


def chosen_blocks():
    """Blocks that a table names: NSA, MoBA, VSA."""
    table = np.tril(np.random.default_rng(0).random((16, 16)) < 0.3) | np.eye(16, dtype=bool)
    return masks.block_sparse(table, NUM_TOKENS // 16)


def one_prefix():
    """One prefix that looks both ways, then causal text: T5, PaliGemma."""
    return masks.prefix_lm(NUM_TOKENS, 12000)


GALLERY = (
    packed_documents, bidirectional_documents, causal_text, sliding_window, windowed_documents,
    chunked_causal, one_prefix, prefix_documents, text_with_images, shared_question, in_context_examples,
    tree_of_rollouts, video_blocks, block_diffusion, near_and_global, strided_blocks, every_second_key,
    first_block_for_all, near_and_first_blocks, local_and_global_blocks, chosen_blocks,
)  # fmt: skip


def main():
    """Plans every mask and writes one page."""
    sections = []
    for make in GALLERY:
        plan = mcp.make_plan(make(), NUM_RANKS, CONFIG)
        name = make.__name__.replace("_", "-")
        sections.append(Section(name, inspect.getdoc(make), draw_plan(plan)))
    path = Path("runs", "mask_gallery.html")
    write_page(path, page("Masks", f"{NUM_TOKENS} tokens on {NUM_RANKS} ranks", sections, {}))
    print(
        f"wrote {path}: open it in a browser\nnext: torchrun --nproc-per-node 3 examples/your_own_mask.py"
    )


if __name__ == "__main__":
    main()
