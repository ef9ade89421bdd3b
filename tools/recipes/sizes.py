"""How the sizes of a recipe's model, data and schedule shrink, with their ratios kept."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt, sqrt

from megatron_cp.training.arguments.flags import layers_of
from tools.recipes.command_line import CommandLine

SEQUENCE, VOCABULARY, HEAD = 64, 500, 16
MICRO_BATCH, GLOBAL_BATCH = 2, 8
LEARNING_RATE = Fraction(1, 500)
_MOST_GROUPS, _MOST_PER_GROUP, _MOST_HEADS = 2, 4, 4
_MOST_EXPERTS, _MOST_CHOSEN = 8, 2
_WINDOW = 15
# At .3 a narrow model of latent attention and experts amplifies rounding a hundred times: two runs of
# deepseekv3_proxy differed by 4e-7 after three steps; at .1 by 3e-8.
_LARGEST_STD = 0.1
_LAYER_LISTS = (
    "--moe-layer-freq",
    "--window-attn-skip-freq",
    "--no-rope-freq",
    "--linear-attention-freq",
)
# Sizes of latent attention: an eighth of a head of 128, and what the ranks of its vectors are to it.
_LATENT = {
    "--q-lora-rank": (1536, 24),
    "--kv-lora-rank": (512, 16),
    "--qk-head-dim": (128, 16),
    "--qk-pos-emb-head-dim": (64, 8),
    "--v-head-dim": (128, 16),
}
_PATTERN = "--hybrid-layer-pattern"
_HEADS, _WIDTH, _HEAD = "--num-attention-heads", "--hidden-size", "--kv-channels"


def cut_width(line: CommandLine) -> None:
    """Cuts heads, width and what is a multiple of the width."""
    heads, width = line.number(_HEADS, 1), line.number(_WIDTH, 1)
    groups = line.number("--num-query-groups", 1) if line.has("--group-query-attention") else heads
    if line.has("--group-query-attention"):
        new_groups = min(groups, _MOST_GROUPS)
        new_heads = new_groups * min(heads // groups, _MOST_PER_GROUP)
        line.set("--num-query-groups", new_groups, why="few heads")
    else:
        new_heads = min(heads, _MOST_HEADS)
    head = line.number(_HEAD, width // heads)
    new_head = min(head, HEAD)
    per_head = Fraction(width, heads * head)
    new_width = max(32, new_head * round(new_heads * per_head))
    line.set(_HEADS, new_heads, why="few heads")
    line.set(_WIDTH, new_width, why="small")
    if line.has(_HEAD) or new_width != new_heads * new_head:
        line.set(_HEAD, new_head, why="small")
    for flag in (
        "--ffn-hidden-size",
        "--moe-ffn-hidden-size",
        "--moe-shared-expert-intermediate-size",
    ):
        if line.has(flag):
            ratio = Fraction(line.number(flag, 1), width)
            line.set(flag, max(16, 16 * round(new_width * ratio / 16)), why="as wide to the model")
    if line.has("--multi-latent-attention"):
        for flag, (of, new) in _LATENT.items():
            default = {"--q-lora-rank": 0}.get(flag, of)
            size = line.number(flag, default)
            if size:
                line.set(flag, min(size, max(8, size * new // of)), why="small")
    if line.has("--experimental-attention-variant"):
        _cut_linear(line)
    if line.has(_PATTERN):
        _cut_mamba(line, new_width)
    _keep_activations(line, Fraction(width, new_width))


def _cut_linear(line: CommandLine) -> None:
    """Cuts heads of linear attention; a key head keeps its number of value heads, as far as there may be."""
    keys, values = (
        line.number("--linear-num-key-heads", 16),
        line.number("--linear-num-value-heads", 32),
    )
    new_keys = min(keys, _MOST_GROUPS)
    line.set("--linear-num-key-heads", new_keys, why="few heads")
    new_values = new_keys * min(values // keys, _MOST_PER_GROUP)
    line.set("--linear-num-value-heads", new_values, why="few heads")
    for flag in ("--linear-key-head-dim", "--linear-value-head-dim"):
        line.set(flag, min(line.number(flag, 128), HEAD), why="small")


def _cut_mamba(line: CommandLine, width: int) -> None:
    """Cuts the mixers of a hybrid model: twice as wide as the model, as where no heads are named."""
    groups = min(line.number("--mamba-num-groups", 8), _MOST_GROUPS)
    line.set("--mamba-num-groups", groups, why="few heads")
    for flag in ("--mamba-head-dim", "--mamba-state-dim"):
        line.set(flag, HEAD, why="small")
    if line.has("--mamba-num-heads"):
        heads = max(1, 2 * width // HEAD // groups) * groups
        line.set("--mamba-num-heads", heads, why="few heads")


def _keep_activations(line: CommandLine, factor: Fraction) -> None:
    """Raises initial weights, so that what a layer puts out stays as large at the smaller width."""
    for flag in ("--init-method-std", "--embedding-init-method-std"):
        if line.has(flag) or flag == "--init-method-std":
            std = min(float(line.fraction(flag, "0.02")) * sqrt(factor), _LARGEST_STD)
            line.set(flag, f"{std:.4f}", why="activations as large at this width")


def cut_experts(line: CommandLine) -> None:
    """Cuts the number of experts and of those that a token chooses."""
    if not line.number("--num-experts", 0):
        return
    line.lower("--num-experts", _MOST_EXPERTS)
    line.lower("--moe-router-num-groups", _MOST_EXPERTS // 2)
    line.lower("--moe-router-group-topk", _MOST_CHOSEN)
    line.lower("--moe-router-topk", _MOST_CHOSEN, why="fewer experts")


def least_layers(line: CommandLine) -> int:
    """Returns how few layers still hold every kind of layer of the recipe."""
    least = 2
    if line.has(_PATTERN):
        return max(least, len(_kinds(line.text(_PATTERN))))
    for flag in _LAYER_LISTS:
        value = layers_of(line.text(flag)) if line.has(flag) else 1
        least = max(least, min(value, 4) if isinstance(value, int) else len(set(value)))
    return min(least, line.number("--num-layers", 2))


def _kinds(pattern: str) -> str:
    """Returns the letters of a pattern in the order in which they come first."""
    return "".join(dict.fromkeys(pattern.partition("/")[0].replace("|", "")))


def cut_layers(line: CommandLine, layers: int) -> None:
    """Gives the model this many layers; lists of layers keep the order of their kinds."""
    before = line.number("--num-layers", 1)
    if line.has(_PATTERN):
        kinds = _kinds(line.text(_PATTERN))
        pattern = "".join(kinds[place % len(kinds)] for place in range(layers))
        _, *predictions = line.text(_PATTERN).split("/")
        whole = "/".join([pattern, *predictions])
        line.set(_PATTERN, whole, why=f"{layers} layers of the same kinds")
        line.drop(("--num-layers",), "the pattern says it")
    else:
        line.set("--num-layers", layers, why="few layers")
    for flag in _LAYER_LISTS:
        value = layers_of(line.text(flag)) if line.has(flag) else None
        if isinstance(value, list):
            kept = [value[place * before // layers] for place in range(layers)]
            line.set(flag, str(kept).replace(" ", ""), why=f"{layers} layers")
        elif value is not None:
            line.lower(flag, layers)
    line.lower("--recompute-num-layers", 1)
    if not line.has(_PATTERN):
        line.lower("--mtp-num-layers", 1)
    for flag in ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"):
        line.drop((flag,), "it is about fp8")


def cut_data(line: CommandLine) -> None:
    """Cuts the sequence and puts documents of a seeded generator in place of the recipe's."""
    sequence, positions = line.number("--seq-length", SEQUENCE), "--max-position-embeddings"
    longer = line.number(positions, sequence) > sequence
    line.set("--seq-length", min(sequence, SEQUENCE), why="short")
    if line.has(positions):
        line.set(positions, (1 + longer) * min(sequence, SEQUENCE), why="short")
    if line.has("--window-size"):
        left, _, right = line.text("--window-size").strip("()").partition(",")
        line.set("--window-size", f"{min(int(left), _WINDOW)},{right.strip()}", why="short")
    line.set("--mock-data")
    line.set("--vocab-size", VOCABULARY)
    if line.has("--make-vocab-size-divisible-by"):
        line.lower("--make-vocab-size-divisible-by", 128)
    line.set("--num-workers", 0)


def cut_steps(line: CommandLine, steps: int, pipeline: int) -> None:
    """Cuts batches, steps and the schedule of the learning rate; its shape stays."""
    micro, why = min(line.number("--micro-batch-size", 1), MICRO_BATCH), "small"
    if "seq_aux_loss" in line.values.get("--moe-router-load-balancing-type", []):
        micro, why = 1, "seq_aux_loss takes one pack per micro-batch here"
    line.set("--micro-batch-size", micro, why=why)
    line.set("--global-batch-size", GLOBAL_BATCH * max(1, pipeline // 4), why="small")
    line.drop(("--train-samples", "--exit-interval", "--exit-duration-in-mins"), f"{steps} steps")
    line.set("--train-iters", steps)
    line.drop(
        ("--lr-decay-iters", "--lr-decay-samples", "--lr-warmup-samples", "--lr-warmup-iters"),
        "the schedule is as long as the run",
    )
    line.drop(("--lr-wsd-decay-samples",), "steps are counted")
    if line.text("--lr-decay-style") == "WSD":
        line.set("--lr-wsd-decay-iters", max(1, isqrt(steps)))
    factor = LEARNING_RATE / line.fraction("--lr", "1")
    rates = ("--lr", "--min-lr", "--decoupled-lr", "--decoupled-min-lr", "--lr-warmup-init")
    for flag in rates:
        if line.has(flag):
            rate = float(line.fraction(flag, "0") * factor)
            line.set(flag, f"{rate:.6g}", why="losses move in a few steps")
    line.set("--eval-iters", 0)
    line.drop(("--eval-interval",), "nothing is evaluated")
    line.set("--log-interval", 1)
