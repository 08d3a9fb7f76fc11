"""Scripts that were written for vLLM 0.5.4: their names, and whole scripts with other imports."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support import compare_api, third_party
from support.compare_api import Status
from support.hub import Hub
from support.programs import PYTHONPATH, forks
from support.small_poolers import write_embedder
from transformers import OPTConfig, OPTForCausalLM

import tpengine
from tpengine.config import EMBEDDED_MODEL
from tpengine.errors import InvalidPromptError

FOLDER = Path(__file__).parent / "reference" / "scripts"
PRINTED = {
    "offline_inference": r"(Prompt: '.*', Generated text: '.*'\n){3}",
    "shared_prefix": r"without the cache: .* s\nwith the cache: .* s\nsame: True\n",
    "chat": r".* (stop|length)\nsystem: You are brief\.\nuser: Name a colour\.\n(.|\n)*",
    "engine_loop": r"\d+ True\n(\d \[.*\]\n){4}",
    "async_stream": r"\d+ \d+ True False\n\['Hello, my name is.*', 'Once.*', 'The sea is.*'\]\n",
    "beams": r"(-\d+\.\d{3} ['\"].*['\"] (stop|length)\n){4}",
    "mixed_prompts": r"\[.*\] -1 \[\]\n(\[.*\] .* True True\n){2}40 True\n",
    "embeddings": r"(\d \d+ 64\n){3}True \[True, True, True\]\n",
    "ray_data": r".*'Item 0 is', 'Item 1 is'.*\n",
}
"""What each script prints, as a pattern of its whole output; other lines may come before."""


@pytest.fixture(scope="module")
def opt_with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random OPT in the form of `facebook/opt-125m`: weights in .bin form, and a tokenizer."""
    folder = tmp_path_factory.mktemp("opt")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 2}
    config = OPTConfig(vocab_size=1536, num_attention_heads=4, **sizes)
    torch.save(OPTForCausalLM(config).state_dict(), folder / "pytorch_model.bin")
    config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(folder)
    for path in Path(EMBEDDED_MODEL).glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder"))


def test_each_name_is_the_same_or_different_or_refused() -> None:
    with compare_api.comparison() as comparison:
        items = comparison.items()
    assert not [item for item in items if item.status is Status.UNKNOWN]
    assert not comparison.unused_differences()
    counts = Counter(item.status for item in items)
    assert counts == {Status.SAME: 477, Status.DIFFERENT: 175, Status.REFUSED: 69}
    assert compare_api.PAGE.read_text() == compare_api.page(items), (
        "docs/vllm.md is out of date; run: python tests/support/compare_api.py"
    )


async def test_embeddings_of_all_engines(embedder: Path) -> None:
    ids, params = {"prompt_token_ids": [5, 6, 7]}, tpengine.PoolingParams()
    small: dict[str, Any] = {"model": str(embedder), "cpu_kv_cache_space": 0.01, "swap_space": 0}
    with tpengine.LLM(**small) as llm:
        embedding = llm.encode([ids], params, use_tqdm=False)[0].outputs
        with pytest.raises(InvalidPromptError, match=r"prompt_adapter_request = 1 is not served"):
            llm.encode([ids], prompt_adapter_request=1)
        llm.llm_engine.add_request("a", ids, params)
        llm.llm_engine.abort_request("a")
        aborted = llm.llm_engine.step()[0]
    engine = tpengine.AsyncLLMEngine.from_engine_args(tpengine.AsyncEngineArgs(**small))
    try:
        (encoded,) = [output async for output in engine.encode(ids, params, "b")]
        stream = await engine.add_request("c", ids, params)
        (streamed,) = [output async for output in stream]
        with pytest.raises(InvalidPromptError, match=r"trace_headers = \{\} is not served"):
            engine.encode(ids, params, "d", None, {})
        with pytest.raises(InvalidPromptError, match="the model does 'embed'"):
            await engine.add_request("e", ids, tpengine.SamplingParams())
    finally:
        await engine.shutdown()
    outputs = [aborted, encoded, streamed]
    assert {type(output) for output in outputs} == {tpengine.EmbeddingRequestOutput}
    assert [output.outputs for output in outputs] == [None, embedding, embedding]
    assert [output.request_id for output in outputs] == ["a", "b", "c"]


def test_names_of_later_versions_exist() -> None:
    for name in json.loads((compare_api.FOLDER / "later.json").read_text()):
        owner_name, _, part = name.partition(".")
        owner = getattr(tpengine, owner_name)
        assert hasattr(owner, part) or part in inspect.signature(owner).parameters, name


@pytest.mark.check
@pytest.mark.parametrize(
    "names", [[name for name in PRINTED if name != "ray_data"], ["ray_data"]], ids=len
)
def test_scripts_run_with_only_their_imports_changed(
    names: list[str], hub: Hub, opt_with_text: Path, embedder: Path, tmp_path: Path
) -> None:
    scripts = [tmp_path / f"{name}.py" for name in names]
    for script in scripts:
        text, changed = re.subn(
            r"^(from|import) vllm\b", r"\1 tpengine", (FOLDER / script.name).read_text(), flags=re.M
        )
        assert changed
        script.write_text(text)
    hub.add("facebook/opt-125m", opt_with_text)
    hub.add("intfloat/e5-mistral-7b-instruct", embedder)
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    if names == ["ray_data"]:
        packages = [third_party.ray_data_packages(), PYTHONPATH, *sys.path]
        env["PYTHONPATH"] = os.pathsep.join(packages)
    for name, out in zip(names, forks(*scripts, **env), strict=True):
        assert re.search(f"^{PRINTED[name]}\\Z", out, re.M), out
        if name == "beams":
            scores = [float(text) for text in re.findall(r"^(-.*?) .* length$", out, re.M)]
            assert len(scores) == 4, out
            assert scores[0] > scores[1]
            assert scores[2] > scores[3]


def test_every_script_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == PRINTED.keys()
