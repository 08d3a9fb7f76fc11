"""Embeddings, ranks, scores and classes over HTTP are those of `LLM`, and errors say what to do."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from async_engine.tools import Gate
from support import byte_llama, third_party
from support.programs import run_program
from support.server_process import serving
from support.small_poolers import LABELS, LENGTH, PROMPTS, SIZE, write_pooler
from support.waiting import wait_until

from server.guarded import WAIT_S
from server.http.open_port import open_port
from server.http.openai_door import Door
from tpengine import LLM
from tpengine.async_engine.admission import QueueLimits
from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.engine_args import AsyncEngineArgs
from tpengine.inputs import PoolingParams
from tpengine.outputs import cosine
from tpengine.server.batches import MAX_INPUTS
from tpengine.server.limits import Limits

QUERY = "Which bird swims?"
DOCUMENTS = ["A duck swims.", "A hawk flies high.", "ab", "Fish swim, too: 東京 🙂"]
INPUTS: list[Any] = ["a", [*DOCUMENTS, "a"], [5, 6, 7], [[5, 6, 7], [9]]]
ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {"dtype": "float32", "num_device_blocks_override": 64}
QUEUE, KEY = 8, "sk-0123456789abcdef"


@dataclass
class Served:
    """A server in this process, and the offline engine of the same model."""

    url: str
    door: Door
    engine: AsyncLLMEngine
    llm: LLM


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """By task; their queues are short, and two requests run at a time."""
    limits, all_served = Limits(queue=QueueLimits(QUEUE)), {}
    with ExitStack() as stack:
        for task in ("embed", "score", "classify", "generate"):
            folder = tmp_path_factory.mktemp(task)
            byte_llama.write(folder) if task == "generate" else write_pooler(folder, task)
            args = AsyncEngineArgs(model=str(folder), max_num_seqs=2, **SMALL)
            engine = AsyncLLMEngine.from_engine_args(args, limits=limits.queue)
            port = stack.enter_context(open_port(limits=limits))
            stack.callback(lambda port=port, engine=engine: port.run(engine.shutdown()))
            port.state.serve(engine)
            llm = stack.enter_context(LLM(str(folder), **SMALL))
            url = f"http://127.0.0.1:{port.port}"
            all_served[task] = Served(url, Door(url), engine, llm)
        yield all_served


@pytest.fixture(scope="module")
def client(served: dict[str, Served]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served['embed'].url}/v1", api_key="none", max_retries=0)


def _vectors(llm: LLM, value: Any, **params: Any) -> tuple[list[list[float]], int]:
    """What the offline engine makes of an `input`, and the number of its tokens."""
    texts = value if isinstance(value, list) and isinstance(value[0], (str, list)) else [value]
    name = "prompts" if isinstance(texts[0], str) else "prompt_token_ids"
    outputs = llm.encode(**{name: texts}, pooling_params=PoolingParams(**params), use_tqdm=False)
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return [output.outputs.embedding for output in outputs], count


@pytest.mark.parametrize("value", INPUTS, ids=str)
def test_vectors(served: dict[str, Served], client: openai.OpenAI, value: Any) -> None:
    wanted, count = _vectors(served["embed"].llm, value)
    for form in ({}, {"encoding_format": "float"}):  # the package itself asks for base64
        got = client.embeddings.create(model="none", input=value, user="me", **form)
        assert [each.embedding for each in got.data] == wanted
        assert [each.index for each in got.data] == list(range(len(wanted)))
        assert (got.usage.prompt_tokens, got.usage.total_tokens) == (count, count)
        assert {len(vector) for vector in wanted} == {SIZE}


def test_fields_of_embeddings(served: dict[str, Served], client: openai.OpenAI) -> None:
    llm, value = served["embed"].llm, [DOCUMENTS[0] * 40, "ab"]
    create = client.embeddings.create
    with pytest.raises(openai.BadRequestError):
        create(model="none", input=value)
    for fields in (
        {"truncate_prompt_tokens": -1, "dimensions": 16},
        {"truncate_prompt_tokens": 5, "normalize": False},
        {"truncate_prompt_tokens": LENGTH, "prompt_name": "query"},
    ):
        got = create(model="none", input=value, extra_body={**fields, "request_id": "mine"})
        wanted, count = _vectors(llm, value, **fields)
        assert [each.embedding for each in got.data] == wanted
        assert (got.usage.total_tokens, got.model_dump()["id"]) == (count, "embd-mine")
    long = create(model="none", input=[5] * 2 * LENGTH, extra_body={"truncate_prompt_tokens": -1})
    assert long.usage.total_tokens == LENGTH


async def test_a_call_larger_than_the_queue(served: dict[str, Served]) -> None:
    """It has begun, so it waits when other calls fill the queue; those that find no place fail."""
    texts = [f"{place} ab" for place in range(50 * QUEUE)]
    wanted, _ = _vectors(served["embed"].llm, texts)
    base_url, refused = f"{served['embed'].url}/v1", list[Exception]()

    async def crowd() -> None:
        while not large.done():
            try:
                await create(input="a")
            except openai.RateLimitError as error:
                refused.append(error)

    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        create = partial(client.embeddings.create, model="none")
        large = asyncio.create_task(create(input=texts))
        while not served["embed"].engine.get_num_unfinished_requests():
            await asyncio.sleep(0.001)
        await asyncio.gather(*(crowd() for _ in range(2 * QUEUE)))
    assert refused
    assert [each.embedding for each in large.result().data] == wanted


def test_a_client_leaves_whose_inputs_wait_for_places(
    served: dict[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are aborted, and its other inputs do not begin."""
    engine = served["embed"].engine
    gate, count = Gate(engine, monkeypatch), engine.get_num_unfinished_requests
    call = served["embed"].door.begin("embeddings", {"input": ["a"] * 50 * QUEUE})
    wait_until(lambda: count() == QUEUE // 2 and any(gate.steps), WAIT_S)
    call.close()
    wait_until(lambda: count() == 0, WAIT_S)
    gate.open()
    blocks = engine.llm_engine
    wait_until(lambda: blocks.num_free_blocks == blocks.num_total_blocks, WAIT_S)
    assert (engine.stats().queues.num_queued, count(), len(gate.steps)) == (0, 0, 1)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
@pytest.mark.parametrize("task", ["score", "embed"])
def test_ranks(served: dict[str, Served], task: str, path: str) -> None:
    """An embedding model gets its own prompts for queries and documents."""
    llm = served[task].llm
    if task == "score":
        scores = [o.outputs.score for o in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    else:
        texts = [PROMPTS["query"] + QUERY, *(PROMPTS["document"] + text for text in DOCUMENTS)]
        query, *vectors = _vectors(llm, texts)[0]
        scores = [cosine(query, vector) for vector in vectors]
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    mixed = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    whole = served[task].door.whole(path, {"query": QUERY, "documents": mixed, "model": "none"})
    results = whole["results"]
    assert [result["index"] for result in results] == order
    assert [result["document"] for result in results] == [{"text": DOCUMENTS[i]} for i in order]
    assert [r["relevance_score"] for r in results] == pytest.approx([scores[i] for i in order])
    assert whole["usage"]["total_tokens"] > len(QUERY)
    assert (whole["model"], "meta" in whole) == ("none", path == "/v2/rerank")
    two = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": False}
    bare = served[task].door.whole(path, two)["results"]
    assert [set(result) for result in bare] == [{"index", "relevance_score"}] * 2


@pytest.mark.parametrize("task", ["score", "embed"])
def test_scores(served: dict[str, Served], task: str) -> None:
    llm, ask = served[task].llm, served[task].door.whole
    for firsts in (QUERY, DOCUMENTS[::-1]):
        wanted = [o.outputs.score for o in llm.score(firsts, DOCUMENTS, use_tqdm=False)]
        got = ask("/v1/score", {"text_1": firsts, "text_2": DOCUMENTS})
        assert [each["score"] for each in got["data"]] == pytest.approx(wanted)
        assert {each["object"] for each in got["data"]} == {"score"}
    pairs = ask("/score", {"queries": QUERY, "documents": DOCUMENTS})
    ranks = ask("/rerank", {"query": QUERY, "documents": DOCUMENTS})["results"]
    same = {result["index"]: result["relevance_score"] for result in ranks}
    assert {each["index"]: each["score"] for each in pairs["data"]} == pytest.approx(same)
    (raw,) = ask("/score", {"text_1": "a", "text_2": "ab", "use_activation": False})["data"]
    (plain,) = llm.score("a", "ab", pooling_params=PoolingParams(activation=False), use_tqdm=False)
    assert raw["score"] == pytest.approx(plain.outputs.score)


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_classes(served: dict[str, Served], path: str) -> None:
    outputs = served["classify"].llm.classify(DOCUMENTS, use_tqdm=False)
    got = served["classify"].door.whole(path, {"input": DOCUMENTS})
    for place, (each, output) in enumerate(zip(got["data"], outputs, strict=True)):
        probs = output.outputs.probs
        label = LABELS[probs.index(max(probs))]
        assert each.pop("probs") == pytest.approx(probs)
        assert each == {"index": place, "label": label, "num_classes": len(LABELS)}


GENERATES = ("/v1/completions", {"prompt": "a"})
CHATS = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
EMBEDS = ("/v1/embeddings", {"input": "a"})
RANKS = ("/v2/rerank", {"query": "a", "documents": ["a"]})
SCORES = ("/score", {"text_1": "a", "text_2": "a"})
CLASSIFIES = ("/classify", {"input": "a"})


@pytest.mark.parametrize(
    ("task", "calls", "says"),
    [
        ("embed", (GENERATES, CHATS, CLASSIFIES), "embeds texts; use /v1/embeddings or"),
        ("score", (CHATS, EMBEDS, CLASSIFIES), "scores pairs of texts; use /v1/rerank or"),
        ("classify", (CHATS, EMBEDS, RANKS, SCORES), "classifies texts; use /v1/classify"),
        ("generate", (EMBEDS, RANKS, SCORES), "chat/completions, or start the server with --task"),
        ("generate", (CLASSIFIES,), "generates text; use /v1/completions or"),
    ],
)
def test_endpoints_of_other_models(
    served: dict[str, Served], task: str, calls: Any, says: str
) -> None:
    for path, body in calls:
        status, error = served[task].door.refused(path, body)
        assert (status, error["code"]) == (400, "wrong_endpoint")
        assert path in error["message"]
        assert says in error["message"]


@pytest.mark.parametrize(
    ("task", "call", "fields", "param", "says"),
    [
        ("embed", EMBEDS, {"input": []}, "input", "not empty"),
        ("embed", EMBEDS, {"input": ["a", 5]}, "input[1]", "must be a text or ids"),
        ("embed", EMBEDS, {"input": ["a", ""]}, "input[1]", "input[1]: the prompt is empty"),
        ("embed", EMBEDS, {"input": [[5], [6, 999]]}, "input[1]", "input[1][1] = 999 is no id"),
        ("embed", EMBEDS, {"input": [5, 1.5]}, "input", "input[1] = 1.5 is no id"),
        ("embed", EMBEDS, {"input": ["ab"] * 9 + ["b" * (LENGTH + 1)]}, "input[9]",
         f"exceeded: input[9]: the prompt has {LENGTH + 1} tokens, more than max_model_len"),
        ("embed", EMBEDS, {"input": ["a"] * (MAX_INPUTS + 1)}, "input", "holds 2049 prompts, more"),
        ("embed", EMBEDS, {"dimensions": SIZE + 1}, "dimensions", f"more than the model's {SIZE}"),
        ("embed", EMBEDS, {"model": "other"}, "model", "is not served here"),
        ("embed", EMBEDS, {"encoding_format": "int8"}, "encoding_format", "float or base64"),
        ("embed", EMBEDS, {"prompt_name": "x"}, "prompt_name", "it has query, document"),
        ("embed", EMBEDS, {"input": [5], "prompt_name": "query"}, "prompt_name", "prompt is ids"),
        ("embed", EMBEDS, {"dimension": 8}, "dimension", "did you mean dimensions?"),
        ("embed", EMBEDS, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least 1"),
        ("score", RANKS, {"query": "a" * 20_000, "documents": ["a"] * 1000}, "query", "together"),
        ("score", RANKS, {"query": ["a"]}, "query", "must be one text"),
        ("score", RANKS, {"documents": []}, "documents", "is missing, or empty"),
        ("score", RANKS, {"documents": ["a", 5]}, "documents[1]", "must be a text, or an object"),
        ("score", RANKS, {"documents": [{"title": "a"}]}, "documents[0].title", "not a field"),
        ("score", RANKS, {"documents": ["a", "b" * 300]}, "documents[1]", "documents[1]: the"),
        ("score", RANKS, {"top_n": -1}, "top_n", "at least 1, got -1"),
        ("score", SCORES, {"text_1": ["a", "b"]}, "text_1", "as many as text_2; got 2 and 1"),
        ("classify", CLASSIFIES, {"dimensions": 8}, "dimensions", "not a field that this server"),
    ],
)  # fmt: skip
def test_fields_at_fault(
    served: dict[str, Served], task: str, call: Any, fields: Any, param: str, says: str
) -> None:
    status, error = served[task].door.refused(call[0], {**call[1], **fields})
    assert (status, error["param"]) == (404 if "model" in fields else 400, param), error
    assert says in error["message"]
    assert served[task].engine.get_num_unfinished_requests() == 0, "the others are aborted"


def test_a_server_of_an_embedding_model(tmp_path: Path) -> None:
    """The program starts, its page opens, its key is asked for, a call may have as many inputs as
    OpenAI's, and one that has begun is served whole by a server that is told to end."""
    folder = write_pooler(tmp_path / "birds", "embed")
    options = ["--model", str(folder), "--dtype", "float32", "--http-port", "0"]
    options += ["--num-device-blocks-override", "64", "--api-key", KEY]
    options += ["--max-queued-requests", str(16 * QUEUE)]
    with serving(tmp_path, *options) as process:
        door = Door(process.http_address, KEY)
        assert [door.open(path).status for path in ("/", "/engine/state")] == [200, 200]
        client = openai.OpenAI(base_url=f"{process.http_address}/v1", api_key=KEY)
        assert [(model.id, model.task) for model in client.models.list()] == [("birds", "embed")]
        texts, cut = ["a" * 500] * MAX_INPUTS, {"truncate_prompt_tokens": 2}
        many = client.embeddings.create(model="birds", input=texts, extra_body=cut)
        assert (len(many.data), many.usage.total_tokens) == (MAX_INPUTS, 2 * MAX_INPUTS)
        assert process.metric("tpengine:prompt_tokens_total") == 1 + 2 * MAX_INPUTS  # 1: start-up
        assert Door(process.http_address).refused(*EMBEDS)[0] == 401
        call = door.begin("embeddings", {"input": texts, **cut})
        wait_until(lambda: process.metric("tpengine:num_requests_running") > 0, WAIT_S)
        process.process.send_signal(signal.SIGTERM)
        assert len(json.load(call.getresponse())["data"]) == MAX_INPUTS


@pytest.mark.check
@pytest.mark.timeout(600)
def test_the_example_finds_and_answers(tmp_path: Path) -> None:
    """`examples/retrieval.py` with LangChain, three servers and random models."""
    packages = "langchain-openai>=0.3 numpy"
    python = third_party.programs("langchain-retrieval", packages) / "python"
    models = [write_pooler(tmp_path / task, task) for task in ("embed", "score")]
    options = ["--dtype", "float32", "--http-port", "0", "--cpu-kv-cache-space", "0.05"]
    command = [str(python), str(ROOT / "examples" / "retrieval.py"), QUERY]
    with ExitStack() as stack:
        for name, own in zip(("embed", "rerank", "chat"), [*models, None], strict=True):
            (tmp_path / name).mkdir(exist_ok=True)
            model = ["--model", str(own)] if own else []
            server = stack.enter_context(serving(tmp_path / name, *options, *model))
            command += [f"--{name}", f"{server.http_address}/v1"]
        lines = run_program(*command).stdout.splitlines()
    assert [lines[0], lines[5]] == ["close to the question:", "best:"]
    with LLM(str(models[1]), **SMALL) as llm:
        outputs = llm.score(QUERY, [line.strip() for line in lines[1:5]], use_tqdm=False)
    by_score = sorted(zip([o.outputs.score for o in outputs], lines[1:5], strict=True))
    assert lines[6:8] == [line for _, line in by_score[:1:-1]]
    assert lines[8].startswith("answer: ")
