"""Requests and calls of the tests, and their refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.rpc.error_details_pb2 import BadRequest, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tpengine.proto import tpengine_pb2 as pb

TIMEOUT_S = 60.0
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3
"""Of health, as numbers."""
SERVICE = "/tpengine.v1.GenerationService/"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a client with a token."""
    return (("authorization", f"Bearer {token}"),)


def as_client(token: str) -> dict[str, Any]:
    """What a call of a client with a token is given, in time and metadata."""
    return {"metadata": bearer(token), "timeout": TIMEOUT_S}


def token_files(folder: Path, *clients: str, admin: str = "") -> list[str]:
    """The options of a server that knows these tokens, from files that no other user can read."""
    options = []
    for name, tokens in (("token", clients), ("admin-token", [admin] if admin else [])):
        if tokens:
            file = folder / name
            file.touch(0o600)
            file.write_text("\n".join(tokens))
            options += [f"--{name}-file", str(file)]
    return options


def sampling(**fields: Any) -> pb.SamplingParams:
    """Parameters that are greedy by default."""
    return pb.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **fields})


def ids(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=token_ids)


def long_request(num_tokens: int, **fields: Any) -> pb.GenerateRequest:
    """A request that runs for this many steps."""
    params = sampling(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    return pb.GenerateRequest(**{"prompt_token_ids": ids(5, 6, 7), "sampling": params, **fields})


class Refusal:
    """How a call ended.

    Attributes:
        status: the richer error model's message.
    """

    def __init__(self, error: grpc.RpcError) -> None:
        self.code: grpc.StatusCode = error.code()
        self.text: str = error.details()
        trailers = dict(error.trailing_metadata() or ())
        self.status = Status.FromString(trailers.get("grpc-status-details-bin", b""))

    def detail(self, kind: Any) -> Any:
        """A detail of the richer error model; None: it is missing."""
        for packed in self.status.details:
            detail = kind()
            if packed.Unpack(detail):
                return detail
        return None

    @property
    def field(self) -> str | None:
        """Path of the field at fault."""
        violations = self.detail(BadRequest)
        return violations.field_violations[0].field if violations is not None else None

    @property
    def retry_after_s(self) -> float | None:
        """The delay of RetryInfo."""
        retry = self.detail(RetryInfo)
        return retry.retry_delay.ToNanoseconds() / 1e9 if retry is not None else None

    @property
    def request_id(self) -> str | None:
        """The id of RequestInfo."""
        info = self.detail(RequestInfo)
        return info.request_id if info is not None else None


def refused(call: Any, *args: Any, **kwargs: Any) -> Refusal:
    """Makes a call that must fail, and returns its refusal; a stream is read to its end."""
    kwargs.setdefault("timeout", TIMEOUT_S)
    try:
        answer = call(*args, **kwargs)
        said = list(answer) if hasattr(answer, "__next__") else answer
    except grpc.RpcError as error:
        return Refusal(error)
    raise AssertionError(f"not refused: {str(said)[:500]}")


def check(channel: grpc.Channel, name: str = "") -> int:
    """The health of a service by this name."""
    request = health_pb2.HealthCheckRequest(service=name)
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status)


class Watcher:
    """A stream of health, read on a thread.

    Attributes:
        said: the answers so far.
        code: how the stream ended; None: it is open.
    """

    def __init__(self, channel: grpc.Channel, name: str, timeout_s: float = TIMEOUT_S) -> None:
        request = health_pb2.HealthCheckRequest(service=name)
        self.said: list[int] = []
        self.code: grpc.StatusCode | None = None
        self._stream = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=timeout_s)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for answer in self._stream:
                self.said.append(answer.status)
            self.code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            self.code = error.code()

    def close(self) -> None:
        """Ends the stream."""
        self._stream.cancel()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


@contextmanager
def running(stub: Any, request: pb.GenerateRequest) -> Iterator[Any]:
    """A stream after its first message; cancelled at the end."""
    stream = stub.GenerateStream(request, timeout=TIMEOUT_S)
    try:
        next(stream)
        yield stream
    finally:
        stream.cancel()
