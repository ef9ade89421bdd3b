"""From text to planned batches: token files, tokenizers, packing, balance, loader. No torch."""

from megatron_cp.data.batch import BatchConfig, PackedBatch, PlannedBatch, PlanRequest
from megatron_cp.data.blend import BlendedDocuments, open_blend, open_split_blend
from megatron_cp.data.blend_sources import BlendSource, parse_blend
from megatron_cp.data.document_set import (
    Documents,
    DocumentSet,
    open_documents,
    split_documents,
)
from megatron_cp.data.fill_in_the_middle import FillInTheMiddle, FimTokens, find_fim_tokens
from megatron_cp.data.indexed import IndexedDataset, token_dtype
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.loader import LoaderConfig, PackedLoader
from megatron_cp.data.packing import Pack, Packer, PackingConfig, Piece, packs_of_one_epoch
from megatron_cp.data.tokenizer import (
    ByteLevelTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
)

__all__ = [
    "BatchConfig",
    "BlendSource",
    "BlendedDocuments",
    "ByteLevelTokenizer",
    "DocumentSet",
    "Documents",
    "FillInTheMiddle",
    "FimTokens",
    "HuggingFaceTokenizer",
    "IndexedDataset",
    "IndexedWriter",
    "LoaderConfig",
    "Pack",
    "PackedBatch",
    "PackedLoader",
    "Packer",
    "PackingConfig",
    "Piece",
    "PlanRequest",
    "PlannedBatch",
    "Tokenizer",
    "build_tokenizer",
    "find_fim_tokens",
    "open_blend",
    "open_documents",
    "open_split_blend",
    "packs_of_one_epoch",
    "parse_blend",
    "split_documents",
    "token_dtype",
]
