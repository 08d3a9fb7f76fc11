"""The loop around the scheduler: requests in, `RequestOutput`s out, one step at a time."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from tpengine.config import EngineConfig, ModelConfig
from tpengine.engine.output_processor import OutputProcessor
from tpengine.engine.recovery import Recovery
from tpengine.engine.requests import (
    CheckedRequest,
    GenerateRequest,
    Prompt,
    check_request,
    check_request_id,
)
from tpengine.engine.startup import count_blocks, make_block_manager, start_workers
from tpengine.engine.stats import (
    EngineCounters,
    EngineHealth,
    EngineStats,
    RecoveryRecord,
    StatLogger,
    StepStats,
    take_stats,
)
from tpengine.engine.tokenizer import Tokenizer, load_tokenizer
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineError, GroupLostError, InvalidPromptError
from tpengine.executor.executor import Executor
from tpengine.executor.local_executor import create_executor
from tpengine.host import DeferredInterrupt
from tpengine.outputs import RequestMetrics, RequestOutput
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling.scheduler import Scheduler
from tpengine.sequence import Request, Sequence


class LLMEngine:
    """Serves many requests at once: `add_request` whenever one comes, `step` while there are any.

    Not safe for several threads at once.

    Attributes:
        counters: what it did since its start.
        last_step: figures of the latest step, for benchmarks; None before the first.
    """

    def __init__(self, config: EngineConfig, executor: Executor, log_stats: bool = True) -> None:
        self._config = config
        self._executor = executor
        try:
            tokenizer = load_tokenizer(config.model)
        except BaseException:
            executor.shutdown()
            raise
        ledgers = start_workers(config, executor)
        # Who runs a notebook's cell again forgets the engine before; its ranks must not stay.
        weakref.finalize(self, executor.shutdown).atexit = False
        blocks = make_block_manager(config.cache, *count_blocks(ledgers))
        self._scheduler = Scheduler(config.scheduler, blocks)
        self._recovery = Recovery(config, executor, self._scheduler, ledgers)
        self.counters = EngineCounters()
        self._output_processor = OutputProcessor(
            tokenizer,
            config.model.max_model_len,
            self._scheduler.fail_request,
            self.counters,
            config.scheduler.stream_interval,
        )
        self._stat_logger = StatLogger() if log_stats else None
        self._num_requests = 0
        self._num_sequences = 0
        self._unreported: list[RequestOutput] = []
        self._stepping = threading.Lock()
        self.last_step: StepStats | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Builds an engine.

        Raises:
            EngineError: an argument, the model or the memory does not allow it; see the message.
        """
        config, executor = create_executor(args)
        try:
            return cls(config, executor, log_stats=not args.disable_log_stats)
        except BaseException:  # whoever catches it may keep the unfinished engine alive
            executor.shutdown()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None for a model folder without one. May be replaced while idle."""
        return self._output_processor.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._output_processor.tokenizer = tokenizer

    def get_model_config(self) -> ModelConfig:
        """What is known of the model."""
        return self._config.model

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers; None for a model folder without one."""
        return None if self.tokenizer is None else self.tokenizer.hf

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait, run or are swapped out."""
        scheduler = self._scheduler
        return scheduler.num_waiting + scheduler.num_running + scheduler.num_swapped

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return self._scheduler.has_unfinished_requests() or bool(self._unreported)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that nobody holds."""
        return self._scheduler.block_manager.num_free_blocks

    @property
    def num_total_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self._scheduler.block_manager.num_total_blocks

    @property
    def recoveries(self) -> list[RecoveryRecord]:
        """What the latest recoveries took, oldest first."""
        return list(self._recovery.records)

    def health(self) -> EngineHealth:
        """How the engine fares; may be asked from any thread, also while another is in a step."""
        return self._recovery.health()

    def stats(self) -> EngineStats:
        """Figures of this moment, from any thread."""
        return take_stats(
            self.health(), self._scheduler, self.counters, self._executor, self._recovery.ledgers
        )

    def get_weights_bytes(self) -> list[int]:
        """Bytes of the weights on each rank."""
        return [ledger.weights_bytes for ledger in self._recovery.ledgers]

    def add_request(
        self,
        request_id: str,
        inputs: Prompt | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        priority: int = 0,
    ) -> None:
        """Lets a request wait for the next steps.

        Args:
            request_id: any string that no unfinished request has.
            inputs: text, or a dict with `prompt` or `prompt_token_ids`.
            arrival_time: seconds of `time.time`; now, unless given.
            prompt_token_ids: the prompt as ids; then text in `inputs` is only echoed.
            priority: in [-1000, 1000], lower is served first; needs scheduling_policy "priority".

        Raises:
            RequestError: this request cannot be served; nothing else is affected.
            EngineDeadError: an earlier step failed.
        """
        self._recovery.check_alive()
        check_request_id(request_id, self._is_live)
        params = params or SamplingParams()
        request = GenerateRequest(inputs, prompt_token_ids, params=params, priority=priority)
        self.add_checked(request_id, self.check_request(request), arrival_time)

    def check_request(self, request: GenerateRequest) -> CheckedRequest:
        """The part of `add_request` that takes time; may be called from any thread.

        Raises:
            RequestError: this request cannot be served.
        """
        return check_request(request, self._config, self.tokenizer)

    def add_checked(
        self, request_id: str, checked: CheckedRequest, arrival_time: float | None = None
    ) -> RequestMetrics:
        """The rest of `add_request`, whose caller has checked the id.

        Returns:
            The moments of the request's life, which are filled in as they come.
        """
        self._recovery.check_alive()
        assert not self._is_live(request_id), request_id
        arrival_index, self._num_requests = self._num_requests, self._num_requests + 1
        first_id, count = self._num_sequences, checked.params.num_sequences
        self._num_sequences += count
        token_ids = checked.prompt_token_ids
        request = Request(
            request_id=request_id,
            prompt=checked.prompt,
            prompt_token_ids=token_ids,
            sampling_params=checked.params,
            seed=self._seed(checked.params, arrival_index),
            arrival_index=arrival_index,
            sequences=[
                Sequence(first_id + index, index, token_ids.copy(), len(token_ids))
                for index in range(count)
            ],
            metrics=RequestMetrics(time.time() if arrival_time is None else arrival_time),
            priority=checked.priority,
            end_token_ids=checked.end_token_ids,
            num_candidates=checked.num_candidates,
        )
        self._enter(request)
        return request.metrics

    def _is_live(self, request_id: str) -> bool:
        return self._scheduler.get_request(request_id) is not None

    def _enter(self, request: Request) -> None:
        """Hands a request to both who follow it, or to neither."""
        with DeferredInterrupt():
            self._recovery.note_arrival()
            try:
                self._output_processor.add(request)
            except Exception as error:
                self._output_processor.forget(request)
                raise InvalidPromptError(
                    f"the tokenizer cannot follow this prompt: {type(error).__name__}: {error}; "
                    "check its ids, or set detokenize=False"
                ) from error
            self._scheduler.add_request(request)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests at once, whatever they are doing; their blocks are free when this returns.

        Unknown and finished ids are ignored. The next `step` reports the end.
        """
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for one in request_ids:
            request = self._scheduler.abort_request(one)
            if request is not None:
                self._unreported += self._output_processor.finish([request])

    def discard_outputs(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Takes away, and returns, what the next `step` would report of these requests."""
        dropped, outputs = set(request_ids), self._unreported
        self._unreported = [o for o in outputs if o.request_id not in dropped]
        return [o for o in outputs if o.request_id in dropped]

    def step(self) -> list[RequestOutput]:
        """Lets every scheduled sequence compute its tokens, and returns what that brought.

        While ranks that were lost are being replaced it returns after a moment, with what aborts
        brought; requests go on when they are there.

        Raises:
            KeyboardInterrupt: Ctrl-C came during the step, which was completed first; the next
                call returns its outputs.
            EngineDeadError: ranks were lost too often or could not be replaced; or an earlier step
                failed, which then raised what it was.
        """
        self._recovery.check_alive()
        if not self._stepping.acquire(blocking=False):
            raise EngineError(
                "another thread is in a step of this engine; an engine belongs to one thread at a "
                "time: give each thread its own, or guard it with a lock"
            )
        outputs: list[RequestOutput] = []
        try:
            with DeferredInterrupt():
                try:
                    outputs = self._step()
                except BaseException as error:
                    self._recovery.die(error)
                    raise
        except KeyboardInterrupt:
            self._unreported = outputs
            raise
        finally:
            self._stepping.release()
        return outputs

    def _step(self) -> list[RequestOutput]:
        if not self._recovery.go_on():
            return self._report([])
        start = time.perf_counter()
        scheduled = self._scheduler.schedule()
        if scheduled.is_empty:
            return self._report(self._output_processor.finish(scheduled.ignored))
        sent = time.perf_counter()
        try:
            answer = self._executor.execute_model(scheduled.step_input)
        except GroupLostError as error:  # the step has not happened
            self._unreported += self._output_processor.finish(scheduled.ignored)
            failed = self._recovery.begin(error.loss, scheduled)
            return self._report(self._output_processor.finish(failed))
        answered = time.perf_counter()
        outputs = self._report(self._output_processor.process(scheduled, answer))
        processed = time.perf_counter()
        self._scheduler.update(scheduled)
        self._recovery.note_step()
        marks = (start, sent, answered, processed, time.perf_counter())
        self._record(StepStats.of(scheduled, answer.model_s, marks))
        return outputs

    def _report(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """What there is to return, after what came up between steps."""
        outputs, self._unreported = self._unreported + outputs, []
        return outputs

    def shutdown(self) -> None:
        """Ends the workers; a second call does nothing."""
        self._executor.shutdown()
        self._recovery.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _record(self, stats: StepStats) -> None:
        self.last_step = stats
        self.counters.record_step(stats)
        if self._stat_logger is not None:
            self._stat_logger.record(stats, self._scheduler)

    def _seed(self, params: SamplingParams, arrival_index: int) -> int:
        if params.seed is not None:
            return params.seed
        key = f"{self._config.model.seed}:{arrival_index}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
