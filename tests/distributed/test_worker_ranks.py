"""Workers in processes of their own: the same tokens as one rank, whatever the ranks divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distributed.ranks import Rank, Ranks
from tpengine import EngineArgs, SamplingParams
from tpengine.config import EngineConfig
from tpengine.errors import CollectiveError
from tpengine.messages import NewSequence, Rendezvous, StepInput, StepOutput
from tpengine.worker.worker import Worker

ADDRESS = "127.0.0.1"
VOCAB_SIZE = 101
INTERMEDIATE_SIZE = 45
"""Divisible by no number of ranks; the last of 4 has padding only."""
NUM_STEPS = 24
BLOCK_SIZE = 16
PROMPT_LENGTHS = (5, 40, 17)
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=NUM_STEPS),
    SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, logprobs=2, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, max_tokens=NUM_STEPS, prompt_logprobs=1),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("llama")
    llama = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        mlp_bias=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    args = EngineArgs(
        model=str(folder), dtype="float32", block_size=BLOCK_SIZE, num_device_blocks_override=32
    )
    return args.create_engine_config("cpu")


def steps() -> Iterator[StepInput]:
    """Three prompts, then decodes that carry no token: ranks feed on what they sampled."""
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for slot, (length, params) in enumerate(zip(PROMPT_LENGTHS, PARAMS, strict=True)):
        ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        blocks = list(range(slot * 8, slot * 8 + 8))
        sequences.append(NewSequence(slot, ids, length, 0, blocks, params, 11, 0, []))
    everyone = list(range(len(sequences)))
    lengths = list(PROMPT_LENGTHS)
    yield StepInput(
        1, everyone, lengths, new_sequences=sequences, sample_rows=everyone, sample_slots=everyone
    )
    for number in range(2, NUM_STEPS + 1):
        ones = [1] * len(everyone)
        yield StepInput(number, everyone, ones, sample_rows=everyone, sample_slots=everyone)


def new_worker(state: Rank, config: EngineConfig) -> int | None:
    parallel = replace(config.parallel, tensor_parallel_size=state.size)
    state.kept["worker"] = worker = Worker(replace(config, parallel=parallel), rank=state.rank)
    return worker.open_rendezvous(ADDRESS) if state.rank == 0 else None


def start_worker(state: Rank, rendezvous: Rendezvous) -> tuple[str, int]:
    worker: Worker = state.kept["worker"]
    how = worker.connect(rendezvous)
    worker.init_device()
    torch.set_num_threads(1)
    worker.load_model()
    ledger = worker.profile_num_available_blocks()
    worker.init_cache_engine(ledger.num_device_blocks)
    return how, ledger.weights_bytes


def run_steps(state: Rank) -> list[StepOutput]:
    return [state.kept["worker"].execute_model(step) for step in steps()]


def fail_at_rank_1(state: Rank) -> None:
    if state.rank == 1:
        state.kept["worker"]._runner.model.layers[1] = None  # breaks in the middle of the model
    state.kept["worker"].execute_model(next(steps()))


def shut_down(state: Rank) -> None:
    state.kept.pop("worker").shutdown()


def start(ranks: Ranks, config: EngineConfig) -> list[tuple[str, int]]:
    port = ranks.run(new_worker, config)[0]
    return ranks.run(start_worker, Rendezvous("test", 1, [ADDRESS] * ranks.size, port, 30.0, 10.0))


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> tuple[int, list[StepOutput]]:
    """Bytes of weights and answers of one rank."""
    state = Rank(0, 1)
    worker = state.kept["worker"] = Worker(config)
    before = torch.get_num_threads()
    worker.init_device()
    torch.set_num_threads(1)
    worker.load_model()
    weights_bytes = worker.profile_num_available_blocks().weights_bytes
    worker.init_cache_engine(32)
    answers = run_steps(state)
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
    started = start(ranks, config)
    for rank, (how, own_bytes) in enumerate(started):
        wanted = f"rank {rank} of {num_ranks} at {ADDRESS} (interface lo) by shared memory"
        assert how == wanted
        assert own_bytes < weights_bytes * (0.6 if num_ranks == 2 else 0.5)
    answers = ranks.run(run_steps)
    for answer in answers:
        assert [step.token_ids for step in answer] == [step.token_ids for step in expected]
    for mine, wanted in zip(answers[0], expected, strict=True):
        assert mine.logprobs.keys() == wanted.logprobs.keys()
        for place, found in mine.logprobs.items():
            assert found.top_token_ids == wanted.logprobs[place].top_token_ids
            assert found.logprob == pytest.approx(wanted.logprobs[place].logprob, abs=1e-4)
        assert mine.prompt_logprobs.keys() == wanted.prompt_logprobs.keys()
        for row, part in mine.prompt_logprobs.items():
            assert len(part.entries) == len(wanted.prompt_logprobs[row].entries) > 0
            for one, other in zip(part.entries, wanted.prompt_logprobs[row].entries, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert not any(step.logprobs for answer in answers[1:] for step in answer)
    ranks.run(shut_down)


def test_failing_rank_tells_the_others(config: EngineConfig, two: Ranks) -> None:
    start(two, config)
    first, second = two.outcomes(fail_at_rank_1)
    assert isinstance(second, AttributeError)
    assert isinstance(first, CollectiveError)
    assert first.failed_rank == 1
    assert "rank 1 failed" in str(first)
    two.run(shut_down)
