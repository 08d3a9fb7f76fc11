"""A rank without a model, for the benchmark `transport`: it answers steps as a real one does."""

from __future__ import annotations

import os
import select
import threading
from array import array

from tpengine.executor.channel import Channel, FrameKind, Invitation, connect
from tpengine.executor.codec import decode_step, encode
from tpengine.executor.launch import rank_process
from tpengine.executor.rank import Rank
from tpengine.messages import StepOutput

TIMEOUT_S = 30.0


class EchoRank:
    """Answers steps like a rank, as an actor of Ray's."""

    def join(self, rank: int, invitation: Invitation) -> int:
        """Serves steps from the channel in a thread until it closes; returns the process id."""
        channel = connect(*invitation, rank, 1, TIMEOUT_S)
        threading.Thread(target=self.serve, args=(channel, rank), daemon=True).start()
        return os.getpid()

    def serve(self, channel: Channel, rank: int) -> None:
        """Answers each step; a call gives this rank its number."""
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        while True:
            poll.poll(TIMEOUT_S * 1e3)
            while (frame := channel.take()) is not None:
                if frame.kind is FrameKind.CALL:
                    rank, answer = frame.payload[0], b""
                else:
                    answer = self.step(frame.payload, rank)
                channel.send(FrameKind.ANSWER, frame.number, answer, TIMEOUT_S)

    def step(self, payload: bytes, rank: int = 0) -> bytes:
        """Decodes a step and encodes its answer: samples at rank 0, none at other ranks."""
        step = decode_step(payload)
        return encode(echo(step.step, len(step.sample_slots) if rank == 0 else 0))


class EchoProcess(Rank):
    """The same as a child of the driver."""

    def serve(self, steps: Channel, control: Channel) -> None:
        """See `EchoRank.serve`."""
        EchoRank().serve(steps, 0)


def echo(step: int, count: int) -> StepOutput:
    """The answer to a step: an id and its log probability for each of `count` sequences."""
    return StepOutput(step, [31_337] * count, chosen_logprobs=array("f", bytes(4 * count)))


if __name__ == "__main__":
    rank_process.main(EchoProcess())
