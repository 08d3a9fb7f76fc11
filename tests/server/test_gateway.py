"""The gateway `smg` before servers of ours: OpenAI's HTTP on one side, vLLM's gRPC on the other."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI, OpenAIError
from support import third_party
from support.engines import greedy
from support.gguf_files import write_embedded_gguf
from support.programs import running
from support.server_process import ServerProcess, wait_until

from server.processes import END_S, rank_pid
from tpengine import LLM, CompletionOutput, SamplingParams
from tpengine.proto import tpengine_pb2 as pb

pytestmark = pytest.mark.check
PROMPT, NUM_TOKENS = "Once upon a time", 400
LONG: dict[str, Any] = {"max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
QUESTION: Any = [{"role": "user", "content": "What is two plus three?"}]
GREEDY: dict[str, Any] = {"model": "small", "temperature": 0}
SERVER = ["--dtype", "float32", "--max-model-len", "512", "--swap-space", "0"]
SERVER += ["--num-device-blocks-override", "256", "--served-model-name", "small"]
RANKS = ["--tensor-parallel-size", "2", "--executor", "processes", "--device", "cpu"]

Servers, Outputs = list[ServerProcess], list[CompletionOutput]


@contextmanager
def gateway(log: Path, *servers: ServerProcess) -> Iterator[OpenAI]:
    """A client of a gateway before these servers, once it serves all of them."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("", 0)) as second:
        port, metrics_port = (str(free.getsockname()[1]) for free in (first, second))
    command = [third_party.smg(), "launch", "--host", "127.0.0.1", "--port", port]
    command += ["--prometheus-port", metrics_port, "--policy", "round_robin"]
    command += ["--worker-urls", *(f"grpc://{server.target}" for server in servers)]
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            is_up = [worker["status"] for worker in workers(client)] == ["ready"] * len(servers)
        except OpenAIError:
            return False
        return is_up and "Successfully loaded tokenizer" in log.read_text()

    with log.open("wb") as out, running(*command, stdout=out, stderr=out) as process:
        wait_until(is_ready, END_S)
        yield client


def workers(client: OpenAI) -> Any:
    """What a gateway knows of the servers."""
    answer: Any = client.get(str(client.base_url.join("/workers")), cast_to=object)
    return answer["workers"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers of one process, and one of two ranks whose model is a GGUF file."""
    third_party.smg()
    folder = tmp_path_factory.mktemp("gateway")
    kinds = ([], [], ["--model", str(write_embedded_gguf(folder)), *RANKS])

    def start(options: list[str], log: str) -> ServerProcess:
        return stack.enter_context(ServerProcess(*SERVER, *options, log=folder / log))

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield list(pool.map(start, kinds, "abc"))


@pytest.fixture(scope="module")
def client(servers: Servers) -> Iterator[OpenAI]:
    with gateway(servers[0].log.with_name("gateway"), *servers[:2]) as client:
        yield client


@pytest.fixture(scope="module")
def offline(llm: LLM) -> Outputs:
    """A long completion, and an answer."""
    (long,) = llm.generate(PROMPT, greedy(NUM_TOKENS), use_tqdm=False)
    (answer,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return [output.outputs[0] for output in (long, answer)]


def test_it_finds_its_workers(client: OpenAI, servers: Servers) -> None:
    seen = {(w["url"], w["model_id"], w["runtime_type"]) for w in workers(client)}
    assert seen == {(f"grpc://{s.target}", "small", "vllm") for s in servers[:2]}


def test_answers_are_those_of_the_offline_engine(client: OpenAI, offline: Outputs) -> None:
    long, answer = offline
    url = str(client.base_url.join("/generate"))
    counts = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"model": "small", "text": PROMPT, "sampling_params": counts}
    for _ in range(2):  # once on each server
        answers: Any = client.post(url, cast_to=object, body=body)
        assert (tuple(answers[0]["output_ids"]), answers[0]["text"]) == (long.token_ids, long.text)
        texts = client.completions.create(prompt=PROMPT, stream=True, **GREEDY, **LONG)
        parts = [part.choices[0].text for part in texts]
        assert "".join(parts) == long.text
        assert len(parts) > NUM_TOKENS / 2
        reply = client.chat.completions.create(messages=QUESTION, max_tokens=12, **GREEDY)
        assert reply.choices[0].message.content == answer.text
        assert reply.choices[0].finish_reason == answer.finish_reason
        assert reply.usage.completion_tokens == len(answer.token_ids)
        chunks = client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY)
        assert "".join(part.choices[0].delta.content or "" for part in chunks) == answer.text


def test_an_output_is_held_and_a_refusal_told_to_the_client(client: OpenAI) -> None:
    held = client.completions.create(prompt=PROMPT, extra_body={"regex": "[ab]{3}"}, **GREEDY)
    assert re.fullmatch("[ab]{3}", held.choices[0].text)
    with pytest.raises(BadRequestError, match="unclosed group"):
        client.completions.create(prompt=PROMPT, extra_body={"regex": "(a"}, **GREEDY)


def test_streams_go_on_when_a_rank_is_lost(servers: Servers, offline: Outputs) -> None:
    server, log = servers[2], servers[2].log.with_name("second gateway")
    with gateway(log, server) as client:
        assert "Fetching tokenizer from worker" in log.read_text()
        stream = client.completions.create(prompt=PROMPT, stream=True, **GREEDY, **LONG)
        text = next(stream).choices[0].text
        info = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=END_S)
        os.kill(rank_pid(info.ranks[1]), signal.SIGKILL)
        assert text + "".join(part.choices[0].text for part in stream) == offline[0].text
    assert "1 request went on with a new rank" in server.log.read_text()


def test_requests_go_elsewhere_when_a_server_is_lost(client: OpenAI, servers: Servers) -> None:
    """The last test: it kills a server that others use."""

    def ask(_: object) -> str:
        return client.completions.create(prompt=PROMPT, max_tokens=12, **GREEDY).choices[0].text

    expected = ask(None)
    os.killpg(servers[1].pid, signal.SIGKILL)
    with ThreadPoolExecutor(8) as pool:
        assert {*map(ask, range(10)), *pool.map(ask, range(32))} == {expected}
