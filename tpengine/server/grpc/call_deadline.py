"""Until when a call is to be answered.

gRPC's deadline ends a call on both sides in the same moment, so that what the server says of it is
lost as a rule. Our client names the deadline in the metadata too, and gives gRPC a later one.
"""

from __future__ import annotations

from typing import Any

TIMEOUT_KEY = "x-timeout-ms"
_MAX_DIGITS = 12


def remaining_s(context: Any) -> float | None:
    """Seconds until the call's deadline: gRPC's, or an earlier one of the metadata; None: none."""
    remaining: float | None = context.time_remaining()
    named = dict(context.invocation_metadata() or ()).get(TIMEOUT_KEY)
    if not isinstance(named, str) or not named.isdecimal() or len(named) > _MAX_DIGITS:
        return remaining
    own = int(named) / 1e3
    return own if remaining is None else min(own, remaining)
