"""--use-checkpoint-args: the model's arguments are those that the checkpoint was saved with.

    the checkpoint's wins      what Megatron-LM overrides: kinds of positions, norm, MLP, experts, mixers, tokenizer
    the command line's wins    what Megatron-LM only fills: sizes, and the pattern of layers
    the command line's wins    what else describes the model, which Megatron-LM does not look at

A value of the checkpoint goes through the parser of its flag, so that it is refused as if it had been given by hand.
Where it contradicts a flag of the command line a note names both.

Source: `load_args_from_checkpoint` of Megatron-LM core_v0.20.0 (which arguments, and which of both wins).
"""

from __future__ import annotations

import argparse
import shlex
from argparse import Namespace
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megatron_cp.mcore.settings.longrope_settings import LONGROPE
from megatron_cp.training.arguments.faults import discard
from megatron_cp.training.arguments.flags import actions_by_name, add_served_flags, words_of
from megatron_cp.training.arguments.hybrid_model import MEGATRONS_SPECS
from megatron_cp.training.arguments.known_flags import refusal

SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
"""What a command line without them takes from the checkpoint; they are not asked for where that cannot be read."""

_OVERRIDDEN = (
    "num_query_groups", "group_query_attention", "position_embedding_type", "add_position_embedding",
    "use_rotary_position_embeddings", "rotary_base", "rotary_percent", "rotary_interleaved", "add_bias_linear",
    "add_qkv_bias", "squared_relu", "swiglu", "untie_embeddings_and_output_weights",
    "layernorm_zero_centered_gamma", "normalization", "apply_query_key_layer_scaling", "attention_dropout",
    "hidden_dropout", "mtp_num_layers", "mtp_use_repeated_layer", "num_experts", "tiktoken_pattern",
)  # fmt: skip
_OVERRIDDEN_OF_EXPERTS = (
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_grouped_gemm",
    "moe_shared_expert_intermediate_size", "moe_router_score_function", "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor", "moe_latent_size",
)  # fmt: skip
_OVERRIDDEN_OF_MAMBA = (
    "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads",
)  # fmt: skip
_OVERRIDDEN_OF_TOKENIZER = ("tokenizer_model", "tokenizer_type")
_OVERRIDDEN_OF_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
_FILLED = (
    *SIZES, "ffn_hidden_size", "kv_channels", "max_position_embeddings", "hybrid_layer_pattern", "padded_vocab_size",
)  # fmt: skip
_FILLED_OF_LAYOUT = ("num_layers_per_virtual_pipeline_stage",)

# What Megatron-LM leaves to the command line alone: without it weights would be lost, or compute something else. Each
# with what a model must have that it belongs to, by `_parts`.
_REST: dict[str, tuple[str, ...]] = {
    "": (
        "layernorm_epsilon", "qk_layernorm", "qk_l2_norm", "attention_output_gate", "quick_geglu",
        "glu_linear_offset", "activation_func_clamp_value", "softmax_type", "window_size", "window_attn_skip_freq",
        "experimental_attention_variant", "multi_latent_attention",
    ),
    "rotation": (
        "no_rope_freq", "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor",
        *LONGROPE,
    ),
    "yarn": (
        "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
        "yarn_correction_range_round_to_int", "llama_4_scaling_beta", "rotary_scaling_factor", "mscale",
        "mscale_all_dim",
    ),
    "latent": (
        "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type",
        "rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
        "original_max_position_embeddings",
    ),
    "variant": (
        "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "dsa_indexer_n_heads", "dsa_indexer_head_dim",
        "dsa_indexer_topk", "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset",
        "dsa_indexer_rope_interleaved", "dsa_indexer_scoring_relu", "dsa_indexer_k_norm_epsilon",
    ),
    "experts": (
        "moe_shared_expert_gate", "moe_router_num_groups", "moe_router_group_topk", "moe_apply_probs_on_input",
        "moe_router_load_balancing_type", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy", "moe_router_dtype",
    ),
}  # fmt: skip

# Settings of a training that are easily forgotten beside a model that is read: they are not taken, as in Megatron-LM.
_OF_TRAINING = (
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "dsa_indexer_loss_coeff",
    "mtp_loss_scaling_factor",
)  # fmt: skip
# Models that nothing here builds, whatever else is given: argument -> its flag.
_NOT_BUILT = (
    "mtp_hybrid_override_pattern", "moe_single_grouped_weight", "moe_single_grouped_bias",
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json",
    "apply_residual_connection_post_layernorm", "use_mup", "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
)  # fmt: skip
_FIRST_NAMED_LAYOUT = 3.0  # of a checkpoint; before, tensor parallelism was --model-parallel-size


def take_checkpoint_arguments(given: Collection[str], args: Namespace) -> Iterator[str]:
    """Fills in what the checkpoints of --pretrained-checkpoint and --load say of their models, the latter last.

    Opens files. `given` are the arguments that flags of the command line have set. Yields a line for each value that
    is not served.
    """
    if not args.use_checkpoint_args:
        return
    roots = [root for root in (args.pretrained_checkpoint, args.load) if root is not None]
    if not roots:
        yield "--use-checkpoint-args needs --load <folder> or --pretrained-checkpoint <folder>; give one"
        return
    faults = [fault for root in roots for fault in _take_from(root, given, args)]
    yield from faults
    if not faults and all(getattr(args, name, 0) is None for name in SIZES):
        yield (
            f"--use-checkpoint-args: {' and '.join(roots)} hold no arguments, and the command line says no model; give "
            "a folder of a checkpoint that has them, or the model's flags"
        )


def _take_from(root: str, given: Collection[str], args: Namespace) -> Iterator[str]:
    from megatron_cp.mcore import cpu
    from megatron_cp.mcore.versions import compat

    compat.silence_known_warnings()
    cpu.install()  # before the first import of megatron.core, whose types a checkpoint's arguments have
    from megatron_cp.training.checkpoint.saved_arguments import saved_arguments

    try:
        found = saved_arguments(root, args)
    except (ValueError, OSError) as problem:
        yield f"--use-checkpoint-args: {problem}"
        return
    if found is None:
        args.notes.append(f"--use-checkpoint-args: {root} holds no checkpoint to take any from")
    elif found.arguments is None:
        args.notes.append(
            f"--use-checkpoint-args: {found.folder} holds no arguments: those of the command line are used, as in "
            "Megatron-LM"
        )
    else:
        taking = _Taking(str(found.folder), _by_todays_names(found.arguments), given, args)
        yield from taking.take_all(has_layout=found.version >= _FIRST_NAMED_LAYOUT)


def _by_todays_names(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns saved arguments under the names that flags set today."""
    named = dict(saved)
    for old, new in (
        ("norm_epsilon", "layernorm_epsilon"),
        ("apply_layernorm_1p", "layernorm_zero_centered_gamma"),
    ):
        if named.get(new) is None:
            named[new] = named.get(old)
    if "disable_bias_linear" in named:
        named["add_bias_linear"] = not named["disable_bias_linear"]
    older = named.get("hybrid_override_pattern")
    if older is not None and named.get("hybrid_layer_pattern") is None:
        named |= {"hybrid_layer_pattern": older, "num_layers": None}
    if not named.get("mtp_num_layers"):
        named["mtp_hybrid_override_pattern"] = None  # of no prediction
    window = named.get("window_size")
    if isinstance(window, list):
        named["window_size"] = tuple(window)
    return named


class _Taking:
    """What becomes of the arguments of one checkpoint."""

    def __init__(
        self, folder: str, saved: dict[str, Any], given: Collection[str], args: Namespace
    ) -> None:
        self._folder, self._saved, self._given, self._args = folder, saved, given, args
        self._actions = actions_by_name()
        self._parser = argparse.ArgumentParser(
            add_help=False, allow_abbrev=False, exit_on_error=False
        )
        add_served_flags(self._parser)
        self._taken: list[str] = []

    def take_all(self, *, has_layout: bool) -> Iterator[str]:
        """Yields a line for each argument that is not served, and notes what was taken or contradicts."""
        args, saved = self._args, self._saved
        for name in _NOT_BUILT:
            if saved.get(name):
                yield f"{refusal('--' + name.replace('_', '-'))}; {self._folder} was saved with it"
        yield from self._take_spec(saved.get("spec"))
        for name in self._overridden():
            yield from self._take(name, wins=True)
        if saved.get("num_experts") is None and args.moe_ffn_hidden_size is not None:
            told = f"--moe-ffn-hidden-size {args.moe_ffn_hidden_size}"
            self._note("moe_ffn_hidden_size", told, "no experts", wins=True)
            args.moe_ffn_hidden_size = None
        for name in _FILLED:
            yield from self._take(name, wins=getattr(args, name, 0) is None)
        for part in ("", *self._parts()):
            for name in _REST.get(part, ()):
                yield from self._take(name, wins=name not in self._given)
        if args.use_mp_args_from_checkpoint_args:
            yield from self._take_layout(has_layout)
        yield from self._tell_of_training()
        if self._taken:
            args.notes.append(
                f"--use-checkpoint-args: {self._folder} gives {' '.join(self._taken)}"
            )

    def _tell_of_training(self) -> Iterator[str]:
        """Notes which losses the checkpoint was trained with, where the command line does not say them."""
        told = []
        for name in _OF_TRAINING:
            value = self._saved.get(name)
            if value is None or name in self._given:
                continue
            try:
                value = self._parsed(name, value)
            except ValueError as problem:
                yield f"{problem}; {self._folder} was saved with it (--use-checkpoint-args)"
                continue
            if _one(value) != _one(self._actions[name][0].default):
                told.append(self._said(name, value))
        if told:
            self._args.notes.append(
                f"--use-checkpoint-args: {self._folder} was trained with {' '.join(told)}, which is of the training "
                "and not taken, as in Megatron-LM: give it to go on so"
            )

    def _overridden(self) -> Iterator[str]:
        yield from _OVERRIDDEN
        if self._saved.get("num_experts") is not None:
            yield from _OVERRIDDEN_OF_EXPERTS
        if self._saved.get("hybrid_layer_pattern") is not None:
            yield from _OVERRIDDEN_OF_MAMBA
        if self._args.use_tokenizer_model_from_checkpoint_args:
            yield from _OVERRIDDEN_OF_TOKENIZER

    def _parts(self) -> Iterator[str]:
        """Yields what the model has that arguments of `_REST` belong to."""
        saved = self._saved
        kind = saved.get("position_embedding_type")
        is_latent = bool(saved.get("multi_latent_attention"))
        for part, is_there in (
            ("rotation", kind in ("rope", "yarn") or is_latent),
            ("yarn", kind == "yarn"),
            ("latent", is_latent),
            ("variant", saved.get("experimental_attention_variant") is not None),
            ("experts", saved.get("num_experts") is not None),
        ):
            if is_there:
                yield part

    def _take_layout(self, has_layout: bool) -> Iterator[str]:
        if not has_layout:
            self._args.notes.append(
                f"--use-mp-args-from-checkpoint-args: {self._folder} is of a version before 3.0, whose layout is not "
                "taken, as in Megatron-LM"
            )
            return
        for name in _OVERRIDDEN_OF_LAYOUT:
            yield from self._take(name, wins=True)
        for name in _FILLED_OF_LAYOUT:
            yield from self._take(name, wins=getattr(self._args, name, 0) is None)

    def _take_spec(self, saved: Any) -> Iterator[str]:
        """A spec names code: a checkpoint may name Megatron's and ours; others are named by hand."""
        if saved is None or saved == self._args.spec:
            return
        words = saved if isinstance(saved, list) and _is_plain(saved) else [str(saved)]
        ours = MEGATRONS_SPECS | {("megatron_cp.mcore.spec", "gpt_layer_spec")}
        if tuple(words) in ours:
            yield from self._take("spec", wins=True)
            return
        yield (
            f"--spec {' '.join(words)}, with which {self._folder} was saved, would import code that a "
            "checkpoint names; give it by hand with --allow-custom-spec if you trust it, or leave out "
            "--use-checkpoint-args"
        )

    def _take(self, name: str, *, wins: bool) -> Iterator[str]:
        """Gives the argument the checkpoint's value if that wins; a note says where it contradicts the command line."""
        value = self._saved.get(name)
        if value is None or not hasattr(self._args, name):  # not said, or wrong on the command line
            return
        try:
            value = self._parsed(name, value)
        except ValueError as problem:
            yield f"{problem}; {self._folder} was saved with it (--use-checkpoint-args)"
            discard(self._args, name)
            return
        now = getattr(self._args, name)
        if _one(value) == _one(now):
            return
        if wins:
            setattr(self._args, name, value)
            self._taken.append(self._said(name, value))
        if not wins or name in self._given:
            self._note(name, self._said(name, now), self._said(name, value), wins=wins)
        if wins and name == "tokenizer_model" and not Path(value).exists():
            yield (
                f"--tokenizer-model {value}, with which {self._folder} was saved, does not exist here; give "
                "--no-use-tokenizer-model-from-checkpoint-args, and the tokenizer's flags"
            )

    def _parsed(self, name: str, value: Any) -> Any:
        """Returns the value as the flag of this argument reads it. Raises ValueError where it does not."""
        flag = self._actions[name][0].option_strings[0]
        if not _is_plain(value):
            raise ValueError(f"{flag} takes no value of type {type(value).__name__}")
        if isinstance(value, float) and value.is_integer() and self._actions[name][0].type is int:
            value = int(value)
        words = words_of(self._actions[name], value)
        if not words and value != self._actions[name][0].default:
            raise ValueError(f"{flag} has no value {value!r}")
        try:
            draft, stray = self._parser.parse_known_args(words)
        except argparse.ArgumentError as problem:
            raise ValueError(str(problem)) from None
        if stray:
            raise ValueError(f"{flag} takes no {stray[0]!r}")
        return getattr(draft, name)

    def _said(self, name: str, value: Any) -> str:
        """Returns the words that give this value, or its name and it where no flag does."""
        words = [] if value is None else words_of(self._actions[name], value)
        return shlex.join(words) or f"{name} {value}"

    def _note(self, name: str, now: str, saved: str, *, wins: bool) -> None:
        """Says what the command line, or the checkpoint asked before, and this one have, and which of both is used."""
        before = "the command line" if name in self._given else "--pretrained-checkpoint"
        used = "the checkpoint" if wins else before
        self._args.notes.append(
            f"--use-checkpoint-args: {now} of {before}, {saved} of {self._folder}: {used}'s is used"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (int, float, str)) for item in value)
    return isinstance(value, (bool, int, float, str))


def _one(value: Any) -> Any:
    """Returns the value of a list of one, as such flags are completed."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
