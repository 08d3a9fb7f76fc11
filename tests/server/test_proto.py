"""The protocol: the stubs are current, and every scalar tells 0 from unset."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from support.build_proto import PROTO, ROOT, build

from server.calls import TIMEOUT_S
from server.guarded import guarded_server
from tpengine.async_engine.admission import QueueLimits
from tpengine.errors import ConfigError
from tpengine.proto import tpengine_pb2, tpengine_pb2_grpc
from tpengine.server.limits import Limits
from tpengine.server.server_args import ServerArgs

STUBS = ("tpengine_pb2.py", "tpengine_pb2.pyi", "tpengine_pb2_grpc.py")
MESSAGES = list(tpengine_pb2.DESCRIPTOR.message_types_by_name.values())


def test_stubs_are_current(tmp_path: Path) -> None:
    build(tmp_path)
    for name in STUBS:
        fresh = (tmp_path / PROTO).with_name(name).read_text()
        checked_in = (ROOT / PROTO).with_name(name).read_text()
        assert checked_in == fresh, f"{name}: run python tests/support/build_proto.py"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_every_scalar_knows_whether_it_is_set(message: Descriptor) -> None:
    for field in message.fields:
        if not field.is_repeated:
            assert field.has_presence, f"{message.name}.{field.name} is not optional"


def test_nothing_that_imports_code_is_on_the_wire() -> None:
    """Logits processors name functions that the server would import."""
    fields = tpengine_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    assert "logits_processors" not in fields
    assert not [name for name in fields if "process" in name or "remote" in name]


def test_bounds_of_the_queue_may_be_large() -> None:
    bound = (1 << 63) - 1
    ServerArgs(max_queued_requests=bound, max_queued_tokens=bound).check()
    with (
        guarded_server(limits=Limits(queue=QueueLimits(bound, bound))) as target,
        grpc.insecure_channel(target) as channel,
    ):
        stub = tpengine_pb2_grpc.GenerationServiceStub(channel)
        limits = stub.GetServerInfo(tpengine_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S).limits
    assert (limits.max_queued_requests, limits.max_queued_tokens) == (bound, bound)
    for name in ("max_queued_requests", "max_queued_tokens"):
        with pytest.raises(ConfigError, match=f"{name} must be at most {bound}"):
            ServerArgs(**{name: bound + 1}).check()
