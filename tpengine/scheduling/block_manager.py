"""Which cache blocks belong to which sequence: allocate, append, fork, copy on write, swap, free.

Paging as in "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(Kwon et al., 2023): the cache is a pool of equal blocks, and a sequence holds a table of block ids
in the order of its tokens. Sequences of one request share the blocks of their common beginning, and
requests share full blocks of equal content. This module only counts; it touches no tensor.

If every layer of the model has a sliding window, a running sequence gives back the blocks that its
next tokens do not see. In its table `NO_BLOCK` takes their places, all at the beginning. The prefix
cache knows a block that was given back until its place is needed.

`BlockManager.check_invariants` finds a lost block, a doubled block and a wrong reference count;
tests call it after every step.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from tpengine.errors import CacheSizeError, EngineError
from tpengine.scheduling.block_pool import BlockChain, BlockPool, expect, root_of
from tpengine.scheduling.cross_blocks import CrossBlocks
from tpengine.scheduling.sequence import Request, Sequence, SequenceStatus

BlockPair = tuple[int, int]
"""(source, target)"""

NO_BLOCK = -1
"""Stands in a table for a block that has left the sliding window."""


class AllocStatus(enum.Enum):
    """Whether a request that holds no device blocks can be given blocks."""

    OK = "ok"
    LATER = "later"
    """Not now, but when other requests have given blocks back."""
    NEVER = "never"
    """It needs more blocks than the whole pool has."""


class Growth(NamedTuple):
    """What a sequence's table gained.

    Attributes:
        block_ids: new blocks at its end.
        copy: (shared block, own copy) of the block that the sequence writes next; None if that
            block is not shared.
        copy_place: index of the copy in the table.
    """

    block_ids: list[int]
    copy: BlockPair | None = None
    copy_place: int = 0


class BlockManager:
    """Block tables over a pool of device blocks and one of host blocks.

    Args:
        num_device_blocks: blocks in the pool, at least 1.
        block_size: tokens in a block.
        watermark: share of the pool that admission leaves free, so that the next tokens of running
            requests do not preempt a request that has just been admitted.
        num_host_blocks: blocks for requests that are swapped out.
        enable_prefix_caching: whether full blocks are found again by their content.
        num_kept_tokens: see `EngineConfig.num_kept_tokens`.
        max_step_tokens: most tokens that a step computes. With a sliding window a table covers no
            more tokens than the next step can compute; otherwise it covers all that there are.

    Attributes:
        cross: tables of blocks for encoder prompts, which come and go with those of their requests.

    Raises:
        CacheSizeError: the pool or the block size is empty.
    """

    def __init__(
        self,
        num_device_blocks: int,
        block_size: int,
        watermark: float = 0.01,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = False,
        num_kept_tokens: int = sys.maxsize,
        max_step_tokens: int = sys.maxsize,
    ) -> None:
        if num_device_blocks < 1 or block_size < 1:
            text = f"the KV cache has {num_device_blocks} blocks of {block_size} tokens"
            hint = "give the cache more memory"
            raise CacheSizeError(f"{text}, and needs at least 1 of each; {hint}")
        self.block_size = block_size
        self.num_total_blocks = num_device_blocks
        self.device = BlockPool(num_device_blocks)
        self.host = BlockPool(num_host_blocks)
        self.cross = CrossBlocks(self.device, self.host, block_size)
        self._num_watermark_blocks = int(watermark * num_device_blocks)
        self._num_kept_tokens = num_kept_tokens
        self._reach = max_step_tokens if num_kept_tokens < sys.maxsize else sys.maxsize
        self._most_blocks = most_held_blocks(num_kept_tokens, max_step_tokens, block_size)
        self._tables: dict[int, list[int]] = {}
        self._host_tables: dict[int, list[int]] = {}
        # By sequence id, of sequences that hold blocks, and of waiting ones that `can_allocate` has
        # seen; None: no prefix caching.
        self._chains: dict[int, BlockChain] | None = {} if enable_prefix_caching else None

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that no sequence holds."""
        return self.device.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need; the last one may be partly filled."""
        return -(-num_tokens // self.block_size)

    def most_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence of so many tokens holds until all of them are computed."""
        return min(self.num_blocks_for(num_tokens), self._most_blocks)

    def num_needed_blocks(self, request: Request) -> int:
        """Most blocks that the request's unfinished sequences hold until all their present tokens
        are computed; their common beginning counts once, and so does their encoder prompt."""
        sequences = request.unfinished_sequences
        common, num_cross = request.num_common_tokens, self.cross.num_needed(request)
        if all(sequence.num_tokens == common for sequence in sequences):
            return num_cross + self.most_blocks_for(common)
        shared = common // self.block_size
        own = sum(self.num_blocks_for(s.num_tokens) - shared for s in sequences)
        return num_cross + min(shared + own, len(sequences) * self._most_blocks)

    def can_allocate(self, request: Request) -> AllocStatus:
        """Whether the request, which holds no blocks, can be given all blocks that it needs."""
        needed = self.num_needed_blocks(request)
        if needed > self.num_total_blocks:
            return AllocStatus.NEVER
        missing = self._num_missing(request, needed)
        if missing > 0:
            cached = _held(self._cached_blocks(request))
            missing -= sum(self.device.ref_count(block) > 0 for block in cached)
        return AllocStatus.OK if missing <= 0 else AllocStatus.LATER

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that a waiting request needs besides the free ones, if it finds none of its own in
        the prefix cache; 0 or less: it has room."""
        return self._num_missing(request, self.num_needed_blocks(request))

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that the prefix cache knows at this moment."""
        return len(self._cached_blocks(request)) * self.block_size

    def is_coming(self, request: Request, others: Iterable[Request]) -> bool:
        """Whether one of `others` computes the block that a waiting request would compute first, so
        that the prefix cache will know it."""
        if self._chains is None:
            return False
        place = len(self._cached_blocks(request))
        block, *rest = (
            self._chain(r, r.unfinished_sequences[0]).digests[place : place + 1]
            for r in (request, *others)
        )
        return bool(block) and block in rest

    def _num_missing(self, request: Request, needed: int) -> int:
        # The watermark is for running requests. Without this condition, a request that needs nearly
        # the whole pool would wait for ever.
        if self._tables:
            # Sequences that are still equal need a block of their own for their next token.
            needed += self._num_watermark_blocks + len(request.unfinished_sequences) - 1
        return needed - self.num_free_blocks

    def allocate(self, request: Request) -> list[int]:
        """Gives the first unfinished sequence of a request blocks for its tokens and encoder
        prompt. Tokens in blocks that the prefix cache knows count as computed.

        Returns:
            A copy of the sequence's table.

        Raises:
            EngineError: the sequence holds blocks already, or the pool has too few; ask
                `can_allocate` first.
        """
        sequence = request.unfinished_sequences[0]
        if sequence.seq_id in self._tables:
            raise EngineError(f"sequence {sequence.seq_id} holds blocks already")
        cached = self._cached_blocks(request)
        sequence.num_computed_tokens = len(cached) * self.block_size
        # Shared first, so that `take` does not evict them.
        for block in _held(cached):
            self.device.share(block)
            self.device.num_hits += 1
        table = cached + self.device.take(self._num_next_blocks(sequence) - len(cached))
        self._tables[sequence.seq_id] = table
        self.cross.allocate(request, sequence)
        if self._chains is not None:
            self._chain(request, sequence).num_published = len(cached)
        return table.copy()

    def num_lacking_blocks(self, request: Request) -> int:
        """Blocks that the request's running sequences still need, so that each token has a place
        that no other sequence writes.

        The scheduler asks this for every running request in every step; it is nearly always 0.
        """
        lacking = 0
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                num_blocks = len(self._tables[sequence.seq_id])
                end = num_blocks * self.block_size
                if end < len(sequence.token_ids) or end <= sequence.num_computed_tokens:
                    lacking += self._num_next_blocks(sequence) - num_blocks
        if len(request.sequences) > 1:
            lacking += self._num_copies(self._tables, self.device, request.running_sequences)
        return lacking

    def num_held_blocks(self, request: Request) -> int:
        """Device blocks that the request's sequences hold; a shared block counts once."""
        num_cross = self.cross.num_held(request.sequences)
        if len(request.sequences) == 1:  # it holds no block twice
            table = self._tables.get(request.sequences[0].seq_id, [])
            return num_cross + len(table) - table.count(NO_BLOCK)
        own = {b for s in request.sequences for b in _held(self._tables.get(s.seq_id, []))}
        return num_cross + len(own)

    def num_own_blocks(self, request: Request) -> int:
        """Device blocks that are free when the request gives its own back: no other holds them."""
        if self._chains is None:  # requests share blocks through the prefix cache alone
            return self.num_held_blocks(request)
        tables = [_held(self._tables.get(s.seq_id, [])) for s in request.sequences]
        count = self.device.ref_count
        held = Counter(block for table in tables for block in table)
        return sum(count(block) == number for block, number in held.items())

    def num_host_blocks(self, request: Request) -> int:
        """Host blocks that the request's sequences hold; a shared block counts once."""
        tables = [self._host_tables.get(s.seq_id, []) for s in request.sequences]
        own = {block for table in tables for block in _held(table)}
        return len(own) + self.cross.num_hosted(request.sequences)

    def append(self, sequence: Sequence) -> Growth:
        """Extends the sequence's table until its tokens have a place. Gives it a copy of its partly
        filled block if other sequences hold that too (copy on write).

        Raises:
            EngineError: the sequence holds no table, or the pool has too few blocks; compare
                `num_lacking_blocks` with `num_free_blocks` first.
        """
        table = self._table(sequence)
        num_needed = self._num_next_blocks(sequence)
        blocks = self.device.take(max(0, num_needed - len(table)))
        table.extend(blocks)
        place, filled = divmod(sequence.num_computed_tokens, self.block_size)
        if not filled or self.device.ref_count(table[place]) == 1:
            return Growth(blocks)
        (own,) = self.device.take(1)
        shared, table[place] = table[place], own
        self.device.release(shared)
        return Growth(blocks, (shared, own), place)

    def num_places(self, sequence: Sequence) -> int:
        """Tokens that have a place in the sequence's table, or that `reserve` could give one: until
        only the watermark is free."""
        num_spare = max(0, self.num_free_blocks - self._num_watermark_blocks)
        return (len(self._table(sequence)) + num_spare) * self.block_size

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Extends the sequence's table until so many tokens have a place; returns the new blocks.

        Args:
            num_tokens: at most `num_places`.
        """
        table = self._table(sequence)
        blocks = self.device.take(max(0, self.num_blocks_for(num_tokens) - len(table)))
        table.extend(blocks)
        return blocks

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Gives the child the parent's blocks of the first `num_tokens` tokens, which are computed.
        The child gives back the blocks that it held before. Each shared block counts one more
        reference."""
        shared = self._table(parent)[: self.num_blocks_for(num_tokens)]
        for block in _held(shared):
            self.device.share(block)
        if child.seq_id in self._tables:
            self.free(child)
        self._tables[child.seq_id] = shared
        self.cross.fork(parent, child)
        if self._chains is not None:
            chain = self._chains[parent.seq_id]
            self._chains[child.seq_id] = chain.fork(num_tokens // self.block_size)

    def mark_computed(self, sequence: Sequence, num_computed: int) -> None:
        """Offers the sequence's full blocks to the prefix cache, and gives back those that its next
        tokens do not see; called when a block was filled.

        Args:
            num_computed: tokens that answered steps have computed.
        """
        table = self._tables[sequence.seq_id]
        if self._chains is not None:
            chain = self._chains[sequence.seq_id]
            num_full = num_computed // self.block_size
            chain.extend(sequence.token_ids, num_full, self.block_size)
            for index in range(chain.num_published, num_full):
                self.device.publish(table[index], chain.digests[index])
            chain.num_published = max(chain.num_published, num_full)
        if num_computed > self._num_kept_tokens:
            place = self._first_kept(num_computed)
            while place > 0 and table[place - 1] != NO_BLOCK:
                place -= 1
                self.device.release(table[place])
                table[place] = NO_BLOCK

    def can_swap_out(self, request: Request) -> bool:
        """Whether enough host blocks are free for the computed blocks of the request."""
        held = {b for s in request.unfinished_sequences for b in _held(self._computed_blocks(s))}
        num_cross = self.cross.num_held(request.unfinished_sequences)
        return bool(held) and len(held) + num_cross <= self.host.num_free

    def swap_out(self, request: Request) -> list[BlockPair]:
        """Moves the request's tables to host blocks; returns the (device, host) pairs to copy."""
        pairs: dict[int, int] = {}
        for sequence in request.unfinished_sequences:
            table = self._computed_blocks(sequence)
            left = table[: table.count(NO_BLOCK)]
            host_table = left + self.host.copy_of(_held(table), pairs)
            self._host_tables[sequence.seq_id] = host_table
        for sequence in request.unfinished_sequences:
            self._drop_table(sequence)
        self.cross.swap_out(request.unfinished_sequences, pairs)
        return list(pairs.items())

    def can_swap_in(self, request: Request) -> AllocStatus:
        """Whether device blocks are free for a swapped request and its next tokens."""
        sequences = request.unfinished_sequences
        tables = [self._host_tables[s.seq_id] for s in sequences]
        needed = len({block for table in tables for block in _held(table)})
        needed += self.cross.num_hosted(sequences)
        for sequence, table in zip(sequences, tables, strict=True):
            needed += self._num_next_blocks(sequence) - len(table)
        needed += self._num_copies(self._host_tables, self.host, sequences)
        if needed > self.num_total_blocks:
            return AllocStatus.NEVER
        keep = self._num_watermark_blocks if self._tables else 0
        return AllocStatus.OK if self.num_free_blocks - needed >= keep else AllocStatus.LATER

    def swap_in(self, request: Request) -> list[BlockPair]:
        """Moves the request's tables to device blocks; returns the (host, device) pairs to copy."""
        pairs: dict[int, int] = {}
        for sequence in request.unfinished_sequences:
            host_table = self._host_tables.pop(sequence.seq_id)
            left, held = host_table[: host_table.count(NO_BLOCK)], _held(host_table)
            self._tables[sequence.seq_id] = left + self.device.copy_of(held, pairs)
            for block in held:
                self.host.release(block)
        self.cross.swap_in(request.unfinished_sequences, pairs)
        return list(pairs.items())

    def free(self, sequence: Sequence) -> None:
        """Takes the sequence's table back, on the device or on the host. Blocks that no other
        sequence holds become free.

        Raises:
            EngineError: the sequence holds no table, so this would free its blocks twice.
        """
        if sequence.seq_id in self._host_tables:
            for block in _held(self._host_tables.pop(sequence.seq_id)):
                self.host.release(block)
        else:
            self._drop_table(sequence)
        self.cross.free(sequence)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drops the sequence's digests, by which its blocks are found in the prefix cache. `free`
        does so too; a waiting sequence has digests without blocks."""
        if self._chains is not None:
            self._chains.pop(sequence.seq_id, None)

    def holds_blocks(self, sequence: Sequence) -> bool:
        """Whether the sequence has a table, on the device or on the host."""
        return sequence.seq_id in self._tables or sequence.seq_id in self._host_tables

    def block_ids(self, sequence: Sequence) -> list[int]:
        """A copy of the sequence's device table; empty when it holds no device blocks."""
        return self._tables.get(sequence.seq_id, []).copy()

    def num_unused_places(self, sequences: Iterable[Sequence]) -> int:
        """Token places in held blocks that hold no token; a shared block counts once."""
        used: dict[int, int] = {}
        for sequence in sequences:
            table = self._tables.get(sequence.seq_id, ())
            left = sequence.num_tokens + sequence.num_in_flight
            for block in table:
                used[block] = max(used.get(block, 0), min(left, self.block_size))
                left -= self.block_size
        return len(used) * self.block_size - sum(used.values())

    def check_invariants(
        self, running: Iterable[Sequence], swapped: Iterable[Sequence] = ()
    ) -> None:
        """Looks for lost, doubled and missing blocks. Slow; meant for tests.

        Args:
            running: all sequences that should hold device blocks.
            swapped: all sequences that should hold host blocks.

        Raises:
            EngineError: an invariant does not hold; the message names it.
        """
        holders = {sequence.seq_id: sequence for sequence in running}
        expect(holders.keys() == self._tables.keys(), "tables are held by running sequences")
        hosted = {sequence.seq_id for sequence in swapped}
        expect(hosted == self._host_tables.keys(), "host tables are held by swapped sequences")
        crossed, host_crossed = self.cross.check_invariants(holders, hosted)
        self.device.check_invariants([*map(_held, self._tables.values()), *crossed])
        self.host.check_invariants([*map(_held, self._host_tables.values()), *host_crossed])
        for seq_id, sequence in holders.items():
            table = self._tables[seq_id]
            held = _held(table)
            covers = len(table) * self.block_size >= sequence.num_computed_tokens
            expect(covers, f"the table of sequence {seq_id} covers its computed tokens")
            window = table[self._first_kept(sequence.num_computed_tokens) :]
            is_within = sequence.num_unanswered > 0 or len(held) <= self._most_blocks
            holds = NO_BLOCK not in window and is_within
            expect(holds, f"sequence {seq_id} holds the blocks of its window, and few others")
            # A partly filled block may be shared: it is copied before it is written.
            blank = table[self.num_blocks_for(sequence.num_computed_tokens) :]
            owns = all(self.device.ref_count(block) == 1 for block in blank)
            owns = owns and len(set(held)) == len(held)
            expect(owns, f"sequence {seq_id} alone writes the blocks that it will write")

    def _table(self, sequence: Sequence) -> list[int]:
        try:
            return self._tables[sequence.seq_id]
        except KeyError:
            raise EngineError(f"sequence {sequence.seq_id} holds no blocks") from None

    def _drop_table(self, sequence: Sequence) -> None:
        # The end first: blocks at the beginning are shared more often, and are evicted last.
        for block in reversed(_held(self._table(sequence))):
            self.device.release(block)
        del self._tables[sequence.seq_id]

    def _computed_blocks(self, sequence: Sequence) -> list[int]:
        return self._table(sequence)[: self.num_blocks_for(sequence.num_computed_tokens)]

    def _first_kept(self, num_computed_tokens: int) -> int:
        """Place in its table of the first block that a sequence with so many computed tokens keeps
        for those that follow."""
        return max(0, num_computed_tokens - self._num_kept_tokens) // self.block_size

    def _num_next_blocks(self, sequence: Sequence) -> int:
        """Length of a table with a place for each token that the next step can compute."""
        num_next = min(sequence.num_behind, self._reach)
        return self.num_blocks_for(sequence.num_computed_tokens + num_next)

    def _cached_blocks(self, request: Request) -> list[int]:
        """Blocks of known content with which a waiting request begins, as a table. At least the
        last common token of its sequences remains to be computed, since the next token is sampled
        there."""
        if self._chains is None or request.sampling_params.prompt_logprobs is not None:
            return []
        sequences = request.unfinished_sequences
        num_blocks = (request.num_common_tokens - 1) // self.block_size
        chain = self._chain(request, sequences[0])
        chain.extend(sequences[0].token_ids, num_blocks, self.block_size)
        if self._first_kept(num_blocks * self.block_size) > 0:
            return self._cached_window(chain.digests[:num_blocks])
        blocks = []
        for digest in chain.digests[:num_blocks]:
            block = self.device.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _chain(self, request: Request, sequence: Sequence) -> BlockChain:
        """The digests of a sequence; K and V of one adapter or salt are never found for another."""
        assert self._chains is not None
        if sequence.seq_id not in self._chains:
            adapter = request.adapter
            root = root_of(None if adapter is None else adapter.key, request.owner.cache_salt)
            pictures = () if request.pictures is None else request.pictures.spans
            self._chains[sequence.seq_id] = BlockChain(root=root, pictures=pictures)
        return self._chains[sequence.seq_id]

    def _cached_window(self, digests: list[bytes]) -> list[int]:
        """The longest beginning of which the cache knows the blocks that the next token sees. The
        blocks before these are not read again, so it does not matter whether they are known."""
        end, window = len(digests), list[int]()  # the window from its end
        while end - len(window) > self._first_kept(end * self.block_size):
            block = self.device.find(digests[end - len(window) - 1])
            if block is None:
                end -= len(window) + 1
                window.clear()
            else:
                window.append(block)
        return [NO_BLOCK] * (end - len(window)) + window[::-1]

    def _num_copies(
        self, tables: dict[int, list[int]], pool: BlockPool, sequences: list[Sequence]
    ) -> int:
        """Copies on write that the next tokens of `sequences` need. If every holder of a block
        writes to it, the last one needs no copy."""
        num_writers: Counter[int] = Counter()
        for sequence in sequences:
            place, filled = divmod(sequence.num_computed_tokens, self.block_size)
            if filled:
                num_writers[tables[sequence.seq_id][place]] += 1
        return sum(min(n, pool.ref_count(block) - 1) for block, n in num_writers.items())


def most_held_blocks(num_kept_tokens: int, max_step_tokens: int, block_size: int) -> int:
    """Most blocks that a sequence needs at once if every layer has a sliding window: those of the
    window, wherever it begins in its first block, and those of a step's tokens. With several steps
    in flight it may hold more, until they are answered."""
    return 1 + -(-num_kept_tokens // block_size) + -(-max_step_tokens // block_size)


def _held(table: list[int]) -> list[int]:
    """The blocks of a table without those that were given back."""
    return table[table.count(NO_BLOCK) :]
