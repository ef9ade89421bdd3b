"""tools/preprocess_data.py: special tokens that a tokenizer's template puts around documents."""

import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer, processors

from megatron_cp.data.document_set import open_documents
from megatron_cp.data.indexed import IndexedDataset
from megatron_cp.data.tokenizer import train_byte_level_bpe
from tests.data.test_preprocess_tool import run, write_jsonl


def test_special_tokens_of_a_template_are_put_where_they_are_wished(tmp_path, capsys):
    """As `transformers` puts them by default, and Megatron-Core since 0.19; without a wish a note says: none."""
    model = tmp_path / "tokenizer.json"
    texts = ["first document", "x", "the second, longer document"]
    names = ["<s>", "</s>"]
    train_byte_level_bpe(texts, vocab_size=270, path=model, special_tokens=names)
    backend = Tokenizer.from_file(str(model))
    pairs = [(name, backend.token_to_id(name)) for name in names]
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pairs)
    backend.post_processor = template
    backend.save(str(model))
    of_transformers = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model))
    path = write_jsonl(tmp_path / "in.jsonl", [{"q": "why?", "text": text} for text in texts])
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model, "--append-eod")
    eod = backend.token_to_id("<|endoftext|>")
    for word in ("", "no-", None):
        wish = [] if word is None else [f"--tokenizer-hf-{word}include-special-tokens"]
        prefix, includes = tmp_path / f"out{word}", word == ""
        assert run("--input", path, "--output-prefix", prefix, *flags, *wish) == 0
        assert ("template puts 1 special tokens before" in capsys.readouterr().err) == (not wish)
        dataset = IndexedDataset(f"{prefix}_text_document")
        for number, text in enumerate(texts):
            ids = of_transformers(text, add_special_tokens=includes)["input_ids"]
            assert dataset.read(number).tolist() == [*ids, eod]
        manifest = json.loads(Path(f"{prefix}_text_document.manifest.json").read_text())
        assert manifest["special_tokens_included"] == includes
    prefix = tmp_path / "asked"
    wish = ["--tokenizer-hf-include-special-tokens", "--prefix-json-key", "q"]
    assert run("--input", path, "--output-prefix", prefix, *flags, *wish) == 0
    question = of_transformers("why?", add_special_tokens=False)["input_ids"]
    start = [pairs[0][1], *question]
    documents = open_documents(f"{prefix}_text_document")
    assert documents.read(1, 0, len(start)).tolist() == start
    assert documents.prefix_lengths[1] == len(start)
