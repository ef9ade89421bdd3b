"""Completes and checks what a run reads and writes: documents, tokenizer, checkpoints, records.

No file is opened. Each check yields its faults as `faults.py` describes.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator

import torch

from megatron_cp.data.blend_sources import parse_blend
from megatron_cp.data.chat import PROMPT_FORMATS
from megatron_cp.loggable_text import is_url
from megatron_cp.training.arguments.flags import flags_of
from megatron_cp.training.checkpoint.compare import STRICTNESS

# Folders and files; the corpora of --data-path are looked at where their words are read.
_PLACES = (
    "data_args_path", "per_split_data_args_path", "data_cache_path", "tokenizer_model", "vocab_file", "merge_file",
    "load", "pretrained_checkpoint", "save", "run_dir", "wandb_save_dir",
)  # fmt: skip

# Of them TikTokenizer reads the names of its first ids; Megatron-LM gives the others none either.
_WITHOUT_NEW_TOKENS = (None, "NullTokenizer", "SFTTokenizer", "TikTokenizer")


def check_places(args: Namespace) -> Iterator[str]:
    """Yields a line for each file or folder that is a URL; a folder of that name would be made."""
    for name in _PLACES:
        value = getattr(args, name, None)
        if value is not None and is_url(value):
            yield (
                f"--{name.replace('_', '-')} {value} is a URL; only files and folders of this machine are read and "
                "written: give a path"
            )


def complete_sources(args: Namespace) -> Iterator[str]:
    """One source of documents, and packing and masks that follow from its flags."""
    if args.packing is None:
        args.packing = "keep" if args.sft else "split"
    if args.dataloader_inter_document_masking or args.sft:
        args.reset_attention_mask = args.reset_position_ids = True
    own_words = (args.train_data_path, args.valid_data_path, args.test_data_path)
    sources = (
        args.data_path,
        args.data_args_path,
        any(own_words),
        args.per_split_data_args_path,
        args.mock_data,
    )
    num_sources = sum(map(bool, sources))
    if num_sources != 1:
        yield (
            f"{num_sources} sources of documents given; exactly one of --data-path, "
            "--data-args-path, --train-data-path (with --valid-data-path, --test-data-path), "
            "--per-split-data-args-path and --mock-data is needed"
        )
    elif args.split is not None and (any(own_words) or args.per_split_data_args_path):
        args.notes.append(
            f"--split {args.split} is not heeded: each split has documents of its own"
        )


def check_blends(args: Namespace) -> Iterator[str]:
    """Weights and prefixes of each source, and what Megatron's own samples can be made of."""
    for flag in ("", "train-", "valid-", "test-"):
        words = getattr(args, f"{flag.replace('-', '_')}data_path")
        try:
            if words:
                parse_blend(words, f"--{flag}data-path")
        except ValueError as fault:
            yield str(fault)
    if args.packing == "megatron" and args.mock_data:
        yield "--packing megatron needs token files; give --data-path, or --packing split"
    if args.packing != "megatron" and not args.sft and args.data_cache_path is not None:
        args.notes.append(
            "--data-cache-path changes nothing here: no index is built without --packing megatron"
        )


def check_order(args: Namespace) -> Iterator[str]:
    """The order of samples that Megatron-LM's loaders would draw."""
    kind = args.dataloader_type
    if kind == "external":
        yield (
            "--dataloader-type external is not served: it takes batches from a loader of the caller's; "
            "leave it out, and name documents by --data-path"
        )
    elif kind == "cyclic" and args.packing == "megatron":
        yield (
            "--dataloader-type cyclic with --packing megatron is not served: Megatron's samples are drawn in the order "
            "of type single; give --dataloader-type single, for another order"
        )
    elif kind is not None and args.packing != "megatron":
        args.notes.append(
            f"--dataloader-type {kind} changes nothing here: packs are drawn in an order of our own; --packing "
            "megatron draws them in that of type single"
        )


def check_chats(args: Namespace) -> Iterator[str]:
    """What fine-tuning on conversations needs."""
    if not args.sft:
        return
    if args.sft_tokenizer_prompt_format not in PROMPT_FORMATS:
        yield (
            f"--sft-tokenizer-prompt-format {args.sft_tokenizer_prompt_format} is not served; give "
            f"one of {', '.join(PROMPT_FORMATS)}"
        )
    if args.packing != "keep":
        yield f"--sft with --packing {args.packing} would cut conversations; give --packing keep"
    if args.mock_data:
        yield "--sft with --mock-data is not served; give --data-path and chat files"
    if args.tokenizer_type in (None, "NullTokenizer"):
        yield "--sft needs a tokenizer; give --tokenizer-type and --tokenizer-model"


def check_fill_in_the_middle(args: Namespace) -> Iterator[str]:
    """What rearranging documents needs."""
    if not args.fim_data:
        given = flags_of({name: value for name, value in vars(args).items() if "fim_" in name})
        args.notes += [f"{flag} changes nothing without --fim-data" for flag in given]
        return
    if args.tokenizer_type in (None, "NullTokenizer"):
        yield (
            f"--fim-data with --tokenizer-type {args.tokenizer_type} is not served: texts are cut "
            "and tokenized anew; give the tokenizer of the documents"
        )
    if args.mock_data:
        yield "--fim-data with --mock-data is not served: its tokens are no text; give --data-path"
    if args.sft:
        yield (
            "--fim-data with --sft is not served: answers would lose their place, and Megatron-LM "
            "ignores it there; leave out either"
        )
    if args.packing == "megatron":
        yield (
            "--fim-data with --packing megatron is not served: Megatron-LM's draws depend on its "
            "loader workers and are in no checkpoint, so no run can go on with its samples; give "
            "--packing split"
        )
    if args.fim_split_sample and args.fim_fragment_rate is None:
        yield (
            f"--fim-split-sample {args.fim_split_sample} needs --fim-fragment-rate, the share of "
            "fragments that are rearranged; give both"
        )
    if args.fim_fragment_rate is not None and not args.fim_split_sample:
        args.notes.append("--fim-fragment-rate changes nothing without --fim-split-sample")


def check_token_files(args: Namespace) -> Iterator[str]:
    """What --verify-token-files needs: files with manifests."""
    if args.verify_token_files and (args.mock_data or args.sft or args.packing == "megatron"):
        yield (
            "--verify-token-files looks at files of tools/preprocess_data.py, which --mock-data, --sft and --packing "
            "megatron do not read by their manifests; drop it"
        )


def complete_tokenizer(args: Namespace) -> Iterator[str]:
    """Files of GPT-2's tokenizer, which is Megatron-LM's default."""
    files = {"--vocab-file": args.vocab_file, "--merge-file": args.merge_file}
    given = [flag for flag, path in files.items() if path is not None]
    if given and args.tokenizer_type is None:
        args.tokenizer_type = "GPT2BPETokenizer"
    if args.tokenizer_type == "GPT2BPETokenizer":
        if len(given) < len(files):
            yield "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file; give both"
    elif given and args.tokenizer_type == "NullTokenizer":
        args.notes.append(f"{' and '.join(given)} change nothing here: NullTokenizer reads no file")
    elif given:
        yield (
            f"{' and '.join(given)} with --tokenizer-type {args.tokenizer_type} is not served; "
            "give --tokenizer-type GPT2BPETokenizer, which reads both, or neither file"
        )
    kind = args.tokenizer_type
    if args.tokenizer_special_tokens and kind not in _WITHOUT_NEW_TOKENS:
        yield (
            f"--tokenizer-special-tokens {' '.join(args.tokenizer_special_tokens)} with --tokenizer-type {kind} is not "
            "served: no token is added to a vocabulary here, and their text would be read in pieces; write them into "
            "the tokenizer's files, and leave the flag out"
        )
    if args.tokenizer_model and kind in ("GPT2BPETokenizer", "ByteLevel", "NullTokenizer"):
        args.notes.append(f"--tokenizer-model changes nothing here: {kind} does not read it")


def complete_records(args: Namespace) -> Iterator[str]:
    """Where checkpoints and the records of the run go."""
    if args.run_dir is None:
        args.run_dir = args.save
    if args.log_energy and not (args.machine.has_cuda and args.machine.has_nvml):
        args.log_energy = False
        args.notes.append(
            "--log-energy changes nothing here: it needs a GPU and the package pynvml"
        )
    if args.wandb_run_id is not None and not re.fullmatch(r"[\w-]{1,128}", args.wandb_run_id):
        yield (
            f"--wandb-run-id {args.wandb_run_id!r} must be of letters, digits, - and _, as it names a folder; "
            "give wandb's own id of the run"
        )


def check_checkpoints(args: Namespace) -> Iterator[str]:
    """What is saved and loaded, and what becomes of damage."""
    if args.save_interval is not None and args.save is None:
        args.notes.append("--save-interval changes nothing here: without --save nothing is saved")
    if args.async_save and args.ckpt_format != "torch_dist":
        yield (
            f"--async-save with --ckpt-format {args.ckpt_format} is not served; give --ckpt-format "
            "torch_dist, or leave --async-save out"
        )
    experts = args.expert_model_parallel_size
    if args.save is not None and args.ckpt_format == "torch" and experts > 1:
        yield (
            f"--ckpt-format torch with --expert-model-parallel-size {experts} is not served: it has one file for each "
            "tensor and pipeline rank, so experts of other ranks would be lost; give --ckpt-format torch_dist"
        )
    if args.dist_ckpt_strictness not in STRICTNESS:
        yield (
            f"--dist-ckpt-strictness {args.dist_ckpt_strictness} is unknown; choose one of "
            f"{', '.join(STRICTNESS)}"
        )
    if args.ckpt_step is not None and args.load is None:
        yield "--ckpt-step needs --load <folder>; give it too"
    if args.ckpt_step is not None and args.ckpt_fallback:
        yield (
            f"--ckpt-fallback with --ckpt-step {args.ckpt_step} is not served, as the step names one "
            "checkpoint; give one of the two"
        )
    if args.verify_integrity and not args.verify_checkpoint:
        yield "--verify-integrity with --no-verify-checkpoint is not served; give one of the two"
    if args.exit_on_missing_checkpoint and args.load is None and args.pretrained_checkpoint is None:
        yield "--exit-on-missing-checkpoint needs --load <folder>; give it too"


def check_pretrained(args: Namespace) -> Iterator[str]:
    """What would begin with pretrained weights again where a run is to go on."""
    folder = args.pretrained_checkpoint
    if folder is None:
        return
    flag = f"--pretrained-checkpoint {folder}"
    if args.finetune and args.load is not None:
        yield (
            f"--finetune with {flag} would begin at iteration 0 again at each start, with the weights of --load "
            f"{args.load}; leave out --finetune: the first start does as it says"
        )
    if args.ckpt_step is not None:
        yield (
            f"--ckpt-step {args.ckpt_step} with {flag} is not served: it would name a step of either folder; give "
            "--load and --finetune to begin with a step, or --load alone to go on from one"
        )
    for name in ("load", "save"):
        if (other := getattr(args, name)) is not None and _is_same_folder(other, folder):
            yield (
                f"--{name} {other} and {flag} are the same folder, and what a run begins with is not what it goes on "
                f"from; give another --{name}"
            )
    if args.load is None and args.save is not None:
        args.notes.append(
            f"every start begins with {flag}: give --load {args.save} too, to go on from what was saved"
        )


def _is_same_folder(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def check_text_samples(args: Namespace) -> Iterator[str]:
    """How many texts are written on, and where they go."""
    if args.log_text_samples < 0:
        yield (
            f"--log-text-samples {args.log_text_samples} must not be negative; give how many texts to "
            "write on, 0 for none"
        )
    if args.log_text_samples > 0 and args.run_dir is None:
        yield "--log-text-samples needs a folder for its texts; give --run-dir or --save"


def check_profile(args: Namespace) -> Iterator[str]:
    """Steps and ranks of a trace, and where it goes."""
    if args.record_memory_history and not torch.cuda.is_available():
        args.notes.append("--record-memory-history records a GPU's memory, and there is none here")
    if args.profile != args.use_pytorch_profiler:
        args.notes.append(
            "--profile writes a trace of torch.profiler; nsys is not driven"
            if args.profile
            else "--use-pytorch-profiler changes nothing without --profile"
        )
    if not args.profile:
        return
    if args.run_dir is None and args.tensorboard_dir is None:
        yield "--profile needs a folder for its traces; give --tensorboard-dir, --run-dir or --save"
    start, end = args.profile_step_start, args.profile_step_end
    if not 0 <= start < end:
        yield (
            f"--profile-step-start {start} must not be negative and lie before --profile-step-end {end}"
        )
    for rank in args.profile_ranks:
        if not 0 <= rank < args.world_size:
            yield f"--profile-ranks {rank} must lie in [0, {args.world_size}), the ranks of the job"
