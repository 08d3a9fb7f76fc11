"""What one request may hold: bounds that a protocol needs and a Python caller does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tpengine.async_engine.admission import QueueLimits
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidPromptError, InvalidSamplingParamsError
from tpengine.sampling_params import MAX_LOGPROBS, SamplingParams
from tpengine.server.grpc.proto import tpengine_pb2 as pb

MAX_REQUEST_ID = 128
"""Characters of a request id."""
DEFAULT_MESSAGE_BYTES = 4 << 20
MAX_ERROR_TEXT = 400
"""Bytes of an error's text: it travels in trailers, which clients bound at 8 KiB."""
_MAX_ROLE_BYTES = 64
_SLACK = 4
_DEFAULT_MAX_TOKENS = SamplingParams().max_tokens or 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a request, each named as it is reported by GetServerInfo.

    Attributes:
        max_message_bytes: of a request, after decompression.
        max_metadata_bytes: of all of a call's metadata.
        max_n: sequences of a request, n or best_of.
        max_stops: stop strings, and stop ids.
        max_stop_bytes: of one stop string or bad word, in UTF-8.
        max_token_rules: biases, and allowed ids; of bad words a sixteenth, for each is tokenized.
        max_logprob_entries: candidates of all tokens of a request, which are held until it is read.
        max_chat_messages: of a conversation.
        max_calls: open calls, those of health and those that may wait in the queue not counted.
        max_connection_calls: likewise, of one connection.
        max_health_calls: open calls of health, which need no token.
        message_s: what a call's message may take to come, in seconds.
        queue: what may wait.
    """

    max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    max_metadata_bytes: int = 16 << 10
    max_n: int = 128
    max_stops: int = 64
    max_stop_bytes: int = 1024
    max_token_rules: int = 16384
    max_logprob_entries: int = 1 << 16
    max_chat_messages: int = 4096
    max_calls: int = 4096
    max_connection_calls: int = 1024
    max_health_calls: int = 512
    message_s: float = 20.0
    queue: QueueLimits = field(default_factory=QueueLimits)


def check_request_id(request_id: str) -> None:
    """Ids stand in logs and metadata: bounded, and printable ASCII without spaces.

    Raises:
        InvalidPromptError: it is anything else.
    """
    fits = 0 < len(request_id) <= MAX_REQUEST_ID
    if not fits or not all("!" <= char <= "~" for char in request_id):
        raise InvalidPromptError(
            f"request_id must be 1 to {MAX_REQUEST_ID} printable ASCII characters without spaces, "
            f"got {len(request_id)} characters; leave it out, and the server makes one"
        )


def check_conversation(conversation: pb.Conversation, limits: Limits) -> None:
    """Bounds the number of messages.

    Raises:
        InvalidPromptError: there are more, or a role is longer than any is.
    """
    count = len(conversation.messages)
    if count > limits.max_chat_messages:
        raise InvalidPromptError(
            f"messages must be at most {limits.max_chat_messages}, got {count}; drop the oldest"
        )
    longest = max((len(one.role.encode()) for one in conversation.messages), default=0)
    if longest > _MAX_ROLE_BYTES:
        raise InvalidPromptError(
            f"the role of a message in messages has {longest} bytes, and may have at most "
            f"{_MAX_ROLE_BYTES}"
        )


def max_text_bytes(tokenizer: Tokenizer | None, max_model_len: int) -> int | None:
    """Bytes of UTF-8 beyond which a text cannot be `max_model_len` tokens; None: not known.

    Four times what tokens of the longest kind would cover, for tokenizers may shorten a text before
    they split it.
    """
    if tokenizer is None or tokenizer.byte_table is None:
        return None
    longest = max((len(piece) for piece in tokenizer.byte_table.pieces), default=1)
    return _SLACK * max_model_len * max(longest, 1)


def check_text(name: str, texts: Iterable[str], max_bytes: int | None, max_model_len: int) -> None:
    """Refuses what cannot fit before time is spent on it: one thread tokenizes for all.

    Raises:
        InvalidPromptError: it is longer than any text of `max_model_len` tokens.
    """
    length = sum(len(text.encode()) for text in texts)
    if max_bytes is not None and length > max_bytes:
        raise InvalidPromptError(
            f"{name} has {length} bytes, more than {max_bytes}, which is more than "
            f"max_model_len = {max_model_len} tokens; shorten it"
        )


def check_num_ids(count: int, max_model_len: int) -> None:
    """Bounds ids that are to become text.

    Raises:
        InvalidPromptError: there are more than a few outputs can have.
    """
    if count > _SLACK * max_model_len:
        raise InvalidPromptError(
            f"token_ids are {count}, more than {_SLACK} times max_model_len = {max_model_len}; "
            "send them in parts"
        )


def check_sampling(
    sampling: pb.SamplingParams, limits: Limits, max_model_len: int, max_prompt_len: int
) -> None:
    """Bounds what costs memory or time before the engine looks at it.

    Args:
        max_model_len: most tokens of a sequence.
        max_prompt_len: most tokens that the prompt can have.

    Raises:
        InvalidSamplingParamsError: something is over its bound.
    """
    num_sequences = max(sampling.n, sampling.best_of, 1)
    _at_most("best_of" if sampling.best_of > sampling.n else "n", num_sequences, limits.max_n)
    _at_most("the number of stop strings in stop", len(sampling.stop), limits.max_stops)
    _at_most("the number of stop_token_ids", len(sampling.stop_token_ids), limits.max_stops)
    bad_words = limits.max_token_rules // 16
    for name, count, bound in (
        ("logit_bias", len(sampling.logit_bias), limits.max_token_rules),
        ("allowed_token_ids", len(sampling.allowed_token_ids.ids), limits.max_token_rules),
        ("bad_words", len(sampling.bad_words), bad_words),
        ("bad_words_token_ids", len(sampling.bad_words_token_ids), bad_words),
    ):
        _at_most(f"the number of entries of {name}", count, bound)
    for name, texts in (("stop", sampling.stop), ("bad_words", sampling.bad_words)):
        for text in texts:
            _at_most(
                f"the UTF-8 bytes of a string in {name}",
                len(text.encode()),
                limits.max_stop_bytes,
            )
    for words in sampling.bad_words_token_ids:
        _at_most("the ids of one of bad_words_token_ids", len(words.ids), limits.max_stop_bytes)
    wanted = sampling.max_tokens if sampling.HasField("max_tokens") else _DEFAULT_MAX_TOKENS
    num_tokens = min(wanted, max_model_len) * num_sequences
    _check_logprobs(sampling, limits, num_tokens, max_prompt_len)


def _check_logprobs(
    sampling: pb.SamplingParams, limits: Limits, num_tokens: int, max_prompt_len: int
) -> None:
    for name, length in (("logprobs", num_tokens), ("prompt_logprobs", max_prompt_len)):
        count = getattr(sampling, name)
        if not sampling.HasField(name) or not 0 <= count <= MAX_LOGPROBS:
            continue  # SamplingParams says what a single number may be
        if (count + 1) * length > limits.max_logprob_entries:
            raise InvalidSamplingParamsError(
                f"{name} = {count} of up to {length} tokens is more than the "
                f"{limits.max_logprob_entries} candidates that a request may hold; ask for fewer, "
                "or for fewer tokens"
            )


def _at_most(what: str, count: int, bound: int) -> None:
    if count > bound:
        raise InvalidSamplingParamsError(f"{what} must be at most {bound}, got {count}")
