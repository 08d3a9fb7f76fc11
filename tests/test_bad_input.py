"""What users do wrong: refused by type, with value, limit and remedy, and the engine goes on."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import greedy, make_engine, open_llm
from support.models import ModelShop
from support.tiny_llama import TinyLlama, edit_json
from support.zoo import PLAIN

from tpengine import LLM, EngineArgs, LLMEngine, SamplingParams
from tpengine.errors import (
    CacheSizeError,
    ConfigError,
    EngineError,
    InvalidPromptError,
    InvalidSamplingParamsError,
    ModelLoadError,
    RequestError,
)

SHARDED = TinyLlama(max_shard_size="200KB", seed=3)


@pytest.fixture(scope="module")
def llm(models: ModelShop) -> Iterator[LLM]:
    with open_llm(models.folder(PLAIN), max_model_len=100) as llm:
        yield llm


@pytest.fixture
def copy(models: ModelShop, tmp_path: Path) -> Path:
    """A sharded model's folder that may be damaged."""
    folder = tmp_path / "copy"
    shutil.copytree(models.folder(SHARDED), folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def load_error(folder: Path) -> str:
    """The message with which loading is refused."""
    with pytest.raises(ModelLoadError) as raised:
        make_engine(folder)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    return str(raised.value)


BAD_PROMPTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty": ([], ("empty", "at least one")),
    "too long": (list(range(5, 106)), ("101", "100", "max_model_len", "shorten")),
    "id too large": ([5, 6, 512], ("prompt_token_ids[2]", "512", "[0, 511]")),
    "negative id": ([-1], ("prompt_token_ids[0]", "-1", "[0, 511]")),
    "no integer": ([5, 1.5], ("prompt_token_ids[1]", "1.5", "integers")),
    "a flag": ([True], ("prompt_token_ids[0]", "True")),
    "text among ids": ([5, "6"], ("prompt_token_ids[1]", "'6'")),
}


@pytest.mark.parametrize("name", list(BAD_PROMPTS))
def test_bad_prompts(llm: LLM, models: ModelShop, name: str) -> None:
    bad, words = BAD_PROMPTS[name]
    engine = llm.llm_engine
    with pytest.raises(InvalidPromptError) as raised:
        engine.add_request("bad", None, greedy(4), prompt_token_ids=bad)
    for word in words:
        assert word in str(raised.value)
    assert isinstance(raised.value, RequestError)
    assert isinstance(raised.value, ValueError)
    assert engine.get_num_unfinished_requests() == 0
    oracle = models.oracle(models.folder(PLAIN))
    good = oracle.prompts((7, 33), seed=1)
    outputs = llm.generate(None, greedy(8), [good[0], bad, good[1]], use_tqdm=False)
    assert outputs[1].error == str(raised.value)
    expected = [answer.token_ids[:8] for answer in oracle.answers(good)]
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == expected


@pytest.mark.parametrize(
    ("prompt", "token_ids", "words"),
    [
        (None, None, ("neither",)),
        ({"prompt_token_id": [1]}, None, ("prompt_token_ids", "prompt_token_id'")),
        (7, None, ("int", "prompt_token_ids")),
        (["a", "b"], None, ("list",)),
        (None, 7, ("int", "list of integers")),
        (None, "abc", ("str", "list of integers")),
        ("text", None, ("no tokenizer",)),
    ],
)
def test_prompts_of_the_wrong_kind(
    llm: LLM, prompt: Any, token_ids: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidPromptError) as raised:
        llm.llm_engine.add_request("bad", prompt, greedy(4), prompt_token_ids=token_ids)
    for word in words:
        assert word in str(raised.value)


def test_text_that_is_no_unicode(models: ModelShop) -> None:
    with open_llm(models.folder(PLAIN, tokenizer=True)) as llm:
        outputs = llm.generate(["a\ud800b", "ab", ""], greedy(2), use_tqdm=False)
    assert "no valid Unicode at character 1 ('\\ud800'" in outputs[0].error
    assert outputs[1].error is None
    assert "empty" in outputs[2].error


def test_arguments_of_the_wrong_kind(llm: LLM) -> None:
    for ids in (5, "abc"):
        with pytest.raises(InvalidPromptError, match="prompt_token_ids must be a list"):
            llm.generate(prompt_token_ids=ids)
    with pytest.raises(InvalidPromptError, match="messages must be a list"):
        llm.chat({"role": "user", "content": "hello"})
    with pytest.raises(InvalidSamplingParamsError, match="stop_token_ids must be a sequence"):
        SamplingParams(stop_token_ids=5)
    with pytest.raises(InvalidSamplingParamsError, match=r"must be an integer, got np\.int64"):
        SamplingParams(stop_token_ids=np.array([4, 5]))


@pytest.mark.parametrize("number", [1 << 31, 1 << 40, 1 << 70])
def test_numbers_beyond_any_vocabulary(llm: LLM, number: int) -> None:
    """Nothing is meant by them but all."""
    prompt = {"prompt_token_ids": [5, 6, 7]}
    usual = SamplingParams(temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    huge = replace(usual, top_k=number)
    one, other = llm.generate([prompt, prompt], [usual, huge], use_tqdm=False)
    assert other.outputs[0].token_ids == one.outputs[0].token_ids
    (longest,) = llm.generate(prompt, replace(usual, max_tokens=number), use_tqdm=False)
    assert longest.outputs[0].finish_reason == "length"


def test_nan_temperature_never_reaches_the_engine() -> None:
    with pytest.raises(InvalidSamplingParamsError, match=r"temperature.*\[0, inf\), got nan"):
        SamplingParams(temperature=math.nan)


def test_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        make_engine(tmp_path)
    with pytest.raises(ModelLoadError, match=r"^tokenizer '/nowhere' is no folder"):
        LLM(tokenizer="/nowhere")
    with pytest.raises(TypeError, match="'max_token'"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    with pytest.raises(ModelLoadError, match=r"is no folder.*hub name"):
        make_engine(tmp_path / "nothing here")
    file = tmp_path / "file"
    file.write_text("{}")
    with pytest.raises(ModelLoadError, match="is no folder"):
        make_engine(file)
    with pytest.raises(ModelLoadError, match="is no folder"):
        make_engine("no-such-name")
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        make_engine(tmp_path)


def test_architecture_that_is_not_supported(copy: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["architectures"] = ["GPT2LMHeadModel"]

    edit_json(copy / "config.json", change)
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel.*supported: .*LlamaForCausalLM"):
        make_engine(copy)


def test_rope_scaling_that_is_not_supported(copy: Path) -> None:
    edit_json(copy / "config.json", lambda c: c["rope_parameters"].update(rope_type="spiral"))
    with pytest.raises(EngineError, match="spiral"):
        make_engine(copy)


def test_folder_without_weights(copy: Path) -> None:
    for path in [*shards(copy), copy / "model.safetensors.index.json"]:
        path.unlink()
    message = load_error(copy)
    assert "safetensors" in message
    assert "dummy" in message
    with make_engine(copy, load_format="dummy") as engine:  # the remedy that is named
        assert engine.num_total_blocks == 256


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_shard(copy: Path, keep: int) -> None:
    damaged = shards(copy)[1]
    damaged.write_bytes(damaged.read_bytes()[:keep])
    message = load_error(copy)
    assert damaged.name in message
    assert "damaged" in message


def test_missing_shard(copy: Path) -> None:
    gone = shards(copy)[1]
    number = len(shards(copy))
    gone.unlink()
    message = load_error(copy)
    assert gone.name in message
    assert f"1 of the {number} files" in message


@pytest.mark.parametrize("outside", ["../secret.safetensors", "/etc/passwd"])
def test_index_that_leaves_the_folder(copy: Path, outside: str) -> None:
    def change(index: dict[str, Any]) -> None:
        index["weight_map"]["model.norm.weight"] = outside

    edit_json(copy / "model.safetensors.index.json", change)
    message = load_error(copy)
    assert outside in message
    assert "outside the folder" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_index_that_is_none(copy: Path, content: str) -> None:
    (copy / "model.safetensors.index.json").write_text(content)
    message = load_error(copy)
    assert "model.safetensors.index.json" in message
    assert "index" in message


def test_one_error_lists_every_tensor_that_does_not_fit(copy: Path) -> None:
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]

    def edit(name: str, change: Any) -> str:
        path = copy / index[name]
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        return str(path.name)

    edit("model.norm.weight", lambda tensors: tensors.pop("model.norm.weight"))
    q_name = "model.layers.1.self_attn.q_proj.weight"
    q_file = edit(q_name, lambda tensors: tensors.update({q_name: torch.zeros(256, 100)}))
    down = "model.layers.0.mlp.down_proj.weight"
    down_file = edit(down, lambda tensors: tensors.update({down: torch.zeros(64, 192)}))
    extra = "model.layers.0.self_attn.q_norm.weight"
    extra_file = edit(down, lambda tensors: tensors.update({extra: torch.zeros(64)}))
    message = load_error(copy)
    lines = message.splitlines()
    assert "4 tensors" in lines[0]
    assert len(lines) == 5
    for kind, *words in (
        ("missing", "model.norm.weight", "[128]"),
        ("misshapen", q_name, q_file, "[256, 100]", "[256, 128]"),
        ("misshapen", down, down_file, "[64, 192]", "[128, 192]"),
        ("unexpected", extra, extra_file),
    ):
        found = [line for line in lines if kind in line and words[0] in line]
        assert len(found) == 1, f"{kind} {words[0]} in {message}"
        for word in words:
            assert word in found[0]


def test_damaged_tokenizer(models: ModelShop, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(models.folder(PLAIN, tokenizer=True), folder)
    (folder / "tokenizer.json").write_text("{ not json")
    message = load_error(folder)
    assert "tokenizer" in message
    assert str(folder) in message


def test_damaged_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").write_text("{ not json")
    assert "generation_config.json" in load_error(copy)


def test_no_block_fits_and_the_named_value_does(models: ModelShop) -> None:
    folder = models.folder(PLAIN)
    args = {"num_device_blocks_override": None, "max_model_len": 16}
    with pytest.raises(CacheSizeError) as raised:
        make_engine(folder, cpu_kv_cache_space=1e-6, **args)
    message = str(raised.value)
    assert "no block" in message
    value = float(message.split("cpu_kv_cache_space to at least ")[1].split()[0])
    with make_engine(folder, cpu_kv_cache_space=value, **args) as engine:
        assert engine.num_total_blocks == 1
        engine.add_request("one", None, greedy(4), prompt_token_ids=[5, 6, 7])
        while engine.has_unfinished_requests():
            engine.step()


def test_max_model_len_does_not_fit_and_the_named_values_do(models: ModelShop) -> None:
    folder = models.folder(PLAIN)
    with pytest.raises(CacheSizeError) as raised:
        make_engine(folder, num_device_blocks_override=20)
    message = str(raised.value)
    assert "max_model_len = 640" in message
    shorter = int(message.split("set max_model_len to at most ")[1].split(",")[0])
    assert shorter == 320
    more_blocks = int(message.split("num_device_blocks_override to ")[1])
    for args in (
        {"num_device_blocks_override": 20, "max_model_len": shorter},
        {"num_device_blocks_override": more_blocks},
    ):
        make_engine(folder, **args).shutdown()
    with pytest.raises(CacheSizeError):
        make_engine(folder, num_device_blocks_override=more_blocks - 1)


def test_cache_space_that_is_named_is_enough(models: ModelShop) -> None:
    folder = models.folder(PLAIN)
    args = {"num_device_blocks_override": None}
    with pytest.raises(CacheSizeError) as raised:
        make_engine(folder, cpu_kv_cache_space=0.0005, **args)
    words = str(raised.value).split("cpu_kv_cache_space")[1].split()
    value = next(float(word) for word in words if word[0].isdigit())
    make_engine(folder, cpu_kv_cache_space=value, **args).shutdown()


BAD_ARGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "float16 on CPU": ({"dtype": "float16"}, ("float16", "CPU", "bfloat16 or float32")),
    "pipeline": (
        {"pipeline_parallel_size": 2},
        ("pipeline_parallel_size = 2", "layer", "leave it at 1"),
    ),
    "ranks": (
        {"tensor_parallel_size": 2, "executor": "local"},
        ("executor = 'local'", "tensor_parallel_size = 2"),
    ),
    "swap": ({"swap_space": -1.0}, ("swap_space", "at least 0", "-1")),
    "block size": ({"block_size": 12}, ("block_size", "8, 16, 32", "12")),
    "dtype": ({"dtype": "int4"}, ("dtype", "bfloat16", "'int4'")),
    "device": ({"device": "tpu"}, ("device", "cpu", "'tpu'")),
    "load format": ({"load_format": "pickle"}, ("load_format", "safetensors", "'pickle'")),
    "tokenizer mode": ({"tokenizer_mode": "quick"}, ("tokenizer_mode", "slow", "'quick'")),
    "no sequences": ({"max_num_seqs": 0}, ("max_num_seqs", "at least 1", "0")),
    "no tokens": ({"max_num_batched_tokens": 0}, ("max_num_batched_tokens", "at least 1")),
    "no blocks": (
        {"num_device_blocks_override": 0},
        ("num_device_blocks_override", "at least 1", "0"),
    ),
    "negative length": ({"max_model_len": 0}, ("max_model_len", "at least 1", "0")),
    "length beyond the model": ({"max_model_len": 641}, ("641", "640", "smaller")),
    "whole prompts do not fit a step": (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        ("max_num_batched_tokens = 512", "max_model_len = 640", "enable chunked prefill"),
    ),
    "memory share": (
        {"gpu_memory_utilization": 1.5},
        ("gpu_memory_utilization", "more than 0 and at most 1", "1.5"),
    ),
    "memory share is nan": (
        {"gpu_memory_utilization": math.nan},
        ("gpu_memory_utilization", "more than 0", "nan"),
    ),
    "cache space": ({"cpu_kv_cache_space": 0}, ("cpu_kv_cache_space", "more than 0", "0")),
    "cache space is nan": ({"cpu_kv_cache_space": math.nan}, ("cpu_kv_cache_space", "nan")),
    "cache space is infinite": ({"cpu_kv_cache_space": math.inf}, ("cpu_kv_cache_space", "inf")),
    "sequences are no number": ({"max_num_seqs": "64"}, ("max_num_seqs", "'64'")),
    "a flag that is text": ({"enforce_eager": "yes"}, ("enforce_eager", "'yes'")),
    "unknown": ({"max_seqs": 3}, ("max_seqs", "did you mean", "max_num_seqs")),
}


@pytest.mark.parametrize("name", list(BAD_ARGS))
def test_bad_engine_arguments(models: ModelShop, name: str) -> None:
    args, words = BAD_ARGS[name]
    with pytest.raises(ConfigError) as raised:
        open_llm(models.folder(PLAIN), **args)
    for word in words:
        assert word in str(raised.value), str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(models: ModelShop) -> None:
    with pytest.raises(ConfigError, match=r"cuda.*device='cpu'"):
        LLMEngine.from_engine_args(EngineArgs(str(models.folder(PLAIN)), device="cuda"))
