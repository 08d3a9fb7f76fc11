"""`tpengine serve` whose engine fails: at the step with this number, or while it is built.

python dying_server.py STEP OPTIONS...      STEP "start": its start never ends
                                            STEP "hang": its tenth step never ends

It prints its ports as soon as it listens. After a second signal it has more time than a server to
tell its clients why it ends, as the machine may be loaded; it waits less for a step that hangs.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tpengine.cli.main import main
from tpengine.engine import llm_engine
from tpengine.executor.executor import Executor
from tpengine.scheduling.scheduler import Scheduler
from tpengine.server import lifecycle
from tpengine.server.grpc.server import GrpcServer
from tpengine.server.http.http_server import HttpServer

gc.unfreeze()  # what a template has frozen
when, *options = sys.argv[1:]
schedule = Scheduler.schedule
num_steps = 0


def announcing(listen: Callable[..., Awaitable[int]], words: str) -> Callable[..., Awaitable[int]]:
    async def start(*args: Any) -> int:
        port = await listen(*args)
        print(f"{words} {port}", flush=True)
        return port

    return start


def failing_schedule(scheduler: Scheduler, is_alone: bool = False) -> object:
    global num_steps
    num_steps += 1
    if when == "hang":
        if num_steps >= 10:
            print(f"the step hangs; objects frozen: {gc.get_freeze_count()}", flush=True)
            time.sleep(600)
    elif num_steps >= int(when):
        raise ZeroDivisionError("SECRET of the engine")
    return schedule(scheduler, is_alone)


def endless_start(config: object, executor: Executor) -> None:
    shutdown = executor.shutdown

    def tell() -> None:
        shutdown()
        print("the ranks have ended", flush=True)

    executor.shutdown = tell  # type: ignore[method-assign]
    print("the ranks start", flush=True)
    time.sleep(600)


signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
lifecycle._AT_ONCE_S, lifecycle._STEP_S, lifecycle._WRITE_S = 20.0, 0.5, 0.5
GrpcServer.start = announcing(GrpcServer.start, "the port is")  # type: ignore[method-assign]
HttpServer.start = announcing(HttpServer.start, "the HTTP port is")  # type: ignore[method-assign]
if when == "start":
    llm_engine.start_workers = endless_start  # type: ignore[assignment]
else:
    Scheduler.schedule = failing_schedule  # type: ignore[assignment,method-assign]
sys.exit(main(["serve", *options]))
