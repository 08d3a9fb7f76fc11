"""A client gets the tokens of the offline engine, in one message or in a stream."""

from __future__ import annotations

from typing import Any

import pytest
from support.server_process import ServerProcess, wait_until
from support.servers import MODEL_LENGTH

from server.calls import TIMEOUT_S, ids, running, sampling
from tpengine import LLM, SamplingParams
from tpengine.errors import InvalidPromptError
from tpengine.proto import tpengine_pb2 as pb

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is two plus three?"}]


def joined(stream: Any) -> pb.GenerateResponse:
    """Joins the messages of a stream into the one that a unary call returns."""
    whole: pb.GenerateResponse | None = None
    for message in stream:
        assert whole is None or not whole.finished, "a message after the last"
        if whole is None:
            whole = pb.GenerateResponse(request_id=message.request_id)
        for one in message.outputs:
            while len(whole.outputs) <= one.index:
                whole.outputs.add(index=len(whole.outputs), text="")
            place = whole.outputs[one.index]
            place.text += one.text
            place.token_ids.extend(one.token_ids)
            place.logprobs.extend(one.logprobs)
            for name in ("finish_reason", "matched_stop_string", "matched_stop_token_id"):
                if one.HasField(name):
                    setattr(place, name, getattr(one, name))
        whole.finished = message.finished
        whole.prompt_logprobs.extend(message.prompt_logprobs)
        assert message.HasField("usage") == message.finished
        whole.usage.CopyFrom(message.usage)
    assert whole is not None
    assert whole.finished
    return whole


def both(server: ServerProcess, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    unary = server.stub.Generate(request, timeout=TIMEOUT_S)
    return [unary, joined(server.stub.GenerateStream(request, timeout=TIMEOUT_S))]


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (PROMPT, {"max_tokens": 40}),
        ("Once upon a time", {"max_tokens": 40, "ignore_eos": True, "repetition_penalty": 1.3}),
        ("Der Fluß fließt über Ærø: 東京 🙂", {"max_tokens": 24, "ignore_eos": True}),
        (PROMPT, {"max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1}),
        (PROMPT, {"max_tokens": 12, "detokenize": False}),
        (PROMPT, {"max_tokens": 12, "temperature": 0.8, "seed": 0, "n": 3}),
        (PROMPT, {"max_tokens": 12, "use_beam_search": True, "best_of": 3, "n": 2}),
        (PROMPT, {"max_tokens": 60, "stop": ["Seine"]}),
        (PROMPT, {"max_tokens": 60, "stop": ["Seine"], "include_stop_str_in_output": True}),
        (PROMPT, {"max_tokens": 60, "stop_token_ids": [1152]}),
    ],
)
def test_offline_unary_and_streamed_are_the_same(
    server: ServerProcess, llm: LLM, prompt: str, fields: dict[str, Any]
) -> None:
    params = SamplingParams(**{"temperature": 0.0, **fields})
    offline = llm.generate(prompt, params, use_tqdm=False)[0]
    for answer in both(server, pb.GenerateRequest(prompt=prompt, sampling=sampling(**fields))):
        assert len(answer.outputs) == len(offline.outputs)
        for got, wanted in zip(answer.outputs, offline.outputs, strict=True):
            assert (got.index, got.text) == (wanted.index, wanted.text)
            assert tuple(got.token_ids) == wanted.token_ids
            reason = pb.FinishReason.Name(got.finish_reason)
            assert reason == f"FINISH_REASON_{(wanted.finish_reason or '').upper()}"
            stop = got.WhichOneof("matched_stop")
            assert (getattr(got, stop) if stop else None) == wanted.stop_reason
            assert_same_logprobs(got.logprobs, got.token_ids, wanted.logprobs)
        assert_same_logprobs(
            answer.prompt_logprobs, offline.prompt_token_ids, offline.prompt_logprobs
        )
        assert answer.usage.num_prompt_tokens == len(offline.prompt_token_ids)
        assert answer.usage.num_output_tokens == sum(len(o.token_ids) for o in offline.outputs)


def assert_same_logprobs(got: Any, token_ids: Any, wanted: Any) -> None:
    assert len(got) == len(wanted or [])
    for one, token_id, candidates in zip(got, token_ids, wanted or [], strict=False):
        assert [c.token_id for c in one.candidates[:1]] == ([token_id] if candidates else [])
        found = {c.token_id: (c.rank, c.decoded_token) for c in one.candidates}
        assert found == {i: (c.rank, c.decoded_token) for i, c in (candidates or {}).items()}
        for candidate in one.candidates:
            assert candidate.logprob == pytest.approx(
                candidates[candidate.token_id].logprob, abs=1e-4
            )


def test_chat(server: ServerProcess, llm: LLM) -> None:
    prompt_ids = llm.chat_token_ids(QUESTION)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    offline = llm.generate(None, params, [prompt_ids], use_tqdm=False)[0]
    messages = pb.Conversation(messages=[pb.Message(**one) for one in QUESTION])
    for answer in both(server, pb.GenerateRequest(messages=messages, sampling=sampling())):
        assert answer.outputs[0].text == offline.outputs[0].text
        assert answer.usage.num_prompt_tokens == len(prompt_ids)
    tokens = server.stub.Tokenize(pb.TokenizeRequest(messages=messages), timeout=TIMEOUT_S)
    assert list(tokens.token_ids) == prompt_ids
    messages.add_generation_prompt = False
    bare_ids = llm.chat_token_ids(QUESTION, False)
    assert len(bare_ids) < len(prompt_ids)
    answer = server.stub.Generate(pb.GenerateRequest(messages=messages), timeout=TIMEOUT_S)
    assert answer.usage.num_prompt_tokens == len(bare_ids)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "cycler.__init__.__globals__.os.system('true')",
        "messages.append(1)",
        "range(10 ** 9) | list",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(llm: LLM, expression: str) -> None:
    """A template comes with the model: it may format messages, and reach nothing else."""
    tokenizer = llm.get_tokenizer()
    own = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ " + expression + " }}"
        with pytest.raises(InvalidPromptError, match="template refuses"):
            llm.chat_token_ids(QUESTION)
    finally:
        tokenizer.chat_template = own
    assert llm.chat_token_ids(QUESTION)


def test_tokenize_and_back(server: ServerProcess, llm: LLM) -> None:
    text = "Der Fluß: 東京 🙂"
    tokenizer = llm.get_tokenizer()
    tokens = server.stub.Tokenize(pb.TokenizeRequest(text=text), timeout=TIMEOUT_S)
    assert list(tokens.token_ids) == tokenizer.encode(text)
    back = server.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert back.text == text
    with_end = pb.DetokenizeRequest(token_ids=[0], skip_special_tokens=False)
    assert server.stub.Detokenize(with_end).text == tokenizer.decode([0])
    assert server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[0])).text == ""
    assert not server.stub.Tokenize(pb.TokenizeRequest(text="")).token_ids


def test_a_stop_string_that_ends_inside_a_character(server: ServerProcess, llm: LLM) -> None:
    """Each token is one byte of a character: the stop matches inside the text of a token."""
    text = "é" * 6
    token_ids = llm.get_tokenizer().encode(text)
    forced = {"allowed_token_ids": ids(*set(token_ids)), "ignore_eos": True, "max_tokens": 16}
    request = pb.GenerateRequest(prompt=text, sampling=sampling(**forced))
    whole = server.stub.Generate(request, timeout=TIMEOUT_S).outputs[0]
    assert len(whole.token_ids) == 16
    stop = whole.text[1:3]
    assert len(stop) == 2
    request.sampling.stop.append(stop)
    for answer in both(server, request):
        one = answer.outputs[0]
        assert one.finish_reason == pb.FINISH_REASON_STOP
        assert one.matched_stop_string == stop
        assert one.text == whole.text[: whole.text.index(stop)]
        one.text.encode()
    request.sampling.include_stop_str_in_output = True
    for answer in both(server, request):
        assert answer.outputs[0].text == whole.text[: whole.text.index(stop)] + stop


def test_cached_tokens_are_counted(server: ServerProcess) -> None:
    request = pb.GenerateRequest(prompt_token_ids=ids(*range(100, 180)), sampling=sampling())
    first = server.stub.Generate(request, timeout=TIMEOUT_S)
    again = joined(server.stub.GenerateStream(request, timeout=TIMEOUT_S))
    assert first.usage.num_cached_tokens == 0
    assert again.usage.num_cached_tokens == 64
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    for usage in (first.usage, again.usage):
        assert 0.0 <= usage.queue_s <= usage.first_token_s <= usage.total_s < TIMEOUT_S


def test_the_request_id_comes_first(server: ServerProcess) -> None:
    stream = server.stub.GenerateStream(pb.GenerateRequest(prompt=PROMPT), timeout=TIMEOUT_S)
    request_id = dict(stream.initial_metadata())["x-request-id"]
    assert {message.request_id for message in stream} == {request_id}
    own = pb.GenerateRequest(prompt=PROMPT, request_id="my/own:id~!")
    assert server.stub.Generate(own, timeout=TIMEOUT_S).request_id == "my/own:id~!"


def test_what_is_served(server: ServerProcess) -> None:
    info = server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
    assert (info.model, info.architecture) == ("embedded", "LlamaForCausalLM")
    assert (info.max_model_len, info.vocab_size) == (MODEL_LENGTH, 1536)
    assert info.has_tokenizer
    assert info.has_chat_template
    about = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert about.limits.max_logprobs == 20
    assert about.state == pb.SERVER_STATE_RUNNING
    assert (about.epoch, about.recoveries) == (1, 0)
    assert [rank.rank for rank in about.ranks] == [0]
    assert about.ranks[0].memory.weights_bytes > 1_000_000
    assert about.num_device_blocks == server.loads().num_total_blocks > 100
    named = pb.GenerateRequest(prompt=PROMPT, model="embedded")
    assert server.stub.Generate(named, timeout=TIMEOUT_S).finished


def test_loads_follow_a_request(server: ServerProcess) -> None:
    wait_until(lambda: server.loads().num_open_calls == 0, TIMEOUT_S)
    before = server.loads()
    long = sampling(max_tokens=400, ignore_eos=True)
    with running(server.stub, pb.GenerateRequest(prompt=PROMPT, sampling=long)):
        now = server.loads()
        assert (now.num_running, now.num_open_calls) == (1, 1)
        assert now.num_free_blocks < before.num_free_blocks
        assert 0.0 < now.cache_usage < 1.0
    wait_until(lambda: server.loads().num_open_calls == 0, TIMEOUT_S)
    wait_until(lambda: server.loads().num_running == 0, TIMEOUT_S)  # after the step that runs
    after = server.loads()
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.num_free_blocks == before.num_free_blocks
    assert after.num_steps > before.num_steps
