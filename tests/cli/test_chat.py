"""`tpengine chat`: history, commands, long conversations, keys at a terminal, signals."""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.patches import on_call
from support.programs import Cli
from support.small_llavas import PNG, write_llava
from support.terminal import END_S, Terminal
from support.tiny_llama import edit_json

from tpengine import LLM, SamplingParams
from tpengine.cli.conversation import Conversation
from tpengine.cli.lines import messages
from tpengine.config import EMBEDDED_MODEL
from tpengine.errors import InvalidPromptError

SMALL = ["--cpu-kv-cache-space", "0.05", "--max-model-len", "512", "--dtype", "float32"]
GREEDY = ["--temperature", "0", "--max-tokens", "12", *SMALL]
ENDLESS = ["--max-tokens", "2000", "--ignore-eos", "--cpu-kv-cache-space", "0.05"]
QUESTION = "What is the capital of France?"
SHOWN = "\x1b[2m[", "tokens/s"

Message = dict[str, str]
Streamed = list[tuple[list[Message], SamplingParams]]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Streamed:
    """The messages of each prompt of a chat that is streamed, and the parameters of each prompt."""
    noted: Streamed = []

    def note(
        llm: LLM, prompt: Any, params: SamplingParams, ids: Any = None, messages: Any = ()
    ) -> None:
        noted.append((messages, params))

    on_call(monkeypatch, LLM, "stream", note)
    return noted


def test_answers_follow_the_conversation(llm: LLM, cli: Cli) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)

    def answer(*messages: Message) -> Message:
        text = llm.chat(list(messages), params, use_tqdm=False)[0].outputs[0].text
        return {"role": "assistant", "content": text}

    system = {"role": "system", "content": "Speak of the sea."}
    first, second = user("Hello, my name is Anna."), user("What is two plus three?")
    answers = [hello := answer(system, first), answer(system, first, hello, second)]
    answers += [answer(first), answer(system, user("/reset\nlike this"))]
    shown = cli("chat", *GREEDY, *first["content"].split())
    assert shown.out == f"{answers[2]['content']}\n", "words are one message"
    typed = ["", first["content"], "  ", second["content"], "/clear", "/system", first["content"]]
    typed += ["/unknown", "/reset", f"/system {system['content']}", '"""/reset', 'like this"""']
    typed += ["/exit", "never read"]
    shown = cli("chat", *GREEDY, "--system", system["content"], typed="\n".join(typed))
    assert shown.out == "".join(message["content"] + "\n" for message in answers)
    assert shown.err.count("tokens/s") == 4
    assert "unknown command /unknown" in shown.err
    assert "\x1b" not in shown.err


def test_a_message_that_is_not_utf_8_is_named_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = b'Hello\n\n"""\nfirst\n\nthird \xff\n"""\n\xe2\x82\xac'
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8", "surrogateescape")
    )
    first, block, last = messages(bool)
    with pytest.raises(InvalidPromptError, match=r"^line 6 of the input is not UTF-8"):
        block.checked()
    assert (first.checked(), last.checked(), last.number) == ("Hello", "\u20ac", 8)


def test_the_oldest_turns_are_forgotten(streamed: Streamed, cli: Cli) -> None:
    lines = [f"{QUESTION} {i}" for i in range(6)]
    typed = "\n".join([*lines[:5], "word " * 200, lines[5]])
    short = ["--max-model-len", "120", "--cpu-kv-cache-space", "0.05", "--max-tokens", "20"]
    err = cli("chat", "--system", "Be brief.", *short, typed=typed, code=1).err
    assert re.search(r"InvalidPromptError: the message has \d+ tokens.*max_model_len = 120", err)
    assert re.search(r"more than max_model_len = 120 tokens: forgot the oldest \d turns?", err)
    prompts = [messages for messages, _ in streamed]
    assert len(prompts) == 6
    assert {prompt[0]["content"] for prompt in prompts} == {"Be brief."}
    assert [prompt[-1]["content"] for prompt in prompts] == lines
    for prompt in prompts:  # an unbroken end of the conversation, from a message of the user on
        asked = [message["content"] for message in prompt if message["role"] == "user"]
        last = lines.index(asked[-1])
        assert asked == lines[last + 1 - len(asked) : last + 1]
        assert len(prompt) == 2 * len(asked)
    assert 1 < len(prompts[-1]) < 12


def test_an_answer_that_ends_with_the_model_says_so(cli: Cli) -> None:
    short = ["--max-model-len", "40", "--cpu-kv-cache-space", "0.05", "--ignore-eos"]
    shown = cli("chat", "Hello", *short, "--max-tokens", "1000").err
    assert "of the answer, cut at the model's 40 tokens; " in shown
    shown = cli("chat", "Hello", *short, "--max-tokens", "3").err
    assert "3 of the answer, cut at --max-tokens; " in shown


def test_sampling_comes_from_the_model(tmp_path: Path, streamed: Streamed, cli: Cli) -> None:
    folder = shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    recommended = {"do_sample": True, "temperature": 0.3, "top_k": 0, "max_new_tokens": 7}
    edit_json(folder / "generation_config.json", lambda config: config.update(recommended))
    model = ["--model", str(folder), *SMALL]
    used = "max_tokens 7, temperature 0.3, top_k -1, top_p 0.5 (given); defaults: the model's"
    assert used in cli("chat", "Hello", *model, "--top-p", "0.5").err
    shown = cli("generate", "Hello", *model).err
    assert "max_tokens 7, temperature 0.3, top_k -1; defaults" in shown
    shown = cli("chat", "Hello", *SMALL, "--top-p", "0.9", "--temperature", "0.7").err
    assert "1024, temperature 0.7 (given), top_p 0.9 (given); defaults:" in shown
    shown = cli("chat", "Hello", *GREEDY, "--top-p", "1").err
    assert "temperature 0.0 (given), top_p 1.0 (given); try" in shown
    edit_json(folder / "generation_config.json", lambda config: config.update(temperature="hot"))
    shown = cli("chat", "Hello", *model, code=1).err
    assert f"generation_config.json of {folder} are wrong: temper" in shown
    facts = [(p.temperature, p.top_p, p.top_k, p.max_tokens) for _, p in streamed]
    assert facts[:3] == [(0.3, 0.5, -1, 7), (0.3, 1.0, -1, 7), (0.7, 0.9, -1, 1024)]


def test_turns_are_forgotten_that_leave_no_room_for_an_answer() -> None:
    talk = Conversation(
        max_len=35,
        max_tokens=10,
        token_ids=lambda messages: [0] * 10 * len(messages),
        generate=lambda messages, write: write("an answer"),
        num_tokens=lambda: 0,
        system=None,
    )
    for question in ("first", "second"):
        talk.answer(question)
    assert [question for question, _ in talk.turns] == ["second"]


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path, cli: Cli) -> None:
    folder = shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    edit_json(folder / "tokenizer_config.json", lambda config: config.pop("chat_template"))
    err = cli("chat", "--model", str(folder), *SMALL, code=1).err
    assert "has no chat template (chat_template.jinja, or" in err
    assert "tpengine generate" in err


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    (folder / "cat.png").write_bytes(PNG)
    return folder


def test_pictures_of_a_chat(llava: Path, streamed: Streamed, cli: Cli) -> None:
    cat = f"/image {llava / 'cat.png'}"
    wrong = ["/image", f"/image {llava / 'config.json'}", "/image /dev/zero", cat, "word " * 50]
    typed = [cat, "/reset", *wrong[:3], cat, cat, *wrong[3:], "Which?", "Why?"]
    model = ["--model", str(llava), *GREEDY, "--max-model-len", "128"]
    model += ["--limit-mm-per-prompt", '{"image": 2}']
    shown = cli("chat", *model, typed="\n".join(typed), code=1)
    lines = [line for line in shown.err.splitlines() if line.startswith("tpengine: Inv")]
    words = ("needs a FILE", "is no PNG", "more than", "has 3 pictures", "send a shorter one")
    assert all(part in line for part, line in zip(words, lines, strict=True)), lines
    assert "the next message has 2 pictures" in shown.err
    (first, _), (second, params) = streamed
    picture = {"type": "image", "image": PNG}
    asked = {"role": "user", "content": [picture, picture, {"type": "text", "text": "Which?"}]}
    assert first == [asked]
    assert [second[0], second[2]] == [asked, user("Why?")]
    with LLM(llava, dtype="float32", cpu_kv_cache_space=0.05, max_model_len=128) as llm:
        answers = llm.chat([first, second], params, use_tqdm=False)
    assert shown.out == "".join(f"{answer.outputs[0].text}\n" for answer in answers)


def test_keys_at_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    with Terminal("chat", *ENDLESS, "--temperature", "0") as terminal:
        assert "temperature 0.0" in terminal.read_until("> ")
        terminal.ask("Tell me a story.")
        terminal.type("\x03")  # ends the answer
        shown = terminal.read_until("> ")
        assert all(part in shown for part in SHOWN)
        terminal.type("/resex\x7ft\n")  # a wrong letter, taken back
        assert "conversation forgotten" in terminal.read_until("\r\n> ")
        terminal.type(f"/image {tmp_path / 'cat.png'}\n")
        assert "reads text alone: docs/pictures.md" in terminal.read_until("\r\n> ")
        terminal.type("\x1b[A\x1b[A\n")  # the line before that
        assert "conversation forgotten" in terminal.read_until("\r\n> ")
        terminal.type('"""\n')
        terminal.read_until("... ")
        assert "once more" not in terminal.interrupt("\r\n> ")  # drops the block
        assert "once more" in terminal.interrupt("\r\n> ")
        terminal.type("half a line")
        terminal.read_until("half a line")
        assert "once more" not in terminal.interrupt("\r\n> ")  # only the line is gone
        assert "once more" in terminal.interrupt("\r\n> ")
        terminal.interrupt("\r\n")
        assert terminal.end_status(END_S) == 130


def test_sigterm_ends_the_program_in_an_answer() -> None:
    with Terminal("chat", *ENDLESS) as terminal:
        terminal.read_until("> ")
        terminal.ask("Tell me a story.")
        terminal.kill(signal.SIGTERM)
        assert terminal.end_status() == 128 + signal.SIGTERM
        assert "Traceback" not in terminal.before
