"""How ranks connect, and the errors when they cannot."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from distributed import ranks
from tpengine.distributed.rendezvous import RendezvousStore, interface_of
from tpengine.errors import RendezvousError


def test_store_listens_on_its_address_only() -> None:
    store = RendezvousStore("127.0.0.1")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=2)
    socket.create_connection(("127.0.0.1", store.port), timeout=2).close()


def test_address_of_another_machine() -> None:
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.1"):
        RendezvousStore("192.0.2.1")


def test_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_store_that_is_not_there(two: ranks.Ranks) -> None:
    two.start(1, ranks.connect_by_any_means, replace(two.rendezvous(connect_timeout_s=1.0), port=1))
    error = two.outcome(1)
    assert isinstance(error, RendezvousError)
    assert "cannot reach rank 0 at 127.0.0.1:1" in str(error)


@pytest.mark.parametrize(
    "lack",
    [(ranks.hide_shared_memory, 1), (ranks.ask_for_too_much, 1 << 44), (ranks.refuse_to_map, 1)],
)
def test_gloo_where_memory_is_not_shared(two: ranks.Ranks, lack: tuple[ranks.Task, int]) -> None:
    """Equal addresses do not prove that it is; or there is too little to allocate the segment, or
    for one rank to map it. No rank is left waiting."""
    two.run(*lack)
    assert two.run(ranks.connect_by_any_means, two.rendezvous()) == [
        f"rank {rank} of 2 at 127.0.0.1 (interface lo) by gloo" for rank in (0, 1)
    ]
