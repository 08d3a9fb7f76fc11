"""The configuration that an engine is built from: frozen plain data, the same on every rank.

Facts that are known later (the device's dtype, numbers of blocks) travel as return values. Dtypes
and devices are strings, so that the driver needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpengine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
BLOCK_SIZES = (8, 16, 32)
LOOKAHEADS = ("[ngram]", "[suffix]")
QUANTIZATIONS = ("int8", "int4", "int4-g64", "int4-g128")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
DEVICES = ("auto", "cpu", "cuda")
PREEMPTION_MODES = ("auto", "recompute", "swap")
SCHEDULING_POLICIES = ("fcfs", "priority")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")
MODEL_IMPLS = ("auto", "tpengine", "transformers")
ATTENTION_BACKENDS = ("auto", "xformers", "varlen", "sdpa")
PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ARCHITECTURES = {
    "BloomForCausalLM": "tpengine.models.bloom:BloomForCausalLM",
    "Gemma2ForCausalLM": "tpengine.models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "tpengine.models.gemma:Gemma3ForCausalLM",
    "GemmaForCausalLM": "tpengine.models.gemma:GemmaForCausalLM",
    "GPT2LMHeadModel": "tpengine.models.gpt2:GPT2LMHeadModel",
    "GPTNeoXForCausalLM": "tpengine.models.gpt_neox:GPTNeoXForCausalLM",
    "GraniteForCausalLM": "tpengine.models.granite:GraniteForCausalLM",
    "LlamaForCausalLM": "tpengine.models.llama:LlamaForCausalLM",
    "MinistralForCausalLM": "tpengine.models.mistral:MinistralForCausalLM",
    "MistralForCausalLM": "tpengine.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "tpengine.models.mistral:MixtralForCausalLM",
    "Olmo2ForCausalLM": "tpengine.models.olmo2:Olmo2ForCausalLM",
    "OPTForCausalLM": "tpengine.models.opt:OPTForCausalLM",
    "Phi3ForCausalLM": "tpengine.models.phi:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "tpengine.models.qwen:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "tpengine.models.qwen:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "tpengine.models.qwen:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "tpengine.models.qwen:Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM": "tpengine.models.smollm3:SmolLM3ForCausalLM",
}
"""Class of each architecture; its module is imported when a model of it is built."""
_BERT, _ROBERTA = "tpengine.models.bert:BertModel", "tpengine.models.bert:RobertaModel"
_ENCODER_FAMILIES = {
    "Bert": _BERT,
    "Camembert": _ROBERTA,
    "ModernBert": "tpengine.models.modernbert:ModernBertModel",
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
}
ENCODERS = {"BertForPreTraining": _BERT} | {
    f"{name}{head}": family
    for name, family in _ENCODER_FAMILIES.items()
    for head in ("ForMaskedLM", "ForSequenceClassification", "Model")
}
"""The same of models whose tokens see each other in both directions, which make no tokens."""
TWO_HALVES = {
    f"{name}{head}": "tpengine.models.bart:BartForConditionalGeneration"
    for name, own in (
        ("Bart", "ForConditionalGeneration"),
        ("MBart", "ForConditionalGeneration"),
        ("Marian", "MTModel"),
        ("Pegasus", "ForConditionalGeneration"),
    )
    for head in (own, "Model")
} | {"WhisperForConditionalGeneration": "tpengine.models.whisper:WhisperForConditionalGeneration"}
"""The same of models with an encoder, which reads one prompt, and a decoder, which generates."""
OWN_CLASSES = ARCHITECTURES | ENCODERS | TWO_HALVES
TASKS = ("auto", "generate", "embed", "score", "classify")
POOLINGS = ("cls", "last", "mean")
"""Which of a prompt's hidden states stand for it: the first, the last, or the mean of all."""
PICTURE_MODELS = ("gemma3", "idefics3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
"""Values of `model_type` of whole models whose vision towers are run."""
WHOLE_PICTURES = ("gemma3",)
"""Those in which the tokens of a picture see each other, also later ones."""
MAX_PRIORITY = 1000
"""A request's priority is in [-MAX_PRIORITY, MAX_PRIORITY]."""
EMBEDDED_MODEL = str(Path(__file__).parent / "assets" / "embedded")
"""Folder of the small trained model inside the package, the default model."""
_POSITIONS_AFTER_PADDING = ("camembert", "roberta", "xlm-roberta")
"""Values of `model_type` of models whose first position is the one after the id of padding."""


@dataclass(frozen=True)
class DenseConfig:
    """A linear layer behind the pooling, as sentence-transformers has it in a folder of its own.

    Attributes:
        activation: gelu, relu, tanh or identity.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class PoolingConfig:
    """What a model gives for a prompt in the place of tokens.

    Attributes:
        task: one of `TASKS` but auto and generate.
        pooling: one of `POOLINGS`.
        labels: names of the classes, in the order of the outputs; of the task score there is one;
            of embed there is none.
        activation: what makes probabilities of scores and classes: sigmoid, softmax or identity.
        choice_ids: ids of the tokens that say no and yes, for a causal model that answers so, and
            whose score is the probability of the second; empty: the model has a head for it.
        normalize: whether an embedding has length 1.
        dense: layers behind the pooling.
        prompts: texts before a user's text, by name.
        default_prompt: the name of the one that is taken if a request names none; None: none.
    """

    task: str
    pooling: str
    labels: tuple[str, ...] = ()
    activation: str = "softmax"
    choice_ids: tuple[int, ...] = ()
    normalize: bool = False
    dense: tuple[DenseConfig, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


SAMPLING_RATE = 16_000
"""Of sounds whose features are computed, in Hz."""
FRAME_SAMPLES, FRAME_STEP = 400, 160
"""Samples of a frame, and from a frame to the next."""


@dataclass(frozen=True)
class SoundConfig:
    """What an encoder of sound reads, and which ids belong to it.

    Attributes:
        num_mel_bins: bands of a frame.
        num_frames: of a sound, with the silence behind it; two of them make a token.
        languages: ids of the decoder's prompt that name the language, by code such as en.
        tasks: those that name what to write, by transcribe or translate.
        suppressed: ids that are never sampled.
        suppressed_first: ids that no output begins with.
    """

    num_mel_bins: int
    num_frames: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]

    @property
    def longest_s(self) -> float:
        """Longest sound that is read."""
        return self.num_frames * FRAME_STEP / SAMPLING_RATE


@dataclass(frozen=True)
class EncoderConfig:
    """The half of a model that reads a prompt of its own, to which the decoder's layers attend.

    Attributes:
        num_layers: of the encoder.
        max_len: most tokens of its prompt.
        start_token_ids: how the decoder's prompt begins.
        bad_words_token_ids: sequences that no output has, as of a request's parameter.
        sound: None: it reads tokens.
    """

    num_layers: int
    max_len: int
    start_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    sound: SoundConfig | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The model, and how it is read.

    Attributes:
        model: local folder in Hugging Face layout; a hub name has been resolved to one.
        tokenizer: its folder; None: none is loaded.
        hf_config: the model's `config.json` with its architecture's defaults, as `ModelFields`.
        dtype: one of `DTYPES`; the worker's device decides what auto is.
        max_model_len: most tokens of a sequence, prompt and output.
        end_token_ids: ids that end a sequence, from `config.json` and `generation_config.json`.
        quantization: one of `QUANTIZATIONS`.
        calibrates: whether scales of int4 are chosen by what the model computes.
        max_logprobs: most log probabilities that a request may ask for at a position; -1: no limit.
        logprobs_mode: one of `LOGPROBS_MODES`: of the logits as the model computed them, or after
            edits, temperature and truncation.
        model_impl: whose code the model is: tpengine or transformers.
        pooling: None: the model generates.
        encoder: None: the model has one half.
        weight_cache: folder of packed weights; None: they are read and packed at each start.
    """

    model: str
    tokenizer: str | None
    tokenizer_mode: str
    trust_remote_code: bool
    hf_config: Mapping[str, Any]
    dtype: str
    max_model_len: int
    seed: int
    load_format: str
    end_token_ids: frozenset[int]
    quantization: str | None = None
    calibrates: bool = False
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    model_impl: str = "tpengine"
    pooling: PoolingConfig | None = None
    encoder: EncoderConfig | None = None
    weight_cache: str | None = None

    @property
    def task(self) -> str:
        """One of `TASKS`, but not auto."""
        return "generate" if self.pooling is None else self.pooling.task

    @property
    def sound(self) -> SoundConfig | None:
        """How the encoder takes sound; None: it takes text, or the model has no encoder."""
        return None if self.encoder is None else self.encoder.sound

    @property
    def is_encoder(self) -> bool:
        """Whether the tokens of a prompt see each other in both directions, so that it is computed
        in one step."""
        return is_encoder(self.hf_config)

    @property
    def num_outputs(self) -> int:
        """Numbers that the model gives for a prompt; 0: it generates."""
        if self.pooling is None:
            return 0
        dense = self.pooling.dense
        own = dense[-1].out_features if dense else self.hidden_size
        return len(self.pooling.labels) or own

    @property
    def implementation(self) -> str:
        """Whose code runs the model, and why, for the log."""
        half = "" if self.text_half_of is None else f", the text half of {self.text_half_of}"
        if self.pooling is not None:
            half = f"; task {self.pooling.task}, pooling {self.pooling.pooling}"
        if self.model_impl == "tpengine":
            return f"tpengine's code{half}"
        if self.architecture in OWN_CLASSES:
            return f"transformers' code, as model_impl asks{half}"
        if code := own_code(self.hf_config):
            return f"code of its own folder, {code}"
        return f"transformers' code, tpengine has no code of its own for it{half}"

    @property
    def file_dtype(self) -> str | None:
        """Dtype of the weights by `config.json`, such as float16; None: it names none."""
        names = [
            fields.get("dtype") or fields.get("torch_dtype")
            for fields in (self.hf_config, self.whole or {})
        ]
        return next(filter(None, names), None)

    @property
    def text_half_of(self) -> str | None:
        """Class of the whole model, which reads pictures or sound too; None: this is the whole."""
        return None if self.whole is None else architecture_of(self.whole)

    @property
    def whole(self) -> Mapping[str, Any] | None:
        """Configuration of the whole model of which this is the text half; None: there is none."""
        return self.hf_config.get("whole_model")

    @property
    def reads_pictures(self) -> bool:
        """Whether prompts may have pictures."""
        is_known = self.whole is not None and self.whole.get("model_type") in PICTURE_MODELS
        return is_known and self.model_impl == "tpengine"

    @property
    def num_picture_layers(self) -> int:
        """Number of the first layers after each of which features of pictures are added."""
        sight = (self.whole or {}).get("vision_config") or {}
        return len(sight.get("deepstack_visual_indexes") or ())

    @property
    def picture_row_size(self) -> int:
        """Number of elements that a token of a picture has of its features: what stands in place of
        its embedding, then what is added after layers."""
        return self.hidden_size * (1 + self.num_picture_layers)

    @property
    def picture_rope(self) -> Mapping[str, Any]:
        """Rotary parameters with `mrope_section`, if tokens of pictures have a position on each of
        three axes; else empty."""
        text = (self.whole or {}).get("text_config") or {}
        rope: Mapping[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
        # transformers' code of this one does not ask for the field.
        alternate = {"mrope_interleaved": True} if text.get("model_type") == "qwen3_vl_text" else {}
        return {**rope, **alternate} if "mrope_section" in rope else {}

    @property
    def architecture(self) -> str:
        """Class name in `config.json`, such as `LlamaForCausalLM`."""
        return architecture_of(self.hf_config)

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
        return int(self.hf_config.get("head_dim") or self.hidden_size // self.total_num_heads)

    @property
    def hidden_size(self) -> int:
        """Number of elements of a token's activation between layers."""
        return int(self.hf_config["hidden_size"])

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a token sees in every layer, itself included; None: a layer sees all, or
        transformers' code decides, or a prompt is computed in one step."""
        if self.model_impl == "transformers" or self.is_encoder:
            return None
        types = self.hf_config.get("layer_types")
        if types is not None and set(types) != {"sliding_attention"}:
            return None
        return self.hf_config.get("sliding_window") or None  # Qwen2-MoE says 0 for none


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
        kv_cache_dtype: one of `KV_CACHE_DTYPES`; auto is the model's dtype. fp8 is e4m3 and needs a
            GPU; int8 needs a CPU.
        kv_scales: of an fp8 cache, for each rank of a stage and each layer; None: those of the
            checkpoint.
        num_gpu_blocks: device blocks of an engine's cache, in `LLMEngine.cache_config`; None
            elsewhere.
        num_cpu_blocks: the same for its host blocks.
    """

    block_size: int
    gpu_memory_utilization: float
    cpu_kv_cache_bytes: int | None
    num_device_blocks_override: int | None
    swap_space_bytes: int | None
    enable_prefix_caching: bool
    kv_cache_dtype: str = "auto"
    kv_scales: tuple[tuple[float, ...], ...] | None = None
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None


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
    """Where on a Ray cluster the ranks run.

    Attributes:
        placement_strategy: one of `PLACEMENT_STRATEGIES`.
        bundle: resources of one rank by Ray's names; None: one GPU, or one CPU for device cpu.
        placement_timeout_s: wait in seconds for resources of the cluster that are in use.
    """

    placement_strategy: str = "PACK"
    bundle: Mapping[str, float] | None = None
    placement_timeout_s: float = 60.0


KEEP_KV = ("safe", "always", "never")


@dataclass(frozen=True)
class RanksConfig:
    """Ranks in processes of their own, by Ray or by the driver; time limits in seconds.

    Attributes:
        start_timeout_s: limit of each call before the first step.
        step_timeout_s: smallest limit of a step; it is 10 x the predicted time if that is more.
        spare_workers: number of Ray's actors that are kept ready to replace dead ranks.
        keep_kv: one of `KEEP_KV`: when a new rank goes on with the memory of a lost one; `safe`:
            not if that one ended by a fault of its code, such as SIGSEGV.
    """

    start_timeout_s: float = 600.0
    step_timeout_s: float = 30.0
    spare_workers: int = 0
    keep_kv: str = KEEP_KV[0]


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks share the model, and the memory budget of each. Ranks of a stage have numbers
    that follow each other.

    Attributes:
        tensor_parallel_size: ranks of each pipeline stage, which share its layers.
        rank_gpu_memory_utilization: one value per rank; None: the cache's value for all.
        rank_cpu_kv_cache_bytes: one value per rank; None: the cache's value for all.
        ranks: None: the only worker runs in the driver's process.
        ray: None: the ranks, if they have processes of their own, are the driver's children.
        pipeline_parallel_size: number of stages, each of which has some of the layers.
        layer_partition: number of layers of each stage; None: by cost, see `models.stages`.
        min_ranks: fewest ranks that a group has after a loss; None: all.
    """

    tensor_parallel_size: int
    rank_gpu_memory_utilization: tuple[float, ...] | None = None
    rank_cpu_kv_cache_bytes: tuple[int, ...] | None = None
    ranks: RanksConfig | None = None
    ray: RayConfig | None = None
    pipeline_parallel_size: int = 1
    layer_partition: tuple[int, ...] | None = None
    min_ranks: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def own_processes(self) -> RanksConfig:
        """`ranks`, of an executor whose ranks have processes of their own."""
        assert self.ranks is not None, "ranks in processes of their own need config.parallel.ranks"
        return self.ranks

    @property
    def sampling_rank(self) -> int:
        """The rank whose answers count: the first one of the last stage."""
        return self.world_size - self.tensor_parallel_size


@dataclass(frozen=True)
class LookaheadConfig:
    """Drafts: guesses of next tokens, of which a step computes several.

    Attributes:
        speculative_model: where they come from: one of `LOOKAHEADS`, or a model.
        draft_model: the model; None: the driver guesses.
        num_speculative_tokens: most drafts of a sequence in a step.
        ngram_prompt_lookup_max: most tokens of a match.
        ngram_prompt_lookup_min: fewest.
        speculative_disable_by_batch_size: a step with more sequences has no drafts; None: no limit.
        speculative_max_model_len: tokens from which on a sequence has no drafts.
    """

    speculative_model: str
    num_speculative_tokens: int
    ngram_prompt_lookup_max: int
    ngram_prompt_lookup_min: int
    speculative_disable_by_batch_size: int | None
    speculative_max_model_len: int
    draft_model: ModelConfig | None = None


@dataclass(frozen=True)
class PicturesConfig:
    """Limits of pictures in prompts.

    Attributes:
        max_per_prompt: most pictures of a prompt.
        max_encoder_tokens: most tokens whose features are awaited at once, but for one picture.
        num_cached_rows: features that the ranks keep, in tokens.
        processor: fields of the model's image processor.
        encoder_share: of the time, for the vision tower beside running requests.
        are_whole: whether all tokens of a picture are computed in one step, as each sees all.
        allowed_hosts: from which pictures may be fetched.
    """

    max_per_prompt: int
    max_encoder_tokens: int
    num_cached_rows: int
    processor: Mapping[str, Any]
    encoder_share: float
    are_whole: bool = False
    allowed_hosts: Sequence[str] = ()


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
        fairness: owner shares the engine among the owners of requests; none does not.
        preemption_mode: swap and recompute do so with every preempted request; auto swaps requests
            with more than one sequence. Without free host blocks, all are recomputed.
        stream_interval: new tokens of a sequence that are reported together; the first and the last
            are reported immediately.
        max_steps_in_flight: steps that the ranks may have before they have answered the first of
            them.
        ahead_from_s: seconds in the model that the latest step must have taken; else one step at a
            time is sent.
        max_loras: most adapters in a step; 0: no request has one.
        lookahead: None: no drafts.
        num_stages: of the pipeline; running sequences are divided into as many groups, which it
            computes one behind the other.
        pictures: None: prompts are text alone.
        why_text_alone: then the reason, for errors, with what to change.
        whole_prompts: whether each prompt is computed in one step, beside others: the model is an
            encoder.
        delay_factor: see `scheduling.prompt_delay`; 0: no delay.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_chunked_prefill: bool
    policy: str
    preemption_mode: str
    stream_interval: int = 1
    max_steps_in_flight: int = 1
    ahead_from_s: float = 0.0
    max_loras: int = 0
    fairness: str = "none"
    lookahead: LookaheadConfig | None = None
    num_stages: int = 1
    pictures: PicturesConfig | None = None
    why_text_alone: str = "docs/pictures.md lists the models that see"
    whole_prompts: bool = False
    delay_factor: float = 0.0

    @property
    def max_sampled_rows(self) -> int:
        """Most rows of a step that are sampled: of sequences, and of drafts."""
        num_drafts = 0 if self.lookahead is None else self.lookahead.num_speculative_tokens
        return self.max_num_seqs + num_drafts


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters.

    Attributes:
        max_loras: slots on the device: most adapters in a step.
        max_cpu_loras: most adapters that each rank keeps in host memory.
        lora_dtype: auto (the model's), float32 or bfloat16.
    """

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    lora_dtype: str = "auto"


@dataclass(frozen=True)
class RecoveryConfig:
    """How often a lost group of ranks is rebuilt before the engine gives up.

    Attributes:
        max_recoveries: number of losses within any `window_s` seconds after which requests go on.
        timeout_s: how long the attempts at one new group may take together.
    """

    max_recoveries: int
    window_s: float
    timeout_s: float


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
    lora: LoRAConfig | None = None

    @property
    def num_kept_tokens(self) -> int:
        """Number of last computed tokens whose K and V a sequence keeps; `sys.maxsize`: all.

        It is the window without the next token, and at least a block without one token, so that
        the first block that a sequence keeps is full once the next token is computed.
        """
        window = self.model.sliding_window
        return sys.maxsize if window is None else max(window, self.cache.block_size) - 1

    @property
    def model_code(self) -> tuple[str, str | None]:
        """Whose code the model is, and transformers' class that has its vision tower: a spare or a
        template imports both."""
        sees = self.scheduler.pictures is not None
        return self.model.model_impl, self.model.text_half_of if sees else None

    @property
    def of_draft_model(self) -> EngineConfig | None:
        """The same for the model that makes drafts; None: there is none."""
        lookahead = self.scheduler.lookahead
        if lookahead is None or lookahead.draft_model is None:
            return None
        return replace(self, model=lookahead.draft_model, lora=None)

    def with_ranks(self, count: int) -> EngineConfig:
        """The same configuration for a group of that many ranks."""
        size = count // self.parallel.pipeline_parallel_size
        return replace(self, parallel=replace(self.parallel, tensor_parallel_size=size))

    def for_rank(self, rank: int) -> EngineConfig:
        """The same configuration with the memory budgets of one rank."""
        cache, parallel = self.cache, self.parallel
        if (shares := parallel.rank_gpu_memory_utilization) is not None:
            cache = replace(cache, gpu_memory_utilization=shares[rank])
        if parallel.rank_cpu_kv_cache_bytes is not None:
            cache = replace(cache, cpu_kv_cache_bytes=parallel.rank_cpu_kv_cache_bytes[rank])
        return replace(self, cache=cache)


def check_kv_cache_dtype(wanted: str, device: str) -> None:
    """Raises ConfigError if the device, cpu or cuda, has no kernels for such a cache."""
    kinds = {"fp8": ("cuda", "GPUs", "int8"), "int8": ("cpu", "CPUs", "fp8")}
    for_device, devices, other = kinds.get(wanted, (device, "", ""))
    if device != for_device:
        text = f"kv_cache_dtype = {wanted!r} has kernels for {devices} only"
        raise ConfigError(f"{text}, the device is {device}; use {other}, or leave it out")


def lacks_arithmetic(dtype: str, device: str) -> bool:
    """Whether a device has no arithmetic for a dtype, and would convert at every step. The model
    then computes as with dtype auto."""
    return device == "cpu" and dtype in ("float16", "half")


def architecture_of(hf_config: Mapping[str, Any]) -> str:
    """Class name in a `config.json`."""
    return str((hf_config.get("architectures") or ["(none named)"])[0])


def is_encoder(hf_config: Mapping[str, Any]) -> bool:
    """Whether a model is an encoder, by its `config.json`."""
    sees_both = hf_config.get("use_bidirectional_attention") is True
    return architecture_of(hf_config) in ENCODERS or sees_both


def own_code(hf_config: Mapping[str, Any]) -> str | None:
    """Class in a Python file of the model's folder, as `file.Class`, that runs a model of which
    neither tpengine nor transformers has the class; None: there is none, or it is not needed."""
    code: str | None = (hf_config.get("auto_map") or {}).get("AutoModelForCausalLM")
    # With -- it would be code of another repository.
    if code is None or "--" in code or architecture_of(hf_config) in ARCHITECTURES:
        return None
    import transformers

    return None if hasattr(transformers, architecture_of(hf_config)) else code


def group_sizes(count: int, least: int | None) -> list[int]:
    """Numbers of ranks that a group of `count` may have, all of them first.

    Args:
        least: the fewest; None: all.
    """
    return [size for size in range(count, (least or count) - 1, -1) if count % size == 0]


def first_position(hf_config: Mapping[str, Any]) -> int:
    """Row of the first position in a model's table of positions.

    Raises:
        ConfigError: the model counts from the id of padding, and has none.
    """
    if hf_config.get("model_type") not in _POSITIONS_AFTER_PADDING:
        return 0
    padding = hf_config.get("pad_token_id")
    if not isinstance(padding, int) or padding < 0:
        text = f"pad_token_id = {padding!r}: {architecture_of(hf_config)} counts positions from it"
        raise ConfigError(f"{text}; set it to an id in the model's config.json")
    return padding + 1
