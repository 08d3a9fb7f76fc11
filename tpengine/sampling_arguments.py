"""`SamplingParams` on a command line."""

from __future__ import annotations

import argparse

from tpengine.sampling_params import SamplingParams


def add_sampling_arguments(parser: argparse.ArgumentParser, seed_default: str) -> None:
    """Adds the options that a person at a terminal wants.

    Args:
        seed_default: where a prompt's seed comes from if none is given.
    """
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=100, help="most tokens to generate (default: %(default)s)"
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="how freely tokens are drawn; 0 takes the likeliest (default: %(default)s)",
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="draw from the likeliest tokens that reach this probability together, in (0, 1] "
        "(default: %(default)s)",
    )
    sampling.add_argument(
        "--top-k",
        type=int,
        default=-1,
        help="draw from so many likeliest tokens; -1: all (default: %(default)s)",
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="leave out tokens below this share of the likeliest one's probability, in [0, 1] "
        "(default: %(default)s)",
    )
    sampling.add_argument(
        "--sampling-seed",
        type=int,
        help=f"seed of each prompt; default: {seed_default}",
    )
    sampling.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends the output; may be repeated",
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's end token"
    )


def sampling_params_from(args: argparse.Namespace) -> SamplingParams:
    """What the options say.

    Raises:
        InvalidSamplingParamsError: a value is out of its range.
    """
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.sampling_seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
