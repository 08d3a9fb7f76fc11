"""The loop around the scheduler: requests in, `RequestOutput`s out, step by step.

A step is four calls: schedule, execute, process, update. The data of a step goes through them in
this order and never back. `LLMEngine._step` schedules and sends as many steps as may be in flight,
and then takes the oldest one's answer through the rest.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Self

from tpengine.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from tpengine.engine import requests as checks
from tpengine.engine import stats as figures
from tpengine.engine.output_processor import OutputProcessor
from tpengine.engine.picture_prompts import read_expansion
from tpengine.engine.recovery import Recovery
from tpengine.engine.request_grammars import RankGrammars
from tpengine.engine.requests import GenerateRequest
from tpengine.engine.startup import count_blocks, make_block_manager, start_workers
from tpengine.engine.stats import EngineHealth, EngineStats, StatLoggerBase, StepStats
from tpengine.engine.tokenizer import Tokenizer, load_tokenizer
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineError, GroupLostError, InvalidPromptError
from tpengine.executor.executor import Executor
from tpengine.executor.launch.chosen_executor import create_executor
from tpengine.host import deferred_interrupt
from tpengine.inputs import LoRARequest, PoolingParams, PromptInputs
from tpengine.logger import init_logger
from tpengine.outputs import EmbeddingRequestOutput, RequestMetrics, RequestOutput
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.sequence import CheckedRequest, Request, Sequence
from tpengine.structured.grammar_checks import GrammarChecks

logger = init_logger(__name__)


class LLMEngine:
    """Serves many requests at once: call `add_request` for each, and `step` while there are any.

    One thread at a time may use an engine. If it cannot start, it shuts its executor down.

    Attributes:
        counters: counters and histograms since the start.
        last_step: times and sizes of the latest step, for benchmarks; None before the first.
        log_stats: whether the engine logs a line of statistics.
        stat_loggers: see `add_logger`.
    """

    def __init__(self, config: EngineConfig, executor: Executor, log_stats: bool = True) -> None:
        self._config = config
        self._executor = executor
        # A notebook cell that runs again drops the engine of the first run; its ranks must end.
        finalizer = weakref.finalize(self, executor.shutdown)
        finalizer.atexit = False
        self._grammar_checks = GrammarChecks()
        weakref.finalize(self, self._grammar_checks.close).atexit = False
        self.counters = figures.EngineCounters()
        try:
            tokenizer = load_tokenizer(config.model)
            self._picture_prompts = read_expansion(config, tokenizer)
            ledgers = start_workers(config, executor)
            blocks = make_block_manager(config, *count_blocks(ledgers))
            self._adapters = executor.adapter_checks(config.lora)
            self._scheduler = Scheduler(config.scheduler, blocks)
            self._recovery = Recovery(config, executor, self._scheduler, ledgers)
            reporting = config.model.pooling, self.counters, config.scheduler.stream_interval
            self._output_processor = OutputProcessor(tokenizer, *reporting)
        except BaseException:
            finalizer()
            raise
        self.log_stats = log_stats
        self._loggers = figures.StepLoggers(config, log_stats)
        self.stat_loggers: dict[str, StatLoggerBase] = self._loggers.of_users
        self._num_requests = self._num_sequences = 0
        self._unreported: list[RequestOutput] = []
        self._embedded: set[str] = set()  # whose outputs `step` gives in the form of embeddings
        self._stepping = threading.Lock()
        self._rank_grammars = RankGrammars(executor, config.model)
        self.last_step: StepStats | None = None

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, stat_loggers: Mapping[str, StatLoggerBase] | None = None
    ) -> Self:
        """Builds an engine.

        Args:
            stat_loggers: instead of the engine's own line of statistics; see `add_logger`.

        Raises:
            EngineError: an argument, the model or the memory does not allow it.
        """
        config, executor = create_executor(engine_args)
        engine = cls(config, executor, stat_loggers is None and not engine_args.disable_log_stats)
        engine.stat_loggers.update(stat_loggers or {})
        return engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None for a model folder without one. May be replaced while idle."""
        return self._output_processor.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._output_processor.tokenizer = tokenizer
        self._scheduler.use_grammars(frozenset())

    def get_model_config(self) -> ModelConfig:
        """The model's shape, limits and special tokens."""
        return self._config.model

    def get_parallel_config(self) -> ParallelConfig:
        """The number of ranks."""
        return self._config.parallel

    def get_scheduler_config(self) -> SchedulerConfig:
        """The limits of a step."""
        return self._config.scheduler

    def get_lora_config(self) -> Any:
        """The `LoRAConfig`; None: adapters are not served."""
        return self._config.lora

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """The tokenizer of transformers, for all adapters; None for a model folder without one."""
        return None if self.tokenizer is None else self.tokenizer.hf

    @property
    def picture_placeholder(self) -> str | None:
        """What a prompt has for each picture; None: it has none, or there is no tokenizer."""
        return None if self._picture_prompts is None else self._picture_prompts.placeholder

    @property
    def reads_pictures(self) -> bool:
        """Whether prompts may have pictures."""
        return self._picture_prompts is not None

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait, run or are swapped out."""
        return len(self._scheduler.unfinished_requests())

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to report."""
        scheduler = self._scheduler
        is_busy = scheduler.has_unfinished_requests() or bool(scheduler.unanswered)
        return is_busy or bool(self._unreported)

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is unfinished, or its last output is not reported yet."""
        unreported = any(output.request_id == request_id for output in self._unreported)
        return unreported or self._scheduler.get_request(request_id) is not None

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no sequence holds."""
        return self._scheduler.block_manager.num_free_blocks

    @property
    def num_total_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self._scheduler.block_manager.num_total_blocks

    @property
    def recoveries(self) -> list[figures.RecoveryRecord]:
        """Times and sizes of the latest recoveries, oldest first."""
        return list(self._recovery.records)

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine cannot be used any more."""
        self._recovery.check_alive()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Checks an adapter; no request needs this. It is loaded for its first request.

        Raises:
            InvalidAdapterError: it cannot be served.
        """
        return self._adapters.check(lora_request) is not None

    def health(self) -> EngineHealth:
        """The engine's state and progress; any thread may ask, also during a step."""
        return self._recovery.health()

    def stats(self) -> EngineStats:
        """Counters and sizes at this moment; any thread may ask."""
        executor, ledgers = self._executor, self._recovery.ledgers
        where = executor.devices, executor.nodes, ledgers
        return EngineStats.of(self.health(), self._scheduler, self.counters, *where)

    def add_request(
        self,
        request_id: str,
        inputs: PromptInputs | None = None,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        priority: int = 0,
    ) -> None:
        """Adds a request; the next steps compute it. One that is too long ends in the next step,
        with finish reason length and an error.

        Args:
            request_id: a string that no unfinished request has.
            inputs: text, or a dict with `prompt` or `prompt_token_ids`.
            arrival_time: seconds of `time.time`; None: now.
            lora_request: its adapter; needs `enable_lora`.
            prompt_token_ids: the prompt as ids; then text in `inputs` is only echoed.
            priority: in [-1000, 1000], lower is served first; needs scheduling_policy "priority".

        Raises:
            RequestError: this request cannot be served; other requests are not affected.
            EngineDeadError: an earlier step failed.
        """
        checks.check_request_id(request_id, self._scheduler.get_request)
        request = GenerateRequest(
            inputs,
            prompt_token_ids,
            **checks.fields_of_params(params),
            arrival_time=arrival_time,
            priority=priority,
            lora_request=lora_request,
        )
        self.add_checked(request_id, self.check_request(request), arrival_time)
        if request.pooling_params is not None:
            self._embedded.add(request_id)

    def why_too_long(self, num_prompt_tokens: int) -> str | None:
        """Why a prompt of this length can never be computed; None if it can. Any thread may ask."""
        return self._scheduler.why_too_long(num_prompt_tokens)

    def check_request(self, request: GenerateRequest) -> CheckedRequest:
        """The part of `add_request` that takes time; any thread may call it.

        Raises:
            RequestError: this request cannot be served.
        """
        return checks.check_request(
            request,
            self._config,
            self.tokenizer,
            self._adapters,
            self._grammar_checks,
            self._picture_prompts,
        )

    def chat_token_ids(self, messages: Any, **options: Any) -> list[int]:
        """Returns the prompt of a conversation, with the tokens of its pictures; any thread may
        call it.

        Args:
            options: see `Tokenizer.render_chat`.

        Raises:
            RequestError: it cannot be one.
        """
        pooling = None if self._config.model.pooling is None else PoolingParams()
        request = GenerateRequest(messages=messages, chat_options=options, pooling_params=pooling)
        return self.check_request(request).prompt_token_ids

    def add_checked(
        self, request_id: str, checked: CheckedRequest, arrival_time: float | None = None
    ) -> RequestMetrics:
        """The part of `add_request` after `check_request`, for a caller that has checked the id.

        Returns:
            The times and counts of the request's life, which the engine fills in.

        Raises:
            RequestError: the tokenizer cannot follow the prompt.
            EngineDeadError: an earlier step failed.
        """
        self._recovery.check_alive()
        arrived_at = time.time() if arrival_time is None else arrival_time
        arrival_index, first_id = self._num_requests, self._num_sequences
        token_ids, count = checked.prompt_token_ids, checked.sampling_params.num_sequences
        num_tokens, most = len(token_ids), self._config.model.max_model_len
        if checked.pooling_params is not None:
            most = num_tokens
        elif (max_tokens := checked.sampling_params.max_tokens) is not None:
            most = min(most, num_tokens + max_tokens)
        request = Request(
            **vars(checked),
            request_id=request_id,
            seed=self._seed(checked.sampling_params, arrival_index),
            arrival_index=arrival_index,
            sequences=[
                Sequence(first_id + i, i, token_ids, num_tokens, most) for i in range(count)
            ],
            metrics=RequestMetrics.of_arrival(arrived_at),
        )
        # First, so that no two requests have one number, whatever interrupts this.
        self._num_requests += 1
        self._num_sequences += count
        with deferred_interrupt():  # scheduler and output processor both get it, or neither
            self._recovery.note_arrival()
            self._scheduler.add_request(request)
            try:
                self._output_processor.add(request)
            except Exception as error:
                self._output_processor.forget(request)
                self._scheduler.abort_request(request_id)
                text = f"the tokenizer cannot follow this prompt: {type(error).__name__}: {error}"
                hint = "check its ids, or set detokenize=False"
                raise InvalidPromptError(f"{text}; {hint}") from error
        return request.metrics

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests in any state; their blocks are free as soon as no step in flight uses them.

        Unknown and finished ids are ignored. The next `step` reports the end.

        Raises:
            InvalidPromptError: an id is no string.
        """
        for unfinished_id in checks.as_request_ids(request_id):
            request = self._scheduler.abort_request(unfinished_id)
            if request is not None:
                self._report([request])

    def discard_outputs(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Takes away, and returns, what the next `step` would report about these requests."""
        dropped, outputs = set(request_ids), self._unreported
        self._unreported = [o for o in outputs if o.request_id not in dropped]
        discarded = [o for o in outputs if o.request_id in dropped]
        self._embedded.difference_update(o.request_id for o in discarded if o.finished)
        return discarded

    def step(self) -> list[RequestOutput]:
        """Completes one step, and returns what is new for users; of a request that was added with
        `PoolingParams` an `EmbeddingRequestOutput`. The ranks may have begun with later ones when
        it returns.

        While lost ranks are being replaced it returns after a moment, with the outputs of aborted
        requests; the other requests go on when the new ranks are ready.

        Raises:
            KeyboardInterrupt: Ctrl-C came during the step. The step was completed; the next call
                returns its outputs.
            EngineDeadError: ranks were lost too often or could not be replaced; or an earlier step
                failed, and raised its own error then.
        """
        self._recovery.check_alive()
        if not self._stepping.acquire(blocking=False):
            raise EngineError(
                "another thread is in a step of this engine; an engine belongs to one thread at a "
                "time: give each thread its own, or guard it with a lock"
            )
        try:
            with deferred_interrupt():
                try:
                    if self._recovery.go_on():
                        self._step()
                    self._report(self._recovery.take_failed())
                except BaseException as error:
                    self._recovery.die(error)
                    raise
        finally:
            self._stepping.release()
        outputs, self._unreported = self._unreported, []
        return [self._in_its_form(output) for output in outputs] if self._embedded else outputs

    def _in_its_form(self, output: RequestOutput) -> Any:
        if output.request_id not in self._embedded:
            return output
        if output.finished:
            self._embedded.discard(output.request_id)
        return EmbeddingRequestOutput.of(output)

    def _step(self) -> None:
        """Schedule, execute, process, update; and report. If ranks are lost, the unanswered steps
        are sent again, or have not happened."""
        unanswered = self._scheduler.unanswered
        try:
            self._rank_grammars.compile_new(self._scheduler, self.tokenizer)
            start = time.perf_counter()
            most = self._max_steps_in_flight
            while len(unanswered) < most and self._send_next(is_alone=most == 1):
                pass
            if not unanswered:
                return
            scheduled, sent = unanswered[0], time.perf_counter()
            answer = self._executor.take_answer()
        except GroupLostError as error:
            self._recovery.begin(error.loss)
            return
        answered = time.perf_counter()
        decisions = self._output_processor.process(scheduled, answer)
        processed = time.perf_counter()
        self._scheduler.update(decisions)
        updated = time.perf_counter()
        self._report(decisions.to_report.values())
        self._recovery.note_step()
        marks = (start, sent, answered, processed, updated, time.perf_counter())
        self.last_step = StepStats.of(scheduled, answer, decisions, marks)
        self.counters.record_step(self.last_step)
        self._loggers.record(self.last_step, decisions, self._scheduler, self.counters, self.stats)

    @property
    def _max_steps_in_flight(self) -> int:
        scheduler, limits = self._scheduler, self._config.scheduler
        latest_s = 0.0 if self.last_step is None else self.last_step.model_s
        if latest_s < limits.ahead_from_s or scheduler.lacks_grammars or scheduler.wants_drafts:
            return 1
        return self._recovery.max_steps_in_flight

    def _send_next(self, is_alone: bool) -> bool:
        """Schedules a step and sends it to the ranks; False: there is nothing to compute now."""
        scheduled = self._scheduler.schedule(is_alone)
        for request in scheduled.ignored:
            logger.warning("request %r ends: %s", request.request_id, request.error)
        self._report(scheduled.ignored)
        if scheduled.is_empty:
            return False
        self._executor.send_step(scheduled.step_input)
        return True

    def add_logger(self, logger_name: str, logger: StatLoggerBase) -> None:
        """Calls `logger.log` with `Stats` after every step. Its first error is logged.

        Raises:
            KeyError: there is a logger of this name.
        """
        if logger_name in self.stat_loggers:
            raise KeyError(f"there is a logger {logger_name!r}; remove it before")
        self.stat_loggers[logger_name] = logger

    def remove_logger(self, logger_name: str) -> None:
        """Undoes `add_logger`.

        Raises:
            KeyError: there is no logger of this name.
        """
        del self.stat_loggers[logger_name]
        self._loggers.failed.discard(logger_name)

    def do_log_stats(self) -> None:
        """Logs the line of statistics now, and calls the added loggers."""
        self._loggers.log_now(self._scheduler, self.stats)

    def _report(self, requests: Iterable[Request]) -> None:
        """Builds the outputs of these requests; `step` returns them."""
        self._unreported += self._output_processor.report(requests)

    def shutdown(self) -> None:
        """Ends the workers; a second call has no effect."""
        self._executor.shutdown()
        self._grammar_checks.close()
        if self._picture_prompts is not None:
            self._picture_prompts.close()
        self._recovery.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _seed(self, params: SamplingParams, arrival_index: int) -> int:
        if params.seed is not None:
            return params.seed
        key = f"{self._config.model.seed}:{arrival_index}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
