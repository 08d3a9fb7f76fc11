"""The wrapped tokenizer: loading, encoding, chat, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.messages import refused, said
from support.programs import imported
from support.small_tokenizers import load
from support.tiny_llama import byte_level_backend
from tokenizers import AddedToken, decoders, processors
from transformers import PreTrainedTokenizerFast

from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidPromptError, ModelLoadError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)
_ROLE = "{% for m in messages %}<|turn|>{{ m.role }}: "
_PARTS = "{% for p in m.content %}{{ p.text | trim if p.type == 'text' }}|{% endfor %}"
_EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + _PARTS + "{% endif %}"
_FIRST = "{{ m.content if m.content is string else m.content[0].text }}"
_END = "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
SMOL = _ROLE + "{% if m.content[0].type == 'image' %}<image>{% endif %}" + _PARTS + _END
LLAVA = _PARTS.replace("m.content", "m.content | selectattr('type', 'eq', 'text')")
LLAVA += "{% else %}{{ ' ' + m.content[0].text }}{% endif %}"
LLAVA = _ROLE + "{% if m.role == 'user' %}" + LLAVA + _END
QWEN = "{{ tools | tojson if tools }}" + _ROLE + _EITHER + "{{ m.tool_calls }}" + _END
GEMMA = "{% if m.role == 'system' %}" + _FIRST + "{% else %}"
GEMMA += "{% set at = loop.index0 - (messages[0].role == 'system') %}"
GEMMA += "{% if (m.role == 'user') != (at is even) %}{{ raise_exception('turns') }}{% endif %}"
GEMMA = _ROLE + GEMMA + _EITHER + "{% endif %}" + _END
MISTRAL = "{% elif m.role == 'system' %}" + _FIRST + "{% elif m.role != 'tool' %}"
MISTRAL += "{{ m.content + '.' }}{% elif m.tool_call_id | length == 9 %}{{ m.content | tojson }}"
MISTRAL += "{% else %}{{ raise_exception('nine') }}{% endif %}"
MISTRAL = _ROLE + "{% if m.role == 'user' %}" + _EITHER + MISTRAL + _END


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def talk(*contents: Any) -> list[dict[str, Any]]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]


def make_hf(**options: Any) -> PreTrainedTokenizerFast:
    specials, turn = ["<|begin|>", "<|end|>"], AddedToken("<|turn|>", special=True)
    backend = byte_level_backend([], specials=specials, added=[turn])
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>", **options
    )


@pytest.fixture(name="tokenizer")
def tokenizer_fixture() -> Tokenizer:
    return Tokenizer(make_hf())


def test_load_encode_decode(tmp_path: Path) -> None:
    hf = make_hf()
    hf.save_pretrained(tmp_path)
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("Zwölf 😀")
    assert ids == hf("Zwölf 😀")["input_ids"]
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "Zwölf 😀"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin|>Zwölf 😀"
    assert tokenizer.eos_token_id == 1
    assert len(tokenizer.hf) == 259
    assert tokenizer.special_token_ids == {0, 1, 258}
    assert tokenizer.byte_table is not None


def test_folder_without_tokenizer_is_none_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with said(caplog) as messages:
        assert load(tmp_path) is None
    assert [str(tmp_path) in message for message in messages] == [True]


@pytest.mark.parametrize("content", ["{", "{}", '{"model": 3}'])
def test_broken_tokenizer_names_folder_and_reason(tmp_path: Path, content: str) -> None:
    make_hf().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with refused(ModelLoadError, f"tokenizer | {tmp_path}"):
        load(tmp_path)


@pytest.mark.parametrize("text", [None, 3, ["a"], b"a", "\ud800"])
def test_only_valid_text_is_encoded(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidPromptError):
        tokenizer.encode(text)


def test_class_with_its_own_decode_gets_no_table() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **options: Any) -> str:
            return str(super()._decode(*args, **options)).upper()

    tokenizer = Tokenizer(Shouting(tokenizer_object=make_hf().backend_tokenizer))
    assert tokenizer.byte_table is None
    assert tokenizer.decode(tokenizer.encode("ab")) == "AB"


def test_other_decoders_get_no_table() -> None:
    plain: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    for decoder, expected in (
        (decoders.ByteLevel(), True),
        (decoders.Sequence([decoders.ByteLevel()]), True),
        (decoders.Sequence(plain), True),
        (decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)]), True),
        (decoders.Sequence([*plain, decoders.Strip(" ", 2, 0)]), False),
        (decoders.Sequence([*plain, decoders.Replace("a", "b")]), False),
        (decoders.Sequence([decoders.Replace("_", " "), *plain[1:]]), False),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), False),
        (decoders.Metaspace(), False),
        (decoders.WordPiece(), False),
    ):
        hf = make_hf()
        hf.backend_tokenizer.decoder = decoder
        assert (Tokenizer(hf).byte_table is not None) == expected, decoder


def test_token_text(tokenizer: Tokenizer) -> None:
    space, half = (tokenizer.hf.convert_tokens_to_ids(token) for token in ("Ġ", "ð"))
    assert tokenizer.token_text(space) == " "
    assert tokenizer.token_text(half) == "\ufffd"
    assert tokenizer.token_text(1) == "<|end|>"
    assert tokenizer.token_text(10_000) == ""


def test_chat_ids_are_those_of_the_rendered_template() -> None:
    tokenizer = Tokenizer(make_hf(chat_template=TEMPLATE))
    messages = [{"role": "user", "content": "hi"}]
    turn = [258]
    body = [tokenizer.hf.convert_tokens_to_ids(list(text)) for text in ("user:hi", "assistant:")]
    assert tokenizer.apply_chat_template(messages) == turn + body[0] + turn + body[1]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == turn + body[0]


GIVEN = talk("Rule", parts("one ", "two"), parts("an ", "swer"), "next")
RENDER: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (SMOL, talk(parts("Rule"), parts("one ", "two"), parts("an ", "swer"), parts("next"))),
        (LLAVA, talk(parts("Rule"), parts("one ", "two"), parts("an \nswer"), parts("next"))),
        *((template, GIVEN) for template in (QWEN, GEMMA)),
        (MISTRAL, talk("Rule", parts("one ", "two"), "an \nswer", "next")),
        (TEMPLATE, talk("Rule", "one \ntwo", "an \nswer", "next")),
    ],
)
def test_contents_have_the_form_that_the_template_writes(template: str, wanted: Any) -> None:
    """None that loses a part: some templates read only the first one of a role."""
    tokenizer = Tokenizer(make_hf(chat_template=template))
    for start, end in ((0, 4), (0, 2), (1, 2), (3, 4)):
        text = tokenizer.hf.apply_chat_template(wanted[start:end], **RENDER)
        assert tokenizer.render_chat(GIVEN[start:end]) == text
    rules = {"role": "system", "content": parts("Rule", "Law")}
    text = tokenizer.render_chat([rules, *GIVEN[1:3]], False, continue_final_message=True)
    assert (text.count("Rule"), text.count("Law"), text[-4:]) == (1, 1, "swer")


def test_results_of_tools_have_a_form_of_their_own() -> None:
    def turns(words: Any, result: Any) -> list[dict[str, Any]]:
        call = {"id": "123456789", "function": {"name": "sum", "arguments": {"a": 40}}}
        answer = {"role": "assistant", "content": words, "tool_calls": [call]}
        return [GIVEN[1], answer, {"role": "tool", "content": result, "tool_call_id": call["id"]}]

    for template, words, result in ((QWEN, parts(""), parts("4", "2")), (MISTRAL, "", "4\n2")):
        tokenizer, tools = Tokenizer(make_hf(chat_template=template)), [{"name": "sum"}]
        wanted = tokenizer.hf.apply_chat_template(turns(words, result), tools=tools, **RENDER)
        assert tokenizer.render_chat(turns(parts(""), parts("4", "2")), tools=tools) == wanted


def test_empty_contents_and_a_template_that_refuses_probes() -> None:
    messages = [{"role": "user", "content": content} for content in ("", [], parts("a", "b"))]
    tokenizer = Tokenizer(make_hf(chat_template="{{ messages[2].content + '.' }}"))
    assert tokenizer.render_chat(messages) == "a\nb."
    assert tokenizer.render_chat(messages[:2], False, SMOL) == "<|turn|>user: |" * 2


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_template_for_processors_is_taken_if_there_is_no_other(tmp_path: Path, file: str) -> None:
    for own, taken in ((None, "old"), ("own", "own")):
        make_hf(chat_template=own).save_pretrained(tmp_path)
        (tmp_path / file).write_text(json.dumps({"chat_template": "old"}))
        tokenizer = load(tmp_path)
        assert tokenizer.render_chat(GIVEN) == taken


def test_chat_without_a_template_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidPromptError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_call_of_a_tool_needs_no_content() -> None:
    """The second turn of a conversation with tools repeats the model's call of one."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "now"}]}
    tokenizer = Tokenizer(make_hf(chat_template=TEMPLATE))
    for message in (call, {"role": "assistant", "tool_calls": [{"name": "now"}]}):
        assert "assistant:" in tokenizer.render_chat([{"role": "user", "content": "a"}, message])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "must be a list"),
        ({"role": "user", "content": "hi"}, "must be a list"),
        (None, "must be a list"),
        ([], "is empty"),
        (["hi"], r"messages\[0\] must be"),
        ([{"role": "user"}], "no 'content'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\] has no 'role'"),
        ([{"role": "user", "content": None}], "must be a string"),
        ([{"role": "tool", "content": "a"}], "no tools here"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, words: str) -> None:
    tokenizer = Tokenizer(make_hf(chat_template=TEMPLATE))
    with pytest.raises(InvalidPromptError, match=words):
        tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "cycler.__init__.__globals__.os.system('true')",
        "messages.append(1)",
        "range(10 ** 9) | list",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(expression: str) -> None:
    """A template comes with the model: it may format messages, and reach nothing else."""
    tokenizer = Tokenizer(make_hf(chat_template="{{ " + expression + " }}"))
    with pytest.raises(InvalidPromptError, match="template refuses"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_importing_the_module_does_not_import_transformers() -> None:
    assert not {"transformers", "torch"} & imported("import tpengine.engine.detokenizer")
