"""Links between pipeline stages: what arrives, how far a sender may be ahead, and what fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from distributed.ranks import Rank, Ranks, hide_shared_memory
from tpengine.distributed.collectives import connect_ranks
from tpengine.distributed.stage_links import MemoryLink, QueuedLink, SocketLink
from tpengine.errors import CollectiveError
from tpengine.messages import Rendezvous

TIMEOUT_S = 30.0
LINKS = [SocketLink, MemoryLink, QueuedLink]


@contextmanager
def pair(
    link: type[SocketLink], timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[SocketLink, SocketLink]]:
    """Both ends of a link, from rank 3 to rank 5, which are closed after it."""
    ends = socket.socketpair()
    memory = [torch.zeros(2, 1 << 16, dtype=torch.uint8)] if link is MemoryLink else []
    sender = link(ends[0], 3, 5, timeout_s, *memory)
    reader = link if link is MemoryLink else SocketLink
    receiver = reader(ends[1], 5, 3, timeout_s, *memory)
    yield sender, receiver
    sender.close()
    receiver.close()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_sent_arrives_in_order(link: type[SocketLink], dtype: torch.dtype) -> None:
    """Messages of several sizes; the sender may use its memory again as soon as it is back."""
    with pair(link) as (sender, receiver):
        sizes = [(5, 16), (1, 16), (60, 16), (2, 16)] * 3
        noise = torch.manual_seed(0)
        sent = [torch.randn(size, generator=noise).mul(9.0).to(dtype) for size in sizes]

        def send_all() -> None:
            for x in sent:
                copy = x.clone()
                sender.send(copy)
                copy.zero_()

        thread = threading.Thread(target=send_all, daemon=True)
        thread.start()
        for x in sent:
            out = torch.empty_like(x)
            assert receiver.receive(out) is out
            assert torch.equal(out, x)
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize("link", [MemoryLink, QueuedLink])
def test_a_sender_may_be_two_messages_ahead(link: type[SocketLink]) -> None:
    """Of messages that no socket's buffer holds."""
    with pair(link) as (sender, receiver):
        sent = [torch.full((1 << 14,), float(number)) for number in range(2)]
        for x in sent:
            sender.send(x)  # it would wait for its timeout otherwise
        for x in sent:
            assert torch.equal(receiver.receive(torch.empty_like(x)), x)


def gone(sender: SocketLink, receiver: SocketLink) -> None:
    sender.close()


def nothing(sender: SocketLink, receiver: SocketLink) -> None:
    """The other side is frozen."""


def another_size(sender: SocketLink, receiver: SocketLink) -> None:
    sender.send(torch.zeros(3, 4))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    ("do", "text", "culprit"),
    [
        (gone, "rank 5 in a pipeline: rank 3 has died or left the pipeline", 3),
        (nothing, r"rank 3 sent nothing within 0.2 s; it is frozen", 3),
        (another_size, "rank 3 sent 48 bytes, rank 5 expected 64: ranks must run the same", None),
    ],
)
def test_failures_name_the_other_rank(
    link: type[SocketLink], do: Callable[[Any, Any], None], text: str, culprit: int | None
) -> None:
    with pair(link, 0.2 if do is nothing else TIMEOUT_S) as (sender, receiver):
        do(sender, receiver)
        with pytest.raises(CollectiveError, match=text) as raised:
            receiver.receive(torch.empty(4, 4))
        assert raised.value.failed_rank == culprit


def send_again_and_again(sender: SocketLink) -> None:
    for _ in range(100):
        sender.send(torch.zeros(1 << 14))
        threading.Event().wait(0.01)


@pytest.mark.parametrize("link", LINKS)
def test_a_sender_whose_receiver_has_gone(link: type[SocketLink]) -> None:
    with pair(link, 5.0) as (sender, receiver):
        receiver.close()
        with pytest.raises(CollectiveError, match="rank 5 has died or left"):
            send_again_and_again(sender)


@pytest.mark.parametrize("link", [MemoryLink, QueuedLink])
def test_a_receiver_that_is_frozen(link: type[SocketLink]) -> None:
    with pair(link, 0.3) as (sender, _):
        with pytest.raises(CollectiveError, match=r"rank 5 .* 0.3 s") as raised:
            send_again_and_again(sender)
        assert raised.value.failed_rank == 5


def exchange(state: Rank) -> tuple[list[str], list[float], list[int]]:
    """Passes a tensor through all stages, and the ids back; returns the names of this rank's links,
    what came in, and the ids."""
    place = state["all"]
    stage, numbers = place.stage, torch.full((4,), float(place.tp_rank))
    if stage.source is not None:
        stage.source.receive(numbers)
    came = numbers.tolist()
    if stage.target is not None:
        stage.target.send(numbers + 10.0 * (1 + stage.index))
    ids = torch.tensor([7, 8]) if stage.is_last else torch.empty(2, dtype=torch.int64)
    for link in stage.sampled:
        (link.send if stage.is_last else link.receive)(ids)
    total = place.all_reduce(torch.tensor([float(place.rank)]))
    first = stage.index * place.tp_size
    assert total.item() == sum(range(first, first + place.tp_size))
    names = [link.name for link in (stage.source, stage.target) if link is not None]
    place.close()
    return names, came, ids.tolist()


def connect(state: Rank, rendezvous: Rendezvous) -> str:
    master, cpu = state.stores.get("all"), torch.device("cpu")
    state.groups["all"], line = connect_ranks(state.rank, rendezvous, cpu, master, 3, 1 << 12)
    return line


@pytest.mark.parametrize("sees_memory", [True, False])
def test_three_stages_of_two_ranks(sees_memory: bool) -> None:
    with Ranks(6) as ranks:
        if not sees_memory:
            for blind in range(6):
                ranks.run(hide_shared_memory, blind)
        lines = ranks.run(connect, ranks.rendezvous("all"))
        answers = ranks.run(exchange)
    way = "shared memory" if sees_memory else "sockets"
    for rank, (line, (names, came, ids)) in enumerate(zip(lines, answers, strict=True)):
        stage, tp_rank = divmod(rank, 2)
        assert f"stage {stage} of 3 ({way})" in line
        assert names == [way] * (2 if stage == 1 else 1)
        assert came == [tp_rank + {0: 0.0, 1: 10.0, 2: 30.0}[stage]] * 4
        assert ids == [7, 8]
