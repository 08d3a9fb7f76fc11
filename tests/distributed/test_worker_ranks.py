"""Workers in separate processes give the same tokens as one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distributed import worker_tasks
from distributed.ranks import ADDRESS, Rank, Ranks
from tpengine.config import EngineConfig
from tpengine.messages import Rendezvous, StepOutput
from tpengine.worker.worker import Worker

GIB = 1 << 30


def start(ranks: Ranks, config: EngineConfig) -> list[tuple[str, int]]:
    port = ranks.run(worker_tasks.new_worker, config)[0]
    return ranks.run(
        worker_tasks.start_worker, Rendezvous("test", 1, [ADDRESS] * ranks.size, port, 30.0, 10.0)
    )


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> tuple[int, list[StepOutput]]:
    return run_alone(config)


def run_alone(config: EngineConfig) -> tuple[int, list[StepOutput]]:
    """Bytes of weights, and answers, of a group of one rank."""
    state = Rank(0, 1)
    worker = state.kept["worker"] = Worker(config)
    before = torch.get_num_threads()
    worker.init_device()
    torch.set_num_threads(1)
    worker.load_model()
    weights_bytes = worker.profile_num_available_blocks().weights_bytes
    worker.init_cache_engine(32)
    answers = worker_tasks.run_steps(state)
    worker.shutdown()
    torch.set_num_threads(before)
    assert len({token for answer in answers for token in answer.token_ids}) > 20
    return weights_bytes, answers


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_same_tokens(
    num_ranks: int,
    config: EngineConfig,
    alone: tuple[int, list[StepOutput]],
    groups: dict[int, Ranks],
) -> None:
    """Greedy, seeded and penalised; padded MLP and vocabulary, repeated KV heads."""
    ranks = groups[num_ranks]
    weights_bytes, expected = alone
    for rank, (how, own_bytes) in enumerate(start(ranks, config)):
        wanted = f"rank {rank} of {num_ranks} at {ADDRESS} (interface lo) by shared memory"
        assert how == wanted
        assert own_bytes < weights_bytes * (0.6 if num_ranks == 2 else 0.5)
    answers = ranks.run(worker_tasks.run_steps)
    for answer in answers:
        assert [step.token_ids for step in answer] == [step.token_ids for step in expected]
    for mine, wanted in zip(answers[0], expected, strict=True):
        assert mine.logprobs.keys() == wanted.logprobs.keys()
        for place, entry in mine.logprobs.items():
            assert entry.top_token_ids == wanted.logprobs[place].top_token_ids
            assert entry.logprob == pytest.approx(wanted.logprobs[place].logprob, abs=1e-4)
        assert mine.prompt_logprobs.keys() == wanted.prompt_logprobs.keys()
        for row, part in mine.prompt_logprobs.items():
            assert len(part.entries) == len(wanted.prompt_logprobs[row].entries) > 0
            for entry, other in zip(part.entries, wanted.prompt_logprobs[row].entries, strict=True):
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert not any(step.logprobs for answer in answers[1:] for step in answer)
    for ledger in ranks.run(worker_tasks.ledger_with_free_memory, GIB):
        assert ledger.kv_budget_bytes == int(0.4 * GIB) // num_ranks, "of memory that all share"
        assert ledger.num_host_blocks == int(0.1 * GIB) // num_ranks // ledger.block_bytes
    ranks.start(0, worker_tasks.imported_as_an_actor, "transformers")
    assert ranks.outcome(0) is False, "costs seconds, and no rank needs it"
    ranks.run(worker_tasks.shut_down)


def test_recorded_steps_give_the_same_bits(config: EngineConfig, two: Ranks) -> None:
    """Log probabilities too, beside ops that are called one by one."""
    answers = []
    for enforce_eager in (False, True):
        kernels = replace(config.kernels, enforce_eager=enforce_eager)
        start(two, replace(config, kernels=kernels))
        ledgers = two.run(worker_tasks.ledger_with_free_memory, GIB)
        assert all((ledger.graphs_bytes == 0) == enforce_eager for ledger in ledgers)
        outputs = two.run(worker_tasks.run_steps)
        answers.append([[(o.token_ids, o.logprobs) for o in own] for own in outputs])
        two.run(worker_tasks.shut_down)
    assert answers[0] == answers[1]


def test_same_tokens_from_an_int8_cache(config: EngineConfig, two: Ranks) -> None:
    """A head's scales do not depend on the rank that holds it."""
    config = replace(config, cache=replace(config.cache, kv_cache_dtype="int8"))
    _, expected = run_alone(config)
    start(two, config)
    for answer in two.run(worker_tasks.run_steps):
        assert [step.token_ids for step in answer] == [step.token_ids for step in expected]
    two.run(worker_tasks.shut_down)
