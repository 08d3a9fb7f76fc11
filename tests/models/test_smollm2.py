"""A real model, SmolLM2-135M-Instruct as a GGUF file: ids equal to those of transformers, which
reads the same file; a conversation; a LoRA adapter that PEFT trained."""

from __future__ import annotations

import json
import math
import operator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora.test_doors import over_grpc, over_http
from support import llama_cpp_tools, third_party, train_adapter
from support.engines import generate, greedy, ids, open_llm
from support.programs import python
from support.server_process import ServerProcess
from support.step_log import log_steps
from support.tables import read_table

from tpengine import EngineArgs
from tpengine.bench.perplexity import mean_loss, read_windows

pytestmark = [pytest.mark.check, pytest.mark.timeout(600)]
NUM_TOKENS = 24
MOST_LOST = 0.01
"""Of perplexity, as stored against float32."""
PROMPTS = read_table("prompts")
QUESTIONS, TEXTS = PROMPTS["questions"], PROMPTS["texts"]
CONVERSATIONS = [[{"role": "user", "content": question}] for question in QUESTIONS]
CONVERSATIONS[0].insert(0, {"role": "system", "content": "You answer in one word."})
CONVERSATIONS[1] += [
    {"role": "assistant", "content": "Seven."},
    {"role": "user", "content": "And in a year?"},
]
SMALL_CACHE = {"block_size": 16, "num_device_blocks_override": 30, "max_model_len": 256}
SMALL_CACHE |= {"max_num_batched_tokens": 32, "max_num_seqs": 16, "enable_prefix_caching": False}


@pytest.fixture(name="file", scope="module")
def file_fixture() -> Path:
    return third_party.smollm2()


def run_beside_gguf(script: Any, *args: object) -> None:
    """Runs a program of `tests/support` where transformers reads GGUF files."""
    # Threads that spin take other programs' cores.
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    python(script.__file__, *args, PYTHONPATH=third_party.gguf_packages(), **threads)


@pytest.fixture(scope="module")
def answers(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what transformers answered, and read."""
    folder = tmp_path_factory.mktemp("answers")
    asked, answered = folder / "asked.json", folder / "answered.json"
    asked.write_text(json.dumps([*CONVERSATIONS, *TEXTS]))
    run_beside_gguf(llama_cpp_tools, "answer", file, asked, answered, NUM_TOKENS)
    return folder


@pytest.fixture
def expected(answers: Path) -> dict[str, Any]:
    """Prompt ids and output ids of transformers: conversations, then texts."""
    return json.loads((answers / "answered.json").read_text())


@pytest.mark.parametrize(
    "args",
    [
        {"max_model_len": 256},
        {**SMALL_CACHE, "preemption_mode": "swap"},
        {**SMALL_CACHE, "preemption_mode": "recompute"},
    ],
    ids=["whole", "swap", "recompute"],
)
def test_ids_of_thirty_prompts(args: dict[str, Any], file: Path, expected: dict[str, Any]) -> None:
    with log_steps() as log, open_llm(file, **args) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [llm.chat_token_ids(chat) for chat in CONVERSATIONS]
        prompts += [tokenizer.encode(text) for text in TEXTS]
        assert prompts == expected["prompts"]
        some = slice(None, None, 2 if "preemption_mode" in args else 1)
        answers = ids(generate(llm, prompts[some], greedy(NUM_TOKENS)))
    assert answers == list(map(tuple, expected["outputs"][some]))
    if "preemption_mode" in args:
        assert log.num_partial_chunks > 0
        log.assert_only(args["preemption_mode"])


def test_perplexity_as_stored(file: Path) -> None:
    """On the project's own prose, which the model did not write."""
    text = Path(__file__).parents[2] / "docs" / "internals.md"
    args = EngineArgs(str(file), max_model_len=257, device="cpu", cpu_kv_cache_space=0.2)
    windows = read_windows(str(text), args)
    assert sum(map(len, windows)) > 1000
    exact, form = mean_loss(replace(args, dtype="float32"), windows)
    assert form == "dequantised to float32"
    stored, form = mean_loss(args, windows)
    assert form == "4 and 8 bits as stored"
    cost = math.expm1(stored - exact)
    print(f"perplexity {math.exp(exact):.2f} in float32, as stored {100 * cost:+.2f} %")
    assert cost < MOST_LOST


def test_a_piped_message_is_answered(file: Path) -> None:
    words = ["-m", "tpengine", "chat", "--model", file, "--temperature", 0, "--max-tokens", 16]
    done = python(*words, stdin="What is the capital of France? Answer with one word.\n")
    assert "Paris" in done.stdout
    assert done.stderr.count("tokens/s") == 1


def test_an_adapter_that_was_trained(file: Path, answers: Path, tmp_path: Path) -> None:
    """Eight steps teach it another tone: over both doors its ids are those of PEFT, and the base's
    own those of transformers."""
    folder = tmp_path / "pirate"
    run_beside_gguf(train_adapter, answers / "float32", folder, 8, 16)
    facts = json.loads((folder / "answered.json").read_text())
    assert len(set(map(tuple, facts["pirate"]))) == len(facts["prompts"]), "it repeats one sentence"
    options = ["--model", str(file), "--served-model-name", "base", "--dtype", "float32"]
    options += ["--cpu-kv-cache-space", "0.2", "--max-model-len", "256", "--http-port", "0"]
    options += ["--enable-lora", "--lora-modules", f"pirate={folder}"]
    assert not any(map(operator.eq, facts["base"], facts["pirate"]))
    jobs = [
        (model, prompt, tuple(answer))
        for model in ("base", "pirate")
        for prompt, answer in zip(facts["prompts"], facts[model], strict=True)
    ]

    def check(job: tuple[str, list[int], tuple[int, ...]]) -> None:
        model, prompt, answer = job
        assert over_http(server, model, prompt, len(answer)) == (model, answer)
        assert over_grpc(server, model, prompt, len(answer)) == answer

    log = tmp_path / "log"
    with ServerProcess(*options, log=log) as server, ThreadPoolExecutor(len(jobs)) as pool:
        assert len(list(pool.map(check, jobs))) == len(jobs)
