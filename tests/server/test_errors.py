"""One table says how an error is answered over gRPC, over HTTP and by the client; docs show it."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from pathlib import Path

import grpc
import pytest

from tpengine import errors
from tpengine.errors import STATUSES, RankLoss
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto.status_details import has_details, read_error, write_details
from tpengine.server.error_texts import text_for_client
from tpengine.server.grpc.guard import path_at_fault
from tpengine.server.http.error_answers import refusal
from tpengine.server.limits import MAX_ERROR_TEXT

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.TPEngineError)
]
ARGUMENTS = {
    errors.QueueFullError: (2.5,),
    errors.DeadlineExceededError: ("decode",),
    errors.UnreadError: ("decode",),
    errors.ServerError: ("INTERNAL",),
    errors.ServerUnavailableError: ("UNAVAILABLE",),
}
HTTP_ALONE = {405, 415, 431}
"""Statuses of rules that are HTTP's own."""


def make(kind: type[Exception], text: str) -> Exception:
    if kind is errors.GroupLostError:
        return kind(RankLoss(0, text, 1, 1, "execute_model", text, text, text))
    return kind(text, *ARGUMENTS.get(kind, ()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_at_the_client(kind: type[Exception]) -> None:
    """The text of an error reaches it only if it is about the client's own request."""
    error, status = make(kind, "SECRET"), errors.status_of(kind)
    if isinstance(error, errors.RequestError):
        error.field = "sampling.top_p"
    is_told = kind in (errors.EngineLoadingError, errors.EngineDrainingError)
    is_told |= isinstance(error, errors.RequestError) and kind is not errors.RequestFailedError
    text = text_for_client(error, "req-1")
    assert ("SECRET" in text, "req-1" in text) == (is_told, not is_told)
    trailers = write_details(error, text, "req-1", getattr(error, "field", None))
    assert has_details(trailers)
    got = read_error(status.grpc, text, trailers)
    answer = refusal(error, "req-1")
    body = json.loads(answer.body)["error"]
    assert (answer.status_code, body["code"]) == (status.http, status.code)
    assert body["message"].endswith(text)
    if isinstance(error, errors.RequestError) and is_told:
        assert (type(got), str(got)) == (kind, "SECRET")
        assert pickle.loads(pickle.dumps(got)).args == got.args == error.args
        is_bare = isinstance(error, errors.QueueFullError | errors.DeadlineExceededError)
        assert is_bare or pickle.loads(pickle.dumps(got)).field == "top_p"
    else:
        assert got is None


def test_an_answer_with_no_more_than_a_code() -> None:
    for code, kind in (
        ("RESOURCE_EXHAUSTED", errors.RequestError),
        ("NOT_FOUND", errors.ModelNotFoundError),
        ("INVALID_ARGUMENT", errors.RequestError),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceededError),
        ("INTERNAL", type(None)),
    ):
        for trailers in (None, (), (("grpc-status-details-bin", b"no message"),)):
            assert type(read_error(code, "text", trailers)) is kind


def test_each_status_is_one_that_exists_and_the_page_has_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    rows = re.findall(r"^\| ([0-9, ]+) \| ([A-Z_]*) ?\|", page, re.MULTILINE)
    listed = {(int(http), code) for many, code in rows for http in many.split(", ")}
    assert listed == {(status.http, status.grpc) for status in STATUSES.values()} | {
        (http, "") for http in HTTP_ALONE
    }
    assert all(hasattr(grpc.StatusCode, status.grpc) for status in STATUSES.values())
    codes = [status.code for status in STATUSES.values() if status.code is not None]
    assert len(codes) == len(set(codes))


def test_a_long_text_is_cut() -> None:
    request = pb.GenerateRequest(prompt="a")
    for text in ("x" * 100_000, "😀" * 300, "é" + "😀" * 300):  # percent-encoded, twelve bytes each
        error = errors.InvalidPromptError(text)
        shown = text_for_client(error, "id", path_at_fault(error, request))
        assert MAX_ERROR_TEXT - 8 < len(shown.encode()) <= MAX_ERROR_TEXT
        assert shown.startswith(f"prompt: {text[0]}")
        assert shown.endswith(f"{text[-1]} ...")
