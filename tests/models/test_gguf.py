"""GGUF files as models: every architecture, types of tensors, parts, and damaged files."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file
from support.gguf_files import write_gguf
from support.oracle import Oracle
from support.programs import python
from support.subjects import BY_NAME, Subject, Subjects, assert_equal_to_oracle, generate, load
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tpengine import EngineArgs
from tpengine.checkpoint.gguf_file import open_gguf
from tpengine.checkpoint.gguf_weights import read_tensors
from tpengine.checkpoint.model_files import ModelFiles, read_generation_config, read_hf_config
from tpengine.errors import ConfigError, ModelLoadError

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PARTS = {"n_layer": 2, "n_head": 4}
GPT2 = {"intermediate_size": None, "n_embd": 64, **PARTS, "n_positions": 128, "n_inner": 256}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
NOT_IN_BLOOM = ("intermediate_size", "max_position_embeddings")
MODELS: dict[str, dict[str, Any]] = {
    "bloom": {**PARTS, **dict.fromkeys(NOT_IN_BLOOM)},
    "gemma": {"head_dim": 32},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "num_hidden_layers": 6},  # the sixth sees all tokens
    "gpt2": GPT2,
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 32, "norm_topk_prob": True},
    "starcoder2": {"sliding_window": None},
}
IGNORED = {
    *("_name_or_path", "attention_dropout", "dtype", "hidden_dropout", "initializer_range"),
    *("n_inner", "pretraining_tp", "transformers_version", "use_cache"),
}
"""Fields that say nothing about the result of a forward pass."""


def make_model(model_type: str, folder: Path, **fields: Any) -> Path:
    config = AutoConfig.for_model(model_type, **{**SMALL, **MODELS.get(model_type, {}), **fields})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(name="small", scope="module")
def small_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "ab", *(f"<{i}>" for i in range(94))],
        "tokenizer.ggml.token_type": [1] * 3 + [3] * 94,
        "tokenizer.ggml.merges": ["a b"],
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "llama.expert_count": 0,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
    }
    return write_gguf(make_model("llama", folder), folder / "small.gguf", metadata=vocabulary)


@pytest.mark.parametrize("model_type", MODELS)
def test_every_architecture_is_read_as_it_was_written(model_type: str, tmp_path: Path) -> None:
    folder = make_model(model_type, tmp_path / "hf")
    path = write_gguf(folder, tmp_path / "model.gguf")
    state = load_file(folder / "model.safetensors")
    sources = {name: source for _, name, source in read_tensors(str(path), state)}
    assert sources.keys() == state.keys()
    for name, tensor in state.items():
        assert sources[name].get_shape() == list(tensor.shape), name
        torch.testing.assert_close(sources[name][:], tensor, atol=1e-6, rtol=0, msg=name)
    fields, expected = (read_hf_config(str(source), False) for source in (path, folder))
    differences = {
        name: (fields.get(name), value)
        for name, value in expected.items()
        if name not in IGNORED and fields.get(name) != value
    }
    assert {name: pair for name, pair in differences.items() if not _close(*pair)} == {}


def _close(value: Any, expected: Any) -> bool:
    """Whether two values mean the same: floats up to the rounding of float32."""
    if isinstance(value, float) and isinstance(expected, float):
        return abs(value - expected) <= 1e-6 * abs(expected)
    if isinstance(value, dict):
        return {"rope_type": "default"} | value == expected
    return [value] == expected or value == [expected]


@pytest.mark.parametrize(
    ("name", "tp_size"),
    [
        ("llama-llama3-old", 1),
        ("llama-yarn-old", 2),
        pytest.param("qwen2-tied", 2, marks=pytest.mark.soak),
        pytest.param("qwen3-head-dim", 1, marks=pytest.mark.soak),
        ("bloom-8-heads", 2),
        ("gemma3_text", 1),
        pytest.param("phi3-window", 1, marks=pytest.mark.soak),
        ("mixtral-odd", 2),
        ("gpt2", 1),
        ("starcoder2", 1),
    ],
)
def test_ids_as_of_the_folder(name: str, tp_size: int, subjects: Subjects, tmp_path: Path) -> None:
    if name in MODELS:
        wide = dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 448)
        oracle = Oracle(make_model(name, tmp_path / "hf", vocab_size=320, **wide))
        prompts = oracle.random_prompts((100, 30, 7), seed=1)
        subject = Subject(BY_NAME["llama-biases"], tmp_path / "hf", oracle, prompts)
    else:
        subject = subjects(BY_NAME[name])
    path = write_gguf(subject.folder, tmp_path / "model.gguf")
    file = Subject(subject.variant, path, subject.oracle, subject.prompts)
    assert_equal_to_oracle(file, generate(file, tp_size))


@pytest.mark.parametrize(
    ("arch", "text", "whole", "sections"),
    [
        ("qwen2vl", "qwen2", "qwen2_vl", [2, 3, 3]),
        ("qwen3vl", "qwen3", "qwen3_vl", [6, 5, 5]),
        ("qwen3vlmoe", "qwen3_moe", "qwen3_vl_moe", [6, 5, 5]),
        ("mistral3", "mistral", "mistral3", [1]),
    ],
)
def test_ids_as_of_a_model_that_sees_pictures(
    arch: str, text: str, whole: str, sections: list[int], tmp_path: Path
) -> None:
    """From a folder that holds a projector too."""
    hf, folder = tmp_path / "hf", tmp_path / "gguf"
    sizes = {"vocab_size": 320, "max_position_embeddings": 448, "sliding_window": None}
    half = Oracle(make_model(text, hf, **sizes))
    config = half.model.config.to_dict()
    config["rope_parameters"]["mrope_section"] = sections
    eyes = {"depth": 1, "num_heads": 2, "num_attention_heads": 2, "num_hidden_layers": 1}
    eyes |= dict.fromkeys(("hidden_size", "out_hidden_size", "embed_dim"), 64)
    fields = {"text_config": config, "vision_config": eyes, "tie_word_embeddings": False}
    both = AutoConfig.for_model(whole, **fields)
    seeing = AutoModelForImageTextToText.from_config(both, dtype=torch.float32)
    seeing.model.language_model.load_state_dict(half.model.model.state_dict())
    seeing.lm_head.load_state_dict(half.model.lm_head.state_dict())
    folder.mkdir()
    metadata = {f"{arch}.rope.dimension_sections": [*sections, 0], f"{arch}.n_deepstack_layers": 3}
    write_gguf(hf, folder / "model.gguf", metadata=metadata, arch=arch)
    write_gguf(hf, folder / "eyes.gguf", metadata={"general.architecture": "clip"})
    prompts = half.random_prompts((100, 30, 7), seed=1)
    oracle = Oracle(hf, model=seeing.eval())
    subject = Subject(BY_NAME["llama-biases"], folder, oracle, prompts)
    assert_equal_to_oracle(subject, generate(subject, dtype="float32"))


def test_projectors_are_left_aside_by_their_metadata(small: Path, tmp_path: Path) -> None:
    shutil.copy(small, model := tmp_path / "mmproj-model.gguf")
    for name, metadata in (
        ("a.gguf", {"general.architecture": "clip"}),
        ("b.gguf", {"general.type": "mmproj"}),
    ):
        eyes = write_gguf(small.parent, tmp_path / name, metadata=metadata)
        with pytest.raises(ModelLoadError, match=rf"{name} is a projector.*: mmproj-model\.gguf$"):
            read_hf_config(str(eyes), False)
        eyes.write_bytes(eyes.read_bytes()[:4096])  # no more of it is read to choose
    assert ModelFiles(str(tmp_path)).find() == str(model)
    model.unlink()
    with pytest.raises(ModelLoadError, match=r"a\.gguf is no whole GGUF file"):
        open_gguf(ModelFiles(str(tmp_path)).find())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_part_of_a_tensor_is_part_of_the_whole(kind: str, small: Path, tmp_path: Path) -> None:
    path = write_gguf(small.parent, tmp_path / "model.gguf", kind)
    names = ["model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"]
    sources = {name: source for _, name, source in read_tensors(str(path), names)}
    down = open_gguf(path).tensors["blk.0.ffn_down.weight"]
    assert down.type == kind
    whole = torch.from_numpy(dequantize(np.array(down.rows()), GGMLQuantizationType[kind]))
    torch.testing.assert_close(sources[names[0]][:], whole, rtol=0, atol=0)
    for columns in (slice(0, 48), slice(48, 96), slice(31, 33)):
        part = sources[names[0]][3:9, columns]
        torch.testing.assert_close(part, whole[3:9, columns], rtol=0, atol=0)
    heads = sources[names[1]]  # its rows have another order in the file
    torch.testing.assert_close(heads[32:48], heads[:][32:48], rtol=0, atol=0)


def test_a_folder_with_one_file_is_a_model(small: Path, tmp_path: Path) -> None:
    assert EngineArgs(str(small)).read_model()[0] == str(small)
    shutil.copy(small, tmp_path / "a.gguf")
    assert ModelFiles(str(tmp_path)).find() == str(tmp_path / "a.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert ModelFiles(str(tmp_path)).find() == str(tmp_path / "a.gguf")
    assert ModelFiles(str(tmp_path), what="tokenizer").find() == str(tmp_path)
    with pytest.raises(ModelLoadError, match=r"does not exist; .* the default tokenizer"):
        ModelFiles("models/missing.gguf", what="tokenizer").find()
    shutil.copy(small, tmp_path / "b.GGUF")
    with pytest.raises(ModelLoadError, match=r"holds 2 GGUF files \(a\.gguf, b\.GGUF\): name one"):
        ModelFiles(str(tmp_path)).find()


@pytest.mark.parametrize("is_numbered", [True, False], ids=["today", "without split.no"])
def test_parts_have_the_names_that_they_were_made_with(
    small: Path, tmp_path: Path, is_numbered: bool
) -> None:
    (parts := tmp_path / "parts").mkdir()
    names = [parts / f"s-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(names):
        metadata = {"split.no": number, "split.count": 2} if is_numbered else {}
        kept = partial(lambda wanted, name: name.startswith("blk.1.") == wanted, bool(number))
        write_gguf(small.parent, path, metadata=metadata, only=kept)
        if not number:
            with pytest.raises(ModelLoadError, match=r"s-00002-of-00002\.gguf"):
                open_gguf(path)
    assert ModelFiles(str(names[1])).find() == ModelFiles(str(parts)).find() == str(names[0])
    load(parts, max_model_len=64)
    assert open_gguf(names[1]).tensors.keys() == open_gguf(small).tensors.keys()
    if not is_numbered:
        return
    merged = write_gguf(small.parent, tmp_path / "merged.gguf", metadata={"split.count": 0})
    assert open_gguf(merged).tensors.keys() == open_gguf(small).tensors.keys()
    first, second = (path.read_bytes() for path in names)
    for name, content, part in (
        ("renamed.gguf", first, 0),
        ("renamed.gguf", second, 1),
        ("joined.gguf", first + second, 0),
        ("swapped-00001-of-00002.gguf", second, 1),
        ("more-00001-of-00003.gguf", first, 0),
    ):
        (tmp_path / name).write_bytes(content)
        problem = rf"{name} is a part of .*\(split.no = {part}, split.count = 2\).*llama-gguf-split"
        with pytest.raises(ModelLoadError, match=problem):
            open_gguf(tmp_path / name)


def test_what_a_file_is_shows_in_its_first_bytes(small: Path, tmp_path: Path) -> None:
    blob, text = tmp_path / "sha256-0f", tmp_path / "pointer.gguf"
    shutil.copy(small, blob)
    assert ModelFiles(str(blob)).find() == ModelFiles(str(tmp_path)).find() == str(blob)
    assert read_hf_config(str(blob), False) == read_hf_config(str(small), False)
    load(blob, max_model_len=64)
    text.write_text("version https://git-lfs")
    with pytest.raises(ModelLoadError, match=r"is not a GGUF file: it does .*b'version https://"):
        open_gguf(text)
    (tmp_path / "folder.gguf").mkdir()
    assert ModelFiles(str(tmp_path / "folder.gguf")).find() == str(tmp_path / "folder.gguf")


def test_sampling_and_end_tokens_come_from_the_file(small: Path, tmp_path: Path) -> None:
    assert read_generation_config(str(write_gguf(small.parent, tmp_path / "none.gguf"))) == {}
    tokens = [f"t{i}" for i in range(97)]
    tokens[5:9] = ["<|im_end|>", "<|im_start|>", "<|end_of_text|>", "<end_of_turn>"]
    metadata = {
        "general.sampling.temp": 0.25,
        "general.sampling.top_k": 40,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 8 + [4] + [1] * 88,
    }
    path = str(write_gguf(small.parent, tmp_path / "model.gguf", metadata=metadata))
    assert read_generation_config(path) == {"do_sample": True, "temperature": 0.25, "top_k": 40}
    assert read_hf_config(path, False)["eos_token_id"] == [2, 5, 7, 8, 9]


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"general.architecture": "mamba"}, "'mamba' of .* is not supported; supported: bloom"),
        ({"llama.block_count": 1 << 20}, "1048576 layers, tensors of 2"),
        ({"llama.embedding_length": 1 << 20}, r"token_embd.weight is \[97, 64\] instead of"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3 heads"),
        ({"llama.attention.head_count": "4"}, "must be one number"),
        ({"llama.attention.head_count": [4, 2]}, r"one number from 0 .* of different sizes"),
        ({"llama.expert_count": [4, 2]}, r"one number from 0 .* of different sizes"),
        ({"llama.rope.dimension_count": 17}, "17 dimensions of a head of 16 are rotated"),
        ({"llama.rope.scaling.type": ["yarn"]}, "the type must be one string"),
        ({"llama.rope.scaling.type": [1, 2]}, "the type must be one string"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor = 1.5 .* is not supported"),
        ({"tokenizer.ggml.tokens": 5}, "cannot be read"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": 5}, "cannot be read"),
        ({"llama.context_length": 1 << 31}, "must be one number from 0 to 16777216"),
        ({"general.alignment": 33}, "no power of 2"),
        ({"general.type": "adapter"}, "holds no model, its general.type is 'adapter'"),
        ({"general.type": "mmproj"}, r"is a projector: .* it is published beside this one"),
        ({"llama.attention.temperature_scale": 0.5}, r"temperature_scale = 0\.5 of .* supported"),
        ({"split.count": [2, 3]}, r"split\.count = \[2 3\]"),
        ({"llama.attention.causal": False}, "causal = False of .* is not supported"),
        ({"llama.logit_scale": 0.5}, r"logit_scale = 0\.5 of .* supported: 1\.0, 0\.0"),
        ({"llama.expert_gating_func": 2}, "expert_gating_func = 2"),
        ({"llama.attention.clamp_kqv": [8.0, 8.0]}, "clamp_kqv = "),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    metadata: dict[str, Any], problem: str, small: Path, tmp_path: Path
) -> None:
    path = write_gguf(small.parent, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises((ModelLoadError, ConfigError), match=problem):
        read_hf_config(str(path), False)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"rope_freqs.weight": np.ones(1 << 16, np.float32)}, r"\[65536\] instead of \[8\]"),
        ({"rope_freqs.weight": np.ones(8, np.float16)}, "rope_freqs.weight is not F32"),
        ({"rope_factors_long.weight": np.ones(8, np.float32)}, "rope_factors_long.weight alone"),
    ],
)
def test_factors_of_frequencies_are_checked(
    tensors: dict[str, Any], problem: str, small: Path, tmp_path: Path
) -> None:
    path = write_gguf(small.parent, tmp_path / "model.gguf", further=tensors)
    with pytest.raises(ModelLoadError, match=problem):
        read_hf_config(str(path), False)


def test_what_llama_cpp_reads_differently_from_transformers(small: Path, tmp_path: Path) -> None:
    metadata = {"general.sampling.top_k": -1, "llama.rope.scaling.attn_factor": 1.25}
    factors = {f"rope_factors_{kind}.weight": np.ones(8, np.float32) for kind in ("short", "long")}
    path = write_gguf(small.parent, tmp_path / "a.gguf", metadata=metadata, further=factors)
    assert read_generation_config(str(path)) == {"do_sample": True, "top_k": -1}
    assert read_hf_config(str(path), False)["rope_parameters"]["attention_factor"] == 1.25
    folder = make_model("gemma2", tmp_path / "gemma2")
    for window, expected in ((None, 4096), (0, None), (16, 16)):
        metadata = {"gemma2.attention.sliding_window": window}
        path = write_gguf(folder, tmp_path / f"{window}.gguf", metadata=metadata)
        assert read_hf_config(str(path), False)["sliding_window"] == expected
    for fields in ({"rope.scale_linear": 4.0}, {"rope.scaling.factor": 4.0}):
        metadata = {f"llama.{key}": value for key, value in fields.items()}
        path = write_gguf(small.parent, tmp_path / "linear.gguf", metadata=metadata)
        rope = read_hf_config(str(path), False)["rope_parameters"]
        assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)
        assert EngineArgs(str(path)).create_engine_config("cpu").model.max_model_len == 4 * 128
    for fields in ({"rope.scaling.type": "none"}, {"rope.scaling.type": "linear"}, {}):
        metadata = {f"llama.{key}": value for key, value in fields.items()}
        path = write_gguf(small.parent, tmp_path / "plain.gguf", metadata=metadata)
        assert "factor" not in read_hf_config(str(path), False)["rope_parameters"]
    metadata = {"llama.context_length": 1 << 22}
    path = write_gguf(small.parent, tmp_path / "b.gguf", metadata=metadata)
    with pytest.raises(ConfigError, match=r"names 4194304 positions, .* set max_model_len"):
        EngineArgs(str(path)).create_engine_config("cpu")


def test_an_unknown_type_of_tensor_is_named(small: Path, tmp_path: Path) -> None:
    data = bytearray(small.read_bytes())
    at = data.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 16
    for number, name in ((16, "IQ2_XXS"), (777, "number 777")):
        data[at : at + 4] = number.to_bytes(4, "little")
        (tmp_path / "bad.gguf").write_bytes(data)
        problem = rf"blk\.0\.ffn_down\.weight in .* has the type {name}.*supported: F32, F16"
        with pytest.raises(ModelLoadError, match=problem):
            load(tmp_path)


@pytest.mark.parametrize(
    "count", [32, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_damage_is_refused_with_bounded_memory(count: int, small: Path, tmp_path: Path) -> None:
    """In a process of its own: it may hold 1 GiB more than at its start, and must not die."""
    done = python("-m", "support.gguf_fuzz", small, tmp_path, count, timeout_s=3000)
    assert count // 4 < int(done.stdout.split()[-1]) <= count
