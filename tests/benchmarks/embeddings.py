"""Embeddings of 512 short and 64 long texts beside other engines, in alternated rounds.

Weights are random, of the shape of BERT-base (mean of all tokens) or of Qwen3-Embedding-0.6B (last
token). Short texts have 8 to 32 tokens, long ones 256 to 512. Times count from texts to vectors,
all with the same number of threads. Other engines are measured where their packages are installed:
sentence-transformers; fastembed with onnxscript, in float32 only; llama-cpp-python.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.pooling_models import write_modules
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from benchmarks.common import add_numbers, alternate
from benchmarks.peer_files import convert_to_gguf
from tpengine import LLM
from tpengine.bench.harness import median_of, report_head
from tpengine.engine_args import EngineArgs

_QWEN3 = {"vocab_size": 151669, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
_QWEN3 |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("mean", {"model_type": "bert"}),
    "qwen3-embedding-0.6b": ("last", {"model_type": "qwen3", **_QWEN3}),
}
"""Pooling and configuration."""
_TEXTS = {"short": (512, 6, 30), "long": (64, 254, 500)}
"""Number of texts, fewest and most words."""
_NUM_WORDS, _MAX_TOKENS = 30_000, 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--shape", choices=list(_SHAPES), default="bert-base")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="of tpengine's side")
    add_numbers(parser, rounds=(5, "rounds"), divisor=(1, "measure only one of so many texts"))
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds of all threads")
    parser.add_argument("--peers", nargs="*", default=list(_PEERS), choices=list(_PEERS))


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    results: dict[str, str] = {}
    own = {"dtype": args.dtype, "quantization": args.quantization, "max_model_len": _MAX_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), args)
        with LLM(folder, **own) as llm:
            kinds = {"tpengine": partial(llm.embed, use_tqdm=False), **_make_peers(folder, args)}
            for name in _TEXTS:
                results |= _compare(name, kinds, args)
    print(report_head(EngineArgs(folder, **own), results, 48))
    return 0


def _make_peers(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """The other engines by name; prints which are not here, and why."""
    peers = {}
    for name in args.peers:
        try:
            peers[name] = _PEERS[name](folder, args)
        except (ImportError, pytest.skip.Exception) as reason:
            print(f"NOT MEASURED: {name} is not here: {reason}")
    return peers


def _compare(name: str, kinds: dict[str, Any], args: argparse.Namespace) -> dict[str, str]:
    """Texts per second of each; of each other one the ratio, and the least cosine of its vector of
    a text and ours."""
    vectors: dict[str, Any] = {}
    clock = time.process_time if args.cpu_time else time.perf_counter

    def measure(kind: str, number: int) -> float:
        texts = _make_texts(name, number, args.divisor)
        start = clock()
        vectors[kind] = kinds[kind](texts)
        return len(texts) / (clock() - start)

    measured = alternate(list(kinds), args.rounds, measure, warm_ups=1)
    results = {f"{kind}: {name}": median_of(rates, " texts/s") for kind, rates in measured.items()}
    vectors["tpengine"] = [output.outputs.embedding for output in vectors["tpengine"]]
    ours, *_ = tensors = [torch.as_tensor(made).double() for made in map(vectors.get, kinds)]
    for kind, theirs in list(zip(kinds, tensors, strict=True))[1:]:
        ratios = [a / b for a, b in zip(measured["tpengine"], measured[kind], strict=True)]
        results[f"tpengine / {kind}: {name}"] = median_of(ratios, "", 2)
        least = float(torch.cosine_similarity(ours, theirs).min())
        results[f"least cosine to {kind}: {name}"] = f"{least:.7f}"
    return results


def _make_texts(name: str, number: int, divisor: int) -> list[str]:
    """Other ones for each number."""
    count, least, most = _TEXTS[name]
    rng = random.Random(f"{name}:{number}")
    lengths = [rng.randint(least, most) for _ in range(count // divisor)]
    return [" ".join(f"w{rng.randrange(_NUM_WORDS)}" for _ in range(length)) for length in lengths]


def _sentence_transformers(folder: str, args: argparse.Namespace) -> Any:
    from sentence_transformers import SentenceTransformer

    options = {"dtype": getattr(torch, args.dtype)}
    model = SentenceTransformer(folder, device="cpu", model_kwargs=options)
    return lambda texts: model.encode(texts, batch_size=32, convert_to_tensor=True).float()


def _fastembed(folder: str, args: argparse.Namespace) -> Any:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    if args.dtype != "float32":
        pytest.skip("ONNX Runtime multiplies no bfloat16 on a CPU")
    model = transformers.AutoModel.from_pretrained(folder, use_cache=False).eval()
    ids = torch.ones(2, 8, dtype=torch.int64)
    # A mask of ones alone would be left out of the graph.
    example = {"input_ids": ids, "attention_mask": ids.tril(5)}
    sizes = dict.fromkeys(example, dict.fromkeys(range(2), torch.export.Dim.DYNAMIC))
    options: dict[str, Any] = {"dynamic_shapes": sizes, "output_names": ["hidden"]}
    torch.onnx.export(model, (), f"{folder}/model.onnx", kwargs=example, **options)
    pooling = {"mean": PoolingType.MEAN, "last": PoolingType.LAST_TOKEN}[_SHAPES[args.shape][0]]
    files = {"sources": ModelSource(hf=folder), "model_file": "model.onnx", "output_name": "hidden"}
    TextEmbedding.add_custom_model(folder, pooling, True, dim=model.config.hidden_size, **files)
    theirs = TextEmbedding(folder, specific_model_path=folder, threads=torch.get_num_threads())
    return lambda texts: torch.stack([*map(torch.from_numpy, theirs.embed(texts, batch_size=32))])


def _llama_cpp(folder: str, args: argparse.Namespace) -> Any:
    from llama_cpp import Llama

    path = f"{folder}/model.gguf"
    convert_to_gguf(folder, path, {"float32": "f32", "bfloat16": "bf16"}[args.dtype])
    sizes = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), 2048)
    sizes |= dict.fromkeys(("n_threads", "n_threads_batch"), torch.get_num_threads())
    llama = Llama(path, embedding=True, verbose=False, **sizes)
    words = Tokenizer.from_file(f"{folder}/tokenizer.json")  # the file has none
    llama.tokenize = lambda text: words.encode(text.decode()).ids
    return lambda texts: llama.embed(texts, normalize=True)


_PEERS: dict[str, Callable[[str, argparse.Namespace], Any]] = {
    "sentence-transformers": _sentence_transformers,
    "fastembed": _fastembed,
    "llama.cpp": _llama_cpp,
}
"""By name: what loads the model in a folder, and embeds texts with it."""


def _write(folder: Path, args: argparse.Namespace) -> None:
    pooling, fields = _SHAPES[args.shape]
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModel.from_config(config, dtype=getattr(torch, args.dtype))
    model.save_pretrained(folder)
    write_modules(folder, pooling)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = specials + [f"w{number}" for number in range(_NUM_WORDS)]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", model_max_length=_MAX_TOKENS
    ).save_pretrained(folder)
