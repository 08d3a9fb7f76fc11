"""Arguments of the client: sent with the meaning they have in process, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from server.guarded import guarded_server
from support.engines import greedy
from support.server_process import ServerProcess

from client.talks import Talk
from tpengine import LLM, SamplingParams, errors
from tpengine.client.client_messages import RequestFields, to_request
from tpengine.client.generation_client import ClientTLS, GenerationClient
from tpengine.server.auth import Authenticator

PROMPT = "Once upon a time"
HUGE = 2**40
LONE = "\ud800"
"""A lone surrogate: a byte on a command line that is not UTF-8 becomes one."""
TOKEN = "a-token-of-enough-length"


async def _first(client: GenerationClient, **options: Any) -> Any:
    return await anext(client.stream(PROMPT, **options))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("n", SamplingParams(n=HUGE)),
        ("stop_token_ids", SamplingParams(stop_token_ids=[5, HUGE])),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=[HUGE])),
        ("bad_words_token_ids", SamplingParams(bad_words_token_ids=[[5], [HUGE]])),
        ("logit_bias", SamplingParams(logit_bias={HUGE: 1.0})),
        ("bad_words", SamplingParams(bad_words=[LONE])),
    ],
)
def test_parameters_that_do_not_fit(name: str, params: SamplingParams) -> None:
    words = rf"^{name} can hold only"
    with pytest.raises(errors.InvalidSamplingParamsError, match=words) as refused:
        to_request(PROMPT, params, RequestFields())
    assert str(HUGE) in str(refused.value) or "ud800" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "words", "talk"),
    [
        (errors.InvalidPromptError, "request_id", lambda c: c.generate(PROMPT, request_id=LONE)),
        (errors.InvalidPromptError, "request_id", lambda c: c.generate(PROMPT, request_id=5)),
        (errors.InvalidPromptError, "request_id", lambda c: c.abort(LONE)),
        (errors.InvalidPriorityError, "priority", lambda c: c.generate(PROMPT, priority=1.5)),
        (errors.InvalidPriorityError, "priority", lambda c: _first(c, priority=HUGE)),
        (errors.RequestError, "max_queue_s", lambda c: c.generate(PROMPT, max_queue_s=math.nan)),
        (errors.RequestError, "max_queue_s", lambda c: c.generate(PROMPT, max_queue_s="5")),
        (errors.RequestError, "timeout_s", lambda c: c.generate(PROMPT, timeout_s=math.nan)),
        (errors.RequestError, "timeout_s", lambda c: _first(c, timeout_s="5")),
        (errors.RequestError, "timeout_s", lambda c: c.drain(math.nan)),
        (errors.InvalidPromptError, "text", lambda c: c.tokenize(LONE)),
        (errors.InvalidPromptError, "text", lambda c: c.tokenize(5)),
        (errors.InvalidPromptError, "add_special_tokens", lambda c: c.tokenize(PROMPT, "no")),
        (errors.InvalidPromptError, "token_ids", lambda c: c.detokenize([5, HUGE])),
        (errors.InvalidPromptError, "token_ids", lambda c: c.detokenize(iter([5, HUGE]))),
        (errors.InvalidPromptError, "token_ids", lambda c: c.detokenize(5)),
        (errors.InvalidPromptError, "messages", lambda c: c.chat_token_ids(5)),
        (errors.RequestError, "service", lambda c: c.health(LONE)),
    ],
)
async def test_refused_arguments(kind: type[errors.RequestError], words: str, talk: Talk) -> None:
    """No server runs there: the client refuses them itself."""
    async with GenerationClient("127.0.0.1:1") as client:
        with pytest.raises(kind, match=words):
            await talk(client)


async def test_numbers_that_mean_the_same_are_sent(server: ServerProcess, llm: LLM) -> None:
    """In process these numbers may have any size."""
    params = SamplingParams(max_tokens=HUGE, seed=2**64 - 1, temperature=0.9, stop=".", logprobs=0)
    (offline,) = llm.generate(PROMPT, params, use_tqdm=False)
    async with GenerationClient(server.target) as client:
        assert (await client.generate(PROMPT, params)).outputs == offline.outputs
    huge = SamplingParams(max_tokens=HUGE, min_tokens=HUGE, top_k=HUGE)
    sampling = to_request(PROMPT, huge, RequestFields()).sampling
    assert {sampling.max_tokens, sampling.min_tokens} == {2**31 - 1}
    assert sampling.top_k == -1, "it keeps all tokens, as this does"


async def test_any_time(server: ServerProcess) -> None:
    """Infinity and centuries are no limit; a negative time has passed already."""
    few = SamplingParams(max_tokens=2)
    for long in (math.inf, 1e300):
        async with GenerationClient(server.target, timeout_s=long, call_timeout_s=long) as client:
            for seconds in (math.inf, 1e300, 10**400, 1e9):
                assert (await client.generate(PROMPT, few, timeout_s=seconds)).finished
                assert (await client.generate(PROMPT, few, max_queue_s=seconds)).finished
            for seconds in (-math.inf, -1e300, -1.0):
                with pytest.raises(errors.DeadlineExceededError):
                    await client.generate(PROMPT, greedy(400), timeout_s=seconds)
            assert await client.tokenize(PROMPT)


async def test_the_longest_drain() -> None:
    with guarded_server(Authenticator([], [TOKEN])) as target:
        async with GenerationClient(target, token=TOKEN) as client:
            with pytest.raises(errors.RequestError, match="timeout_ms must be at least 0"):
                await client.drain(-math.inf)
            assert await client.drain(math.inf) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"timeout_s": value}, "timeout_s") for value in (math.nan, 0.0)),
        *(({"call_timeout_s": value}, "call_timeout_s") for value in (-1.0, "5")),
        *(({"keep_alive_s": value}, "keep_alive_s") for value in ("5", math.nan)),
        ({"tls": ClientTLS(ca_file="a\0b")}, "cannot be read"),
        *(
            ({"target": target}, "HOST:PORT")
            for target in (
                *("localhost", "host:", ":5", "host:70000", "host:x", "http://host:5"),
                *(f"{LONE}:5", "host:\uff15", 5),
            )
        ),
        *(
            ({"token": token}, "token must be")
            for token in (f"{TOKEN}\n", f"{TOKEN} b", f"{TOKEN}\u00e4", "", b"bytes", 5)
        ),
    ],
)
def test_what_cannot_be_a_client(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ConfigError, match=words) as refused:
        GenerationClient(**{"target": "127.0.0.1:1"} | options)
    assert TOKEN not in str(refused.value)
