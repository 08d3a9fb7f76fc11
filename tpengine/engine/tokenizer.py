"""Wraps a Hugging Face tokenizer, so that the rest of the engine does not import `transformers`."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import re
import tempfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from tpengine import errors
from tpengine.checkpoint.gguf_file import is_gguf, open_gguf
from tpengine.checkpoint.model_files import read_json
from tpengine.config import ModelConfig
from tpengine.logger import init_logger
from tpengine.structured.grammars import Vocabulary

logger = init_logger(__name__)

Messages = Sequence[Mapping[str, Any]]
_TOKENIZER_FILES = (
    "tokenizer*.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json",
)  # fmt: skip
_SHARED_FILES = (
    *_TOKENIZER_FILES,
    *("special_tokens_map.json", "added_tokens.json", "chat_template.*", "*config.json"),
    "additional_chat_templates/*",
)
_PLAIN = ("PreTrainedTokenizer", "TokenizersBackend")
"""Names, without the ending Fast, of a tokenizer that does what its tokenizer.json says."""
_CERTAIN_CLASSES: Mapping[str, Sequence[str]] = {
    "bloom": _PLAIN,
    "gpt2": (*_PLAIN, "GPT2Tokenizer"),
    "llama": (*_PLAIN, "GPT2Tokenizer", "LlamaTokenizer"),
    "mistral": _PLAIN,
    "opt": (*_PLAIN, "GPT2Tokenizer"),
    "qwen2": ("Qwen2Tokenizer",),
    "qwen3": (*_PLAIN, "Qwen2Tokenizer"),
}
"""By `model_type`: classes that `AutoTokenizer` takes if tokenizer_config.json names them. To
import `AutoTokenizer` takes about two seconds, and such a class a third of that."""
_METASPACE_STAGES = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_STAGE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEXT_PARTS = ("text", "refusal")
"""Types of parts that are text, in a field of the type's name."""
_PROBE_WORDS, _PROBE_KEY = ("ProbeOne", "ProbeTwo"), "ProbeKey"
_PROBE_PARTS = [{"type": "text", "text": word, _PROBE_KEY: ""} for word in _PROBE_WORDS]
PICTURE_PART = {"type": "image"}
"""What a chat template gets for a picture."""
_PROBES = {
    "text": _PROBE_WORDS[0], "part": _PROBE_PARTS[:1], "parts": _PROBE_PARTS,
    "pictures": [PICTURE_PART, _PROBE_PARTS[0], PICTURE_PART, _PROBE_PARTS[1]],
}  # fmt: skip
"""By name: contents in the forms that a template may accept. A template that writes the key prints
a list as Python or JSON does."""


@dataclass(frozen=True, eq=False)
class ByteTable:
    """The text of every id in UTF-8, for tokenizers that decode each token independently of its
    neighbours.

    Attributes:
        pieces: by id. A token may begin or end inside a character; an id that the tokenizer does
            not know is empty.
        strips_first_space: the whole text loses one leading space (SentencePiece).
    """

    pieces: list[bytes]
    strips_first_space: bool


class Tokenizer:
    """Converts text to ids and back.

    It never cleans text up (an option of old Hugging Face tokenizers that removes spaces before
    punctuation): that would change text that was already streamed.

    Attributes:
        hf: the wrapped Hugging Face tokenizer; also `tokenizer`, as in vLLM.
        fast_backend: its `tokenizers.Tokenizer`; None for one written in Python.
        special_token_ids: ids that `skip_special_tokens` leaves out.
        eos_token_id: id of the end token; None if the tokenizer names none.
        byte_table: None if a token's text depends on its neighbours in other ways than UTF-8.

    Args:
        processor_template: chat template of the model's processor, for a tokenizer without one.

    Raises:
        ConfigError: `hf` is no tokenizer of transformers.
    """

    tokenizer = property(attrgetter("hf"))

    def __init__(self, hf: Any, processor_template: str | None = None) -> None:
        if not hasattr(hf, "is_fast"):
            hint = "load it with transformers.AutoTokenizer.from_pretrained"
            text = f"a tokenizer must be one of transformers, got {hf!r:.80}; {hint}"
            raise errors.ConfigError(text)
        self.hf = hf
        self._processor_template = None if hf.chat_template else processor_template
        hf.chat_template = hf.chat_template or processor_template
        self.fast_backend: Any = hf.backend_tokenizer if hf.is_fast else None
        self.special_token_ids: frozenset[int] = _special_token_ids(hf, self.fast_backend)
        if self.fast_backend is not None:
            # Else the first call of `encode` would do it: later ones only read, from many threads.
            self.fast_backend.no_truncation()
            self.fast_backend.no_padding()
        end = hf.eos_token_id
        self.eos_token_id: int | None = None if end is None else int(end)
        self.byte_table: ByteTable | None = None
        # Where `hf` adds nothing to its backend's decode, most of its time is overhead: skip it.
        self._plain_backend: Any = self.fast_backend if _decodes_plainly(hf) else None
        if self._plain_backend is not None:
            self.byte_table = _build_byte_table(self._plain_backend)
        self._content_forms = functools.lru_cache(256)(self._find_content_forms)
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()

    def vocabulary(self, model: ModelConfig) -> Vocabulary:
        """Returns what grammars need; made at the first call, which may take tenths of a second.

        Raises:
            InvalidSamplingParamsError: it is written in Python, or there is no end token.
        """
        if self.fast_backend is None:
            needed = "needs a tokenizer of the library tokenizers"
            text = f"{needed}, and this model's is written in Python"
            raise errors.InvalidSamplingParamsError.of_field("structured_outputs", text)
        end_ids = self.end_token_ids(model)
        if not end_ids:
            hint = "set eos_token_id in its config.json"
            text = f"needs an end token, and the model names none; {hint}"
            raise errors.InvalidSamplingParamsError.of_field("structured_outputs", text)
        with self._making:
            if self._vocabulary is None:
                backend = copy.copy(self.fast_backend)  # a caller may have set them since
                backend.no_padding()
                backend.no_truncation()
                self._vocabulary = Vocabulary(backend.to_str(), model.vocab_size, sorted(end_ids))
            return self._vocabulary

    def end_token_ids(self, model: ModelConfig) -> frozenset[int]:
        """Returns the ids that end a sequence of this model, the tokenizer's own too."""
        own = model.end_token_ids
        if self.eos_token_id is not None:
            own |= {self.eos_token_id}
        # Some configurations name ids that the model does not have.
        return frozenset(i for i in own if i < model.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`, with the special tokens that the model expects around it.

        Args:
            add_special_tokens: False leaves those out.

        Raises:
            InvalidPromptError: `text` is not a string, or not valid Unicode (a lone surrogate).
        """
        _check_text(text)
        # `verbose=False`: the engine checks the length itself, so no warning about it.
        return list(self.hf.encode(text, verbose=False, add_special_tokens=add_special_tokens))

    def encode_pair(
        self, first: str, second: str | None, max_tokens: int | None
    ) -> tuple[list[int], int | None]:
        """Returns the ids of one text or of a pair, with special tokens, and where the tokens of
        the second type begin; None: all are of one type.

        Args:
            max_tokens: ids that are kept, special ones included: the longer text loses its end
                first; None: all.

        Raises:
            InvalidPromptError: a text is no string or no valid Unicode, or `max_tokens` leaves no
                room; or the tokenizer is written in Python.
        """
        texts = [first] if second is None else [first, second]
        room = None
        if max_tokens is not None and self.fast_backend is not None:
            num_special = self.fast_backend.num_special_tokens_to_add(second is not None)
            room = max_tokens - num_special
        parts = self._encode_parts(texts, room)
        whole = self.fast_backend.post_process(*parts, add_special_tokens=True)
        types = whole.type_ids if "token_type_ids" in self.hf.model_input_names else []
        return list(whole.ids), types.index(1) if 1 in types else None

    def cut_pair(self, first: str, second: str, max_tokens: int) -> tuple[str, str]:
        """Returns two texts that have so many tokens together: the longer one loses its end first.

        Raises:
            InvalidPromptError: see `encode_pair`.
        """
        parts = self._encode_parts([first, second], max_tokens)
        ends = [part.offsets[-1][1] if part.offsets else 0 for part in parts]
        return first[: ends[0]], second[: ends[1]]

    def _encode_parts(self, texts: Sequence[str], room: int | None) -> list[Any]:
        """One text or two without special tokens, as the library has them, in `room` tokens."""
        backend = self.fast_backend
        if backend is None:
            text = "pairs and truncation need a tokenizer of the library tokenizers"
            raise errors.InvalidPromptError(f"{text}, and this model's is written in Python")
        for text in texts:
            _check_text(text)
        parts = [backend.encode(text, add_special_tokens=False) for text in texts]
        if room is None:
            return parts
        if room < len(texts):
            problem = "leaves no room for the text beside the model's own tokens; give more"
            raise errors.InvalidPromptError.of_field("truncate_prompt_tokens", problem)
        shorter = min(len(part.ids) for part in parts) if len(parts) == 2 else 0
        for part in parts:
            most = room - min(shorter, room // 2) if len(part.ids) > shorter else room // 2
            part.truncate(max(1, most))
        return parts

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; for text that grows use `Detokenizer`."""
        if self._plain_backend is not None:
            text = self._plain_backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return str(text)
        options = {"skip_special_tokens": skip_special_tokens}
        return str(self.hf.decode(list(token_ids), clean_up_tokenization_spaces=False, **options))

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token alone, special or not; U+FFFD for a part of a character."""
        table = self.byte_table
        if table is None:
            return self.decode([token_id], skip_special_tokens=False)
        piece = table.pieces[token_id] if token_id < len(table.pieces) else b""
        return piece.decode("utf-8", "replace")

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Returns the ids of a conversation; see `render_chat`.

        Raises:
            InvalidPromptError: malformed messages, no chat template, or the template refuses.
        """
        return self.encode_chat(self.render_chat(messages, add_generation_prompt, **options))

    def encode_chat(self, text: str) -> list[int]:
        """Returns the ids of a conversation's text.

        The template writes all special tokens, unless it is a processor's: to its text transformers
        adds those that the tokenizer adds to any text, if it does not begin with the first one.
        """
        begin = self.hf.bos_token
        is_whole = self._processor_template is None or bool(begin and text.startswith(begin))
        return self.encode(text, add_special_tokens=not is_whole)

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        picture_token: str | None = None,
        **options: Any,
    ) -> str:
        """Returns the text of a conversation in the form that the model was trained on.

        Args:
            messages: `{"role": ..., "content": ...}`. The content is a string, or a list of parts
                `{"type": "text", "text": ...}`. A template that writes only one of these forms gets
                that one: a string becomes a part, and parts become a string, joined by line breaks.
                `{"type": "image"}` stands for a picture. The template gets other keys too.
            add_generation_prompt: end with the opening of the assistant's answer.
            chat_template: a template in Jinja, or the name of one of the model's, in place of that
                which the model has for all conversations, or for those with `tools` ("tool_use").
            picture_token: text of a picture, where the template writes none; None: the model reads
                text alone.
            options: further arguments of transformers' `apply_chat_template` (such as `tools` and
                `continue_final_message`); it passes on to the template what it does not know.

        Raises:
            InvalidPromptError: malformed messages, no chat template, or the template refuses.
        """
        conversation = _read_messages(messages, picture_token)
        if not (chat_template or self.hf.chat_template):
            raise errors.InvalidPromptError(
                "this model has no chat template (chat_template.jinja, or chat_template in its "
                "tokenizer_config.json): it was not trained to chat. Write the conversation as one "
                "text and call generate (`tpengine generate`) with it, or add chat_template.jinja"
            )
        named = self.hf.chat_template if isinstance(self.hf.chat_template, dict) else {}
        if not (chat_template is None or "{" in str(chat_template) or str(chat_template) in named):
            known = ", ".join(sorted(named)) or "they have none"
            text = f"is {chat_template!r:.80}, neither a template in Jinja nor the name of one of "
            text = f"{text}the model's own ({known})"
            raise errors.InvalidPromptError.of_field("chat_template", text)
        try:
            options |= {"chat_template": chat_template, "tokenize": False}
            options["add_generation_prompt"] = add_generation_prompt
            template = self.hf.get_chat_template(chat_template, options.get("tools"))
            for message in conversation:
                if message.get("content") is not None:
                    forms = self._content_forms(template, message["role"], picture_token)
                    message["content"] = _in_form(message["content"], forms, picture_token)
            text = self.hf.apply_chat_template(conversation, **options)
        except Exception as error:  # the template is code from the model's folder
            problem = f"the model's chat template refuses these messages: {error}"
            raise errors.InvalidPromptError(problem) from error
        return str(text)

    def _find_content_forms(
        self, template: str, role: str, picture_token: str | None
    ) -> frozenset[str]:
        """Returns the keys of `_PROBES` that a template writes whole in messages of a role; if it
        refuses all of them, those of a user's messages."""
        of_user, forms = frozenset[str](), set[str]()
        if role != "user":
            of_user = self._content_forms(template, "user", picture_token)
        for form, content in _PROBES.items():
            talk = _conversation_around(role, content, _in_form("Hello", of_user))
            with contextlib.suppress(Exception):  # the template is code from the model's folder
                text = self.hf.apply_chat_template(talk, chat_template=template, tokenize=False)
                words = [word for word in _PROBE_WORDS if word in str(content)]
                if form == "pictures" and text.count(str(picture_token)) != content.count(
                    PICTURE_PART
                ):
                    continue
                if _PROBE_KEY not in text and all(word in text for word in words):
                    forms.add(form)
        return frozenset(forms) or of_user


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        problem = f"a prompt must be a string, got {type(text).__name__}"
        raise errors.InvalidPromptError(f"{problem}; ids go into prompt_token_ids")
    try:
        text.encode()  # the tokenizer's own error for a lone surrogate is unclear
    except UnicodeEncodeError as error:
        problem = f"character {error.start} ({text[error.start]!r}: {error.reason})"
        problem = f"{problem}; decode its bytes with errors='replace'"
        raise errors.InvalidPromptError(f"a text is no valid Unicode at {problem}") from None


def load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """Loads the tokenizer of `config`; returns None if it names none, or a folder without any.

    Without a tokenizer prompts must be ids, and outputs have no text.

    Raises:
        ConfigError: the slow tokenizer of a GGUF file is asked for.
        ModelLoadError: there are tokenizer files, but they cannot be read.
    """
    if config.tokenizer is None:
        return None
    folder = Path(config.tokenizer)
    if is_gguf(folder) and config.tokenizer_mode == "slow":
        text = f"{folder} has no slow tokenizer; leave tokenizer_mode = 'slow' out"
        raise errors.ConfigError(text)
    if not has_tokenizer(config.tokenizer):
        logger.info("%s has no tokenizer: prompts must be ids, outputs have no text", folder)
        return None
    try:
        if is_gguf(folder):
            return _load_gguf_tokenizer(str(folder))
        return _load_hf(config, folder)
    except errors.ModelLoadError:
        raise
    except Exception as error:  # parsers and remote tokenizers raise errors of any type
        for path in _tokenizer_files(folder):
            if path.suffix == ".json":
                read_json(path)  # an error of the parser's own names no file
        text = f"the tokenizer in {folder} cannot be loaded ({type(error).__name__}: {error})"
        hint = "repair or fetch its files again, or name another folder with `tokenizer`"
        if isinstance(error, ImportError):
            hint = "install it, or send ids, with skip_tokenizer_init = True"
        raise errors.ModelLoadError(f"{text}; {hint}") from error


def has_tokenizer(folder: str | None) -> bool:
    """Whether a folder or a GGUF file has a tokenizer; None has none.

    Raises:
        ModelLoadError: a GGUF file is damaged.
    """
    if folder is None:
        return False
    if is_gguf(folder):
        kind = open_gguf(folder).metadata.get("tokenizer.ggml.model")
        return kind not in (None, "none", "no_vocab")
    return any(next(Path(folder).glob(pattern), None) for pattern in _TOKENIZER_FILES)


@functools.lru_cache(maxsize=1)
def tokenizer_archive(tokenizer: Tokenizer, folder: str) -> bytes:
    """Returns a ZIP archive of the files from which another program makes this tokenizer: those of
    its folder, with the model's configuration; of a GGUF file those that transformers writes. It is
    always the same for the same files.

    Args:
        folder: `ModelConfig.tokenizer`.
    """
    archive = io.BytesIO()
    with tempfile.TemporaryDirectory() as written, zipfile.ZipFile(archive, "w") as target:
        if is_gguf(folder):
            tokenizer.hf.save_pretrained(written)
            folder = written
        for path in _tokenizer_files(Path(folder)):
            # An entry made from a name alone has a constant date.
            entry = zipfile.ZipInfo(str(path.relative_to(folder)))
            target.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def _tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer, with the model's configuration."""
    return sorted({file for kind in _SHARED_FILES for file in folder.glob(kind)})


def _load_hf(config: ModelConfig, folder: Path) -> Tokenizer:
    """Loads the tokenizer of transformers, by its class where that is certain."""
    import transformers

    name = None if config.tokenizer_mode == "slow" else _certain_class(folder)
    # The folder is complete: loading must not wait for a network.
    options: dict[str, Any] = {"local_files_only": True}
    if name is None:
        options["use_fast"] = config.tokenizer_mode != "slow"
        options["trust_remote_code"] = config.trust_remote_code
    hf = getattr(transformers, name or "AutoTokenizer").from_pretrained(str(folder), **options)
    if len(hf.get_vocab()) <= len(hf.all_special_ids):
        text = f"the tokenizer in {folder} has special tokens alone: the file of its vocabulary"
        raise errors.ModelLoadError(f"{text}, such as tokenizer.json, is missing; fetch it")
    template = None
    for file in ("processor_config.json", "chat_template.json"):
        # Old vision-language models: transformers gives these only to their processors.
        if template is None and (folder / file).is_file():
            template = read_json(folder / file).get("chat_template")
    return Tokenizer(hf, template)


def _certain_class(folder: Path) -> str | None:
    """Name of the class that `AutoTokenizer` would take for the files in `folder`; None: that
    depends on more than the files say, such as the version of transformers."""
    files = (folder / f"{kind}.json" for kind in ("config", "tokenizer_config"))
    model, own = (read_json(path) if path.is_file() else {} for path in files)
    name, file = str(own.get("tokenizer_class")).removesuffix("Fast"), folder / "tokenizer.json"
    is_plain_folder = file.is_file() and not (folder / "tekken.json").exists()
    known = _CERTAIN_CLASSES.get(str(model.get("model_type")), ())
    if name not in known or "auto_map" in own or not is_plain_folder:
        return None
    if name in _PLAIN:
        return "PreTrainedTokenizerFast"
    if name == "LlamaTokenizer" and '"ByteLevel"' in file.read_text(encoding="utf-8"):
        return None  # a wrong name in many folders
    return f"{name}Fast"  # a second name of the class since version 5


def _load_gguf_tokenizer(path: str) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    from tpengine.engine.gguf_tokenizer import gguf_tokenizer_parts

    return Tokenizer(PreTrainedTokenizerFast(**gguf_tokenizer_parts(path)))


def _read_messages(messages: object, picture_token: str | None) -> list[dict[str, Any]]:
    """Returns a checked conversation; contents are strings, lists of parts, or None beside
    `tool_calls`."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        must = 'must be a list of {"role": ..., "content": ...}'
        text = f"{must}, got {type(messages).__name__}"
        raise errors.InvalidPromptError.of_field("messages", text)
    if not messages:
        raise errors.InvalidPromptError.of_field("messages", "is empty; give at least one")
    conversation = []
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        if not isinstance(message, Mapping):
            text = f"must be a dict with role and content, got {message!r:.80}"
            raise errors.InvalidPromptError.of_field(place, text)
        fields = dict(message)
        if isinstance(fields.get("content"), (list, tuple)):
            parts = fields["content"]
            fields["content"] = _read_parts(parts, f"{place}.content", picture_token)
        # The template knows what a call of a tool without a text looks like.
        is_call = bool(fields.get("tool_calls")) and fields.get("content") is None
        for key in ("role",) if is_call else ("role", "content"):
            if key not in fields:
                text = f"{place} has no {key!r}: {fields!r}"
                raise errors.InvalidPromptError(text, field=f"{place}.{key}")
            if not isinstance(fields[key], (str, list) if key == "content" else str):
                text = f"must be a string, got {fields[key]!r:.80}"
                raise errors.InvalidPromptError.of_field(f"{place}.{key}", text)
        conversation.append(fields)
    return conversation


def _read_parts(
    parts: Sequence[Any], place: str, picture_token: str | None
) -> list[dict[str, str]]:
    """Returns the content of a message that is given as parts.

    Args:
        place: path of the parts, for the error.
    """
    read = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if part == PICTURE_PART and picture_token is not None:
            read.append(PICTURE_PART)
            continue
        if kind not in _TEXT_PARTS or not isinstance(part.get(kind), str):
            known = '{"type": "text", "text": ...}'
            if picture_token is not None:
                known += ' or {"type": "image_url", "image_url": {"url": ...}}'
            text = f"must be {known}, got {part!r:.80}"
            raise errors.InvalidPromptError.of_field(f"{place}[{i}]", text)
        read.append({"type": "text", "text": part[kind]})
    return read


def _in_form(
    content: str | list[dict[str, str]], forms: frozenset[str], picture_token: str | None = None
) -> Any:
    """Returns a content unchanged if the template accepts it, else in a form that it does accept;
    a string if it accepts none."""
    if not isinstance(content, str):
        if content and ("pictures" if PICTURE_PART in content else "parts") in forms:
            return content
        # A template may read the first part alone: several become one.
        content = "\n".join(part.get("text", str(picture_token)) for part in content)
    if "text" in forms or "part" not in forms:
        return content
    return [{"type": "text", "text": content}]


def _conversation_around(role: str, content: Any, hello: Any) -> list[dict[str, Any]]:
    """Returns a conversation as strict templates want it, with one message of this content; an
    empty one for an unknown role, of which a client may invent many.

    Args:
        hello: content of a user's message, if one is needed.
    """
    ask, name = {"role": "user", "content": hello}, "probecall"  # Mistral wants nine characters
    call = {"type": "function", "id": name, "function": {"name": name, "arguments": {}}}
    message = {"role": role, "content": content, "tool_call_id": name}
    around = {
        **{first: [message, ask] for first in ("system", "developer")},
        "user": [message],
        "assistant": [ask, message],
        "tool": [ask, {"role": "assistant", "content": "", "tool_calls": [call]}, message],
    }
    return around.get(role, [])


def _special_token_ids(hf: Any, backend: Any) -> frozenset[int]:
    if backend is None:
        return frozenset(hf.all_special_ids)
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _decodes_plainly(hf: Any) -> bool:
    """Whether the tokenizer's class leaves `decode` as transformers defines it."""
    for name in ("decode", "_decode"):
        owner = next((cls for cls in type(hf).__mro__ if name in vars(cls)), None)
        if owner is not None and not owner.__module__.startswith("transformers.tokenization_"):
            return False
    return True


def _build_byte_table(backend: Any) -> ByteTable | None:
    """Builds the table if the backend's decoder is one of two known kinds, else returns None.

    Byte-level BPE (GPT-2, OPT, BLOOM, Llama 3, Qwen) and SentencePiece BPE with byte fallback
    (Llama 2, Mistral, Gemma) map each token to bytes independently of its neighbours.
    """
    # The whole backend as JSON, with its vocabulary, would take tenths of a second.
    decoder = backend.decoder
    stages = _decoder_stages(None if decoder is None else json.loads(decoder.__getstate__()))
    if [stage["type"] for stage in stages] in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        token_bytes = _byte_level_bytes
    elif stages in (_METASPACE_STAGES, [*_METASPACE_STAGES, _STRIP_STAGE]):
        token_bytes = _byte_fallback_bytes
    else:
        return None
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    pieces = []
    for token_id in range(size):
        token = backend.id_to_token(token_id)
        pieces.append(b"" if token is None else token_bytes(token))
    return ByteTable(pieces, strips_first_space=_STRIP_STAGE in stages)


def _decoder_stages(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for inner in decoder["decoders"] for stage in _decoder_stages(inner)]


def _byte_level_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 is itself, other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[char] for char in token])
    except KeyError:  # an added token is literal text: it may hold any character
        return token.encode("utf-8")


def _byte_fallback_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode("utf-8")


def get_tokenizer(
    tokenizer_name: str, *args: Any, tokenizer_mode: str = "auto", **kwargs: Any
) -> Any:
    """Returns a tokenizer of transformers, for scripts; an engine uses `load_tokenizer`.

    Args:
        tokenizer_name: a folder, or the name of a model in the hub.
        args, kwargs: further arguments of `AutoTokenizer.from_pretrained`; `download_dir` is its
            `cache_dir`.
    """
    from transformers import AutoTokenizer

    kwargs = {"use_fast": tokenizer_mode != "slow", "truncation_side": "left"} | kwargs
    cache_dir = kwargs.pop("download_dir", None)
    return AutoTokenizer.from_pretrained(tokenizer_name, *args, cache_dir=cache_dir, **kwargs)
