"""How long a step may take before its ranks count as stuck, though they beat."""

from __future__ import annotations

_PATIENCE = 10.0
"""Of the time that its tokens should take."""
_MEMORY = 0.95
"""Weight of all steps before, against the latest."""


class StepDeadline:
    """The least deadline, or ten times what a step of so many tokens should take if that is more.

    Args:
        least_s: no step has less time than this.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._tokens = 0.0
        self._seconds = 0.0

    def of(self, num_tokens: int) -> float:
        """Seconds for a step of `num_tokens` tokens."""
        if not self._tokens:
            return self._least_s
        predicted_s = num_tokens * self._seconds / self._tokens
        return max(self._least_s, _PATIENCE * predicted_s)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns how long a step took."""
        self._tokens = _MEMORY * self._tokens + num_tokens
        self._seconds = _MEMORY * self._seconds + seconds
