"""Bounds of one request that a protocol needs and a Python caller does not."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from tpengine import errors
from tpengine.async_engine.admission import QueueLimits
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.picture_reader import MAX_URL_BYTES
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import counted
from tpengine.proto import TIMEOUT_KEY
from tpengine.sampling_params import PARAMETERS, WHOLE_VOCABULARY, SamplingParams

MAX_REQUEST_ID = 128
"""Characters of a request id."""
DEFAULT_MESSAGE_BYTES = 4 << 20
"""At most, without pictures and sounds; see `default_message_bytes`."""
_PARAMETER_BYTES = 512 << 10
_TOKEN_BYTES = 64
_SOUND_BYTES = 25 << 20
"""Of a file with sound; OpenAI's limit."""
MAX_ERROR_TEXT = 400
"""Bytes of an error's text. It travels in trailers, which clients bound at 8 KiB."""
MAX_ROLE_BYTES = 64
_SLACK = 4
_MAX_CALLS = 4096
_NUM_DOORS = 2
_OWN_FILES = 256
"""Files and connections that the server needs besides those of its clients."""
_LEAST_CONNECTIONS = 16
_FRAME_TOKENS = 16
_MAX_TIMEOUT_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a request and of what a client may hold; GetServerInfo reports them under the same
    names.

    Attributes:
        max_message_bytes: of a request, after decompression.
        max_metadata_bytes: of all metadata of a call.
        max_n: sequences of a request, n or best_of.
        max_stops: number of stop strings, and of stop ids.
        max_stop_bytes: of one stop string or bad word, in UTF-8.
        max_token_rules: entries of logit_bias, and of allowed_token_ids; of bad words a sixteenth,
            because each is tokenized.
        max_rule_entries: entries of logit_bias, and of allowed_token_ids, for all sequences
            together: each step edits the logits of each.
        max_word_ids: ids of all bad words together, and UTF-8 bytes of those that are texts.
        max_logprob_entries: candidates of all tokens of a request, which stay in memory until the
            client has read them.
        max_grammar_bytes: of `structured_outputs`, for all sequences of a request together: each
            has a matcher of its own.
        max_chat_messages: of a conversation.
        max_calls: open calls, without those of health and those that may wait in the queue.
        max_connection_calls: the same, of one connection.
        max_client_requests: open calls of one client, see `Owner.account`. Over gRPC a call counts
            until its client has taken the whole answer.
        max_host_health_calls: calls of health of one address that wait for their message; these
            calls need no token. So many more calls of the address may watch.
        max_connections: open connections of each door.
        max_host_connections: the same, of one client address.
        message_s: longest time in seconds until the message of a call arrives.
        health_message_s: the same, of a call of health.
        write_s: longest time in seconds in which a client takes no message of its stream.
        head_s: longest time in seconds until the handshake of a connection is complete, or the head
            of a request over HTTP.
        idle_s: longest time in seconds without a call on a connection over HTTP.
        sse_ping_s: longest silence in seconds of a stream over HTTP.
        resume_window_s: longest time in seconds for which a stream without a reader is kept.
        max_resume_bytes: of memory for the messages of a kept stream.
        max_all_resume_bytes: the same, of all kept streams.
        queue: bounds of the waiting requests.
    """

    max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    max_metadata_bytes: int = 16 << 10
    max_n: int = 128
    max_stops: int = 64
    max_stop_bytes: int = 1024
    max_token_rules: int = 16384
    max_rule_entries: int = 1 << 19
    max_word_ids: int = 1 << 16
    max_logprob_entries: int = 1 << 16
    max_grammar_bytes: int = 1 << 18
    max_chat_messages: int = 4096
    max_calls: int = _MAX_CALLS
    max_connection_calls: int = 1024
    max_client_requests: int = _MAX_CALLS
    max_host_health_calls: int = 64
    max_connections: int = 8192
    max_host_connections: int = 4096
    message_s: float = 20.0
    health_message_s: float = 1.0
    write_s: float = 60.0
    head_s: float = 10.0
    idle_s: float = 75.0
    sse_ping_s: float = 15.0
    resume_window_s: float = 0.0
    max_resume_bytes: int = 16 << 20
    max_all_resume_bytes: int = 256 << 20
    queue: QueueLimits = dataclasses.field(default_factory=QueueLimits)

    @property
    def places(self) -> int:
        """Calls that may be open at all doors together."""
        return self.max_calls + self.queue.max_requests

    @property
    def max_bad_words(self) -> int:
        """Most bad words, of which each is tokenized."""
        return self.max_token_rules // 16

    def within_files(self, max_files: int) -> Limits:
        """The same with no more connections than leave files for the server itself.

        Args:
            max_files: files and connections that this process may open.
        """
        most = max(_LEAST_CONNECTIONS, (max_files - _OWN_FILES) // _NUM_DOORS)
        most_of_host = min(self.max_host_connections, 3 * most // 4)
        most = min(self.max_connections, most)
        return replace(self, max_connections=most, max_host_connections=most_of_host)

    def max_entries(self) -> dict[str, int]:
        """Most entries of each sampling parameter that is a list or a map."""
        declared = PARAMETERS.items()
        return {name: getattr(self, p.max_entries) for name, p in declared if p.max_entries}


WhenOver = Callable[[Callable[[object], None]], object]


class OpenCalls:
    """Counts the open calls of all doors, in total and by client. Those of health do not count."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num = 0
        self._of_client: Counter[str] = Counter()

    @property
    def why_full(self) -> str | None:
        """Why no more calls are taken, for the operator; None: there is a place."""
        if self._num < self._limits.places:
            return None
        most = max(self._of_client.values(), default=0)
        clients = f"{counted(len(self._of_client), 'client')}; one of them has {most}"
        return f"all {self._limits.places} places for calls are taken, by {clients}"

    @contextmanager
    def counted(self, client: str, when_over: WhenOver | None = None) -> Iterator[None]:
        """Counts a call while it is open.

        Args:
            client: see `Owner.account`.
            when_over: takes a function that is to be called when the client has taken the whole
                answer. Until then the call counts for the client. None: it counts while it is open.

        Raises:
            QueueFullError: too many calls are open.
        """
        of_client, most = self._of_client[client], self._limits.max_client_requests
        if of_client >= most:
            raise errors.QueueFullError(
                f"{of_client} calls of yours are open or unread, and one client may have {most} "
                "(--max-client-requests); read or end some, and try again"
            )
        if self._num >= self._limits.places:
            text = f"{self._num} calls are open at this server, and no more may be; try again later"
            raise errors.QueueFullError(text)
        self._num += 1
        self._of_client[client] += 1
        if when_over is not None:
            when_over(lambda _: change_count(self._of_client, client, -1))
        try:
            yield
        finally:
            self._num -= 1
            if when_over is None:
                change_count(self._of_client, client, -1)

    def check_detached(self, client: str, num_detached: int) -> None:
        """Refuses a stream that may outlive its call, if the client holds too much already.

        Args:
            num_detached: its requests that go on without a call.

        Raises:
            QueueFullError: together with its open calls they are more than one client may have.
        """
        most = self._limits.max_client_requests
        if self._of_client[client] + num_detached > most:
            raise errors.QueueFullError(
                f"{num_detached} requests of yours run without a reader, and together with your "
                f"open calls one client may have {most} (--max-client-requests); resume or abort "
                "some, and try again"
            )


def change_count(counts: Counter[str], key: str, change: int) -> None:
    """Adds to a count, and forgets its key when nothing is left."""
    counts[key] += change
    if not counts[key]:
        del counts[key]


class UntrustedCalls:
    """Bounds calls that need no token while they wait for their message.

    One too many ends the oldest of its address. A client that asks for health sends its message
    with the call and gets its answer, even beside thousands of calls without a message.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._of_host: dict[str, dict[asyncio.Timeout, None]] = {}

    @asynccontextmanager
    async def message_of(self, host: str) -> AsyncIterator[None]:
        """The context in which a message is awaited.

        Raises:
            TimeoutError: it did not come in time.
        """
        waiting = self._of_host.setdefault(host, {})
        if len(waiting) >= self._limits.max_host_health_calls:
            oldest = next(iter(waiting))
            del waiting[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        async with asyncio.timeout(self._limits.health_message_s) as scope:
            waiting[scope] = None
            try:
                yield
            finally:
                waiting.pop(scope, None)
                # One that had to give way may find that a later call has dropped its dictionary.
                if not waiting and self._of_host.get(host) is waiting:
                    del self._of_host[host]


@functools.lru_cache(4096)
def address_key(host: str) -> str:
    """An address as bounds per address count it: of IPv6 the first half, since every client has all
    addresses of one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a socket in the file system
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host


def default_message_bytes(engine: LLMEngine) -> int:
    """The default bound of a message: room for all parameters, for a prompt in any form, or for
    many of a model that makes no tokens; and for what the model reads besides: one picture of the
    largest size, or one sound."""
    model = engine.get_model_config()
    num_bytes = _PARAMETER_BYTES + _TOKEN_BYTES * model.max_model_len
    if model.pooling is not None:
        return DEFAULT_MESSAGE_BYTES
    other_bytes = _SOUND_BYTES if model.sound else MAX_URL_BYTES * engine.reads_pictures
    return min(num_bytes, DEFAULT_MESSAGE_BYTES) + other_bytes


def last_ids(ids: Sequence[int], num_kept: int | None) -> list[int]:
    """The ids of a prompt that count; there may be millions of others."""
    return list(ids if num_kept is None else ids[-num_kept:])


def read_timeout(value: str) -> float:
    """Seconds from now to the deadline that a client names under `TIMEOUT_KEY`.

    Raises:
        MalformedRequestError: it is not a number of milliseconds.
    """
    if not value.isdecimal() or len(value) > _MAX_TIMEOUT_DIGITS:
        what = f"a number of milliseconds of at most {_MAX_TIMEOUT_DIGITS} digits"
        text = f"{TIMEOUT_KEY} must be {what}, got {value[:20]!r}"
        raise errors.MalformedRequestError(text, field=TIMEOUT_KEY)
    return int(value) / 1e3


def check_request_id(request_id: str, name: str = "request_id") -> None:
    """Bounds an id, which appears in logs and metadata: printable ASCII without spaces.

    Args:
        name: of the field, for the message.

    Raises:
        InvalidPromptError: it is empty, too long, or has other characters.
    """
    fits = 0 < len(request_id) <= MAX_REQUEST_ID
    if not fits or not all("!" <= char <= "~" for char in request_id):
        must = f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters without spaces"
        got = f"got {len(request_id)} characters; choose another, or leave it out"
        raise errors.InvalidPromptError.of_field(name, f"{must}, {got}")


def check_conversation(roles: Iterable[str], count: int, limits: Limits) -> None:
    """Bounds a conversation.

    Args:
        roles: of each message.
        count: number of messages.

    Raises:
        InvalidPromptError: it has too many messages, or a role is too long.
    """
    if count > limits.max_chat_messages:
        text = f"must be at most {limits.max_chat_messages}, got {count}; drop the oldest"
        raise errors.InvalidPromptError.of_field("messages", text)
    longest = max((len(role.encode()) for role in roles), default=0)
    if longest > MAX_ROLE_BYTES:
        text = f"has {longest} bytes, and may have at most {MAX_ROLE_BYTES}"
        text = f"the role of a message in messages {text}"
        raise errors.InvalidPromptError(text, field="messages")


def max_text_bytes(tokenizer: Tokenizer | None, max_model_len: int) -> int | None:
    """Bytes of UTF-8 beyond which a text cannot be `max_model_len` tokens; None: not known.

    This is four times the bytes of `max_model_len` tokens of the longest kind, because a tokenizer
    may shorten a text before it splits it.
    """
    if tokenizer is None or tokenizer.byte_table is None:
        return None
    longest = max((len(piece) for piece in tokenizer.byte_table.pieces), default=1)
    return _SLACK * max_model_len * max(longest, 1)


def _most_tokens(prompt: object, most: int) -> int:
    """The most tokens that a prompt can have, up to `most`: those of a list of ids, or of a text,
    whose tokens have at least one byte each, except those around it. Others may have any number."""
    if isinstance(prompt, str):
        return min(len(prompt.encode()) + _FRAME_TOKENS, most)
    return min(len(prompt), most) if isinstance(prompt, list) else most


def check_num_ids(name: str, count: int, max_model_len: int) -> None:
    """Bounds the number of ids that are to become text.

    Args:
        name: of the field.

    Raises:
        InvalidPromptError: there are more than a few outputs can have.
    """
    if count > _SLACK * max_model_len:
        limit = f"{_SLACK} times max_model_len = {max_model_len}"
        text = f"are {count}, more than {limit}; send them in parts"
        raise errors.InvalidPromptError.of_field(name, text)


def check_sampling(
    params: SamplingParams, limits: Limits, max_len: int, prompts: Iterable[object]
) -> None:
    """Bounds what costs memory or time in the engine.

    The door has bounded the lists' lengths (`Limits.max_entries`) before it built `params`.

    Args:
        max_len: most tokens of a sequence.
        prompts: texts, lists of ids, or others, which may have any length.

    Raises:
        InvalidSamplingParamsError: a value exceeds its bound.
    """
    num_sequences = params.num_sequences
    name = "n" if num_sequences == params.n else "best_of"
    at_most(name, num_sequences, limits.max_n, name)
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        for text in texts:
            size = len(text.encode())
            at_most(f"the UTF-8 bytes of a string in {name}", size, limits.max_stop_bytes, name)
    num_bytes = sum(len(word.encode()) for word in params.bad_words)
    num_ids = sum(map(len, params.bad_words_token_ids))
    sizes = (("UTF-8 bytes", "bad_words", num_bytes), ("ids", "bad_words_token_ids", num_ids))
    for unit, name, size in sizes:
        at_most(f"the {unit} of {name}, all together,", size, limits.max_word_ids, name)
    if params.structured_outputs is not None:
        size = params.structured_outputs.num_bytes * num_sequences
        what = f"the bytes of structured_outputs, times {num_sequences} sequences,"
        at_most(what, size, limits.max_grammar_bytes, "structured_outputs")
    for name in ("logit_bias", "allowed_token_ids"):
        count = len(getattr(params, name) or ())
        if count * num_sequences > limits.max_rule_entries:
            total = f"together {count * num_sequences}, and {limits.max_rule_entries} is the limit"
            text = f"has {count} entries for each of {num_sequences} sequences, {total}"
            hint = "give fewer, or ask for fewer sequences"
            raise errors.InvalidSamplingParamsError.of_field(name, f"{text}; {hint}")
    max_tokens = max_len if params.max_tokens is None else params.max_tokens
    num_tokens = min(max_tokens, max_len) * num_sequences
    most_kept = min(params.truncate_prompt_tokens or max_len, max_len)
    prompt_len = max(_most_tokens(prompt, most_kept) for prompt in prompts)
    for name, length in (("logprobs", num_tokens), ("prompt_logprobs", prompt_len)):
        count = getattr(params, name)
        if count == WHOLE_VOCABULARY:
            text = f"= {count}, the whole vocabulary, is for Python callers only; give a number"
            raise errors.InvalidSamplingParamsError.of_field(name, text)
        if count is not None and (count + 1) * length > limits.max_logprob_entries:
            most = f"the {limits.max_logprob_entries} candidates that a request may hold"
            text = f"= {count} of up to {length} tokens is more than {most}"
            hint = "ask for fewer, or for fewer tokens"
            raise errors.InvalidSamplingParamsError.of_field(name, f"{text}; {hint}")


def at_most(what: str, count: int, bound: int, field: str) -> None:
    """Checks a count of a sampling parameter, `field`, against its bound.

    Raises:
        InvalidSamplingParamsError: it is over it.
    """
    if count > bound:
        text = f"{what} must be at most {bound}, got {count}"
        raise errors.InvalidSamplingParamsError(text, field=field)
