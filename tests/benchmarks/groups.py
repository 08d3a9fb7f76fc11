"""Several sequences of one prompt: one request with n against n separate requests.

Both sides generate the same number of tokens, in turn, with prefix caching off: the separate
requests compute the prompt n times and hold it n times, the group once.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.common import add_engine_arguments, add_numbers, dummy_model, random_prompt, serve
from tpengine.bench.harness import median_of, report_head
from tpengine.engine.llm_engine import LLMEngine
from tpengine.sampling_params import RequestOutputKind, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    add_numbers(
        parser,
        n=(8, "sequences of the request"),
        prompt_tokens=(512, "in the prompt"),
        output_tokens=(16, "of a sequence"),
        runs=(5, "of each side, in turn"),
    )
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    params = SamplingParams(
        temperature=1.0,
        max_tokens=args.output_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    group_rates, separate_rates, ratios = [], [], []
    with (
        dummy_model(args, enable_prefix_caching=False) as settings,
        LLMEngine.from_engine_args(settings) as engine,
    ):
        prompt = random_prompt(engine, args.prompt_tokens, seed=0)
        serve(engine, prompt, params, 2)
        group_blocks = separate_blocks = 0
        for _ in range(args.runs):
            group_s, group_blocks = serve(engine, prompt, replace(params, n=args.n), 1)
            separate_s, separate_blocks = serve(engine, prompt, params, args.n)
            num_tokens = args.n * args.output_tokens
            group_rates.append(num_tokens / group_s)
            separate_rates.append(num_tokens / separate_s)
            ratios.append(separate_s / group_s)
    results = {
        "work": f"{args.shape}, {args.n} sequences of {args.prompt_tokens} + {args.output_tokens} "
        f"tokens, {args.runs} pairs",
        "one request, n": median_of(group_rates, " output tokens/s", 1),
        "separate requests": median_of(separate_rates, " output tokens/s", 1),
        "ratio": median_of(ratios, ""),
        "most blocks held": f"{group_blocks} against {separate_blocks}",
    }
    print(report_head(settings, results))
    return 0
