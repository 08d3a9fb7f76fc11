"""Models on transformers' own code over our cache, compared with transformers."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import all_decoders
from support.all_decoders import decoder_classes, run_all, try_class, write_model
from support.engines import open_llm
from support.matrix import only
from support.messages import refused, said
from support.tiny_llama import edit_json
from torch import nn

from tpengine import EngineArgs
from tpengine.checkpoint.loader import load_model
from tpengine.checkpoint.model_code import choose_model_impl
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import ConfigError, ModelLoadError
from tpengine.layers.weights import Weights
from tpengine.models.fallback import model
from tpengine.worker.gpu.attention_plans import check_attention

ARCHITECTURES = dict(decoder_classes())
RUNNING = {
    "gpt_neox": "runs",  # fused q, k and v, parallel halves
    "cohere2": "runs",  # alternating windows, scaled logits
    "olmo2": "runs",  # norms over all heads, for which ranks gather
    "bert": "no base_model_tp_plan",  # learned positions, a head of several layers
    "deepseek_v3": "by 'packed_colwise', which no layer",  # heads of 24 elements, V of 16
    "gemma4_text": "runs",  # layers that share K and V, heads of two sizes, sliced masks
    "sarvam_moe": "by 'packed_colwise', which no layer",  # q, k and v are one tensor of the file
    "gemma3n_text": "activation_sparsity_pattern",  # the plan of transformers gives other tokens
}
"""By model type: what becomes of two ranks."""
REFUSED = {
    "mamba": "keeps a state beside K and V",
    "bart": "positions that it counts itself",
    "roberta": "positions do not begin at 0",
    "gpt_oss": "takes s_aux",
    "bloom": "attention does not go through",
    "git": "attention does not go through",  # its class does not tell
    "lfm2": "layers of type conv",
}


@pytest.mark.parametrize(
    "model_type", only(("olmo2", "bert", "gemma4_text", "sarvam_moe"), RUNNING)
)
def test_a_class_runs_as_in_transformers(model_type: str) -> None:
    """Whole, chunked and preempted, and on two ranks."""
    verdict = try_class(model_type, ARCHITECTURES[model_type])
    assert verdict.runs, verdict.reason
    assert RUNNING[model_type] in verdict.ranks


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_does_not_fit_is_refused_by_name(model_type: str) -> None:
    verdict = try_class(model_type, ARCHITECTURES[model_type])
    assert verdict.is_typed
    assert REFUSED[model_type] in verdict.reason


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phi")
    write_model("phi", folder)
    return folder


def test_the_log_says_whose_code_runs(phi: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tpengine"):
        open_llm(phi, max_model_len=64, num_device_blocks_override=8)
    assert "PhiForCausalLM (transformers' code, tpengine has no code of its own" in caplog.text


def test_own_code_only(phi: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_impl = 'tpengine', which has .*BloomForCausalLM"):
        open_llm(phi, model_impl="tpengine")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "mine"}, "model_type 'mine' is unknown; docs/models.md lists"),
        ({"model_type": "t5"}, "model_type 't5' is unknown"),
        ({"is_encoder_decoder": True}, "the decoder of an encoder"),
        ({"vocab_size": None}, "convert its text part"),
    ],
)
def test_a_configuration_that_does_not_fit(change: dict[str, object], problem: str) -> None:
    fields = {"architectures": ["PhiForCausalLM"], "model_type": "phi", "num_attention_heads": 4}
    changed = fields | {"vocab_size": 128} | change
    hf_config = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(ConfigError, match=problem):
        choose_model_impl(hf_config, "folder", "auto")


def test_an_old_transformers_is_named(phi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.3.1.dev0")
    with pytest.raises(ConfigError, match=r"from transformers 5\.4 on, found 5\.3\.1\.dev0"):
        EngineArgs(str(phi)).create_engine_config()


def test_each_bad_tensor_is_named(phi: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((phi / "config.json").read_text())
    tensors = load_file(phi / "model.safetensors")
    missing = "model.layers.1.input_layernorm.bias"
    del tensors[missing]
    tensors["model.layers.0.mlp.fc1.weight"] = tensors["model.layers.0.mlp.fc1.weight"][:3]
    save_file(
        {**tensors, "model.extra": tensors["lm_head.bias"].clone()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelLoadError) as raised:
        open_llm(tmp_path)
    problems = str(raised.value)
    assert f"missing: {missing}" in problems
    assert "misshapen: model.layers.0.mlp.fc1.weight" in problems
    assert "unexpected: model.extra" in problems


def test_long_ropes_are_refused_only_beyond_their_limit(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    fields["rope_parameters"]["original_max_position_embeddings"] = 64
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="set max_model_len to at most 64"):
        open_llm(tmp_path, model_impl="transformers", max_model_len=65)
    open_llm(tmp_path, model_impl="transformers", max_model_len=64, num_device_blocks_override=8)


def test_a_gpu_is_asked_for_the_heads_that_the_cache_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys have 24 elements, the configuration's `head_dim` is 8."""
    write_model("deepseek_v3", tmp_path)
    config = EngineArgs(str(tmp_path)).create_engine_config("cpu")
    assert config.model.head_dim == 8
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    chosen = replace(config, device="cuda"), torch.bfloat16, torch.float8_e4m3fn
    weights = Weights(torch.bfloat16, torch.device("cpu"), ParallelState(0, 1))
    with pytest.raises(ConfigError, match="head_dim=32 with an fp8 KV cache"):
        load_model(config.model, weights, lambda model: check_attention(model, *chosen))


@pytest.mark.soak
def test_every_class_runs_or_is_refused() -> None:
    verdicts = list(run_all([]))
    assert [v for v in verdicts if not v.is_typed] == []
    assert sum(v.runs for v in verdicts) >= 40


def test_ranks_in_threads_leave_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits while the other builds its model."""
    register, waits, lock = nn.Module.register_parameter, threading.Event(), threading.Lock()

    class Turn:
        def __enter__(self) -> None:
            if lock.locked():
                waits.set()
            assert lock.acquire(timeout=60)

        def __exit__(self, *error: object) -> None:
            lock.release()

    monkeypatch.setattr(model, "_META_LOCK", Turn())

    def build() -> bool:
        with model._parameters_on_meta():
            return nn.Linear(1, 1).weight.is_meta

    with ThreadPoolExecutor(1) as pool:
        with model._parameters_on_meta():
            other = pool.submit(build)
            assert waits.wait(60)
        assert other.result(60)
    assert nn.Module.register_parameter is register
    assert not nn.Linear(1, 1).weight.is_meta


CONFIGURATION = """
import transformers
class OwnConfig(transformers.LlamaConfig):
    model_type = "own"
"""
MODEL = """
import torch, transformers
from .configuration_own import OwnConfig
class OwnForCausalLM(transformers.LlamaForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = torch.nn.Tanh()  # Llama has SiLU
class AloneForCausalLM(OwnForCausalLM):  # its attention is its own
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
"""
TRUSTED: dict[str, Any] = {"trust_remote_code": True}


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights of a Llama with another class."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    write_model("llama", tmp_path / "own")
    (tmp_path / "own/configuration_own.py").write_text(CONFIGURATION)
    (tmp_path / "own/modeling_own.py").write_text(MODEL)
    name_class(tmp_path / "own", "OwnForCausalLM")
    return tmp_path / "own"


def name_class(folder: Path, name: str, model_type: str = "own") -> None:
    code = {"AutoModelForCausalLM": f"modeling_own.{name}"}
    if model_type == "own":
        code["AutoConfig"] = "configuration_own.OwnConfig"
    named = {"architectures": [name], "model_type": model_type, "auto_map": code}
    edit_json(folder / "config.json", lambda fields: fields.update(named))


def test_code_of_the_folder_runs_as_in_transformers(own_folder: Path, caplog: Any) -> None:
    """Whole, chunked and preempted, and on two ranks; the log says so before it runs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(own_folder, **TRUSTED).eval()
    small = {"max_num_batched_tokens": 16, "num_device_blocks_override": 6}
    for num_ranks, args in ((1, {"model_impl": "auto"}), (1, small), (2, {})):
        with said(caplog) as messages, caplog.at_level("INFO", "tpengine"):
            assert not all_decoders.run(own_folder, model, num_ranks, **args, **TRUSTED)
        code = "modeling_own.OwnForCausalLM"
        assert messages.count(f"each rank runs Python code of the model's folder: {code}") == 1
        assert f"OwnForCausalLM (code of its own folder, {code}) on" in "\n".join(messages)


@pytest.mark.parametrize("model_type", ["own", "llama"])
def test_code_of_the_folder_runs_only_if_it_is_trusted(own_folder: Path, model_type: str) -> None:
    name_class(own_folder, "OwnForCausalLM", model_type)
    with refused(ConfigError, "needs code of its own | _own. | (--trust-remote-code)"):
        open_llm(own_folder)


def test_transformers_own_class_goes_before_code_of_the_folder() -> None:
    fields = {"architectures": ["PhiForCausalLM"], "model_type": "phi", "num_attention_heads": 4}
    fields |= {"vocab_size": 128, "auto_map": {"AutoModelForCausalLM": "modeling_phi.Phi"}}
    assert choose_model_impl(fields, "folder", "auto") == "transformers"


def test_code_that_our_attention_cannot_serve_is_refused(own_folder: Path) -> None:
    name_class(own_folder, "AloneForCausalLM")
    with refused(ConfigError, "Alone | does not go through transformers' attention interface"):
        open_llm(own_folder, num_device_blocks_override=8, **TRUSTED)
