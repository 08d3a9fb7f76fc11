"""How much of the held cache holds no token."""

from __future__ import annotations

import random
from array import array

from tpengine.messages import StepOutput

from .loop import Limits, Loop

BLOCK_SIZE = 16


def test_less_than_four_percent_is_unused() -> None:
    """200 requests of 400 tokens on average; at most block_size - 1 places a sequence."""
    rng = random.Random(3)
    limits = Limits(tokens=2048, seqs=64, num_blocks=2000, block_size=BLOCK_SIZE, mode="swap")
    loop = Loop(limits)  # for its parts: it would look at every token in every step
    scheduler, blocks = loop.scheduler, loop.blocks
    lengths = [rng.randint(140, 600) for _ in range(200)]
    assert 390 < sum(lengths) / 200 + 30 < 410
    loop.add_plain(*lengths, max_tokens=60)
    unused = held = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        running = scheduler.running_sequences()
        now = blocks.num_unused_places(running)
        assert now <= (BLOCK_SIZE - 1) * len(running)
        unused += now
        held += (blocks.num_total_blocks - blocks.num_free_blocks) * BLOCK_SIZE
        count = len(output.sampled)
        zeros = array("f", bytes(4 * count))
        answer = StepOutput(output.step_input.step, [1] * count, chosen_logprobs=zeros)
        scheduler.update(output, loop.processor.process(output, answer))
    assert held > 0
    assert unused / held < 0.04
