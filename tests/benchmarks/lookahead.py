"""Answers with and without drafts, on ten prompts that were fixed before drafts were tuned.

Each answer is made without drafts, with `[ngram]` and with `[suffix]`, in turn, in engines of one
process. The tokens must be equal. Times are of whole answers, prompt included, and of the tokens
after the first. Between rounds the earlier outputs are forgotten, so that no answer is drafted from
itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from support.foretold import totals
from support.tables import read_table
from tqdm import tqdm

from benchmarks.peer_files import SMOLLM2, ModelFiles
from tpengine import LLM, EngineArgs, SamplingParams, StructuredOutputsParams
from tpengine.bench.harness import report_head

KINDS = (None, "[ngram]", "[suffix]")
_CACHE_GIB = 1.0
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
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--options", type=json.loads, default={}, help="of the engines, as JSON")


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    cases = [
        case
        for case in read_table("lookahead_prompts")
        if not args.only or args.only in case["name"]
    ]
    model = str(ModelFiles(SMOLLM2).gguf(args.form))
    with ExitStack() as stack:
        engines = {kind: stack.enter_context(_engine(model, kind, args.options)) for kind in KINDS}
        print(report_head(EngineArgs(model), {"model": f"{SMOLLM2} {args.form}"}))
        _run_cases(engines, cases, args)
    return 0


def _engine(model: str, kind: str | None, fields: dict[str, Any]) -> LLM:
    options = {"speculative_model": kind, **fields} if kind else {}
    options |= {"cpu_kv_cache_space": _CACHE_GIB, "enable_prefix_caching": False}
    return LLM(model, disable_log_stats=True, **options)


def _run_cases(
    engines: dict[str | None, LLM], cases: list[dict[str, Any]], args: argparse.Namespace
) -> None:
    ratios: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS if kind}
    for case in cases:
        measured = {kind: list[Answer]() for kind in KINDS}
        for number in tqdm(range(-1, args.rounds), desc="rounds", unit="round"):  # -1: the warm-up
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                answer = _answer(engines[kind], case, args.form)
                measured[kind] += [answer] if number >= 0 else []
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


def _answer(llm: LLM, case: dict[str, Any], form: str) -> Answer:
    """One conversation, without the earlier outputs, from which it would be drafted."""
    drafter = llm.llm_engine._scheduler.drafter
    if drafter is not None and drafter._earlier is not None:
        drafter._earlier.clear()
    before, schema = _counts(llm), case.get("schema")
    grammar = None if schema is None else StructuredOutputsParams(json=schema)
    params = SamplingParams(structured_outputs=grammar, max_tokens=600, **case["sampling"][form])
    messages: list[Any] = []
    token_ids, is_natural, whole_s, decode_s = list[int](), True, 0.0, 0.0
    for turn in case["turns"]:
        messages.append({"role": "user", "content": turn})
        start = time.perf_counter()
        (output,) = llm.chat([messages], params, use_tqdm=False)
        whole_s += time.perf_counter() - start
        (answer,) = output.outputs
        decode_s += output.metrics.last_token_time - output.metrics.first_token_time
        messages.append({"role": "assistant", "content": answer.text})
        token_ids += answer.token_ids
        is_natural = is_natural and answer.finish_reason == "stop" and _varies(answer.token_ids)
    drafted, accepted = (now - then for now, then in zip(_counts(llm), before, strict=True))
    return Answer(token_ids, whole_s, decode_s, is_natural, drafted, accepted)


def _counts(llm: LLM) -> tuple[int, int]:
    drafter = llm.llm_engine._scheduler.drafter
    return (0, 0) if drafter is None else totals(drafter)


def _varies(ids: list[int]) -> bool:
    grams = Counter(tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1))
    return max(grams.values(), default=0) < 3
