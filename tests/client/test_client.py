"""The client and its commands: outputs and errors of the engine, and bounded waits."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from server.guarded import guarded_server
from support.engines import greedy
from support.programs import Cli, python
from support.server_process import ServerProcess, wait_until
from support.servers import LASTING, MODEL_LENGTH

from client.talks import PATIENCE_S, Talk, collect, joined_parts
from tpengine import LLM, SamplingParams, TokensPrompt, errors
from tpengine.cli.main import main
from tpengine.client import generation_client as client_module
from tpengine.client.generation_client import GenerationClient, typed_errors
from tpengine.client.load import COMPLETE, Objective, Outcome, percentiles, poisson_plan, summarise
from tpengine.proto.status_details import write_details
from tpengine.server.auth import Authenticator

PROMPT, FRANCE = "Once upon a time", "The capital of France is"
LONG = greedy(LASTING)
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


async def check_output(
    server: ServerProcess, llm: LLM, prompt: str, params: SamplingParams
) -> None:
    """The server gives what the offline engine gives, in one message and in a stream."""
    (offline,) = llm.generate(prompt, params, use_tqdm=False)
    async with GenerationClient(server.target) as client:
        whole = await client.generate(prompt, params)
        parts = await collect(client.stream(prompt, params))
    assert whole.outputs == offline.outputs
    assert repr(whole.prompt_logprobs) == repr(offline.prompt_logprobs), "in the same order"
    assert whole.prompt == prompt
    for usage in (whole.usage, parts[-1].usage):
        assert usage.num_prompt_tokens == len(offline.prompt_token_ids)
        assert usage.num_output_tokens == sum(len(o.token_ids) for o in offline.outputs)
        assert 0.0 <= usage.queue_s <= usage.first_token_s <= usage.total_s
    assert joined_parts(parts) == offline.outputs


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (PROMPT, {"temperature": 0.9, "seed": 7, "max_tokens": 40, "n": 3, "logprobs": 3,
                  "prompt_logprobs": 1, "stop": ["."]}),
        (PROMPT, {"max_tokens": 40, "ignore_eos": True, "repetition_penalty": 1.3}),
        ("Der Fluß fließt über Ærø: 東京 🙂", {"max_tokens": 24, "ignore_eos": True}),
        (FRANCE, {"max_tokens": 12, "detokenize": False}),
        (FRANCE, {"max_tokens": 12, "temperature": 0.8, "seed": 0, "n": 3}),
        (FRANCE, {"max_tokens": 12, "use_beam_search": True, "best_of": 3, "n": 2}),
        (FRANCE, {"max_tokens": 60, "stop": ["Seine"]}),
        (FRANCE, {"max_tokens": 60, "stop": ["Seine"], "include_stop_str_in_output": True}),
        (FRANCE, {"max_tokens": 60, "stop_token_ids": [1152]}),
    ],
)  # fmt: skip
async def test_outputs_are_those_of_the_engine(
    server: ServerProcess, llm: LLM, prompt: str, fields: dict[str, Any]
) -> None:
    await check_output(server, llm, prompt, SamplingParams(**{"temperature": 0.0, **fields}))


@pytest.mark.parametrize("includes", [False, True])
async def test_a_stop_string_that_ends_inside_a_character(
    server: ServerProcess, llm: LLM, includes: bool
) -> None:
    """Each token is one byte of a character: the stop matches inside the text of a token."""
    text = "é" * 6
    params = greedy(16, allowed_token_ids=sorted({*llm.get_tokenizer().encode(text)}))
    whole = llm.generate(text, params, use_tqdm=False)[0].outputs[0].text
    params = replace(params, stop=[whole[1:3]], include_stop_str_in_output=includes)
    cut = llm.generate(text, params, use_tqdm=False)[0].outputs[0].text
    assert len(whole[1:3]) == 2
    assert cut == whole[: whole.index(whole[1:3])] + whole[1:3] * includes
    await check_output(server, llm, text, params)


async def test_all_forms_of_a_prompt(server: ServerProcess, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    async with GenerationClient(server.target) as client:
        ids, chat_ids = await client.tokenize(PROMPT), await client.chat_token_ids(messages)
        by_text, by_ids = [await client.generate(prompt, greedy(8)) for prompt in (PROMPT, ids)]
        both: TokensPrompt = {"prompt": PROMPT, "prompt_token_ids": ids}  # type: ignore[typeddict-unknown-key]
        for form in ({"prompt": PROMPT}, {"prompt_token_ids": ids}, both):
            by_dict = await client.generate(form, greedy(8))  # type: ignore[arg-type]
            assert by_dict.outputs == by_text.outputs
            assert by_dict.prompt == form.get("prompt")
            assert by_dict.prompt_token_ids == form.get("prompt_token_ids", [])
        by_chat, by_chat_ids = [await client.generate(c, greedy(8)) for c in (messages, chat_ids)]
        assert by_text.outputs == by_ids.outputs
        assert by_chat.outputs == by_chat_ids.outputs != by_text.outputs
        assert by_ids.prompt_token_ids == ids
        assert ids == llm.get_tokenizer().encode(PROMPT)
        assert chat_ids == llm.chat_token_ids(messages)
        assert await client.detokenize(ids) == PROMPT
        assert await client.detokenize([0]) == ""
        assert await client.detokenize([0], False) == llm.get_tokenizer().decode([0])
        assert await client.tokenize("") == []


REFUSED: list[tuple[type[Exception], str, Talk]] = [
    (errors.InvalidPromptError, "prompt", lambda c: c.generate([])),
    (errors.InvalidPromptError, str(MODEL_LENGTH),
     lambda c: c.generate([5] * (MODEL_LENGTH + 1), greedy(4))),
    (errors.InvalidSamplingParamsError, "stop_token_ids",
     lambda c: c.generate(PROMPT, SamplingParams(stop_token_ids=[10**6]))),
    (errors.InvalidPriorityError, "priority", lambda c: c.generate(PROMPT, priority=5)),
    (errors.InvalidPromptError, "tokens_ids", lambda c: c.generate({"tokens_ids": [5]})),
    (errors.InvalidPromptError, "Unicode", lambda c: c.generate("\ud800")),
    (errors.InvalidSamplingParamsError, "logits_processors",
     lambda c: c.generate(PROMPT, SamplingParams(logits_processors="os:getcwd"))),
    (errors.InvalidSamplingParamsError, "visible_token_ids",
     lambda c: c.generate(PROMPT, SamplingParams(visible_token_ids=[1]))),
    (errors.ModelNotFoundError, "nothing", lambda c: c.health("nothing")),
]  # fmt: skip


async def test_errors_are_those_of_the_engine(
    server: ServerProcess, tight: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "GRACE_S", PATIENCE_S)  # a deadline the server tells of
    async with GenerationClient(server.target) as client:
        for kind, words, call in REFUSED:
            with pytest.raises(kind, match=words):
                await call(client)
        for _ in range(5):  # said by the server: it does not merely win a race
            with pytest.raises(errors.DeadlineExceededError) as late:
                await client.generate(PROMPT, LONG, timeout_s=0.05)
            assert late.value.where in ("queued", "prefill", "decode"), late.value
        assert not await client.abort("unknown")
        stream = client.stream(PROMPT, LONG, request_id="mine")
        await anext(stream)
        with pytest.raises(errors.DuplicateRequestError):
            await client.generate(PROMPT, request_id="mine")
        await stream.aclose()
        await client.abort("mine")  # the server may not have heard of the end yet
        assert (await client.generate(PROMPT, greedy(1), request_id="mine")).finished
    async with GenerationClient(tight.target) as client:
        calls = [asyncio.create_task(client.generate(PROMPT, LONG)) for _ in range(8)]
        with pytest.raises(errors.QueueFullError) as full:
            await asyncio.gather(*calls)
        assert 0.0 < full.value.retry_after_s <= 30.0
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    wait_until(lambda: tight.loads().num_open_calls == 0, PATIENCE_S)
    async with GenerationClient("127.0.0.1:1") as client:
        with pytest.raises(errors.ServerUnavailableError):
            await client.loads()


async def test_an_abort_is_no_cancellation(tight: ServerProcess) -> None:
    """grpc reports both alike, and a task that takes it for a cancellation ends silently."""
    async with GenerationClient(tight.target) as client:
        stream = client.stream(PROMPT, LONG, request_id="gone")
        await anext(stream)
        assert await client.abort("gone")
        with pytest.raises(errors.RequestAbortedError):
            await collect(stream)
        await stream.aclose()


async def test_leaving_a_stream_frees_its_blocks(server: ServerProcess) -> None:
    """At once, not only when the connection closes, the call is collected or the output is full."""

    def num_aborted() -> float:
        return server.metric("tpengine:request_success_total", finished_reason="abort")

    wait_until(lambda: server.loads().num_open_calls == 0, PATIENCE_S)
    before = num_aborted()

    async def has_aborted(count: int) -> None:
        await asyncio.to_thread(wait_until, lambda: num_aborted() == before + count, PATIENCE_S)

    async with GenerationClient(server.target) as client:
        async for _ in client.stream(PROMPT, LONG):
            break
        await has_aborted(1)
        task = asyncio.create_task(client.generate(PROMPT, LONG))
        await asyncio.to_thread(wait_until, lambda: server.loads().num_running == 1, PATIENCE_S)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await has_aborted(2)
        stream = client.stream(PROMPT, LONG)
        await anext(stream)
        with pytest.raises(ZeroDivisionError) as held:  # and with it the frame and its call
            await stream.athrow(ZeroDivisionError())
        await has_aborted(3)
        assert held.tb is not None
    wait_until(server.is_at_rest, PATIENCE_S)


async def test_a_frozen_server_is_noticed(tight: ServerProcess) -> None:
    async with GenerationClient(tight.target) as client:
        stream = client.stream(PROMPT, LONG)
        await anext(stream)
        os.kill(tight.pid, signal.SIGSTOP)
        try:
            with pytest.raises(errors.ServerUnavailableError):
                await collect(stream)
            async with GenerationClient(tight.target) as late:  # it is accepted, and hears nothing
                with pytest.raises(errors.ServerUnavailableError):
                    await late.generate(PROMPT, LONG)
        finally:
            os.kill(tight.pid, signal.SIGCONT)
    wait_until(lambda: tight.loads().num_open_calls == 0, PATIENCE_S)


def test_commands(server: ServerProcess, llm: LLM, cli: Cli) -> None:
    where = ["--target", server.target]
    (output,) = llm.generate(PROMPT, greedy(8), use_tqdm=False)

    def printed(*command: str, code: int = 0) -> str:
        """What a command prints; what it says of an error, and nothing else, if it fails."""
        captured = cli("client", *command, code=code)
        assert code == 0 or captured.out == ""
        return captured.err if code else captured.out

    assert printed("health", *where) == "readiness SERVING\n"
    held = dict(line.split() for line in printed("limits", *where).splitlines())
    assert held["max_model_len"] == f"{MODEL_LENGTH:,}"
    assert (held["max_n"], held["max_queued_requests"], held["write_s"]) == ("128", "256", "60")
    assert (held["max_open_calls"], held["max_client_requests"]) == ("4,352", "3,328")
    words = ["--temperature", "0", "--max-tokens", "8"]
    text = output.outputs[0].text
    assert printed("generate", PROMPT, *words, *where) == f"{PROMPT}{text}\n\n"
    assert printed("generate", PROMPT, "--no-echo", *words, *where) == f"{text}\n\n"
    several = ["--n", "2", "--logprobs", "2", "--ignore-eos", "--max-tokens", "8"]
    shown = printed("generate", PROMPT, *several, *where).splitlines()
    assert [line[:4] for line in shown if line.startswith("[")] == ["[0] ", "[1] "]
    assert sum(line.startswith("    ") and "*" in line for line in shown) == 2 * 8
    assert printed("chat", "Hello", *words, *where).strip()
    assert "6 complete" in printed("load", "--num-requests", "6", "--rate", "40", *words, *where)
    refused = printed("generate", "word " * (2 * MODEL_LENGTH), *words, *where, code=1)
    assert "RequestIgnoredError" in refused, "and not even the prompt was printed"
    assert "does not speak TLS" in printed("generate", PROMPT, "--tls", *where, code=1)


def test_a_missing_token_says_where_one_is_given(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded_server(Authenticator(["a-token-of-enough-length"])) as target:
        for token in ("", "another-token-of-that-length"):
            monkeypatch.setenv("TPENGINE_CLIENT_TOKEN", token)
            for command in (["generate", PROMPT], ["load", "--num-requests", "1"]):
                shown = cli("client", *command, "--target", target, code=1)
                assert "UnauthenticatedError" in shown.err
                assert "--token-file FILE or in TPENGINE_CLIENT_TOKEN" in shown.err
                assert shown.out == ""


@pytest.mark.parametrize("name", ["grpc_client.py", "grpc_stock_client.py"])
def test_the_examples(server: ServerProcess, name: str) -> None:
    assert "tokens" in python(EXAMPLES / name, server.target).stdout


def test_bench_serve(server: ServerProcess, cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "latency.png"
    options = ["--rates", "20,inf", "--num-requests", "6", "--target", server.target]
    shown = cli("bench", "serve", *options, "--plot", str(plot)).out
    assert shown.count("6 complete") == 2
    assert "goodput" in shown
    assert "tokens a message" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_serve_refuses_what_it_cannot_do(cli: Cli) -> None:
    for options in (["--rates", "1,0"], ["--rates", "x"], ["--num-requests", "0"]):
        cli("bench", "serve", *options, code=1)


def test_bench_serve_starts_a_server_with_its_options(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--rates", "inf", "--num-requests", "2", "--served-model-name", "mine"]
    engine = ["--dtype", "float32", "--cpu-kv-cache-space", "0.01,0.02"]
    assert main(["bench", "serve", *options, *engine]) == 1
    refused = capfd.readouterr().err
    assert "got 2 numbers" in refused, "told by the server"
    assert "the server ended with exit code 1 before it was ready" in refused
    engine[-1] = "0.02"
    assert main(["bench", "serve", *options, *engine]) == 0
    shown = capfd.readouterr().out
    assert re.search(r"(?m)^model +mine$", shown), shown
    assert "2 complete" in shown


def test_figures_of_a_load() -> None:
    outcomes = [
        Outcome(COMPLETE, 0.1, [0.01, 0.03], 3, total_s=0.14),
        Outcome(COMPLETE, 2.0, [0.02], 2, total_s=2.02),
        Outcome("QueueFullError", total_s=0.01),
    ]
    summary = summarise(outcomes, 2.0, Objective(first_token_s=1.0, token_gap_s=0.1))
    assert summary.ends == {COMPLETE: 2, "QueueFullError": 1}
    assert summary.goodput == 0.5
    assert summary.output_rate == 2.5
    assert summary.tokens_per_message == 1.0
    assert percentiles([]) == {}
    assert percentiles([float(n) for n in range(101)]) == {50: 50.0, 90: 90.0, 99: 99.0}
    plan = poisson_plan(10.0, [("a", SamplingParams())] * 4000, seed=0)
    assert plan[-1].start_s == pytest.approx(400.0, rel=0.1)
    assert plan == poisson_plan(10.0, [("a", SamplingParams())] * 4000, seed=0)


ABORTED = write_details(errors.RequestAbortedError("it was aborted"), "it was aborted", "a", None)


@pytest.mark.parametrize(
    ("code", "trailers", "kind"),
    [
        (StatusCode.OK, (), asyncio.CancelledError),
        (StatusCode.UNAVAILABLE, (), asyncio.CancelledError),
        (StatusCode.CANCELLED, (), asyncio.CancelledError),
        (StatusCode.CANCELLED, ABORTED, errors.RequestAbortedError),
    ],
)
async def test_a_cancellation_is_not_swallowed(code: StatusCode, trailers: Any, kind: type) -> None:
    """The call may end at the same moment, with any status; details are the server's."""

    async def told(value: Any) -> Any:
        return value

    call = SimpleNamespace(
        done=lambda: True,
        code=lambda: told(code),
        details=lambda: told("it was aborted"),
        trailing_metadata=lambda: told(trailers),
    )

    with pytest.raises(kind):
        async with typed_errors(call, "HOST:PORT"):
            raise asyncio.CancelledError
