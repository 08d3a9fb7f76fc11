"""Every error that a user, a client or a cluster can cause.

Two families: `RequestError` is the caller's fault and fails one request; `EngineError` is ours (or
the machine's) and concerns the engine. Each carries its arguments in `args`, so that it survives
pickling between processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpengine.messages import RankLoss
    from tpengine.outputs import RequestOutput


class TPEngineError(Exception):
    """Root of all errors that tpengine raises on purpose."""


class RequestError(TPEngineError, ValueError):
    """One request cannot be served as asked; nothing else is affected."""


class InvalidSamplingParamsError(RequestError):
    """A field of `SamplingParams` is out of its range."""


class InvalidPromptError(RequestError):
    """The prompt is empty, too long, or holds ids outside the vocabulary."""


class InvalidPriorityError(RequestError):
    """A priority is out of range, or the engine's policy does not know priorities."""


class DuplicateRequestError(RequestError):
    """A live request already has this id."""


class RequestIgnoredError(InvalidPromptError):
    """A request does not fit into the KV cache, whoever else runs; the message names what would."""


class QueueFullError(RequestError):
    """So many requests or tokens wait already that this one was not taken.

    Attributes:
        retry_after_s: when there may be room again, by what the queue did lately.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class DeadlineExceededError(RequestError):
    """A request was not done in time; it has been ended.

    Attributes:
        where: queued, prefill or decode: how far it had come; at a client that the server did not
            tell, unknown.
    """

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message, where)
        self.where = where

    def __str__(self) -> str:
        return str(self.args[0])


class RequestAbortedError(RequestError):
    """Somebody else ended the request.

    Attributes:
        output: what its stream had brought and nobody had read yet; None where there is nothing.
    """

    def __init__(self, message: str, output: RequestOutput | None = None) -> None:
        super().__init__(message, output)
        self.output = output

    def __str__(self) -> str:
        return str(self.args[0])


class RequestFailedError(RequestError):
    """A request went wrong while it ran; the others go on. The message is for the log: it may hold
    the text of an exception."""


class MalformedRequestError(RequestError):
    """A message is none of its protocol: cut short, of other types, or its text no UTF-8."""


class ModelNotFoundError(RequestError):
    """A request names a model that is not served here."""


class UnauthenticatedError(RequestError):
    """A client does not say who it is, or not in a way that can be believed."""


class PermissionDeniedError(RequestError):
    """A client is known, and what it asks for is not for it."""


class EngineError(TPEngineError, RuntimeError):
    """The engine cannot be built or cannot go on."""


class ConfigError(EngineError, ValueError):
    """Engine arguments or a model's `config.json` ask for something that cannot be done."""


class ModelLoadError(EngineError):
    """A model folder, its weights or its tokenizer cannot be read."""


class CacheSizeError(EngineError):
    """The KV cache that fits into memory is too small for what was asked."""


class GraphCaptureError(EngineError):
    """The CUDA graphs of decode steps do not fit into memory, or cannot be recorded."""


class WorkerError(EngineError):
    """A worker failed while it ran a call for the driver."""


class WorkerDiedError(WorkerError):
    """A rank's process has gone, or does not answer within its deadline."""


class GroupLostError(EngineError):
    """A rank is gone or of no use, and with it its group, which can be rebuilt.

    Attributes:
        loss: which rank, and what became of it.
    """

    def __init__(self, loss: RankLoss) -> None:
        super().__init__(loss)
        self.loss = loss


class PlacementError(EngineError):
    """The cluster cannot, or did not in time, give every rank its place."""


class _PeerError(EngineError):
    """A rank could not do its part because of another one.

    Attributes:
        failed_rank: whose fault it seems; None: not known.
    """

    def __init__(self, message: str, failed_rank: int | None = None) -> None:
        super().__init__(message, failed_rank)
        self.failed_rank = failed_rank

    def __str__(self) -> str:
        return str(self.args[0])


class RendezvousError(_PeerError):
    """The ranks of a group did not find each other."""


class SharedMemoryError(EngineError):
    """The shared memory through which the ranks of a host exchange data cannot be had."""


class CollectiveError(_PeerError):
    """An exchange between ranks failed; the group is of no use any more."""


class NativeLibraryError(EngineError):
    """The compiled kernels are missing or cannot be used as asked."""


_DEVICE_FAULTS = frozenset((214, 700, 702, 710, *range(714, 720)))
"""CUDA's codes: memory errors, illegal addresses and instructions, time-outs, failed assertions."""


def is_device_fault(error: BaseException) -> bool:
    """Whether a kernel has failed on a GPU, in this operation or one before it: CUDA says so at the
    next call, whatever that is, and at each one after. So it is no failure of that call's own."""
    code = getattr(error, "error_code", None)  # of torch.AcceleratorError
    return code in _DEVICE_FAULTS or "in this operation or one before it" in str(error)


class EngineDeadError(EngineError):
    """An earlier step failed half-way; driver and worker disagree, and the engine cannot go on."""


class EngineLoadingError(EngineError):
    """The engine is not up yet."""


class EngineDrainingError(EngineError):
    """The engine finishes what it has, and takes no new requests."""


class IllegalMoveError(EngineError):
    """A sequence was asked to change its status in a way the table of legal moves forbids."""


class ServerError(EngineError):
    """A server could not answer a call; nothing is known to be wrong with the request.

    Attributes:
        status: gRPC's name of what went wrong, such as INTERNAL.
    """

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class ServerUnavailableError(ServerError):
    """A server cannot be reached, does not answer, has gone, or takes no new requests; the same
    call may succeed later or elsewhere."""
