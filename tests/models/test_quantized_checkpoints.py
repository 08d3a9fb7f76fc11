"""Folders of AWQ, GPTQ, compressed-tensors and fp8, against what their own tools make of them.

The folders of `data/quantized` were written by `data/make_quantized.py`: each holds the products of
its weights and greedy ids as they come from the numbers that the tool's own layers have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layers.test_quantized import difference, round_rows
from safetensors.torch import load_file, save_file
from support.engines import generate, greedy, ids
from support.ranks import ThreadedExecutor
from support.subjects import BY_NAME, Subjects
from support.tiny_llama import edit_json

from tpengine import LLM, EngineArgs, LLMEngine, SamplingParams
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import ConfigError, ModelLoadError
from tpengine.layers.linear import QKVParallelLinear, RowParallelLinear
from tpengine.layers.weights import QuantizedSource, TensorSource, Weights
from tpengine.model_files import read_hf_config
from tpengine.models.loader import read_tensors
from tpengine.models.quantized_checkpoint import merge_tensors
from tpengine.quantization_config import read_scheme

ROOT = Path(__file__).parent.parent / "data" / "quantized"
EXACT = {
    "awq": 4,
    "gptq": 4,
    "gptq-8": 8,
    "gptq-8-zeros": 8,
    "gptq-order": 4,
    "gptq-v2-head": 4,
    "gptq-zeros": 4,
    "w4a16": 4,
    "w4a16-zeros": 4,
    "w8a8": 8,
}
"""Folders whose numbers the kernels multiply as they are stored, and their bits."""
ROUNDED = ("fp8", "fp8-block", "w8a8-fp8")
ALL = (*EXACT, *ROUNDED)
HIDDEN, MLP = 128, 192
TO_EIGHT_BITS = 0.01


class OwnPart:
    """In the place of the other ranks: only this rank's contribution is read."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def sources(folder: Path) -> dict[str, TensorSource]:
    scheme = read_scheme(read_hf_config(str(folder), False), str(folder))
    assert scheme is not None
    path = folder / "model.safetensors"
    tensors = ((path.name, name, source) for name, source in read_tensors(path))
    merged = merge_tensors(tensors, scheme, lambda name: not name.endswith(".bias"))
    return {name: source for _, name, source in merged}


def answers(folder: Path) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Prompts and greedy ids of transformers with the tool's numbers."""
    expected = load_file(folder / "expected.safetensors")
    for i in range(3):
        yield expected[f"prompt {i}"].tolist(), tuple(expected[f"answer {i}"].tolist())


@pytest.mark.parametrize("name", ALL)
def test_values_are_those_of_the_tool(name: str) -> None:
    found, num_weights = sources(ROOT / name), 0
    for key, product in load_file(ROOT / name / "expected.safetensors").items():
        if not key.endswith(".weight"):
            continue
        source = found[key]
        assert isinstance(source, QuantizedSource)
        values = source[:]
        wave = torch.arange(values.shape[1], dtype=torch.float64).cos()
        torch.testing.assert_close((values.double() @ wave).float(), product, rtol=1e-5, atol=1e-6)
        assert torch.equal(source[3:61, 5:90], values[3:61, 5:90])
        num_weights += 1
    assert num_weights == 14 + ("head" in name)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_ids_of_the_dequantised_form(name: str, tp_size: int) -> None:
    prompts, expected = zip(*answers(ROOT / name), strict=True)
    assert engine_ids(ROOT / name, prompts, tp_size, dtype="float32") == list(expected)


def test_the_line_at_the_start_tells_of_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks 1 and 3 begin inside a group of `down_proj`, and 16 inputs are no group of a kernel."""
    caplog.set_level("INFO", "tpengine")
    engine_ids(ROOT / "w4a16-zeros", [[5, 6]], 4, 1)
    said = "(4 bits as stored; 4 bits as stored, others rounded to 8 bits in groups of 32)"
    assert any(said in message for message in caplog.messages)


def engine_ids(
    folder: Path, prompts: Any, tp_size: int = 1, num_tokens: int = 64, **args: Any
) -> list[tuple[int, ...]]:
    args = {"max_model_len": 160, "cpu_kv_cache_space": 0.05, "device": "cpu", **args}
    if tp_size == 1:
        with LLM(str(folder), **args) as llm:
            return ids(generate(llm, prompts, greedy(num_tokens)))
    config = EngineArgs(str(folder), disable_log_stats=True, **args).create_engine_config("cpu")
    engine = LLMEngine(config, ThreadedExecutor(config, tp_size), log_stats=False)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    done = {}
    try:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), None, params, prompt_token_ids=list(prompt))
        while engine.has_unfinished_requests():
            done.update({one.request_id: one for one in engine.step() if one.finished})
    finally:
        engine.shutdown()
    return [done[str(i)].outputs[0].token_ids for i in range(len(prompts))]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_layers_as_stored(name: str, tp_size: int) -> None:
    """Each layer of the last rank against the dequantised weight. Two ranks cut the MLP at 96, in
    the middle of a group of 64; they cannot cut inputs that are ordered by group."""
    found, rank = sources(ROOT / name), tp_size - 1
    prefix = "model.layers.1"
    names = [f"{prefix}.self_attn.{one}_proj" for one in "qkv"]
    weights = Weights(torch.float32, torch.device("cpu"), ParallelState(rank, tp_size, OwnPart()))
    weights.as_stored = True
    qkv = QKVParallelLinear(weights, names, HIDDEN, 4, 2, 32)
    down = RowParallelLinear(weights, f"{prefix}.mlp.down_proj", MLP, HIDDEN)
    values = []
    for key in [*names, f"{prefix}.mlp.down_proj"]:
        weights.read(f"{key}.weight", found[f"{key}.weight"])
        values.append(found[f"{key}.weight"][:])
    weights.finish()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(7, n, generator=generator) for n in (HIDDEN, MLP // tp_size))
    own = torch.cat([part.chunk(tp_size)[rank] for part in values[:3]])
    own_down = values[3].chunk(tp_size, dim=1)[rank]
    exact = 1e-3 if name in EXACT else TO_EIGHT_BITS
    assert difference(qkv.forward(x), round_rows(x) @ own.t()) < exact
    is_cut = name == "gptq-order" and tp_size == 2
    bound = TO_EIGHT_BITS if is_cut else exact
    assert difference(down.forward(y), round_rows(y) @ own_down.t()) < bound
    assert weights.form == ", others ".join(forms(name, is_cut))


def forms(name: str, is_cut: bool = False) -> list[str]:
    """What the line at the start says of a folder."""
    stored = [f"{EXACT[name]} bits as stored"] if name in EXACT else []
    return stored + ["rounded to 8 bits in groups of 32"] * (is_cut or name in ROUNDED)


@pytest.mark.parametrize("name", ["gptq-order", "w4a16-zeros", "fp8"])
def test_an_engine_runs_a_folder_as_stored(name: str, caplog: pytest.LogCaptureFixture) -> None:
    prompts, expected = zip(*answers(ROOT / name), strict=True)
    with caplog.at_level("INFO", "tpengine"):
        found = engine_ids(ROOT / name, prompts, num_tokens=4, dtype="bfloat16")
    assert [one[0] for one in found] == [one[0] for one in expected]
    assert f"({forms(name)[0]})" in caplog.text


@pytest.fixture
def copied(tmp_path: Path) -> Any:
    def copy(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        folder = tmp_path / name
        shutil.copytree(ROOT / name, folder)
        return folder, load_file(folder / "model.safetensors")

    return copy


def test_tensors_of_a_weight_lie_in_two_files(copied: Any) -> None:
    folder, state = copied("gptq-zeros")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((sorted(state)[::2], sorted(state)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: state[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    prompt, expected = next(answers(folder))
    assert engine_ids(folder, [prompt], dtype="float32") == [expected]


def test_transformers_code_runs_them_too() -> None:
    prompt, expected = next(answers(ROOT / "awq"))
    found = engine_ids(ROOT / "awq", [prompt], dtype="float32", model_impl="transformers")
    assert found == [expected]


def test_what_older_tools_write_beside_the_weights(
    copied: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A bias of zeros for layers that have none; scales of activations."""
    folder, state = copied("gptq")
    bias = "model.layers.0.mlp.up_proj.bias"
    extra = {bias: torch.zeros(MLP), "model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}
    save_file(state | extra, folder / "model.safetensors")
    prompt, expected = next(answers(folder))
    with caplog.at_level("INFO", "tpengine"):
        assert engine_ids(folder, [prompt], dtype="float32") == [expected]
    assert "scales of activations are not used" in caplog.text
    save_file(state | {bias: torch.ones(MLP)}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"unexpected: {bias}"):
        engine_ids(folder, [prompt])


def test_groups_of_inputs_in_compressed_tensors(copied: Any) -> None:
    """`weight_g_idx`, which llmcompressor wrote before 0.14."""
    folder, state = copied("w4a16-zeros")
    name = "model.layers.0.mlp.down_proj.weight"
    plain = sources(folder)[name]
    groups = torch.arange(MLP) // 32
    moved = groups[torch.randperm(MLP, generator=torch.Generator().manual_seed(0))]
    save_file(state | {f"{name}_g_idx": moved.int()}, folder / "model.safetensors")
    source = sources(folder)[name]
    assert isinstance(plain, QuantizedSource)
    assert isinstance(source, QuantizedSource)
    whole = slice(0, HIDDEN), slice(0, MLP)
    before, after = plain.stored(*whole), source.stored(*whole)
    assert before is not None
    assert before.offsets is not None
    assert after is not None
    assert after.order is not None
    q = before.q.float() - before.offsets.float()[:, moved]
    torch.testing.assert_close(source[:], q * before.scales.float()[:, moved], rtol=1e-3, atol=0)
    assert torch.equal(after.q, before.q[:, after.order])
    assert torch.equal(moved[after.order], groups)
    assert source.stored(slice(0, HIDDEN), slice(0, 96)) is None


def test_experts_are_dequantised(subjects: Subjects, tmp_path: Path) -> None:
    """Weights in int8 with one scale an output, as compressed-tensors stores them."""
    subject = subjects.folder(BY_NAME["mixtral-odd"])
    plain, quantized = {}, {}
    for name, weight in load_file(subject / "model.safetensors").items():
        if ".experts." not in name or weight.ndim != 2:
            plain[name] = quantized[name] = weight
            continue
        scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        q = (weight / scale.float()).round().clamp(-128, 127)
        quantized |= {name: q.to(torch.int8), f"{name}_scale": scale}
        plain[name] = q * scale.float()
    assert len(quantized) > len(plain)
    config = json.loads((ROOT / "w8a8" / "config.json").read_text())
    change = {"quantization_config": config["quantization_config"]}
    found = []
    for label, state in (("plain", plain), ("quantized", quantized)):
        shutil.copytree(subject, tmp_path / label)
        save_file(state, tmp_path / label / "model.safetensors", {"format": "pt"})
        if label == "quantized":
            edit_json(tmp_path / label / "config.json", lambda fields: fields.update(change))
        for tp_size in (1, 2):
            args = {"dtype": "float32", "num_tokens": 16}
            found.append(engine_ids(tmp_path / label, [[5, 9, 33, 70]], tp_size, **args))
    assert found[0] == found[2]
    assert found[1] == found[3]


@pytest.mark.parametrize(
    ("scale", "is_kept"), [(1e-3, True), (1e5, False), (3e-7, False), (0.0, True)]
)
def test_scales_that_float16_does_not_hold(scale: float, is_kept: bool, copied: Any) -> None:
    folder, state = copied("w8a8")
    name = "model.layers.0.mlp.down_proj.weight"
    state[f"{name}_scale"][5] = scale
    save_file(state, folder / "model.safetensors")
    source = sources(folder)[name]
    assert isinstance(source, QuantizedSource)
    assert (source.stored(slice(32, 64), slice(0, MLP)) is not None) == is_kept
    expected = state[name][5].float() * state[f"{name}_scale"][5].float()
    assert torch.equal(source[5:6][0], expected)


def in_groups(**fields: Any) -> Any:
    """Changes fields of the weights of compressed-tensors' only group."""
    return lambda config: config["config_groups"]["group_0"]["weights"].update(fields)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, ["quant_method = 'bitsandbytes'", "'awq'"]),
        ("awq", {"bits": 8}, ["bits = 8", "supported: 4"]),
        ("awq", {"version": "gemv"}, ["version = 'gemv'", "gemm"]),
        ("awq", {"zero_point": False}, ["zero_point = False"]),
        ("gptq", {"bits": 3}, ["bits = 3", "4, 8"]),
        ("gptq", {"group_size": 0}, ["group_size = 0"]),
        ("gptq", {"checkpoint_format": "marlin"}, ["checkpoint_format = 'marlin'", "gptq_v2"]),
        ("gptq", {"dynamic": {"+:.*": {"bits": 3}}}, ["dynamic.+:.*.bits = 3"]),
        ("w4a16", {"quantization_status": "calibration"}, ["quantization_status"]),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config"]),
        ("w4a16", {"kv_cache_scheme": {"num_bits": 8}}, ["kv_cache_scheme"]),
        ("w4a16", {"config_groups": {}}, ["config_groups = {}"]),
        ("w4a16", in_groups(num_bits=2), ["config_groups.group_0.weights.num_bits = 2"]),
        ("w4a16", in_groups(type="float"), ["weights.type = 'float'", "'int'"]),
        ("w4a16", in_groups(strategy="tensor_group"), ["strategy = 'tensor_group'"]),
        ("fp8", {"fmt": "e5m2"}, ["fmt = 'e5m2'"]),
        ("fp8", {"weight_block_size": [128]}, ["weight_block_size = [128]"]),
    ],
)
def test_a_configuration_is_refused(name: str, change: Any, words: list[str], copied: Any) -> None:
    """Before weights are read."""
    folder, _ = copied(name)
    edit = change if callable(change) else lambda config: config.update(change)
    edit_json(folder / "config.json", lambda config: edit(config["quantization_config"]))
    with pytest.raises(ConfigError) as error:
        EngineArgs(str(folder)).create_engine_config("cpu")
    for word in [*words, "in 16 bits"]:
        assert word in str(error.value)


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "fields", "tensors", "words"),
    [
        ("gptq", {}, {"scales": None}, ["down_proj in model.safetensors has", "no scales"]),
        ("gptq", {"group_size": 32}, {}, ["3 groups", "group_size is 32"]),
        ("gptq", {}, {"qzeros": torch.zeros(3, 8).int()}, ["qzeros is [3, 8], expected [3, 16]"]),
        ("gptq-order", {}, {"g_idx": torch.full((MLP,), 6).int()}, ["g_idx", "6"]),
        ("w4a16", {}, {"weight_packed": torch.zeros(128, 6).int()}, ["6 words", "192 inputs"]),
        ("w8a8", {}, {"weight": torch.zeros(128, 192)}, ["float32", "neither int8 nor float8"]),
        ("fp8", {"weight_block_size": None}, {}, ["[2, 3]", "no size of blocks"]),
        ("fp8", {"weight_block_size": [128, 128]}, {}, ["[2, 3], expected [1, 2]"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, fields: Any, tensors: Any, words: list[str], copied: Any
) -> None:
    folder, state = copied(name)
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(fields))
    for ending, value in tensors.items():
        del state[f"{DOWN}.{ending}"]
        if value is not None:
            state[f"{DOWN}.{ending}"] = value
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ModelLoadError) as error:
        engine_ids(folder, [[5]])
    for word in words:
        assert word in str(error.value)
