"""Completes and checks what saves memory: recomputation, rows in chunks, what waits on the host.

Each check yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_cp.training.arguments.faults import require
from megatron_cp.training.arguments.stages import layers_of_stages

RECOMPUTE_MODULES = (
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
)
_REGIONS = {"core_attn", "mlp", "moe", "shared_experts"}
"""Those of them that Megatron recomputes from inputs that it keeps; of the others it keeps no output."""


def complete_recompute(args: Namespace) -> Iterator[str]:
    """Completes recompute flags that belong together."""
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            yield (
                "--recompute-activations means --recompute-granularity selective, not full; give "
                "one"
            )
        args.recompute_granularity = "selective"
    if args.recompute_granularity == "full" and args.recompute_method is None:
        yield "--recompute-granularity full needs --recompute-method uniform or block"
    if args.recompute_granularity != "full" and args.recompute_method is not None:
        yield "--recompute-method needs --recompute-granularity full"
    if args.recompute_method is not None:
        if args.recompute_num_layers is None:
            args.recompute_num_layers = 1
        yield from require(args, "recompute_num_layers")


def check_recomputed_modules(args: Namespace) -> Iterator[str]:
    """Yields a line for each module that cannot be recomputed."""
    for name in args.recompute_modules or ():
        if name not in RECOMPUTE_MODULES:
            yield f"--recompute-modules {name} must be one of {', '.join(RECOMPUTE_MODULES)}"
    if "moe_act" in (args.recompute_modules or ()) and not args.moe_grouped_gemm:
        yield "--recompute-modules moe_act needs --moe-grouped-gemm; leave moe_act out"
    is_mlp = args.recompute_granularity == "selective" and "mlp" in (args.recompute_modules or ())
    if is_mlp and args.add_bias_linear and has_dense_layers(args):
        # The MLP returns its bias, which is then its own checkpoint's result: backward goes through it for ever.
        yield (
            "--recompute-modules mlp with biases is not served: Megatron-Core's first backward pass would not end; "
            "leave mlp out, or train a model with --disable-bias-linear"
        )


def has_dense_layers(args: Namespace) -> bool:
    """Returns whether some layer of the decoder has a plain MLP."""
    if args.hybrid_layer_pattern is not None:
        return "-" in args.hybrid_layer_pattern
    frequency = args.moe_layer_freq
    if args.num_experts is None:
        return True
    return 0 in frequency if isinstance(frequency, list) else frequency > 1


def check_recomputed_predictions(args: Namespace) -> Iterator[str]:
    """Yields a line if the layers of predictions would be recomputed, which Megatron-Core does in fp8 alone."""
    is_uniform = args.recompute_granularity == "full" and args.recompute_method == "uniform"
    if args.mtp_num_layers is None or not is_uniform:
        return
    if args.fp8 is None or args.recompute_num_layers != 1:
        yield (
            "--recompute-method uniform with --mtp-num-layers is not served: Megatron-Core recomputes a prediction "
            "from tensors alone; give --recompute-method block, where --recompute-num-layers counts the layers of a "
            "stage that are recomputed: the same results"
        )


def check_recomputed_layers(args: Namespace) -> Iterator[str]:
    """Yields a line if a stage has no such layers, or not whole groups of them, to be recomputed."""
    wanted, counts = args.recompute_num_layers, [count for count in layers_of_stages(args) if count]
    if wanted is None or (wanted > 0 and not counts):
        return
    most = max(counts, default=1)
    if not 0 < wanted <= most:
        yield f"--recompute-num-layers {wanted} must lie in [1, {most}], the layers of a stage"
        return
    rest = [count for count in counts if count % wanted]
    if args.recompute_method == "uniform" and rest and args.hybrid_layer_pattern is None:
        yield (
            f"--recompute-method uniform --recompute-num-layers {wanted} must divide the layers of every stage, and "
            f"one has {rest[0]}: Megatron-Core 0.16 ends there with an IndexError; give a divisor: the same results"
        )


def check_chunks(args: Namespace) -> Iterator[str]:
    """Yields a line for MLPs in chunks, or inputs on the host, in fp8; notes where either does nothing."""
    chunks = args.mlp_chunks_for_training
    if chunks > 1 and args.fp8 is not None:
        yield (
            f"--mlp-chunks-for-training {chunks} with --fp8-format is not served: scales are found over all rows "
            "together; leave out --mlp-chunks-for-training: the same results, more memory"
        )
    if chunks > 1 and not has_dense_layers(args):
        args.notes.append(
            f"--mlp-chunks-for-training {chunks} changes nothing here: no layer has an MLP without experts"
        )
    if not args.offload_recompute_inputs:
        return
    if args.fp8 is not None and args.recompute_granularity is not None:
        yield (
            "--offload-recompute-inputs with --fp8-format is not served: Transformer Engine keeps those inputs; "
            "leave out --offload-recompute-inputs: the same results, more memory"
        )
    modules = set(args.recompute_modules or _REGIONS)
    if not args.machine.has_cuda:
        args.notes.append(
            "--offload-recompute-inputs changes nothing on CPU ranks: all activations are on the host"
        )
    elif args.recompute_granularity == "selective" and not modules & _REGIONS:
        args.notes.append(
            f"--offload-recompute-inputs changes nothing beside --recompute-modules {' '.join(sorted(modules))}: it "
            f"serves {', '.join(sorted(_REGIONS))}, and --recompute-granularity full"
        )
