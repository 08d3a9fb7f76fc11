"""The table of legal moves, move by move."""

from __future__ import annotations

import itertools

import pytest

from tpengine.errors import IllegalMoveError
from tpengine.scheduling.sequence import LEGAL_MOVES, Sequence, SequenceStatus

LEGAL = {
    "WAITING": "RUNNING FINISHED_ABORTED FINISHED_IGNORED FINISHED_FAILED",
    "RUNNING": "WAITING SWAPPED FINISHED_STOPPED FINISHED_LENGTH FINISHED_ABORTED FINISHED_IGNORED "
    "FINISHED_FAILED",
    "SWAPPED": "RUNNING WAITING FINISHED_ABORTED FINISHED_IGNORED FINISHED_FAILED",
}
"""The others are final."""


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceStatus, SequenceStatus)))
def test_moves(old: SequenceStatus, new: SequenceStatus) -> None:
    sequence = Sequence(seq_id=7, index=0, token_ids=[1], num_prompt_tokens=1, status=old)
    if new.name in LEGAL.get(old.name, "").split():
        sequence.move_to(new)
        assert sequence.status is new
    else:
        with pytest.raises(IllegalMoveError, match=f"sequence 7 .*{old.name} to {new.name}"):
            sequence.move_to(new)
        assert sequence.status is old


@pytest.mark.parametrize("status", SequenceStatus)
def test_what_is_final_has_a_reason(status: SequenceStatus) -> None:
    assert status.finished == (not LEGAL_MOVES[status]) == (status.finish_reason is not None)
