"""The hooks around Megatron's model and its loss: what goes on with a batch that was cut by a plan.

`hooks.py` installs them, beside those around the functions that make a batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.mcore import layers
from megatron_cp.mcore.batch import ContextParallelParams
from megatron_cp.mcore.checkpoint.fused_adam import install_in_program
from megatron_cp.mcore.documents.cut import params_of_documents, params_on
from megatron_cp.mcore.documents.find import current_rule, find_documents
from megatron_cp.mcore.memory.save import save_as_wished
from megatron_cp.mcore.mixing.indexer import set_loss_scale
from megatron_cp.mcore.parts import rope_fusion
from megatron_cp.mcore.parts.mtp import mark_repeated_prediction
from megatron_cp.mcore.parts.rope import install_position_rotary
from megatron_cp.mcore.settings.hybrid_pattern import hybrid_pattern
from megatron_cp.mcore.settings.sparse_settings import is_sparse
from megatron_cp.mcore.settings.validation import balances_samples
from megatron_cp.mcore.versions import hybrid_classes

_LOOKED_AT = "_megatron_cp_looked_at"  # attribute of a model
_exchanges: list[Callable[[Any], Any]] = []  # what becomes of the specs of every GPT: at most one
# Of the last GPT: its configuration, the layers' spec of its program, and ours.
_last_exchanged: list[tuple[Any, Any, Any]] = []
_IS_OURS = "_megatron_cp_is_ours"  # attribute of a model: its specs were exchanged
_HAS_OURS = "_megatron_cp_has_ours"  # attribute of a model: all its layers were looked at
_MODEL_INPUTS = ("input_ids", "position_ids", "labels", "loss_mask")


def exchange_specs(exchange: Callable[[Any], Any] | None) -> None:
    """From now on GPTs and hybrid models are built of `exchange(spec)`; None: of the specs as they are."""
    _exchanges[:] = [] if exchange is None else [exchange]
    _last_exchanged.clear()


def register_stage(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `GPTModel.__init__(config, transformer_layer_spec, ...)`: a stage may be without layers."""
    signature = inspect.signature(plain)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  the name of what it stands for
        call = signature.bind(self, *args, **kwargs)
        given = call.arguments
        for exchange in _exchanges:
            for name in ("mtp_block_spec", "transformer_layer_spec"):  # the last one is remembered
                if given.get(name) is not None:
                    theirs, given[name] = given[name], exchange(given[name])
                    _last_exchanged[:] = [(given["config"], theirs, given[name])]
        _predict_as_configured(given)
        plain(*call.args, **call.kwargs)
        if getattr(self, "mtp", None) is not None:
            mark_repeated_prediction(self.mtp, given["config"])
        _finish(self, given["config"], layers.has_our_attention(given["transformer_layer_spec"]))

    return __init__


def _finish(model: torch.nn.Module, config: Any, is_ours: bool) -> None:
    """Does what a model needs once Megatron's constructor has built it, with our attention or another."""
    if (
        _exchanges
    ):  # its program knows nothing of us: layers that the model gets later are looked at as well
        setattr(model, _IS_OURS, True)
        _look_at_later_layers()
        model.register_forward_pre_hook(_check_attention)
    if is_ours or _exchanges:
        layers.register_stage(config)
        install_in_program()
    save_as_wished(model)


def _predict_as_configured(given: dict[str, Any]) -> None:
    """Exchanges multi-token prediction where the decoder's layers are ours by a spec of a command line."""
    spec = given["transformer_layer_spec"]
    build = getattr(getattr(spec, "module", None), "prediction_spec", None)
    if build is not None and not _exchanges and given.get("mtp_block_spec") is not None:
        given["mtp_block_spec"] = build(given["config"], given.get("vp_stage"), **spec.params)


def exchange_in_block(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `TransformerBlock.__init__(config, spec, ...)`: a subclass of a GPT may build its decoder once more."""
    signature = inspect.signature(plain)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        call = signature.bind(self, *args, **kwargs)
        for config, theirs, ours in _last_exchanged:
            # An encoder of images may have the same spec, with a configuration of its own.
            if call.arguments.get("spec") is theirs and call.arguments["config"] is config:
                call.arguments["spec"] = ours
        plain(*call.args, **call.kwargs)

    return __init__


@functools.cache
def _look_at_later_layers() -> None:
    """From now on layers that a subclass gives a model after Megatron's constructor are looked at when it gets them."""

    def check(model: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
        if part is not None and getattr(model, _IS_OURS, False):
            _check_part(model, name, part)

    torch.nn.modules.module.register_module_module_registration_hook(check)


def _check_attention(model: torch.nn.Module, _inputs: Any = None) -> None:
    """Refuses, before its first forward, a model with layers that were built of other specs than ours."""
    if getattr(model, _HAS_OURS, False):
        return
    _check_part(model, "", model)
    setattr(model, _HAS_OURS, True)


def _check_part(model: torch.nn.Module, name: str, part: torch.nn.Module) -> None:
    """Refuses a part of a model, under that name, that has layers with an attention which is not ours."""
    for place, module in part.named_modules(prefix=name):
        core = getattr(module, "core_attention", None)
        if isinstance(core, torch.nn.Module) and not any(map(_follows_plans, core.modules())):
            raise NotImplementedError(
                f"{place}.core_attention of {type(model).__name__} is {type(core).__name__}: its program builds layers "
                "of other specs than those of its GPTModel, so they have no attention of ours; leave out "
                "use_in_every_gpt, or give the layers their spec by with_context_parallel"
            )


def _follows_plans(module: torch.nn.Module) -> bool:
    return bool(getattr(module, "follows_plans", False))


def register_hybrid_stage(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the constructor of Megatron's hybrid model: its configuration does not say which layers attend."""
    parts = hybrid_classes.hybrid_parts()
    signature = inspect.signature(plain)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        call = signature.bind(self, *args, **kwargs)
        given = call.arguments
        config = given["config"]
        for exchange in _exchanges:
            given[parts.spec] = exchange(given[parts.spec])
        is_ours = layers.has_our_attention(given.get(parts.spec))
        if is_ours:
            ratios = [given.get(f"hybrid_{kind}_ratio") or 0.0 for kind in ("attention", "mlp")]
            pattern = given.get(parts.pattern) or given.get("hybrid_override_pattern")
            if pattern is None:
                pattern = hybrid_classes.pattern_of_ratios(config.num_layers, *ratios)
            said, known = hybrid_pattern(pattern), getattr(config, "hybrid_layer_pattern", None)
            # The configuration may know predictions that the class has no argument for.
            if known is None or hybrid_pattern(known).layers != said.layers:
                config.hybrid_layer_pattern = said.without_bars
        plain(*call.args, **call.kwargs)
        _finish(self, config, is_ours)

    return __init__


def give_plan_to_layers(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward` of Megatron's model: the plan that came with the tensors goes into packed_seq_params."""
    signature = inspect.signature(plain)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Here too: models for images call `forward` by its name, past torch's hooks.
        if getattr(self, _IS_OURS, False):
            _check_attention(self)
        call = signature.bind(self, *args, **kwargs)
        inputs = call.arguments
        params = params_on(inputs.get(name) for name in _MODEL_INPUTS)
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
    if balances_samples(config):
        kinds = config.moe_router_load_balancing_type
        raise NotImplementedError(
            f"{num_samples} samples of documents in a micro-batch with moe_router_load_balancing_type={kinds!r}, which "
            "balances each sample; give --micro-batch-size 1 and the same --global-batch-size"
        )
    if getattr(config, "apply_rope_fusion", False) and not rope_fusion.is_installed():
        raise NotImplementedError(
            f"{num_samples} samples of documents in a micro-batch with Transformer Engine's fused RoPE, which knows "
            "one table of angles for all of them; give --no-rope-fusion (the same values, unfused)"
        )


def _is_middle_stage(inputs: dict[str, Any]) -> bool:
    return all(inputs.get(name) is None for name in _MODEL_INPUTS)


def _params_of_middle_stage(given: Any) -> ContextParallelParams | None:
    """Returns what the outer stages have made of the same cu_seqlens: plans are the same everywhere."""
    if given is None or not layers.are_ours():
        return None
    ends = {"cu_seqlens": given.cu_seqlens_q, "cu_seqlens_padded": given.cu_seqlens_q_padded}
    lengths = find_documents(ends, current_rule())
    assert lengths is not None
    group = parallel_state.get_context_parallel_group()
    return params_of_documents(lengths, 1, given.cu_seqlens_q.device, group)


def _check_model(model: Any) -> None:
    """Makes the model's RoPE follow the rows, and refuses layers that would not; looks once at each model."""
    if getattr(model, _LOOKED_AT, False):
        return
    for name, module in model.named_modules():
        core = getattr(module, "core_attention", None)
        if isinstance(core, torch.nn.Module) and not getattr(core, "follows_plans", False):
            if name.startswith("mtp"):
                raise NotImplementedError(
                    "multi-token prediction with documents: its layers have an attention that does not follow the "
                    "plan that the batch was cut by; give mtp_block_spec=megatron_cp.mcore.mtp_block_spec(config)"
                )
            raise NotImplementedError(
                f"{name}.core_attention is {type(core).__name__}, which does not follow the plan that the batch was "
                "cut by; build every layer with the spec: --spec megatron_cp.mcore.spec gpt_layer_spec"
            )
        if _is_megatrons_recurrence(module):
            raise NotImplementedError(
                f"{name} is {type(module).__name__} of Megatron-Core, which takes rows in the order of tokens, and "
                "does not follow the plan that the batch was cut by; exchange it: with_context_parallel(spec), or "
                "--spec megatron_cp.mcore.hybrid hybrid_stack_spec"
            )
    install_position_rotary(model)
    setattr(model, _LOOKED_AT, True)


def _is_megatrons_recurrence(module: torch.nn.Module) -> bool:
    """Returns whether a module carries states from row to row in Megatron's way."""
    kind = type(module)
    is_megatrons = kind.__module__.startswith("megatron.core.ssm.")
    return is_megatrons and ("Mixer" in kind.__name__ or "GatedDelta" in kind.__name__)


def normalise_over_context(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward_step_calc_loss(model, output, loss_func, config, ...)` of Megatron's schedules.

    Without --calculate-per-token-loss it divides the loss of a rank by the tokens of that rank: tokens would
    weigh by where they were dispatched.
    """

    def forward_step_calc_loss(
        model: Any, output: Any, loss_func: Any, config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # A schedule's configuration need not be that of a model.
        is_ours = layers.are_ours() and getattr(config, "context_parallel_size", 1) > 1
        if is_ours and loss_func is not None and not config.calculate_per_token_loss:
            loss_func = functools.partial(_loss_over_context, loss_func)
        result = plain(model, output, loss_func, config, *args, **kwargs)
        if is_sparse(config):
            given = signature.bind(model, output, loss_func, config, *args, **kwargs).arguments
            set_loss_scale(config, given["num_microbatches"])
        return result

    signature = inspect.signature(plain)
    return forward_step_calc_loss


def _loss_over_context(loss_func: Callable[..., Any], output: Any, **kwargs: Any) -> Any:
    """Returns (loss sum / tokens of the context group, report) where a loss function gave (sum, count, report).

    Collective over the context group.
    """
    result = loss_func(output, **kwargs)
    if kwargs.get("non_loss_data") or not isinstance(result, tuple) or len(result) != 3:
        return result
    loss_sum, count, report = result
    count = count.clone()
    dist.all_reduce(count, group=parallel_state.get_context_parallel_group())
    return loss_sum / count.clamp(min=1), report
