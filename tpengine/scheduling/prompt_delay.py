"""Lets waiting prompts gather, so that steps with prompts are fewer and larger.

Each step that computes prompts holds up the tokens of all running requests. With a factor f above 0
no waiting request is admitted, while others run, until the one that arrived first has waited longer
than f times as long as the latest step with prompts took. Then all are admitted that fit. This is
`scheduler_delay_factor` of vLLM 0.5.4 (`Scheduler._passed_delay`).
"""

from __future__ import annotations

from tpengine.scheduling.policy import SchedulingPolicy
from tpengine.scheduling.sequence import Request


class PromptDelay:
    """Decides whether waiting requests stay in their queue.

    Args:
        factor: 0: they never do.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._prompt_s = 0.0

    def note_prompts(self, seconds: float) -> None:
        """Notes how long a step with prompts took."""
        self._prompt_s = seconds

    def holds_back(self, waiting: SchedulingPolicy, running: list[Request], now: float) -> bool:
        """Whether no waiting request may be admitted now.

        Args:
            now: seconds of `time.time`, as arrival times are.
        """
        if not (self._factor and running and len(waiting)):
            return False
        earliest = min(request.metrics.arrival_time for request in waiting)
        return now - earliest <= self._factor * self._prompt_s
