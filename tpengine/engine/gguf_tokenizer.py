"""Builds a tokenizer from the vocabulary of a GGUF file.

transformers can do so too, but it splits text like GPT-2 for every byte-level vocabulary that it
does not know, and imports the code of many models. The patterns here are those of the models' own
`tokenizer.json`; `tokenizer.ggml.pre` names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tpengine.checkpoint.gguf_config import CONTROL, END_TOKENS, USER_DEFINED
from tpengine.checkpoint.gguf_file import open_gguf
from tpengine.errors import ModelLoadError
from tpengine.logger import init_logger

logger = init_logger(__name__)

_SPACE = "\u2581"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_REST_WITH_SLASHES = _REST.replace(r"+[\r\n]*|", r"+[\r\n/]*|")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PATTERNS = {
    ("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"): (_GPT2,),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"): (r"\p{N}", _GPT2),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe", "glm4"): (
        rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",
    ),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"): (
        rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_REST}",
    ),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): (
        rf"{_LOWER_WORD}{_SUFFIX}?|{_UPPER_WORD}{_SUFFIX}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}",
    ),
    ("tekken",): (rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}|{_REST_WITH_SLASHES}",),
    ("bloom",): (" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",),
}
"""By `tokenizer.ggml.pre`: the patterns that split a text, one after the other."""
_KEEPS_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken", "glm4")
"""Vocabularies in which no merges are needed for a word that is a token."""
_ADDS_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Vocabularies whose texts begin with bos even if the file does not say so."""
_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 that keep the spaces behind them; the others strip them, which no file says."""

_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPECIAL_TOKENS |= {"sep": "seperator", "mask": "mask"}
"""By the names of transformers: those of the file."""


def gguf_tokenizer_parts(path: str) -> dict[str, Any]:
    """Returns the arguments of transformers' `PreTrainedTokenizerFast`.

    Raises:
        ModelLoadError: the kind of vocabulary is not supported.
        Exception: of any type, if the vocabulary is damaged.
    """
    metadata = open_gguf(path).metadata
    prefix = "tokenizer.ggml."
    fields = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    kind, pre = fields.get("model"), fields.get("pre", "default")
    if kind not in ("gpt2", "llama"):
        raise _unsupported("model", kind, path, ("gpt2", "llama"))
    tokens: list[str] = fields["tokens"]
    names: dict[str, str] = {}
    for name, key in _SPECIAL_TOKENS.items():
        token_id = fields.get(f"{key}_token_id")
        if type(token_id) is int and 0 <= token_id < len(tokens):
            names[name] = tokens[token_id]
        elif token_id is not None and name != "pad":  # nothing is padded
            text = f"tokenizer.ggml.{key}_token_id = {token_id!r:.80} in {path}"
            raise ModelLoadError(f"{text} must be the id of one of its {len(tokens)} tokens")
    if kind == "llama":
        # Runs of spaces are there as spaces, which the normalizer replaces in a text.
        tokens = [token.replace(" ", _SPACE) if set(token) == {" "} else token for token in tokens]
        by_rank = "gemma" in metadata["general.architecture"]  # its scores have another order
        scores = range(0, -len(tokens), -1) if by_rank else fields["scores"].tolist()
        prefixed = fields.get("add_space_prefix", True)
        backend = _sentencepiece(tokens, scores, names.get("unk"), prefixed)
    else:
        patterns = next((split for names, split in _PATTERNS.items() if pre in names), None)
        if patterns is None:
            raise _unsupported("pre", pre, path, [name for names in _PATTERNS for name in names])
        if "pre" not in fields:
            logger.warning(
                "%s has no tokenizer.ggml.pre: texts are split as GPT-2 splits them; convert the "
                "file again if answers are bad",
                path,
            )
        backend = _byte_level(tokens, fields.get("merges", []), patterns, pre in _KEEPS_WORDS)
    kinds = fields["token_type"].tolist() if "token_type" in fields else [0] * len(tokens)
    strips = kind == "llama" and metadata["general.architecture"] == "phi3"
    wholes: dict[bool, list[AddedToken]] = {True: [], False: []}  # by whether they are special
    for token, token_kind in zip(tokens, kinds, strict=True):
        if token_kind in (CONTROL, USER_DEFINED) and set(token) != {_SPACE}:
            whole = AddedToken(token, normalized=False, rstrip=strips and token not in _NEVER_STRIP)
            wholes[token_kind == CONTROL or token in END_TOKENS].append(whole)
    backend.add_special_tokens(wholes[True])  # a call takes the time of all tokens added so far
    backend.add_tokens(wholes[False])
    first = fields.get("add_bos_token", kind == "llama" or pre in _ADDS_BOS)
    around = [[names["bos"]] if first and "bos" in names else []]
    around.append([names["eos"]] if fields.get("add_eos_token") and "eos" in names else [])
    backend.post_processor = TemplateProcessing(
        single=[*around[0], "$A", *around[1]],
        special_tokens=[(t, backend.token_to_id(t)) for t in {*around[0], *around[1]}],
    )
    return {
        "tokenizer_object": backend,
        "chat_template": _chat_templates(metadata),
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": token for name, token in names.items()},
    }


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Returns the chat template; several by their names, of which `default` is that of no name."""
    plain, before = metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {key.removeprefix(before): metadata[key] for key in metadata if key.startswith(before)}
    if named and plain is not None:
        named["default"] = plain
    return named or plain


def _unsupported(key: str, value: object, path: str, supported: Iterable[str]) -> ModelLoadError:
    return ModelLoadError(
        f"tokenizer.ggml.{key} = {value!r} in {path} is not supported; supported: "
        f"{', '.join(supported)}. Name the folder of the model's own tokenizer with `tokenizer`"
    )


def _byte_level(
    tokens: list[str], merges: list[str], patterns: Iterable[str], keeps_words: bool
) -> Tokenizer:
    """BPE over bytes, as GPT-2, Llama 3 and Qwen have it."""
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=keeps_words))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokens: list[str], scores: Iterable[float], unknown: str | None, prefixed: bool
) -> Tokenizer:
    """BPE over characters, as Llama 2 and Gemma have it.

    The file has no merges: every pair of tokens that makes a token is one, by the token's score.
    """
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            if token[:cut] in vocab and token[cut:] in vocab:
                merges.append((-score, -cut, (token[:cut], token[cut:])))
    merges.sort(key=lambda merge: merge[:2])
    pairs = [pair for _, _, pair in merges]
    backend = Tokenizer(
        models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    before: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    after: list[Any] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return backend
