"""The work of the ranks in `test_gpu_ranks`.

A file of its own, for a rank imports it with all that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from support.workers import loaded_worker

from distributed.ranks import ADDRESS, Rank
from tpengine import messages
from tpengine.config import EngineConfig
from tpengine.worker.worker import Worker

VOCAB_SIZE = 101
NUM_STEPS = 24
BLOCK_SIZE = 16
PROMPT_LENGTHS = (5, 40, 17)
PARAMS = (
    messages.SamplingRules(temperature=0.0),
    messages.SamplingRules(temperature=0.0, logprobs=2, repetition_penalty=1.3),
    messages.SamplingRules(temperature=1.0, prompt_logprobs=1),
)


def steps() -> Iterator[messages.StepInput]:
    """Three prompts, then decodes without tokens: ranks use the tokens that they sampled."""
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for slot, (length, params) in enumerate(zip(PROMPT_LENGTHS, PARAMS, strict=True)):
        ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        blocks = list(range(slot * 8, slot * 8 + 8))
        sequences.append(messages.NewSequence(slot, ids, length, 0, blocks, params, 11, 0, []))
    everyone = list(range(len(sequences)))
    sampled = {"sample_rows": everyone, "sample_slots": everyone}
    yield messages.StepInput(1, everyone, list(PROMPT_LENGTHS), sequences, **sampled)
    for number in range(2, NUM_STEPS + 1):
        yield messages.StepInput(number, everyone, [1] * len(everyone), **sampled)


def new_worker(state: Rank, config: EngineConfig) -> int | None:
    parallel = replace(config.parallel, tensor_parallel_size=state.size)
    state.kept["worker"] = worker = Worker(replace(config, parallel=parallel), rank=state.rank)
    return worker.open_rendezvous(ADDRESS) if state.rank == 0 else None


def start_worker(state: Rank, rendezvous: messages.Rendezvous) -> tuple[str, int]:
    worker: Worker = state.kept["worker"]
    how = worker.connect(rendezvous)
    worker.init_device()
    torch.set_num_threads(1)
    worker.load_model()
    ledger = worker.profile_num_available_blocks()
    worker.init_cache_engine(ledger.num_device_blocks)
    return how, ledger.weights_bytes


def run_steps(state: Rank) -> list[messages.StepOutput]:
    worker: Worker = state.kept["worker"]
    return [output for step in steps() for output in worker.execute_model(step)]


def shut_down(state: Rank) -> None:
    state.kept.pop("worker").shutdown()


def run_alone(config: EngineConfig) -> list[messages.StepOutput]:
    """Answers of a group of one rank."""
    state, before = Rank(0, 1), torch.get_num_threads()
    worker = state.kept["worker"] = loaded_worker(config)
    torch.set_num_threads(1)
    worker.init_cache_engine(32)
    answers = run_steps(state)
    worker.shutdown()
    torch.set_num_threads(before)
    assert len({token for answer in answers for token in answer.token_ids}) > 20
    return answers
