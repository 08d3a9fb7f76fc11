"""What a model's files say of embeddings, scores and classes: the layout of sentence-transformers
(https://sbert.net/docs), and the classes and labels of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpengine import config as cfg
from tpengine.checkpoint.gguf_file import is_gguf
from tpengine.checkpoint.model_files import read_json, read_json_list
from tpengine.config import DenseConfig, PoolingConfig
from tpengine.errors import ConfigError, ModelLoadError

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Fields of a pooling module, and what they are in `cfg.POOLINGS`."""
_ANSWERS = "no", "yes"
"""Tokens of a causal model that says whether a document fits (Qwen3-Reranker)."""
_CLASSIFIERS = ("TextForSequenceClassification", "ForSequenceClassification")
"""Ends of the names of classes with a head for classes, or for a score."""


def read_pooling(
    folder: str, hf_config: Mapping[str, Any], task: str, pooling: str | None
) -> PoolingConfig | None:
    """Returns what a model gives in the place of tokens; None: it generates.

    Args:
        hf_config: `architectures` as the file has it.
        task: one of `cfg.TASKS`; auto is what the files say.
        pooling: one of `cfg.POOLINGS`, in place of what the files say; None: as they say.

    Raises:
        ConfigError: the model cannot do what is asked.
        ModelLoadError: a file of sentence-transformers is wrong or asks for what is not served.
    """
    architecture = cfg.architecture_of(hf_config)
    modules = _read_modules(folder)
    labels = _labels(hf_config) if architecture.endswith(_CLASSIFIERS) else ()
    is_bare = architecture != causal_decoder_of(architecture)
    is_causal = not (is_bare or cfg.is_encoder(hf_config))
    tasks = _tasks(labels, is_causal, bool(modules))
    if task == "auto":
        task = tasks[0]
    if task not in tasks:
        text = f"task = {task!r} does not fit {architecture}, which can do {tasks[0]!r}"
        raise ConfigError(f"{text}; leave task out, or choose another model")
    if task == "generate":
        if pooling is not None:
            raise ConfigError(f"pooling_type = {pooling!r}: the model generates; set task='embed'")
        return None
    default = "cls" if cfg.is_encoder(hf_config) else "last"
    if labels:
        default = hf_config.get("classifier_pooling") or default
        return PoolingConfig(task, pooling or default, labels, _activation(hf_config, len(labels)))
    if task == "score":
        if pooling not in (None, "last"):
            text = f"pooling_type = {pooling!r}: the last token of {architecture} answers"
            raise ConfigError(f"{text} with task='score'; leave pooling_type out")
        ids = _answer_ids(folder, architecture)
        return PoolingConfig(task, "last", ("yes",), "sigmoid", ids)
    made = PoolingConfig(task, default, normalize=not modules)
    if modules:
        made = _of_modules(Path(folder), modules, made)
    return made if pooling is None else replace(made, pooling=pooling)


def causal_decoder_of(architecture: str) -> str:
    """The causal decoder of which a class is the layers alone, or has another head; its own name if
    there is none."""
    for ending in (*_CLASSIFIERS, "TextModel", "Model"):
        if architecture.endswith(ending):
            stem = architecture.removesuffix(ending)
            names = (f"{stem}ForCausalLM", f"{stem}LMHeadModel")
            return next((name for name in names if name in cfg.ARCHITECTURES), architecture)
    return architecture


def read_max_seq_length(folder: str) -> int | None:
    """Most tokens of a text, by sentence-transformers; None: its files say nothing."""
    path = Path(folder) / "sentence_bert_config.json"
    length = read_json(path).get("max_seq_length") if path.is_file() else None
    return length if isinstance(length, int) and length > 0 else None


def _tasks(labels: Sequence[str], is_causal: bool, has_modules: bool) -> tuple[str, ...]:
    """What a model can do, the usual task first."""
    if labels:
        return ("score", "classify") if len(labels) == 1 else ("classify",)
    if not is_causal:
        return ("embed",)
    return ("embed", "generate", "score") if has_modules else ("generate", "embed", "score")


def _labels(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    names = hf_config.get("id2label") or {}
    count = hf_config.get("num_labels") or len(names) or 2  # transformers' default
    by_id = {str(key): str(name) for key, name in names.items()}
    return tuple(by_id.get(str(place), f"LABEL_{place}") for place in range(count))


def _activation(hf_config: Mapping[str, Any], num_labels: int) -> str:
    """What makes probabilities of the outputs of a head: sentence-transformers' field, or what
    transformers means by `problem_type`."""
    named = (hf_config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or hf_config.get("sbert_ce_default_activation_function")
    if named is None:
        usual = "sigmoid" if num_labels == 1 else "softmax"
        kinds = {"regression": "identity", "multi_label_classification": "sigmoid"}
        return kinds.get(str(hf_config.get("problem_type")), usual)
    kind = str(named).rpartition(".")[2].lower()
    if kind not in ("identity", "sigmoid", "softmax"):
        text = f"the model's config.json names the activation {named!r}, which is not served"
        raise ModelLoadError(f"{text}; known are Identity, Sigmoid and Softmax")
    return kind


def _read_modules(folder: str) -> list[tuple[str, str]]:
    """The modules of sentence-transformers behind the model: (type, folder); empty: the model's
    folder has none."""
    path = Path(folder) / "modules.json"
    if is_gguf(folder) or not path.is_file():
        return []
    try:
        modules = read_json_list(path)
        named = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in modules]
    except (TypeError, KeyError) as error:
        raise ModelLoadError(f"{path} must be a list of modules with type and path") from error
    return named


def _of_modules(folder: Path, modules: list[tuple[str, str]], made: PoolingConfig) -> PoolingConfig:
    for kind, path in modules:
        place = folder / path / "config.json"
        if kind == "Pooling":
            made = replace(made, pooling=_pooling_mode(place))
        elif kind == "Dense":
            made = replace(made, dense=(*made.dense, _dense(path, place)))
        elif kind == "Normalize":
            made = replace(made, normalize=True)
        elif kind != "Transformer":
            known = "Transformer, Pooling, Dense and Normalize"
            text = f"{folder}/modules.json has a module {kind}, which is not served"
            raise ModelLoadError(f"{text}; known are {known}")
    settings = folder / "config_sentence_transformers.json"
    fields = read_json(settings) if settings.is_file() else {}
    prompts = {str(name): str(text) for name, text in (fields.get("prompts") or {}).items()}
    return replace(made, prompts=prompts, default_prompt=fields.get("default_prompt_name"))


def _pooling_mode(path: Path) -> str:
    fields = read_json(path)
    names = [name for field, name in _MODES.items() if fields.get(field)]
    if isinstance(named := fields.get("pooling_mode"), str):
        names = [named.replace("lasttoken", "last")]
    others = [name for name, value in fields.items() if name.startswith("pooling_") and value]
    if len(names) != 1 or names[0] not in cfg.POOLINGS or len(others) != 1:
        text = f"{path} asks for the pooling {', '.join(others) or 'of no kind'}"
        raise ModelLoadError(f"{text}; served is one of {', '.join(cfg.POOLINGS)}")
    if fields.get("include_prompt") is False and names[0] != "last":
        text = f"{path} leaves the prompt's own tokens out of the mean (include_prompt = false)"
        raise ModelLoadError(f"{text}, which is not served")
    return names[0]


def _dense(folder: str, path: Path) -> DenseConfig:
    fields = read_json(path)
    activation = str(fields.get("activation_function", "Tanh")).rpartition(".")[2].lower()
    if activation not in ("identity", "tanh", "gelu", "relu"):
        text = f"{path} has the activation {activation!r}, which is not served"
        raise ModelLoadError(f"{text}; known are identity, tanh, gelu and relu")
    sizes = fields.get("in_features"), fields.get("out_features")
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelLoadError(f"{path} must have in_features and out_features, got {sizes}")
    bias = bool(fields.get("bias", True))
    return DenseConfig(folder, fields["in_features"], fields["out_features"], bias, activation)


def _answer_ids(folder: str, architecture: str) -> tuple[int, ...]:
    """The ids of the tokens no and yes."""
    path = Path(folder) / "tokenizer.json"
    vocabulary = (read_json(path).get("model") or {}).get("vocab") if path.is_file() else {}
    if not isinstance(vocabulary, dict) or not all(word in vocabulary for word in _ANSWERS):
        text = f"task = 'score': {architecture} has no head for a score, and its tokenizer.json no"
        raise ConfigError(f"{text} tokens 'no' and 'yes'; choose a model with a head")
    return tuple(int(vocabulary[word]) for word in _ANSWERS)
