"""How much of the held cache holds no token."""

from __future__ import annotations

import random

from tpengine.config import SchedulerConfig
from tpengine.outputs import RequestMetrics
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling import BlockManager, Scheduler, SchedulerOutput, StepDecisions
from tpengine.sequence import Request, Sequence, SequenceStatus

BLOCK_SIZE = 16


def scheduler_of(num_blocks: int) -> tuple[Scheduler, BlockManager]:
    config = SchedulerConfig(
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        max_model_len=4096,
        enable_chunked_prefill=True,
        policy="fcfs",
        preemption_mode="swap",
    )
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    return Scheduler(config, blocks), blocks


def request_of(index: int, num_prompt_tokens: int, params: SamplingParams) -> Request:
    prompt = [index] * num_prompt_tokens
    sequences = [
        Sequence(100 * index + place, place, prompt.copy(), num_prompt_tokens)
        for place in range(params.num_sequences)
    ]
    metrics = RequestMetrics(arrival_time=0.0)
    return Request(str(index), None, prompt, params, 0, index, sequences, metrics)


def finish_step(scheduler: Scheduler, output: SchedulerOutput, params: SamplingParams) -> None:
    """Gives every sampled sequence a token, and ends those that are long enough."""
    decisions = StepDecisions()
    for place, sequence in enumerate(output.sampled):
        decisions.tokens.append((sequence, place))
        if sequence.num_output_tokens + 1 == params.max_tokens:
            decisions.finished.append((sequence, SequenceStatus.FINISHED_LENGTH))
    scheduler.update(output, decisions)


def test_less_than_four_percent_is_unused() -> None:
    """200 requests of 400 tokens on average; at most block_size - 1 places a sequence."""
    rng = random.Random(3)
    scheduler, blocks = scheduler_of(2000)
    params = SamplingParams(max_tokens=60)
    lengths = [rng.randint(140, 600) for _ in range(200)]
    assert 390 < sum(lengths) / 200 + 30 < 410
    for index, length in enumerate(lengths):
        scheduler.add_request(request_of(index, length, params))
    unused = held = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        running = scheduler.running_sequences()
        now = blocks.num_unused_places(running)
        assert now <= (BLOCK_SIZE - 1) * len(running)
        unused += now
        held += (blocks.num_total_blocks - blocks.num_free_blocks) * BLOCK_SIZE
        finish_step(scheduler, output, params)
    assert held > 0
    assert unused / held < 0.04


def test_a_group_holds_its_prompt_once() -> None:
    """Eight sequences of a 512-token prompt: 32 blocks, and one more each for what is their own."""
    scheduler, blocks = scheduler_of(200)
    params = SamplingParams(n=8, max_tokens=16)
    scheduler.add_request(request_of(0, 512, params))
    held = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        held.append(blocks.num_total_blocks - blocks.num_free_blocks)
        assert len(output.sampled) == 8
        finish_step(scheduler, output, params)
    assert held == [32] + [32 + 8] * 15
