"""Random tests that try the same examples in each run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SAME_EXAMPLES = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
