"""Incremental text against Hugging Face's decode of the whole, on small tokenizers made here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patches import on_call
from support.small_tokenizers import SPECIALS, metaspace, stream_all
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from tpengine.engine.detokenizer import ByteStream, Detokenizer, WindowStream, open_stream
from tpengine.engine.tokenizer import Tokenizer
from tpengine.sampling_params import SamplingParams

LINES = [
    "Hello world, the quick brown fox jumps over the lazy dog. 👩‍👩‍👧 😀 e\u0301 n\u0303",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "Привет мир, как дела? 日本語のテキスト नमस्ते مرحبا",
] * 8
FFFD = "\ufffd"


def _wrap(backend: Backend, special: Sequence[str], added: Sequence[str]) -> Tokenizer:
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def byte_level_tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    backend.train_from_iterator(LINES, trainer)
    # Added tokens are literal text, unless all their characters are in the byte alphabet ("é").
    return _wrap(backend, ["<|end|>", "<|im start|>"], ["é", "two words", "日"])


def byte_fallback_tokenizer(strips: bool) -> Tokenizer:
    backend = metaspace()
    if strips:
        backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
    return _wrap(backend, SPECIALS, ["new word"])


BYTE_LEVEL = byte_level_tokenizer()
STRIPPING = byte_fallback_tokenizer(strips=True)
UNSTRIPPING = byte_fallback_tokenizer(strips=False)
METASPACE = _wrap(metaspace(byte_tokens=False), SPECIALS, [])
SLOW = Tokenizer(ByT5Tokenizer())
BYTE_TOKENIZERS = [BYTE_LEVEL, STRIPPING, UNSTRIPPING]


def oracle(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    before = tokenizer.hf.decode(prompt, **options)
    return str(tokenizer.hf.decode(prompt + output, **options)[len(before) :])


def valid_runs(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
    """Whether every run of byte-fallback tokens is valid UTF-8 on its own."""
    run = b""
    for token in [*tokenizer.hf.convert_ids_to_tokens(list(token_ids)), "end"]:
        if token is not None and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


def ids_of(tokenizer: Tokenizer, max_size: int = 12) -> st.SearchStrategy[list[int]]:
    size = len(tokenizer.hf)
    return st.lists(st.integers(0, size + 3), max_size=max_size)  # some beyond the vocabulary


def test_streams_are_chosen_by_the_decoder() -> None:
    for tokenizer in BYTE_TOKENIZERS:
        assert isinstance(open_stream(tokenizer, [], SamplingParams()), ByteStream)
    for tokenizer in (METASPACE, SLOW):
        assert isinstance(open_stream(tokenizer, [], SamplingParams()), WindowStream)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_equals_whole_decode(tokenizer: Tokenizer, data: Any, skip: bool) -> None:
    prompt, output = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer, 30))
    if oracle(tokenizer, [], prompt, skip).endswith(FFFD):
        prompt = []  # half characters in the prompt have their own test
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(skip_special_tokens=skip))
    assert stream_all(detokenizer, output)[0] == oracle(tokenizer, prompt, output, skip)


@pytest.mark.parametrize("tokenizer", [STRIPPING, UNSTRIPPING])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_byte_fallback_equals_decode_of_the_whole(tokenizer: Tokenizer, data: Any) -> None:
    prompt = [i for i in data.draw(ids_of(tokenizer)) if valid_runs(tokenizer, [i])]
    emoji = tokenizer.hf.convert_tokens_to_ids(["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"])
    pieces = st.one_of(
        st.lists(st.integers(259, len(tokenizer.hf) - 1), max_size=3),
        st.integers(0, 2).map(lambda i: [i]),
        st.just(emoji),
        st.sampled_from(["<0x20>", "<0x41>"]).map(
            lambda token: [tokenizer.hf.convert_tokens_to_ids(token)]
        ),
    )
    output = [token_id for piece in data.draw(st.lists(pieces, max_size=6)) for token_id in piece]
    skip = data.draw(st.booleans())
    assert valid_runs(tokenizer, output)
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(skip_special_tokens=skip))
    assert stream_all(detokenizer, output)[0] == oracle(tokenizer, prompt, output, skip)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(3, 258), max_size=10))
def test_invalid_byte_fallback_runs_keep_their_valid_characters(output: list[int]) -> None:
    expected = bytes(token_id - 3 for token_id in output).decode("utf-8", "replace")
    text, _, _ = stream_all(Detokenizer(UNSTRIPPING, [], SamplingParams()), output)
    assert text == expected


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE, SLOW])
def test_some_special_tokens_stay_visible(tokenizer: Tokenizer) -> None:
    shown, hidden = sorted(tokenizer.special_token_ids)[-2:]
    output = [*tokenizer.encode("a", False), shown, hidden, *tokenizer.encode("b", False)]
    params = SamplingParams(visible_token_ids=[shown])
    text = stream_all(Detokenizer(tokenizer, [hidden], params), output)[0]
    assert tokenizer.token_text(shown) in text
    assert tokenizer.token_text(hidden) not in text
    text = stream_all(Detokenizer(tokenizer, [], SamplingParams()), output)[0]
    assert text == oracle(tokenizer, [], output, True)


def test_slow_tokenizer() -> None:
    assert SLOW.fast_backend is None
    assert SLOW.special_token_ids == set(SLOW.hf.all_special_ids) != set()
    output = SLOW.encode("a😀 Zwölf")  # ends with the end token, which is special
    assert SLOW.decode(SLOW.encode("a . b")) == "a . b"
    text, deltas, _ = stream_all(Detokenizer(SLOW, SLOW.encode("x")[:-1], SamplingParams()), output)
    assert text == "a😀 Zwölf"
    assert deltas[:5] == ["a", "", "", "", "😀"]
    shown = Detokenizer(SLOW, [], SamplingParams(skip_special_tokens=False))
    assert stream_all(shown, output)[0] == "a😀 Zwölf</s>"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What each call of a tokenizer's `decode` gets."""
    return on_call(monkeypatch, Tokenizer, "decode")


def test_decode_state_does_not_grow_with_the_text(decoded: list[tuple[Any, ...]]) -> None:
    word = METASPACE.encode("Hello world")
    stream = WindowStream(METASPACE, word * 50, METASPACE.special_token_ids)
    for token_id in word * 200:
        stream.push(token_id)
    assert len(decoded) >= 200
    assert max(len(token_ids) for _, token_ids, *_ in decoded) <= 8 + 16


def test_babbled_bytes_are_not_held_for_ever(decoded: list[tuple[Any, ...]]) -> None:
    stream = WindowStream(BYTE_LEVEL, [], BYTE_LEVEL.special_token_ids)
    assert "".join(map(stream.push, single_bytes(b"\x80" * 50))) + stream.flush() == FFFD * 50
    assert max(len(token_ids) for _, token_ids, *_ in decoded) <= 8 + 16


@pytest.mark.parametrize("tokenizer", [STRIPPING, METASPACE], ids=["table", "window"])
def test_special_tokens_do_not_hide_the_prompt(tokenizer: Tokenizer) -> None:
    end = tokenizer.hf.convert_tokens_to_ids("</s>")
    prompt = [*tokenizer.encode("Hello"), *[end] * 40]
    space = tokenizer.hf.convert_tokens_to_ids("▁")
    assert stream_all(Detokenizer(tokenizer, prompt, SamplingParams()), [end, space])[0] == " "


def single_bytes(data: bytes) -> list[int]:
    """Byte-level tokens of one byte each."""
    backend = BYTE_LEVEL.fast_backend
    by_byte = {BYTE_LEVEL.byte_table.pieces[i]: i for i in range(256)}  # type: ignore[union-attr]
    ids = [by_byte[bytes([byte])] for byte in data]
    assert all(len(backend.id_to_token(i)) == 1 for i in ids)
    return ids


def test_emoji_over_four_tokens_shows_when_it_is_complete() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], SamplingParams())
    _, deltas, _ = stream_all(detokenizer, single_bytes("a😀b".encode()))
    assert deltas == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_is_flushed_once() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], SamplingParams())
    text, deltas, _ = stream_all(detokenizer, single_bytes("a😀".encode()[:-1]))
    assert (text, deltas[-1]) == ("a" + FFFD, FFFD)
    detokenizer.finish()
    assert detokenizer.text == "a" + FFFD


@pytest.mark.parametrize("tail", [b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98"])
def test_character_that_the_prompt_leaves_unfinished(tail: bytes) -> None:
    prompt = single_bytes(b"ab" + tail)
    rest = "😀".encode()[len(tail) :]
    for output, text in ((rest + b"x", "😀x"), (b"x", "x"), (b"", "")):
        detokenizer = Detokenizer(BYTE_LEVEL, prompt, SamplingParams())
        assert stream_all(detokenizer, single_bytes(output))[0] == text


def test_half_character_after_a_stop_is_not_flushed() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], SamplingParams(stop=["a"]))
    assert stream_all(detokenizer, single_bytes(b"xa"))[0] == "x"
    table = BYTE_LEVEL.byte_table
    # A token that ends inside a character, as trained vocabularies have: " " and half a letter.
    halves = (i for i, p in enumerate(table.pieces) if FFFD in p.decode("utf-8", "replace"))
    mixed = next(i for i in halves if table.pieces[i][:1] == b" ")
    detokenizer = Detokenizer(BYTE_LEVEL, [], SamplingParams(stop=[" "]))
    assert stream_all(detokenizer, [*single_bytes(b"x"), mixed])[0] == "x"
