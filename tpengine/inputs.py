"""Forms of what a user gives besides `SamplingParams`: prompts, adapters, beam search."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from operator import attrgetter
from os import PathLike, fspath
from typing import Any, NotRequired, TypedDict

from tpengine.errors import InvalidPromptError, InvalidSamplingParamsError
from tpengine.options import read_int
from tpengine.sampling_params import SamplingParams


class MultiModalData(TypedDict, total=False):
    """What a prompt has besides text.

    Attributes:
        image: its pictures: one or a list, each a `PIL.Image.Image`, an array uint8 `[height,
            width, 3]`, the bytes of a file, a URL or a `Picture`.
        audio: its sound: (samples, sampling rate in Hz), samples as an array of floats in [-1, 1],
            `[num_samples]`; or the bytes or the path of a file.
    """

    image: Any
    audio: Any


class TextPrompt(TypedDict):
    """A prompt as text, with a placeholder such as `<image>` for each of its pictures."""

    prompt: str
    multi_modal_data: NotRequired[MultiModalData | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids, with a placeholder for each of its pictures."""

    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[MultiModalData | None]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """The prompts of a model with two halves. Without a decoder's, it begins as the model's files
    say."""

    encoder_prompt: str | TextPrompt | TokensPrompt
    decoder_prompt: NotRequired[str | TextPrompt | TokensPrompt | None]


PromptInputs = str | TextPrompt | TokensPrompt | ExplicitEncoderDecoderPrompt


@dataclass(frozen=True, slots=True)
class Owner:
    """The client that a request is served for.

    Attributes:
        name: of the client; only it, or the operator, may abort the request.
        account: what the engine's work for it is charged to with `--fairness owner`, and its label
            in the metrics, so not a secret; empty: the one of all requests without an owner.
        weight: its share beside that of other accounts: with 2 it gets twice as much as with 1.
        cache_salt: only requests with the same salt find each other's blocks in the prefix cache.
    """

    name: str = ""
    account: str = ""
    weight: float = 1.0
    cache_salt: str = ""


NO_OWNER = Owner()


@dataclass(unsafe_hash=True)
class LoRARequest:
    """An adapter for one request; the engine needs `enable_lora`.

    Attributes:
        lora_int_id: the adapter's id for the caller, from 1; objects of the same id are equal. The
            engine itself tells adapters apart by the content of their files.
        lora_path: its folder, as PEFT writes it; every rank reads it.
        lora_local_path: the former name of `lora_path`.

    Raises:
        InvalidPromptError: there is no name or no path, or it has a `long_lora_max_len`.
        InvalidSamplingParamsError: the id is no integer from 1.
    """

    lora_name: str = field(compare=False)
    lora_int_id: int
    lora_path: str = field(default="", compare=False)
    lora_local_path: str | None = field(default=None, compare=False, repr=False)
    long_lora_max_len: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidPromptError(f"lora_name must be a text, got {self.lora_name!r:.80}")
        path: Any = self.lora_path or self.lora_local_path
        if isinstance(path, PathLike):
            path = fspath(path)
        if not isinstance(path, str) or not path:
            raise InvalidPromptError(
                f"lora_path of {self.lora_name!r:.80} must name its folder, got {path!r:.80}"
            )
        self.lora_path = path
        read_int("lora_int_id", self.lora_int_id, 1)
        if self.long_lora_max_len is not None:
            raise InvalidPromptError(
                f"long_lora_max_len = {self.long_lora_max_len!r:.80} is not served; leave it out: "
                "an adapter makes no context longer"
            )

    adapter_id = property(attrgetter("lora_int_id"))
    name = property(attrgetter("lora_name"))
    path = local_path = property(attrgetter("lora_path"))


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a request: the one that its folder held when the request was checked."""

    request: LoRARequest
    key: bytes


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with the names of later versions of vLLM.

    Args:
        beam_width: number of beams, at least 2.
        max_tokens: most output tokens of a beam.
        ignore_eos: go on after the model's end tokens.
        temperature: only 0.
        length_penalty: beams are compared by their cumulative log probability, divided by their
            number of output tokens to this power.
        include_stop_str_in_output: keep the end token in tokens and text.

    Raises:
        InvalidSamplingParamsError: a value is out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        read_int("beam_width", self.beam_width, 2)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """Returns the same search as `SamplingParams`.

        Raises:
            InvalidSamplingParamsError: a value is out of its range.
        """
        same = {name: value for name, value in vars(self).items() if name != "beam_width"}
        return SamplingParams(n=self.beam_width, use_beam_search=True, **same)


@dataclass
class PoolingParams:
    """What a request wants of a model that makes no tokens.

    Args:
        additional_data: only None; in vLLM models of a user's own get it.
        dimensions: the first elements of an embedding that are kept, for models that were trained
            so (https://arxiv.org/abs/2205.13147); None: all.
        normalize: whether an embedding has length 1; None: as the model's files say.
        activation: whether scores and classes are probabilities; False: the model's own numbers.
        truncate_prompt_tokens: tokens of a text that are kept, special ones included; -1: as many
            as the model takes; None: a longer text is refused.
        prompt_name: of the model's own prompts, the one that stands before the text, such as
            query; None: the model's default.

    Raises:
        InvalidSamplingParamsError: a value is out of its range.
    """

    additional_data: Any = None
    _: KW_ONLY
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool = True
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        if self.additional_data is not None:
            text = f"is not served, got {self.additional_data!r:.80}; leave it out"
            raise InvalidSamplingParamsError.of_field("additional_data", text)
        if self.dimensions is not None:
            read_int("dimensions", self.dimensions, 1)
        for name, kind in (("normalize", bool), ("activation", bool), ("prompt_name", str)):
            value = getattr(self, name)
            if not isinstance(value, kind | None) or (name == "activation" and value is None):
                text = f"must be a {kind.__name__}, got {value!r:.80}"
                raise InvalidSamplingParamsError.of_field(name, text)
        if self.truncate_prompt_tokens not in (None, -1):
            read_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1)

    def clone(self) -> PoolingParams:
        """A copy."""
        return replace(self)
