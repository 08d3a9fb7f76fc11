"""`tpengine serve` whose engine fails: at the step with this number, or while it is built.

python dying_server.py STEP OPTIONS...      STEP "start": its start never ends
                                            STEP "hang": its tenth step never ends
"""

from __future__ import annotations

import sys
import time

from tpengine.cli.main import main
from tpengine.engine import llm_engine
from tpengine.engine.llm_engine import LLMEngine
from tpengine.executor.executor import Executor

when, *options = sys.argv[1:]
step = LLMEngine._step
num_steps = 0


def failing_step(engine: LLMEngine) -> object:
    global num_steps
    num_steps += 1
    if when == "hang":
        if num_steps >= 10:
            print("the step hangs", flush=True)
            time.sleep(600)
    elif num_steps >= int(when):
        raise ZeroDivisionError("SECRET of the engine")
    return step(engine)


def endless_start(config: object, executor: Executor) -> None:
    shutdown = executor.shutdown

    def tell() -> None:
        shutdown()
        print("the ranks have ended", flush=True)

    executor.shutdown = tell  # type: ignore[method-assign]
    print("the ranks start", flush=True)
    time.sleep(600)


if when == "start":
    llm_engine.start_workers = endless_start  # type: ignore[assignment]
else:
    LLMEngine._step = failing_step  # type: ignore[assignment,method-assign]
sys.exit(main(["serve", *options]))
