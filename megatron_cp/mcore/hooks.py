"""Puts planned documents under a stock Megatron-LM: hooks around its own batch functions.

Megatron-LM loads a micro-batch on the first tensor rank, sends it to the others, cuts it over the context
ranks and calls the model. The cut is where documents are lost: it is made by row, whatever the mask. So

    Megatron-LM calls                  the hook
    get_batch_on_this_tp_rank          finds the documents where the whole batch is, and tells the other ranks
    get_batch_on_this_cp_rank,         plans them, and cuts tokens, labels, loss mask and positions by the plan
    get_thd_batch_on_this_cp_rank
    is_first_or_last_pipeline_stage    lets the middle stages load the batch too: they attend as well
    GPTModel.__init__                  tells stages without layers what the layers of other stages plan with
    GPTModel.forward                   gives the plan to the layers, in packed_seq_params
    forward_step_calc_loss             divides a loss by the tokens of the whole context group, not of one rank

A batch without documents is left to Megatron's own functions. Importing `megatron_cp.mcore.spec` installs
the hooks, also where a program has imported the functions by name. Nothing happens before a model with our
attention is built.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules  # noqa: F401  its loss function gets a hook
from torch import Tensor

from megatron_cp.mcore import compat, layers, program
from megatron_cp.mcore.attention import ContextParallelAttention
from megatron_cp.mcore.batch import ContextParallelParams
from megatron_cp.mcore.cut import (
    PARAMS,
    SEQUENCE_KEYS,
    Lengths,
    cut_batch,
    params_of_batch,
    params_of_documents,
)
from megatron_cp.mcore.documents import DocumentRule, current_rule, find_documents, find_starts
from megatron_cp.mcore.hook_points import HOOK_POINTS, TESTED, HookPoint, dotted, mismatch
from megatron_cp.mcore.rope import install_position_rotary

_DOCUMENTS = "megatron_cp_documents"  # key of the lengths in a batch, between the two hooks
_MARK = "_megatron_cp_hook"
_MODEL_INPUTS = ("input_ids", "position_ids", "labels", "loss_mask")

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
        "forward_step_calc_loss": _normalise_over_context,
    }
    for name, wrap in replacements.items():
        _replace_everywhere(name, wrap)
    if not hasattr(GPTModel.__init__, _MARK):
        GPTModel.__init__ = _marked(_register_stage)(GPTModel.__init__)
    if not hasattr(GPTModel.forward, _MARK):
        GPTModel.forward = _marked(_give_plan_to_layers)(GPTModel.forward)


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
    """Returns the function, if a module that defines it is loaded; GPTModel.forward as Megatron wrote it.

    Raises ImportError where a loaded module of Megatron-Core should define it and does not.
    """
    if point.name == "GPTModel.forward":
        return getattr(GPTModel.forward, _MARK, GPTModel.forward)
    names = sorted({file.removesuffix(".py").replace("/", ".") for file in point.files})
    loaded = [sys.modules[name] for name in names if name in sys.modules]
    found = [getattr(module, point.name) for module in loaded if hasattr(module, point.name)]
    if found:
        return getattr(found[0], _MARK, found[0])
    if point.is_needed and len(loaded) == len(names):
        raise ImportError(
            f"megatron-core {dotted(compat.megatron_version())} has no {point.name} in {' or '.join(names)}; "
            f"megatron_cp cannot plan its batches; install one of {dotted(*TESTED)}"
        )
    return None


def _marked(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        hook = functools.wraps(plain)(wrap(plain))
        setattr(hook, _MARK, plain)
        return hook

    return wrapped


def _replace_everywhere(name: str, wrap: Callable[..., Any]) -> None:
    """Puts the hook wherever a loaded module has the function under its name: programs import by name."""
    hook_of: dict[Any, Any] = {}
    for module in list(sys.modules.values()):
        plain = getattr(module, "__dict__", {}).get(name)
        if not inspect.isfunction(plain) or not _is_megatrons(plain) or hasattr(plain, _MARK):
            continue
        if plain not in hook_of:
            hook_of[plain] = _marked(wrap)(plain)
        setattr(module, name, hook_of[plain])


def _is_megatrons(function: Any) -> bool:
    return str(function.__module__).startswith("megatron.")


# --- which documents: where the whole batch is


def _tell_documents(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `get_batch_on_this_tp_rank(data_iterator | batch, ...) -> batch`."""

    def get_batch_on_this_tp_rank(source: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rule = current_rule()
        if not layers.is_known() or rule.source not in ("positions", "mask", "eod"):
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
    starts: Tensor
    if group.rank() == 0:
        starts = find_starts(whole, rule)
        starts = starts.to(device=torch.cuda.current_device(), dtype=torch.uint8).contiguous()
    else:
        shape = (args.micro_batch_size, args.seq_length)
        starts = torch.zeros(shape, dtype=torch.uint8, device=torch.cuda.current_device())
    if group.size() > 1:
        dist.broadcast(starts, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
    places = starts.flatten().nonzero().flatten().tolist()
    ends = [*places[1:], starts.numel()]
    return tuple(end - start for start, end in zip(places, ends, strict=True))


def _load_on_every_stage(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `is_first_or_last_pipeline_stage(vp_stage) -> bool`, which says who loads batches."""

    def is_first_or_last_pipeline_stage(*args: Any, **kwargs: Any) -> Any:
        rule = current_rule()
        # Where middle stages get cu_seqlens by themselves, GPTModel.forward takes them from there.
        is_newer = not hasattr(utils, "get_thd_batch_on_this_cp_rank")
        is_told = rule.source == "cu_seqlens" and is_newer
        if layers.is_known() and rule.asks_for_documents and not is_told:
            return True
        return plain(*args, **kwargs)

    return is_first_or_last_pipeline_stage


# --- who gets which rows


def _cut_by_plan(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `get_batch_on_this_cp_rank(batch, ..., cp_group=None) -> batch`."""
    signature = inspect.signature(plain)

    def get_batch_on_this_cp_rank(batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not layers.is_known():
            return plain(batch, *args, **kwargs)
        if all(batch.get(key) is None for key in SEQUENCE_KEYS):
            return (
                batch  # a middle stage that is given cu_seqlens alone: GPTModel.forward takes them
            )
        rule = current_rule()
        lengths = batch.pop(_DOCUMENTS, None) or find_documents(batch, rule)
        if lengths is None:
            _say_once("documents: none are asked for; rows stay where Megatron puts them (zigzag)")
            return plain(batch, *args, **kwargs)
        group = signature.bind(batch, *args, **kwargs).arguments.get("cp_group")
        cut_batch(batch, lengths, group or parallel_state.get_context_parallel_group())
        _say_once(rule.describe(lengths) + _planner_of(batch))
        return batch

    return get_batch_on_this_cp_rank


def _cut_thd_by_plan(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `get_thd_batch_on_this_cp_rank(batch, cu_seqlens, ...) -> (batch, packed_seq_params)`."""

    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not layers.is_known():
            return plain(batch, cu_seqlens, cu_seqlens_padded, *args, **kwargs)
        rule = DocumentRule("cu_seqlens", current_rule().asked_by)
        whole = {**batch, "cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}
        lengths = find_documents(whole, rule)
        assert lengths is not None
        params = cut_batch(batch, lengths, parallel_state.get_context_parallel_group())
        _say_once(rule.describe(lengths) + _planner_of(batch))
        return batch, params

    return get_thd_batch_on_this_cp_rank


# --- the model


def _register_stage(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `GPTModel.__init__(config, transformer_layer_spec, ...)`: a stage may be without layers."""

    def __init__(  # noqa: N807  the name of what it stands for
        self: Any, config: Any, transformer_layer_spec: Any, *args: Any, **kwargs: Any
    ) -> None:
        plain(self, config, transformer_layer_spec, *args, **kwargs)
        if layers.has_our_attention(transformer_layer_spec):
            layers.register_stage(config)

    return __init__


def _give_plan_to_layers(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `GPTModel.forward`: the plan that came with the tensors goes into packed_seq_params."""
    signature = inspect.signature(plain)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        inputs = call.arguments
        params = _attached(inputs.get(name) for name in _MODEL_INPUTS)
        given = inputs.get("packed_seq_params")
        if params is None and _is_middle_stage(inputs) and current_rule().source == "cu_seqlens":
            params = _params_of_middle_stage(given)
        if params is None and isinstance(given, ContextParallelParams):
            params = given
        if params is None:
            return plain(self, *args, **kwargs)
        _check_model(self)
        _check_samples(self.config, params.num_samples)
        inputs["packed_seq_params"], inputs["attention_mask"] = params, None
        return plain(*call.args, **call.kwargs)

    return forward


def _check_samples(config: Any, num_samples: int) -> None:
    """Refuses what would take the columns of the batch for samples: they are pieces of one stream."""
    if num_samples == 1:
        return
    kinds = getattr(config, "moe_router_load_balancing_type", None)
    if getattr(config, "num_moe_experts", None) and "seq_aux_loss" in str(kinds):
        raise NotImplementedError(
            f"{num_samples} samples of documents in a micro-batch with moe_router_load_balancing_type={kinds!r}, which "
            "balances each sample; give --micro-batch-size 1 and the same --global-batch-size"
        )
    if getattr(config, "apply_rope_fusion", False):
        raise NotImplementedError(
            f"{num_samples} samples of documents in a micro-batch with fused RoPE, which knows one table of angles for "
            "all of them; give --no-rope-fusion (the same values, unfused)"
        )


def _attached(tensors: Iterable[Any]) -> ContextParallelParams | None:
    found = (getattr(tensor, PARAMS, None) for tensor in tensors)
    return next((params for params in found if params is not None), None)


def _is_middle_stage(inputs: dict[str, Any]) -> bool:
    return all(inputs.get(name) is None for name in _MODEL_INPUTS)


def _params_of_middle_stage(given: Any) -> ContextParallelParams | None:
    """Returns what the outer stages have made of the same cu_seqlens: plans are the same everywhere."""
    if given is None or not layers.is_known():
        return None
    ends = (
        given.cu_seqlens_q_padded if given.cu_seqlens_q_padded is not None else given.cu_seqlens_q
    )
    lengths = find_documents({"cu_seqlens": ends}, current_rule())
    assert lengths is not None
    group = parallel_state.get_context_parallel_group()
    return params_of_documents(lengths, 1, ends.device, group)


def _check_model(model: Any) -> None:
    """Makes the model's RoPE follow the rows, and refuses layers that would not; looks once at each model."""
    if getattr(model, _MARK, False):
        return
    for name, module in model.named_modules():
        core = getattr(module, "core_attention", None)
        if isinstance(core, torch.nn.Module) and not isinstance(core, ContextParallelAttention):
            raise NotImplementedError(
                f"{name}.core_attention is {type(core).__name__}, which does not follow the plan that the batch was "
                "cut by; build every layer with the spec: --spec megatron_cp.mcore.spec gpt_layer_spec"
            )
    install_position_rotary(model)
    setattr(model, _MARK, True)


def _normalise_over_context(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward_step_calc_loss(model, output, loss_func, config, ...)` of Megatron's schedules.

    Without --calculate-per-token-loss it divides the loss of a rank by the tokens of that rank: tokens would
    weigh by where they were dispatched.
    """

    def forward_step_calc_loss(
        model: Any, output: Any, loss_func: Any, config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_ours = layers.is_known() and config.context_parallel_size > 1
        if is_ours and loss_func is not None and not config.calculate_per_token_loss:
            loss_func = functools.partial(_loss_over_context, loss_func)
        return plain(model, output, loss_func, config, *args, **kwargs)

    return forward_step_calc_loss


def _loss_over_context(loss_func: Callable[..., Any], output: Any, **kwargs: Any) -> Any:
    """Returns (loss sum / tokens of the context group, report) where a loss function gave (sum, count, report).

    Collective over the context group.
    """
    result = loss_func(output, **kwargs)
    if not isinstance(result, tuple) or len(result) != 3:
        return result
    loss_sum, count, report = result
    count = count.clone()
    dist.all_reduce(count, group=parallel_state.get_context_parallel_group())
    return loss_sum / count.clamp(min=1), report


def _planner_of(batch: dict[str, Any]) -> str:
    params = params_of_batch(batch)
    return f"; planner {params.plans['full'].planner}" if params is not None else ""


def _say_once(text: str) -> None:
    """Prints a line on the first rank, once."""
    if not _said and (not dist.is_initialized() or dist.get_rank() == 0):
        print(f"megatron_cp: {text}", flush=True)  # noqa: T201  Megatron-LM logs to standard output
    _said.add(text)
