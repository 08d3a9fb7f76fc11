"""What ranks do to themselves on purpose, whoever starts them: picklable, and without Ray."""

from __future__ import annotations

import base64
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tpengine.executor.launch import rank_process
from tpengine.executor.rank import Rank

Sabotage = Callable[[Any], None]
"""Changes the module `tpengine.worker.worker` in the process of one rank."""
VARIABLE = "TPENGINE_TEST_SABOTAGE"
"""(rank, or None for all; sabotage), pickled, for processes without Ray."""
RANK_VARIABLE = "TPENGINE_TEST_RANK"
"""The rank of such a process."""


def harm(target: Rank, rank: int | None, sabotage: Sabotage) -> None:
    """Called in a rank when its worker is made."""
    if rank in (None, target._rank):
        import tpengine.worker.worker as module

        sabotage(module)


class SabotagedProcess(Rank):
    """A rank that is not Ray's."""

    def create(self, *args: Any) -> bool:
        is_kept = super().create(*args)
        os.environ[RANK_VARIABLE] = str(self._rank)
        harm(self, *read(os.environ[VARIABLE]))
        return is_kept


def write(rank: int | None, sabotage: Sabotage) -> str:
    return base64.b64encode(pickle.dumps((rank, sabotage))).decode()


def read(text: str) -> tuple[int | None, Sabotage]:
    rank, sabotage = pickle.loads(base64.b64decode(text))
    return rank, sabotage


def missing_rank(module: Any) -> None:
    """A rank's report that another one is missing, without its number."""

    def connect(*_: Any) -> None:
        from tpengine.errors import RendezvousError
        from tpengine.logger import init_logger

        init_logger("tpengine.worker.worker").warning("only this rank is here")
        raise RendezvousError("a rank did not come")

    module.Worker.connect = connect


def killed_with_its_segment(module: Any) -> None:
    """Rank 0's end when it has made the memory that ranks share, and no other has opened it."""

    def connect(_: Any, rendezvous: Any) -> None:
        from tpengine.distributed.shared_memory import CAPACITY_BYTES, make_segment

        make_segment(2, CAPACITY_BYTES)
        kill_self()

    module.Worker.connect = connect


def in_steps(is_due: Callable[[Any], bool], action: Callable[[], None], module: Any) -> None:
    """Does something when a step of this kind begins."""
    execute_model = module.Worker.execute_model

    def sabotaged(self: Any, step: Any) -> Any:
        if is_due(step):
            action()
        return execute_model(self, step)

    module.Worker.execute_model = sabotaged


def in_step(number: int, action: Callable[[], None]) -> Sabotage:
    """Does something when a step begins."""
    return partial(in_steps, partial(_has_number, number), action)


def _has_number(number: int, step: Any) -> bool:
    return bool(step.step == number)


def die_of(token_id: int) -> Sabotage:
    """No rank survives a sequence with this token in its prompt."""
    return partial(in_steps, partial(_holds, token_id), exit_with_7)


def _holds(token_id: int, step: Any) -> bool:
    prompts = [new.token_ids[: new.num_prompt_tokens] for new in step.new_sequences]
    return any(token_id in prompt for prompt in prompts)


def fail_with_a_line() -> None:
    """An exception of no type of ours, after a line in the log."""
    logging.getLogger("tpengine.worker").warning("the disk makes a noise")
    raise ZeroDivisionError("cannot read block 17")


def die_with_a_word() -> None:
    """The process is gone, with a last word on its standard error."""
    os.write(2, b"these are my last words\n")
    kill_self()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(10.0)  # another thread may stop first, and this one go on for a moment


def raise_something() -> None:
    raise ZeroDivisionError("no remainder")


def exit_with_7() -> None:
    os.write(2, b"this is the end\n")
    os._exit(7)


def sleep_long() -> None:
    """Heartbeats go on, the step does not."""
    time.sleep(60.0)


def in_load(action: Callable[[], None]) -> Sabotage:
    """Does something when the weights are about to be loaded."""
    return partial(_in_load, action)


def _in_load(action: Callable[[], None], module: Any) -> None:
    load_model = module.load_model

    def sabotaged(*args: Any) -> Any:
        action()
        return load_model(*args)

    module.load_model = sabotaged


if __name__ == "__main__":
    rank_process.main(SabotagedProcess())
