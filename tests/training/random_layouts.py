"""Random models in random layouts, and whether each trains as it does on one rank.

    one rank, everything plain               losses, norms, rates, tokens that count, losses of experts
    the same from its start, or from its     is all of it equal, but for rounding?
    checkpoint of step 1, in a layout
    one rank, from a checkpoint of step 2    and of what such a layout saved?
    of that layout

What the program refuses is counted, with its line. Anything else that is not a whole run is broken.
"""

import json
import random
import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_cp.data.document_set import write_prefix_lengths
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.tokenizer import ByteLevelTokenizer
from tests.faults.program import Launch, Outcome, run_program
from tests.training.commands import error_lines

# The flags of a draw. A row is a share and alternatives: with that probability one of them is given, each as likely.
_MLP = """
1.0 --ffn-hidden-size 48 | --ffn-hidden-size 64 --swiglu | --ffn-hidden-size 48 --squared-relu
    | --ffn-hidden-size 64 --quick-geglu
"""
_SHAPE = """
1.0 --num-layers 2 | --num-layers 4
1.0 --num-attention-heads 2 --hidden-size 24 | --num-attention-heads 4 --hidden-size 64
    | --num-attention-heads 6 --hidden-size 48
1.0 --init-method-std .02 | --init-method-std .05 | --init-method-std .1
1.0 --normalization LayerNorm | --normalization RMSNorm | --normalization LayerNorm --apply-layernorm-1p
0.6 --untie-embeddings-and-output-weights
"""
_SOFTMAX = """
0.3 --window-size 15,0 | --window-size 40,0 --window-attn-skip-freq 2 | --window-size 0,0
0.2 --softmax-type off-by-one | --softmax-type learnable
"""
_PLAIN = f"""{_MLP}
0.6 --group-query-attention --num-query-groups 1 | --group-query-attention --num-query-groups 2
0.5 --disable-bias-linear
0.2 --add-qkv-bias
0.3 --qk-layernorm | --qk-l2-norm | --attention-output-gate
1.0 --position-embedding-type rope | --position-embedding-type rope --rotary-percent .5
    | --position-embedding-type rope --rotary-interleaved | --position-embedding-type rope --use-rope-scaling
    | --position-embedding-type rope --no-rope-freq 2 | --position-embedding-type learned_absolute
    | --position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 48
    | --position-embedding-type none
"""
_LATENT = f"""{_MLP}
1.0 --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --position-embedding-type rope
1.0 --v-head-dim 8 | --v-head-dim 16
0.5 --q-lora-rank 16
0.5 --rope-type rope | --rotary-scaling-factor 4 --mscale .7 --mscale-all-dim .7
"""
_LINEAR = """
1.0 --experimental-attention-variant gated_delta_net --linear-num-key-heads 2 --linear-num-value-heads 4
    | --experimental-attention-variant kda --linear-num-key-heads 4 --linear-num-value-heads 4
    | --experimental-attention-variant kda --linear-num-key-heads 4 --linear-num-value-heads 4 --multi-latent-attention
    --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --rope-type none
1.0 --ffn-hidden-size 64 --swiglu --position-embedding-type rope
1.0 --linear-attention-freq 2 | --linear-attention-freq 4
1.0 --linear-key-head-dim 8 --linear-value-head-dim 16
"""
_HYBRID = """
1.0 --ffn-hidden-size 48 --squared-relu --disable-bias-linear
1.0 --hybrid-layer-pattern M-*- | --hybrid-layer-pattern M*M- | --hybrid-layer-pattern MM-M
    | --hybrid-layer-pattern M-*M-M*- | --hybrid-layer-pattern *-M-/*M | --hybrid-layer-pattern M*M-/M*-/M*-
    | --hybrid-layer-pattern M-*M/M-/M- --mtp-use-repeated-layer
1.0 --mamba-num-heads 4 --mamba-num-groups 2 | --mamba-num-heads 6 --mamba-num-groups 2
    | --mamba-num-heads 8 --mamba-num-groups 8
1.0 --mamba-head-dim 8 --mamba-state-dim 16 | --mamba-head-dim 16 --mamba-state-dim 8
1.0 --position-embedding-type none | --position-embedding-type none | --position-embedding-type rope
0.6 --group-query-attention --num-query-groups 2
"""
_HYBRID_EXPERTS = """
1.0 --hybrid-layer-pattern ME*E | --hybrid-layer-pattern M*ME- | --hybrid-layer-pattern MEM*/*E
0.3 --moe-latent-size 12
"""
_SPARSE = """
1.0 --experimental-attention-variant dsa --multi-latent-attention --qk-layernorm --position-embedding-type rope
1.0 --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --rope-type rope --ffn-hidden-size 48
1.0 --v-head-dim 8 | --v-head-dim 16
1.0 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 | --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 8
1.0 --dsa-indexer-topk 12 | --dsa-indexer-topk 64 | --dsa-indexer-topk 1
1.0 --dsa-indexer-loss-coeff .5 | --dsa-indexer-loss-coeff .1 --dsa-indexer-use-sparse-loss
0.6 --dsa-indexer-topk-freq 2 | --dsa-indexer-topk-freq 3 --dsa-indexer-skip-topk-offset 2
    | --num-layers 4 --dsa-indexer-topk-freq 4
"""
_EXPERTS = """
1.0 --num-experts 4 --moe-ffn-hidden-size 16 --disable-bias-linear
    | --num-experts 8 --moe-ffn-hidden-size 32 --disable-bias-linear
1.0 --moe-aux-loss-coeff .1 | --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff .1
    | --moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --moe-router-pre-softmax
    | --moe-router-load-balancing-type none
0.5 --moe-layer-freq 2 | --moe-shared-expert-intermediate-size 16
0.3 --moe-z-loss-coeff .01
0.3 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate .05
0.2 --moe-router-num-groups 2 --moe-router-group-topk 1
"""
_KINDS = {_PLAIN: 7, _LATENT: 2, _LINEAR: 1, _HYBRID: 3, _SPARSE: 2}
"""And how often each is drawn."""
KINDS = dict(zip(("plain", "latent", "linear", "hybrid", "sparse"), _KINDS, strict=True))
_PREDICTION = """
1.0 --mtp-num-layers 1 | --mtp-num-layers 2 --mtp-loss-scaling-factor .3
"""
_STEPS = """
1.0 --seq-length 96 | --seq-length 128 | --seq-length 144
1.0 --global-batch-size 4 --micro-batch-size 1 | --global-batch-size 8 --micro-batch-size 1
0.6 --calculate-per-token-loss
1.0 --optimizer sgd --lr .1 | --decoupled-lr 1e-3 | --clip-grad .1 | --weight-decay .3
    | --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable
0.5 --lr-decay-style cosine | --lr-warmup-iters 1
0.2 --log-max-attention-logit
"""
_MASKS = """
0.8 --reset-attention-mask --reset-position-ids | --reset-attention-mask | --dataloader-inter-document-masking
    | --eod-mask-loss
0.3 --packing keep | --packing megatron
"""
_ENGINE = """
0.3 --overlap-grad-reduce
0.2 --ddp-bucket-size 1000 | --ddp-bucket-size 5000
0.3 --recompute-granularity full --recompute-method block --recompute-num-layers 1
    | --recompute-granularity full --recompute-method uniform --recompute-num-layers 2
    | --recompute-granularity selective | --recompute-granularity selective --recompute-modules layernorm
0.2 --num-workers 1
0.2 --moe-token-dispatcher-type alltoall
0.3 --cross-entropy-loss-fusion
"""
_CONTEXT = """
1.0 --cp-planner auto | --cp-planner auto | --cp-planner zigzag | --cp-planner allgather | --cp-planner ulysses
    | --cp-planner contiguous | --cp-planner stripe | --cp-planner per_document_zigzag | --cp-planner double_ring
    | --cp-planner dcp | --cp-planner magi
0.3 --cp-chunk-size 4 | --cp-chunk-size 16 | --cp-chunk-size 24
0.2 --cp-topology h100 | --cp-backend reference
"""
_FIXED = shlex.split(
    "--train-iters 3 --log-interval 1 --eval-iters 1 --eval-interval 2 --lr 1e-2 --adam-eps 1e-4 --num-workers 0 "
    "--no-wandb --log-params-norm --make-vocab-size-divisible-by 1 --attention-dropout 0 --hidden-dropout 0 "
    "--cp-planner zigzag"
)
LAYOUTS = {  # ranks and flags
    "CP 2": (2, "--context-parallel-size 2"),
    "CP 3": (3, "--context-parallel-size 3"),
    "CP 4": (4, "--context-parallel-size 4"),
    "DP 2": (2, ""),
    "CP 2 x DP 2": (4, "--context-parallel-size 2"),
    "CP 2 x DP 2, together": (4, "--context-parallel-size 2 --hybrid-context-parallel"),
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "TP 2 x CP 2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "PP 2, interleaved": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "PP 2 x CP 2": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
    "EP 2 x CP 2": (2, "--expert-model-parallel-size 2 --context-parallel-size 2"),
    "PP 2 x EP 2 x CP 2": (
        4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --context-parallel-size 2"
    ),
}  # fmt: skip
_SAVED = ("--save-interval", "1")
# Counted, or decided by the flags alone; all else may differ by rounding, which grows with the steps compared.
_EXACT = ("loss/valid_tokens", "learning-rate", "batch-size", "samples vs steps", "grad/skipped")
_OWN = (
    "cp/",
    "data/",
    "ckpt/",
    "restart/",
    "iteration",
    "time",
    "throughput",
    "remaining",
    "tokens-",
)
_ROUNDING = (3e-5, 3e-4, 3e-3)
# A divergence is what is left of sums near 1: its rounding does not shrink with it.
_LEAST = {"indexer loss": 1e-3}

Result = Literal["equal", "refused", "different", "broken"]
Rows = dict[tuple[int, str], float | None]


@dataclass(frozen=True)
class Trial:
    """A model, and a layout that is to train it alike."""

    model: tuple[str, ...]
    layout: str
    engine: tuple[str, ...]
    resumes: bool

    @property
    def num_ranks(self) -> int:
        """Ranks of the layout."""
        return LAYOUTS[self.layout][0]

    @property
    def flags(self) -> tuple[str, ...]:
        """The whole command line of the layout's run, without folders."""
        return (*self.model, *LAYOUTS[self.layout][1].split(), *self.engine)


@dataclass(frozen=True)
class Verdict:
    """How a trial went, and what was said or differs; `largest` is the largest difference at its first step."""

    trial: Trial
    result: Result
    told: str = ""
    largest: float = 0.0


def draw(
    number: int, seed: int, folder: Path, per_model: int = 3, kinds: Collection[str] = KINDS
) -> list[Trial]:
    """Models of these kinds on corpora in `folder`, each in as many layouts."""
    dice, trials = random.Random(seed), []
    sources = _write_corpora(folder)
    for place in range(number):
        if place % per_model == 0:
            model = _model(dice, sources, [KINDS[kind] for kind in kinds])
        layout = dice.choice([name for name in LAYOUTS if _may_fit(name, model)])
        engine = [*_drawn(dice, _ENGINE), *(_drawn(dice, _CONTEXT) if "CP" in layout else ())]
        # Stages and ranks of experts draw weights of their own.
        resumes = "PP" in layout or "EP" in layout or dice.random() < 0.4
        trials.append(Trial(tuple(model), layout, tuple(engine), resumes))
    return trials


def _may_fit(layout: str, model: list[str]) -> bool:
    """Whether a layout is for such a model; most that are not would be refused."""
    if "together" in layout:
        is_counted_by_replica = "--num-experts" in model or "--mtp-num-layers" in model
        return "--calculate-per-token-loss" in model and not is_counted_by_replica
    return "EP" not in layout or "--num-experts" in model


def run_trials(trials: list[Trial], root: Path) -> Iterator[Verdict]:
    """Runs each model on one rank, then in its layouts, and yields how each went."""
    models = list(dict.fromkeys(trial.model for trial in trials))
    for number, model in enumerate(models):
        own = [trial for trial in trials if trial.model == model]
        plain = root / f"{number}"
        (ranks,) = run_program([Launch((*model, *_SAVED, "--save", str(plain)))])
        result, told = _ended(ranks)
        if result != "equal":
            yield from (Verdict(trial, result, told) for trial in own)
            continue
        for place, trial in enumerate(own):
            yield _run(trial, plain, root / f"{number}-{place}")


def _run(trial: Trial, plain: Path, folder: Path) -> Verdict:
    """Runs a trial beside the plain run of its model, then one rank from what it saved."""
    there = ["--run-dir", str(folder), "--save", str(folder), *_SAVED]
    if trial.resumes:
        there += ["--load", str(plain), "--ckpt-step", "1"]
    back = ["--run-dir", str(folder / "back"), "--load", str(folder), "--ckpt-step", "2"]
    runs = (
        (1 + trial.resumes, folder, Launch((*trial.flags, *there), trial.num_ranks)),
        (3, folder / "back", Launch((*trial.model, *back))),
    )
    largest = 0.0
    for first, records, launch in runs:
        (ranks,) = run_program([launch])
        result, told = _ended(ranks)
        if result != "equal":
            return Verdict(trial, result, told)
        found = differences(rows_of(plain), rows_of(records), first)
        largest = max(largest, max((d for step, _, d in found if step == first), default=0.0))
        beyond = [
            f"{name} of step {step}: {difference:.1e}"
            for step, name, difference in found
            if difference > (0.0 if name in _EXACT else _ROUNDING[step - first])
        ]
        if beyond:
            return Verdict(trial, "different", "; ".join(beyond), largest)
    return Verdict(trial, "equal", largest=largest)


def rows_of(folder: Path) -> Rows:
    """Every value that a run records of its steps and evaluations, but those of its layout and time."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        (row["iteration"], name): value
        for row in map(json.loads, lines)
        for name, value in row.items()
        if not name.startswith(_OWN)
    }


def differences(plain: Rows, other: Rows, first: int) -> list[tuple[int, str, float]]:
    """Relative differences from step `first` on; infinite where one run alone has a value."""
    found = []
    for step, name in sorted(place for place in plain.keys() | other.keys() if place[0] >= first):
        a, b = plain.get((step, name)), other.get((step, name))
        if a is None or b is None:
            are_alike = a is b and (step, name) in plain and (step, name) in other
            found.append((step, name, 0.0 if are_alike else float("inf")))
        else:
            least = _LEAST.get(name, 1e-6)
            found.append((step, name, abs(a - b) / max(abs(a), abs(b), least)))
    return found


def _ended(ranks: list[Outcome]) -> tuple[Result, str]:
    """Whether all ranks ended well ("equal", so far), or were refused alike, or broke."""
    said = "".join(rank.stderr for rank in ranks)
    if all(rank.code == 0 for rank in ranks):
        return "equal", ""
    lines = sorted(set(error_lines(said)))
    if all(rank.code in (1, 2) for rank in ranks) and lines and "Traceback" not in said:
        return "refused", " / ".join(
            line.removeprefix("pretrain_gpt.py: error: ") for line in lines
        )
    return "broken", f"exit codes {[rank.code for rank in ranks]}: {said[-1500:]}"


def _model(dice: random.Random, sources: list[str], kinds: list[str]) -> list[str]:
    """A model, its data and its steps; of a flag that is drawn twice the last value holds."""
    kind = dice.choices(kinds, [_KINDS[kind] for kind in kinds])[0]
    has_experts = dice.random() < 0.4
    parts = [_SHAPE, kind] if kind == _SPARSE else [_SHAPE, _SOFTMAX, kind]
    if has_experts:
        parts += [_EXPERTS, _HYBRID_EXPERTS] if kind == _HYBRID else [_EXPERTS]
    if dice.random() < 0.15 and kind != _HYBRID:  # its pattern says so
        parts.append(_PREDICTION)
    words = [word for part in (*parts, _STEPS) for word in _drawn(dice, part)]
    source = dice.choice(sources)
    masks = ["--reset-attention-mask"] if "prefix" in source else _drawn(dice, _MASKS)
    return [*_FIXED, *words, *source.split(), *masks]


def _drawn(dice: random.Random, table: str) -> list[str]:
    """The flags of one alternative of each row that is drawn."""
    words = []
    for row in re.split(r"\n(?=\d)", table.strip()):
        share, _, alternatives = row.partition(" ")
        if dice.random() < float(share):
            words += dice.choice(alternatives.split("|")).split()
    return words


def _write_corpora(folder: Path) -> list[str]:
    """Corpora of short and long documents, and of some with a prefix: the flags of each, and of a blend."""
    generator, end = np.random.default_rng(1), ByteLevelTokenizer.eod
    for name, count, longest in (("short", 400, 60), ("long", 80, 700), ("prefix", 200, 200)):
        lengths = generator.integers(2, longest, count)
        with IndexedWriter(folder / name, dtype=np.uint16) as writer:
            for length in lengths:
                writer.add_document([*generator.integers(1, end, length - 1), end])
            writer.finish()
        if name == "prefix":
            kinds = generator.integers(0, 3, count)
            write_prefix_lengths(folder / name, np.choose(kinds, (0, -1, 1 + lengths // 3)))
    tokens = "--tokenizer-type ByteLevel --split 60,20,20"
    names = [f"{folder}/{name}" for name in ("short", "long", "prefix")]
    blend = f"--data-path .6 {names[0]} .4 {names[1]}"
    return [*(f"--data-path {name} {tokens}" for name in names), f"{blend} {tokens}"]
