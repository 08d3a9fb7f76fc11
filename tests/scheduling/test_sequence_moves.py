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
    "FINISHED_STOPPED": "",
    "FINISHED_LENGTH": "",
    "FINISHED_ABORTED": "",
    "FINISHED_IGNORED": "",
    "FINISHED_FAILED": "",
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceStatus, SequenceStatus)))
def test_moves(old: SequenceStatus, new: SequenceStatus) -> None:
    sequence = Sequence(seq_id=7, index=0, token_ids=[1], num_prompt_tokens=1, status=old)
    if new.name in LEGAL[old.name].split():
        sequence.move_to(new)
        assert sequence.status is new
    else:
        with pytest.raises(IllegalMoveError, match=f"sequence 7 .*{old.name} to {new.name}"):
            sequence.move_to(new)
        assert sequence.status is old


def test_every_status_is_in_the_table() -> None:
    assert set(LEGAL_MOVES) == set(SequenceStatus)
    assert set(LEGAL) == {status.name for status in SequenceStatus}
    for status, moves in LEGAL_MOVES.items():
        assert status.finished == (not moves)
        assert status.finished == (status.finish_reason is not None)
