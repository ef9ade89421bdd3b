"""Partitions one hypergraph, JSON on standard input, and prints the part of each vertex; run by its path."""

import importlib
import json
import sys
from typing import Any

SEED = 0


def partition(question: dict[str, Any]) -> list[int]:
    """Returns the part of each vertex, fixed vertices where they are fixed."""
    library: Any = importlib.import_module("mtkahypar")  # it ships no types
    library.set_seed(SEED)
    kahypar = library.initialize(1, False)
    context = kahypar.context_from_preset(library.PresetType.DETERMINISTIC)
    num_parts = len(question["most"])
    context.set_partitioning_parameters(num_parts, question["imbalance"], library.Objective.KM1)
    context.set_individual_target_block_weights(question["most"])
    context.logging = False
    vertices, nets = question["vertices"], question["nets"]
    graph = kahypar.create_hypergraph(
        context, len(vertices), len(nets), nets, vertices, question["net_weights"]
    )
    graph.add_fixed_vertices(question["fixed"], num_parts)
    found = graph.partition(context)
    return [found.block_id(vertex) for vertex in range(len(vertices))]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(partition(json.load(sys.stdin))) + "\n")
