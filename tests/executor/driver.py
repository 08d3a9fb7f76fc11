"""A driver of its own process: `python driver.py FOLDER RAY_ADDRESS TP_SIZE WHAT`.

Prints the ranks' processes as JSON, and generates: `for ever`, until it is killed; or `then without
ray`: it prints the ids, shuts Ray down in a step, and prints what the engine says and whether there
is a Ray.
"""

from __future__ import annotations

import json
import sys

import ray
from support.engines import complete, greedy, run

from executor.ray_engines import executor_of, ray_engine
from tpengine import LLMEngine
from tpengine.errors import EngineError

PROMPT, PARAMS = [5, 6, 7], greedy(32)


def go_on_without_ray(engine: LLMEngine) -> str:
    """What the engine says of it."""
    engine.add_request("last", None, PARAMS, prompt_token_ids=PROMPT)
    engine.step()
    ray.shutdown()
    try:
        run(engine)
    except EngineError as error:
        engine.shutdown()
        return str(error)
    return "nothing"


def main() -> None:
    folder, address, tp_size, what = sys.argv[1:]
    engine = ray_engine(folder, int(tp_size), ray_address=address)
    tell([place.process for place in executor_of(engine).places])
    ids = complete(engine, PROMPT, PARAMS).token_ids
    while what == "for ever":
        complete(engine, PROMPT, PARAMS)
    tell(ids)
    tell([go_on_without_ray(engine), ray.is_initialized()])


def tell(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
