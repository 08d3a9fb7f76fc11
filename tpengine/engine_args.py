"""`EngineArgs`: what a user may set, checked, and turned into the engine's configuration.

A field is an option of the command line, too (`options.py` makes it), and `create_engine_config`
puts its value into a noun of `config.py`.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from tpengine import config as cfg
from tpengine.checkpoint import model_files, model_limits
from tpengine.checkpoint.gguf_file import model_name
from tpengine.checkpoint.kv_scales import read_scale_file
from tpengine.checkpoint.model_code import choose_model_impl, name_architecture
from tpengine.checkpoint.model_files import ModelFiles
from tpengine.checkpoint.pooling_files import causal_decoder_of, read_max_seq_length, read_pooling
from tpengine.checkpoint.quantization_config import FILE_FORMS, chosen_quantization
from tpengine.checkpoint.two_halves import read_encoder
from tpengine.errors import ConfigError, ModelLoadError, counted
from tpengine.logger import init_logger
from tpengine.options import Options, each, option, read_bundle

logger = init_logger(__name__)

GIB = 1 << 30
_MAX_GIB = 1 << 20
"""More than any machine has; as bytes it still fits into 64 bits."""
_AHEAD_FROM_S = 0.004
"""On two cores with two ranks: docs/figures.md."""
_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
Config = TypeVar("Config")
_HOST = re.compile(r"(\*\.)?[\w.-]+(:\d{1,5})?|\[[0-9a-f:.]+\](:\d{1,5})?")
_GPUS, _RANKS, _RAY = "GPUs", "ranks in processes of their own", "ranks on Ray"
_DRAFTS, _MATCHES = "a speculative_model", "[ngram] and [suffix]"
_NUM_DRAFTS = 8
_MAX_PICTURES = 16
_LONGEST_MATCH = {"[ngram]": 8, "[suffix]": 32}


class ReadModel(NamedTuple):
    """What the files of a model say.

    Attributes:
        folder: of the model.
        hf_config: see `ModelConfig`.
        implementation: whose code runs it: tpengine or transformers.
        pooling: None: it generates.
        encoder: None: it has one half.
    """

    folder: str
    hf_config: dict[str, Any]
    implementation: str
    pooling: cfg.PoolingConfig | None
    encoder: cfg.EncoderConfig | None = None


@dataclass
class EngineArgs(Options):
    """Arguments of an engine; each is also a command-line option (`max_num_seqs` is
    `--max-num-seqs`), with the same default and the text below the field in `--help`.

    `compat/arguments.py` derives from this class the one that users get: it has vLLM's names too.
    """

    group: ClassVar[str] = "engine"

    model: str = option(cfg.EMBEDDED_MODEL)
    """Folder in Hugging Face layout, GGUF file, or hub name; default: the small model inside
    tpengine."""
    served_model_name: str | Sequence[str] | None = option(None, takes_words=True)
    """Names of the model for clients of a server; answers carry the first; default: the folder's,
    the GGUF file's without its ending, or the hub's."""
    tokenizer: str | None = option(None)
    """Folder, GGUF file or hub name of the tokenizer; default: the model's."""
    skip_tokenizer_init: bool = option(False)
    """Load no tokenizer: prompts must be ids, and outputs have no text."""
    tokenizer_mode: str = option("auto", ("auto", "slow"))
    """Which tokenizer of the model: auto prefers the fast one, slow takes the other."""
    trust_remote_code: bool = option(False)
    """Run Python code from the model's folder: configuration, tokenizer, and the model itself where
    neither tpengine nor transformers has its class."""
    download_dir: str | None = option(None)
    """Folder for models of the hub; default: the hub's own cache."""
    load_format: str = option(
        "auto", tuple(model_files.WEIGHT_FILES), advice="convert other forms to safetensors"
    )
    """Form of the weights: safetensors reads *.safetensors; pt reads pytorch_model*.bin, of which
    only tensors are unpickled; auto reads the first of the two that is there, else the folder's
    GGUF file; dummy makes random weights, for benchmarks. A GGUF file as the model is read with
    each but dummy."""
    dtype: str = option("auto", cfg.DTYPES)
    """Type of weights and activations; float is float32, half is float16; auto takes bfloat16 where
    the device computes in it, else float32. On CPU float16 is the same as auto."""
    kv_cache_dtype: str = option("auto", cfg.KV_CACHE_DTYPES, advice="fp8 is e4m3")
    """Type of K and V in the cache: auto is the model's dtype; fp8, on a GPU, holds twice as many
    tokens; fp8_e4m3 is the same; int8, on a CPU, holds nearly twice as many as bfloat16."""
    quantization_param_path: str | None = option(None, only_for=_GPUS)
    """JSON file with the scales of K and V for --kv-cache-dtype fp8, in the schema of vLLM 0.5.4;
    default: those of the checkpoint, else 1."""
    seed: int = option(0, at_least=-(1 << 63), at_most=(1 << 64) - 1)
    """Seed of requests without their own, so that each run gives the same text."""
    max_model_len: int | None = option(None, at_least=1)
    """Most tokens of a sequence, prompt and output together; default: the model's length."""
    tensor_parallel_size: int = option(1, at_least=1, short="-tp")
    """Number of ranks that share each layer, each with its own device."""
    pipeline_parallel_size: int = option(1, at_least=1, short="-pp")
    """Number of stages into which the layers are divided: see docs/pipelines.md. There are as many
    ranks as this times --tensor-parallel-size."""
    block_size: int = option(16, cfg.BLOCK_SIZES)
    """Tokens in a block of the KV cache."""
    enable_prefix_caching: bool = option(True)
    """Reuse blocks of the KV cache for prompts that begin with the same tokens."""
    disable_sliding_window: bool = option(False)
    """Let every layer see all tokens, of which there are then at most as many as the window has."""
    swap_space: float | None = option(None, at_least=0, at_most=_MAX_GIB, unit=" GiB")
    """GiB of host memory per rank for the blocks of preempted sequences, 0 for none; default: the
    smaller of 4 and 10 % of the free memory, divided by the ranks on the machine."""
    gpu_memory_utilization: float | Sequence[float] = option(
        0.9, more_than=0, at_most=1, only_for=_GPUS
    )
    """Share of a GPU's memory that the engine may use, in (0, 1]; or one per rank: 0.9,0.8."""
    max_num_batched_tokens: int | None = option(
        None, at_least=1, at_most=1 << 20, advice="longer prompts are computed in more steps"
    )
    """Most tokens that a step computes; default: 512 on CPU, 8192 on a GPU, half of that with
    pipeline stages, or the model's length if that is more and prompts are not chunked."""
    max_num_seqs: int = option(256, at_least=1, at_most=1 << 16, advice="more requests wait")
    """Most sequences that run at once."""
    max_logprobs: int = option(20, at_least=-1)
    """Most logprobs of a token that a request may ask for; -1: no limit."""
    disable_log_stats: bool = option(False)
    """No line of statistics while the engine runs."""
    revision: str | None = option(None)
    """Branch, tag or commit of a model of the hub; default: its main branch."""
    rope_scaling: Mapping[str, Any] | None = option(None, metavar="JSON")
    """Rotary scaling instead of the model's own, such as {"rope_type": "linear", "factor": 2.0}."""
    rope_theta: float | None = option(None, more_than=0)
    """Rotary base instead of the model's own."""
    tokenizer_revision: str | None = option(None)
    """Branch, tag or commit of a tokenizer of the hub; default: --revision."""
    quantization: str | None = option(None, (*cfg.QUANTIZATIONS, *FILE_FORMS), short="-q")
    """Rounds weights when they are read: int8 has a scale per output, int4 one per 32 inputs (-g64,
    -g128: per 64, 128). On CPU inputs have 8 bits too, and table and head of the vocabulary have 8;
    on a GPU these have 16. Default: as the file stores them, whose form may be named too."""
    enforce_eager: bool = option(False)
    """Never record decode steps (CUDA graphs; on CPU: lists of operations)."""
    enable_lora: bool = option(False)
    """Serve LoRA adapters in PEFT's format: see docs/lora.md."""
    max_loras: int = option(1, at_least=1, at_most=1 << 10)
    """Slots for adapters on the device: the most that a step may have."""
    max_lora_rank: int = option(16, at_least=1, at_most=512)
    """Highest rank of an adapter; slots have its size."""
    lora_extra_vocab_size: int = option(0, (0,), advice="adapters with tokens are not served")
    """Only 0: adapters have no tokens of their own."""
    lora_dtype: str = option("auto", ("auto", "float32", "bfloat16"))
    """Type of adapters on the device; auto is the model's."""
    max_cpu_loras: int | None = option(None, at_least=1)
    """Most adapters that each rank keeps in host memory; default: max_loras."""
    device: str = option("auto", cfg.DEVICES)
    """Where the model runs; auto takes a GPU if the machine has one."""
    ignore_patterns: str | Sequence[str] | None = option(None, metavar="PATTERN")
    """Files of a model of the hub that are not fetched, as in '*.safetensors'."""
    preemption_mode: str | None = option("swap", cfg.PREEMPTION_MODES)
    """What happens to a request that must give its blocks up because the cache is full: swap copies
    them to swap_space; recompute drops them and computes its tokens again, which is tens of times
    slower; auto, or None, swaps only requests with more than one sequence. Without room in
    swap_space every mode recomputes."""
    scheduler_delay_factor: float = option(0.0, at_least=0)
    """Let waiting prompts gather while requests run: none is admitted until the one that arrived
    first has waited longer than this factor times the time of the latest step with prompts, with
    and without --enable-chunked-prefill. Steps with prompts become fewer, and hold streams up less
    often; first tokens come later. 0: prompts never wait for this."""
    enable_chunked_prefill: bool | None = option(True)
    """Compute long prompts over more than one step, together with decodes."""
    speculative_model: str | None = option(None)
    """Guess next tokens, and compute several in one step; no output changes: see docs/lookahead.md.
    [ngram] guesses what followed the last tokens where they stood before in prompt or output,
    [suffix] by frequency, and in earlier outputs of the same client too; a folder, GGUF file or hub
    name is a small model of the same vocabulary, which guesses, on CPU."""
    num_speculative_tokens: int | None = option(None, at_least=1, at_most=64, only_for=_DRAFTS)
    """Most tokens of a sequence that are guessed for a step, of which it takes those that are
    likely enough; default: 8."""
    ngram_prompt_lookup_max: int | None = option(None, at_least=1, only_for=_MATCHES)
    """Most last tokens that are looked for; default: 8 for [ngram], 32 for [suffix]."""
    ngram_prompt_lookup_min: int | None = option(None, at_least=1, only_for=_MATCHES)
    """Fewest last tokens that are looked for; default: 1."""
    speculative_disable_by_batch_size: int | None = option(None, at_least=2, only_for=_DRAFTS)
    """Guess nothing in steps with more sequences; default: wherever it makes steps no faster, and
    with as many sequences as pipeline stages."""
    speculative_max_model_len: int | None = option(None, at_least=1, only_for=_DRAFTS)
    """Guess nothing for sequences of so many tokens or more; default: no limit."""
    speculative_draft_tensor_parallel_size: int | None = option(
        None, at_least=1, short="-spec-draft-tp", only_for=_DRAFTS
    )
    """Only the model's own --tensor-parallel-size."""
    num_lookahead_slots: int = option(0, at_least=0, only_for=_DRAFTS)
    """Most places in the KV cache that a step reserves for guessed tokens of a sequence; 0: as many
    as --num-speculative-tokens."""

    _: KW_ONLY
    calibrate: bool = option(True)
    """Measure inputs of layers while the model writes short texts, and choose the scales of int4 by
    them, so that it loses about half as much. Weights are read twice. Has an effect on int4 alone,
    on CPU, for models that generate, without an encoder."""
    task: str = option("auto", cfg.TASKS)
    """What the model is for: generate text, or embed, score or classify it; auto is what its files
    say. A model that generates can embed too, by its last token. See docs/embeddings.md."""
    pooling_type: str | None = option(None, cfg.POOLINGS)
    """Which hidden states of a prompt stand for it in an embedding, a score or a class: the first,
    the last, or the mean of all; default: as the model's files say."""
    limit_mm_per_prompt: Mapping[str, Any] | None = option(None, metavar="JSON")
    """Most pictures of a prompt of a model that sees, such as {"image": 4}; default: {"image": 16}.
    With 0 the vision tower is not loaded. See docs/pictures.md."""
    allowed_media_hosts: str | Sequence[str] | None = option(None, takes_words=True)
    """Hosts from which pictures are fetched, as in example.org, *.example.org, 10.0.0.5:8000; a
    name must lead to public addresses alone; default: none, pictures come in data: URLs."""
    max_encoder_tokens: int = option(4096, at_least=1)
    """Most tokens of pictures whose features are awaited at once; one picture may have more."""
    encoder_share: float = option(0.2, more_than=0, at_most=1)
    """Share of the time that a model's vision tower has beside running requests, which keep the
    rest of their speed; 1: they wait for it. `LLM` has 1 unless told otherwise: its prompts arrive
    together, so that they are done sooner."""
    encoder_cache: float = option(0.25, more_than=0)
    """GiB for features of pictures in float32, on each rank of the first stage. With a dtype of 16
    bits as many features are kept, in half of the memory."""
    scheduling_policy: str = option("fcfs", cfg.SCHEDULING_POLICIES)
    """Order of requests: fcfs is first come, first served; priority serves the lowest number first,
    with a limit on how often a request is overtaken."""
    fairness: str = option("none", ("none", "owner"))
    """What the engine's time and memory are shared by: none serves requests as the scheduling
    policy says; owner gives each client (by its token, certificate or address) a share by its
    weight, so that no other client's requests keep it waiting."""
    cpu_kv_cache_space: float | Sequence[float] | None = option(
        None, more_than=0, at_most=_MAX_GIB, unit=" GiB"
    )
    """GiB of KV cache of a rank on CPU, or one per rank: 2,1; default: the smaller of 4 and 40 % of
    the free memory, divided by the ranks on the machine."""
    num_device_blocks_override: int | None = option(None, at_least=1)
    """Number of blocks of the KV cache, without regard to memory; default: as many as fit."""
    stream_interval: int = option(1, at_least=1)
    """New tokens that a stream reports together, after the first; more than 1 saves the driver time
    for each message, and makes streams less even."""
    executor: str = option("auto", ("auto", "local", "processes", "ray"))
    """Where ranks run: local runs one rank in this process; processes starts a process per rank on
    this machine, without Ray; ray runs an actor per rank on a Ray cluster; auto takes ray for more
    than one rank, or processes if Ray is not installed."""
    ray_address: str | None = option(None, only_for=_RAY)
    """Address HOST:PORT of a Ray cluster, or local to start one; default: the cluster of this
    process, or one that `ray start` started on this machine, or a new local one. For TLS between
    the driver and the ranks, TPENGINE_RANK_TLS names a folder of certificates on every machine."""
    ray_placement_strategy: str = option("PACK", cfg.PLACEMENT_STRATEGIES, only_for=_RAY)
    """How ranks are spread over nodes, by Ray's names."""
    ray_bundle: str | None = option(None, only_for=_RAY)
    """Resources of one rank by Ray's names, as in 'GPU=1,my_accelerator=1'; default: GPU=1, or
    CPU=1 for ranks on CPU."""
    placement_timeout_s: float = option(60.0, more_than=0, unit=" seconds", only_for=_RAY)
    """Seconds to wait for resources of the cluster that are in use."""
    start_timeout_s: float = option(600.0, more_than=0, unit=" seconds", only_for=_RANKS)
    """Seconds that each phase of a rank's start may take."""
    step_timeout_s: float = option(30.0, more_than=0, unit=" seconds", only_for=_RANKS)
    """Smallest deadline of a step in seconds; it is 10 x the predicted time if that is more."""
    max_recoveries: int = option(10, at_least=0)
    """How often within --recovery-window a lost rank or its group is replaced and the requests go
    on; the next loss ends the engine."""
    recovery_window: float = option(600.0, more_than=0, unit=" seconds")
    """Seconds over which recoveries are counted."""
    recovery_timeout: float = option(600.0, more_than=0, unit=" seconds")
    """Seconds for which a lost group may be without a successor; attempts that fail are repeated
    until then, after 1, 2, 4 and at most 30 seconds."""
    pp_layer_partition: str | None = option(None, metavar="NUMBERS")
    """Layers of each stage, as in 10,12; default: by the size of layers and output head."""
    min_ranks: int | None = option(None, at_least=1, only_for=_RANKS)
    """Fewest ranks with which requests go on if lost ones find no room: a divisor of
    --tensor-parallel-size; default: all, so that a group never gets smaller."""
    spare_workers: int = option(0, at_least=0, only_for=_RANKS)
    """Actors kept ready with torch imported, so that lost ranks are replaced sooner on Ray; without
    Ray a template process does this, whatever is set."""
    keep_kv: str = option("safe", cfg.KEEP_KV, only_for=_RANKS)
    """When a new rank goes on with the memory of a lost one, so that nothing is computed again: on
    CPU, safe means not after a fault of its code, such as SIGSEGV, which may have written anywhere.
    On Ray, before Linux 6.15, safe is as never: the kernel does not tell how an actor ended. On a
    GPU only with always and one rank; no card has run this yet."""
    async_scheduling: bool | None = option(None)
    """Send ranks in processes of their own, and a GPU, the next step before they have answered this
    one, so that they do not wait for the driver; default: on a GPU, and on CPU while a step takes
    4 ms or more. With shorter ones driver and ranks would only compete for the cores."""
    attention_backend: str = option("auto", cfg.ATTENTION_BACKENDS, only_for=_GPUS)
    """Kernel for the attention of prompts on a GPU; auto takes the first of xformers, varlen
    (torch's FlashAttention) and sdpa that is installed and supports this model."""
    model_impl: str = option("auto", cfg.MODEL_IMPLS)
    """Whose code the model is: tpengine's own, or transformers' over tpengine's attention and
    linear layers; auto takes tpengine's where it has the architecture."""
    logprobs_mode: str = option("raw_logprobs", cfg.LOGPROBS_MODES)
    """Which log probabilities are reported, and rank the outputs of best_of: raw_logprobs are of
    the model's logits; processed_logprobs, as in vLLM 0.5.4, of what bias, bans, penalties,
    temperature and truncation made of them."""

    weight_cache: str | None = option(None, metavar="FOLDER")
    """On CPU: folder in which each rank keeps its packed weights, so that the next start with the
    same model and options copies them; default: the model's files are read and packed each time."""

    def __post_init__(self) -> None:
        paths = (
            "model tokenizer download_dir speculative_model quantization_param_path weight_cache"
        )
        for name in paths.split():
            if isinstance(getattr(self, name), os.PathLike):
                setattr(self, name, os.fspath(getattr(self, name)))
        if type(self.dtype).__module__ == "torch":
            self.dtype = str(self.dtype).removeprefix("torch.")
        for name in ("dtype", "load_format", "quantization", "tokenizer_mode"):
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, value.lower())
        if self.kv_cache_dtype == "fp8_e4m3":
            self.kv_cache_dtype = "fp8"

    @property
    def chosen_executor(self) -> str:
        """Where the ranks run: local, processes or ray."""
        if self.executor != "auto":
            return self.executor
        if self.world_size == 1:
            return "local"
        return "ray" if _is_installed("ray") else "processes"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def _layer_partition(self) -> tuple[int, ...] | None:
        text = self.pp_layer_partition
        if text is None:
            return None
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and int(part) for part in parts):
            must = "must be numbers of layers from 1, one for each stage, as in 10,12"
            raise ConfigError(f"pp_layer_partition = {text!r} {must}")
        return tuple(map(int, parts))

    def check_installed(self) -> None:
        """Raises ConfigError if ranks are to run on Ray, and it is missing."""
        if self.chosen_executor == "ray" and not _is_installed("ray"):
            wanted = f"{counted(self.world_size, 'rank')} with executor = 'ray' needs ray"
            raise ConfigError(f"{wanted}: install tpengine with its extra ray")

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the model for clients of a server; answers carry the first."""
        if self.served_model_name:
            return each(self.served_model_name)
        if self.model == cfg.EMBEDDED_MODEL:
            return ("embedded",)
        name = self.model.rstrip("/")
        is_path = self.model.startswith(("/", ".", "~")) or name.lower().endswith(".gguf")
        return (model_name(name.rpartition("/")[2]) if is_path else name,)

    def create_engine_config(self, device: str | None = None) -> cfg.EngineConfig:
        """Checks the arguments, reads the model's configuration and sets the defaults.

        Args:
            device: cpu or cuda, as the executor found it; None: `device` of the arguments, where
                auto is cuda if this machine has a GPU of NVIDIA's.

        Raises:
            ConfigError: an argument is out of range, or two contradict each other.
            ModelLoadError: the model's folder cannot be read.
        """
        if device is None:
            has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))  # torch knows more, and loads slowly
            detected = "cuda" if has_gpu else "cpu"
            device = detected if self.device == "auto" else self.device
        self.check()
        self._check_device(device)
        shares = each(self.gpu_memory_utilization)
        cache_bytes = self._cache_bytes
        model, executor = self._model_config(), self.chosen_executor
        parallel = self._named(
            cfg.ParallelConfig,
            rank_gpu_memory_utilization=shares if len(shares) > 1 else None,
            rank_cpu_kv_cache_bytes=cache_bytes if len(cache_bytes) > 1 else None,
            layer_partition=self._layer_partition,
            ranks=None if executor == "local" else self._named(cfg.RanksConfig),
            ray=self._ray_config() if executor == "ray" else None,
        )
        limits = (self.max_recoveries, self.recovery_window, self.recovery_timeout)
        recovery, kernels = cfg.RecoveryConfig(*limits), self._named(cfg.KernelConfig)
        scheduler, lora = self._scheduler_config(model, device), self._lora_config()
        cache = self._cache_config(model, scheduler, device)
        return cfg.EngineConfig(model, cache, parallel, scheduler, recovery, device, kernels, lora)

    def check(self) -> None:
        """Checks each argument, and the arguments against each other.

        Raises:
            ConfigError: see the message.
        """
        super().check()
        executor = self.chosen_executor
        if executor == "local" and self.world_size != 1:
            got = f"tensor_parallel_size = {self.tensor_parallel_size}"
            if self.tensor_parallel_size == 1:
                got = f"pipeline_parallel_size = {self.pipeline_parallel_size}"
            text = f"executor = 'local' runs one rank in this process, got {got}"
            raise ConfigError(f"{text}; use executor = 'processes', or leave it out")
        for name in ("gpu_memory_utilization", "cpu_kv_cache_space"):
            values = getattr(self, name)
            if isinstance(values, (list, tuple)) and len(values) != self.world_size:
                size, got = counted(self.world_size, "rank"), counted(len(values), "number")
                must = f"one number or one per rank: there are {size}, got {got}"
                raise ConfigError(f"{name} must be {must}")
        idle = [] if executor == "ray" else self.changed(only_for=_RAY)
        if idle or (executor == "local" and (idle := self.changed(only_for=_RANKS))):
            raise ConfigError(
                f"{idle[0]} has no effect with executor = {executor!r}; leave it out, or set "
                "executor='ray', or 'processes' for what is not for Ray alone (docs/ray.md)"
            )
        self._check_min_ranks()
        source, idle = self.speculative_model, self.changed(only_for=_MATCHES)
        if source is None and (idle := [*self.changed(only_for=_DRAFTS), *idle]):
            raise ConfigError(
                f"{idle[0]} has no effect without a speculative_model; leave it out, or set "
                "speculative_model='[ngram]', '[suffix]' or a small model"
            )
        if source not in (None, *cfg.LOOKAHEADS) and idle:
            text = f"{idle[0]} has no effect with speculative_model = {source!r}"
            raise ConfigError(f"{text}, a model; leave it out")
        draft_size = self.speculative_draft_tensor_parallel_size
        if draft_size not in (None, self.tensor_parallel_size):
            must = f"must be tensor_parallel_size = {self.tensor_parallel_size}"
            text = f"speculative_draft_tensor_parallel_size = {draft_size} {must}"
            raise ConfigError(f"{text}; leave it out")
        space, blocks = self.cpu_kv_cache_space, self.num_device_blocks_override
        if space is not None and blocks is not None:
            both = f"cpu_kv_cache_space = {space} and num_device_blocks_override = {blocks}"
            text = f"{both} each set the size of the cache; leave one of them unset"
            raise ConfigError(text)

    def _check_min_ranks(self) -> None:
        """Raises ConfigError if a group cannot go on with so few ranks."""
        least, size = f"min_ranks = {self.min_ranks}", self.tensor_parallel_size
        if self.min_ranks is None:
            return
        if self.min_ranks not in (sizes := cfg.group_sizes(size, 1)):
            text = f"{least} must divide tensor_parallel_size = {size}"
            raise ConfigError(f"{text}; use one of {', '.join(map(str, sizes))}")
        for name in ("pipeline_parallel_size", "quantization_param_path"):
            if (value := getattr(self, name)) not in (1, None):
                text = f"{least} has no meaning yet with {name} = {value!r}"
                raise ConfigError(f"{text}; leave one of them out")

    def _check_device(self, device: str) -> None:
        if self.cpu_kv_cache_space is not None and device != "cpu":
            raise ConfigError(
                f"cpu_kv_cache_space = {self.cpu_kv_cache_space} sizes the cache on CPU, the "
                f"device is {device}; leave it unset and use gpu_memory_utilization, or set "
                "device='cpu'"
            )
        if self.weight_cache is not None and device != "cpu":
            raise ConfigError(
                f"weight_cache = {self.weight_cache!r} keeps what is packed for a CPU, the device "
                f"is {device}; leave it unset, or set device='cpu'"
            )
        cfg.check_kv_cache_dtype(self.kv_cache_dtype, device)
        if cfg.lacks_arithmetic(self.dtype, device):
            logger.warning(
                "dtype = %r: a CPU has no arithmetic for it; the model computes as with dtype = "
                "'auto', in bfloat16 where the CPU has instructions for that, else in float32",
                self.dtype,
            )
        idle = self.changed(only_for=_GPUS) if device == "cpu" else []
        if self.async_scheduling and self._max_steps_in_flight(device) == 1:
            idle.append("async_scheduling = True, with the only rank in this process")
        if idle:
            logger.warning("no effect on CPU: %s", ", ".join(idle))

    def read_model(self) -> ReadModel:
        """Reads the model's configuration, in which the arguments replace what they name, and no
        weights.

        Raises:
            ConfigError: the architecture is not supported, or the ranks cannot share the model.
            ModelLoadError: the files cannot be fetched or read.
        """
        folder = self._files().find()
        hf_config = model_files.read_hf_config(folder, self.trust_remote_code)
        name_architecture(hf_config)
        encoder, pooling = read_encoder(folder, hf_config), None
        if encoder is None:
            pooling = read_pooling(folder, hf_config, self.task, self.pooling_type)
        else:
            self._check_two_halves(cfg.architecture_of(hf_config))
        if pooling is not None:
            hf_config["architectures"] = [causal_decoder_of(cfg.architecture_of(hf_config))]
        asked = self.model_impl, self.trust_remote_code
        implementation = choose_model_impl(hf_config, folder, *asked)
        if pooling is not None:
            self._check_pooling(pooling, hf_config, implementation)
        model_limits.check_division(hf_config, self.tensor_parallel_size, implementation)
        for size in cfg.group_sizes(self.tensor_parallel_size, self.min_ranks)[1:]:
            model_limits.check_division(
                hf_config, size, implementation, f"min_ranks = {self.min_ranks}"
            )
        stages = self.pipeline_parallel_size, self._layer_partition
        model_limits.check_stages(hf_config, *stages, implementation)
        model_limits.replace_rope(hf_config, self.rope_scaling, self.rope_theta)
        return ReadModel(folder, hf_config, implementation, pooling, encoder)

    def _check_pooling(
        self, pooling: cfg.PoolingConfig, hf_config: Mapping[str, Any], implementation: str
    ) -> None:
        """Raises ConfigError if a model that makes no tokens is asked for what only others do."""
        name = f"task = {pooling.task!r}"
        if implementation == "transformers" or "whole_model" in hf_config:
            text = f"{name}: {cfg.architecture_of(hf_config)} does not run on tpengine's own code"
            raise ConfigError(f"{text}; docs/embeddings.md lists what does")
        if self.speculative_model is not None:
            raise ConfigError(f"{name} makes no tokens; leave speculative_model out")
        if self.enable_lora and cfg.is_encoder(hf_config):
            text = f"enable_lora: {cfg.architecture_of(hf_config)} is an encoder"
            raise ConfigError(f"{text}, which takes no adapters; leave it out")

    def _check_two_halves(self, name: str) -> None:
        """Raises ConfigError if a model with an encoder and a decoder is asked for what it does not
        do."""
        asked = {
            f"task = {self.task!r}": self.task not in ("auto", "generate"),
            f"pooling_type = {self.pooling_type!r}": self.pooling_type is not None,
            "enable_lora": self.enable_lora,
            f"speculative_model = {self.speculative_model!r}": self.speculative_model is not None,
            f"pipeline_parallel_size = {self.pipeline_parallel_size}": self.pipeline_parallel_size
            > 1,
        }
        for option_text, is_asked in asked.items():
            if is_asked:
                text = f"{option_text} does not fit {name}, which has an encoder and a decoder"
                raise ConfigError(f"{text}; leave it out")

    def find_tokenizer(self, folder: str) -> str | None:
        """Returns the folder of the tokenizer, for a model in `folder`; None: none is wanted.

        Raises:
            ModelLoadError: it cannot be fetched or read.
        """
        if self.skip_tokenizer_init or not (self.tokenizer or self.tokenizer_revision):
            return None if self.skip_tokenizer_init else folder
        revision = self.tokenizer_revision or self.revision
        name = self.tokenizer or self.model
        return replace(self._files(), name=name, revision=revision, what="tokenizer").find()

    def _files(self) -> ModelFiles:
        return ModelFiles(self.model, self.download_dir, self.revision, self.trust_remote_code)

    def _model_config(self) -> cfg.ModelConfig:
        folder, hf_config, implementation, pooling, encoder = self.read_model()
        asked = (self.max_model_len, self.disable_sliding_window)
        max_model_len = model_limits.resolve_max_model_len(hf_config, *asked)
        if pooling is not None and self.max_model_len is None:
            max_model_len = min(max_model_len, read_max_seq_length(folder) or max_model_len)
        tokenizer = self.find_tokenizer(folder)
        self._files().fetch_weights(folder, self.load_format, each(self.ignore_patterns))
        rounding = chosen_quantization(self.quantization, hf_config, folder)
        is_int4, writes = (rounding or "").startswith("int4"), pooling is None and encoder is None
        return self._named(
            cfg.ModelConfig,
            model=folder,
            tokenizer=tokenizer,
            hf_config=hf_config,
            max_model_len=max_model_len,
            end_token_ids=model_files.read_end_token_ids(folder, hf_config),
            quantization=rounding,
            calibrates=self.calibrate and is_int4 and writes and self.load_format != "dummy",
            model_impl=implementation,
            pooling=pooling,
            encoder=encoder,
        )

    def _cache_config(
        self, model: cfg.ModelConfig, scheduler: cfg.SchedulerConfig, device: str
    ) -> cfg.CacheConfig:
        """The KV cache. An encoder needs only blocks for what its steps in flight compute; a prefix
        cannot be left out if the pooling reads it."""
        shares, cache_bytes = each(self.gpu_memory_utilization), self._cache_bytes
        swap_bytes = None if self.swap_space is None else int(self.swap_space * GIB)
        num_blocks, reuses = self.num_device_blocks_override, self.enable_prefix_caching
        reuses = reuses and model.encoder is None  # K and V depend on the encoder's prompt
        if model.pooling is not None:
            reuses = reuses and model.pooling.pooling == "last" and not model.is_encoder
        if model.is_encoder:
            swap_bytes = 0
            of_step = -(-scheduler.max_num_batched_tokens // self.block_size)
            steps = scheduler.max_steps_in_flight + 1
            num_blocks = num_blocks or of_step * steps + scheduler.max_num_seqs
        return self._named(
            cfg.CacheConfig,
            gpu_memory_utilization=min(shares),
            cpu_kv_cache_bytes=min(cache_bytes) if cache_bytes else None,
            swap_space_bytes=swap_bytes,
            num_device_blocks_override=num_blocks,
            enable_prefix_caching=reuses,
            kv_scales=self._kv_scales(model, device),
        )

    @property
    def _cache_bytes(self) -> tuple[int, ...]:
        return tuple(int(space * GIB) for space in each(self.cpu_kv_cache_space))

    def _kv_scales(
        self, model: cfg.ModelConfig, device: str
    ) -> tuple[tuple[float, ...], ...] | None:
        path, kind = self.quantization_param_path, self.kv_cache_dtype
        if path is None or (kind != "fp8" and device == "cpu"):  # `_check_device` has warned
            return None
        if kind != "fp8":
            idle = f"quantization_param_path = {path!r} has no effect with kv_cache_dtype ="
            raise ConfigError(f"{idle} {kind!r}; use 'fp8', or leave it out")
        model_type = str(model.hf_config.get("model_type"))
        return read_scale_file(path, model_type, self.tensor_parallel_size, model.num_layers)

    def _scheduler_config(self, model: cfg.ModelConfig, device: str) -> cfg.SchedulerConfig:
        budget, max_model_len = self.max_num_batched_tokens, model.max_model_len
        is_chunked = self.enable_chunked_prefill is not False
        if budget is None:
            budget = _DEFAULT_BATCHED_TOKENS[device]
            if self.pipeline_parallel_size > 1:  # the parts of a prompt fill the stages
                budget //= 2
            if not is_chunked or model.is_encoder:
                budget = max(budget, max_model_len)
            if model.encoder is not None:
                budget = max(budget, model.encoder.max_len + self.max_num_seqs)
        if model.encoder is not None and budget <= model.encoder.max_len:
            raise ConfigError(
                f"max_num_batched_tokens = {budget} must be at least {model.encoder.max_len + 1}: "
                "the longest prompt of the encoder and a token of the decoder; raise it, or leave "
                "it out"
            )
        if not is_chunked and self.fairness == "owner":
            rule = "fairness = 'owner' shares the tokens of each step"
            text = f"{rule}, and prompts that are not chunked take whole steps"
            raise ConfigError(f"{text}; enable chunked prefill, or set fairness='none'")
        if (not is_chunked or model.is_encoder) and budget < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens = {budget} is less than max_model_len = {max_model_len}: "
                "a prompt that is not chunked could never be scheduled; raise the first, lower "
                "the second, or enable chunked prefill"
            )
        # A rank in another process sends 13 bytes for each, in an answer of at most 256 MiB.
        most = 20_000_000 // (budget + self.max_num_seqs)
        wanted = model.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        if self.chosen_executor != "local" and wanted > most:
            raise ConfigError(
                f"max_logprobs = {self.max_logprobs} for each of max_num_batched_tokens = {budget} "
                f"and max_num_seqs = {self.max_num_seqs} is more than a rank can send for a step; "
                f"set it to at most {most}, or lower the other two"
            )
        return self._named(
            cfg.SchedulerConfig,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_chunked_prefill=is_chunked,
            whole_prompts=model.is_encoder,
            policy=self.scheduling_policy,
            preemption_mode=self._preemption_mode(model),
            delay_factor=self.scheduler_delay_factor,
            max_steps_in_flight=self._max_steps_in_flight(device),
            ahead_from_s=self._ahead_from_s(device),
            num_stages=self.pipeline_parallel_size,
            max_loras=self.max_loras if self.enable_lora else 0,
            lookahead=self._lookahead_config(model, device),
            **self._picture_fields(model, device),
        )

    def _preemption_mode(self, model: cfg.ModelConfig) -> str:
        """A prompt whose tokens are summed up is computed again, as the sum is not swapped."""
        if model.pooling is not None and model.pooling.pooling != "last":
            return "recompute"
        return self.preemption_mode or "auto"

    def _picture_fields(self, model: cfg.ModelConfig, device: str) -> dict[str, Any]:
        """The fields of `SchedulerConfig` that are about pictures."""
        limits = self.limit_mm_per_prompt or {}
        most, others = limits.get("image", _MAX_PICTURES), limits.keys() - {"image"}
        if model.encoder is not None and model.encoder.sound and limits == {"audio": 1}:
            others = set()  # each prompt has one sound
        if others or type(most) is not int or most < 0:
            text = f"limit_mm_per_prompt = {limits!r} must hold a number of pictures, 0 or more"
            raise ConfigError(f'{text}, and nothing else; write it as in {{"image": 4}}')
        if not model.reads_pictures:
            return {}
        if not most:
            return {"why_text_alone": "limit_mm_per_prompt allows 0 pictures; raise it"}
        assert model.whole is not None, "`reads_pictures` says so"
        are_whole = model.whole["model_type"] in cfg.WHOLE_PICTURES
        processor, why = model_files.read_processor(model.model, "image_processor"), ""
        if processor is None:
            why = "the model's folder has no preprocessor_config.json; fetch it and start again"
        elif are_whole and device != "cpu":
            why = "no kernel for GPUs attends to whole pictures; use device = 'cpu'"
        if processor is None or why:
            logger.warning("%s reads text alone: %s", model.model, why)
            return {"why_text_alone": why}
        row_bytes = 4 * model.picture_row_size  # of the widest dtype; auto is decided on the ranks
        num_rows = int(self.encoder_cache * GIB) // row_bytes
        hosts = ",".join(each(self.allowed_media_hosts)).lower().replace(",", " ").split()
        if wrong := [host for host in hosts if not _HOST.fullmatch(host)]:
            text = f"allowed_media_hosts: {wrong[0]!r} names no host"
            raise ConfigError(f"{text}; write it as in example.org, *.example.org, 10.0.0.5:8000")
        room, share = (most, self.max_encoder_tokens, num_rows), self.encoder_share
        return {"pictures": cfg.PicturesConfig(*room, processor, share, are_whole, hosts)}

    def _lookahead_config(self, model: cfg.ModelConfig, device: str) -> cfg.LookaheadConfig | None:
        source = self.speculative_model
        if source is None:
            return None
        draft_model = None
        if source not in cfg.LOOKAHEADS:
            draft_model = self._draft_model_config(source, model, device)
        longest = self.ngram_prompt_lookup_max or _LONGEST_MATCH.get(source, 1)
        shortest = self.ngram_prompt_lookup_min or 1
        if shortest > longest:
            text = f"ngram_prompt_lookup_min = {shortest} is more than"
            raise ConfigError(f"{text} ngram_prompt_lookup_max = {longest}; raise the second")
        most = self.num_speculative_tokens or _NUM_DRAFTS
        # With drafts one step at a time is sent, so that stages wait for each other. They do so
        # anyway while there are fewer sequences than stages.
        most_with_drafts = self.speculative_disable_by_batch_size or self.pipeline_parallel_size - 1
        return self._named(
            cfg.LookaheadConfig,
            num_speculative_tokens=min(most, self.num_lookahead_slots or most),
            ngram_prompt_lookup_max=longest,
            ngram_prompt_lookup_min=shortest,
            speculative_disable_by_batch_size=most_with_drafts or None,
            speculative_max_model_len=self.speculative_max_model_len or model.max_model_len,
            draft_model=draft_model,
        )

    def _draft_model_config(
        self, source: str, model: cfg.ModelConfig, device: str
    ) -> cfg.ModelConfig:
        """The configuration of the model that guesses tokens of another one.

        Raises:
            ConfigError: it cannot.
            ModelLoadError: its files cannot be read.
        """
        name = f"speculative_model = {source!r}"
        known = ", ".join(map(repr, cfg.LOOKAHEADS))
        if (meant := f"[{source.lower().strip('[] ')}]") in cfg.LOOKAHEADS:
            raise ConfigError(f"{name} is unknown; did you mean {meant!r}?")
        if not source or source.startswith("["):
            raise ConfigError(f"{name} is unknown; use {known}, or a small model")
        if self.pipeline_parallel_size > 1:
            text = f"{name}: a model makes drafts with pipeline_parallel_size = 1 only"
            raise ConfigError(f"{text}; use one of {known}")
        if device != "cpu":
            text = f"{name}: a model makes drafts on CPU only, the device is {device}"
            raise ConfigError(f"{text}; use one of {known}")
        if model.sliding_window is not None:
            text = f"{name}: all layers of the model have a window of {model.sliding_window} tokens"
            raise ConfigError(f"{text}, and drafts need the blocks before it; use one of {known}")
        arguments = replace(
            self,
            model=source,
            revision=None,
            quantization=None,
            rope_scaling=None,
            rope_theta=None,
            max_model_len=None,
            skip_tokenizer_init=True,
        )
        try:
            drafts = arguments._model_config()
        except ModelLoadError as error:
            raise ModelLoadError(f"{name} cannot be read: {error}") from error
        for head in ("Medusa", "Eagle", "EAGLE", "MLPSpeculator"):
            if head in drafts.architecture:
                text = f"{name} is a head of the type {drafts.architecture}, not a model"
                raise ConfigError(f"{text}; use one of {known}, or a small model")
        if drafts.vocab_size != model.vocab_size:
            sizes = f"{drafts.vocab_size} tokens, the model has {model.vocab_size}"
            raise ConfigError(f"{name} has {sizes}; use a model of the same vocabulary")
        if drafts.max_model_len < model.max_model_len:
            text = f"{name} has {drafts.max_model_len} positions, and sequences have up to"
            raise ConfigError(f"{text} {model.max_model_len}; lower max_model_len")
        return replace(drafts, max_model_len=model.max_model_len)

    def _max_steps_in_flight(self, device: str) -> int:
        """On CPU a rank in the driver's own thread computes nothing while the driver plans."""
        is_apart = device == "cuda" or self.chosen_executor != "local"
        is_ahead = self.async_scheduling is not False and is_apart
        return self.pipeline_parallel_size + is_ahead

    def _ahead_from_s(self, device: str) -> float:
        """Stages work only if each has a step."""
        is_measured = self.async_scheduling is None and device == "cpu"
        return _AHEAD_FROM_S if is_measured and self.pipeline_parallel_size == 1 else 0.0

    def _lora_config(self) -> cfg.LoRAConfig | None:
        if not self.enable_lora:
            return None
        in_host = self.max_cpu_loras or self.max_loras
        if in_host < self.max_loras:
            text = f"max_cpu_loras = {in_host} is less than max_loras = {self.max_loras}"
            raise ConfigError(f"{text}, which all come from host memory; raise it, or leave it out")
        return self._named(cfg.LoRAConfig, max_cpu_loras=in_host)

    def _ray_config(self) -> cfg.RayConfig:
        bundle = None if self.ray_bundle is None else read_bundle(self.ray_bundle)
        return cfg.RayConfig(self.ray_placement_strategy, bundle, self.placement_timeout_s)

    def _named(self, config_class: Callable[..., Config], **others: Any) -> Config:
        """A configuration; each field is the argument of its name, unless `others` has it."""
        names = inspect.signature(config_class).parameters.keys() & vars(self).keys()
        return config_class(**{name: getattr(self, name) for name in names} | others)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@dataclass
class AsyncEngineArgs(EngineArgs):
    """Arguments of an `AsyncLLMEngine`, or of a server's engine."""

    disable_log_requests: bool = option(False)
    """No line in the log when a request ends."""
