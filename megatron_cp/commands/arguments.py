"""Arguments that plan, simulate and emulate share: one name, one default and one meaning for each.

Numbers first, each with the largest that is accepted; then groups of arguments, and what they mean.
"""

from __future__ import annotations

import difflib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_cp.config import MAX_RANKS, CPConfig
from megatron_cp.plan import PLANNERS
from megatron_cp.plan.hardware.speeds import check_rank_speeds, read_rank_speeds
from megatron_cp.plan.hardware.topology import TOPOLOGIES, read_topology
from megatron_cp.plan.study.workloads import BUILDER_MASKS, MASKS, MAX_TOKENS, WORKLOADS
from megatron_cp.report.sources import (
    Source,
    source_of_corpus,
    source_of_lengths,
    source_of_path,
    source_of_workload,
)

NO_NUMBER = -1
SPLIT = "969,30,1"  # Megatron-LM's default
SEED = 1234  # Megatron-LM's default, and that of the loader
MASK = "documents"
HEADS = 64
TOPOLOGY = "h100"
WORKLOAD = "W1"
TOKENS_PER_RANK = 8 << 10


def count(text: str, most: int = MAX_TOKENS) -> int:
    """Returns a whole number from 1 to `most`; ArgumentTypeError for any other text."""
    number = _number(text)
    if not 1 <= number <= most:
        raise ArgumentTypeError(
            f"{_shown(text)} must be a whole number of at least 1 and at most {most}"
        )
    return number


rank_count = partial(count, most=MAX_RANKS)


def tokens(text: str) -> int:
    """Returns a number of tokens: 131072, 128K or 16M."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    number = _number(text if factor == 1 else text[:-1]) * factor
    if not 1 <= number <= MAX_TOKENS:
        raise ArgumentTypeError(
            f"{_shown(text)} must be a whole number of at least 1 and at most {MAX_TOKENS} tokens, "
            "written as 131072, 128K or 1M"
        )
    return number


def ranks(text: str) -> list[int]:
    """Returns numbers of ranks: 8 or 8,64,512."""
    return [rank_count(word) for word in text.split(",")]


def lengths(text: str) -> list[int]:
    """Returns document lengths, 137,2041,89, of at most MAX_TOKENS tokens in all."""
    found = _numbers(text, "137,2041,89")
    if sum(found) > MAX_TOKENS:
        raise ArgumentTypeError(
            f"{_shown(text)} must be at most {MAX_TOKENS} tokens in all; give fewer documents"
        )
    return found


def lengths_or_path(text: str) -> list[int] | Path:
    """Returns document lengths written out, or the path of what holds them."""
    is_list = all(character.isdigit() or character in ", -" for character in text)
    return lengths(text) if is_list else Path(text)


def seed(text: str) -> int:
    """Returns a seed, a whole number of at least 0."""
    number = _number(text)
    if not 0 <= number < 1 << 63:
        raise ArgumentTypeError(f"{_shown(text)} must be a whole number of at least 0; give 1234")
    return number


def words_of(text: str) -> list[str]:
    """Returns names separated by commas, at least one."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    if not names:
        raise ArgumentTypeError(f"{_shown(text)} must hold a name; separate several by commas")
    return names


def window(text: str) -> tuple[int, int]:
    """Returns the two sides of a sliding window, 1024,0."""
    sides = _numbers(text, "1024,0")
    if len(sides) != 2:
        raise ArgumentTypeError(f"{_shown(text)} must be two counts, before,after, as in 1024,0")
    return sides[0], sides[1]


def refuse_unused(args: Namespace, *names: str, source: str = "--data-path") -> None:
    """Raises ValueError for a flag that was given and says nothing without `source`, another flag."""
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(args, name)} is for {source}, which is not given; leave it out"
            )


def _numbers(text: str, example: str) -> list[int]:
    numbers = [_number(word.strip()) for word in text.split(",")]
    if not all(0 <= number <= MAX_TOKENS for number in numbers):
        raise ArgumentTypeError(
            f"{_shown(text)} must be whole numbers from 0 to {MAX_TOKENS} separated by commas, "
            f"as in {example}"
        )
    return numbers


def _number(text: str) -> int:
    """Returns what the digits say; NO_NUMBER for other texts, and for more digits than `int` reads."""
    if not text.isascii() or not text.isdigit():
        return NO_NUMBER
    return int(text) if len(text) < 100 else NO_NUMBER


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


# ---------------------------------------------------------------------- what plan, simulate and emulate share


def add_documents(parser: ArgumentParser) -> None:
    """Adds where document lengths come from, how long a pack is and what mask lies over it."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--data-path", metavar="PREFIX", help="token files PREFIX.bin and PREFIX.idx"
    )
    source.add_argument(
        "--lengths", type=lengths_or_path, metavar="N,N,...|PATH",
        help="document lengths: 137,2041,89, or a file (JSON list, a number per line, .npy), or a folder of texts",
    )  # fmt: skip
    source.add_argument(
        "--workload",
        metavar="NAME",
        help=f"document lengths as in {', '.join(WORKLOADS)}; default: {WORKLOAD}",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seq-length", type=tokens, metavar="N", help="tokens of a pack, as 131072, 128K or 1M"
    )
    length.add_argument(
        "--tokens-per-rank",
        type=tokens,
        metavar="N",
        help="the pack grows with the ranks; default: 8K",
    )
    parser.add_argument(
        "--split",
        metavar="N,N,N",
        help=f"parts of --data-path, the first of which is used; default: {SPLIT}",
    )
    add_mask(parser)
    parser.add_argument(
        "--seed",
        type=seed,
        default=SEED,
        metavar="N",
        help="seed of the order of --data-path, and of what is drawn",
    )


def add_mask(parser: ArgumentParser, more: Iterable[str] = ()) -> None:
    """Adds the mask by name, `more` names beside those of `MASKS`, and a window that narrows it."""
    others = [*(name for name in MASKS if name not in BUILDER_MASKS), *more]
    parser.add_argument(
        "--mask", default=MASK, metavar="NAME",
        help=f"a builder of megatron_cp.mask: {', '.join(BUILDER_MASKS)}; or by another name {', '.join(others)}",
    )  # fmt: skip
    parser.add_argument(
        "--window-size",
        type=window,
        metavar="N,N",
        help="narrows the mask to a window, keys before,after, as 1024,0",
    )


def add_heads(parser: ArgumentParser, num_heads: int = HEADS) -> None:
    """Adds the shape of attention."""
    parser.add_argument(
        "--num-attention-heads", type=count, default=num_heads, metavar="N",
        help=f"query heads; default: {num_heads} (CPConfig in Python: 1 query and 1 key head)",
    )  # fmt: skip
    parser.add_argument(
        "--num-query-groups", type=count, metavar="N",
        help="key and value heads; default: an eighth of the heads",
    )  # fmt: skip
    parser.add_argument(
        "--kv-channels", type=count, default=128, metavar="N", help="size of a head"
    )


def add_planning(parser: ArgumentParser) -> None:
    """Adds the planners to run and the machine to run them for."""
    parser.add_argument(
        "--tensor-model-parallel-size",
        type=count,
        default=1,
        metavar="N",
        help="tensor-parallel ranks, which share the heads",
    )
    parser.add_argument(
        "--cp-planner", type=words_of, metavar="NAME[,NAME...]",
        help=f"the planners to run, the first as ours: {', '.join(PLANNERS)}; default: all, auto first",
    )  # fmt: skip
    parser.add_argument(
        "--cp-chunk-size",
        type=count,
        metavar="N",
        help="tokens per unit of dispatch; default: the planner's",
    )
    parser.add_argument(
        "--cp-topology", default=TOPOLOGY, metavar="NAME",
        help=f"{', '.join(TOPOLOGIES)}, or a measured profile (FILE.json)",
    )  # fmt: skip
    parser.add_argument(
        "--cp-rank-speeds", metavar="N,N,...",
        help="how fast each rank computes, as 1,1,0.5,1; default: those of the profile, else all equal",
    )  # fmt: skip


def key_heads(args: Namespace) -> int:
    """Returns the key and value heads: those given, or the largest divisor of the heads up to an eighth.

    Tensor-parallel ranks share them, or each is on several ranks. Raises ValueError for a number of other kind.
    """
    heads, groups = args.num_attention_heads, args.num_query_groups
    tp = getattr(args, "tensor_model_parallel_size", 1)
    if groups is None:
        up_to_eighth = range(1, max(1, heads // 8) + 1)
        return max(n for n in up_to_eighth if heads % n == 0 and (n % tp == 0 or tp % n == 0))
    if heads % groups:
        raise ValueError(
            f"--num-query-groups {groups} must divide --num-attention-heads {heads}; give a divisor of the heads"
        )
    if groups % tp and tp % groups:
        raise ValueError(
            f"--num-query-groups {groups} must divide, or be a multiple of, --tensor-model-parallel-size {tp}; give a "
            "divisor or a multiple of it"
        )
    return int(groups)


def planners_of(args: Namespace) -> list[str]:
    """Returns the planners to run, ours first; ValueError names the nearest of an unknown one."""
    asked = args.cp_planner or [name for name in PLANNERS if name != "auto"]
    for name in asked:
        if name not in PLANNERS:
            near = difflib.get_close_matches(name, PLANNERS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"planner={name!r} is unknown; choose from {', '.join(sorted(PLANNERS))} (nearest: {near})"
            )
    return list(dict.fromkeys(asked)) if args.cp_planner else ["auto", *asked]


def config_of(args: Namespace) -> CPConfig:
    """Returns the settings of one tensor-parallel rank.

    Raises ValueError for heads that cannot be shared out, and for speeds that are not one per rank.
    """
    heads, groups, tp = args.num_attention_heads, key_heads(args), args.tensor_model_parallel_size
    if heads % tp:
        raise ValueError(
            f"--num-attention-heads {heads} must be a multiple of --tensor-model-parallel-size {tp}; "
            "give a divisor of the heads"
        )
    config = CPConfig(
        planner=planners_of(args)[0],
        chunk_size=args.cp_chunk_size,
        num_heads=heads // tp,
        num_kv_heads=max(1, groups // tp),
        head_dim=args.kv_channels,
        topology=read_topology(args.cp_topology),
        rank_speeds=read_rank_speeds(args.cp_rank_speeds),
    )
    sizes = args.context_parallel_size
    for cp_size in sizes if isinstance(sizes, list) else [sizes]:
        check_rank_speeds(config, cp_size)
    return config


def source_of(args: Namespace) -> Source:
    """Returns where document lengths come from; ValueError or OSError for what cannot be read."""
    if args.data_path is not None:
        return source_of_corpus(args.data_path, args.split or SPLIT, args.seed)
    refuse_unused(args, "split")
    if args.lengths is None:
        return source_of_workload(args.workload or WORKLOAD)
    if isinstance(args.lengths, Path):
        return source_of_path(args.lengths)
    return source_of_lengths(args.lengths)


def pack_tokens(args: Namespace, cp_size: int) -> int:
    """Returns the tokens of a pack on `cp_size` ranks; ValueError for more than anybody plans."""
    if args.seq_length is not None:
        return int(args.seq_length)
    if _is_one_pack(args):
        return sum(args.lengths)
    per_rank = TOKENS_PER_RANK if args.tokens_per_rank is None else args.tokens_per_rank
    if per_rank * cp_size > MAX_TOKENS:
        raise ValueError(
            f"--tokens-per-rank {per_rank} on {cp_size} ranks is a pack of {per_rank * cp_size} tokens; it must "
            f"be at most {MAX_TOKENS}: give at most {MAX_TOKENS // cp_size}"
        )
    return int(per_rank * cp_size)


def assumed(args: Namespace, words: Sequence[str]) -> dict[str, int | str]:
    """Returns every flag of weight that is not among the words of the command line, and its value."""
    given = {word.split("=", 1)[0] for word in words}
    cp_sizes = args.context_parallel_size
    values = {
        "--workload": WORKLOAD if _draws_by_default(args) else None,
        "--split": SPLIT if args.data_path else None,
        "--packing": "split" if args.data_path and hasattr(args, "packing") else None,
        "--mask": args.mask,
        "--tokens-per-rank": _size_assumed(args),
        "--packs": getattr(args, "packs", None) if _fills_packs(args) else None,
        "--context-parallel-size": ",".join(map(str, cp_sizes))
        if isinstance(cp_sizes, list)
        else cp_sizes,
        "--global-batch-size": getattr(args, "data_parallel_size", None),
        "--num-attention-heads": args.num_attention_heads,
        "--num-query-groups": key_heads(args),
        "--kv-channels": args.kv_channels,
        "--cp-topology": args.cp_topology,
    }
    return {
        name: value for name, value in values.items() if value is not None and name not in given
    }


def assumed_line(found: Mapping[str, int | str]) -> str:
    """Returns the line that says what was assumed."""
    said = ", ".join(f"{name} {value}" for name, value in found.items())
    return f"by default: {said}" if said else "every size was given"


def _has_documents(args: Namespace) -> bool:
    return args.mask not in MASKS or MASKS[args.mask].has_documents


def _draws_by_default(args: Namespace) -> bool:
    return not (args.data_path or args.lengths or args.workload) and _has_documents(args)


def _is_one_pack(args: Namespace) -> bool:
    """Returns whether the documents that were given are the pack."""
    is_sized = args.seq_length is not None or args.tokens_per_rank is not None
    return isinstance(args.lengths, list) and not is_sized


def _fills_packs(args: Namespace) -> bool:
    return _has_documents(args) and not _is_one_pack(args)


def _size_assumed(args: Namespace) -> int | None:
    is_given = args.seq_length or args.tokens_per_rank or isinstance(args.lengths, list)
    return None if is_given else TOKENS_PER_RANK
