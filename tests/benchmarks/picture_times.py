"""Prompts with pictures, on random weights of SmolVLM-256M's shape, in alternated rounds.

16 requests about 4 new pictures in tpengine and in transformers, as one batch with padding on the
left, which computes features for each request; two questions about a new picture, with and without
prefix cache; and 4 text streams, alone and while a new picture arrives each second. Times are in
seconds, begin before the first request is added, and include the image processor's; of the 16
first tokens the mean counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from timeit import timeit
from typing import Any
from unittest import mock

import torch
import transformers
from support.byte_llama import write_tokenizer
from support.engines import greedy
from support.whole_models import ADDED, IMAGE, picture, serve_prompts, write_whole
from tokenizers import AddedToken

from benchmarks.common import add_numbers, alternate
from tpengine import LLMEngine
from tpengine.bench.harness import SHAPES, median_of, report_head
from tpengine.engine_args import EngineArgs
from tpengine.models.vision_tower import VisionTower

_TEXT = SHAPES["smollm2-135m"] | {"vocab_size": 49280, "tie_word_embeddings": False}
_TEXT |= {"head_dim": 64, "initializer_range": 0.02}
_SIGHT = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_SIGHT |= {"num_hidden_layers": 12, "patch_size": 16, "image_size": 512}
_ADDED = dict.fromkeys([*ADDED, *(f"<row_{i // 4 + 1}_col_{i % 4 + 1}>" for i in range(16))])
_PERIOD_S, _STREAMS_S = 1, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    text = "cut a picture into 16 tiles, and the whole, as SmolVLM does; else it is one tile"
    parser.add_argument("--split", action="store_true", help=text)
    add_numbers(parser, tokens=(32, "output tokens of each of the 16"), rounds=(5, "rounds"))


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    results = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        theirs = _write_model(Path(folder), args)
        sides = [EngineArgs(folder, dtype=args.dtype, cpu_kv_cache_space=1.0) for _ in range(2)]
        sides[0].enable_prefix_caching, sides[0].encoder_share = False, 1.0  # as `LLM`
        plain, ours = (stack.enter_context(LLMEngine.from_engine_args(own)) for own in sides)
        ids = [o.prompt_token_ids for o in serve_prompts(plain, _questions(0), [greedy(1)] * 16)]
        kinds = {
            "transformers": lambda n: _generate(theirs, ids, n, args.tokens),
            "tpengine": lambda n: _serve(plain, n + 50, args.tokens),
            "no prefix cache": lambda n: _ask_twice(plain, n + 100),
            "prefix cache": lambda n: _ask_twice(ours, n + 200),
            "streams alone": lambda n: _stream(ours, []),
            "streams beside pictures": lambda n: _stream(ours, _pictures(n + 300, _STREAMS_S)),
        }
        for pair in zip(list(kinds)[::2], list(kinds)[1::2], strict=True):
            measured = alternate(pair, args.rounds, lambda kind, n: kinds[kind](n), warm_ups=1)
            for name in measured[pair[0]][0]:
                each = {kind: [kept[name] for kept in measured[kind]] for kind in pair}
                results |= {f"{kind}: {name}": median_of(each[kind], "", 3) for kind in pair}
                ratios = [b / a for a, b in zip(*each.values(), strict=True)]
                results["{1} / {0}: {2}".format(*pair, name)] = median_of(ratios, "")
    print(report_head(sides[1], results, 56))
    return 0


def _write_model(folder: Path, args: argparse.Namespace) -> tuple[Any, Any]:
    """Returns transformers' model and image processor."""
    fields = {"image_token_id": IMAGE, "scale_factor": 4}
    model = write_whole(folder, "smolvlm", _SIGHT, _TEXT, **fields).to(getattr(torch, args.dtype))
    size, tile = {"longest_edge": 2048 if args.split else 512}, {"longest_edge": 512}
    options = {"size": size, "max_image_size": tile, "do_image_splitting": args.split}
    processor = transformers.SmolVLMImageProcessorPil(**options)
    processor.save_pretrained(folder)
    write_tokenizer(folder, *(AddedToken(token, special=True) for token in _ADDED))
    return model.eval(), processor


def _pictures(number: int, count: int) -> list[Any]:
    """Other ones for each number."""
    return [picture(100 * (number + 1) + i, 512, 512) for i in range(count)]


def _question(number: int, *images: Any) -> tuple[list[int], list[Any]]:
    """16 to 31 tokens, behind the placeholder of a picture or without one."""
    words = [300 + (97 * number + 7 * place) % 40_000 for place in range(16 + 5 * number % 16)]
    return [1, *[IMAGE] * len(images), *words], list(images)


def _questions(number: int) -> list[tuple[list[int], list[Any]]]:
    return [_question(i, image) for i, image in enumerate(_pictures(number, 4) * 4)]


def _speeds(first_s: float, total_s: float, num_tokens: int) -> dict[str, float]:
    return {"first token": first_s, "all": total_s, "tokens/s": 16 * num_tokens / total_s}


def _generate(theirs: Any, prompts: list[Any], number: int, num_tokens: int) -> dict[str, float]:
    """All questions in transformers; the prompts have the tokens that stand for pictures."""
    (model, processor), images = theirs, [images for _, images in _questions(number)]
    times, length = [time.perf_counter()], max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(own)) + own for own in prompts])
    inputs = dict(processor(images=images, return_tensors="pt", input_data_format="channels_last"))
    inputs |= {"input_ids": ids, "attention_mask": (ids != 0).int(), "pad_token_id": 0}
    note = [lambda _, scores: times.append(time.perf_counter()) or scores]  # for each token
    model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, logits_processor=note)
    return _speeds(times[1] - times[0], time.perf_counter() - times[0], num_tokens)


def _serve(engine: LLMEngine, number: int, num_tokens: int) -> dict[str, float]:
    """All questions in tpengine."""
    prompts, start = _questions(number), time.time()
    outputs = serve_prompts(engine, prompts, [greedy(num_tokens)] * 16)
    total_s, metrics = time.time() - start, [output.metrics for output in outputs]
    return _speeds(
        statistics.mean(m.first_token_time - start for m in metrics), total_s, num_tokens
    )


def _ask_twice(engine: LLMEngine, number: int) -> dict[str, float]:
    """Two questions about a picture, one after the other, of which only the first tokens count."""
    prompts, tower = [_question(i, *_pictures(number, 1)) for i in (1, 2)], VisionTower.features
    with mock.patch.object(VisionTower, "features", autospec=True, side_effect=tower) as calls:
        first_s, second_s = (
            timeit(lambda p=p: serve_prompts(engine, [p], [greedy(1)]), number=1) for p in prompts
        )
    assert calls.call_count == 1, "the features were computed twice"
    return {"first question": first_s, "second": second_s, "second / first": second_s / first_s}


def _stream(engine: LLMEngine, waiting: list[Any]) -> dict[str, float]:
    """4 text streams, beside which pictures arrive, each in a request of one output token."""
    times, arrivals = [time.perf_counter()], list(enumerate(waiting))

    def after_step() -> None:
        times.append(time.perf_counter())
        if times[-1] - times[0] > _STREAMS_S:
            engine.abort_request(map(str, range(4)))
        elif arrivals and times[-1] - times[0] > _PERIOD_S * arrivals[0][0]:
            number, image = arrivals.pop(0)
            ids, images = _question(0, image)
            inputs = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
            engine.add_request(f"picture {number}", inputs, greedy(1))

    outputs = serve_prompts(
        engine, [_question(i) for i in range(4)], [greedy(8000)] * 4, after_step
    )
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    seconds = next(at for at in times if at - times[0] > _STREAMS_S) - times[0]
    longest_s = max(b - a for a, b in pairwise(times) if b - times[0] <= _STREAMS_S)
    return {"tokens/s": num_tokens / seconds, "longest step": longest_s}
