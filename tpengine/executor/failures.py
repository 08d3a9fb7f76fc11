"""What went wrong on a rank, as plain data, and the error that the driver raises for it."""

from __future__ import annotations

import collections
import dataclasses
import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from tpengine import errors
from tpengine.errors import EngineError, TPEngineError, WorkerError

_LOG_LINES = 20
_MAX_TEXT = 20_000
"""Characters of a traceback or message that travel."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception on a rank.

    Attributes:
        place: host, node address and process, for people.
        phase: the method that failed.
        log_lines: the rank's last log lines.
        waited_for: the rank whose fault it seems; None: its own, or not known.
    """

    rank: int
    place: str
    phase: str
    type_name: str
    message: str
    traceback: str
    log_lines: list[str]
    waited_for: int | None = None

    @classmethod
    def of(
        cls, error: BaseException, rank: int, place: str, phase: str, log_lines: list[str]
    ) -> RankFailure:
        """Describes an exception that was caught."""
        text = "".join(traceback.format_exception(error))
        return cls(
            rank=rank,
            place=place,
            phase=phase,
            type_name=type(error).__name__,
            message=str(error)[:_MAX_TEXT],
            traceback=text[-_MAX_TEXT:],
            log_lines=log_lines,
            waited_for=getattr(error, "failed_rank", None),
        )

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only noticed that another one had gone."""
        return self.type_name in ("CollectiveError", "RendezvousError")

    @property
    def is_ours(self) -> bool:
        """Whether it is an error of `tpengine.errors`, which says what the user can do."""
        kind = getattr(errors, self.type_name, None)
        return isinstance(kind, type) and issubclass(kind, EngineError)

    def to_fields(self) -> tuple[object, ...]:
        """As plain data; `RankFailure(*fields)` is the way back."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def to_error(self) -> EngineError:
        """The exception to raise: of the rank's own type where it is one of ours, with where it
        happened; the rank's traceback and log lines stand in its cause."""
        kind = getattr(errors, self.type_name, None)
        where = f"[rank {self.rank} on {self.place}, in {self.phase}]"
        cause = WorkerError(self._report())
        error: EngineError | None = None
        if isinstance(kind, type) and issubclass(kind, EngineError):
            try:
                error = kind(f"{self.message} {where}")
            except TypeError:  # its constructor wants more than a message
                error = WorkerError(f"{self.type_name}: {self.message} {where}")
        if error is None:
            text = f"{self.type_name}: {self.message} {where}\n{self._report()}"
            error = WorkerError(text)
        error.__cause__ = cause
        return error

    def _report(self) -> str:
        lines = [f"traceback of rank {self.rank} on {self.place}:", self.traceback.rstrip()]
        if self.log_lines:
            lines += [f"last log lines of rank {self.rank}:", *self.log_lines]
        return "\n".join(lines)


def first_cause(failures: Mapping[int, RankFailure | TPEngineError]) -> int:
    """The rank that the others were waiting for when it failed, of those in order of arrival.

    An exception of a rank's own explains more than a connection that broke, and that more than a
    rank's word that another one is missing.
    """

    def weight(rank: int) -> int:
        failure = failures[rank]
        if not isinstance(failure, RankFailure):
            return 1
        return 2 if failure.is_consequence else 0

    return min(failures, key=weight)  # the first of equals


class LastLines(logging.Handler):
    """Keeps the last log lines, to be sent along when something fails."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record)[:1000])

    @property
    def lines(self) -> list[str]:
        """Oldest first."""
        return list(self._lines)
