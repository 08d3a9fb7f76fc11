"""Slots of the workers' batch, and what the workers have yet to be told of them."""

from __future__ import annotations

from tpengine.messages import Fork
from tpengine.scheduling.step import slot_of
from tpengine.sequence import Sequence


class BatchSlots:
    """Gives slots to sequences, and remembers which of these the workers hold.

    A sequence may have a slot before the workers know of it: those of a request with several get
    theirs together, and enter one by one.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._free = list(reversed(range(max_num_seqs)))
        self._known: set[int] = set()  # ids of sequences
        self._freed: list[int] = []
        self._forks: dict[int, tuple[Sequence, Sequence]] = {}  # by id of the child
        self._overrides: dict[int, Sequence] = {}

    @property
    def num_free(self) -> int:
        """Slots that no sequence has."""
        return len(self._free)

    def give(self, sequence: Sequence) -> None:
        """Gives a slot to a sequence that has none."""
        sequence.slot = self._free.pop()

    def take_back(self, sequence: Sequence) -> None:
        """Takes the slot away; what was to be told of it is no longer true."""
        slot = slot_of(sequence)
        self._free.append(slot)
        if sequence.seq_id in self._known:
            self._known.remove(sequence.seq_id)
            self._freed.append(slot)
        self._forks.pop(sequence.seq_id, None)
        self._overrides.pop(sequence.seq_id, None)
        sequence.slot = None

    def is_known(self, sequence: Sequence) -> bool:
        """Whether the workers hold the sequence, or will with what they are told next."""
        return sequence.seq_id in self._known

    def enter(self, sequence: Sequence) -> None:
        """Notes that the next message brings the sequence to the workers."""
        self._known.add(sequence.seq_id)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Has the workers told that the child's slot becomes a copy of the parent's."""
        self._known.add(child.seq_id)
        self._forks[child.seq_id] = (parent, child)

    def override(self, sequence: Sequence) -> None:
        """Has the workers told the sequence's last token, which is not the one that they chose."""
        self._overrides[sequence.seq_id] = sequence

    def take_freed(self) -> list[int]:
        """Slots that the next message gives back."""
        freed, self._freed = self._freed, []
        return freed

    def take_forks(self) -> list[Fork]:
        """Forks of the next message."""
        forks = [fork_of(parent, child) for parent, child in self._forks.values()]
        self._forks.clear()
        return forks

    def take_overrides(self) -> list[tuple[int, int]]:
        """(slot, last token) pairs of the next message."""
        overrides = [(slot_of(s), s.token_ids[-1]) for s in self._overrides.values()]
        self._overrides.clear()
        return overrides

    def are_whole(self, sequences: list[Sequence], max_num_seqs: int) -> bool:
        """Whether free slots and those of `sequences` are all slots, each once."""
        taken = [slot_of(sequence) for sequence in sequences]
        once = len(set(self._freed)) == len(self._freed)
        return once and sorted(self._free + taken) == list(range(max_num_seqs))


def fork_of(parent: Sequence, child: Sequence) -> Fork:
    """The message that the child's slot becomes a copy of the parent's."""
    return Fork(slot_of(parent), slot_of(child), child.index)
