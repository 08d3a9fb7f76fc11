"""Embeddings of 512 short and 64 long texts beside sentence-transformers, in alternated rounds.

Weights are random, of the shape of BERT-base (mean of all tokens) or of Qwen3-Embedding-0.6B (last
token). Short texts have 8 to 32 tokens, long ones 256 to 512. Times count from texts to vectors.
Without sentence-transformers only tpengine is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from support.pooling_models import write_modules
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from benchmarks.common import add_numbers, alternate
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
_NUM_WORDS = 30_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--shape", choices=list(_SHAPES), default="bert-base")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="of tpengine's side")
    add_numbers(parser, rounds=(5, "rounds"))


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    results: dict[str, str] = {}
    own = {"dtype": args.dtype, "quantization": args.quantization}
    own["max_model_len"] = 512 if args.shape == "bert-base" else 1024
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), args)
        with LLM(folder, **own) as llm:
            kinds = {"tpengine": lambda texts: _ours(llm, texts)}
            if importlib.util.find_spec("sentence_transformers"):
                kinds["sentence-transformers"] = _sentence_transformers(folder, args.dtype)
            for name in _TEXTS:
                results |= _compare(name, kinds, args.rounds)
    print(report_head(EngineArgs(folder, **own), results, 48))
    return 0


def _compare(name: str, kinds: dict[str, Any], rounds: int) -> dict[str, str]:
    """Texts per second of each, the ratio, and the least cosine of two vectors of a text."""
    vectors: dict[str, Any] = {}

    def measure(kind: str, number: int) -> float:
        texts = _make_texts(name, number)
        start = time.perf_counter()
        vectors[kind] = kinds[kind](texts)
        return len(texts) / (time.perf_counter() - start)

    measured = alternate(list(kinds), rounds, measure, warm_ups=1)
    results = {f"{kind}: {name}": median_of(rates, " texts/s") for kind, rates in measured.items()}
    if len(kinds) == 2:
        ours, theirs = measured.values()
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        results[f"{' / '.join(kinds)}: {name}"] = median_of(ratios, "", 2)
        first, second = (torch.as_tensor(made).double() for made in vectors.values())
        least = float(torch.cosine_similarity(first, second).min())
        results[f"least cosine: {name}"] = f"{least:.7f}"
    return results


def _make_texts(name: str, number: int) -> list[str]:
    """Other ones for each number."""
    count, least, most = _TEXTS[name]
    rng = random.Random(f"{name}:{number}")
    lengths = [rng.randint(least, most) for _ in range(count)]
    return [" ".join(f"w{rng.randrange(_NUM_WORDS)}" for _ in range(length)) for length in lengths]


def _ours(llm: LLM, texts: list[str]) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def _sentence_transformers(folder: str, dtype: str) -> Any:
    from sentence_transformers import SentenceTransformer

    options = {"torch_dtype": getattr(torch, dtype)}
    model = SentenceTransformer(folder, device="cpu", model_kwargs=options)
    return lambda texts: model.encode(texts, batch_size=32, convert_to_tensor=True).float()


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
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
