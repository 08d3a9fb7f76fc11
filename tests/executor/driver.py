"""A driver of its own process: `python driver.py FOLDER RAY_ADDRESS TP_SIZE WHAT`.

Prints the ranks' processes as JSON, then generates until it is killed, or once and ends.
"""

from __future__ import annotations

import json
import sys

import ray

from executor.ray_engines import executor_of, ray_engine
from tpengine import LLMEngine, SamplingParams
from tpengine.errors import EngineError


def go_on_without_ray(engine: LLMEngine, params: SamplingParams) -> str:
    """What the engine says of it."""
    engine.add_request("one", None, params, prompt_token_ids=[5, 6, 7])
    engine.step()
    ray.shutdown()
    try:
        while engine.has_unfinished_requests():
            engine.step()
    except EngineError as error:
        engine.shutdown()
        return str(error)
    return "nothing"


def main() -> None:
    folder, address, tp_size, what = sys.argv[1:]
    engine = ray_engine(folder, int(tp_size), ray_address=address)
    processes = [place.process for place in executor_of(engine).places]
    print(json.dumps(processes), flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    if what == "without ray":
        print(json.dumps([go_on_without_ray(engine, params), ray.is_initialized()]), flush=True)
        return
    number = 0
    while True:
        engine.add_request(str(number), None, params, prompt_token_ids=[5, 6, 7])
        while engine.has_unfinished_requests():
            outputs = engine.step()
        number += 1
        if what == "once":
            break
    print(json.dumps(outputs[-1].outputs[0].token_ids), flush=True)
    if what == "once":
        engine.shutdown()
        print(json.dumps(ray.is_initialized()), flush=True)


if __name__ == "__main__":
    main()
