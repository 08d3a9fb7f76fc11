"""A new request: the forms in which it comes, and every check of it.

A request has three forms: `GenerateRequest` is what a user or a protocol gives, `check_request`
makes a `CheckedRequest` of it on any thread, and the engine makes a `Request` of that between two
steps. A fact that is checked here is only asserted afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from tpengine import errors, sampling_params
from tpengine.checkpoint.adapter_files import AdapterChecks
from tpengine.config import MAX_PRIORITY, EngineConfig, ModelConfig, SchedulerConfig
from tpengine.engine.beam_search import num_candidates
from tpengine.engine.encoder_prompts import is_two_prompts, read_two_prompts
from tpengine.engine.picture_prompts import PicturePrompts
from tpengine.engine.picture_reader import take_pictures
from tpengine.engine.pooled_outputs import check_generates
from tpengine.engine.pooling_requests import read_pooled_prompt
from tpengine.engine.request_grammars import read_grammar
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import counted
from tpengine.inputs import NO_OWNER, LoRARequest, Owner, PoolingParams, PromptInputs
from tpengine.messages import SamplingRules
from tpengine.outputs import CompletionOutput, RequestOutput
from tpengine.sampling_params import WHOLE_VOCABULARY, SamplingParams
from tpengine.scheduling.sequence import CheckedRequest
from tpengine.structured.grammar_checks import GrammarChecks

_RULES = SamplingRules.__dataclass_fields__.keys() & SamplingParams.__dataclass_fields__.keys()
"""Parameters that ranks get under the same name."""
_wrong_params = errors.InvalidSamplingParamsError.of_field
_wrong_prompt = errors.InvalidPromptError.of_field


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as a user or a protocol's converter gives it, before any check. It has `prompt`,
    `prompt_token_ids` or `messages`.

    Attributes:
        prompt: text, or a dict as `LLM.generate` takes it. If ids are given too, the text is only
            repeated in the output.
        messages: a conversation; the model's chat template makes the prompt of it.
        chat_options: further arguments of `Tokenizer.render_chat` for it.
        pooling_params: for a model that makes no tokens; None: it generates.
        second: the second text of a pair, whose first is the prompt; for a model that scores pairs.
        request_id: any string that no unfinished request has; None: the async engine makes one.
        arrival_time: seconds of `time.time`; None: now.
        priority: in [-1000, 1000]; lower is served first; needs scheduling_policy "priority".
        deadline: moment of `time.monotonic` at which the request is ended, in any state.
        max_queue_s: seconds that it may wait for its first step.
        owner: the client that sent it.
        lora_request: its adapter; None: it has none.

    Raises:
        InvalidSamplingParamsError: `params` has another type.
        InvalidPromptError: `arrival_time` is no number.
    """

    prompt: PromptInputs | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    arrival_time: float | None = None
    priority: int = 0
    deadline: float | None = None
    max_queue_s: float | None = None
    owner: Owner = NO_OWNER
    lora_request: LoRARequest | None = None
    pooling_params: PoolingParams | None = None
    second: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise _wrong_params("params", f"must be SamplingParams, got {self.params!r:.80}")
        if not isinstance(self.pooling_params, PoolingParams | None):
            got = f"{self.pooling_params!r:.80}"
            raise _wrong_params("pooling_params", f"must be PoolingParams, got {got}")
        if not isinstance(self.arrival_time, float | int | None):
            raise _wrong_prompt("arrival_time", f"is in seconds, got {self.arrival_time!r:.80}")


def fields_of_params(params: SamplingParams | PoolingParams | None) -> dict[str, Any]:
    """The fields of a `GenerateRequest` for parameters of either kind; None: the default ones."""
    if isinstance(params, PoolingParams):
        return {"pooling_params": params}
    return {} if params is None else {"params": params}


def check_request_id(request_id: object, find: Callable[[str], object]) -> None:
    """Checks the id of a new request.

    Args:
        find: returns the unfinished request of an id, or None or False if there is none.

    Raises:
        InvalidPromptError: it is not a string, or empty.
        DuplicateRequestError: an unfinished request has it.
    """
    if not isinstance(request_id, str) or not request_id:
        raise _wrong_prompt("request_id", f"must be a non-empty string, got {request_id!r}")
    if find(request_id):
        text = f"request id {request_id!r} belongs to an unfinished request; choose another"
        raise errors.DuplicateRequestError(text, field="request_id")


def as_request_ids(value: str | Iterable[str]) -> list[str]:
    """Returns one id, or many, as a list.

    Raises:
        InvalidPromptError: it is neither a string nor strings.
    """
    ids: list[Any] = list(value) if is_list(value) else [value]
    if not all(isinstance(request_id, str) for request_id in ids):
        text = f"a request_id must be a string, or a list of such, got {value!r}"
        raise errors.InvalidPromptError(text, field="request_id")
    return ids


def check_request(
    request: GenerateRequest,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    adapters: AdapterChecks,
    grammar_checks: GrammarChecks,
    prompts: PicturePrompts | None,
) -> CheckedRequest:
    """Checks all of a request but its id against the limits of model and engine, and tokenizes its
    prompt. This takes time and may run on any thread.

    Args:
        prompts: None: the engine reads text alone.

    Raises:
        RequestError: this request cannot be served.
    """
    model, is_local = config.model, config.parallel.ranks is None
    start_of_second = encoder = None
    pooling_params = request.pooling_params
    if pooling_params is not None:
        pooling_params = pooling_params.clone()  # checks what was assigned since
        texts = request.prompt, request.prompt_token_ids, request.second, request.messages
        read = read_pooled_prompt(*texts, pooling_params, model, tokenizer)
        request = replace(request, prompt=read.prompt, prompt_token_ids=read.token_ids)
        start_of_second = read.start_of_second
    else:
        check_generates(model.pooling)
    params = read_sampling_params(request.params, model, tokenizer)
    if model.encoder is not None or is_two_prompts(request.prompt):
        num_kept = params.truncate_prompt_tokens

        def read_own(prompt: Any, ids: Any) -> tuple[str | None, list[int]]:
            own = replace(request, prompt=prompt, prompt_token_ids=ids)
            return _read_prompt(own, num_kept, tokenizer, config, None)[:2]

        given_prompt = request.prompt, request.prompt_token_ids, request.messages
        decoder, ids, encoder = read_two_prompts(
            *given_prompt, num_kept, model, tokenizer, read_own
        )
        request = replace(request, prompt=decoder, prompt_token_ids=ids)
    _check_priority(request.priority, config.scheduler)
    end_token_ids = _end_ids(params, model, tokenizer)
    candidates = _check_sequences(params, len(end_token_ids), config.scheduler, model.vocab_size)
    adapter = adapters.check(request.lora_request)
    num_kept = params.truncate_prompt_tokens if encoder is None else None
    text, token_ids, images = _read_prompt(request, num_kept, tokenizer, config, prompts)
    pictures, is_chat = None, request.messages is not None
    if images is not None and prompts is not None:
        if params.truncate_prompt_tokens is not None:
            problem = "does not fit a prompt with pictures, which would lose their tokens"
            raise _wrong_params("truncate_prompt_tokens", f"{problem}; leave it out")
        how = request.owner, is_chat, tokenizer
        token_ids, pictures = prompts.put(images, text, token_ids, *how)
    rules = sampling_rules(params, model, tokenizer, is_local=is_local)
    grammar = read_grammar(params, text, is_chat, model, tokenizer, grammar_checks)
    return CheckedRequest(
        text,
        token_ids,
        params,
        replace(rules, grammar=grammar),
        request.priority,
        end_token_ids,
        candidates,
        adapter,
        request.owner,
        pictures,
        pooling_params,
        start_of_second,
        encoder,
    )


def check_token_ids(name: str, token_ids: Iterable[Any], vocab_size: int) -> list[int]:
    """Returns ids as plain integers (users often give NumPy's).

    Args:
        name: of the argument, for the error.

    Raises:
        InvalidPromptError: one of them is not in [0, vocab_size - 1].
    """
    token_ids = list(token_ids)
    for position, token_id in enumerate(token_ids):
        if not _is_int(token_id) or not 0 <= token_id < vocab_size:
            text = f"{name}[{position}] = {token_id!r} is no id of the vocabulary"
            text = f"{text}; ids are integers in [0, {vocab_size - 1}]"
            raise errors.InvalidPromptError(text, field=name)
    return [index(token_id) for token_id in token_ids]


def need_tokenizer(tokenizer: Tokenizer | None, model: ModelConfig) -> Tokenizer:
    """Returns the tokenizer.

    Raises:
        InvalidPromptError: the model has no tokenizer.
    """
    if tokenizer is None:
        lack = f"the model {model.model} has no tokenizer, which text and messages need"
        raise errors.InvalidPromptError(f"{lack}; give prompt_token_ids, or name a tokenizer")
    return tokenizer


def _read_prompt(
    request: GenerateRequest,
    num_kept: int | None,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    pictures: PicturePrompts | None,
) -> tuple[str | None, list[int], Any]:
    """Returns the prompt's text, if it has one, its last `num_kept` ids, checked, and its pictures,
    unchecked; None: it has none."""
    prompt: Any = request.prompt
    token_ids, model = request.prompt_token_ids, config.model
    why_none = config.scheduler.why_text_alone if pictures is None else None
    messages, images = take_pictures(request.messages, prompt, why_none)
    if request.messages is not None:
        if prompt is not None or token_ids is not None:
            text = "a request has messages or a prompt, and this one has both; give one of them"
            raise errors.InvalidPromptError(text)
        tokenizer = need_tokenizer(tokenizer, model)
        token = None if pictures is None else pictures.placeholder
        prompt = tokenizer.render_chat(messages, picture_token=token, **request.chat_options)
        token_ids = tokenizer.encode_chat(prompt)
    if isinstance(prompt, Mapping):
        unknown = prompt.keys() - {"prompt", "prompt_token_ids", "multi_modal_data"}
        if unknown:
            hint = "; did you mean prompt_token_ids?" if "input_ids" in unknown else ""
            keys = "prompt, prompt_token_ids and multi_modal_data"
            text = f"a prompt's keys are {keys}; got {sorted(unknown)}{hint}"
            raise errors.InvalidPromptError(text)
        token_ids, prompt = prompt.get("prompt_token_ids", token_ids), prompt.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        must = "a prompt must be text, ids (as prompt_token_ids) or a dict"
        raise errors.InvalidPromptError(f"{must}, got {type(prompt).__name__}")
    if token_ids is None:
        if prompt is None:
            text = "a request needs a prompt, ids or messages; got none of them"
            raise errors.InvalidPromptError(text)
        token_ids = need_tokenizer(tokenizer, model).encode(prompt)
    if not is_list(token_ids):
        hint = "; give its ['input_ids']" if isinstance(token_ids, Mapping) else ""
        got = f"{type(token_ids).__name__}{hint}"
        raise _wrong_prompt("prompt_token_ids", f"must be a list of integers, got {got}")
    try:
        token_ids = list(token_ids)
    except TypeError as error:  # a tensor without dimensions is an Iterable that cannot be iterated
        text = f"must be a list of integers: {error}"
        raise _wrong_prompt("prompt_token_ids", text) from error
    if num_kept is not None:
        token_ids = token_ids[-num_kept:]
    if not token_ids:
        raise errors.InvalidPromptError("the prompt is empty: it has no tokens; give at least one")
    return prompt, check_token_ids("prompt_token_ids", token_ids, model.vocab_size), images


def read_sampling_params(
    params: SamplingParams, model: ModelConfig, tokenizer: Tokenizer | None
) -> SamplingParams:
    """Checks a copy of a user's parameters, also for what they cannot know at construction.

    Raises:
        InvalidSamplingParamsError: a value was assigned that is out of its range, an id is outside
            the vocabulary, or texts are given and there is no tokenizer.
    """
    params = copy.copy(params)
    params.check()
    words = [("bad_words_token_ids", word) for word in params.bad_words_token_ids]
    names = ("stop_token_ids", "logit_bias", "allowed_token_ids")
    for name, token_ids in [*((name, getattr(params, name) or ()) for name in names), *words]:
        for token_id in token_ids:
            if token_id >= model.vocab_size:
                known = f"ids are in [0, {model.vocab_size - 1}]"
                text = f"holds {token_id}, which is no id of the vocabulary; {known}"
                raise _wrong_params(name, text)
    _check_tokenizer(params, tokenizer)
    return params


def sampling_rules(
    params: SamplingParams, model: ModelConfig, tokenizer: Tokenizer | None, *, is_local: bool
) -> SamplingRules:
    """Returns what ranks get of checked parameters, without the grammar.

    Args:
        is_local: whether the only worker runs in this process.

    Raises:
        InvalidSamplingParamsError: more log probabilities are wanted than the engine allows, a bad
            word has no tokens, or a logits processor cannot be imported or pickled.
    """
    rules = {name: getattr(params, name) for name in _RULES}
    rules["min_tokens"] = min(params.min_tokens, model.max_model_len)  # of 64 bits on the wire
    for name in ("logprobs", "prompt_logprobs"):
        rules[name] = _num_logprobs(name, rules[name], model)
    for processor in params.logits_processors or ():
        sampling_params.load_logits_processor(processor)
    never = () if model.encoder is None else model.encoder.bad_words_token_ids
    if never or params.bad_words:
        words = dict.fromkeys([*never, *map(tuple, params.bad_words_token_ids)])
        for text in params.bad_words:
            words.update(dict.fromkeys(_bad_word_ids(text, need_tokenizer(tokenizer, model))))
        rules["bad_words_token_ids"] = [list(ids) for ids in words]
    if model.encoder is not None and (sound := model.encoder.sound) is not None:
        own = [[token_id] for token_id in sound.suppressed]
        rules["bad_words_token_ids"] = [*rules["bad_words_token_ids"], *own]
        rules["not_first_token_ids"] = list(sound.suppressed_first)
    if is_local:
        return SamplingRules(**rules)
    from tpengine.executor.launch.functions import sendable_rules

    return sendable_rules(SamplingRules(**rules))


def _num_logprobs(name: str, count: int | None, model: ModelConfig) -> int | None:
    if count is None:
        return None
    wanted = model.vocab_size if count == WHOLE_VOCABULARY else min(count, model.vocab_size)
    if 0 <= model.max_logprobs < wanted:
        asked = f"asks for all {wanted} tokens, more" if count == WHOLE_VOCABULARY else "is more"
        hint = "ask for fewer, or make the engine with a larger max_logprobs (-1: no limit)"
        text = f"= {count} {asked} than max_logprobs = {model.max_logprobs}; {hint}"
        raise _wrong_params(name, text)
    return wanted


def _check_tokenizer(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Checks what the tokenizer, or its absence, rules out."""
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        if texts and tokenizer is None:
            text = f"needs a tokenizer, and the model has none; use {name}_token_ids"
            raise _wrong_params(name, text)
    is_slow = tokenizer is not None and tokenizer.fast_backend is None
    if is_slow and params.detokenize and not params.spaces_between_special_tokens:
        lack = "= False is not supported with this model's tokenizer, which is written in Python"
        raise _wrong_params("spaces_between_special_tokens", f"{lack}; leave it at True")


def _bad_word_ids(text: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Returns a word's ids inside another word and after a space: tokenizers tell them apart."""
    word = text.lstrip()
    try:
        ids = [tuple(tokenizer.encode(form, False)) for form in (word, " " + word)]
    except errors.InvalidPromptError as error:
        problem = f"holds {text!r}, which cannot be tokenized: {error}"
        raise _wrong_params("bad_words", problem) from error
    if not all(ids):
        problem = f"holds {text!r}, which has no tokens; give another, or leave it out"
        raise _wrong_params("bad_words", problem)
    return ids


def _end_ids(
    params: SamplingParams, model: ModelConfig, tokenizer: Tokenizer | None
) -> frozenset[int]:
    # Where a grammar is complete only an end token may follow, and nothing may follow that.
    if params.ignore_eos and params.structured_outputs is None:
        return frozenset(params.stop_token_ids)
    own = frozenset(i for i in model.end_token_ids if i < model.vocab_size)
    if tokenizer is not None:
        own = tokenizer.end_token_ids(model)
    return own | frozenset(params.stop_token_ids)


def _check_sequences(
    params: SamplingParams, num_ends: int, config: SchedulerConfig, vocab: int
) -> int:
    """Checks that all sequences of a request can run at once; returns the number of candidates of
    each beam, 0 without beam search."""
    count = params.num_sequences
    if count > config.max_num_seqs:
        run = f"max_num_seqs = {config.max_num_seqs} run at once"
        text = f"n or best_of = {count} sequences, but {run}; ask for fewer, or raise max_num_seqs"
        name = "n" if count == params.n else "best_of"
        raise errors.InvalidSamplingParamsError(text, field=name)
    if not params.use_beam_search:
        return 0
    if count > config.max_num_batched_tokens:
        limit = f"max_num_batched_tokens = {config.max_num_batched_tokens} tokens"
        text = f"= {count} beams advance together, but a step holds {limit}"
        raise _wrong_params("best_of", f"{text}; ask for fewer, or raise it")
    candidates = num_candidates(count, num_ends)
    if candidates > vocab:
        text = f"beam search with best_of = {count} and {num_ends} end tokens looks at {candidates}"
        text = f"{text} candidates, but the vocabulary has {vocab}; ask for fewer"
        raise errors.InvalidSamplingParamsError(text, field="best_of")
    return candidates


def _check_priority(priority: int, config: SchedulerConfig) -> None:
    if not _is_int(priority) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        text = f"must be an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {priority!r}"
        raise errors.InvalidPriorityError.of_field("priority", text)
    if priority and config.policy == "fcfs":
        hint = "set scheduling_policy='priority', or leave the priority at 0"
        text = f"= {priority}, but requests are served as they arrive; {hint}"
        raise errors.InvalidPriorityError.of_field("priority", text)


def pair_prompts(
    prompts: Any, prompt_token_ids: Any, method: str = "generate"
) -> list[tuple[Any, Any]]:
    """Brings what `LLM.generate` is given, one prompt or many, as text, ids or both, into one list.

    Returns:
        (text or dict, ids) of each prompt, unchecked; one of them may be None.

    Raises:
        InvalidPromptError: an argument has a wrong type, or the two differ in length.
    """
    if prompts is None and prompt_token_ids is None:
        raise errors.InvalidPromptError(f"{method} needs prompts or prompt_token_ids; got neither")
    ids = None if prompt_token_ids is None else as_many("prompt_token_ids", prompt_token_ids)
    texts = [None] * len(ids or ()) if prompts is None else as_many("prompts", prompts)
    if ids is None:  # a prompt may itself be a list of ids
        return [(None, prompt) if is_list(prompt) else (prompt, None) for prompt in texts]
    if len(texts) != len(ids):
        got = f"{len(texts)} and {len(ids)}"
        text = f"prompts and prompt_token_ids must be equally many, got {got}"
        raise errors.InvalidPromptError(text)
    return list(zip(texts, ids, strict=True))


def as_many(name: str, prompts: Any) -> list[Any]:
    """Returns the prompts of an argument that holds one or many."""
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        text = f"{name} must be a list of prompts or one prompt, got {type(prompts).__name__}"
        raise errors.InvalidPromptError(text)
    many = list(prompts)
    return [many] if many and _is_int(many[0]) else many


def one_per_prompt(name: str, value: Any, num_prompts: int) -> list[Any]:
    """Returns an argument's value for each prompt: one for all, or a list with one for each.

    Raises:
        InvalidPromptError: the list has another length.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        got = f"{len(value)} for {counted(num_prompts, 'prompt')}"
        raise errors.InvalidPromptError(f"a list of {name} needs one per prompt: got {got}")
    return list(value)


def refusal(request_id: str, request: GenerateRequest, error: errors.RequestError) -> RequestOutput:
    """Returns the output of a request that did not pass its checks."""
    prompt: Any = request.prompt
    token_ids: Any = request.prompt_token_ids
    if isinstance(prompt, Mapping):
        token_ids, prompt = prompt.get("prompt_token_ids", token_ids), prompt.get("prompt")
    try:
        shown = list(token_ids) if is_list(token_ids) else []
    except TypeError:  # it is no list, which is the error
        shown = []
    text = prompt if isinstance(prompt, str) else None
    outputs = [CompletionOutput(0, "", (), None, None, finish_reason="error")]
    return RequestOutput(request_id, text, shown, None, outputs, True, failure=error)


def is_list(value: object) -> bool:
    """Whether a value holds many; text and mappings are one."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _is_int(value: Any) -> bool:
    """Whether a value is one integer, of Python, NumPy or a tensor; bool is rejected."""
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
