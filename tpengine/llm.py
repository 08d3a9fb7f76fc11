"""`LLM`: completes batches of prompts in this process."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from typing import Any, cast

from tqdm import tqdm

from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.requests import Prompt, need_tokenizer, one_per_prompt, pair_prompts, refusal
from tpengine.engine.stats import EngineCounters
from tpengine.engine.tokenizer import Tokenizer
from tpengine.engine_args import EngineArgs
from tpengine.errors import (
    ConfigError,
    EngineError,
    InvalidPromptError,
    InvalidSamplingParamsError,
    RequestAbortedError,
    RequestError,
    counted,
    did_you_mean,
)
from tpengine.logger import init_logger
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)

_REFRESH_S = 0.25
Message = dict[str, str]


class LLM:
    """A language model and its tokenizer, for prompts that are all known at once.

    Each run samples the same tokens, since the engine's `seed` is 0 unless another is given.

    Args:
        model: folder in Hugging Face layout, or hub name; default: the small model inside
            tpengine.
        tokenizer: folder or hub name of the tokenizer; default: the model's.
        **kwargs: the other fields of `EngineArgs`, by name.

    Raises:
        EngineError: an argument is wrong, the model cannot be loaded, or memory is too small.
    """

    def __init__(
        self, model: str | None = None, tokenizer: str | None = None, **kwargs: Any
    ) -> None:
        if model is not None:
            kwargs["model"] = model
        if tokenizer is not None:
            kwargs["tokenizer"] = tokenizer
        # A line of statistics would break the progress bar up, which shows the same.
        kwargs.setdefault("disable_log_stats", True)
        known = [spec.name for spec in fields(EngineArgs)]
        for name in kwargs:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(f"LLM has no argument {name!r}{hint}")
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(**kwargs))
        self._num_requests = 0
        self._inbox: dict[str, list[RequestOutput]] = {}
        self._finished: list[RequestOutput] = []

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes every prompt.

        Args:
            prompts: a string, a dict with `prompt` or `prompt_token_ids`, or a list of such.
            sampling_params: one for all, or a list with one per prompt; default:
                `SamplingParams()`.
            prompt_token_ids: the prompts as ids, instead of `prompts` or together with them.
            use_tqdm: show a progress bar, with prompts and tokens.

        Returns:
            One output per prompt, in the order of the prompts. The output of a refused or ignored
            prompt has the reason in `error`.

        Raises:
            RequestError: the arguments do not match each other.
            EngineDeadError: the engine cannot go on; `finished_outputs` has the finished prompts.
            KeyboardInterrupt: on Ctrl-C; the engine has aborted the prompts and can be used again.
        """
        self._finished = []
        pairs = pair_prompts(prompts, prompt_token_ids)
        params = one_per_prompt(sampling_params, len(pairs))
        request_ids = [str(self._num_requests + i) for i in range(len(pairs))]
        self._num_requests += len(pairs)
        done: dict[str, RequestOutput] = {}
        try:
            for request_id, pair, one in zip(request_ids, pairs, params, strict=True):
                self._submit(request_id, *pair, one, done)
            self._run(set(request_ids), done, use_tqdm)
        except BaseException as error:  # after Ctrl-C too, no request may be left in the engine
            # Outputs of a step that was interrupted have not been returned yet.
            pending = self.llm_engine.discard_outputs(request_ids)
            done.update({output.request_id: output for output in pending if output.finished})
            self.llm_engine.abort_request(request_ids)
            self.llm_engine.discard_outputs(request_ids)
            self._finished = [done[one] for one in request_ids if one in done]
            error.add_note(
                f"LLM.finished_outputs() has what was done: {len(done)} of "
                f"{counted(len(request_ids), 'prompt')}"
            )
            raise
        finally:
            for request_id in request_ids:
                self._inbox.pop(request_id, None)
        refused = [output.error for output in done.values() if output.error is not None]
        if refused:
            logger.warning(
                "refused or ignored: %d of %s; the first: %s",
                len(refused),
                counted(len(done), "prompt"),
                refused[0],
            )
        return [done[request_id] for request_id in request_ids]

    def finished_outputs(self) -> list[RequestOutput]:
        """The finished outputs of the last `generate` or `chat` if it raised, in the order of its
        prompts; empty if it returned."""
        return list(self._finished)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, through the model's chat template.

        Args:
            messages: dicts with `role` and `content`.

        Raises:
            InvalidPromptError: the model has no tokenizer or no chat template, or the template
                does not accept the messages.
        """
        self._finished = []
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InvalidPromptError(
                "messages must be a list of dicts with role and content, or a list of such lists; "
                f"got {messages!r:.80}"
            )
        conversations = cast(
            list[list[Message]],
            [messages] if messages and isinstance(messages[0], dict) else list(messages),
        )
        token_ids = [self.chat_token_ids(one, add_generation_prompt) for one in conversations]
        return self.generate(None, sampling_params, token_ids, use_tqdm)

    def chat_token_ids(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the prompt ids of one conversation, by the model's chat template.

        Raises:
            InvalidPromptError: see `chat`.
        """
        engine = self.llm_engine
        tokenizer = need_tokenizer(engine.tokenizer, engine.get_model_config())
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt)

    def stream(
        self,
        prompt: Prompt | None,
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> Iterator[str]:
        """Completes one prompt and yields its text as it grows.

        Raises:
            RequestError: the prompt cannot be served, or the parameters ask for more than one
                sequence.
            RequestAbortedError: another caller aborted it, after the text that was yielded.
        """
        sampling_params = sampling_params or SamplingParams()
        if sampling_params.num_sequences != 1:
            raise InvalidSamplingParamsError(
                f"stream yields the text of one sequence, and n or best_of is "
                f"{sampling_params.num_sequences}; use generate, or ask for one"
            )
        request_id, self._num_requests = str(self._num_requests), self._num_requests + 1
        params = replace(sampling_params, output_kind=RequestOutputKind.DELTA)
        self.llm_engine.add_request(request_id, prompt, params, prompt_token_ids=prompt_token_ids)
        outputs = self._inbox[request_id] = []
        finished = False
        try:
            while not finished:
                while not outputs:
                    self._pump()
                output = outputs.pop(0)
                finished = output.finished
                if output.error is not None:
                    raise RequestError(output.error)
                yield output.outputs[0].text
                if output.outputs[0].finish_reason == "abort":
                    raise RequestAbortedError(f"request {request_id!r} was aborted")
        finally:
            del self._inbox[request_id]
            if not finished:
                self.llm_engine.abort_request(request_id)

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers; None: the model's folder has no tokenizer."""
        return self.llm_engine.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replaces the tokenizer by one of transformers, or by a `Tokenizer`."""
        known = tokenizer is None or isinstance(tokenizer, Tokenizer)
        self.llm_engine.tokenizer = tokenizer if known else Tokenizer(tokenizer)

    def shutdown(self) -> None:
        """Frees the model's memory; a second call does nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _submit(
        self,
        request_id: str,
        prompt: Prompt | None,
        token_ids: list[int] | None,
        params: SamplingParams,
        done: dict[str, RequestOutput],
    ) -> None:
        """Adds a prompt to the engine; puts one that it refuses into `done`."""
        final = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            self.llm_engine.add_request(request_id, prompt, final, prompt_token_ids=token_ids)
        except RequestError as error:
            done[request_id] = refusal(request_id, prompt, token_ids, error)

    def _run(self, request_ids: set[str], done: dict[str, RequestOutput], use_tqdm: bool) -> None:
        """Runs steps until `done` holds all of `request_ids`; other requests run too."""
        outputs: list[RequestOutput] = []
        self._inbox.update(dict.fromkeys(request_ids - done.keys(), outputs))
        num_requests = len(request_ids)
        bar = _ProgressBar(self.llm_engine.counters, num_requests, use_tqdm)
        with closing(bar):
            bar.update(done.values())
            while len(done) < num_requests:
                self._pump()
                done.update({output.request_id: output for output in outputs})
                bar.update(outputs)
                outputs.clear()

    def _pump(self) -> None:
        """Runs a step and passes its outputs to the calls that wait for them.

        Raises:
            EngineError: no request is left, although a call waits for one: another caller has
                aborted it and taken its output.
        """
        if not self.llm_engine.has_unfinished_requests():
            raise EngineError("another caller has aborted the request and taken its output")
        for output in self.llm_engine.step():
            if output.request_id in self._inbox:
                self._inbox[output.request_id].append(output)


class _ProgressBar:
    """Shows how many prompts were completed and refused, and tokens per second since it was opened.

    Args:
        counters: of the engine; tokens of its other requests count too.
        total: number of prompts.
        is_shown: False: the bar prints nothing.
    """

    def __init__(self, counters: EngineCounters, total: int, is_shown: bool) -> None:
        self._counters = counters
        self._first = counters.prompt_tokens, counters.output_tokens
        self._num_refused = 0
        self._start = time.monotonic()
        # `miniters=0`: the rates of long prompts change between the ends of prompts.
        self._bar = tqdm(
            total=total,
            desc="Processed prompts",
            unit="prompt",
            miniters=0,
            mininterval=_REFRESH_S,
            disable=not is_shown,
        )

    def update(self, ended: Collection[RequestOutput]) -> None:
        """Adds prompts that a step completed, refused or failed."""
        if self._bar.disable:
            return
        num_refused = sum(output.error is not None for output in ended)
        self._num_refused += num_refused
        elapsed_s = max(time.monotonic() - self._start, 1e-9)
        num_input = self._counters.prompt_tokens - self._first[0]
        num_output = self._counters.output_tokens - self._first[1]
        refused = f"refused {self._num_refused}, " if self._num_refused else ""
        self._bar.set_postfix_str(
            f"{refused}input {num_input / elapsed_s:.1f} tokens/s, "
            f"output {num_output / elapsed_s:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update(len(ended) - num_refused)

    def close(self) -> None:
        """Leaves the last state of the bar on the terminal."""
        self._bar.close()
