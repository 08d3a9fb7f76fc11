"""Which requests pass the first waiting one while it has no room, and for how long.

When the first request finds no room (slots, blocks or a slot for its adapter), it gets a step by
which it starts: a + b. In step a enough of the running requests have reached their `max_tokens`
that the first has room; b is the number of steps that the first itself may run. If they end
earlier, a becomes smaller. A later request passes only if it has ended by step a + b. So small
requests use room that is too small for the first, which ends by step a + 2 b, where without them it
ends by a + b.

A request that was preempted is not passed: blocks are short, and it comes back first.

Steps are counted as if each advanced every running request. Where requests are preempted, prompts
share their steps, or a step does not hold a token for each of them, the first may start later, and
no request passes it after its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from tpengine.config import SchedulerConfig
from tpengine.scheduling.adapter_slots import AdapterSlots
from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.sequence import Request

MAX_LOOKED = 256
"""Waiting requests that are looked at in a step; bounds its time."""


class Passing:
    """Remembers until when waiting requests may be passed, as long as a group of workers lives.

    Args:
        config: the limits of a step and of a sequence.
        blocks: those of the workers' cache.
        adapters: who has slots for adapters.
        running: the requests that hold slots.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        adapters: AdapterSlots,
        running: Sequence[Request],
    ) -> None:
        self._config, self._blocks = config, blocks
        self._adapters, self._running = adapters, running
        # By the id of a first request: the step that has asked last, and what it was told.
        self._latest_starts: dict[str, tuple[int, int]] = {}
        # The first request, free slots and blocks of a search that found no request. With the same
        # first and no more of them, another search finds none until a request comes or goes.
        self._searched_with: tuple[Request, int, int] | None = None

    def choose(self, waiting: Iterable[Request], num_free_slots: int, step: int) -> Request | None:
        """The first request that passes the first of `waiting`, which has no room; None: none does.

        Args:
            step: number of the step that is being scheduled.
        """
        queue = iter(waiting)
        first = next(queue)
        if not num_free_slots or self._is_searched(first, num_free_slots):
            return None
        latest = self.latest_start(first, num_free_slots, step)
        if latest is None:
            return None
        for request in islice(queue, MAX_LOOKED):
            if (
                len(request.unfinished_sequences) <= num_free_slots
                and step + self.num_steps(request) <= latest
                and self._adapters.has_room(request, self._running)
                and self._blocks.num_missing_blocks(request) <= 0
            ):
                return request
        self._searched_with = first, num_free_slots, self._blocks.num_free_blocks
        return None

    def latest_start(self, first: Request, num_free_slots: int, step: int) -> int | None:
        """The step by which `first`, which has no room, starts; a request that passes it will have
        ended by then. None: no request passes it. See `choose`."""
        if first.metrics.num_preemptions:
            return None
        asked, before = self._latest_starts.get(first.request_id, (None, None))
        if asked == step:  # many ask in one step, and what passes does not change the answer
            return before
        room_at = step + self._steps_until_room(first, num_free_slots)
        latest = room_at + self.num_steps(first)
        latest = latest if before is None else min(latest, before)
        self._latest_starts[first.request_id] = step, latest
        return latest

    def note_arrival(self) -> None:
        """Notes that there is one more waiting request."""
        self._searched_with = None

    def forget(self, request: Request) -> None:
        """Forgets a request that has started or ended."""
        self._latest_starts.pop(request.request_id, None)
        self._searched_with = None

    def num_steps(self, request: Request) -> int:
        """Most steps until a request ends, if each computes all that it may of the request."""
        config = self._config
        most = 0
        for sequence in request.unfinished_sequences:
            num_left = sequence.max_num_tokens - sequence.num_tokens - sequence.num_in_flight
            most = max(most, num_left + sequence.num_behind // config.max_num_batched_tokens)
        return most

    def _is_searched(self, first: Request, num_free_slots: int) -> bool:
        if self._searched_with is None:
            return False
        searched_for, most_slots, most_blocks = self._searched_with
        is_no_more = num_free_slots <= most_slots and self._blocks.num_free_blocks <= most_blocks
        return is_no_more and first is searched_for

    def _steps_until_room(self, first: Request, num_free_slots: int) -> int:
        """Most steps until `first` has room, if no request had passed it."""
        blocks, running = self._blocks, self._running
        older = [other for other in running if other.arrival_index < first.arrival_index]
        passed = [other for other in running if other.arrival_index > first.arrival_index]
        num_slots = len(first.unfinished_sequences) - num_free_slots
        num_slots -= sum(len(other.unfinished_sequences) for other in passed)
        num_blocks = blocks.num_missing_blocks(first) - sum(map(blocks.num_held_blocks, passed))
        num_steps = 0
        order = sorted(((self.num_steps(other), other) for other in older), key=lambda p: p[0])
        for num_other_steps, other in order:
            if num_slots <= 0 and num_blocks <= 0 and self._adapters.has_room(first, older):
                break
            num_steps = num_other_steps
            older.remove(other)
            num_slots -= len(other.unfinished_sequences)
            num_blocks -= blocks.num_held_blocks(other)
        return num_steps
