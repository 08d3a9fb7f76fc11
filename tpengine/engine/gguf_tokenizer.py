"""Builds a tokenizer from the vocabulary of a GGUF file.

transformers can do so too, but it splits text like GPT-2 for every byte-level vocabulary that it
does not know, and imports the code of many models. The patterns here are those of the models' own
`tokenizer.json`; `tokenizer.ggml.pre` names them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tpengine.errors import ModelLoadError
from tpengine.gguf_config import CONTROL, USER_DEFINED
from tpengine.gguf_file import GGUFFile, open_gguf

_NORMAL = 1
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


def gguf_tokenizer_parts(path: str) -> dict[str, Any] | None:
    """Returns the arguments of transformers' `PreTrainedTokenizerFast`.

    Returns:
        None if the file has no vocabulary.

    Raises:
        ModelLoadError: the vocabulary is damaged, or of a kind that is not supported.
    """
    file = open_gguf(path)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"tokenizer.ggml.model = {kind!r} in {path} is not supported; supported: gpt2, llama. "
            "Name the folder of the model's own tokenizer with `tokenizer`"
        )
    vocabulary = _Vocabulary(file)
    backend = vocabulary.byte_level() if kind == "gpt2" else vocabulary.sentencepiece()
    vocabulary.add_tokens(backend)
    names = {name: vocabulary.special(key) for name, key in _SPECIAL_TOKENS.items()}
    vocabulary.add_template(backend, names, adds_bos=kind == "llama")
    return {
        "tokenizer_object": backend,
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in names.items() if token is not None},
    }


_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class _Vocabulary:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tokens: list[str] = self._get("tokens", list, [])
        kinds = self._get("token_type", np.ndarray, np.full(len(self._tokens), _NORMAL))
        if not self._tokens or len(kinds) != len(self._tokens):
            raise ModelLoadError(
                f"{file.path} has {len(self._tokens)} tokens and {len(kinds)} types of tokens"
            )
        self._kinds = kinds.tolist()
        self._pre = self._get("pre", str, "default")

    def _get(self, key: str, kind: type, default: Any) -> Any:
        value = self._file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind):
            raise ModelLoadError(
                f"tokenizer.ggml.{key} in {self._file.path} is a {type(value).__name__}, and must "
                f"be a {kind.__name__}; the file is damaged"
            )
        return value

    def special(self, key: str) -> str | None:
        """Text of a token that the metadata names by its id."""
        token_id = self._get(key, int, -1)
        if token_id >= len(self._tokens):
            raise ModelLoadError(
                f"tokenizer.ggml.{key} = {token_id} in {self._file.path}, which has "
                f"{len(self._tokens)} tokens; the file is damaged"
            )
        return None if token_id < 0 else self._tokens[token_id]

    def byte_level(self) -> Tokenizer:
        """BPE over bytes, as GPT-2, Llama 3 and Qwen have it."""
        patterns = next((found for names, found in _PATTERNS.items() if self._pre in names), None)
        if patterns is None:
            known = ", ".join(name for names in _PATTERNS for name in names)
            raise ModelLoadError(
                f"tokenizer.ggml.pre = {self._pre!r} in {self._file.path} is not supported; "
                f"supported: {known}. Name the folder of the model's tokenizer with `tokenizer`"
            )
        merges = [tuple(merge.split(" ")) for merge in self._get("merges", list, [])]
        vocab = {token: i for i, token in enumerate(self._tokens)}
        keeps_words = self._pre in _KEEPS_WORDS
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=keeps_words))
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        backend.decoder = decoders.ByteLevel()
        return backend

    def sentencepiece(self) -> Tokenizer:
        """BPE over characters, as Llama 2 and Gemma have it; the file holds scores, not merges."""
        # Files have runs of spaces as spaces, and the normalizer replaces them.
        self._tokens = [
            token.replace(" ", _SPACE) if token.isspace() and "\n" not in token else token
            for token in self._tokens
        ]
        vocab = {token: i for i, token in enumerate(self._tokens)}
        backend = Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=self._merges(vocab),
                unk_token=self.special("unknown_token_id"),
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
        stages: list[Any] = [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        if self._get("add_space_prefix", bool, True):
            spaces.insert(0, normalizers.Prepend(_SPACE))
            stages.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(spaces)
        backend.decoder = decoders.Sequence(stages)
        return backend

    def _merges(self, vocab: dict[str, int]) -> list[tuple[str, str]]:
        """All pairs of tokens that make a token, the best token first."""
        scores = self._get("scores", np.ndarray, np.zeros(0)).tolist()
        if "gemma" in str(self._file.metadata["general.architecture"]):
            scores = list(range(0, -len(self._tokens), -1))  # its scores are not in merging order
        if len(scores) != len(self._tokens):
            raise ModelLoadError(
                f"{self._file.path} has {len(self._tokens)} tokens and {len(scores)} scores"
            )
        merges = []
        for token, kind, score in zip(self._tokens, self._kinds, scores, strict=True):
            if kind not in (_NORMAL, USER_DEFINED):
                continue
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocab and right in vocab:
                    merges.append((-score, -cut, left, right))
        merges.sort(key=lambda merge: merge[:2])
        return [(left, right) for _, _, left, right in merges]

    def add_tokens(self, backend: Tokenizer) -> None:
        """Adds the tokens that are found in a text as a whole."""
        for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
            tokens = [
                AddedToken(token, normalized=False, special=is_special)
                for token, its_kind in zip(self._tokens, self._kinds, strict=True)
                if its_kind == kind and not token.startswith(_SPACE)
            ]
            add = backend.add_special_tokens if is_special else backend.add_tokens
            add(tokens)

    def add_template(
        self, backend: Tokenizer, names: dict[str, str | None], adds_bos: bool
    ) -> None:
        """Begins every text with bos and ends it with eos, if the vocabulary does so."""
        bos = self._get("add_bos_token", bool, adds_bos or self._pre in _ADDS_BOS)
        eos = self._get("add_eos_token", bool, False)
        first = [names["bos_token"]] if bos and names["bos_token"] is not None else []
        last = [names["eos_token"]] if eos and names["eos_token"] is not None else []
        backend.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*first, *last}],
        )
