"""Bad input and what is said to it: one table for the test and for docs/bad-input.md.

    python -m tests.faults.bad_inputs          writes docs/bad-input.md from the answers themselves

A case of the library is a call that raises; a case of the program is a command line that every rank refuses
alike. ``says`` holds the value received and what is allowed.
"""

# ruff: noqa: E501  a table is read row by row

import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import megatron_cp as mcp
from megatron_cp import mask as masks
from megatron_cp.data.indexed import IndexedDataset
from megatron_cp.data.text_files import TextInputs
from megatron_cp.plan import make_plan, make_plans
from tests.faults.bad_files import CHECKPOINTS, write_corpora, write_corpus
from tests.faults.program import Launch, Outcome, run_program
from tests.training.commands import MODEL, STEPS

NAN = float("nan")


@dataclass(frozen=True)
class LibraryCase:
    """A call that raises ``kind``; ``call`` gets an empty folder of its own."""

    group: str
    input: str
    call: Callable[[Path], object]
    says: tuple[str, ...]
    kind: type[Exception] = ValueError


@dataclass(frozen=True)
class ProgramCase:
    """Flags that pretrain_gpt.py refuses on each of ``world_size`` ranks, before any process group."""

    group: str
    input: str
    says: tuple[str, ...]
    world_size: int = 2
    data: str = "good"

    def launch(self, corpora: Path) -> Launch:
        """How to run it; ``corpora`` holds what ``write_corpora`` wrote."""
        data = ["--data-path", str(corpora / self.data)] if self.data else []
        save = ["--save", str(self.saved(corpora))]
        words = self.input.split()
        for place, word in enumerate(words):
            if place and words[place - 1] == "--load" and word in CHECKPOINTS:
                words[place] = str(corpora / "checkpoints" / word)
        return Launch((*BASE, *save, *data, *words), self.world_size)

    def saved(self, corpora: Path) -> Path:
        """Where the run would leave something if it were not refused."""
        return corpora / f"run{PROGRAM.index(self)}"


BASE = (
    *MODEL, *STEPS, "--seq-length", "128", "--vocab-size", "512", "--num-workers", "0",
    "--split", "1,0,0", "--eval-iters", "0", "--no-wandb",
)  # fmt: skip


def _lie(offset: int, form: str, value: object) -> Callable[[Path], object]:
    """Opens three documents of 3, 2 and 4 uint16 tokens after one number of the index was changed."""

    def call(folder: Path) -> object:
        prefix = write_corpus(folder / "corpus", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
        path = Path(f"{prefix}.idx")
        raw = bytearray(path.read_bytes())
        struct.pack_into(form, raw, offset, value)
        path.write_bytes(raw)
        return IndexedDataset(prefix)

    return call


def _cut(suffix: str, num_bytes: int) -> Callable[[Path], object]:
    """Opens the same corpus after one file was cut to ``num_bytes``."""

    def call(folder: Path) -> object:
        prefix = write_corpus(folder / "corpus", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
        path = Path(f"{prefix}{suffix}")
        path.write_bytes(path.read_bytes()[:num_bytes])
        return IndexedDataset(prefix)

    return call


def _attend(**changes: object) -> Callable[[Path], object]:
    """One-rank attention over 8 causal tokens, with one thing wrong."""

    def call(folder: Path) -> object:
        rows = {name: torch.zeros(8, 4, 16) for name in "qkv"} | changes
        mask = rows.pop("mask", masks.causal(8))
        return mcp.attend(rows.pop("q"), rows.pop("k"), rows.pop("v"), mask, **rows)

    return call


def _of(call: Callable[[], object]) -> Callable[[Path], object]:
    return lambda folder: call()


IDX, MASK, PLAN, ATTN = "Token files", "Masks", "Plans", "Attention"
SIZES, DATA, OTHER, LOAD = "Sizes and layout", "Data of a run", "Settings", "Checkpoints"
MODELS = "Models"

LIBRARY = (
    LibraryCase(IDX, "`.idx` with another magic number", _lie(0, "<9s", b"MMIDIDY\0\0"), ("byte 0", "magic number", "want", "have")),
    LibraryCase(IDX, "`.idx` of version 2", _lie(9, "<Q", 2), ("byte 9", "want 1, have 2")),
    LibraryCase(IDX, "`.idx` with dtype code 77", _lie(17, "<B", 77), ("byte 17", "dtype code", "have 77")),
    LibraryCase(IDX, "`.idx` that counts 2^62 sequences", _lie(18, "<Q", 2**62), ("byte 34", str(2**62), "bytes")),
    LibraryCase(IDX, "`.idx` that counts -1 sequences", _lie(18, "<q", -1), ("byte 34", "lengths section", "want")),
    LibraryCase(IDX, "a document of negative length", _lie(34, "<i", -3), ("length of sequence 0", "at least 0", "have -3")),
    LibraryCase(IDX, "a pointer beyond the `.bin`", _lie(62, "<q", 9000), ("sequence 2", "beyond the .bin", "9000")),
    LibraryCase(IDX, "a negative pointer", _lie(46, "<q", -2), ("sequence 0", "negative", "have -2")),
    LibraryCase(IDX, "an unaligned pointer", _lie(54, "<q", 7), ("sequence 1", "unaligned", "have 7")),
    LibraryCase(IDX, "an overlapping pointer", _lie(54, "<q", 4), ("sequence 1", "overlaps", "have 4")),
    LibraryCase(IDX, "`.idx` cut in its header", _cut(".idx", 20), ("truncated header", "34 bytes", "20 bytes")),
    LibraryCase(IDX, "`.idx` cut in its lengths", _cut(".idx", 40), ("lengths section", "40 bytes")),
    LibraryCase(IDX, "`.idx` cut in its pointers", _cut(".idx", 50), ("pointers section", "50 bytes")),
    LibraryCase(IDX, "`.idx` cut in its documents", _cut(".idx", 80), ("documents section", "80 bytes")),
    LibraryCase(IDX, "`.bin` shorter than promised", _cut(".bin", 10), ("beyond the .bin", "sequence 2")),
    LibraryCase(IDX, "token files that are not there", lambda f: IndexedDataset(f / "nowhere"), ("nowhere", "does not exist", "prefix"), FileNotFoundError),
    LibraryCase(IDX, "text that is not there", lambda f: TextInputs([f / "nowhere.txt"]), ("nowhere.txt does not exist",), FileNotFoundError),
    LibraryCase(MASK, "documents of negative length", _of(lambda: masks.documents([3, -1])), ("lengths[1]=-1", ">= 0")),
    LibraryCase(MASK, "overlapping slices", _of(lambda: masks.from_slices(4, 4, [(0, 2, 0, 2), (1, 4, 1, 2)])), ("slices[0]", "slices[1]", "share pairs")),
    LibraryCase(MASK, "duplicate slices", _of(lambda: masks.from_slices(4, 4, [(0, 2, 0, 2)] * 2)), ("slices[0]", "slices[1]", "share pairs")),
    LibraryCase(MASK, "a reversed slice", _of(lambda: masks.from_slices(4, 4, [(3, 2, 0, 4)])), ("slices[0]", "q range [3, 2)")),
    LibraryCase(MASK, "a slice out of range", _of(lambda: masks.from_slices(4, 4, [(0, 4, 0, 5)])), ("slices[0]", "k range [0, 5)")),
    LibraryCase(MASK, "`cu_seqlens` that fall", _of(lambda: masks.from_cu_seqlens([0, 5, 3])), ("cu_seqlens[2]=3",)),
    LibraryCase(MASK, "`cu_seqlens` that do not start at 0", _of(lambda: masks.from_cu_seqlens([1, 4])), ("begins with 1",)),
    LibraryCase(MASK, "NaN in `cu_seqlens`", _of(lambda: masks.from_cu_seqlens([0, NAN, 3])), ("dtype float64", "integer")),
    LibraryCase(MASK, "the union of a mask and a number", _of(lambda: masks.causal(4) | 5), ("int", "AttentionMask"), TypeError),
    LibraryCase(PLAN, "figures of a pass that there is not", _of(lambda: make_plan(masks.causal(8), 2).stats("fwd")), ("'fwd'", "'forward' or 'backward'")),
    LibraryCase(PLAN, "no token at all", _of(lambda: make_plan(masks.causal(0), 2)), ("(0, 0)", "at least one token")),
    LibraryCase(PLAN, "masks of one family that are not square", _of(lambda: make_plans({"a": (masks.full(4, 5), 1)}, 2)), ("(4, 5)", "square", "queries=plan")),
    LibraryCase(PLAN, "cross attention by a scheme for self attention", _of(lambda: make_plan(masks.full(8, 4), 2, mcp.CPConfig(planner="ring"))), ("'ring'", "'auto'")),
    LibraryCase(PLAN, "queries of a plan of other tokens", _of(lambda: make_plan(masks.full(8, 4), 2, queries=make_plan(masks.causal(12), 2))), ("12 tokens", "the mask has 8")),
    LibraryCase(ATTN, "cross attention that does not say which side", _of(lambda: mcp.dispatch(torch.zeros(8, 2), make_plan(masks.full(8, 4), 1), None)), ("side='q'", "side='k'")),
    LibraryCase(PLAN, "`cp_size=0`", _of(lambda: make_plan(masks.causal(8), 0)), ("cp_size=0", "positive integer")),
    LibraryCase(PLAN, "chunks that pad more than there is", _of(lambda: make_plan(masks.causal(3000), 8, mcp.CPConfig(chunk_size=1000))), ("chunk_size=1000", "chunk_size=750")),
    LibraryCase(PLAN, "head splitting over more ranks than heads", _of(lambda: make_plan(masks.causal(64), 8, mcp.CPConfig(planner="ulysses", num_heads=4))), ("head degree 8", "[1, 2, 4]")),
    LibraryCase(PLAN, "an unknown planner", _of(lambda: make_plan(masks.causal(8), 2, mcp.CPConfig(planner="zig-zag"))), ("'zig-zag'", "nearest: zigzag")),
    LibraryCase(PLAN, "a rank that computes nothing", _of(lambda: mcp.CPConfig(rank_speeds=(1, 0))), ("rank_speeds[1]=0", "from 0.01 to 100")),
    LibraryCase(PLAN, "speeds of more ranks than there are", _of(lambda: make_plan(masks.causal(8), 2, mcp.CPConfig(rank_speeds=(1, 1, 0.5)))), ("3 for cp_size=2", "give 2 numbers")),
    LibraryCase(ATTN, "a mask of another size", _attend(mask=masks.causal(9)), ("9 x 9", "8 x 8")),
    LibraryCase(ATTN, "heads that do not divide", _attend(k=torch.zeros(8, 3, 16), v=torch.zeros(8, 3, 16)), ("num_heads=4", "num_kv_heads=3")),
    LibraryCase(ATTN, "queries and keys of another head size", _attend(k=torch.zeros(8, 4, 8)), ("q=16", "k=8")),
    LibraryCase(ATTN, "mixed dtypes", _attend(k=torch.zeros(8, 4, 16, dtype=torch.bfloat16)), ("float32", "bfloat16")),
    LibraryCase(ATTN, "fp8", _attend(**{n: torch.zeros(8, 4, 16).to(torch.float8_e4m3fn) for n in "qkv"}), ("float8_e4m3fn", "bfloat16")),
    LibraryCase(ATTN, "an unknown backend", _attend(backend="magic"), ("'magic'", "cpu")),
    LibraryCase(ATTN, "the GPU kernels on a CPU tensor", _attend(backend="hopper"), ("'hopper'", "cpu"), NotImplementedError),
    LibraryCase(ATTN, "`softmax_scale=nan`", _attend(softmax_scale=NAN), ("nan", "finite")),
    LibraryCase(ATTN, "a learned `softmax_scale`", _attend(softmax_scale=torch.nn.Parameter(torch.ones(()))), ("softmax_scale is Parameter", "multiply q"), TypeError),
    LibraryCase(ATTN, "`softmax_scale` as text", _attend(softmax_scale="0.125"), ("'0.125' is str", "number"), TypeError),
    LibraryCase(ATTN, "`softcap=None`", _attend(softcap=None), ("softcap=None", "number"), TypeError),
    LibraryCase(ATTN, "a sparse tensor", _attend(q=torch.zeros(8, 4, 16).to_sparse()), ("torch.sparse_coo", "q.to_dense()"), TypeError),
    LibraryCase(ATTN, "padding as text", _of(lambda: mcp.dispatch(torch.zeros(8), make_plan(masks.causal(8), 1), None, padding_value="-100")), ("'-100' is str", "number"), TypeError),
    LibraryCase(ATTN, "a number that is to make keys and values", _of(lambda: mcp.cp_attention(torch.zeros(8, 2, 8), torch.zeros(8, 4), None, make_plan(masks.causal(8), 1), None, expand=3)), ("expand=3 is int", "function"), TypeError),
    LibraryCase(ATTN, "a list for a tensor", _attend(q=[0.0]), ("q is list", "torch.Tensor"), TypeError),
    LibraryCase(ATTN, "no mask", _attend(mask=None), ("mask=None is a NoneType", "AttentionMask"), TypeError),
    LibraryCase(ATTN, "no plan", _of(lambda: mcp.dispatch(torch.zeros(8), None, None)), ("plan is NoneType", "make_plan"), TypeError),
    LibraryCase(ATTN, "no process group", _of(lambda: mcp.dispatch(torch.zeros(8), make_plan(masks.causal(8), 1), "cp")), ("group is str", "process group"), TypeError),
    LibraryCase(ATTN, "padding that the labels' dtype cannot hold", _of(lambda: mcp.dispatch(torch.zeros(8, dtype=torch.uint8), make_plan(masks.causal(8), 1), None, padding_value=-100)), ("padding_value=-100", "torch.uint8", "[0, 255]")),
    LibraryCase(ATTN, "a dimension that is not there", _of(lambda: mcp.dispatch(torch.zeros(8), make_plan(masks.causal(8), 1), None, dim=1)), ("dim=1", "x, which has 1")),
    LibraryCase(ATTN, "positions of a rank that the plan has not", _of(lambda: mcp.position_ids(make_plan(masks.causal(8), 2), -1)), ("rank=-1", "[0, 2)")),
    LibraryCase(ATTN, "a shift by half a token", _of(lambda: mcp.roll(torch.zeros(8), make_plan(masks.causal(8), 1), None, shifts=0.5)), ("shifts=0.5", "integer"), TypeError),
    LibraryCase(ATTN, "one sink too many", _attend(sink=torch.zeros(5)), ("(5,)", "(4,)")),
    LibraryCase(ATTN, "a group of another size than the plan's", _of(lambda: mcp.cp_attention(*[torch.zeros(4, 1, 8)] * 3, make_plan(masks.causal(8), 2), None)), ("group has 1 ranks", "cp_size=2")),
)  # fmt: skip

PROGRAM = (
    ProgramCase(SIZES, "--context-parallel-size 0", ("--context-parallel-size 0", "positive")),
    ProgramCase(SIZES, "--context-parallel-size -1", ("--context-parallel-size -1", "positive")),
    ProgramCase(SIZES, "--context-parallel-size 2", ("world size 3", "1 x 2 x 1 = 2"), 3),
    ProgramCase(SIZES, "--tensor-model-parallel-size 2 --context-parallel-size 2", ("world size 2", "= 4")),
    ProgramCase(SIZES, "--tensor-model-parallel-size 3", ("--num-attention-heads 4", "3"), 3),
    ProgramCase(SIZES, "--num-query-groups 3", ("--num-query-groups 3", "4")),
    ProgramCase(SIZES, "--num-layers 3 --pipeline-model-parallel-size 2", ("--num-layers 3", "2")),
    ProgramCase(SIZES, "--seq-length 1 --context-parallel-size 2", ("--seq-length 1", "[2, 2147483648]")),
    ProgramCase(SIZES, "--seq-length 999999999999", ("--seq-length 999999999999", "[2, 2147483648]")),
    ProgramCase(SIZES, "--max-position-embeddings 16", ("16", "at least", "128")),
    ProgramCase(SIZES, "--global-batch-size 3", ("--global-batch-size 3", "multiple", "2")),
    ProgramCase(SIZES, "--hidden-size 66", ("--hidden-size 66", "--num-attention-heads 4")),
    ProgramCase(SIZES, "--kv-channels 15", ("15", "even")),
    ProgramCase(SIZES, "--kv-channels 0", ("--kv-channels 0", "positive")),
    ProgramCase(SIZES, "--ffn-hidden-size 0", ("--ffn-hidden-size 0", "positive")),
    ProgramCase(SIZES, "--cp-chunk-size 0", ("chunk_size=0", "positive")),
    ProgramCase(SIZES, "--cp-chunk-size 1000 --context-parallel-size 2", ("chunk_size=1000", "128")),
    ProgramCase(SIZES, "--cp-planner ulysses --context-parallel-size 3", ("head degree 3", "[1, 2, 4]"), 3),
    ProgramCase(DATA, "--context-parallel-size 2", ("nowhere", "does not exist"), data="nowhere"),
    ProgramCase(DATA, "--context-parallel-size 2", ("beyond the .bin",), data="short"),
    ProgramCase(DATA, "--context-parallel-size 2", ("no token",), data="empty"),
    ProgramCase(DATA, "--packing megatron", ("empty has no token",), data="empty"),
    ProgramCase(DATA, "--reset-attention-mask --context-parallel-size 3", ("would be learned: its 300 documents",), 3, data="single-tokens"),
    ProgramCase(DATA, "--context-parallel-size 2", ("token id 600", "[0, 512)"), data="large-ids"),
    ProgramCase(DATA, "--tokenizer-type ByteLevel", ("HuggingFaceTokenizer, the run's is ByteLevel", "end of document 0"), data="of-another-tokenizer"),
    ProgramCase(DATA, "--context-parallel-size 2", ("0 sources", "--data-path"), data=""),
    ProgramCase(DATA, "--mock-data", ("2 sources", "--data-path")),
    ProgramCase(DATA, "--data-path 0.5 good b", ("word 3, 'b'", "a weight before every prefix"), data=""),
    ProgramCase(DATA, "--data-path -1 good 2 other", ("weight -1.0 of 'good'", "at least 0"), data=""),
    ProgramCase(DATA, "--mock-data --packing megatron", ("--packing megatron", "--data-path"), data=""),
    ProgramCase(DATA, "--sft", ("--sft", "--tokenizer-type")),
    ProgramCase(DATA, "--fim-data", ("--fim-data", "--tokenizer-type None", "tokenizer of the documents")),
    ProgramCase(DATA, "--fim-data --tokenizer-type ByteLevel", ("'<fim_prefix>'", "vocabulary of ByteLevel", "name others")),
    ProgramCase(DATA, "--fim-data --tokenizer-type ByteLevel --fim-rate 1.5", ("--fim-rate 1.5", "[0, 1]")),
    ProgramCase(DATA, "--fim-data --tokenizer-type ByteLevel --fim-split-sample <file>", ("--fim-split-sample <file>", "--fim-fragment-rate")),
    ProgramCase(DATA, "--fim-data --tokenizer-type ByteLevel --packing megatron", ("--packing megatron", "--packing split")),
    ProgramCase(DATA, "--data-path https://user:hunter2@host/corpus?sig=abc", ("--data-path names '<removed>', a URL", "this machine"), data=""),
    ProgramCase(DATA, "--load s3://user:hunter2@bucket/run", ("--load <removed> is a URL", "give a path")),
    ProgramCase(DATA, "--split 0,0,0", ("0,0,0", "non-negative")),
    ProgramCase(DATA, "--seq-length 2147483648", ("--seq-length 2147483648", "2380 tokens 902304 times", "40 documents", "--seq-length 2380000 at most")),
    ProgramCase(DATA, "--seq-length 90000 --split 39,1,0 --eval-iters 1", ("79 tokens 1139 times", "from document 39", "--seq-length 79000 at most")),
    ProgramCase(DATA, "--seq-length 3000000 --packing megatron", ("2380 tokens 1260 times", "in the train split", "--seq-length 2380000 at most")),
    ProgramCase(DATA, "--eod-mask-loss", ("--eod-mask-loss", "--tokenizer-type")),
    ProgramCase(DATA, "--tokenizer-type GPT2BPETokenizer", ("GPT2BPETokenizer", "--merge-file")),
    ProgramCase(DATA, "--tokenizer-type BertWordPieceCase", ("BertWordPieceCase", "HuggingFaceTokenizer")),
    ProgramCase(DATA, "--full-validation --multiple-validation-sets", ("corpora of validation alone", "--valid-data-path")),
    ProgramCase(DATA, "--load nowhere --exit-on-missing-checkpoint", ("nowhere", "no checkpoint")),
    ProgramCase(DATA, "--load nowhere --finetune", ("nowhere", "whose weights --finetune begins")),
    ProgramCase(OTHER, "--attention-dropout 1.0", ("--attention-dropout 1.0", "[0, 1)")),
    ProgramCase(OTHER, "--hidden-dropout 1.5", ("--hidden-dropout 1.5", "[0, 1)")),
    ProgramCase(OTHER, "--use-mup", ("--use-mup", "not served")),
    ProgramCase(OTHER, "--fp8-format hybrid", ("fp8='hybrid'", "bf16")),
    ProgramCase(OTHER, "--window-size 4,4", ("(4, 4)", "4,0")),
    ProgramCase(OTHER, "--window-size 4,0 --window-attn-skip-freq 0", ("--window-attn-skip-freq 0",)),
    ProgramCase(OTHER, "--window-size 4,0 --window-attn-skip-freq [1]", ("--window-attn-skip-freq", "2")),
    ProgramCase(OTHER, "--lr nan", ("--lr nan", "finite")),
    ProgramCase(OTHER, "--clip-grad nan", ("--clip-grad nan", "0 is no clipping")),
    ProgramCase(OTHER, "--adam-eps 0", ("--adam-eps 0", "positive")),
    ProgramCase(OTHER, "--rotary-percent 1.5", ("--rotary-percent 1.5", "(0, 1]")),
    ProgramCase(OTHER, "--norm-epsilon 0", ("--norm-epsilon 0", "positive")),
    ProgramCase(OTHER, "--recompute-granularity selective --recompute-modules all", ("all", "core_attn")),
    ProgramCase(OTHER, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3", ("--recompute-num-layers 3", "[1, 2]")),
    ProgramCase(OTHER, "--cp-planner zig-zag", ("'zig-zag'", "nearest: zigzag")),
    ProgramCase(OTHER, "--cp-topology H100", ("'H100'", "nearest: h100")),
    ProgramCase(OTHER, "--cp-rank-speeds 1,half", ("'1,half'", "numbers with commas")),
    ProgramCase(OTHER, "--cp-rank-speeds 1,1,0.5 --context-parallel-size 2", ("3 for cp_size=2", "give 2 numbers")),
    ProgramCase(OTHER, "--cp-backend hopper", ("'hopper'", "cpu")),
    ProgramCase(OTHER, "--spec os system", ("os system", "--allow-custom-spec")),
    ProgramCase(OTHER, "--contxt-parallel-size 2", ("--contxt-parallel-size", "--context-parallel-size")),
    ProgramCase(OTHER, "--save /proc/none", ("--save /proc/none", "folder")),
    ProgramCase(OTHER, "--save /dev/null", ("--save /dev/null", "folder")),
    ProgramCase(OTHER, "--save /proc --run-dir /dev/null/run", ("--save /proc", "folder")),
    ProgramCase(OTHER, "--wandb-run-id ../../x", ("'../../x'", "letters, digits")),
    ProgramCase(OTHER, "--rerun-mode twice", ("'twice'", "validate_results")),
    ProgramCase(OTHER, "--bad-steps-in-a-row 0", ("--bad-steps-in-a-row 0", "positive")),
    ProgramCase(OTHER, "--on-bad-step skip --no-check-for-nan-in-loss-and-grad", ("--on-bad-step skip", "drop one")),
    ProgramCase(OTHER, "--distributed-timeout-minutes 0", ("--distributed-timeout-minutes 0", "positive")),
    ProgramCase(SIZES, "--cp-planner zigzag --cp-max-received-mb 1 --context-parallel-size 2 --seq-length 16384", ("max_received_mb=1", "holds")),
    ProgramCase(DATA, "--mock-data --verify-token-files", ("--verify-token-files", "--mock-data"), data=""),
    ProgramCase(OTHER, "--ckpt-format zarr", ("'zarr'", "torch_dist")),
    ProgramCase(OTHER, "--dist-ckpt-strictness none", ("none", "raise_all")),
    ProgramCase(MODELS, "--tensor-model-parallel-size 2 --num-experts 4", ("--num-experts 4", "--sequence-parallel")),
    ProgramCase(MODELS, "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 4 --moe-expert-capacity-factor 1", ("moe_expert_capacity_factor=1.0", "tensor_model_parallel_size=1")),
    ProgramCase(MODELS, "--num-experts 4 --moe-router-num-groups 4 --moe-router-group-topk 1", ("--moe-router-topk 2", "1 x 1 experts")),
    ProgramCase(MODELS, "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --mtp-num-layers 1 --position-embedding-type learned_absolute", ("learned_absolute", "two tables")),
    ProgramCase(MODELS, "--mtp-num-layers 1 --recompute-granularity full --recompute-method uniform", ("uniform", "--recompute-method block")),
    ProgramCase(MODELS, "--mtp-num-layers 1 --no-rope-freq 2", ("--no-rope-freq 2", "--mtp-num-layers 1")),
    ProgramCase(MODELS, "--tensor-model-parallel-size 2 --qk-clip", ("--qk-clip", "--tensor-model-parallel-size 1")),
    ProgramCase(MODELS, "--position-embedding-type yarn --rotary-percent 0.5", ("--rotary-percent 0.5", "yarn")),
    ProgramCase(LOAD, "--pretrained-checkpoint nowhere", ("nowhere holds no checkpoint", "tracker")),
    ProgramCase(LOAD, "--pretrained-checkpoint nowhere --load two-formats --finetune", ("at each start", "leave out --finetune")),
    ProgramCase(LOAD, "--use-checkpoint-args", ("--load <folder>", "--pretrained-checkpoint")),
    ProgramCase(LOAD, "--load two-formats --use-checkpoint-args", ("metadata.json", "mp_rank_00", "two formats")),
    ProgramCase(LOAD, "--load two-formats", ("metadata.json", "mp_rank_00", "two formats")),
    ProgramCase(LOAD, "--load unfinished", ("iter_0000005", "not a complete checkpoint")),
    ProgramCase(LOAD, "--load unfinished --ckpt-step 7", ("iter_0000007", "does not exist")),
    ProgramCase(LOAD, "--load of-fsdp", ("fsdp_dtensor", "torch_dist and torch")),
    ProgramCase(LOAD, "--load zarr", ("'zarr'", "torch_dist and torch")),
    ProgramCase(LOAD, "--load two-tensor-ranks", ("--tensor-model-parallel-size 2", "has 1 and 1", "torch_dist")),
    ProgramCase(LOAD, "--load two-stages", ("--pipeline-model-parallel-size 2", "has 1 and 1", "torch_dist")),
    ProgramCase(LOAD, "--load half --pipeline-model-parallel-size 2", ("no mp_rank_00_000/model_optim_rng.pt", "not a complete")),
    ProgramCase(LOAD, "--load cut-manifest", ("megatron_cp.json is damaged", "--ckpt-step")),
)  # fmt: skip


def answer_of(case: LibraryCase, folder: Path) -> str:
    """What the library says to a case. Raises whatever is not the exception that the case promises."""
    try:
        case.call(folder)
    except case.kind as problem:
        assert type(problem) is case.kind, f"{type(problem).__name__} is not {case.kind.__name__}"
        return str(problem)
    raise AssertionError("nothing was refused")


def page(library: list[str], program: list[list[Outcome]], folder: Path) -> str:
    """docs/bad-input.md: each case with the answer that it got."""

    def row(what: str, answer: str) -> str:
        text = answer.replace(f"{folder}/", "").removeprefix("pretrain_gpt.py: error: ")
        return f"| {what} | {text.strip().replace('|', chr(92) + '|')} |"

    lines = [
        "# Bad input, and what is said to it",
        "",
        "Written by `python -m tests.faults.bad_inputs` from the answers themselves; `tests/faults/test_bad_input.py` runs",
        "every row. The answer is one line that names the value received and what is allowed. The library raises an exception.",
        "`pretrain_gpt.py` leaves with exit code 2 and the same line on every rank. Both happen before the first collective and",
        "before anything is written.",
        "",
    ]
    for group in dict.fromkeys(case.group for case in LIBRARY):
        lines += [f"## {group}", "", "| input | exception | message |", "|---|---|---|"]
        for case, answer in zip(LIBRARY, library, strict=True):
            if case.group == group:
                lines.append(row(f"{case.input} | {case.kind.__name__}", answer))
        lines.append("")
    for group in dict.fromkeys(case.group for case in PROGRAM):
        lines += [
            f"## pretrain_gpt.py: {group}",
            "",
            "| flags | ranks | message |",
            "|---|---|---|",
        ]
        for case, outcomes in zip(PROGRAM, program, strict=True):
            if case.group == group:
                data = "" if case.data == "good" else f" (data: {case.data or 'none'})"
                words = f"`{case.input}`{data} | {case.world_size}"
                lines.append(row(words, outcomes[0].stderr))
        lines.append("")
    return "\n".join(lines)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "bad-input.md"


def main() -> None:
    """Asks every case and writes the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpora(folder)
        library = []
        for number, case in enumerate(LIBRARY):
            own = folder / str(number)
            own.mkdir()
            library.append(answer_of(case, own).replace(f"{own}/", ""))
        PAGE.write_text(page(library, run_program([c.launch(folder) for c in PROGRAM]), folder))


if __name__ == "__main__":
    main()
