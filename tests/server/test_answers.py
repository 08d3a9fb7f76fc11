"""What a server says of itself and of a request, and templates that may not do as they like."""

from __future__ import annotations

import pytest
from support.server_process import ServerProcess
from support.servers import MODEL_LENGTH

from server.calls import TIMEOUT_S
from tpengine import LLM
from tpengine.errors import InvalidPromptError
from tpengine.proto import tpengine_pb2 as pb

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is two plus three?"}]


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
    state = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert state.limits.max_logprobs == 20
    assert state.state == pb.SERVER_STATE_RUNNING
    assert (state.epoch, state.recoveries) == (1, 0)
    assert [rank.rank for rank in state.ranks] == [0]
    assert state.ranks[0].memory.weights_bytes > 1_000_000
    assert state.num_device_blocks == server.loads().num_total_blocks > 100
    named = pb.GenerateRequest(prompt=PROMPT, model="embedded")
    assert server.stub.Generate(named, timeout=TIMEOUT_S).finished
