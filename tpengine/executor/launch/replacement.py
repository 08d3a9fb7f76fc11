"""Places for ranks on nodes that answer, once there are nodes that do not."""

from __future__ import annotations

import time
from collections.abc import Callable

from tpengine.config import RayConfig
from tpengine.errors import PlacementError, counted
from tpengine.executor.launch.node_agent import Agents
from tpengine.executor.launch.placement import Placement
from tpengine.logger import init_logger

logger = init_logger(__name__)

_PAUSE_S = 0.5
"""Between two questions to nodes that do not answer."""


class Replacement:
    """Finds bundles for the ranks of one engine.

    Args:
        bundle: resources of one rank.
        check: called again and again during all that may take long; what it raises ends it.
    """

    def __init__(
        self,
        bundle: dict[str, float],
        size: int,
        config: RayConfig,
        agents: Agents,
        check: Callable[[], None],
    ) -> None:
        self._bundle = bundle
        self._size = size
        self._config = config
        self._agents = agents
        self._check = check

    def place(self, silent: set[str]) -> Placement:
        """Bundles on nodes that answer.

        Args:
            silent: nodes that do not; those that are found out here are added.
        """
        while True:
            placement = Placement(self._bundle, self._size, self._config, silent, self._check)
            if not silent:  # at the first start Ray's view of the cluster must do
                return placement
            try:
                more = self._agents.silent(placement.node_ids, self._check)
            except BaseException:
                placement.remove()
                raise
            if not more:
                return placement
            placement.remove()
            silent |= more

    def replace(self, old: Placement | None, silent: set[str]) -> Placement:
        """The old bundles if their nodes answer, else others; where there are none, it waits for
        nodes to answer again, as one may only have paused.

        Args:
            silent: nodes that do not answer; changed to those that do not in the end.

        Raises:
            PlacementError: there is no room without the silent nodes, until the timeout.
        """
        deadline = time.monotonic() + self._config.placement_timeout_s
        num_tries = 0
        while True:
            if old is not None and not silent & set(old.node_ids):
                return old
            try:
                if old is not None and old.is_borrowed:
                    raise self._too_small(silent)
                if old is not None:
                    old.remove()
                    old = None
                return self.place(silent)
            except PlacementError as error:
                if not silent or time.monotonic() >= deadline:
                    raise
                if num_tries == 0:
                    logger.warning("%s; they are asked again until the timeout", error)
                num_tries += 1
            self._pause()
            silent &= self._agents.silent(silent, self._check)

    def _pause(self) -> None:
        """A node that is gone may be known as such at once."""
        self._check()
        time.sleep(_PAUSE_S)

    @staticmethod
    def _too_small(silent: set[str]) -> PlacementError:
        return PlacementError(
            f"no answer from {counted(len(silent), 'node')} of the placement group that the driver "
            f"runs in ({', '.join(sorted(silent))}), and it is not tpengine's to enlarge; make a "
            "new group and run the driver in it"
        )
