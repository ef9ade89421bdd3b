"""Puts planned documents under a stock Megatron-LM: hooks around its own batch functions.

Megatron-LM loads a micro-batch on the first tensor rank, sends it to the others, cuts it over the context
ranks and calls the model. The cut is where documents are lost: it is made by row, whatever the mask. So

    Megatron-LM calls                  the hook
    get_batch_on_this_tp_rank          finds the documents where the whole batch is, and tells the other ranks
    get_batch_on_this_cp_rank,         plans them, and cuts tokens, labels, loss mask and positions by the plan
    get_thd_batch_on_this_cp_rank
    is_first_or_last_pipeline_stage    lets the middle stages load the batch too: they attend as well
    GPTModel.__init__                  tells stages without layers what the layers of other stages plan with, and
                                       gives layers our attention where every GPT is to have it
    TransformerBlock.__init__          the same for a decoder that is built again
    GPTModel.forward                   gives the plan to the layers, in packed_seq_params
    MambaModel, HybridModel            the same for hybrid models, by the version's name
    forward_step_calc_loss             divides a loss by the tokens of the whole context group, not of one rank

A batch without documents is left to Megatron's own functions. Importing `megatron_cp.mcore.spec` installs
the hooks, also where a program has imported the functions by name. Nothing happens before a model with our
attention is built.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules  # noqa: F401  its loss function gets a hook
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from megatron_cp.mcore import layers, model_hooks
from megatron_cp.mcore.batch import ContextParallelParams
from megatron_cp.mcore.documents.cut import Lengths, cut_batch, forget_batch
from megatron_cp.mcore.documents.find import (
    DocumentRule,
    current_rule,
    find_documents,
    find_starts,
    lengths_of_starts,
)
from megatron_cp.mcore.versions import compat, hybrid_classes, program
from megatron_cp.mcore.versions.hook_points import HOOK_POINTS, TESTED, HookPoint, dotted, mismatch
from megatron_cp.mcore.versions.wrapping import Wrap, hook_around, is_hook, put_hook, without_hook

HYBRID_MODEL = hybrid_classes.hybrid_parts().model

_DOCUMENTS = "megatron_cp_documents"  # key of the lengths in a batch, between the two hooks
_NOT_FOUND = 255

_said: set[str] = set()


def install(**plan_wishes: Any) -> None:
    """Installs the hooks; a second call changes nothing. `plan_wishes` are fields of CPConfig."""
    layers.wish(**plan_wishes)
    check_hook_points()
    replacements = {
        "get_batch_on_this_tp_rank": _tell_documents,
        "get_batch_on_this_cp_rank": _cut_by_plan,
        "get_thd_batch_on_this_cp_rank": _cut_thd_by_plan,
        "is_first_or_last_pipeline_stage": _load_on_every_stage,
        "forward_step_calc_loss": model_hooks.normalise_over_context,
    }
    for name, wrap in replacements.items():
        _replace_everywhere(name, wrap)
    put_hook(GPTModel, "__init__", model_hooks.register_stage)
    put_hook(TransformerBlock, "__init__", model_hooks.exchange_in_block)
    put_hook(GPTModel, "forward", model_hooks.give_plan_to_layers)
    put_hook(HYBRID_MODEL, "__init__", model_hooks.register_hybrid_stage)
    put_hook(HYBRID_MODEL, "forward", model_hooks.give_plan_to_layers)


def check_hook_points() -> None:
    """Returns if every function that gets a hook is there, with the parameters that its hook relies on.

    Raises ImportError, naming the version and the function, where hooks would not be called as they expect.
    """
    for point in HOOK_POINTS:
        function = _function(point)
        if function is None:
            continue
        lack = mismatch(point, list(inspect.signature(function).parameters))
        if lack is not None:
            raise ImportError(
                f"megatron-core {dotted(compat.megatron_version())} has another {point.name}: {lack}; megatron_cp "
                f"cannot plan its batches; install one of {dotted(*TESTED)}, or look at a checkout with `python -m "
                "megatron_cp doctor --megatron CHECKOUT`"
            )


def _function(point: HookPoint) -> Any:
    """Returns the function as Megatron wrote it, if a module that defines it is loaded.

    Raises ImportError where a loaded module of Megatron-Core should define it and does not.
    """
    owner, _, method = point.name.rpartition(".")
    if owner:
        owners = {kind.__name__: kind for kind in (GPTModel, TransformerBlock, HYBRID_MODEL)}
        return without_hook(getattr(owners[owner], method)) if owner in owners else None
    names = sorted({file.removesuffix(".py").replace("/", ".") for file in point.files})
    loaded = [sys.modules[name] for name in names if name in sys.modules]
    found = [getattr(module, point.name) for module in loaded if hasattr(module, point.name)]
    if found:
        return without_hook(found[0])
    if point.is_needed and len(loaded) == len(names):
        raise ImportError(
            f"megatron-core {dotted(compat.megatron_version())} has no {point.name} in {' or '.join(names)}; "
            f"megatron_cp cannot plan its batches; install one of {dotted(*TESTED)}"
        )
    return None


def _replace_everywhere(name: str, wrap: Wrap) -> None:
    """Puts the hook wherever a loaded module has the function under its name: programs import by name."""
    hook_of: dict[Any, Any] = {}
    for module in list(sys.modules.values()):
        plain = getattr(module, "__dict__", {}).get(name)
        if not inspect.isfunction(plain) or not _is_megatrons(plain) or is_hook(plain):
            continue
        if plain not in hook_of:
            hook_of[plain] = hook_around(plain, wrap)
        setattr(module, name, hook_of[plain])


def _is_megatrons(function: Any) -> bool:
    return str(function.__module__).startswith("megatron.")


# --- which documents: where the whole batch is


def _tell_documents(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `get_batch_on_this_tp_rank(data_iterator | batch, ...) -> batch`."""

    def get_batch_on_this_tp_rank(source: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rule = current_rule()
        if not layers.are_ours() or rule.source not in ("positions", "mask", "eod"):
            return plain(source, *args, **kwargs)
        if source is None or isinstance(source, dict):
            whole = dict(source or {})
            batch = plain(source, *args, **kwargs)
        else:
            seen = _LastItem(source)
            batch = plain(seen, *args, **kwargs)
            whole = seen.last
        batch[_DOCUMENTS] = _lengths_on_tensor_ranks(whole, rule)
        return batch

    return get_batch_on_this_tp_rank


class _LastItem:
    """An iterator that remembers what it gave last."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.last: dict[str, Any] = {}

    def __iter__(self) -> _LastItem:
        return self

    def __next__(self) -> Any:
        self.last = next(self.source)
        return self.last

    def __getattr__(self, name: str) -> Any:  # Megatron's iterators have methods of their own
        return getattr(self.source, name)


def _lengths_on_tensor_ranks(whole: dict[str, Any], rule: DocumentRule) -> Lengths:
    """Returns the documents' lengths on every tensor rank; only the first one has the batch.

    Collective over the tensor group: a byte for each token goes out from its first rank.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    args = program.arguments()
    assert args is not None
    shape, device = (args.micro_batch_size, args.seq_length), torch.cuda.current_device()
    starts = torch.full(shape, _NOT_FOUND, dtype=torch.uint8, device=device)
    problem: Exception | None = None
    if group.rank() == 0:
        try:
            starts = find_starts(whole, rule).to(device=device, dtype=torch.uint8).contiguous()
        except (ValueError, NotImplementedError) as error:
            problem = error  # for later: the other ranks wait for the broadcast
    if group.size() > 1:
        dist.broadcast(starts, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
    if int(starts[0, 0]) == _NOT_FOUND:
        raise problem or ValueError(
            f"{rule.asked_by} asks for documents, and the first tensor rank found none in the batch that it "
            "loaded; its own message says why"
        )
    return lengths_of_starts(starts)


def _load_on_every_stage(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `is_first_or_last_pipeline_stage(vp_stage) -> bool`, which says who loads batches."""

    def is_first_or_last_pipeline_stage(*args: Any, **kwargs: Any) -> Any:
        rule = current_rule()
        # Where middle stages get cu_seqlens by themselves, GPTModel.forward takes them from there.
        is_newer = not hasattr(utils, "get_thd_batch_on_this_cp_rank")
        is_told = rule.source == "cu_seqlens" and is_newer
        if layers.are_ours() and rule.asks_for_documents and not is_told:
            return True
        return plain(*args, **kwargs)

    return is_first_or_last_pipeline_stage


# --- who gets which rows


def _cut_by_plan(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `get_batch_on_this_cp_rank(batch, ..., cp_group=None) -> batch`."""
    signature = inspect.signature(plain)

    def get_batch_on_this_cp_rank(batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not layers.are_ours():
            return plain(batch, *args, **kwargs)
        if not _holds_rows(batch):
            return batch  # a middle stage has cu_seqlens alone: GPTModel.forward takes them
        given = signature.bind(batch, *args, **kwargs).arguments
        lengths = batch.pop(_DOCUMENTS, None)
        # Before cu_seqlens are read: programs that cut by them fill them up in ways of their own.
        if layers.cuts_each_document() and _cuts_each_document(signature, batch, given):
            _say_once("documents: from cu_seqlens; each is cut zigzag, as the layers were told")
            forget_batch()
            return plain(batch, *args, **kwargs)
        rule = current_rule()
        lengths = lengths or find_documents(batch, rule)
        if lengths is None:
            _say_once(_of_program(batch))
            forget_batch()
            return plain(batch, *args, **kwargs)
        group = given.get("cp_group")
        params = cut_batch(batch, lengths, group or parallel_state.get_context_parallel_group())
        _say_found(rule, lengths, params)
        return batch

    return get_batch_on_this_cp_rank


def _of_program(batch: dict[str, Any]) -> str:
    """Returns, in words, what becomes of a batch that the hooks leave to its program."""
    if any(key.startswith("cu_seqlens") and batch[key] is not None for key in batch):
        return "documents: from cu_seqlens, as the program gives them to the model"
    return "documents: none are asked for; rows stay where Megatron puts them (zigzag)"


def _holds_rows(batch: dict[str, Any]) -> bool:
    """Returns whether a batch has values for tokens: a model for images may have embeddings alone."""
    return any(
        isinstance(value, Tensor) and value.dim() > 1
        for key, value in batch.items()
        if key != "attention_mask" and not key.startswith("cu_seqlens")
    )


def _cuts_each_document(
    signature: inspect.Signature, batch: dict[str, Any], given: dict[str, Any]
) -> bool:
    """Returns whether Megatron's own cut of this batch is zigzag in each document: since 0.18, for a batch of thd."""
    if "is_hybrid_cp" not in signature.parameters or batch.get("cu_seqlens") is None:
        return False
    return not (given.get("is_hybrid_cp") or given.get("use_per_sequence_balancing"))


def _cut_thd_by_plan(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `get_thd_batch_on_this_cp_rank(batch, cu_seqlens, ...) -> (batch, packed_seq_params)`."""

    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not layers.are_ours():
            return plain(batch, cu_seqlens, cu_seqlens_padded, *args, **kwargs)
        rule = DocumentRule("cu_seqlens", current_rule().asked_by)
        whole = {**batch, "cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}
        lengths = find_documents(whole, rule)
        assert lengths is not None
        params = cut_batch(batch, lengths, parallel_state.get_context_parallel_group())
        _say_found(rule, lengths, params)
        return batch, params

    return get_thd_batch_on_this_cp_rank


def _say_found(rule: DocumentRule, lengths: Lengths, params: ContextParallelParams) -> None:
    _say_once(f"{rule.describe(lengths)}; planner {params.plans['full'].planner}")


def _say_once(text: str) -> None:
    """Prints a line on the first rank, once."""
    if not _said and (not dist.is_initialized() or dist.get_rank() == 0):
        print(f"megatron_cp: {text}", flush=True)  # noqa: T201  Megatron-LM logs to standard output
    _said.add(text)
