"""QK-Clip under our attention: logits of dense scores, one result for every context size."""

import pytest
import torch

from tests.attn.test_max_logits import largest_logits
from tests.mcore.test_parity import LOSS_DRIFT, NORM_DRIFT
from tests.mcore.tiny_gpt import Case, Trainer, parallel_state
from tests.ranks import run_on_ranks

CLIP = {"qk_clip": True, "qk_clip_threshold": 0.05, "qk_clip_alpha": 0.5}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 24,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}


def _train(rank, world_size, case, clips, steps=3):
    """Returns losses, gradient norms, and the largest logit of each step."""
    from megatron_cp.mcore.parts.qk_clip import clip_qk

    with parallel_state(case) as groups:
        trainer = Trainer(case, groups)
        losses, norms, largest = [], [], []
        for _ in range(steps):
            loss, norm = trainer.step()
            losses.append(loss)
            norms.append(norm)
            largest.append(clip_qk(trainer.chunks, clips=clips))
        return losses, norms, largest


@pytest.mark.parametrize("options", [{}, LATENT], ids=["grouped heads", "latent"])
@pytest.mark.parametrize("packed", [False, True])
def test_clipped_training_is_the_same_for_every_context_size(options, packed):
    case = Case(attention="planned", packed=packed).with_options(**CLIP, **options)
    ((losses, norms, largest),) = run_on_ranks(1, _train, case, True)
    ((plain, _, unclipped),) = run_on_ranks(1, _train, case, False)
    assert losses[0] == plain[0] and losses[2] != plain[2]  # weights changed
    assert largest[0] == unclipped[0] > CLIP["qk_clip_threshold"]
    two = Case(attention="planned", packed=packed, cp=2).with_options(**CLIP, **options)
    for found, found_norms, found_largest in run_on_ranks(2, _train, two, True):
        assert found == pytest.approx(losses, rel=LOSS_DRIFT)
        assert found_norms == pytest.approx(norms, rel=NORM_DRIFT)
        assert found_largest == pytest.approx(largest, rel=1e-4)


def _logits_of_a_step(rank, world_size, case):
    """Returns what the module kept for its first layer, and that of dense scores, over a step's micro-batches."""
    from megatron_cp.mcore.mixing import attention

    seen = []
    plain = attention.cp_attention

    def noting(q, k, v, plan, group, **options):
        dense = plan.mask.to_dense()
        seen.append(largest_logits(q, k, dense, options["softmax_scale"], 0.0))
        return plain(q, k, v, plan, group, **options)

    with parallel_state(case) as groups, pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "cp_attention", noting)
        trainer = Trainer(case, groups)
        trainer.step()
        layers = trainer.chunks[0].module.decoder.layers
        kept = [layer.self_attention.core_attention.current_max_attn_logits for layer in layers]
    by_layer = [torch.stack(seen[i :: len(layers)]).amax(dim=0) for i in range(len(layers))]
    return kept, by_layer


def test_what_is_kept_is_the_largest_dense_score_of_each_head_over_the_micro_batches():
    case = Case(attention="planned", packed=True).with_options(log_max_attention_logit=True)
    ((kept, expected),) = run_on_ranks(1, _logits_of_a_step, case)
    for found, dense in zip(kept, expected, strict=True):
        assert torch.allclose(found.double(), dense, rtol=1e-5)


def _clip_on_data_ranks(rank, world_size):
    """Returns the largest logit, what a layer is clipped by, and what it keeps, where ranks saw other samples."""
    from megatron_cp.mcore.parts.qk_clip import clip_qk

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.core_attention = torch.nn.Module()
            self.core_attention.current_max_attn_logits = torch.tensor([1.0 + rank, 5.0 - rank])

        def clip_qk(self):
            self.clipped_by = self.core_attention.current_max_attn_logits.tolist()

    with parallel_state(Case()):
        layer = Layer()
        largest = clip_qk([torch.nn.Sequential(layer)], clips=True)
    return largest, layer.clipped_by, layer.core_attention.current_max_attn_logits


def test_data_parallel_ranks_clip_by_the_largest_logit_of_all_of_them():
    assert run_on_ranks(2, _clip_on_data_ranks) == [(5.0, [2.0, 5.0], None)] * 2
