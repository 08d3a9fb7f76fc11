"""A driver at the desk of several machines: `python machine_driver.py NUM_LOSSES`.

Prints JSON, a line each: at first and after each recovery the nodes of its ranks and the process of
each; before that, what the recovery was from. Between them it keeps streams going, and ends with an
error as soon as an answer is not what it was at first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tpengine import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from tpengine.executor.group_executor import GroupExecutor
from tpengine.executor.local_executor import create_executor

PROMPTS = ["Hello, my name is", "The capital of", "Once upon a time", "Two plus three is"]
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=64, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


class Streams:
    """One stream per prompt, and another when it has ended."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.expected: dict[int, list[int]] = {}
        self._open: dict[str, tuple[int, list[int]]] = {}
        self._number = 0

    def fill(self) -> None:
        there = {prompt for prompt, _ in self._open.values()}
        for prompt in set(range(len(PROMPTS))) - there:
            self._number += 1
            self.engine.add_request(str(self._number), PROMPTS[prompt], PARAMS)
            self._open[str(self._number)] = (prompt, [])

    def step(self) -> None:
        for output in self.engine.step():
            prompt, token_ids = self._open[output.request_id]
            token_ids += output.outputs[0].token_ids
            if output.finished:
                assert output.error is None, output.error
                assert len(token_ids) == PARAMS.max_tokens
                assert self.expected.setdefault(prompt, token_ids) == token_ids
                del self._open[output.request_id]

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()


def main() -> None:
    args = EngineArgs(
        tensor_parallel_size=2,
        executor="ray",
        ray_address="auto",
        dtype="float32",
        device="cpu",
        num_device_blocks_override=64,
        max_model_len=1024,
    )
    config, executor = create_executor(args)
    with LLMEngine(config, executor, log_stats=False) as engine:
        streams = Streams(engine)
        streams.fill()
        streams.finish()
        for number in range(int(sys.argv[1]) + 1):
            assert isinstance(executor, GroupExecutor)
            say({"ranks": [[place.address, place.pid] for place in executor.places]})
            if number == int(sys.argv[1]):
                break
            while engine.health().num_recoveries == number:
                streams.fill()
                streams.step()
            streams.finish()
            record = engine.recoveries[-1]
            say({"loss": str(record.loss), "ready_s": record.ready_s, "phases": record.phases_s})


if __name__ == "__main__":
    main()
