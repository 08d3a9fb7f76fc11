"""The configuration that an engine is built from: frozen plain data, the same on every rank.

Facts that are known later (the device's dtype, numbers of blocks) travel as return values. Dtypes
and devices are strings, so that the driver needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpengine.errors import ConfigError, ModelLoadError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
BLOCK_SIZES = (8, 16, 32)
LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
QUANTIZATIONS = ("int8",)
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
DEVICES = ("auto", "cpu", "cuda")
PREEMPTION_MODES = ("auto", "recompute", "swap")
SCHEDULING_POLICIES = ("fcfs", "priority")
EXECUTORS = ("auto", "local", "ray")
KV_CACHE_DTYPES = ("auto", "fp8")
ATTENTION_BACKENDS = ("auto", "xformers", "varlen", "sdpa")
PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
MAX_PRIORITY = 1000
"""A request's priority is in [-MAX_PRIORITY, MAX_PRIORITY]."""
EMBEDDED_MODEL = str(Path(__file__).parent / "assets" / "embedded")
"""Folder of the small trained model inside the package, the default model."""
_HUB_TEXTS = ["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "vocab.bpe"]
"""Files of a hub model that hold its configuration, its tokenizer and the index of its weights."""
_HUB_WEIGHTS = {
    "auto": ["*.safetensors"],
    "safetensors": ["*.safetensors"],
    "pt": ["pytorch_model*.bin"],
    "dummy": [],
}
_HUB_DOUBLES = ["original/*", "consolidated*"]
"""Copies of the weights in other layouts, which some models have."""


@dataclass(frozen=True)
class ModelConfig:
    """The model, and how it is read.

    Attributes:
        model: local folder in Hugging Face layout; a hub name has been resolved to one.
        hf_config: the model's `config.json` as plain data, with its architecture's defaults.
        dtype: one of `DTYPES`; the worker's device decides what auto is.
        max_model_len: most tokens of a sequence, prompt and output.
        end_token_ids: ids that end a sequence, from `config.json` and `generation_config.json`.
        quantization: one of `QUANTIZATIONS`.
        max_logprobs: most log probabilities that a request may ask for at a position; -1: any
            number.
        logprobs_mode: one of `LOGPROBS_MODES`: of the logits as the model computed them, or after
            edits, temperature and truncation.
    """

    model: str
    tokenizer: str
    tokenizer_mode: str
    trust_remote_code: bool
    hf_config: Mapping[str, Any]
    dtype: str
    max_model_len: int
    seed: int
    load_format: str
    end_token_ids: frozenset[int]
    quantization: str | None = None
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"

    @property
    def architecture(self) -> str:
        """Class name in `config.json`, such as `LlamaForCausalLM`."""
        return str((self.hf_config.get("architectures") or ["(none named)"])[0])

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding, and of logits of one position."""
        return int(self.hf_config["vocab_size"])

    @property
    def num_layers(self) -> int:
        """Number of transformer layers, each with its own KV cache."""
        return int(self.hf_config["num_hidden_layers"])

    @property
    def total_num_heads(self) -> int:
        """Number of query heads of all ranks together."""
        return int(self.hf_config["num_attention_heads"])

    @property
    def total_num_kv_heads(self) -> int:
        """Number of key and value heads of all ranks together."""
        return int(self.hf_config.get("num_key_value_heads") or self.total_num_heads)

    @property
    def head_dim(self) -> int:
        """Number of elements of one head."""
        head_dim = self.hf_config.get("head_dim")
        return int(head_dim or int(self.hf_config["hidden_size"]) // self.total_num_heads)


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache.

    Attributes:
        block_size: tokens in a block.
        gpu_memory_utilization: share of a GPU's memory that the engine may use, weights included.
        cpu_kv_cache_bytes: size of a rank's cache on CPU; None: the smaller of 4 GiB and 40 % of
            the memory that machine and cgroup have free, divided by the ranks on that machine.
        num_device_blocks_override: number of blocks, without regard to memory.
        swap_space_bytes: host memory for the blocks of preempted sequences, per rank; None: the
            smaller of 4 GiB and 10 % of the free memory, divided by the ranks on that machine.
        enable_prefix_caching: whether prompts reuse full blocks with the same content.
        kv_cache_dtype: one of `KV_CACHE_DTYPES`; auto is the model's dtype, fp8 is e4m3.
    """

    block_size: int
    gpu_memory_utilization: float
    cpu_kv_cache_bytes: int | None
    num_device_blocks_override: int | None
    swap_space_bytes: int | None
    enable_prefix_caching: bool
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class KernelConfig:
    """Which kernels run.

    Attributes:
        attention_backend: one of `ATTENTION_BACKENDS`, for GPUs.
        enforce_eager: whether decode steps are never recorded.
    """

    attention_backend: str = "auto"
    enforce_eager: bool = False


@dataclass(frozen=True)
class RayConfig:
    """Where on a Ray cluster the ranks run, and time limits in seconds.

    Attributes:
        address: "host:port" of a cluster's head, "local" to start one, "auto" to find one; None:
            the cluster of this process, or one that runs on this machine, or a new local one.
        placement_strategy: one of `PLACEMENT_STRATEGIES`.
        bundle: resources of one rank by Ray's names; None: one GPU, or one CPU for device cpu.
        placement_timeout_s: wait for resources of the cluster that are in use.
        start_timeout_s: limit of each call before the first step.
        step_timeout_s: smallest limit of a step; it is 10 x the predicted time if that is more.
        spare_workers: number of processes that are kept ready to replace dead ranks.
    """

    address: str | None = None
    placement_strategy: str = "PACK"
    bundle: Mapping[str, float] | None = None
    placement_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    step_timeout_s: float = 30.0
    spare_workers: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks share the model, and the memory budget of each.

    Attributes:
        rank_gpu_memory_utilization: one value per rank; None: the cache's value for all.
        rank_cpu_kv_cache_bytes: one value per rank; None: the cache's value for all.
        ray: None: the only worker runs in the driver's process.
    """

    tensor_parallel_size: int
    rank_gpu_memory_utilization: tuple[float, ...] | None = None
    rank_cpu_kv_cache_bytes: tuple[int, ...] | None = None
    ray: RayConfig | None = None


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step, and the order of requests.

    Attributes:
        max_num_batched_tokens: most tokens computed in a step.
        max_num_seqs: most sequences that run at once.
        max_model_len: most tokens of a sequence, as in `ModelConfig`.
        enable_chunked_prefill: whether a prompt may be computed over more than one step, together
            with decodes.
        policy: one of `SCHEDULING_POLICIES`.
        preemption_mode: swap and recompute do so with every preempted request; auto swaps requests
            with more than one sequence. Without free host blocks, all are recomputed.
        stream_interval: new tokens of a sequence that are reported together; the first and the last
            are reported immediately.
        looks_ahead: whether workers are told which sequences the next step will probably hold.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_chunked_prefill: bool
    policy: str
    preemption_mode: str
    stream_interval: int = 1
    looks_ahead: bool = False


@dataclass(frozen=True)
class RecoveryConfig:
    """How often a lost group of ranks is rebuilt before the engine gives up.

    Attributes:
        max_recoveries: number of losses within any `window_s` seconds after which requests go on.
    """

    max_recoveries: int
    window_s: float


@dataclass(frozen=True)
class EngineConfig:
    """The whole configuration, as every worker gets it."""

    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    recovery: RecoveryConfig
    device: str
    kernels: KernelConfig = KernelConfig()

    def for_rank(self, rank: int) -> EngineConfig:
        """The same configuration with the memory budgets of one rank."""
        cache, parallel = self.cache, self.parallel
        if parallel.rank_gpu_memory_utilization is not None:
            share = parallel.rank_gpu_memory_utilization[rank]
            cache = replace(cache, gpu_memory_utilization=share)
        if parallel.rank_cpu_kv_cache_bytes is not None:
            cache = replace(cache, cpu_kv_cache_bytes=parallel.rank_cpu_kv_cache_bytes[rank])
        return replace(self, cache=cache)


def resolve_model_folder(
    model: str,
    download_dir: str | None,
    load_format: str = "dummy",
    trust_remote_code: bool = False,
    what: str = "model",
) -> str:
    """Returns the local folder of `model`, a folder or a hub name; fetches a model of the hub.

    Args:
        load_format: one of `LOAD_FORMATS`: which weights are fetched; dummy: no weights.
        trust_remote_code: whether Python files are fetched.
        what: the word for it in error messages.

    Raises:
        ModelLoadError: it is not a folder and cannot be fetched, or has no weights in that format.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.exists() or model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise ModelLoadError(
            f"{what} {model!r} is no folder; give a folder in Hugging Face layout or a hub name "
            "like 'owner/name'"
        )
    from huggingface_hub import snapshot_download

    weights = _HUB_WEIGHTS[load_format]
    patterns = [*_HUB_TEXTS, *weights, *(["*.py"] if trust_remote_code else [])]
    try:
        fetched = snapshot_download(
            model,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=_HUB_DOUBLES,
        )
    except Exception as error:
        raise ModelLoadError(
            f"{what} {model!r} is no local folder and could not be fetched from the hub "
            f"({type(error).__name__}: {error}); check the name, the network, or give a folder"
        ) from error
    if weights and not any(any(Path(fetched).glob(pattern)) for pattern in weights):
        other = "auto" if load_format == "pt" else "pt"
        raise ModelLoadError(
            f"the hub's model {model!r} has no {weights[0]} files, which load_format = "
            f"{load_format!r} reads; try load_format={other!r} (--load-format {other}), which "
            f"reads {_HUB_WEIGHTS[other][0]}"
        )
    return str(fetched)


def read_hf_config(folder: str, trust_remote_code: bool) -> dict[str, Any]:
    """Reads `config.json` through transformers, which adds the architecture's defaults.

    Raises:
        ModelLoadError: there is no `config.json`, or transformers cannot read it.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ModelLoadError(f"{folder} is no model folder: it has no config.json")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelLoadError(f"{folder}/config.json cannot be read: {error}") from error
    fields = dict(json.loads(config.to_json_string(use_diff=False)))
    # Some architectures use other names for common fields (BLOOM: n_layer).
    for common, own in config.attribute_map.items():
        fields.setdefault(common, fields.get(own))
    return fields


def read_end_token_ids(folder: str, hf_config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end a sequence, from `config.json` and `generation_config.json`.

    Raises:
        ModelLoadError: `generation_config.json` is not valid JSON.
    """
    sources = [hf_config.get("eos_token_id")]
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        try:
            sources.append(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
        except (ValueError, AttributeError) as error:
            raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    ids: set[int] = set()
    for source in sources:
        if source is not None:
            ids.update(source if isinstance(source, list) else [source])
    return frozenset(ids)


def resolve_max_model_len(hf_config: Mapping[str, Any], wanted: int | None) -> int:
    """Returns the length that the user wants, or the model's.

    The limit is the model's number of positions, times the factor of its rope scaling if that is
    linear or yarn.

    Raises:
        ConfigError: the user wants more than the limit.
    """
    limit = hf_config.get("max_position_embeddings")
    if wanted is None:
        return int(limit or 2048)
    if limit is None:
        return wanted
    scaling = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if (scaling.get("rope_type") or scaling.get("type")) in ("linear", "yarn"):
        original = scaling.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * scaling.get("factor", 1.0)))
    if wanted > limit:
        raise ConfigError(
            f"max_model_len = {wanted} is more than the {limit} positions of the model "
            "(max_position_embeddings in its config.json, times the factor of its rope scaling "
            "if that is linear or yarn); choose a smaller one"
        )
    return wanted
