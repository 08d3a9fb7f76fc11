"""`LLM`: completes batches of prompts in this process."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tpengine import errors
from tpengine.checkpoint.model_defaults import recommended_sampling
from tpengine.checkpoint.model_files import read_generation_config
from tpengine.engine import requests as checks
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.pooling_calls import PoolingCalls, Prompts
from tpengine.engine.progress_bar import ProgressBar
from tpengine.engine.requests import GenerateRequest, one_per_prompt
from tpengine.engine.tokenizer import Tokenizer
from tpengine.engine_args import EngineArgs
from tpengine.errors import counted, did_you_mean
from tpengine.inputs import BeamSearchParams, LoRARequest, PromptInputs
from tpengine.logger import init_logger
from tpengine.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from tpengine.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)

Message = Mapping[str, Any]


class LLM(PoolingCalls):
    """A language model and its tokenizer, for prompts that are all known at once.

    Each run samples the same tokens, since the engine's `seed` is 0 unless another is given.

    Args:
        model: folder in Hugging Face layout, or hub name; default: the small model inside
            tpengine.
        **arguments: further fields of `EngineArgs`, which describes all arguments.

    Raises:
        EngineError: an argument is wrong, the model cannot be loaded, or memory is too small.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **arguments: Any) -> None:
        if model is not None:
            arguments["model"] = model
        # A line of statistics would break the progress bar up, which shows the same.
        arguments.setdefault("disable_log_stats", True)
        arguments.setdefault("encoder_share", 1.0)
        known = [spec.name for spec in fields(EngineArgs)]
        for name in arguments:
            if name not in known:
                raise errors.ConfigError(f"LLM has no argument {name!r}{did_you_mean(name, known)}")
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.request_counter: Iterator[int] = itertools.count()
        self._inbox: dict[str, list[RequestOutput]] = {}
        self._finished: list[RequestOutput] = []

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Completes every prompt.

        Args:
            prompts: a string, a list of ids, a dict with `prompt` or `prompt_token_ids`, or a list
                of such.
            sampling_params: one for all, or a list with one per prompt; default:
                `SamplingParams()`.
            prompt_token_ids: the prompts as ids, instead of `prompts` or together with them; then
                the texts are only repeated in the outputs.
            use_tqdm: show a progress bar, with prompts and tokens.
            lora_request: the adapter, one for all, or a list with one or None per prompt; needs
                `enable_lora`.
            priority: one for all, or a list with one per prompt; lower is served first; needs
                scheduling_policy "priority".
            on_error: what a prompt that does not pass its checks does. raise: no prompt is
                computed; return: its output has finish reason error, and the reason in `error`.
                A request that fails while it is computed (by its logits processor, say) never
                raises: in both cases its output has this finish reason, and the others go on; so
                read `error`.

        Returns:
            One output per prompt, in the order of the prompts. A prompt that is too long has finish
            reason length, no output tokens, and the reason in `error`.

        Raises:
            RequestError: the arguments do not match each other, or a prompt cannot be served; the
                message has its index.
            EngineDeadError: the engine cannot go on; `finished_outputs` has the finished prompts.
            KeyboardInterrupt: on Ctrl-C; the engine has aborted the prompts and can be used again.
        """
        self._finished = []
        pairs = checks.pair_prompts(prompts, prompt_token_ids)
        params = _params_of_each(sampling_params, len(pairs))
        priorities = one_per_prompt("priority", 0 if priority is None else priority, len(pairs))
        adapters = one_per_prompt("lora_request", lora_request, len(pairs))
        requests = [
            GenerateRequest(*pair, params=own, priority=urgency, lora_request=adapter)
            for pair, own, urgency, adapter in zip(pairs, params, priorities, adapters, strict=True)
        ]
        return self._serve(requests, on_error, use_tqdm)

    def _serve(
        self, requests: list[GenerateRequest], on_error: str, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Checks all requests, and then runs them; see `generate`."""
        if on_error not in ("raise", "return"):
            raise errors.RequestError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        kind = RequestOutputKind.FINAL_ONLY
        requests = [replace(req, params=changed(req.params, output_kind=kind)) for req in requests]
        request_ids = [self._new_request_id() for _ in requests]
        done: dict[str, RequestOutput] = {}

        def attempt(place: int, call: Callable[..., Any], *args: Any) -> Any:
            try:
                return call(*args)
            except errors.RequestError as error:
                if on_error == "raise":
                    raise type(error)(f"prompts[{place}]: {error}") from error
                own_id = request_ids[place]
                done[own_id] = checks.refusal(own_id, requests[place], error)
                return None

        engine = self.llm_engine
        checked = [attempt(i, engine.check_request, request) for i, request in enumerate(requests)]
        try:
            for place, request in enumerate(checked):
                if request is not None:
                    attempt(place, engine.add_checked, request_ids[place], request)
            self._run(set(request_ids), done, use_tqdm)
        except BaseException as error:  # after Ctrl-C too, no request may be left in the engine
            # Outputs of a step that was interrupted have not been returned yet.
            pending = self.llm_engine.discard_outputs(request_ids)
            done.update({output.request_id: output for output in pending if output.finished})
            self.llm_engine.abort_request(request_ids)
            self.llm_engine.discard_outputs(request_ids)
            self._finished = [done[key] for key in request_ids if key in done]
            count = f"{len(done)} of {counted(len(request_ids), 'prompt')}"
            error.add_note(f"LLM.finished_outputs() has what was done: {count}")
            raise
        finally:
            for request_id in request_ids:
                self._inbox.pop(request_id, None)
        # The engine has logged those that are too long.
        failed = [out.error for out in done.values() if out.outputs[0].finish_reason == "error"]
        if failed:
            total = counted(len(done), "prompt")
            logger.warning("%d of %s failed; the first: %s", len(failed), total, failed[0])
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, through the model's chat template.

        Args:
            messages: dicts with `role` and `content`, which is a string or a list of parts
                `{"type": "text", "text": ...}` and, for models that read pictures,
                `{"type": "image_url", "image_url": {"url": ...}}` and `{"type": "image", "image":
                ...}` with what `PictureReader.read` takes.
            lora_request: see `generate`.
            chat_template: a template in Jinja, or the name of one of the model's own; see
                `Tokenizer.render_chat`.
            add_generation_prompt: end with the opening of the assistant's answer.
            continue_final_message: leave the last message open, so that the answer continues it;
                needs `add_generation_prompt=False`.
            tools: descriptions of tools, which only the template reads.
            chat_template_kwargs: further arguments of the template.
            on_error: see `generate`.

        Returns:
            One output per conversation, in their order; `prompt` is the text of the template.

        Raises:
            InvalidPromptError: the model has no tokenizer or no chat template, or the template
                does not accept the messages.
        """
        self._finished = []
        if not isinstance(chat_template_kwargs, Mapping | None):
            text = f"chat_template_kwargs must be a dict, got {chat_template_kwargs!r}"
            raise errors.RequestError(text)
        is_many = isinstance(messages, Sequence) and all(map(checks.is_list, messages))
        conversations: list[Any] = list(messages) if is_many else [messages]
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        params = _params_of_each(sampling_params, len(conversations))
        adapters = one_per_prompt("lora_request", lora_request, len(conversations))
        requests = [
            GenerateRequest(messages=talk, chat_options=options, params=own, lora_request=adapter)
            for talk, own, adapter in zip(conversations, params, adapters, strict=True)
        ]
        return self._serve(requests, on_error, use_tqdm)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Finds the likeliest continuations of every prompt, by the engine's own beam search.

        Args:
            prompts: see `generate`.
            params: number of beams, their length and how they are compared, for all prompts.
            lora_request: the adapter for all prompts.
            use_tqdm: show a progress bar, with prompts and tokens.

        Returns:
            One output per prompt, in the order of the prompts; its `sequences` are the beams, the
            best first, with the prompt in their tokens and text.

        Raises:
            RequestError: see `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            text = f"give BeamSearchParams, or use_beam_search=True to generate; got {params!r:.60}"
            raise errors.InvalidSamplingParamsError(text)
        sampling_params, tokenizer = params.sampling_params(), self.llm_engine.tokenizer
        results = []
        for output in self.generate(prompts, sampling_params, None, use_tqdm, lora_request):
            beams = []
            for beam in output.outputs:
                hides_end = beam.finish_reason == "stop" and not params.include_stop_str_in_output
                shown = beam.token_ids[:-1] if hides_end else beam.token_ids
                tokens = [*output.prompt_token_ids, *shown]
                text = None if tokenizer is None else tokenizer.decode(tokens, False)
                beams.append(BeamSearchSequence(tokens, text, beam.cumulative_logprob))
            results.append(BeamSearchOutput(beams, output.error))
        return results

    def chat_token_ids(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the prompt ids of one conversation, by the model's chat template.

        Raises:
            InvalidPromptError: see `chat`.
        """
        options = {"add_generation_prompt": add_generation_prompt}
        return self.llm_engine.chat_token_ids(list(messages), **options)

    def stream(
        self,
        prompt: PromptInputs | None,
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: list[int] | None = None,
        messages: Sequence[Message] | None = None,
    ) -> Iterator[str]:
        """Completes one prompt and yields its text as it grows.

        Args:
            messages: in the place of a prompt: a conversation, see `chat`.

        Raises:
            RequestError: the prompt cannot be served, or the parameters ask for more than one
                sequence.
            RequestAbortedError: another caller aborted it, after the text that was yielded.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        request = GenerateRequest(prompt, prompt_token_ids, messages, params=params)
        if params.num_sequences != 1:
            count = f"n or best_of is {params.num_sequences}"
            text = f"stream yields the text of one sequence, and {count}"
            raise errors.InvalidSamplingParamsError(f"{text}; use generate, or ask for one")
        request_id = self._new_request_id()
        request = replace(request, params=changed(params, output_kind=RequestOutputKind.DELTA))
        self.llm_engine.add_checked(request_id, self.llm_engine.check_request(request))
        outputs = self._inbox[request_id] = []
        finished = False
        try:
            while not finished:
                while not outputs:
                    self._pump()
                output = outputs.pop(0)
                finished = output.finished
                if output.failure is not None:
                    raise output.failure
                yield output.outputs[0].text
                if output.outputs[0].finish_reason == "abort":
                    raise errors.RequestAbortedError(f"request {request_id!r} was aborted")
        finally:
            del self._inbox[request_id]
            if not finished:
                self.llm_engine.abort_request(request_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's `generation_config.json` recommends; `generate` without
        parameters does not take them."""
        generation_config = read_generation_config(self.llm_engine.get_model_config().model)
        return SamplingParams(**recommended_sampling(generation_config))

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers; None: the model's folder has no tokenizer."""
        return self.llm_engine.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replaces the tokenizer by one of transformers, or by a `Tokenizer`; None: without texts.

        Raises:
            ConfigError: it is none of these.
        """
        known = tokenizer is None or isinstance(tokenizer, Tokenizer)
        self.llm_engine.tokenizer = tokenizer if known else Tokenizer(tokenizer)

    def shutdown(self) -> None:
        """Frees the model's memory; a second call does nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _new_request_id(self) -> str:
        """An id that no request of the engine has; the engine may have other callers."""
        request_id = str(next(self.request_counter))
        return self._new_request_id() if self.llm_engine.has_request(request_id) else request_id

    def _run(self, request_ids: set[str], done: dict[str, RequestOutput], use_tqdm: bool) -> None:
        """Runs steps until `done` holds all of `request_ids`; other requests run too."""
        outputs: list[RequestOutput] = []
        self._inbox.update(dict.fromkeys(request_ids - done.keys(), outputs))
        num_requests = len(request_ids)
        with ProgressBar(self.llm_engine.counters, num_requests, use_tqdm) as bar:
            bar.add(done.values())
            while len(done) < num_requests:
                self._pump()
                done.update({output.request_id: output for output in outputs})
                bar.add(outputs)
                outputs.clear()

    def _pump(self) -> None:
        """Runs a step and passes its outputs to the calls that wait for them.

        Raises:
            EngineError: no request is left, although a call waits for one: another caller has
                aborted it and taken its output.
        """
        if not self.llm_engine.has_unfinished_requests():
            raise errors.EngineError("another caller has aborted the request and taken its output")
        for output in self.llm_engine.step():
            if output.request_id in self._inbox:
                self._inbox[output.request_id].append(output)


def _params_of_each(params: Any, num_prompts: int) -> list[Any]:
    """The parameters of each prompt, unchecked."""
    params = SamplingParams() if params is None else params
    return one_per_prompt("sampling_params", params, num_prompts)


def changed(params: SamplingParams, **fields: Any) -> SamplingParams:
    """The same parameters with other values of some. The user's own object stays as it is."""
    params = copy.copy(params)
    vars(params).update(fields)
    return params
