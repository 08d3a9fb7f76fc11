"""Steps an engine, checks its invariants after each step, and joins the deltas of streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recovery.mortal import MakeGroup
from tpengine import CompletionOutput, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from tpengine.config import EngineConfig
from tpengine.engine.stats import EngineState

from .mortal import FakeGroup, Fate, mortal_engine

MAX_CALLS = 4000


@dataclass(frozen=True)
class Job:
    """One request; it has a seed, so that its answer does not depend on other requests."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0


@dataclass
class Answer:
    """What a user has got of one request, with its deltas joined."""

    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    prompt_logprobs: Any = None
    error: str | None = None
    finished: bool = False
    reported: int = 0

    def add(self, output: RequestOutput, is_delta: bool) -> None:
        assert not self.finished, "reported after its end"
        self.reported += 1
        self.finished, self.error = output.finished, output.error
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs  # they come once
        for completion in output.outputs:
            before = self.outputs.get(completion.index)
            if is_delta and before is not None:
                completion.token_ids = before.token_ids + completion.token_ids
                completion.text = before.text + completion.text
                if before.logprobs is not None:
                    completion.logprobs = before.logprobs + completion.logprobs
            elif before is not None:  # a cumulative output only grows
                assert completion.token_ids[: len(before.token_ids)] == before.token_ids
            self.outputs[completion.index] = completion

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        return [self.outputs[index].token_ids for index in sorted(self.outputs)]

    @property
    def reasons(self) -> set[str | None]:
        return {completion.finish_reason for completion in self.outputs.values()}


class Client:
    """Adds requests to an engine, steps it, and keeps the answers."""

    def __init__(self, engine: LLMEngine, executor: Any) -> None:
        self.engine = engine
        self.executor = executor
        self.answers: dict[str, Answer] = {}
        self._jobs: dict[str, Job] = {}

    def add(self, request_id: str, job: Job) -> None:
        self.engine.add_request(
            request_id, None, job.params, prompt_token_ids=job.prompt, priority=job.priority
        )
        self.answers[request_id] = Answer()
        self._jobs[request_id] = job

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.engine._scheduler.check_invariants()
        for output in outputs:
            kind = self._jobs[output.request_id].params.output_kind
            self.answers[output.request_id].add(output, kind is RequestOutputKind.DELTA)
        return outputs

    def run(self) -> dict[str, Answer]:
        """Steps until no request is left, and checks that all blocks are free."""
        for _ in range(MAX_CALLS):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        assert not self.engine.has_unfinished_requests(), "the engine does not finish its requests"
        assert all(answer.finished for answer in self.answers.values())
        assert self.engine.get_num_unfinished_requests() == 0
        assert self.engine.num_free_blocks == self.engine.num_total_blocks
        return self.answers

    def recover(self) -> None:
        """Steps until there is a new group."""
        for _ in range(MAX_CALLS):
            self.step()
            if self.engine.health().state is not EngineState.RECOVERING:
                return
        raise AssertionError("there is no new group")


def open_client(
    config: EngineConfig, jobs: list[Job], fate: Fate | None = None, group: MakeGroup = FakeGroup
) -> Client:
    """Returns a client of a new engine that has added these jobs; their ids are their numbers."""
    client = Client(*mortal_engine(config, fate or Fate(), group))
    for number, job in enumerate(jobs):
        client.add(str(number), job)
    return client


def serve(
    config: EngineConfig, jobs: list[Job], fate: Fate | None = None, group: MakeGroup = FakeGroup
) -> Client:
    """Serves jobs together; returns the client, whose engine is shut down."""
    client = open_client(config, jobs, fate, group)
    with client.engine:
        client.run()
    return client


def summary(answer: Answer) -> list[tuple[Any, ...]]:
    """Returns the parts of an answer that a loss must not change."""
    return [
        (index, o.token_ids, o.text, o.finish_reason, o.stop_reason)
        for index, o in sorted(answer.outputs.items())
    ]
