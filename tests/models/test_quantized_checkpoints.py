"""Folders of AWQ, GPTQ, compressed-tensors and fp8, against what their own tools make of them.

The folders of `data/quantized` were written by `tests/data/make_quantized.py` of commit d159646:
each holds the products of its weights and greedy ids as they come from the numbers that the tool's
own layers have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layers.test_quantized import BOUND, SPLIT_OVER_INPUTS, difference, rounding_hook
from safetensors.torch import load_file, save_file
from support.bare_model import BareModel, logits_in_transformers
from support.engines import greedy, ids, open_engine, serve
from support.matrix import matrix
from support.messages import refused
from support.ranks import run_ranks
from support.rounded_rows import rounded_weight
from support.subjects import BY_NAME, Subjects
from support.tiny_llama import edit_json
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tpengine import EngineArgs
from tpengine.checkpoint.loader import read_tensors
from tpengine.checkpoint.model_files import read_hf_config
from tpengine.checkpoint.quantization_config import read_scheme
from tpengine.checkpoint.quantized_checkpoint import merge_tensors
from tpengine.config import EMBEDDED_MODEL
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import ConfigError, ModelLoadError
from tpengine.layers.weights import QuantizedSource, TensorSource
from tpengine.ops.quantized_ops import QuantizedFormat

ROOT = Path(__file__).parent.parent / "data" / "quantized"
EIGHT_BITS = "rounded to 8 bits in groups of 32"
SAID = {
    "4 bits as stored": "awq gptq gptq-order gptq-zeros w4a16 w4a16-zeros",
    "8 bits as stored": "gptq-8 gptq-8-zeros w8a8",
    "4 and 8 bits as stored": "gptq-v2-head",
    EIGHT_BITS: "fp8 fp8-block w8a8-fp8",
}
FORMS = {name: text for text, names in SAID.items() for name in names.split()}
"""By folder: what the line at the start says of it."""
HIDDEN, MLP = 128, 192
DOWN = "model.layers.0.mlp.down_proj"
GROUPS = torch.arange(MLP) // 32
MOVED = GROUPS[torch.randperm(MLP, generator=torch.Generator().manual_seed(0))]
"""The group of each input, plain and as an order by activations may leave it."""


def sources(folder: Path) -> dict[str, TensorSource]:
    scheme = read_scheme(read_hf_config(str(folder), False), str(folder))
    path = folder / "model.safetensors"
    tensors = ((path.name, name, source) for name, source in read_tensors(path))
    return {name: source for _, name, source in merge_tensors(tensors, scheme, lambda name: [])}


def dequantised_model(folder: Path) -> tuple[LlamaForCausalLM, dict[str, TensorSource]]:
    """The model with the values of its form in float32, and what they were read from."""
    fields = dict(read_hf_config(str(folder), False))
    fields.pop("quantization_config")
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields)).float().eval()
    tensors = sources(folder)
    state = {key: source[:] for key, source in tensors.items()}
    assert set(model.load_state_dict(state, strict=False)[0]) <= {"lm_head.weight"}
    return model, tensors


def answers(folder: Path) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Prompts and greedy ids of transformers with the tool's numbers."""
    expected = load_file(folder / "expected.safetensors")
    for i in range(3):
        yield expected[f"prompt {i}"].tolist(), tuple(expected[f"answer {i}"].tolist())


@pytest.mark.parametrize("name", list(FORMS))
def test_values_are_those_of_the_tool(name: str) -> None:
    tensors, num_weights = sources(ROOT / name), 0
    for key, product in load_file(ROOT / name / "expected.safetensors").items():
        if not key.endswith(".weight"):
            continue
        source = tensors[key]
        assert isinstance(source, QuantizedSource)
        values = source[:]
        wave = torch.arange(values.shape[1], dtype=torch.float64).cos()
        torch.testing.assert_close((values.double() @ wave).float(), product, rtol=1e-5, atol=1e-6)
        assert torch.equal(source[3:61, 5:90], values[3:61, 5:90])
        num_weights += 1
    assert num_weights == 14 + ("head" in name)


@pytest.mark.parametrize(("name", "tp_size"), matrix(list(FORMS), (1, 2)))
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
    args = {"max_model_len": 160, "cpu_kv_cache_space": 0.05, "dtype": "auto", **args}
    with open_engine(folder, tp_size, **args) as engine:
        return ids(serve(engine, prompts, greedy(num_tokens)))


@pytest.mark.parametrize(
    ("name", "tp_size", "model_impl"),
    [
        *matrix(list(FORMS), (1, 2), ("tpengine",)),
        *((name, 2, "transformers") for name in ("gptq-order", "w4a16-zeros")),
    ],
)
def test_a_model_as_stored(name: str, tp_size: int, model_impl: str) -> None:
    """Against transformers with the values of the form and inputs rounded to 8 bits. Two ranks cut
    the MLP at 96, in the middle of a group of 64; they cannot cut inputs ordered by group."""
    folder, is_cut = ROOT / name, (name, tp_size) == ("gptq-order", 2)
    model, tensors = dequantised_model(folder)
    for key, source in tensors.items():
        if isinstance(source, QuantizedSource):
            layer = model.get_submodule(key.removesuffix(".weight"))
            is_split = key.removesuffix(".weight").endswith(SPLIT_OVER_INPUTS)
            layer.register_forward_pre_hook(rounding_hook(tp_size if is_split else 1))
            if FORMS[name] == EIGHT_BITS or (is_cut and is_split):
                layer.weight.data = rounded_weight(layer.weight.data, QuantizedFormat(8, 32))

    def one(parallel: ParallelState) -> tuple[torch.Tensor, str]:
        bare = BareModel(folder, parallel, as_stored=True, model_impl=model_impl)
        return bare.logits(), bare.form

    answers, _ = run_ranks(tp_size, one)
    assert difference(answers[0][0], logits_in_transformers(model)) < BOUND
    others = f", others {EIGHT_BITS}" if is_cut else ""
    assert [form for _, form in answers] == [FORMS[name] + others] * tp_size


@pytest.fixture
def copied(tmp_path: Path) -> Any:
    def copy(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        folder = shutil.copytree(ROOT / name, tmp_path / name)
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


def test_what_older_tools_write_beside(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
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
    save_file(state | {f"{name}_g_idx": MOVED.int()}, folder / "model.safetensors")
    source = sources(folder)[name]
    whole = slice(0, HIDDEN), slice(0, MLP)
    before, after = plain.stored(*whole), source.stored(*whole)
    q = before.q.float() - before.offsets.float()[:, MOVED]
    torch.testing.assert_close(source[:], q * before.scales.float()[:, MOVED], rtol=1e-3, atol=0)
    assert torch.equal(after.q, before.q[:, after.order])
    assert torch.equal(MOVED[after.order], GROUPS)
    assert source.stored(slice(0, HIDDEN), slice(0, 96)) is None


BY_GROUP = {"strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("fields", "scales", "zeros", "groups"),
    [
        ({"strategy": "channel"}, (128,), (128,), None),
        ({"strategy": "tensor"}, (1,), (1,), None),
        ({"strategy": "tensor"}, (), (), None),
        (BY_GROUP, (128, 6), (128, 6), None),
        (BY_GROUP | {"actorder": "group"}, (128, 6), (128, 6), MOVED),
        (BY_GROUP | {"actorder": "weight"}, (128, 6), None, torch.full((MLP,), -1)),
    ],
)
def test_scales_of_int8_weights(
    fields: Any, scales: Any, zeros: Any, groups: torch.Tensor | None, copied: Any
) -> None:
    folder, state = copied("w8a8")
    name, generator = f"{DOWN}.weight", torch.Generator().manual_seed(0)
    factors = torch.rand(scales, generator=generator).half() + 0.5
    middles = torch.zeros(zeros or (), dtype=torch.int8)
    state[f"{name}_scale"] = factors
    if zeros is not None:
        middles = torch.randint(-9, 9, zeros, generator=generator).to(torch.int8)
        state[f"{name}_zero_point"] = middles
    if groups is not None:
        state[f"{name}_g_idx"] = groups.int()
    save_file(state, folder / "model.safetensors")
    edit = in_groups(**fields, symmetric=zeros is None)
    edit_json(folder / "config.json", lambda config: edit(config["quantization_config"]))
    source, by_input = sources(folder)[name], MOVED if groups is MOVED else GROUPS
    spread = [
        values.float().reshape(-1, 1) if values.ndim < 2 else values[:, by_input].float()
        for values in (factors, middles)
    ]
    expected = (state[name].float() - spread[1]) * spread[0]
    assert torch.equal(source[:], expected)
    assert torch.equal(source[9:60, 5:70], expected[9:60, 5:70])
    stored = source.stored(slice(0, HIDDEN), slice(0, MLP))
    assert (stored.order is not None) == (groups is MOVED)


def with_own_numbers(
    folder: Path, target: Path, change: Any, quantize: Callable[[str, torch.Tensor], Any]
) -> tuple[Path, Path]:
    """Copies a model twice: with the values of quantised weights, and with their tensors.

    Args:
        quantize: of a weight's name and values: the new values, and tensors by their endings;
            None: it stays as it is.
    """
    plain, quantized = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if (stored := quantize(name, weight)) is None:
            plain[name] = quantized[name] = weight
            continue
        plain[name], parts = stored
        quantized |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
    assert len(quantized) > len(plain)
    paths = target / "plain", target / "quantized"
    for path, state in zip(paths, (plain, quantized), strict=True):
        shutil.copytree(folder, path)
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(state, path / "model.safetensors", {"format": "pt"})
    edit_json(paths[1] / "config.json", lambda fields: fields.update(quantization_config=change))
    return paths


def assert_ids_alike(*folders: Path) -> None:
    """On one rank, on two, and on transformers' code."""
    for tp_size, model_impl in ((1, "auto"), (2, "auto"), (1, "transformers")):
        args = {"dtype": "float32", "num_tokens": 16, "model_impl": model_impl}
        first, other = (engine_ids(f, [[5, 9, 33, 70]], tp_size, **args) for f in folders)
        assert first == other


def test_experts_are_dequantised(
    subjects: Subjects, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights in int8 with one scale an output, as compressed-tensors stores them."""

    def quantize(name: str, weight: torch.Tensor) -> Any:
        if ".experts." not in name or weight.ndim != 2:
            return None
        scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        q = (weight / scale.float()).round().clamp(-128, 127)
        return q * scale.float(), {"weight": q.to(torch.int8), "weight_scale": scale}

    change = json.loads((ROOT / "w8a8" / "config.json").read_text())["quantization_config"]
    folder = subjects.folder(BY_NAME["mixtral-odd"])
    plain, quantized = with_own_numbers(folder, tmp_path, change, quantize)
    with caplog.at_level("INFO", "tpengine"):
        assert_ids_alike(plain, quantized)
    assert caplog.text.count("(dequantised to float32)") == 3


def to_gptq(weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rounds a weight `[out, in]` to 4 bits in groups of 32; returns values and tensors."""
    parts = weight.unflatten(1, (-1, 32))
    scales = (parts.abs().amax(2) / 7).half()
    q = (parts / scales.float().unsqueeze(2)).round().clamp(-8, 7)
    words = (q.flatten(1).t().int() + 8).unflatten(0, (-1, 8)) << 4 * torch.arange(8).view(8, 1)
    return (q * scales.float().unsqueeze(2)).flatten(1), {
        "qweight": words.sum(1).to(torch.int32),
        "qzeros": torch.full((scales.shape[1], len(weight) // 8), 0x77777777).int(),
        "scales": scales.t(),
    }


def test_conv1d_weights(subjects: Subjects, tmp_path: Path) -> None:
    """GPTQ stores the weights of GPT-2 as those of other models; its own are `[in, out]`."""

    def quantize(name: str, weight: torch.Tensor) -> Any:
        if ".c_" not in name or weight.ndim != 2:
            return None
        values, tensors = to_gptq(weight.t())
        return values.t(), tensors

    change = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    folder = subjects.folder(BY_NAME["gpt2-untied-unscaled"])
    plain, quantized = with_own_numbers(folder, tmp_path, change, quantize)
    assert_ids_alike(plain, quantized)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    for key, layer in model.named_modules():
        if ".c_" in key:
            layer.register_forward_pre_hook(rounding_hook(1))
    for model_impl in ("tpengine", "transformers"):
        bare = BareModel(quantized, as_stored=True, model_impl=model_impl)
        assert difference(bare.logits(), logits_in_transformers(model)) < BOUND
        assert bare.form == "4 bits as stored"


def test_tensors_that_wait_take_no_mappings() -> None:
    """A process may have some 65,000, and the tensors of all experts may wait for each other."""

    def count() -> int:
        return Path("/proc/self/maps").read_text().count(str(ROOT / "gptq" / "model.safetensors"))

    tensors = sources(ROOT / "gptq")
    assert count() == 0
    assert tensors[f"{DOWN}.weight"][:8, :8].shape == (8, 8)
    assert 0 < count() <= 3


@pytest.mark.parametrize(
    ("model", "asked", "words"),
    [
        ("gptq", "GPTQ", None),
        ("awq", "awq_marlin", None),
        ("fp8", "fp8", None),
        ("w4a16", "compressed-tensors", None),
        ("gptq", "int8", None),
        ("gptq", "awq", "quantization = 'awq' | are gptq | leave it unset"),
        (None, "fp8", "quantization = 'fp8' | not quantised"),
        (None, "gguf", "quantization = 'gguf' | not quantised"),
    ],
)
def test_the_form_of_a_file_may_be_named(model: str | None, asked: str, words: str | None) -> None:
    """Scripts for vLLM name it."""
    args = EngineArgs(str(ROOT / model) if model else EMBEDDED_MODEL, quantization=asked)
    if words is None:
        kind = args.create_engine_config("cpu").model.quantization
        assert kind == ("int8" if asked == "int8" else None)
        return
    with refused(ConfigError, words):
        args.create_engine_config("cpu")


@pytest.mark.parametrize(
    ("scale", "is_kept"), [(1e-3, True), (1e5, False), (3e-7, False), (0.0, True)]
)
def test_scales_that_float16_does_not_hold(scale: float, is_kept: bool, copied: Any) -> None:
    folder, state = copied("w8a8")
    name = "model.layers.0.mlp.down_proj.weight"
    state[f"{name}_scale"][5] = scale
    save_file(state, folder / "model.safetensors")
    source = sources(folder)[name]
    assert (source.stored(slice(32, 64), slice(0, MLP)) is not None) == is_kept
    expected = state[name][5].float() * state[f"{name}_scale"][5].float()
    assert torch.equal(source[5:6][0], expected)


FP8_CACHE = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(("name", "scheme"), [("w8a8-fp8", FP8_CACHE), ("fp8", "static")])
def test_scales_of_the_cache_are_left_beside(name: str, scheme: Any, copied: Any) -> None:
    """A CPU's cache does not use them; `worker/test_kv_scales.py` does."""
    folder, state = copied(name)
    for kind in ("k_proj.output_scale", "v_proj.output_scale"):
        state[f"model.layers.1.self_attn.{kind}"] = torch.tensor([0.5])
    save_file(state, folder / "model.safetensors")
    edit_json(
        folder / "config.json",
        lambda config: config["quantization_config"].update(kv_cache_scheme=scheme),
    )
    prompts, expected = zip(*answers(ROOT / name), strict=True)
    assert engine_ids(folder, prompts, 1, dtype="float32") == list(expected)


def in_groups(**fields: Any) -> Any:
    """Changes fields of the weights of compressed-tensors' only group."""
    return lambda config: config["config_groups"]["group_0"]["weights"].update(fields)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes' | 'awq'"),
        ("awq", {"bits": 8}, "bits = 8 | supported: 4"),
        ("awq", {"version": "gemv"}, "version = 'gemv' | gemm"),
        ("awq", {"zero_point": False}, "zero_point = False"),
        ("gptq", {"bits": 3}, "bits = 3 | 4, 8"),
        ("gptq", {"group_size": 0}, "group_size = 0"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' | gptq_v2"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 3}}}, "dynamic.+:.*.bits = 3"),
        ("w4a16", {"quantization_status": "calibration"}, "quantization_status"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("w4a16", {"kv_cache_scheme": FP8_CACHE | {"num_bits": 4}}, "kv_cache_scheme = {"),
        ("w4a16", {"config_groups": {}}, "config_groups = {}"),
        ("w4a16", {"config_groups": {"group_0": None}}, "config_groups.group_0 = None"),
        ("w4a16", {"config_groups": {"group_0": {"weights": [1]}}}, "group_0.weights = [1]"),
        ("gptq", {"dynamic": ["x"]}, "dynamic = ['x'] | a JSON object"),
        ("gptq", {"dynamic": {"+:x": None}}, "dynamic.+:x = None | a JSON object"),
        ("w4a16", in_groups(num_bits=2), "config_groups.group_0.weights.num_bits = 2"),
        ("w4a16", in_groups(type="float"), "weights.type = 'float' | 'int'"),
        ("w4a16", in_groups(strategy="tensor_group"), "strategy = 'tensor_group'"),
        ("fp8", {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size = [128]"),
    ],
)
def test_a_configuration_is_refused(name: str, change: Any, words: str, copied: Any) -> None:
    """Before weights are read."""
    folder, _ = copied(name)
    edit = change if callable(change) else lambda config: config.update(change)
    edit_json(folder / "config.json", lambda config: edit(config["quantization_config"]))
    with refused(ConfigError, f"{words} | in 16 bits"):
        EngineArgs(str(folder)).create_engine_config("cpu")


@pytest.mark.parametrize(
    ("name", "fields", "tensors", "words"),
    [
        ("gptq", {}, {"scales": None}, "down_proj in model.safetensors: it has | no scales"),
        ("gptq", {"group_size": 32}, {}, "3 groups | group_size is 32"),
        ("gptq", {}, {"qzeros": torch.zeros(3, 8).int()}, "qzeros is [3, 8], expected [3, 16]"),
        ("gptq-order", {}, {"g_idx": torch.full((MLP,), 6).int()}, "g_idx | 6"),
        ("w4a16", {}, {"weight_packed": torch.zeros(128, 6).int()}, "6 words | 192 inputs"),
        ("w8a8", {}, {"weight": torch.zeros(128, 192)}, "float32 | expected int8 or float8"),
        ("gptq", {}, {"scales": torch.ones(128)}, "scales is [128], expected [any, any]"),
        ("awq", {}, {"qzeros": torch.zeros(16).int()}, "qzeros is [16], expected [6, any]"),
        ("awq", {}, {"qweight": torch.zeros(16).int()}, "qweight is [16]"),
        ("awq", {}, {"qweight": torch.zeros(192, 16).long()}, "qweight is int64 | int32"),
        ("gptq", {}, {"qweight": torch.zeros(24, 128).half()}, "qweight is float16 | int32"),
        ("gptq", {}, {"scales": torch.ones(3, 128).int()}, "scales is int32 | float16"),
        ("w4a16", {}, {"weight_shape": torch.ones(3).int()}, "weight_shape is [3], expected [2]"),
        ("w4a16", {}, {"weight_shape": torch.tensor(3)}, "weight_shape is [], expected [2]"),
        ("w4a16", {}, {"weight_shape": torch.ones(2)}, "weight_shape is float32 | int64"),
        ("w8a8", {}, {"weight": torch.zeros(128).char()}, "weight is [128]"),
        ("w8a8", {}, {"weight": torch.zeros(128, 0).char()}, "0 inputs | group_size is 0"),
        ("w8a8", {}, {"weight_scale": torch.ones(3)}, "weight_scale is [3] | [128, any]"),
        ("w8a8", {}, {"weight_shape": torch.ones(2).int()}, "weight_shape cannot be used"),
        ("w8a8-fp8", {}, {"weight_g_idx": MOVED}, "weight_g_idx cannot be used"),
        ("w8a8", {}, {"weight_scale": torch.full((128, 1), 1e5)}, "a scale | 65504 | float32"),
        ("fp8", {"weight_block_size": None}, {}, "[2, 3] | no size of blocks"),
        ("fp8", {"weight_block_size": [128, 128]}, {}, "[2, 3], expected [1, 2]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, fields: Any, tensors: Any, words: str, copied: Any
) -> None:
    folder, state = copied(name)
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(fields))
    for ending, value in tensors.items():
        state.pop(f"{DOWN}.{ending}", None)
        if value is not None:
            state[f"{DOWN}.{ending}"] = value
    save_file(state, folder / "model.safetensors")
    with refused(ModelLoadError, words):
        engine_ids(folder, [[5]])
