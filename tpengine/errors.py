"""Every error that a user, a client or a cluster can cause, and phrases that messages share.

Two families: a `RequestError` is the caller's mistake and fails one request; an `EngineError` is a
fault of the engine or of the machine and concerns all requests. Each error carries its arguments in
`args`, so that it survives pickling between processes.

`STATUSES` says how servers answer each of them. Both doors and the Python client read it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from errno import EADDRINUSE, EAGAIN, EMFILE, ENFILE, ENOMEM, ENOSPC
from typing import Self

from tpengine.outputs import RequestOutput


class TPEngineError(Exception):
    """Root of all errors that tpengine raises on purpose."""

    def __str__(self) -> str:
        """The message alone, where an error has further arguments."""
        return str(self.args[0]) if self.args else ""


class RequestError(TPEngineError, ValueError):
    """One request cannot be served as asked; other requests are not affected.

    Attributes:
        field: path of the caller's field at fault, as in `top_p`; None: no single field.
    """

    def __init__(self, message: str, *args: object, field: str | None = None) -> None:
        super().__init__(message, *args)
        self.field = field  # pickle carries it, as each attribute that is not in `args`

    @classmethod
    def of_field(cls, field: str, problem: str) -> Self:
        """The error whose text begins with its field."""
        return cls(f"{field} {problem}", field=field)


class InvalidSamplingParamsError(RequestError):
    """A field of `SamplingParams` is out of its range."""


class InvalidPromptError(RequestError):
    """The prompt is empty, too long, or holds ids outside the vocabulary."""


class InvalidPictureError(InvalidPromptError):
    """A picture of the prompt cannot be fetched, is damaged or of another format, or exceeds a
    limit. The message never holds what a client or a library has written."""


class InvalidAdapterError(RequestError):
    """An adapter cannot be served: its folder, a field of its configuration, or tensors that do not
    fit; the message names all of it."""


class InvalidPriorityError(RequestError):
    """A priority is out of range, or the engine's policy has no priorities."""


class DuplicateRequestError(RequestError):
    """An unfinished request already has this id."""


class RequestIgnoredError(InvalidPromptError):
    """A request is too long for the model or for the KV cache, even alone; the message names what
    would fit (`scheduling/hopeless_requests.py`)."""


class QueueFullError(RequestError):
    """The queue holds so many requests or tokens that this request was not taken.

    Attributes:
        retry_after_s: seconds until there may be room, estimated from the queue's recent speed.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(RequestError):
    """A request did not finish in time; it has been ended.

    Attributes:
        where: how far it had come: queued, prefill or decode; unknown at a client that the server
            did not tell.
    """

    def __init__(self, message: str, where: str = "unknown") -> None:
        super().__init__(message, where)
        self.where = where


class UnreadError(DeadlineExceededError):
    """A client took no message of its stream for too long; its request has been ended."""


class RequestAbortedError(RequestError):
    """Another caller ended the request.

    Attributes:
        output: output of its stream that had not been read yet; None: no output.
    """

    def __init__(self, message: str, output: RequestOutput | None = None) -> None:
        super().__init__(message, output)
        self.output = output


class RequestFailedError(RequestError):
    """A request failed while it ran; other requests go on. The message is for the log: it may hold
    the text of an exception."""


class MalformedRequestError(RequestError):
    """A message breaks its protocol: it is cut short, has wrong types, or its text is not UTF-8."""


class MessageTooLargeError(MalformedRequestError):
    """A message has more bytes than the server takes."""


class ModelNotFoundError(RequestError):
    """A request names a model that is not served here."""


class NotOfferedError(RequestError):
    """A method of a protocol does what this server does not do."""


class NotKeptError(RequestError):
    """A stream cannot go on from the position that its client gives: the stream or that part of it
    is not kept, or the stream grew beyond the bytes that may be kept."""


class UnauthenticatedError(RequestError):
    """A client sends no token, or one that the server does not know."""


class PermissionDeniedError(RequestError):
    """A known client asks for something that it may not do."""


class EngineError(TPEngineError, RuntimeError):
    """The engine cannot be built or cannot go on."""


class TemporaryError(EngineError):
    """Memory, files, ports or places are missing at this moment; the same call may succeed later.
    All other engine errors are permanent."""


class ConfigError(EngineError, ValueError):
    """Engine arguments or a model's `config.json` ask for something that cannot be done."""


class RefusedNameError(ConfigError, AttributeError):
    """An object of vLLM 0.5.4 has this attribute, and ours does not; the message says what to use
    instead."""


class ModelLoadError(EngineError):
    """A model folder, its weights or its tokenizer cannot be read."""


class CacheSizeError(TemporaryError):
    """The KV cache that fits into memory is too small for what was asked."""


class GraphCaptureError(TemporaryError):
    """The CUDA graphs of decode steps do not fit into memory, or cannot be recorded."""


class WorkerError(EngineError):
    """A worker failed while it ran a call for the driver."""


class WorkerDiedError(WorkerError):
    """A rank's process has ended, or does not answer within its deadline."""


@dataclass(frozen=True, slots=True)
class RankLoss:
    """How a rank was lost, for the log, the error and the engine's health.

    Attributes:
        place: its node's address, its host and its process.
        epoch: number of its group.
        step: step that was running; None: no step.
        phase: what the group was doing: `execute_model`, `idle`, or a call of the start.
        cause: text, with the signal, exit code or time where they are known.
        last_lines: end of its log; empty: no log.
        stack: stack of its Python threads, or the traceback that it raised; empty: unknown.
    """

    rank: int
    place: str
    epoch: int
    step: int | None
    phase: str
    cause: str
    last_lines: str = ""
    stack: str = ""

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return (
            f"rank {self.rank} on {self.place} was lost in {self.phase} "
            f"(epoch {self.epoch}{step}): {self.cause}"
        )

    def report(self) -> str:
        """The same with its stack and its last lines."""
        parts = [str(self)]
        if self.stack:
            parts.append(f"stack of rank {self.rank}:\n{self.stack}")
        if self.last_lines:
            parts.append(f"last lines of rank {self.rank}:\n{self.last_lines}")
        return "\n".join(parts)


class GroupLostError(EngineError):
    """A rank is lost, and with it its group, which can be rebuilt.

    Attributes:
        loss: which rank was lost, and how.
    """

    def __init__(self, loss: RankLoss) -> None:
        super().__init__(loss)
        self.loss = loss


class PlacementError(TemporaryError):
    """The cluster cannot give every rank its resources, or did not in time."""


class _PeerError(EngineError):
    """A rank could not do its part because of another rank.

    Attributes:
        failed_rank: the rank that probably failed; None: not known.
    """

    def __init__(self, message: str, failed_rank: int | None = None) -> None:
        super().__init__(message, failed_rank)
        self.failed_rank = failed_rank


class RendezvousError(_PeerError):
    """The ranks of a group did not find each other."""


class SharedMemoryError(TemporaryError):
    """The shared memory through which the ranks of a host exchange data cannot be allocated."""


class CollectiveError(_PeerError):
    """An exchange between ranks failed; the group cannot be used any more."""


class NativeLibraryError(EngineError):
    """The compiled kernels are missing or cannot be used as asked."""


_SHORTAGES = (EMFILE, ENFILE, EAGAIN, ENOMEM, ENOSPC, EADDRINUSE)
_DEVICE_FAULTS = frozenset((214, 700, 702, 710, *range(714, 720)))
"""CUDA's codes: memory errors, illegal addresses and instructions, time-outs, failed assertions."""


def is_device_fault(error: BaseException) -> bool:
    """Whether a kernel has failed on a GPU, in this operation or one before it: CUDA says so at the
    next call, whatever that is, and at each one after. So it is no failure of that call's own."""
    code = getattr(error, "error_code", None)  # of torch.AcceleratorError
    return code in _DEVICE_FAULTS or "in this operation or one before it" in str(error)


def is_temporary(error: BaseException) -> bool:
    """Whether the same call may succeed later, with ranks that could start before. An exception of
    another class than ours comes from the machine or from a library, and may pass."""
    is_ours = isinstance(error, TPEngineError) and not isinstance(error, TemporaryError)
    return not is_ours or is_shortage(error)


def is_shortage(error: BaseException) -> bool:
    """Whether this machine lacked memory, files, ports, processes, threads or room on a disk. That
    may pass, also if it was noticed by another error."""
    return error_number(error) in _SHORTAGES


def error_number(error: BaseException) -> int | None:
    """Returns the system's error number of an exception, or else of its nearest cause that has one.
    None: none of them has one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno
        if isinstance(cause, MemoryError):
            return ENOMEM
        if isinstance(cause, RuntimeError) and "can't start new thread" in str(cause):
            return EAGAIN
        cause = cause.__cause__ or cause.__context__
    return None


class EngineDeadError(EngineError):
    """An earlier step failed half-way; driver and worker disagree, and the engine cannot go on."""


AsyncEngineDeadError = EngineDeadError
"""Its name in vLLM."""


class EngineLoadingError(EngineError):
    """The engine still loads its model."""


class EngineDrainingError(EngineError):
    """The engine finishes its running requests and takes no new ones."""


class IllegalMoveError(EngineError):
    """A sequence was to change its status in a way that the table of legal moves forbids."""


class ServerError(EngineError):
    """A server could not answer a call; the request itself may be correct.

    Attributes:
        status: name of gRPC's status code, such as INTERNAL.
    """

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message, status)
        self.status = status


class ServerUnavailableError(ServerError):
    """A server cannot be reached, does not answer, has ended, or takes no new requests; the same
    call may succeed later or on another server."""


@dataclass(frozen=True, slots=True)
class Status:
    """How servers answer an error.

    Attributes:
        grpc: name of gRPC's status code.
        http: status over HTTP.
        code: in the body over HTTP, for programs; None: the status says enough.
        text: what the client is told; None: the error's own text, which is written for it.
        retry_after_s: seconds after which the client may try again, unless the error knows better;
            None: no advice.
    """

    grpc: str
    http: int
    code: str | None = None
    text: str | None = None
    retry_after_s: float | None = None


STATUSES: Mapping[type[Exception], Status] = {
    MessageTooLargeError: Status("RESOURCE_EXHAUSTED", 413, "request_too_large"),
    QueueFullError: Status("RESOURCE_EXHAUSTED", 429, "rate_limit_exceeded"),
    DeadlineExceededError: Status("DEADLINE_EXCEEDED", 408, "deadline_exceeded"),
    RequestAbortedError: Status("CANCELLED", 499, "request_aborted"),  # 499 is nginx's
    DuplicateRequestError: Status("ALREADY_EXISTS", 409, "duplicate_request_id"),
    ModelNotFoundError: Status("NOT_FOUND", 404, "model_not_found"),
    NotKeptError: Status("NOT_FOUND", 410, "stream_not_kept"),
    NotOfferedError: Status("UNIMPLEMENTED", 501, "not_offered"),
    UnauthenticatedError: Status("UNAUTHENTICATED", 401, "invalid_api_key"),
    PermissionDeniedError: Status("PERMISSION_DENIED", 403, "permission_denied"),
    RequestError: Status("INVALID_ARGUMENT", 400),
    RequestIgnoredError: Status("INVALID_ARGUMENT", 400, "context_length_exceeded"),
    RequestFailedError: Status("INTERNAL", 500, text="the request failed while it ran"),
    EngineLoadingError: Status("UNAVAILABLE", 503, "loading", retry_after_s=2.0),
    EngineDrainingError: Status("UNAVAILABLE", 503, "draining", retry_after_s=2.0),
    EngineDeadError: Status(
        "UNAVAILABLE",
        503,
        "engine_dead",
        "the engine failed, and this server ends; ask another, or again when it is back",
        2.0,
    ),
    # The text of any other exception may hold anything, also another client's prompt.
    Exception: Status("INTERNAL", 500, text="the server failed; its log says more"),
}
"""By kind of error; the row of the nearest base class counts. If all that a client gets is gRPC's
code, as from a proxy, it raises the first kind that has this code."""


def status_of(kind: type[Exception]) -> Status:
    """How servers answer a kind of error."""
    return next(STATUSES[base] for base in kind.__mro__ if base in STATUSES)


def retry_after_s(error: Exception) -> float | None:
    """Seconds after which a client may try again; None: no advice."""
    own: float | None = getattr(error, "retry_after_s", status_of(type(error)).retry_after_s)
    return own


def not_supported(what: str, supported: Iterable[object]) -> ConfigError:
    """The error for an unsupported value; it lists the supported ones."""
    return ConfigError(f"{what} is not supported; supported: {', '.join(map(str, supported))}")


def counted(count: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to an unknown one; None: no name is similar."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name; empty if no known name is similar."""
    close = closest(name, known)
    return "" if close is None else f"; did you mean {close}?"
