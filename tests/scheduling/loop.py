"""Scheduler and output processor with the fake worker; requests have one or more sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduling.fake_worker import VOCAB_SIZE, FakeWorker
from tpengine.config import SchedulerConfig
from tpengine.engine.beam_search import num_candidates
from tpengine.engine.output_processor import OutputProcessor
from tpengine.outputs import RequestMetrics, RequestOutput
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling import BlockManager, Scheduler, SchedulerOutput
from tpengine.sequence import Request, Sequence, SequenceStatus

END_TOKEN_IDS = frozenset(range(0, VOCAB_SIZE, 199))
MAX_MODEL_LEN = 60


@dataclass(frozen=True)
class Limits:
    """The limits of an engine."""

    tokens: int = 64
    seqs: int = 8
    num_blocks: int = 100
    block_size: int = 4
    num_host_blocks: int = 0
    chunked: bool = True
    caching: bool = False
    mode: str = "auto"
    policy: str = "fcfs"
    watermark: float = 0.0
    ahead: bool = False


ROOMY = Limits(tokens=1000, seqs=16, num_blocks=1000)


def make_request(
    index: int, prompt: list[int], params: SamplingParams, priority: int = 0
) -> Request:
    """A request named after its number."""
    ends = frozenset() if params.ignore_eos else END_TOKEN_IDS
    width = params.num_sequences
    return Request(
        request_id=f"r{index}",
        prompt=None,
        prompt_token_ids=prompt,
        sampling_params=params,
        seed=1000 + index,
        arrival_index=index,
        sequences=[
            Sequence(100 * index + place, place, list(prompt), len(prompt))
            for place in range(width)
        ],
        metrics=RequestMetrics(arrival_time=float(index)),
        priority=priority,
        end_token_ids=ends,
        num_candidates=num_candidates(width, len(ends)) if params.use_beam_search else 0,
    )


class Loop:
    """Schedule, execute, process, update; raises AssertionError if a check fails.

    Attributes:
        outputs: the last output of each request.
        events: how often each event happened.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        config = SchedulerConfig(
            max_num_batched_tokens=limits.tokens,
            max_num_seqs=limits.seqs,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=limits.chunked,
            policy=limits.policy,
            preemption_mode=limits.mode,
            looks_ahead=limits.ahead,
        )
        self.blocks = BlockManager(
            limits.num_blocks,
            limits.block_size,
            limits.watermark,
            limits.num_host_blocks,
            limits.caching,
        )
        self.scheduler = Scheduler(config, self.blocks)
        self.processor = OutputProcessor(None, MAX_MODEL_LEN)
        self.worker = FakeWorker(
            limits.num_blocks,
            limits.block_size,
            limits.seqs,
            limits.tokens,
            limits.num_host_blocks,
        )
        self.outputs: dict[str, RequestOutput] = {}
        self.events: Counter[str] = Counter()

    def add(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        self.processor.add(request)
        return request

    def end(self, request: Request, failed: bool = False) -> None:
        """Aborts the request, or lets it fail."""
        before = sorted({s.status.name for s in request.unfinished_sequences})
        if failed:
            ended = self.scheduler.fail_request(request.request_id, "it was told to")
        else:
            ended = self.scheduler.abort_request(request.request_id)
        assert (ended is None) == (not before)
        if ended is not None:
            self.events[f"ended {before[-1]}"] += 1
            assert not any(self.blocks.holds_blocks(s) for s in request.sequences)
            self._note(self.processor.report([ended]))

    def step(self, in_flight: Callable[[], None] = lambda: None) -> SchedulerOutput:
        """One step; `in_flight` is called between execution and processing."""
        had_requests = self.scheduler.has_unfinished_requests()
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        self._count(output)
        self._note(self.processor.report(output.ignored))
        if output.is_empty:
            assert bool(output.ignored) == had_requests, "a step without any progress"
            assert not output.step_input.block_moves, "a step that is not sent moves blocks"
            return output
        self.worker.apply(output.step_input)
        self._compare_with_worker(output)
        answer = self.worker.compute(output.step_input)
        self.events["ahead"] = self.worker.num_ahead
        self.events["ahead and kept"] = self.worker.num_kept
        in_flight()
        decisions = self.processor.process(output, answer)
        self.scheduler.update(output, decisions)
        self._note(self.processor.report(decisions.to_report.values()))
        self.scheduler.check_invariants()
        running = self.scheduler.running_sequences()
        unused = self.blocks.num_unused_places(running)
        assert unused <= (self.limits.block_size - 1) * len(running)
        return output

    def run(self, max_steps: int = 3000) -> None:
        """Steps until no request is left, and checks that all blocks were given back."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), "it does not come to an end"
        assert self.blocks.num_free_blocks == self.blocks.num_total_blocks
        assert self.blocks.host.num_free == self.blocks.host.num_blocks
        self.events["hits"] += self.blocks.device.num_hits
        self.events["evictions"] += self.blocks.device.num_evictions

    def _note(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            before = self.outputs.get(output.request_id)
            assert before is None or not before.finished, "reported after its end"
            self.outputs[output.request_id] = output

    def _count(self, output: SchedulerOutput) -> None:
        step = output.step_input
        self.events["forks"] += len(output.forks)
        self.events["beam forks"] += len(step.forks) - len(output.forks)
        self.events["copies"] += len(step.block_moves.copies)
        self.events["swap outs"] += len(step.block_moves.swap_outs)
        self.events["swap ins"] += len(step.block_moves.swap_ins)
        self.events["ignored"] += len(output.ignored)
        for request in output.preempted:
            waits = any(s.status is SequenceStatus.WAITING for s in request.sequences)
            group = "group" if len(request.sequences) > 1 else "single"
            self.events[f"{group} {'recomputed' if waits else 'swapped'}"] += 1
            if waits and request.sampling_params.use_beam_search:
                self.events["beams recomputed"] += 1
        late = [n for n in step.new_sequences if n.index and n.num_computed_tokens]
        self.events["joined later"] += len(late)

    def _compare_with_worker(self, output: SchedulerOutput) -> None:
        """The worker's state, built from the messages, equals the driver's."""
        slots = self.scheduler._queues.slots
        members = [s for r in self.scheduler._queues.running for s in r.sequences]
        known = [s for s in members if s.slot is not None and slots.is_known(s)]
        assert sorted(s.slot for s in known if s.slot is not None) == sorted(self.worker.slots)
        children = [child for _, child in output.forks]
        for sequence in known:
            assert sequence.slot is not None
            slot = self.worker.slots[sequence.slot]
            assert slot.token_ids == sequence.token_ids
            assert slot.index == sequence.index
            if sequence not in children:  # these get their blocks in the update
                assert slot.num_computed_tokens == sequence.num_computed_tokens
                assert slot.block_ids == self.blocks.block_ids(sequence)


def run_alone(request_like: Request) -> RequestOutput:
    """The output of the same request in an engine with ample limits."""
    loop = Loop(ROOMY)
    index = request_like.arrival_index
    loop.add(make_request(index, request_like.prompt_token_ids, request_like.sampling_params))
    loop.run()
    return loop.outputs[request_like.request_id]
