"""What can be found out about a request before it meets the engine's queues, on any thread."""

from __future__ import annotations

from dataclasses import dataclass

from tpengine.config import EngineConfig, ModelConfig
from tpengine.engine.prompt import Prompt, read_prompt, read_sampling_params
from tpengine.engine.several import check_priority, check_several
from tpengine.engine.tokenizer import Tokenizer
from tpengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that this model can serve, with its prompt as ids.

    Attributes:
        prompt: the text; None where ids were given.
        end_token_ids: ids that end it: the model's (unless `ignore_eos`) and its `stop_token_ids`.
        num_candidates: beam search: continuations of each beam to look at after every token.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    end_token_ids: frozenset[int]
    num_candidates: int


def check_request(
    inputs: Prompt | None,
    params: SamplingParams | None,
    prompt_token_ids: list[int] | None,
    priority: int,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
) -> CheckedRequest:
    """Checks a request against the model's and the engine's limits, and tokenizes its prompt.

    Args:
        inputs: text, or a dict with `prompt` or `prompt_token_ids`.
        params: None: `SamplingParams()`.
        prompt_token_ids: the prompt as ids; then text in `inputs` is only echoed.
        priority: in [-1000, 1000]; needs scheduling_policy "priority".

    Raises:
        RequestError: this request cannot be served.
    """
    model = config.model
    params = read_sampling_params(params or SamplingParams(), model.vocab_size, tokenizer)
    check_priority(priority, config.scheduler)
    end_token_ids = _end_token_ids(params, model, tokenizer)
    candidates = check_several(params, len(end_token_ids), config.scheduler, model.vocab_size)
    text, token_ids = read_prompt(inputs, prompt_token_ids, tokenizer, model)
    return CheckedRequest(text, token_ids, params, priority, end_token_ids, candidates)


def _end_token_ids(
    params: SamplingParams, model: ModelConfig, tokenizer: Tokenizer | None
) -> frozenset[int]:
    if params.ignore_eos:
        return frozenset(params.stop_token_ids)
    own = model.end_token_ids
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        own |= {tokenizer.eos_token_id}
    # Some configs name ids that the model lacks.
    known = frozenset(i for i in own if i < model.vocab_size)
    return known | frozenset(params.stop_token_ids)
