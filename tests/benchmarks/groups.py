"""Several sequences of one prompt: one request with n against n separate requests.

Both sides generate the same number of tokens, in turn, with prefix caching off: the separate
requests compute the prompt n times and hold it n times, the group once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace

from tpengine.bench.harness import SHAPES, report_head, shape_folder
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.sampling_params import RequestOutputKind, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    parser.add_argument(
        "--n", type=int, default=8, help="sequences of the request (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, help="in the prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=16, help="of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="of each side, in turn (default: %(default)s)"
    )
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        default="llama-124m",
        help="dummy weights of this shape (default: %(default)s)",
    )
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    params = SamplingParams(
        temperature=1.0,
        max_tokens=args.output_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    group_rates, separate_rates, ratios = [], [], []
    with shape_folder(args.shape) as folder:
        engine_args = replace(
            EngineArgs.from_cli_args(args),
            model=folder,
            load_format="dummy",
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        with LLMEngine.from_engine_args(engine_args) as engine:
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
    print(report_head(EngineArgs.from_cli_args(args)))
    print(
        f"work                {args.shape}, {args.n} sequences of "
        f"{args.prompt_tokens} + {args.output_tokens} tokens, {args.runs} pairs"
    )
    print(f"one request, n      {statistics.median(group_rates):.1f} output tokens/s")
    print(f"separate requests   {statistics.median(separate_rates):.1f} output tokens/s")
    listed = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    print(f"ratio               {statistics.median(ratios):.2f}   (pairs: {listed})")
    print(f"most blocks held    {group_blocks} against {separate_blocks}")
    return 0


def random_prompt(engine: LLMEngine, num_tokens: int, seed: int) -> list[int]:
    """Uniform ids of the vocabulary."""
    rng, vocab_size = random.Random(seed), engine.get_model_config().vocab_size
    return [rng.randrange(5, vocab_size) for _ in range(num_tokens)]


def serve(
    engine: LLMEngine, prompt: list[int], params: SamplingParams, num_requests: int
) -> tuple[float, int]:
    """Serves equal requests together; returns seconds and the most blocks that were held."""
    start, most = time.perf_counter(), 0
    for index in range(num_requests):
        engine.add_request(str(index), None, params, prompt_token_ids=prompt)
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, engine.num_total_blocks - engine.num_free_blocks)
    return time.perf_counter() - start, most
