"""Answers with and without drafts, on ten prompts that were fixed before drafts were tuned.

Each answer is made without drafts, with `[ngram]` and with `[suffix]`, in turn, in engines of one
process. The tokens must be equal. Times are of whole answers, prompt included, and of the tokens
after the first. Between rounds the earlier outputs are forgotten, so that no answer is drafted from
itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from support.foretold import totals
from support.tables import read_table

from benchmarks.common import add_numbers, add_shape_argument, alternate
from benchmarks.peer_files import SMOLLM2, ModelFiles
from tpengine import LLM, EngineArgs, RequestOutput, SamplingParams, StructuredOutputsParams
from tpengine.bench.harness import report_head, shape_folder
from tpengine.scheduling.drafter import Drafter, Guess
from tpengine.scheduling.sequence import Request, Sequence

KINDS = (None, "[ngram]", "[suffix]")
_CACHE_GIB = 1.0
_REPLAYED = 64
_NUM_FIXED = (1, 2, 4, 8, 0)
_GRAM = 8


@dataclass(slots=True)
class Answer:
    """The tokens of all turns, and the times.

    Attributes:
        is_natural: each turn ended by itself, and has no 8-gram three times.
    """

    token_ids: list[int]
    whole_s: float
    decode_s: float
    is_natural: bool
    num_drafted: int
    num_accepted: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--form", choices=["stored", "BF16"], default="stored")
    parser.add_argument("--only", help="part of the name of a prompt")
    text = "instead: random weights, and drafts of which each is right with such a chance, as 0,0.8"
    parser.add_argument("--acceptance", type=lambda t: [float(a) for a in t.split(",")], help=text)
    add_shape_argument(parser)
    parser.add_argument("--quantization")
    add_numbers(parser, rounds=(5, "rounds"), streams=(1, "answers at once, of all prompts"))
    parser.add_argument("--options", type=json.loads, default={}, help="of the engines, as JSON")


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    if args.acceptance is not None:
        return _run_replay(args)
    cases = [
        case
        for case in read_table("lookahead_prompts")
        if not args.only or args.only in case["name"]
    ]
    model = str(ModelFiles(SMOLLM2).gguf(args.form))
    with ExitStack() as stack:
        engines = {kind: stack.enter_context(_engine(model, kind, args.options)) for kind in KINDS}
        print(report_head(EngineArgs(model), {"model": f"{SMOLLM2} {args.form}"}))
        if args.streams > 1:
            _run_crowd(engines, cases, args)
        else:
            _run_alone(engines, cases, args)
    return 0


@contextmanager
def _engine(model: str, kind: str | None, fields: dict[str, Any]) -> Iterator[LLM]:
    options = {"speculative_model": kind, **fields} if kind else {}
    options |= {"cpu_kv_cache_space": _CACHE_GIB, "enable_prefix_caching": False}
    with LLM(model, disable_log_stats=True, **options) as llm:
        yield llm


def _run_alone(
    engines: dict[str | None, LLM], cases: list[dict[str, Any]], args: argparse.Namespace
) -> None:
    ratios: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS if kind}
    for case in cases:

        def measure(kind: str | None, number: int, case: dict[str, Any] = case) -> Answer:
            return _answer(engines[kind], case, args.form, number)

        measured = alternate(KINDS, args.rounds, measure, warm_ups=1)
        base = measured[None]
        assert all(a.token_ids == base[0].token_ids for own in measured.values() for a in own)
        rate = statistics.median(len(a.token_ids) / a.decode_s for a in base)
        mark = "" if base[0].is_natural else "  (NOT NATURAL)"
        print(f"{case['name']:<24} {len(base[0].token_ids):>4} tokens {rate:6.1f}/s{mark}", end="")
        for kind in ratios:
            own = measured[kind]
            pairs = list(zip(own, base, strict=True))
            whole = statistics.median(b.whole_s / a.whole_s for a, b in pairs)
            decode = statistics.median(b.decode_s / a.decode_s for a, b in pairs)
            ratios[kind].append((decode, whole))
            drafted, accepted = own[-1].num_drafted, own[-1].num_accepted
            share = f"{accepted}/{drafted}"
            print(f"   {kind} {decode:.2f} ({whole:.2f}) {share:>8}", end="")
        print(flush=True)
    for kind, pairs in ratios.items():
        decode, whole = (statistics.geometric_mean(part) for part in zip(*pairs, strict=True))
        print(f"{kind} geometric mean {decode:.3f}, of whole answers {whole:.3f}")
    decodes = [[decode for decode, _ in pairs] for pairs in ratios.values()]
    best = [max(own) for own in zip(*decodes, strict=True)]
    print(f"the better one: {statistics.geometric_mean(best):.3f}, least {min(best):.2f}")


def _answer(llm: LLM, case: dict[str, Any], form: str, number: int) -> Answer:
    """One conversation."""
    _forget(llm)
    before = _counts(llm)
    params = _params(case, form, max_tokens=600)
    messages: list[Any] = []
    token_ids, is_natural, whole_s, decode_s = list[int](), True, 0.0, 0.0
    for turn in case["turns"]:
        messages.append({"role": "user", "content": turn})
        start = time.perf_counter()
        (output,) = llm.chat([messages], params, use_tqdm=False)
        whole_s += time.perf_counter() - start
        (answer,) = output.outputs
        decode_s += _decode_s(output)
        messages.append({"role": "assistant", "content": answer.text})
        token_ids += answer.token_ids
        is_natural = is_natural and answer.finish_reason == "stop" and _varies(answer.token_ids)
    after = _counts(llm)
    return Answer(
        token_ids, whole_s, decode_s, is_natural, after[0] - before[0], after[1] - before[1]
    )


def _params(case: dict[str, Any], form: str, **fields: int) -> SamplingParams:
    """How a prompt is answered."""
    schema = case.get("schema")
    grammar = None if schema is None else StructuredOutputsParams(json=schema)
    return SamplingParams(structured_outputs=grammar, **case["sampling"][form] | fields)


def _decode_s(output: RequestOutput) -> float:
    """From the first token to the last."""
    return output.metrics.last_token_time - output.metrics.first_token_time


def _forget(llm: LLM) -> None:
    """Earlier outputs, from which it would draft."""
    drafter = llm.llm_engine._scheduler.drafter
    if drafter is not None and drafter._earlier is not None:
        drafter._earlier.clear()


def _counts(llm: LLM) -> tuple[int, int]:
    drafter = llm.llm_engine._scheduler.drafter
    return (0, 0) if drafter is None else totals(drafter)


def _varies(ids: list[int]) -> bool:
    grams = Counter(tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1))
    return max(grams.values(), default=0) < 3


def _run_crowd(
    engines: dict[str | None, LLM], cases: list[dict[str, Any]], args: argparse.Namespace
) -> None:
    """Many answers at once: all prompts of one turn, again and again with other seeds."""
    requests = []
    for number in range(args.streams):
        case = cases[number % len(cases)]
        message = [{"role": "user", "content": case["turns"][0]}]
        requests.append((message, _params(case, args.form, max_tokens=200, seed=number)))

    def measure(kind: str | None, number: int) -> tuple[float, list[list[int]]]:
        llm = engines[kind]
        _forget(llm)
        start = time.perf_counter()
        outputs = llm.chat([m for m, _ in requests], [p for _, p in requests], use_tqdm=False)
        return time.perf_counter() - start, [o.outputs[0].token_ids for o in outputs]

    measured = alternate(KINDS, args.rounds, measure, warm_ups=1)
    base = measured[None]
    tokens = sum(map(len, base[0][1]))
    print(f"{args.streams} streams: {tokens / statistics.median(s for s, _ in base):.1f} tokens/s")
    for kind in KINDS[1:]:
        assert all(ids == base[0][1] for _, ids in measured[kind]), "other tokens"
        pairs = zip(base, measured[kind], strict=True)
        ratios = sorted(b[0] / a[0] for b, a in pairs)
        counts = _counts(engines[kind])
        print(
            f"{kind} {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) {counts}"
        )


class _Replay(Drafter):
    """Guesses known tokens, each of them right with a set chance.

    Attributes:
        acceptance: the chance.
        num_fixed: drafts in each step; 0: as many as are worth it.
    """

    acceptance = 0.0
    num_fixed = 0
    answer: tuple[int, ...] = ()

    def begin_step(self, num_sequences: int) -> bool:
        return super().begin_step(num_sequences) or self.num_fixed > 0

    def draft(self, request: Request, sequence: Sequence, most: int) -> list[Guess]:
        worth = super().draft(request, sequence, most)
        guesses = self._guesses(request, sequence, self._texts[sequence.seq_id])
        return list(islice(guesses, min(most, self.num_fixed))) if self.num_fixed else worth

    def _guesses(self, request: Request, sequence: Sequence, text: object) -> Iterator[Guess]:
        start = sequence.num_output_tokens
        known = self.answer[start : start + self._config.num_speculative_tokens]
        chances = (random.Random(start + place).random() for place in range(len(known)))
        for place, (token_id, chance) in enumerate(zip(known, chances, strict=True), start=1):
            is_right = chance < self.acceptance
            yield Guess(token_id if is_right else abs(token_id - 1), "replayed", place)


def _run_replay(args: argparse.Namespace) -> int:
    """One stream of random weights."""
    fields = {"load_format": "dummy", "quantization": args.quantization, "max_model_len": 1024}
    fields |= {"cpu_kv_cache_space": _CACHE_GIB, "skip_tokenizer_init": True}
    fields |= {"disable_log_stats": True, "speculative_model": "[ngram]"}
    params = SamplingParams(temperature=0.0, max_tokens=_REPLAYED, ignore_eos=True)
    prompt = list(range(10, 10 + _REPLAYED))
    with shape_folder(args.shape, 1024) as folder, LLM(str(folder), **fields) as llm:
        engine = llm.llm_engine
        lookahead = engine.get_scheduler_config().lookahead
        drafter = engine._scheduler._queues.drafter = _Replay(lookahead)
        print(report_head(EngineArgs(str(folder), **fields), {"model": args.shape}))

        def measure(kind: tuple[float, int], number: int) -> float:
            drafter.acceptance, drafter.num_fixed = kind
            (output,) = llm.generate(None, params, [prompt], use_tqdm=False)
            drafter.answer = output.outputs[0].token_ids
            return _decode_s(output)

        plain = (-1.0, 0)
        kinds = [plain, *((a, n) for a in args.acceptance for n in _NUM_FIXED)]
        drafter.answer = ()
        measured = alternate(kinds, args.rounds, measure, warm_ups=1)
        rate = _REPLAYED / statistics.median(measured[plain])
        print(f"without drafts {rate:.1f} tokens/s")
        for acceptance, number in kinds[1:]:
            pairs = zip(measured[plain], measured[acceptance, number], strict=True)
            ratio = statistics.median(without / own for without, own in pairs)
            drafts = f"{number} drafts" if number else "as many as are worth it"
            print(f"acceptance {acceptance:.2f}, {drafts:<24} {ratio:.2f}")
    return 0
