"""Tables of the blocks that hold K and V of cross-attention, for models with two halves.

A request's encoder prompt fills as many blocks as a sequence of its length would. They come from
the pools of the other blocks, are never written again, and are shared by all sequences of the
request: each sequence that has a table of its own tokens has a reference to them, on the device or
on the host. Requests of models with one half have no such tables.
"""

from __future__ import annotations

from collections.abc import Iterable

from tpengine.messages import CrossInput
from tpengine.scheduling.block_pool import BlockPool, expect
from tpengine.scheduling.sequence import Request, Sequence

Tables = dict[int, list[int]]
"""By sequence id."""


class CrossBlocks:
    """The tables over the two pools of a block manager, which calls the methods."""

    def __init__(self, device: BlockPool, host: BlockPool, block_size: int) -> None:
        self._device, self._host = device, host
        self._block_size = block_size
        self._tables: Tables = {}
        self._host_tables: Tables = {}

    def num_needed(self, request: Request) -> int:
        """Blocks that the request's encoder prompt fills; 0 without one."""
        return 0 if request.encoder is None else -(-request.encoder.num_tokens // self._block_size)

    def num_held(self, sequences: Iterable[Sequence]) -> int:
        """Device blocks that the sequences hold; a shared block counts once."""
        return _num_distinct(self._tables, sequences)

    def num_hosted(self, sequences: Iterable[Sequence]) -> int:
        """Host blocks that the sequences hold; a shared block counts once."""
        return _num_distinct(self._host_tables, sequences)

    def block_ids(self, sequence: Sequence) -> list[int]:
        """A copy of the sequence's device table; empty without an encoder prompt."""
        return self._tables.get(sequence.seq_id, []).copy()

    def input_of(self, request: Request, sequence: Sequence) -> CrossInput | None:
        """What ranks get with a running sequence; None without an encoder prompt. Its blocks are
        empty as long as no token of its own is computed."""
        if (encoder := request.encoder) is None:
            return None
        held = encoder.num_tokens, self.block_ids(sequence)
        if sequence.num_computed_tokens:
            return CrossInput(*held, [])
        return CrossInput(*held, encoder.token_ids, encoder.features)

    def allocate(self, request: Request, sequence: Sequence) -> None:
        """Gives the first sequence of a request its blocks; they are to be filled."""
        if count := self.num_needed(request):
            self._tables[sequence.seq_id] = self._device.take(count)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives the child the parent's blocks; it gives back those that it held before."""
        if (table := self._tables.get(parent.seq_id)) is not None:
            for block in table:
                self._device.share(block)
            self.free(child)
            self._tables[child.seq_id] = table

    def free(self, sequence: Sequence) -> None:
        """Takes the sequence's table back, if it has one. Blocks without a holder become free."""
        for tables, pool in ((self._tables, self._device), (self._host_tables, self._host)):
            for block in tables.pop(sequence.seq_id, ()):
                pool.release(block)

    def swap_out(self, sequences: Iterable[Sequence], pairs: dict[int, int]) -> None:
        """Moves tables to the host.

        Args:
            pairs: (device, host) blocks of the swap; those of the tables are added.
        """
        for sequence in sequences:
            if (table := self._tables.get(sequence.seq_id)) is not None:
                host_table = self._host.copy_of(table, pairs)
                self.free(sequence)
                self._host_tables[sequence.seq_id] = host_table

    def swap_in(self, sequences: Iterable[Sequence], pairs: dict[int, int]) -> None:
        """Moves tables to the device.

        Args:
            pairs: (host, device) blocks of the swap; those of the tables are added.
        """
        for sequence in sequences:
            if (host_table := self._host_tables.get(sequence.seq_id)) is not None:
                table = self._device.copy_of(host_table, pairs)
                self.free(sequence)
                self._tables[sequence.seq_id] = table

    def check_invariants(
        self, running: Iterable[int], swapped: Iterable[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Checks who holds tables; returns those on the device and those on the host.

        Args:
            running, swapped: ids of sequences with device and host tables of their own tokens.

        Raises:
            EngineError: an invariant does not hold; the message names it.
        """
        expect(self._tables.keys() <= set(running), "cross tables are held by running sequences")
        is_right = self._host_tables.keys() <= set(swapped)
        expect(is_right, "cross tables on the host are held by swapped sequences")
        return list(self._tables.values()), list(self._host_tables.values())


def _num_distinct(tables: Tables, sequences: Iterable[Sequence]) -> int:
    if not tables:
        return 0
    return len({block for s in sequences for block in tables.get(s.seq_id, ())})
