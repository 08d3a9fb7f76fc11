"""A `config.json` that is read without transformers gives what transformers reads from it."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny_llama import TinyLlama
from support.variants import VARIANTS, Variant
from support.zoo import ZOO
from transformers import AutoConfig

import tpengine
from tpengine import EngineArgs, SamplingParams
from tpengine.checkpoint.model_defaults import (
    _DEFAULTS,
    OWN_SAMPLING,
    complete_config,
    sampling_defaults,
)
from tpengine.checkpoint.model_files import ModelFields, read_end_token_ids, read_hf_config
from tpengine.checkpoint.model_limits import check_division
from tpengine.config import EMBEDDED_MODEL, ModelConfig
from tpengine.errors import ConfigError, ModelLoadError
from tpengine.layers.rotary import rope_parameters

ROTARY = {"rope_parameters", "rope_scaling", "rope_theta"}
COMPUTED = {"id2label", "head_dim", "num_key_value_heads", "word_embed_proj_dim"}
"""Fields that `ModelConfig` or the model computes if they are absent."""
NOT_READ = {"bos_token_id", "n_head", "n_layer", "pretraining_tp", "transformers_version"}
"""Words that the package uses for something else than a field of these architectures."""


@functools.cache
def words_in_the_package() -> set[str]:
    """Every string of the package: what is no such string cannot be read from a config. Those of
    the models that have no table are left out."""
    paths = list(Path(tpengine.__file__).parent.rglob("*.py"))
    others = ("fallback", "gguf")
    trees = [ast.parse(p.read_text()) for p in paths if not any(o in str(p) for o in others)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def of_transformers(folder: Path) -> ModelFields:
    config = AutoConfig.from_pretrained(folder)
    fields = ModelFields(json.loads(config.to_json_string(use_diff=False)))
    return ModelFields({name: fields[own] for name, own in config.attribute_map.items()} | fields)


def facts(hf_config: ModelFields) -> dict[str, Any]:
    """All that the package can find out, of fields in any spelling."""
    model = ModelConfig("", None, "", False, hf_config, "", 0, 0, "", frozenset())
    names = sorted(words_in_the_package() - ROTARY - COMPUTED - NOT_READ)
    values = {name: hf_config.get(name) or None for name in names}  # False is as good as absent
    values["heads"] = (model.total_num_kv_heads, model.head_dim)
    values["rotary"] = rope_parameters(hf_config) if ROTARY & hf_config.keys() else None
    return values


def assert_read_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = facts(of_transformers(folder))
    with monkeypatch.context() as patch:
        patch.setattr(AutoConfig, "from_pretrained", None)  # a call of it would fail
        actual = facts(read_hf_config(str(folder), trust_remote_code=False))
    assert actual == expected


WITH_TABLE = [v for v in VARIANTS if complete_config({"model_type": v.model_type})]
MODELS: list[Variant | TinyLlama] = [*WITH_TABLE, *ZOO.values()]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: getattr(model, "name", str(model)))
def test_written_models(
    model: Variant | TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.write(tmp_path)
    assert_read_alike(tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", sorted(_DEFAULTS))
def test_defaults_of_an_almost_empty_config(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert_read_alike(tmp_path, monkeypatch)


def test_an_architecture_without_a_table_is_read_through_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt_neox", "hidden_size": 128})
    )
    hf_config = read_hf_config(str(tmp_path), trust_remote_code=False)
    assert (hf_config["hidden_size"], hf_config["vocab_size"]) == (128, 50432)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": "256"}, {"num_attention_heads": None}, {"rms_norm_eps": True},
        {"architectures": 5}, {"architectures": "LlamaForCausalLM"}, {"head_dim": "a"},
        {"head_dim": -16}, {"num_attention_heads": 0}, {"num_key_value_heads": 0},
        {"num_hidden_layers": 0}, {"vocab_size": -1}, {"intermediate_size": 0},
        {"max_position_embeddings": -4}, {"rms_norm_eps": 0.0}, {"rms_norm_eps": math.nan},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_another_type_or_range_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads(Path(EMBEDDED_MODEL, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    name, value = next(iter(wrong.items()))
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{name} must.*{value!r}$"):
        EngineArgs(str(tmp_path)).read_model()


def write_config(folder: Path, **fields: Any) -> EngineArgs:
    """A Llama's `config.json`, without the fields that are ..., and its arguments."""
    config = json.loads(Path(EMBEDDED_MODEL, "config.json").read_text()) | fields
    kept = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return EngineArgs(str(folder))


@pytest.mark.parametrize(
    ("named", "model_type", "architecture"),
    [
        (..., "llama", "LlamaForCausalLM"),
        (None, "qwen2", "Qwen2ForCausalLM"),
        ([], "gpt2", "GPT2LMHeadModel"),
        (["LLaMAForCausalLM"], "llama", "LlamaForCausalLM"),
        (["PHIForCausalLM"], "phi", "PhiForCausalLM"),
    ],
)
def test_the_type_decides_if_no_class_is_named(
    named: Any, model_type: str, architecture: str, tmp_path: Path
) -> None:
    args = write_config(tmp_path, architectures=named, model_type=model_type)
    assert args.read_model()[1]["architectures"] == [architecture]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"architectures": ["LlamaForTokenClassification"]}, "its model_type is 'llama'"),
        ({"architectures": ["OwnForCausalLM"], "auto_map": {}}, "its model_type is 'llama'"),
        ({"architectures": ["RwkvForCausalLM"]}, "decoder of model_type 'llama' is LlamaFor"),
        ({"architectures": ..., "model_type": "t5"}, "none named.*it has an encoder and a decoder"),
    ],
    ids=str,
)
def test_a_class_that_exists_is_not_another(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        write_config(tmp_path, **fields).read_model()


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 1 << 30},
        {"num_hidden_layers": 1 << 30, "model_type": "qwen2"},
        {"n_layer": 5000, "n_head": 1 << 40, "model_type": "gpt2"},
        {"num_local_experts": 4097, "model_type": "mixtral"},
        {"text_config": {"num_hidden_layers": 1 << 30}, "model_type": "gemma3"},
    ],
    ids=str,
)
def test_numbers_of_parts_that_no_model_has(fields: dict[str, Any], tmp_path: Path) -> None:
    """They are refused before a list of that length is made."""
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read: \w+ must be at most"):
        write_config(tmp_path, **fields).read_model()


@pytest.mark.parametrize("value", [[[2]], {}, "</s>", True])
def test_end_tokens_are_ids(value: Any, tmp_path: Path) -> None:
    message = f"eos_token_id = {re.escape(repr(value))} in "
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelLoadError, match=message + "generation_config.json"):
        read_end_token_ids(str(tmp_path), {})
    with pytest.raises(ModelLoadError, match=message + "config.json"):
        read_end_token_ids(str(tmp_path), {"eos_token_id": value})


def test_a_window_of_0_is_none() -> None:
    raw = ModelFields(sliding_window=0)
    assert ModelConfig("", None, "", False, raw, "", 0, 0, "", frozenset()).sliding_window is None


def test_a_rope_theta_of_null_is_the_default() -> None:
    fields = complete_config({"model_type": "llama", "rope_theta": None})
    assert fields["rope_parameters"] == {"rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("recommended", "fields"),
    [
        ({}, OWN_SAMPLING),
        (
            {"eos_token_id": 2, "repetition_penalty": 1.1},
            {**OWN_SAMPLING, "repetition_penalty": 1.1},
        ),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": True}, {}),
        ({"do_sample": True, "top_k": 20, "min_p": None}, {"top_k": 20}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"max_new_tokens": 9, "top_k": 0}, {"max_tokens": 9, "top_k": -1}),
    ],
)
def test_sampling_defaults(recommended: dict[str, Any], fields: dict[str, Any]) -> None:
    defaults, source = sampling_defaults("", recommended, max_tokens=50)
    assert defaults == {"max_tokens": 50, **fields}
    SamplingParams(**defaults)
    assert ("tpengine" in source) == (fields.get("temperature") == 0.7)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json of /x .*temperature.*'hot'"):
        sampling_defaults("/x", recommended | {"do_sample": True, "temperature": "hot"})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "implementation", "sizes"),
    [
        (9, 3, "tpengine", [1, 3, 9]),
        (8, 2, "tpengine", [1, 2, 4, 8]),
        (8, 2, "transformers", [1, 2]),
        (12, None, "tpengine", [1, 2, 3, 4, 6, 12]),
        (6, 4, "transformers", [1, 2]),
    ],
    ids=["SmolLM2", "replicated KV heads", "never replicated", "OPT", "uneven"],
)
def test_sizes_that_ranks_can_share(
    heads: int, kv_heads: int | None, implementation: str, sizes: list[int]
) -> None:
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    for size in range(1, heads + 2):
        if size in sizes:
            check_division(fields, size, implementation)
            continue
        listed = ", ".join(map(str, sizes))
        message = f"^{heads} attention heads and .*= {size}; sizes that can: {listed}$"
        with pytest.raises(ConfigError, match=message):
            check_division(fields, size, implementation)


def test_sizes_that_fewer_ranks_can_share(tmp_path: Path) -> None:
    """Six ranks divide twelve, but do not share four KV heads, as twelve do."""
    TinyLlama(hidden_size=192, num_heads=12, num_kv_heads=4).write(tmp_path)
    EngineArgs(str(tmp_path), tensor_parallel_size=12, min_ranks=12).read_model()
    message = r"4 KV heads cannot be divided over 6 ranks of min_ranks = 4; sizes that can: 1, 2"
    with pytest.raises(ConfigError, match=message):
        EngineArgs(str(tmp_path), tensor_parallel_size=12, min_ranks=4).read_model()


def test_kv_heads_divide_the_heads() -> None:
    fields = {"num_attention_heads": 2, "num_key_value_heads": 3}
    check_division(fields, 1, "transformers")  # heads that share a latent have no KV heads
    with pytest.raises(ConfigError, match=r"num_attention_heads = 2 .*num_key_value_heads = 3"):
        check_division(fields, 1, "tpengine")
