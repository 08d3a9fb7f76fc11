"""Conversion of messages in both directions."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest

from tpengine import RequestOutputKind, SamplingParams, errors
from tpengine.client.client_messages import RequestFields, to_request
from tpengine.options import parameters
from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
from tpengine.proto import tpengine_pb2 as pb
from tpengine.server.error_texts import text_for_client
from tpengine.server.grpc.generation_messages import (
    ResponseWriter,
    read_generate_request,
    read_sampling_params,
)
from tpengine.server.grpc.guard import path_at_fault
from tpengine.server.limits import Limits

DELTA = RequestOutputKind.DELTA
ANOTHER: dict[str, Any] = {
    "n": 3, "best_of": 4, "presence_penalty": 0.5, "frequency_penalty": -0.25,
    "repetition_penalty": 1.5, "temperature": 0.7, "top_p": 0.95, "top_k": 7, "min_p": 0.1,
    "seed": -3, "stop": ["a", "é"], "stop_token_ids": [5, 7], "include_stop_str_in_output": True,
    "ignore_eos": True, "max_tokens": 9, "min_tokens": 2, "logprobs": 0, "prompt_logprobs": 3,
    "detokenize": False, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 7, "logit_bias": {4: -1.5}, "allowed_token_ids": [4, 5],
    "bad_words": ["no"], "bad_words_token_ids": [[1, 2], [3]],
    "structured_outputs": {"json": '{"type": "integer"}', "disable_any_whitespace": True},
}  # fmt: skip
"""For each field a value that is not its default."""
BEAMS = {"use_beam_search": True, "best_of": 3, "temperature": 0.0}
WRONG: dict[str, Any] = {
    "n": 0, "best_of": 0, "presence_penalty": 2.5, "frequency_penalty": -2.5,
    "repetition_penalty": 0.0, "temperature": -1.0, "top_p": 0.0, "top_k": 0, "min_p": 1.5,
    "use_beam_search": True, "length_penalty": 2.0, "early_stopping": 77, "stop": [""],
    "stop_token_ids": [-1], "max_tokens": 0, "min_tokens": -1, "logprobs": -1,
    "prompt_logprobs": -1, "logit_bias": {-1: 1.0}, "allowed_token_ids": [], "bad_words": [" "],
    "bad_words_token_ids": [[]], "truncate_prompt_tokens": 0,
    "structured_outputs": {"disable_any_whitespace": True},
}  # fmt: skip
"""For each field a value that is refused; an explicit 0 where 0 is invalid."""
HARMLESS = {"seed", "include_stop_str_in_output", "ignore_eos", "detokenize"}
HARMLESS |= {"skip_special_tokens", "spaces_between_special_tokens"}


def sampling(fields: dict[str, Any]) -> pb.SamplingParams:
    values = dict(fields)
    if "allowed_token_ids" in values:
        values["allowed_token_ids"] = pb.TokenIds(ids=values["allowed_token_ids"])
    if "bad_words_token_ids" in values:
        values["bad_words_token_ids"] = [pb.TokenIds(ids=i) for i in values["bad_words_token_ids"]]
    return pb.SamplingParams(**values)


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="a", sampling=sampling(fields))


def read(message: pb.GenerateRequest) -> Any:
    return read_generate_request(message, DELTA, Limits(), max_model_len=512, defaults={})


def refused(message: pb.GenerateRequest) -> tuple[str | None, str]:
    """The field at fault and the text."""
    with pytest.raises(errors.RequestError) as raised:
        read(message)
    assert errors.status_of(raised.type).grpc == "INVALID_ARGUMENT"
    field = path_at_fault(raised.value, message)
    return field, text_for_client(raised.value, "id", field)


def test_every_parameter_of_grpc_is_a_field() -> None:
    fields = set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    declared = parameters(SamplingParams).items()
    assert fields == {name for name, parameter in declared if "grpc" in parameter.doors}
    assert fields == set(ANOTHER) | set(BEAMS) | {"length_penalty", "early_stopping"}
    assert fields == set(WRONG) | HARMLESS


@pytest.mark.parametrize("name", list(ANOTHER))
def test_every_field_is_sent_and_read(name: str) -> None:
    params = SamplingParams(**{name: ANOTHER[name]}, output_kind=DELTA)
    assert read_sampling_params(sampling({name: ANOTHER[name]}), DELTA, {}) == params
    sent = to_request("a", params, RequestFields()).sampling
    assert read_sampling_params(sent, DELTA, {}) == params


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"a": [1]}, "whitespace_pattern": " *"},
        {"regex": "a"},
        {"choice": ["a", "é"]},
        {"grammar": "start: a"},
        {"json_object": True},
        {"structural_tag": {"structures": [], "triggers": ["a"]}},
    ],
    ids=lambda constraint: next(iter(constraint)),
)
def test_the_client_sends_every_constraint(constraint: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=constraint, output_kind=DELTA)
    message = to_request("a", params, RequestFields())
    assert read_sampling_params(message.sampling, DELTA, {}) == params


@pytest.mark.parametrize("seed", [None, -1, -2, 2**63, 2**64 - 1])
def test_a_seed_keeps_its_bits(seed: int | None) -> None:
    """A number of 64 bits with a sign, of which -1 means no seed in Python alone."""
    message = to_request("a", SamplingParams(seed=seed), RequestFields())
    read_seed = read_sampling_params(message.sampling, DELTA, {}).seed
    wanted = None if seed in (None, -1) else seed % 2**64
    assert (None if read_seed is None else read_seed % 2**64) == wanted


def test_the_client_checks_what_was_assigned() -> None:
    params = SamplingParams()
    params.stop = "end"
    assert to_request("a", params, RequestFields()).sampling.stop == ["end"]
    assert params.stop == "end"
    params.temperature = -1.0
    with pytest.raises(errors.InvalidSamplingParamsError, match="temperature"):
        to_request("a", params, RequestFields())


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (pb.EARLY_STOPPING_UNSPECIFIED, False),
        (pb.EARLY_STOPPING_HEURISTIC, False),
        (pb.EARLY_STOPPING_FIRST, True),
        (pb.EARLY_STOPPING_NEVER, "never"),
    ],
)
def test_beam_search_arrives(sent: int, meant: bool | str) -> None:
    beams = {**BEAMS, "length_penalty": 0.5}
    params = read_sampling_params(sampling({**beams, "early_stopping": sent}), DELTA, {})
    assert params == SamplingParams(**beams, early_stopping=meant, output_kind=DELTA)


def test_of_a_dict_only_its_fields_are_sent() -> None:
    message = to_request("a", {"temperature": 0.0, "stop": "."}, RequestFields()).sampling
    assert {field.name for field, _ in message.ListFields()} == {"temperature", "stop"}
    defaults = {"temperature": 0.7, "top_k": 5, "max_tokens": 9}
    params = read_sampling_params(message, DELTA, defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, -1, 9)  # greedy: no top_k
    warm = to_request("a", {"top_p": 0.5}, RequestFields()).sampling
    params = read_sampling_params(warm, DELTA, defaults)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.5, 5)


def test_explicit_zeros_are_zeros() -> None:
    zeros = {"temperature": 0.0, "seed": 0, "logprobs": 0, "min_tokens": 0}
    params = SamplingParams(**zeros, max_tokens=None)
    sent = to_request([], params, RequestFields(max_queue_s=0.0))
    for message in (sampling(zeros), sent.sampling):
        read_params = read_sampling_params(message, DELTA, {})
        assert {name: getattr(read_params, name) for name in zeros} == zeros
        assert all(message.HasField(name) for name in zeros)
    assert not sent.sampling.HasField("prompt_logprobs")
    assert sent.sampling.max_tokens > 10**9
    assert sent.WhichOneof("input") == "prompt_token_ids"
    assert sent.HasField("max_queue_ms")
    assert read(pb.GenerateRequest(prompt="a", max_queue_ms=0)).max_queue_s == 0.0
    assert read(pb.GenerateRequest(prompt="a")).max_queue_s is None


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_field_is_named(name: str) -> None:
    field, text = refused(request(**{name: WRONG[name]}))
    assert field == f"sampling.{name}"
    assert name in text


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 129, "temperature": 1.0}, {"best_of": 129}, {"stop": ["a"] * 65},
        {"stop": ["é" * 513]}, {"stop_token_ids": [1] * 65}, {"allowed_token_ids": [1] * 16385},
        {"logit_bias": dict.fromkeys(range(16385), 1.0)}, {"bad_words": ["a"] * 1025},
        {"bad_words": ["a" * 1025]}, {"bad_words_token_ids": [[1]] * 1025},
        {"bad_words_token_ids": [[1] * 1025]}, {"bad_words": ["a" * 1024] * 65},
        {"bad_words_token_ids": [[1] * 1000] * 66}, {"temperature": float("nan")},
        {"logit_bias": dict.fromkeys(range(4097), 1.0), "n": 128}, {"temperature": float("inf")},
        {"allowed_token_ids": [1] * 8193, "best_of": 64},
        {"logprobs": 64, "n": 128, "max_tokens": 512},
        {"logprobs": 64, "max_tokens": 500, "n": 3},
    ],
)  # fmt: skip
def test_limits(fields: dict[str, Any]) -> None:
    """The first field is over its limit, for some of them by what the others are."""
    assert refused(request(**fields))[0] == f"sampling.{next(iter(fields))}"


def test_what_is_at_its_limit_is_taken() -> None:
    largest = request(stop=["é" * 512] * 64, stop_token_ids=[1] * 64, n=128, logprobs=20)
    params = read(largest).params
    assert (len(params.stop), params.n) == (64, 128)


@pytest.mark.parametrize(
    ("num_ids", "truncate", "is_taken"),
    [(1024, None, True), (5000, 1024, True), (5000, 1025, False), (1025, None, False)],
)
def test_candidates_of_a_prompt_are_bounded_by_its_length(
    num_ids: int, truncate: int | None, is_taken: bool
) -> None:
    params = pb.SamplingParams(prompt_logprobs=63, truncate_prompt_tokens=truncate)
    message = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5] * num_ids), sampling=params)
    refusal = pytest.raises(
        errors.InvalidSamplingParamsError, match=f"= 63 of up to {truncate or num_ids}"
    )
    with nullcontext() if is_taken else refusal:
        read_generate_request(message, DELTA, Limits(), max_model_len=131072, defaults={})


def test_candidates_of_a_text_are_bounded_by_what_it_may_become() -> None:
    message = pb.GenerateRequest(prompt="a" * 1010, sampling=pb.SamplingParams(prompt_logprobs=63))
    with pytest.raises(errors.InvalidSamplingParamsError, match="prompt_logprobs"):
        read_generate_request(message, DELTA, Limits(), max_model_len=131072, defaults={})


def test_inputs() -> None:
    ids = read(pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[3, 1])))
    assert (ids.prompt, ids.prompt_token_ids, ids.messages) == (None, [3, 1], None)
    text = read(pb.GenerateRequest(prompt=""))
    assert (text.prompt, text.prompt_token_ids) == ("", None)
    message = pb.Message(role="user", content="")
    chat = read(pb.GenerateRequest(messages=pb.Conversation(messages=[message])))
    assert chat.messages == [{"role": "user", "content": ""}]
    assert chat.chat_options == {"add_generation_prompt": True}
    bare = pb.Conversation(messages=[message], add_generation_prompt=False)
    assert read(pb.GenerateRequest(messages=bare)).chat_options == {"add_generation_prompt": False}
    long_role = pb.Conversation(messages=[pb.Message(role="r" * 65)])
    assert refused(pb.GenerateRequest(messages=long_role))[0] == "messages"
    many = pb.Conversation(messages=[message] * 4097)
    assert refused(pb.GenerateRequest(messages=many))[0] == "messages"


def output(**fields: Any) -> RequestOutput:
    usual = {"prompt_token_ids": [1, 2], "prompt_logprobs": None, "outputs": [], "finished": True}
    return RequestOutput(request_id="r", prompt=None, **usual | fields)


@pytest.mark.parametrize("of", ["output", "prompt"])
async def test_other_tasks_run_while_a_large_answer_is_converted(of: str) -> None:
    """The event loop takes a turn after about every thousand candidates."""
    candidates = {token_id: Logprob(-1.0, token_id + 1, "x") for token_id in range(64)}
    many = [candidates] * 320
    first = CompletionOutput(0, "x", (9,) * 320, None, many if of == "output" else None)
    last = output(outputs=[first], finished=False)
    if of == "prompt":
        last.prompt_token_ids, last.prompt_logprobs = [9] * 320, many

    turns, loop = 0, asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    turn()
    answer = await ResponseWriter().write(last)
    written = answer.outputs[0].logprobs if of == "output" else answer.prompt_logprobs
    assert sum(len(token.candidates) for token in written) == 320 * 64
    assert turns >= 20
