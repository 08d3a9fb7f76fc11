"""Makes the quantised models of `tests/data/quantized`, each by a tool of other people.

Command: `make_quantized.py TOOL FOLDER [NAME ...]`, with a Python that has the tool: `auto-round`,
`gptqmodel`, `llmcompressor` or `transformers`. For each model it writes `FOLDER/NAME` with
`config.json`, `model.safetensors` and `expected.safetensors`. The last holds what does not come
from our code: for each quantised weight W the products `W cos(0, 1, 2, ...)` of the numbers that
the tool's own layer multiplies with, and prompts with the greedy ids that transformers in float32
gives with these numbers. Its metadata name the versions.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.oracle import Oracle
from support.tiny_llama import TinyLlama, write_word_tokenizer

os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # by itself it takes one on two cores, and then fails
_LENGTHS = (70, 19, 3)
_VOCAB_SIZE = 128


def write_source(folder: Path, tied: bool) -> None:
    """The model in 16 bits. Two ranks cut its MLP at 96, in the middle of a group of 64."""
    TinyLlama(
        head_dim=32,
        hidden_size=128,
        intermediate_size=192,
        vocab_size=_VOCAB_SIZE,
        max_positions=256,
        tied=tied,
    ).write(folder)
    write_word_tokenizer(folder, 260)  # the tools ask for one
    model = LlamaForCausalLM.from_pretrained(folder).half()
    model.save_pretrained(folder)


def calibration() -> list[list[int]]:
    """Token ids that the tools run through the model."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, _VOCAB_SIZE, (64, 64), generator=generator).tolist()


def by_autoround(source: Path, target: Path, format: str, **kwargs: Any) -> Any:
    """Rounds to nearest. The numbers are read by another tool, GPTQModel."""
    from auto_round import AutoRound

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    rounding = AutoRound(
        model, tokenizer, iters=0, disable_opt_rtn=True, device_map="cpu", **kwargs
    )
    rounding.quantize_and_save(str(target), format=format)
    (config,) = target.glob("**/config.json")
    for file in list(config.parent.iterdir()):
        if file.parent != target:
            shutil.move(file, target / file.name)
    return _load_by_gptqmodel(target)


def by_gptqmodel(source: Path, target: Path, **kwargs: Any) -> Any:
    """GPTQ with calibration, so that the order of the inputs that `desc_act` keeps is not plain."""
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(source), QuantizeConfig(device="cpu", **kwargs))
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in calibration()]
    model.quantize(samples, batch_size=1, calibration_data_min_length=1)
    model.save(str(target))
    return _load_by_gptqmodel(target)


def _load_by_gptqmodel(folder: Path) -> Any:
    from gptqmodel import BACKEND, GPTQModel

    backend = BACKEND.AWQ_TORCH if folder.name.startswith("awq") else BACKEND.GPTQ_TORCH
    return GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=torch.float16).model


def by_llmcompressor(source: Path, target: Path, **scheme: Any) -> Any:
    """Quantises as a scheme of compressed-tensors says."""
    from compressed_tensors.quantization import QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    samples = Dataset.from_list([{"input_ids": ids} for ids in calibration()])
    groups = {"group_0": QuantizationScheme(targets=["Linear"], **scheme)}
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    oneshot(model=model, dataset=samples, recipe=recipe, num_calibration_samples=64)
    model.save_pretrained(target, save_compressed=True)
    return AutoModelForCausalLM.from_pretrained(
        target,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )


def by_transformers(source: Path, target: Path) -> Any:
    """fp8 in blocks of 64 by 64; those of 128 would leave most of these weights in 16 bits."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # It asks for a GPU, which the conversion itself does not use.
    FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **kwargs: None
    asked = FineGrainedFP8Config(weight_block_size=(64, 64))
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=asked, device_map="cpu"
    )
    model.save_pretrained(target)
    return AutoModelForCausalLM.from_pretrained(
        target,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(weight_block_size=(64, 64), dequantize=True),
    )


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Parameters of a plain Llama with the numbers of a tool's layers, in float32."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.numel():
            found[f"{name}.weight"] = weight.detach().float()
        elif hasattr(module, "qweight"):
            found[f"{name}.weight"] = _dequantize(module).T
    return {name: one.clone().contiguous() for name, one in found.items()}


def _dequantize(layer: Any) -> torch.Tensor:
    """Returns the numbers of a layer of GPTQModel, `[in, out]`; scales are widened first, because
    it multiplies in their dtype."""
    layer.scales = layer.scales.float()
    if hasattr(layer, "dequantize_weight"):
        weight: torch.Tensor = layer.dequantize_weight()
        return weight
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    words = layer.qweight, layer.qzeros, layer.scales
    whole: torch.Tensor = dequantize_gemm(*words, layer.bits, layer.group_size)
    return whole


def write_expected(model: Any, target: Path, tool: str) -> None:
    """Writes what the tool's numbers give."""
    torch.set_num_threads(1)  # the model is tiny
    weights = weights_of(model)
    config = AutoConfig.from_pretrained(target).to_dict()
    config.pop("quantization_config")
    plain = LlamaForCausalLM(type(AutoConfig.from_pretrained(target)).from_dict(config)).float()
    missing = plain.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set()), missing
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        oracle = Oracle(Path(folder))
        prompts = oracle.prompts(_LENGTHS, seed=1)
        oracle.assert_discerning(prompts)
        answers = oracle.answers(prompts)
    saved = {}
    for name, weight in weights.items():
        is_head = name == "lm_head.weight" and not config["tie_word_embeddings"]
        if name.endswith("_proj.weight") or is_head:
            wave = torch.arange(weight.shape[1], dtype=torch.float64).cos()
            saved[name] = (weight.double() @ wave).float()
    for i, answer in enumerate(answers):
        saved[f"prompt {i}"] = torch.tensor(answer.prompt, dtype=torch.int16)
        saved[f"answer {i}"] = torch.tensor(answer.token_ids, dtype=torch.int16)
    packages = {tool, "transformers", "torch"}
    save_file(saved, target / "expected.safetensors", {one: version(one) for one in packages})


_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group"}
_PER_TOKEN: dict[str, Any] = {"strategy": "token", "dynamic": True, "symmetric": True}
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
_AWQ = {"format": "auto_awq", "bits": 4}
_GPTQ = {"format": "auto_gptq"}
_PLAIN = {"sym": False, "desc_act": False}
MODELS: dict[str, dict[str, tuple[Callable[..., Any], bool, dict[str, Any]]]] = {
    "auto-round": {
        "awq": (by_autoround, True, _AWQ | {"group_size": 32, "sym": False}),
        "gptq": (by_autoround, True, _GPTQ | {"bits": 4, "group_size": 64, "sym": True}),
        "gptq-8": (by_autoround, True, _GPTQ | {"bits": 8, "group_size": -1, "sym": True}),
    },
    "gptqmodel": {
        "gptq-zeros": (by_gptqmodel, True, _PLAIN | {"bits": 4, "group_size": 32}),
        "gptq-8-zeros": (by_gptqmodel, True, _PLAIN | {"bits": 8, "group_size": 32}),
        "gptq-order": (
            by_gptqmodel,
            True,
            {"bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        ),
        "gptq-v2-head": (
            by_gptqmodel,
            False,
            _PLAIN | {"bits": 4, "group_size": 64, "format": "gptq_v2", "lm_head": True},
        ),
    },
    "llmcompressor": {
        "w4a16": (
            by_llmcompressor,
            True,
            {"weights": _INT4 | {"group_size": 64, "symmetric": True}},
        ),
        "w4a16-zeros": (
            by_llmcompressor,
            True,
            {"weights": _INT4 | {"group_size": 32, "symmetric": False}},
        ),
        "w8a8": (
            by_llmcompressor,
            True,
            {
                "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True},
                "input_activations": _PER_TOKEN | {"num_bits": 8},
            },
        ),
        "fp8-block": (
            by_llmcompressor,
            True,
            {
                "weights": _FP8 | {"strategy": "block", "block_structure": [128, 128]},
                "input_activations": _FP8 | _PER_TOKEN,
            },
        ),
        "w8a8-fp8": (
            by_llmcompressor,
            True,
            {
                "weights": _FP8 | {"strategy": "channel"},
                "input_activations": _FP8 | _PER_TOKEN,
            },
        ),
    },
    "transformers": {"fp8": (by_transformers, True, {})},
}
"""By the tool's package and the folder's name: what calls it, whether embedding and output head are
tied, and what is asked of it."""


def make(tool: str, root: Path, names: list[str]) -> None:
    """Makes the models of a tool, or some of them."""
    for name in names or MODELS[tool]:
        call, tied, asked = MODELS[tool][name]
        with tempfile.TemporaryDirectory() as work:
            source, target = Path(work, "source"), Path(work, name)
            write_source(source, tied)
            write_expected(call(source, target, **asked), target, tool)
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            for file in ("config.json", "model.safetensors", "expected.safetensors"):
                shutil.copy(target / file, folder / file)
        print(f"made {name}", flush=True)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
