"""The files of a model, local or of the hub, and what their configurations say."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from tpengine.checkpoint import gguf_config
from tpengine.checkpoint.gguf_file import find_gguf, first_part, is_gguf
from tpengine.checkpoint.model_code import refused_code
from tpengine.checkpoint.model_defaults import complete_config
from tpengine.checkpoint.quantization_config import read_scheme
from tpengine.checkpoint.text_half import fields_of, text_half
from tpengine.errors import ConfigError, ModelLoadError
from tpengine.logger import init_logger

logger = init_logger(__name__)

_HUB_TEXTS = ["*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.tiktoken", "vocab.bpe"]
"""Files of a hub model that hold its configuration, its tokenizer and the index of its weights."""
_HUB_MODULES = "[0-9]_*/*"
"""Layers that sentence-transformers has behind a model, in folders such as 2_Dense."""
WEIGHT_FILES = {
    "auto": ("*.safetensors", "pytorch_model*.bin"),
    "safetensors": ("*.safetensors",),
    "pt": ("pytorch_model*.bin",),
    "dummy": (),
}
"""By `load_format`: patterns of the files with the weights. The first pattern that matches a file
is read."""
_HUB_DOUBLES = ["original/*", "consolidated*"]
"""Copies of the weights in other layouts, which some models have."""

_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size",
    "shared_expert_intermediate_size", "word_embed_proj_dim", "max_position_embeddings",
)  # fmt: skip
_EPSILONS = "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"
_COUNTS = re.compile(r".*_(layers?|heads?|experts)")
_MOST_PARTS = 1 << 12
"""Most layers, heads or experts that are believed of a model's files: each is built in a loop."""


class ModelFields(dict[str, Any]):
    """Fields of a `config.json`, which can also be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the model's config.json has no {name!r}")
        return self[name]


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model or of a tokenizer: a folder, a GGUF file, or a model of the hub.

    Attributes:
        name: folder in Hugging Face layout or with a GGUF file, such a file, or hub name.
        download_dir: folder for models of the hub; None: the hub's own cache.
        revision: branch, tag or commit of a model of the hub; None: its main branch.
        trust_remote_code: whether Python files are fetched.
        what: "model" or "tokenizer".
    """

    name: str
    download_dir: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    what: str = "model"

    def find(self) -> str:
        """Returns the local folder, or the GGUF file (the first part of a split one). Of a hub
        model it fetches all files but the weights.

        Raises:
            ModelLoadError: it is neither and cannot be fetched, or holds several GGUF files.
        """
        try:
            Path.cwd()
        except FileNotFoundError:  # transformers would say something else
            text = "the working folder of this process was deleted; change into one that exists"
            raise ModelLoadError(text) from None
        folder = Path(self.name).expanduser()
        if is_gguf(folder) and first_part(folder).is_file():
            return str(first_part(folder))
        if folder.is_dir():
            before = (*WEIGHT_FILES["auto"], *(["tokenizer*"] if self.what == "tokenizer" else []))
            has_others = any(next(folder.glob(pattern), None) for pattern in before)
            return str(folder if has_others else find_gguf(folder) or folder)
        is_hub_name = self.name.count("/") == 1 and not self.name.startswith(("/", ".", "~"))
        if folder.exists() or is_gguf(folder) or not is_hub_name:
            problem = "is no folder and no GGUF file" if folder.exists() else "does not exist"
            raise ModelLoadError(
                f"{self.what} {self.name!r} {problem}; give a folder in "
                "Hugging Face layout, a GGUF file, or a hub name like 'owner/name', or leave it "
                f"out for the default {self.what}"
            )
        code = ["*.py"] if self.trust_remote_code else []
        return self._fetch(self.revision, [*_HUB_TEXTS, *code], _HUB_DOUBLES)

    def fetch_weights(self, folder: str, load_format: str, unwanted: Sequence[str]) -> None:
        """Fetches the weights of a model of the hub: the first form of `load_format` that it has.

        Args:
            folder: as `find` returned it.
            unwanted: patterns of files that are not fetched.

        Raises:
            ModelLoadError: they cannot be fetched.
        """
        if Path(folder) == Path(self.name).expanduser() or is_gguf(folder):
            return
        commit = Path(folder).name  # the hub's main branch may have changed since `find`
        for pattern in WEIGHT_FILES[load_format]:
            # The hub's client warns if no file matches; config.json is there already.
            wanted = ["config.json", pattern, _HUB_MODULES]
            self._fetch(commit, wanted, [*_HUB_DOUBLES, *unwanted])
            if any(Path(folder).glob(pattern)):
                return

    def _fetch(self, revision: str | None, wanted: list[str], unwanted: list[str]) -> str:
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(
                self.name,
                revision=revision,
                cache_dir=self.download_dir,
                allow_patterns=wanted,
                ignore_patterns=unwanted,
            )
        except Exception as error:
            raise ModelLoadError(
                f"{self.what} {self.name!r} is no local folder and could not be fetched from the "
                f"hub ({type(error).__name__}: {error}); check the name and the network. Without a "
                f"network use a folder or a GGUF file, or leave it out for the default {self.what}"
            ) from error
        return str(folder)


def read_hf_config(folder: str, trust_remote_code: bool) -> ModelFields:
    """Reads `config.json`, or what a GGUF file has of it, and adds the defaults of its
    architecture, through transformers only if `model_defaults` has no table for it. Of a model that
    reads more than text it returns the text half, see `checkpoint.text_half`.

    Raises:
        ConfigError: the architecture of a GGUF file, or a `quantization_config`, is not supported;
            or it is read by code of the folder, which is not trusted.
        ModelLoadError: there is no such file, or it cannot be read.
    """
    path = Path(folder)
    if not is_gguf(path):
        path = path / "config.json"
        if not path.is_file():
            raise ModelLoadError(
                f"{folder} has no config.json; if it has GGUF files, download one, give its path"
            )
    try:
        written = gguf_config.read_config(folder) if is_gguf(path) else read_json(path)
        _check_counts(written)
        read_scheme(written, folder)  # refuses what is not supported
        fields = complete_config(written)
        if fields is not None:
            return _checked(fields)
        from transformers import CONFIG_MAPPING, AutoConfig  # takes about two seconds

        code = (written.get("auto_map") or {}).get("AutoConfig")
        if code and not trust_remote_code and written.get("model_type") not in CONFIG_MAPPING:
            raise refused_code(folder, code)
        if is_gguf(path):
            config = AutoConfig.for_model(written.pop("model_type"), **written)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        fields = text_half(config, written) or fields_of(config)
        if written.get("use_bidirectional_attention") and "sliding_window" in written:
            fields["sliding_window"] = written["sliding_window"]  # transformers 4 halves it
        return _checked(fields)
    except (ConfigError, ModelLoadError):
        raise
    except Exception as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


POINTER = b"version https://git-lfs"
"""How a file begins that only stands for another one, as `git clone` without git-lfs leaves it."""
POINTER_FAULT = "it is a pointer of Git LFS; `git lfs pull` fetches the file itself"


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file of a model.

    Raises:
        ModelLoadError: it is no valid JSON, or no object.
    """
    value: dict[str, Any] = _read_as(dict, "an object {...}", path)
    return value


def read_json_list(path: Path) -> list[Any]:
    """Content of a JSON file of a model that holds a list.

    Raises:
        ModelLoadError: it is no valid JSON, or no list.
    """
    value: list[Any] = _read_as(list, "a list [...]", path)
    return value


def _read_as(kind: type, form: str, path: Path) -> Any:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is not there; fetch the whole model again") from error
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        fault = f"it is not valid JSON ({error})" if content.strip() else "it is empty"
        fault = POINTER_FAULT if content.startswith(POINTER) else fault
        text = f"{path} cannot be read: {fault}; fetch it again, or repair it"
        raise ModelLoadError(text) from error
    if not isinstance(value, kind):
        raise ModelLoadError(f"{path} must hold {form}, it holds {value!r:.80}")
    return value


def _check_counts(fields: Mapping[str, Any]) -> None:
    """Checks numbers of parts, also of a model inside the model, before lists of that length are
    made.

    Raises:
        ValueError: one is too large.
    """
    for field, value in fields.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif _COUNTS.fullmatch(field) and isinstance(value, int) and value > _MOST_PARTS:
            raise ValueError(f"{field} must be at most {_MOST_PARTS}, got {value}")


def _checked(fields: dict[str, Any]) -> ModelFields:
    """Checks the names of the class, the sizes that are one number for all layers, and what norms
    add to a variance.

    Raises:
        ValueError: one has another form.
    """
    names = fields.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures must be a list of names, got {names!r}")
    for field in _SIZES:
        size = fields.get(field)
        if not isinstance(size, (list, NoneType)) and (type(size) is not int or size < 1):
            raise ValueError(f"{field} must be an integer from 1, got {size!r}")
    for field in _EPSILONS:
        number = fields.get(field)
        if number is not None and not (type(number) in (int, float) and 0 < number < math.inf):
            raise ValueError(f"{field} must be a number above 0, got {number!r}")
    return ModelFields(fields)


def read_generation_config(folder: str) -> dict[str, Any]:
    """Content of a model's `generation_config.json`, or what a GGUF file has of it; empty if there
    is no such file.

    Raises:
        ModelLoadError: it is not valid JSON. An empty one counts as none, as in transformers.
    """
    if is_gguf(folder):
        return gguf_config.read_generation_config(folder)
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return {}
    if not path.read_bytes().strip():
        logger.warning("%s is empty: the model recommends no sampling parameters", path)
        return {}
    return read_json(path)


def read_processor(folder: str, kind: str) -> dict[str, Any] | None:
    """What says how a model's pictures or sounds are prepared; None: the folder has no such file.

    Args:
        kind: image_processor or feature_extractor.

    Raises:
        ModelLoadError: it is not valid JSON.
    """
    path = Path(folder)
    if (own := path / "preprocessor_config.json").is_file():
        return read_json(own)
    shared = path / "processor_config.json"  # transformers 5 writes all processors into one file
    fields = read_json(shared).get(kind) if shared.is_file() else None
    return fields if isinstance(fields, dict) else None


def read_end_token_ids(folder: str, hf_config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end a sequence, from `config.json` and `generation_config.json`.

    Raises:
        ModelLoadError: `generation_config.json` is not valid JSON, or `eos_token_id` is no id.
    """
    ids: set[int] = set()
    sources = {"config.json": hf_config, "generation_config.json": read_generation_config(folder)}
    for file, source in sources.items():
        value = source.get("eos_token_id")
        token_ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int for token_id in token_ids):
            raise ModelLoadError(
                f"eos_token_id = {value!r} in {file} of {folder} must be a token id, a list of "
                "them, or null"
            )
        ids.update(token_ids)
    return frozenset(ids)
