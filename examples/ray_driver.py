"""Drives a model over several machines: run on the head of a Ray cluster, as by

    ray submit cluster/on_premises.yaml examples/ray_driver.py -- --tensor-parallel-size 2

Takes every option of the engine; without a model's name it uses the one that tpengine carries.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from tpengine import LLM, SamplingParams
from tpengine.engine_args import EngineArgs

PROMPTS = [
    "Hello, my name is",
    "The capital of France is",
    "Once upon a time",
    "My cat is called",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=48, help="(default: %(default)s)")
    parser.add_argument("--token-ids", action="store_true", help="print ids rather than text")
    EngineArgs.add_cli_args(parser)
    # A driver that is submitted has a cluster around it, and is to fail where there is none.
    parser.set_defaults(executor="ray", ray_address="auto", ray_placement_strategy="SPREAD")
    args = parser.parse_args()
    engine_args = replace(EngineArgs.from_cli_args(args), disable_log_stats=True)
    with LLM(**vars(engine_args)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            found = output.outputs[0]
            shown = list(found.token_ids) if args.token_ids else repr(found.text)
            print(f"{output.prompt!r} -> {shown}", flush=True)


if __name__ == "__main__":
    main()
