"""Requests to a model that makes no tokens: what a user wants of it, and its prompt as ids.

A prompt is a text, ids, a conversation, or a pair of texts whose fit is scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tpengine.config import ModelConfig
from tpengine.engine.pooled_outputs import check_pooling_params, prompt_before
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidPictureError, InvalidPromptError, InvalidSamplingParamsError
from tpengine.inputs import PoolingParams

_BEFORE_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_PAIR = (
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}"
)
_AFTER_PAIR = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""How a causal model is asked whether a document fits; the words are those with which
Qwen3-Reranker was trained (its model card)."""


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt before its ids are checked.

    Attributes:
        prompt: as `GenerateRequest` has it, without the second text of a pair.
        token_ids: its ids, if they differ from those that the tokenizer makes of `prompt`.
        start_of_second: see `NewSequence`.
    """

    prompt: Any
    token_ids: Any = None
    start_of_second: int | None = None


def read_pooled_prompt(
    prompt: Any,
    token_ids: Any,
    second: str | None,
    messages: Any,
    params: PoolingParams,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
) -> PooledPrompt:
    """Puts the model's own text before the prompt, joins a pair, and cuts what is too long.

    Args:
        second: of a pair; None: the prompt is alone.
        messages: the conversation of which the prompt will be made; None: there is none.

    Raises:
        RequestError: the parameters do not fit the model, or a text cannot be tokenized.
    """
    pooling = check_pooling_params(params, model)
    if messages is not None:
        unfit = params.truncate_prompt_tokens, params.prompt_name, second
        if any(value is not None for value in unfit):
            problem = "a conversation takes no truncate_prompt_tokens, prompt_name or second text"
            raise InvalidPromptError(f"{problem}; give a prompt as text, or leave them out")
        return PooledPrompt(prompt, token_ids)
    text: Any = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if isinstance(prompt, Mapping):
        token_ids = prompt.get("prompt_token_ids", token_ids)
        if prompt.get("multi_modal_data") is not None:
            raise InvalidPictureError("pictures are not embedded, scored or classified; give text")
    if second is not None and pooling.task == "embed":
        hint = "give both texts in requests of their own, or to LLM.score"
        raise InvalidPromptError(f"the model does 'embed', which takes no second text; {hint}")
    most = params.truncate_prompt_tokens
    most = model.max_model_len if most == -1 else most
    if token_ids is not None and second is None:
        if params.prompt_name is not None:
            problem = f"= {params.prompt_name!r} stands before a text, and the prompt is ids"
            raise InvalidSamplingParamsError.of_field("prompt_name", f"{problem}; leave it out")
        if isinstance(token_ids, Iterable) and not isinstance(token_ids, (str, bytes, Mapping)):
            token_ids = list(islice(token_ids, most))
        return PooledPrompt(text, token_ids)
    if not isinstance(text, str) or tokenizer is None:
        if second is not None:
            problem = "a pair needs two texts and a tokenizer"
            raise InvalidPromptError(f"{problem}; got {type(text).__name__}")
        return PooledPrompt(prompt)
    text = prompt_before(params, pooling) + text
    if second is None and most is None:
        return PooledPrompt(text)
    if second is not None and pooling.choice_ids:
        return PooledPrompt(text, _choice_ids(text, second, most, tokenizer))
    ids, start = tokenizer.encode_pair(text, second, most)
    has_types = model.hf_config.get("type_vocab_size", 2) > 1
    return PooledPrompt(text, ids, start if has_types else None)


def _choice_ids(query: str, document: str, most: int | None, tokenizer: Tokenizer) -> list[int]:
    """The ids of the question whether a document fits a query.

    Args:
        most: ids that are kept; the longer text loses its end first. None: all.
    """

    def ids(*texts: str) -> list[int]:
        words = _BEFORE_PAIR, _PAIR.format(query=texts[0], document=texts[1]), _AFTER_PAIR
        parts = (tokenizer.encode(text, add_special_tokens=False) for text in words)
        return [token_id for part in parts for token_id in part]

    asked, num_words = ids(query, document), len(ids("", ""))
    room = len(asked) if most is None else most - num_words
    while most is not None and len(asked) > most:
        asked = ids(*tokenizer.cut_pair(query, document, room))
        room -= max(1, len(asked) - most)  # texts that are cut may have other tokens at their ends
    return asked
