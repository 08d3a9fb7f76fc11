"""A driver of several ranks that serves eight streams whenever it is told to; tells how they went.

Its arguments: a model's folder, an executor, Ray's address and, as JSON, options of the engine.
With pipeline stages among these, the streams must be those of one process. Its input and output are
lines of JSON. It says the addresses and processes of its ranks when it is ready. For each line
`[moment, pace_s]` it serves the streams, a step every `pace_s` seconds. At the moment, `decode` or
`prefill`, it says its ranks again, and at last: how many streams were right, the longest gap in
seconds, the number of groups that were begun, with the lost rank alone replaced or all ranks new,
the error that ended the engine, and the last loss. At
the line `["end", 0]` it closes the engine, says "closed", and ends at the next line.
"""

from __future__ import annotations

import json
import math
import random
import sys
import threading
import time
from typing import Any

from executor.ray_engines import executor_of, rank_engine

from tpengine import LLMEngine, RequestOutputKind, SamplingParams

NUM_STREAMS = 8
NUM_TOKENS = 200
BEFORE = 10
"""Tokens of each stream before the moment of decoding."""
PREFILL_STEPS = 4
"""Steps before the moment of prefill, which takes 60."""
PROMPT_TOKENS = {"decode": 12, "prefill": 240}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 1},
]
STREAM = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
Streams = list[tuple[list[int], list[float]]]
"""Of each: its token ids and, where asked for, their log probabilities."""


def serve(engine: LLMEngine, moment: str, pace_s: float, tell_ranks: bool) -> tuple[Streams, float]:
    """Returns the streams, and the longest time that one of them had no token."""
    rng = random.Random(moment)
    streams: Streams = []
    for number in range(NUM_STREAMS):
        prompt = [rng.randrange(4, 500) for _ in range(PROMPT_TOKENS[moment])]
        params = SamplingParams(seed=number, **STREAM, **SAMPLING[number % len(SAMPLING)])
        engine.add_request(str(number), None, params, prompt_token_ids=prompt)
        streams.append(([], []))
    heard_at = [time.monotonic()] * NUM_STREAMS
    gap_s, num_steps = 0.0, 0
    while engine.has_unfinished_requests():
        next_at = time.monotonic() + pace_s
        for output in engine.step():
            number, completion = int(output.request_id), output.outputs[0]
            now = time.monotonic()
            gap_s = max(gap_s, now - heard_at[number])
            heard_at[number] = now
            streams[number][0].extend(completion.token_ids)
            entries = zip(completion.token_ids, completion.logprobs or (), strict=False)
            streams[number][1].extend(entry[token].logprob for token, entry in entries)
        num_steps += 1
        begun = min(len(ids) for ids, _ in streams) >= BEFORE
        if tell_ranks and (begun if moment == "decode" else num_steps >= PREFILL_STEPS):
            tell_ranks = False
            tell_of_ranks(engine)
        time.sleep(max(0.0, next_at - time.monotonic()))
    return streams, gap_s


def is_same(answer: tuple[list[int], list[float]], wanted: tuple[list[int], list[float]]) -> bool:
    pairs = zip(answer[1], wanted[1], strict=False)
    close = all(math.isclose(value, other, abs_tol=1e-3) for value, other in pairs)
    return answer[0] == wanted[0] and len(answer[1]) == len(wanted[1]) and close


def serve_all(engine: LLMEngine) -> dict[str, Streams]:
    """The streams of each moment, undisturbed."""
    return {moment: serve(engine, moment, 0.0, False)[0] for moment in PROMPT_TOKENS}


def main(
    folder: str, executor: str, ray_address: str, options: str = '{"tensor_parallel_size": 2}'
) -> None:
    # Without memory no thread can then start. Of small stacks glibc keeps some for later threads.
    threading.stack_size(64 << 20)
    args: dict[str, Any] = {"ray_address": ray_address} if executor == "ray" else {}
    batch = {"max_num_seqs": NUM_STREAMS, "max_num_batched_tokens": 32}
    args |= batch | {"max_recoveries": 10_000} | json.loads(options)
    tp_size, expected = args.pop("tensor_parallel_size", 1), {}
    if "pipeline_parallel_size" in args:
        with rank_engine(folder, 1, executor="local", **batch) as engine:
            expected = serve_all(engine)
    with rank_engine(folder, tp_size, executor=executor, **args) as engine:
        expected = expected or serve_all(engine)
        tell_of_ranks(engine)
        for line in sys.stdin:
            moment, pace_s = json.loads(line)
            if moment == "end":
                break
            before, epoch = len(engine.recoveries), engine.health().epoch
            try:
                streams, gap_s = serve(engine, moment, pace_s, True)
            except Exception as error:
                tell([0, 0.0, 0, f"{type(error).__name__}: {error}", ""])
                raise
            same = sum(map(is_same, streams, expected[moment]))
            losses = [str(record.loss) for record in list(engine.recoveries)[before:]]
            tell([same, gap_s, engine.health().epoch - epoch, "", *losses[-1:]])
    tell("closed")
    sys.stdin.readline()


def tell_of_ranks(engine: LLMEngine) -> None:
    tell([[place.address, place.pid] for place in executor_of(engine).places])


def tell(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
