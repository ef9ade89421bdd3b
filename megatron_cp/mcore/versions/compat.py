"""Megatron-Core versions: the only module that asks for one.

One source serves megatron-core 0.16.1 (Python <= 3.11) to 0.20. What differs between them and
concerns us is decided here, by looking at what is there rather than at numbers wherever that is
possible.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_cp.mcore.versions import duplicated_linear
from megatron_cp.mcore.versions.hook_points import OLDEST, TESTED, Version, dotted, is_too_old
from megatron_cp.mcore.versions.wrapping import put_hook

_log = logging.getLogger(__name__)


def megatron_version() -> Version:
    """Returns the version of the installed megatron-core, e.g. (0, 16, 1).

    Raises:
        ImportError: if it is not installed.
    """
    numbers = map(int, re.findall(r"\d+", _version_in_words())[:3])
    return (*numbers, 0, 0, 0)[:3]


def _version_in_words() -> str:
    # The imported package knows best: a source tree on PYTHONPATH shadows what is installed.
    try:
        package_info = importlib.import_module("megatron.core.package_info")
        return str(package_info.__version__)
    except ImportError:
        return importlib.metadata.version("megatron-core")


def is_candidate() -> bool:
    """Returns whether megatron-core calls itself a candidate of a release, as checkouts between two do."""
    return "rc" in _version_in_words()


def check_megatron_version() -> None:
    """Returns if the installed megatron-core is old enough; says so in one line if it was not tested.

    A version that is newer than those tested goes on: what the hooks rely on is checked for itself.

    Raises:
        ImportError: for a version that is too old, naming it and what is needed.
    """
    found = megatron_version()
    if is_too_old(found, is_candidate()):
        raise ImportError(
            f"megatron-core {dotted(found)} is installed; megatron_cp needs {dotted(OLDEST)} or later; "
            f"pip install 'megatron-core>={dotted(OLDEST)}'"
        )
    if found < OLDEST or found[:2] not in {version[:2] for version in TESTED}:
        _log.warning(
            "megatron-core %s is installed; megatron_cp was tested with %s; it goes on where the "
            "functions that it hooks are as expected",
            dotted(found),
            dotted(*TESTED),
        )


def writers_of_common_state() -> list[tuple[Any, str]]:
    """Returns who writes `common.pt`, as (owner, name); nobody from core 0.19 on, where a tensors' file holds it."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    strategy = getattr(common, "TorchCommonSaveStrategy", None)
    owner = serialization if strategy is None else strategy
    return [(owner, "save_common")] if hasattr(owner, "save_common") else []


@contextmanager
def given_common_state(entries: dict[str, Any]) -> Iterator[None]:
    """Within the block Megatron-Core's load takes these entries for those of the checkpoint that it reads.

    They were read before, in whichever form they were saved; it knows its own.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    owner: Any = getattr(common, "TorchCommonLoadStrategy", serialization)
    name = "load_common"
    if owner is serialization and hasattr(serialization, "_legacy_common_state_exists"):
        name = "load_common_state_dict"  # from 0.19 on
    before = getattr(owner, name)
    setattr(owner, name, lambda *_: copy.deepcopy(entries))
    try:
        yield
    finally:
        setattr(owner, name, before)


def background_options(save: Callable[..., Any]) -> dict[str, Any]:
    """Returns what makes Megatron-Core's own writer save in the background: its default is another package's."""
    knows = "async_strategy" in inspect.signature(save).parameters
    return {"async_strategy": "mcore"} if knows else {}


def has_transformer_engine() -> bool:
    """Returns whether Transformer Engine's torch part is there; Megatron then prefers its modules.

    The bare index package `transformer-engine` has no torch part and makes `import megatron.core`
    itself fail.
    """
    try:
        return importlib.util.find_spec("transformer_engine.pytorch") is not None
    except (ImportError, RuntimeError):  # the bare package raises on import
        return False


def has_fused_adam() -> bool:
    """Returns whether Megatron took its Adam from Transformer Engine or apex, not from torch."""
    from megatron.core.optimizer import distrib_optimizer

    return bool(distrib_optimizer.HAVE_APEX_OR_TE)


def has_apex_norm() -> bool:
    """Returns whether Megatron found a fused LayerNorm of apex."""
    from megatron.core.fusions import fused_layer_norm

    return bool(fused_layer_norm.HAVE_FUSED_LAYER_NORM or fused_layer_norm.HAVE_PERSIST_LAYER_NORM)


def has_apex_weight_gradients() -> bool:
    """Returns whether apex's kernel is there that adds weight gradients into Megatron's buffer."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def weighs_auxiliary_losses_by_rank() -> bool:
    """Returns whether auxiliary losses of experts weigh less on more context ranks.

    So before 0.19, under `calculate_per_token_loss`; see router.py.
    """
    return megatron_version() < (0, 19, 0)


def sums_of_expert_losses() -> dict[str, torch.Tensor]:
    """Returns the sums over micro-batches, one number a layer, by the loss's name; of what this stage's experts had."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # from 0.18 on
        return {
            name: entry.values
            for name, entry in moe_utils.get_moe_metrics_tracker().metrics.items()
        }
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    return {name: entry["values"] for name, entry in tracker.items()}


def decoder_layer_specs(config: Any, *, use_transformer_engine: bool) -> list[Any]:
    """Returns Megatron's spec of every decoder layer of the model, in order, each with softmax attention.

    Dense and expert layers alternate as `config.moe_layer_freq` says; multi-latent attention,
    query-key norms and kinds of norm follow the configuration. The branch of Transformer Engine
    needs a GPU and never ran on one.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
        _changed(config, experimental_attention_variant=None),  # 0.20 makes specs of no other
        use_transformer_engine=use_transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
    )
    if not use_transformer_engine:
        _leave_queries_without_norm(config, layers)
    return list(layers)


def decoder_block_spec(config: Any, *, use_transformer_engine: bool, vp_stage: int | None) -> Any:
    """Returns Megatron's spec of this pipeline stage: its layers of the above and a final norm."""
    from megatron.core.models.gpt import gpt_layer_specs

    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        _changed(config, experimental_attention_variant=None),
        use_transformer_engine=use_transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
        vp_stage=vp_stage,
    )
    if not use_transformer_engine:
        _leave_queries_without_norm(config, block.layer_specs)
    return block


def _leave_queries_without_norm(config: Any, layers: Iterable[Any]) -> None:
    """Takes the norm of compressed queries out of Megatron's local layers that compress none.

    Its spec has it in any latent attention; before 0.19 it was left aside, since then it is an error.
    """
    from megatron.core.transformer.identity_op import IdentityOp

    from megatron_cp.mcore.versions.latent import LatentAttentionOfPlainQueries

    if config.multi_latent_attention and config.q_lora_rank is None:
        for layer in layers:
            attention = layer.submodules.self_attention
            attention.module = LatentAttentionOfPlainQueries
            attention.submodules.q_layernorm = IdentityOp


def plain_layer_specs(config: Any, *, use_transformer_engine: bool) -> list[Any]:
    """Returns the same with plain attention in every layer, also where that of the model is latent."""
    plain = _changed(config, multi_latent_attention=False)
    return decoder_layer_specs(plain, use_transformer_engine=use_transformer_engine)


def layer_specs_without_query_norms(config: Any, *, use_transformer_engine: bool) -> list[Any]:
    """Returns the same with neither norms of queries and keys, nor projections that hold them."""
    bare = _changed(config, qk_layernorm=False)
    return decoder_layer_specs(bare, use_transformer_engine=use_transformer_engine)


def one_layer_spec(config: Any, *, use_transformer_engine: bool, with_experts: bool) -> Any:
    """Returns the same for one layer of the model's sizes, dense or with its experts."""
    experts = config.num_moe_experts if with_experts else None
    one = _changed(config, num_layers=1, num_moe_experts=experts, moe_layer_freq=1)
    return decoder_layer_specs(one, use_transformer_engine=use_transformer_engine)[0]


def _changed(config: Any, **fields: Any) -> Any:
    """Returns a copy of a configuration with other values, without its checks."""
    changed = copy.copy(config)
    vars(changed).update(fields)
    return changed


def layers_of_stage(config: Any, vp_stage: int | None) -> list[int]:
    """Returns the decoder layers, from 0, that this pipeline stage holds."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def transformer_engine_norm() -> Any:
    """Returns Megatron's norm of Transformer Engine's modules; it needs a GPU and never ran on one."""
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def repair_megatron() -> None:
    """Repairs what keeps experts, latent attention and YaRN from running.

    It is called where specs are imported, so that no user has to. A second call changes nothing.
    """
    if not has_transformer_engine():
        _repair_names()
        _repair_biases_of_experts()
        duplicated_linear.install()
    if not torch.cuda.is_available():
        _repair_split_sizes()
    _repair_length_of_yarn()


def _repair_names() -> None:
    """Repairs names of single versions, where they are wrong.

    0.16.1 uses a Transformer Engine function that it never imported (`NameError: te_general_gemm`)
    and takes Transformer Engine for installed in multi-latent attention. In all versions the checkpoint of a norm
    asks Transformer Engine about fp8 unless told None, and its callers tell nothing. 0.20 asks in multi-token
    prediction whether a layer is of a class that it could not define.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention, multi_token_prediction
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if getattr(multi_latent_attention, "HAVE_TE", False):
        multi_latent_attention.HAVE_TE = False
    checkpoint: Any = random.CheckpointWithoutOutput.__init__
    if checkpoint.__defaults__[0] is False:  # taken as given: `fp8 is not None`
        checkpoint.__defaults__ = (None, *checkpoint.__defaults__[1:])
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        multi_token_prediction.is_inference_column_parallel_linear = _is_no_inference_layer


def _repair_biases_of_experts() -> None:
    """Lets experts of the local layers have biases.

    0.16.1 adds the bias of an expert in place to the sum over its tensor-parallel ranks. With one
    rank that sum is its input, handed through an autograd function, which may not be changed. Here
    it is the input itself.
    """
    from megatron.core.tensor_parallel import layers

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(input_: torch.Tensor, group: Any = None) -> Any:
            if group is not None and group.size() == 1:
                return input_
            return plain(input_, group=group)

        return reduce

    put_hook(layers, "reduce_from_tensor_model_parallel_region", wrap)


def _repair_length_of_yarn() -> None:
    """Lets YaRN be made at every context size: its table gets a length that the size divides.

    Megatron cuts the table of `original_max_position_embeddings` rows into 2 x context size parts when the module is
    made; its default, 4096, has no thirds. Angles do not depend on how many rows there are.
    """
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def set_cache(self: Any, seq_len: int, *args: Any, **kwargs: Any) -> None:
            parts = 1 if self.cp_group is None else 2 * self.cp_group.size()
            plain(self, -(-seq_len // parts) * parts, *args, **kwargs)

        return set_cache

    put_hook(yarn_rotary_pos_embedding.YarnRotaryEmbedding, "_set_cos_sin_cache", wrap)


def keep_wide_residual() -> None:
    """Lets the residual stream stay in fp32 between layers of 16 bits, as Megatron-Core does since 0.17.

    Before, each addition rounds the stream to the format of what it adds: `fp32_residual_connection` reached the
    first norm alone. A prediction's layer begins a stream of its own, which is widened there.
    """
    from megatron.core.fusions import fused_bias_dropout
    from megatron.core.transformer import multi_token_prediction

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def add(x_with_bias: Any, residual: torch.Tensor, prob: float, training: bool) -> Any:
            x, bias = (None if part is None else part.to(residual.dtype) for part in x_with_bias)
            return plain((x, bias), residual, prob, training)

        return add

    def widen(plain: Callable[..., Any]) -> Callable[..., Any]:
        def concatenate(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            rows: torch.Tensor = plain(self, *args, **kwargs)
            return rows.float() if self.config.fp32_residual_connection else rows

        return concatenate

    put_hook(fused_bias_dropout, "_bias_dropout_add_func", wrap)
    put_hook(multi_token_prediction.MultiTokenPredictionLayer, "_concat_embeddings", widen)


def _is_no_inference_layer(module: Any) -> bool:
    """Returns False: layers of inference exist on Transformer Engine alone."""
    return False


def _repair_split_sizes() -> None:
    """Makes the all-to-all dispatcher hand its collective plain numbers on CPU ranks too.

    Megatron turns split sizes into arrays while it copies them off the GPU, and leaves a tensor
    that is not there as it is; torch's collective then refuses the tensor.
    """
    from megatron.core.transformer.moe import token_dispatcher

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
            moved = plain(tensor, as_numpy, record_stream)
            return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

        return move

    put_hook(token_dispatcher, "maybe_move_tensor_to_cpu", wrap)


def silence_known_warnings() -> None:
    """Drops warnings of Megatron-Core that nobody here can act on.

    They are its notes at import that apex and Transformer Engine are missing (our choice), and
    torch's that it uses collectives, sharded tensors and checkpoints under their old names.
    """
    warnings.filterwarnings("ignore", message="Apex is not installed")
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated")
    warnings.filterwarnings("ignore", message="The argument order of load has been changed")
