"""The program of a rank that notes when it computes each step, for a picture: it writes a line
`number begin end`, in seconds of the machine's clock, into the folder that STEP_TIMES names."""

from __future__ import annotations

import os
import time
from typing import Any

from tpengine import envs
from tpengine.executor.launch import rank_process
from tpengine.executor.rank import Rank


def note_times() -> None:
    """Makes each step write its line; its begin is when it has its hidden states."""
    from tpengine.worker.model_runner import ModelRunner
    from tpengine.worker.stage_ends import StageEnds

    execute, receive = ModelRunner.execute, StageEnds.receive
    begun = [0.0]
    file = open(f"{os.environ['STEP_TIMES']}/{os.getpid()}", "w")  # noqa: SIM115 (until the end)

    def timed_receive(self: StageEnds, num_tokens: int) -> Any:
        hidden = receive(self, num_tokens)
        begun[0] = time.perf_counter()
        return hidden

    def timed_execute(self: ModelRunner, step: Any) -> Any:
        outputs = execute(self, step)
        print(step.step, begun[0], time.perf_counter(), file=file, flush=True)
        return outputs

    ModelRunner.execute, StageEnds.receive = timed_execute, timed_receive  # type: ignore[method-assign]


if __name__ == "__main__":
    envs.tune_openmp_spinning()
    note_times()
    rank_process.main(Rank())
