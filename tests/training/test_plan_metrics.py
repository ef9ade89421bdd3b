"""What a step logs about its plans, counted again from messages and dense masks."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_cp import CPConfig
from megatron_cp.data.batch import PlanRequest, plan_batch
from megatron_cp.mask import documents
from megatron_cp.plan import PLANNERS

HEADS, GROUPS, DIM, BYTES = 4, 2, 16, 2
FULL_LAYERS, WINDOW_LAYERS, TENSOR_RANKS, CP = 3, 5, 2, 4
PACKS = [(137, 2, 301, 1, 64, 519), (1024,), (512, 500)]
# bytes of a row on its way there and back, by side and pass
THERE = {
    ("k", "forward"): 2 * GROUPS * DIM * BYTES,
    ("k", "backward"): 2 * GROUPS * DIM * BYTES,
    ("q", "forward"): HEADS * DIM * BYTES,
    ("q", "backward"): HEADS * (2 * DIM * BYTES + 2 * 4),
}
BACK = {
    ("k", "forward"): 0,
    ("k", "backward"): 2 * GROUPS * DIM * 4,
    ("q", "forward"): HEADS * (DIM + 1) * 4,
    ("q", "backward"): HEADS * DIM * 4,
}


def planned(lengths, planner, full_layers):
    config = CPConfig(planner=planner, num_heads=HEADS, num_kv_heads=GROUPS, head_dim=DIM)
    request = PlanRequest(
        cp_size=CP,
        config=config,
        num_full_layers=full_layers,
        num_window_layers=WINDOW_LAYERS,
        window=(100, 0),
    )
    batch = SimpleNamespace(
        mask=documents(list(lengths)), tokens=np.zeros(1024), document_lengths=lengths
    )
    return plan_batch(batch, request)


def metrics_of(planner, full_layers=FULL_LAYERS):
    """The metrics, and bytes, areas per rank and times of every plan by mask name."""
    from megatron_cp.training.config import ModelConfig
    from megatron_cp.training.logging.metrics import plan_metrics

    layers = {"full": full_layers, "window": WINDOW_LAYERS}
    model = SimpleNamespace(layers_by_mask=lambda: layers)
    model.shown_mask = ModelConfig.shown_mask.fget(model)
    config = SimpleNamespace(
        steps=SimpleNamespace(micro_batch_size=1),
        model=model,
        parallel=SimpleNamespace(tensor_model_parallel_size=TENSOR_RANKS, spans_replicas=False),
    )
    batches = [
        replace(planned(lengths, planner, full_layers), plan_ms=float(place))
        for place, lengths in enumerate(PACKS)
    ]
    counted = [
        (name, bytes_of(plan), areas_of(plan), milliseconds(plan))
        for item in batches
        for name, plan in item.plans.items()
    ]
    return plan_metrics(config, batches), counted


def bytes_of(plan):
    total = 0
    for name in ("forward", "backward"):
        for side, transfer in plan.get_pass(name).transfers():
            for hop in transfer.hops:
                for _, _, start, stop in hop.messages[:, :4].tolist():
                    total += (stop - start) * (THERE[side, name] + BACK[side, name])
    return total


def areas_of(plan):
    """Pairs that each rank computes forward: every stage's masks as booleans."""
    return [
        sum(int(stage.work[rank].to_dense().sum()) for stage in plan.forward.stages)
        for rank in range(CP)
    ]


def milliseconds(plan):
    return sum(plan.stats(name)["makespan_ms"] for name in ("forward", "backward"))


@pytest.mark.parametrize("full_layers", [FULL_LAYERS, 0])
@pytest.mark.parametrize("planner", ["zigzag", "contiguous"])
def test_metrics_of_a_step_equal_a_count_over_all_its_plans(planner, full_layers):
    """Balance is that of layers without a window; where all have one, of these."""
    assert planner in PLANNERS
    metrics, counted = metrics_of(planner, full_layers)
    layers = {"full": full_layers, "window": WINDOW_LAYERS}
    shown, most = ("full", 1024) if full_layers else ("window", 101)
    sent = sum(layers[name] * sent for name, sent, _, _ in counted)
    assert metrics["cp/comm_bytes_sent"] == pytest.approx(TENSOR_RANKS * sent)
    assert sent > 0
    balances = [max(areas) / np.mean(areas) for name, _, areas, _ in counted if name == shown]
    assert metrics["cp/area_max_over_mean"] == pytest.approx(max(balances))
    assert max(balances) > balances[-1]  # the worst pack is not the last
    split = []
    for pack in PACKS:
        pairs = np.zeros(CP)
        for length in pack:
            size = -(-length // (2 * CP))
            for token in range(length):  # causal: token t sees t + 1, and of a window 101 at most
                piece = token // size
                pairs[min(piece, 2 * CP - 1 - piece)] += min(token + 1, most)
        split.append(pairs.max() / pairs.mean())
    assert metrics["cp/per_document_area_max_over_mean"] == pytest.approx(max(split))
    times = sum(layers[name] * ms for name, _, _, ms in counted)
    assert metrics["cp/predicted_ms"] == pytest.approx(times)
    lengths = np.concatenate(PACKS)
    assert metrics["data/docs_per_pack"] == len(lengths) / len(PACKS)
    assert metrics["data/doc_len_p50"] == np.median(lengths)
    assert metrics["cp/plan_ms"] == np.mean(range(len(PACKS)))
    assert metrics["cp/tokens_per_rank"] * CP >= 1024


def test_split_documents_are_counted_once_a_pack_and_not_for_plans_of_windows(monkeypatch):
    from megatron_cp.training.logging import split_documents

    counted = []
    count = split_documents.document_bounds
    monkeypatch.setattr(
        split_documents, "document_bounds", lambda mask: counted.append(mask.area()) or count(mask)
    )
    metrics_of("zigzag")
    assert counted == [sum(n * (n + 1) // 2 for n in pack) for pack in PACKS]
