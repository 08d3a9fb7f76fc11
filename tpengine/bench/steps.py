"""The steps of an engine, one by one."""

from __future__ import annotations

from collections.abc import Iterator

from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.stats import StepStats


def run_steps(engine: LLMEngine) -> Iterator[StepStats]:
    """Steps until nothing is left, and yields the figures of each step that computed something.

    A step that only reports (an abort, a request that cannot be served) leaves the figures of the
    one before in `last_step`, which must not be counted twice.
    """
    while engine.has_unfinished_requests():
        before = engine.last_step
        engine.step()
        if engine.last_step is not None and engine.last_step is not before:
            yield engine.last_step
