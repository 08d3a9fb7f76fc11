"""How many ranks the group has: fewer than were asked for while there is no room for all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from tpengine.config import EngineConfig, group_sizes

_SHARE_PER_SIZE = 0.1
"""Share of `recovery_timeout` in which attempts with one number of ranks may begin."""
_FIRST_LOOK_S, _LAST_LOOK_S = 30.0, 600.0
"""Between two looks for room, which double: the least and the most."""


class GroupSize:
    """Decides when a group goes on with fewer ranks, and when it gets all of them again.

    Args:
        look_for_room: starts to find out whether there is room for so many more ranks.

    Attributes:
        num_ranks: of the present group, or of the next one.
        num_wanted: as the user has asked for.
        look: the search for room that is running; None: no search runs.
    """

    def __init__(self, config: EngineConfig, look_for_room: Callable[[int], Future[bool]]) -> None:
        parallel = config.parallel
        self._sizes = group_sizes(parallel.world_size, parallel.min_ranks)
        self._patience_s = _SHARE_PER_SIZE * config.recovery.timeout_s
        self._look_for_room = look_for_room
        self.num_ranks = self.num_wanted = self._sizes[0]
        self._grown_from: int | None = None  # of a group that was ended to get all ranks again
        self.look: Future[bool] | None = None
        self._num_sought: int | None = None  # by `look`; None: its result is of no use any more
        self._changes_at = self._looks_at = 0.0
        self._look_s = _FIRST_LOOK_S

    @property
    def has_another_size(self) -> bool:
        """Whether a group of another size can follow an attempt that failed for good."""
        return self.is_smaller or self._grown_from is not None

    @property
    def is_smaller(self) -> bool:
        """Whether fewer ranks run than the user has asked for."""
        return self.num_ranks < self.num_wanted

    def describe_lack(self) -> str:
        """The numbers of ranks, for the log; empty if all run."""
        return f" with {self.num_ranks} of {self.num_wanted} ranks" if self.is_smaller else ""

    def note_loss(self, now: float) -> None:
        """A group of this size was lost, and the attempts at another one begin."""
        self._changes_at = now + self._patience_s
        self._num_sought = None

    def change(self, next_at: float, is_hopeless: bool) -> None:
        """After a failed attempt: chooses the number of ranks for the next one, which begins at
        `next_at`: the next smaller one; after the fewest, all. A group that should grow gets the
        number that it had.

        Args:
            is_hopeless: another attempt with this number would fail, too.
        """
        if next_at < self._changes_at and not is_hopeless:
            return
        place = self._sizes.index(self.num_ranks) + 1
        following = self._sizes[place % len(self._sizes)]
        self.num_ranks, self._grown_from = self._grown_from or following, None
        self.note_loss(next_at)

    def note_ready(self, now: float) -> None:
        """A new group of this size is ready."""
        self._grown_from = None
        self._plan_look(now)

    def _plan_look(self, now: float) -> None:
        self._looks_at = now + self._look_s
        self._look_s = min(2.0 * self._look_s, _LAST_LOOK_S)
        if not self.is_smaller:
            self._look_s = _FIRST_LOOK_S

    def grow(self, now: float) -> bool:
        """Returns whether there is room for all ranks again, so that the next group has them. Looks
        for it at intervals that double, in another thread."""
        if self.look is None:
            if self.is_smaller and now >= self._looks_at:
                self._num_sought = self.num_wanted - self.num_ranks
                self.look = self._look_for_room(self._num_sought)
            return False
        if not self.look.done():
            return False
        look, self.look = self.look, None
        if self._num_sought != self.num_wanted - self.num_ranks:
            return False
        if look.exception() is not None or not look.result():
            self._plan_look(now)
            return False
        self._grown_from, self.num_ranks = self.num_ranks, self.num_wanted
        self._changes_at = now
        return True
