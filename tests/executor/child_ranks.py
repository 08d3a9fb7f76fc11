"""A driver without Ray: `python child_ranks.py FOLDER`. Says the processes of its two ranks and the
ids that they generate, one JSON value per line; then it rests until it is killed."""

from __future__ import annotations

import json
import sys
import time

from support.engines import complete, greedy

from tpengine import EngineArgs, LLMEngine


def main() -> None:
    sys.modules["ray"] = None  # type: ignore[assignment]  # as if it were not installed
    args = {"dtype": "float32", "device": "cpu", "num_device_blocks_override": 64}
    engine = LLMEngine.from_engine_args(EngineArgs(sys.argv[1], tensor_parallel_size=2, **args))
    print(json.dumps([place.process for place in engine._executor.places]), flush=True)
    print(json.dumps(complete(engine, [5, 6, 7], greedy(16)).token_ids), flush=True)
    time.sleep(600.0)


if __name__ == "__main__":
    main()
