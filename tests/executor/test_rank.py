"""What a rank answers whose worker begins a step before it has finished the one before."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from tpengine.executor.channel import Frame, FrameKind
from tpengine.executor.codec import encode, encode_call
from tpengine.executor.rank import Rank
from tpengine.messages import StepInput, StepOutput

CALL = ("load_vocabulary", (), {})


class LateWorker:
    """As on a GPU. The step of number `fails_at` cannot be begun."""

    fails_at = 5

    def __init__(self) -> None:
        self._begun: list[StepOutput] = []

    def execute_model(self, step: StepInput) -> list[StepOutput]:
        if step.step == self.fails_at:
            raise MemoryError("no memory is left")
        outputs = self.finish_steps()
        self._begun = [StepOutput(step.step, [])]
        return outputs

    def finish_steps(self) -> list[StepOutput]:
        outputs, self._begun = self._begun, []
        return outputs

    def load_vocabulary(self) -> None:
        pass


def test_answers_come_in_the_order_of_the_steps() -> None:
    rank: Any = Rank()
    rank._worker = LateWorker()
    rank._heartbeat = SimpleNamespace(during=lambda doing: nullcontext())

    def serve(kind: FrameKind, number: int) -> list[tuple[FrameKind, int]]:
        is_step = kind is FrameKind.STEP
        payload = encode(StepInput(number, [], [])) if is_step else encode_call(CALL)
        return [answer[:2] for answer in rank._serve_frame(Frame(kind, number, payload))]

    assert serve(FrameKind.STEP, 1) == []
    assert serve(FrameKind.STEP, 2) == [(FrameKind.ANSWER, 1)]
    assert serve(FrameKind.CALL, 99) == [(FrameKind.ANSWER, 2), (FrameKind.ANSWER, 99)]
    assert serve(FrameKind.STEP, 3) == []
    assert [answer[:2] for answer in rank._finish_steps()] == [(FrameKind.ANSWER, 3)]
    assert serve(FrameKind.STEP, 4) == []
    # The group is lost; no later answer may hide it.
    assert serve(FrameKind.STEP, 5) == [(FrameKind.FAILURE, 4)]
    assert rank._finish_steps() == []
