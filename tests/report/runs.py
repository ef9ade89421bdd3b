"""Run folders for the tests of the report: real plans, made-up metrics, the training loop's writer."""

from pathlib import Path

import numpy as np

from megatron_cp import CPConfig, make_plan
from megatron_cp.mask import documents
from megatron_cp.training.logging.records import RunFiles, plan_sample

CONFIG = CPConfig(num_heads=4, num_kv_heads=2, head_dim=16, topology="cpu", element_bytes=4)
LENGTHS = (137, 2, 301, 1, 64, 519)


METRICS = {
    "iteration-time": 0.5,
    "grad-norm": 0.7,
    "grad/skipped": 0.0,
    "data/wait_s": 0.05,
    "cp/area_max_over_mean": 1.01,
    "cp/zigzag_area_max_over_mean": 1.25,
    "cp/per_document_area_max_over_mean": 1.0625,
    "cp/comm_bytes_sent": 3e6,
    "cp/ring_bytes_sent": 6e6,
    "cp/predicted_ms": 40.0,
    "cp/bound_ms": 38.0,
    "cp/zigzag_predicted_ms": 60.0,
    "cp/per_document_predicted_ms": 50.0,
}
"""What every step logs beside its loss."""


def arguments(cp_size, num_tokens):
    """The arguments from which the report finds the planner's settings: those of CONFIG."""
    return {
        "seq_length": num_tokens,
        "global_batch_size": 4,
        "seed": 1234,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 16,
        "hidden_size": 64,
        "context_parallel_size": cp_size,
        "tensor_model_parallel_size": 1,
        "cp_planner": "auto",
        "cp_chunk_size": None,
        "cp_topology": None,
        "train_iters": 20,
        "vocab_size": 512,
    }


def description(name, cp_size, num_tokens):
    """What the training loop says of a run at its start."""
    lengths = np.array(LENGTHS)
    edges = 2 ** np.arange(11)
    binned = {
        f"{key}_by_length": np.histogram(lengths, edges, weights=weights)[0].tolist()
        for key, weights in (
            ("documents", np.ones(len(lengths))),
            ("tokens", lengths),
            ("area", lengths * (lengths + 1) / 2),
        )
    }
    return {
        "name": name,
        "created": 1.7e9,
        "iteration": 0,
        "command": ["pretrain_gpt.py", "--seq-length", str(num_tokens)],
        "arguments": arguments(cp_size, num_tokens),
        "layout": {
            "world_size": cp_size,
            "tensor": 1,
            "pipeline": 1,
            "context": cp_size,
            "data": 1,
        },
        "num_parameters": 12345,
        "data": {"train": {"length_edges": edges.tolist(), "bytes_over_tokens": 2.0, **binned}},
        "versions": {"python": "3.11", "torch": "2.13"},
        "machine": {"platform": "Linux", "device": "cpu"},
    }


def write_run(
    folder: Path, *, name="a run", cp_size=4, steps=20, lengths=LENGTHS, planner="auto", interval=1
):
    """Writes run.json, metrics.jsonl and plan.json as a training run does; returns the plan.

    `interval`: the steps from a row of metrics to the next.
    """
    config = CPConfig(**{**vars(CONFIG), "planner": planner})
    mask = documents(list(lengths))
    plan = make_plan(mask, cp_size, config)
    described = description(name, cp_size, sum(lengths))
    described["arguments"]["tensorboard_log_interval"] = interval
    files = RunFiles(folder, described)
    files.add_plan_sample(plan_sample(1, mask, plan, lengths, ("causal",) * len(lengths)))
    for step in range(1, steps + 1):
        if step % interval == 0:
            files.log({"iteration": step, **METRICS, "lm loss": 9 - 0.1 * step})
        if step % 10 == 0:
            files.log({"iteration": step, "lm loss validation": 9.5 - 0.1 * step})
    files.finish({"iteration": steps})
    return plan
