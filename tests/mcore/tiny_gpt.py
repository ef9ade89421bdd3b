"""A tiny GPT trained by Megatron-Core's own parts on gloo ranks, with its attention or ours.

Everything here runs inside a rank of `tests.ranks`; Megatron is imported there only, after the CPU
stand-ins. Weights come from the parameter's global name, not from a random stream, so that every
layout of ranks starts from the same model.
"""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from tests.mcore.packs import SEQUENCE, VOCABULARY, Pack, dense_mask, endless_packs, planned
from tests.mcore.stock import loss_of_rank, stock_batch
from tests.mcore.weights import fill_by_name

NUM_PACKS = 2  # per step, over all data-parallel ranks and micro-batches


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run; the defaults are Megatron's own attention on one rank."""

    # megatron | split (ours, rows where Megatron put them) | planned | hooked (as under Megatron-LM)
    attention: str = "megatron"
    documents: str = "mask"  # hooked: how the batch tells its documents
    planner: str = "auto"
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    per_token: bool = True
    packed: bool = False
    steps: int = 20
    num_layers: int = 2
    position: str = "rope"
    command_line: bool = False  # the spec that Megatron-LM's --spec names, not the block's
    options: tuple[tuple[str, object], ...] = ()  # further fields of TransformerConfig

    def with_options(self, **options: object) -> "Case":
        return dataclasses.replace(self, options=(*self.options, *options.items()))


def enter_megatron() -> None:
    """Puts the CPU stand-ins into this worker process, keeping the poison of `torch.empty`.

    The poison looks at its caller; behind a stand-in it would take Megatron's calls for ours.
    """
    from megatron_cp.mcore import cpu
    from megatron_cp.mcore.versions import compat
    from tests import conftest

    compat.silence_known_warnings()  # pytest puts its filters back around every test
    if cpu.is_installed():
        return
    names = ("empty", "empty_like")
    for name in names:
        setattr(torch, name, getattr(torch, name).__wrapped__)
    cpu.install()
    plain_load = torch.storage._load_from_bytes
    import megatron.core  # noqa: F401  its import is what puts the loader there

    # 0.19 puts its own loader into every pickled tensor: the parent, which unpickles our results,
    # would import Megatron.
    torch.storage._load_from_bytes = plain_load
    for name in names:
        setattr(torch, name, conftest._poisoned(getattr(torch, name)))


_group_of_ranks: dict[tuple[int, ...], object] = {}
_state_of_layout: dict[tuple, dict[str, object]] = {}


@contextlib.contextmanager
def parallel_state(case: Case):
    """Megatron's process groups for this case, and its random streams; put back at the end.

    gloo never quite forgets a group, so each layout is made once per worker and each set of ranks
    has one group. Megatron's own destroy function would close groups that are still in use here.
    """
    enter_megatron()
    from megatron.core import parallel_state as groups
    from megatron.core import tensor_parallel

    def state() -> dict[str, object]:
        return {name: value for name, value in vars(groups).items() if name.startswith("_")}

    before = state()
    layout = (torch.distributed.get_world_size(), case.tp, case.pp, case.vpp, case.cp, case.ep)
    if layout in _state_of_layout:
        vars(groups).update(_state_of_layout[layout])
    else:
        with _one_group_per_set_of_ranks():
            groups.initialize_model_parallel(
                tensor_model_parallel_size=case.tp,
                pipeline_model_parallel_size=case.pp,
                virtual_pipeline_model_parallel_size=case.vpp,
                context_parallel_size=case.cp,
                expert_model_parallel_size=case.ep,
                expert_tensor_parallel_size=1 if case.ep > 1 else None,
            )
        _state_of_layout[layout] = state()
    try:
        # An error inside a recomputed layer, which a test waits for, leaves Megatron's flag of recomputation set.
        tensor_parallel.random._unset_checkpointing()
        tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        yield groups
    finally:
        vars(groups).update(before)


@contextlib.contextmanager
def _one_group_per_set_of_ranks():
    plain = torch.distributed.new_group

    def new_group(ranks=None, *args, **kwargs):
        key = tuple(range(torch.distributed.get_world_size()) if ranks is None else ranks)
        if key not in _group_of_ranks:
            _group_of_ranks[key] = plain(list(key))
        return _group_of_ranks[key]

    torch.distributed.new_group = new_group
    try:
        yield
    finally:
        torch.distributed.new_group = plain


def make_config(case: Case):
    enter_megatron()  # a rank may have run nothing of Megatron yet
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    fields = {
        "num_layers": case.num_layers,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "transformer_impl": "local",
        "sequence_parallel": case.sequence_parallel,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "calculate_per_token_loss": case.per_token,
        "overlap_p2p_comm": case.vpp is not None,  # two stages cross their messages otherwise
        "batch_p2p_comm": case.vpp is None,
        **{name: _as_megatron_reads_it(name, value) for name, value in case.options},
    }
    if fields.get("multi_latent_attention"):
        return MLATransformerConfig(**fields)
    return TransformerConfig(**fields)


def _as_megatron_reads_it(name: str, value: object) -> object:
    """Lists stand as tuples in a Case, which must be hashable."""
    is_list = name.startswith("moe_") or name == "recompute_modules"
    return list(value) if is_list and isinstance(value, tuple) else value


def build_chunks(case: Case, config) -> list:
    """The pipeline chunks of this rank: one, or `vpp` of them."""
    from megatron.core import parallel_state as groups
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_cp.mcore.parts.rope import install_position_rotary
    from megatron_cp.mcore.spec import gpt_block_spec, gpt_layer_spec

    chunks = []
    for stage in range(case.vpp or 1):
        vp_stage = stage if case.vpp else None
        spec = gpt_layer_spec if case.command_line else gpt_block_spec(config, vp_stage=vp_stage)
        if case.attention == "megatron":
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization
            )
        model = GPTModel(
            config,
            spec,
            VOCABULARY,
            SEQUENCE,
            pre_process=groups.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=groups.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type=case.position,
            vp_stage=vp_stage,
        )
        if case.attention == "planned":
            install_position_rotary(model)
        fill_by_name(model)
        chunks.append(model)
    return chunks


def tensors_of_pack(case: Case, config, pack: Pack, groups) -> SimpleNamespace:
    """This rank's inputs: `tokens, labels, loss_mask, position_ids`, `attention_mask`, `params`."""
    from megatron_cp.mcore.batch import local_batch

    cp_rank = groups.get_context_parallel_rank()
    if case.attention == "hooked":
        return stock_batch(case, pack)
    if case.attention == "planned":
        local = local_batch(
            planned(case, config, pack),
            cp_rank,
            "cpu",
            cp_group=groups.get_context_parallel_group(),
        )
        return SimpleNamespace(attention_mask=None, **vars(local))
    pieces = np.arange(SEQUENCE).reshape(2 * case.cp, -1)
    rows = np.concatenate([pieces[cp_rank], pieces[2 * case.cp - 1 - cp_rank]])
    attention_mask = None
    if (
        case.packed
    ):  # Megatron's own: a dense mask, True = hidden; positions run on, RoPE is relative
        attention_mask = dense_mask(pack.lengths)
    fields = {
        name: torch.from_numpy(getattr(pack, name)[rows])[None]
        for name in ("tokens", "labels", "loss_mask", "position_ids")
    }
    num = int(pack.loss_mask.sum())
    return SimpleNamespace(
        attention_mask=attention_mask, params=None, num_loss_tokens=num, **fields
    )


class Trainer:
    """Model, optimizer and data of one case on this rank."""

    def __init__(self, case: Case, groups) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from megatron_cp.mcore.checkpoint.fused_adam import install_fused_adam

        install_fused_adam()
        self.case, self.groups = case, groups
        self.config = make_config(case)
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=case.distributed_optimizer, grad_reduce_in_fp32=True
        )
        self.chunks = [
            DistributedDataParallel(self.config, settings, chunk)
            for chunk in build_chunks(case, self.config)
        ]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=3e-3,
                weight_decay=0.01,
                clip_grad=1.0,
                adam_eps=1e-5,
                bf16=self.config.bf16,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=case.distributed_optimizer,
            ),
            self.chunks,
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.stream = endless_packs(case.packed)

    def step(self) -> tuple[float, float]:
        """(loss per token of the global batch before the step, gradient norm)."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from megatron_cp.mcore.loss import reduce_report

        dp_rank, dp_size = (
            self.groups.get_data_parallel_rank(),
            self.groups.get_data_parallel_world_size(),
        )
        every = [next(self.stream) for _ in range(NUM_PACKS)]
        mine = every[dp_rank::dp_size]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=[iter(mine) for _ in self.chunks] if len(self.chunks) > 1 else iter(mine),
            model=self.chunks,
            num_microbatches=len(mine),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        if not self.groups.is_pipeline_last_stage():
            return float("nan"), float(norm)
        report = reduce_report(
            reports, dp_cp_group=self.groups.get_data_parallel_group(with_context_parallel=True)
        )
        return report["lm loss"], float(norm)

    def forward_step(self, packs_of_rank, model):
        from megatron_cp.mcore.loss import make_loss_function

        inputs = tensors_of_pack(self.case, self.config, next(packs_of_rank), self.groups)
        output = model(
            inputs.tokens,
            inputs.position_ids,
            inputs.attention_mask,
            labels=inputs.labels,
            packed_seq_params=inputs.params,
        )
        if self.case.attention == "hooked":
            return output, functools.partial(loss_of_rank, inputs.loss_mask)
        return output, make_loss_function(
            inputs.loss_mask,
            per_token=self.case.per_token,
            cp_group=self.groups.get_context_parallel_group(),
            num_loss_tokens=inputs.num_loss_tokens,
        )


def train(rank: int, world_size: int, case: Case) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step, from the last pipeline stage; empty elsewhere."""
    with parallel_state(case) as groups:
        trainer = Trainer(case, groups)
        steps = [trainer.step() for _ in range(case.steps)]
        is_last = groups.get_pipeline_model_parallel_rank() == case.pp - 1
        return steps if is_last else []
