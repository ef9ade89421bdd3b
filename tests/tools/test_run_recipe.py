"""Six kinds of published recipes, cut small: one context rank, two, and Megatron-Core's own attention agree."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_cp.models.presets import PRESETS
from megatron_cp.training.arguments import judge_arguments
from megatron_cp.training.arguments.flags import flags_of
from tools import run_recipe
from tools.recipes.command_line import CommandLine
from tools.recipes.compare import Starter, compare
from tools.recipes.cut import cut
from tools.recipes.layout import Ranks, fit

COMMON = (
    "--micro-batch-size 4 --global-batch-size 32 --train-iters 50 --lr 0.00015 --min-lr 1e-05 --lr-decay-style cosine "
    "--lr-decay-iters 320000 --lr-warmup-fraction 0.01 --clip-grad 1.0 --weight-decay 1e-2 --split 949,50,1 "
    "--transformer-impl transformer_engine --bf16 --eval-iters 10 --eval-interval 1000 --log-interval 1 --save ${SAVE} "
    "--load ${LOAD} --data-cache-path ${CACHE} --data-path ${DATA} --vocab-file v.json --merge-file m.txt "
    "--distributed-backend nccl --use-mcore-models --tensorboard-dir ${BOARD} --timing-log-level 0 --async-save "
)
SMALL = "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type "
    "rope --rotary-base 500 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights "
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --qk-layernorm --rope-type rope --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear "
)
# What recipes of this kind say, and whether their cut is run on documents.
RECIPES = {
    "dense, learned positions": (SMALL + "--apply-query-key-layer-scaling", False),
    "grouped heads, rotary": (LLAMA + "--calculate-per-token-loss", True),
    "experts": (
        LLAMA + "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --sequence-parallel",
        False,
    ),
    "latent attention": (
        SMALL
        + LATENT
        + "--recompute-granularity selective --recompute-modules layernorm mla_up_proj "
        "--tensor-model-parallel-size 2",
        True,
    ),
    "prediction": (
        LLAMA + "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --pipeline-model-parallel-size 4 "
        "--pipeline-model-parallel-layout Et*3|(tt|)*14tmL",
        True,
    ),
    "window and sinks": (
        shlex.join(flags_of(PRESETS["gpt-oss-20b"])) + " --seq-length 8192",
        True,
    ),
}
# More flags, and what is said to them before ranks meet: by Megatron-Core's configuration, and by our layers.
REFUSED = {
    "latent attention": ("--rotary-interleaved", "does not work with multi_latent_attention"),
    "experts": ("--seq-length 63", "packs of 126 tokens on 128 rows"),
}
# Largest relative differences that were measured over these runs: losses 8e-8, gradient norms 2e-7.
LOSSES, NORMS = 5e-7, 2e-6


def words_of(name: str) -> list[str]:
    return shlex.split(COMMON) + shlex.split(RECIPES[name][0])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    """Every recipe at every layout, from one process that imports Megatron once; and one that is refused."""
    folder = tmp_path_factory.mktemp("recipes")
    found = {}
    with Starter() as starter:
        for place, (name, (_, documents)) in enumerate(RECIPES.items()):
            small = cut(words_of(name), 2, context=2, documents=documents)
            found[name] = compare(small, folder / str(place), starter)
        for name, more in REFUSED.items():
            small = cut([*words_of(name), *more[0].split()], 2, context=2)
            found["refused", name] = starter.run("cp2", small, folder / f"refused {name}")
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RECIPES)
def test_losses_of_a_cut_recipe_equal_those_of_megatrons_own_attention(name: str, runs: dict):
    one, two, megatron = runs[name]
    assert (one.name, two.name, megatron.name) == ("cp1", "cp2", "megatron")
    for run in (one, two, megatron):
        assert not run.reason
        assert len(run.losses) == 3
        losses, norms = run.differs_from(one)
        assert losses < LOSSES, run
        assert norms < NORMS, run
    assert abs(one.losses[-1] - one.losses[0]) > 1e-2, "nothing was learned"


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_or_our_layers_refuse_is_one_line_before_ranks_meet(name: str, runs: dict):
    run = runs["refused", name]
    assert run.is_refused
    assert REFUSED[name][1] in run.reason


@pytest.mark.parametrize("most_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_every_cut_is_accepted_on_its_ranks_and_every_change_is_told(name: str, most_ranks: int):
    for context in (None, 1, min(2, most_ranks)):
        small = cut(words_of(name), most_ranks, context=context)
        assert small.ranks.world_size <= most_ranks
        environment = {"WORLD_SIZE": str(small.ranks.world_size)}
        args, reasons = judge_arguments(small.argv, environment)
        assert not reasons
        assert args.hidden_size <= 128 and args.num_layers <= 9
        before, after = CommandLine.of(words_of(name)).values, CommandLine.of(small.argv).values
        changed = {flag for flag in before | after if before.get(flag) != after.get(flag)}
        told = {flag for line in small.changes for flag in re.findall(r"--[\w-]+", line)}
        assert changed <= told


def test_ratios_and_kinds_of_layers_are_kept():
    flags = "--moe-layer-freq ([0]*3+[1]*29) --num-experts 64 --moe-router-topk 8"
    line = CommandLine.of(cut([*words_of("grouped heads, rotary"), *flags.split()], 1).argv)
    assert line.number("--num-attention-heads", 0) == 4 * line.number("--num-query-groups", 0) == 8
    assert line.text("--moe-layer-freq") == "[0,1]"
    assert line.number("--ffn-hidden-size", 0) == 3.5 * line.number("--hidden-size", 0)
    assert (line.number("--num-experts", 0), line.number("--moe-router-topk", 0)) == (8, 2)


@pytest.mark.parametrize(
    ("flags", "pipeline", "expected"),
    [
        (
            "--pipeline-model-parallel-layout Et*3|(tt|)*6mL --mtp-num-layers 1",
            4,
            "Ett|t|t|t|t|t|t|mL",
        ),
        ("--pipeline-model-parallel-layout Et*7|t*7mL --mtp-num-layers 1", 2, "Et|tmL"),
        ("--num-layers-per-virtual-pipeline-stage 1", 4, "8"),
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", 4, "7"),
        ("--account-for-loss-in-pipeline-split", 4, "7"),
    ],
)
def test_stages_shrink_with_their_shape(flags: str, pipeline: int, expected: str):
    size = f"--pipeline-model-parallel-size {pipeline}"
    small = cut([*words_of("grouped heads, rotary"), *flags.split(), *size.split()], pipeline)
    line = CommandLine.of(small.argv)
    layout = line.text("--pipeline-model-parallel-layout", line.text("--num-layers"))
    assert layout == expected
    assert not judge_arguments(small.argv, {"WORLD_SIZE": str(pipeline)})[1]


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [
        (Ranks(tensor=8, pipeline=2), 4, "tp2 pp2"),
        (Ranks(tensor=2, pipeline=4, context=2), 4, "pp2 cp2"),
        (Ranks(expert=16), 4, "dp4 ep4"),
        (Ranks(tensor=2, expert=4), 4, "tp2 dp2 ep4"),
        (Ranks(tensor=4, expert=2, expert_tensor=2), 4, "tp4 ep2 etp2"),
        (Ranks(pipeline=4, expert=8), 1, "one rank"),
    ],
)
def test_layouts_are_halved_until_they_fit(wanted: Ranks, most: int, expected: str):
    assert str(fit(wanted, most)) == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["a"], "2 recipes are called a"),
        (["x/b"], "0 recipes are called x/b; nearest: x/a"),
        (["x/a", "--steps", "0"], "--steps 0"),
        (["x/a", "--context-parallel-size", "5"], "--context-parallel-size 5"),
        (["x/a", "--context-parallel-size", "3"], "--seq-length"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path: Path, capsys, words, named: str):
    recipe = {"world_size": 1, "argv": ["--seq-length", "two"]}
    names = ("x/a", "y/a")
    content = {"recipes": [{**recipe, "name": name} for name in names]}
    (tmp_path / "recipes.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as stop:
        run_recipe.main([str(tmp_path / "recipes.json"), *words])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run_recipe.py: error: ")
    assert named in line
