"""Pictures over HTTP: answers are those of the offline engine, and hostile ones cost nothing."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from PIL import Image
from support.engines import greedy
from support.picture_files import encoded, noise, png
from support.server_process import ServerProcess
from support.small_llavas import NUM_ROWS, QUESTION, data_url, url_part, user
from support.whole_models import PICTURES

from server.http.openai_door import Door
from tpengine import LLM

CHAT = "chat/completions"
PART = url_part(data_url(PICTURES[0]))
MAX_BYTES = 20 << 20


@pytest.fixture(scope="module")
def eyes(seeing: ServerProcess) -> Door:
    return Door(seeing.http_address)


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": user(*parts), "max_tokens": 6, "temperature": 0, **fields}


def test_answers_are_those_of_the_offline_engine(
    seeing: ServerProcess, seeing_llm: LLM, eyes: Door
) -> None:
    """By the package `openai`, in one piece and as a stream; the counts include pictures."""
    images = [{"type": "image", "image": picture} for picture in PICTURES[:2]]
    (wanted,) = seeing_llm.chat(user(QUESTION, *images), greedy(6), use_tqdm=False)
    text, ids = wanted.outputs[0].text, wanted.prompt_token_ids
    assert len(ids) > 2 * NUM_ROWS
    url = f"{seeing.http_address}/v1"
    chats = openai.OpenAI(base_url=url, api_key="x", max_retries=0).chat.completions
    fields: Any = body(QUESTION, *(url_part(data_url(picture)) for picture in PICTURES[:2]))
    assert eyes.whole("/tokenize", {"messages": fields["messages"]})["tokens"] == ids
    fields |= {"model": "llava", "extra_body": {"ignore_eos": True}}
    whole = chats.create(**fields)
    assert (whole.choices[0].message.content, whole.usage.prompt_tokens) == (text, len(ids))
    chunks = list(chats.create(**fields, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert ("".join(deltas), chunks[-1].usage.prompt_tokens) == (text, len(ids))


def test_the_largest_picture_fits_and_more_does_not(eyes: Door) -> None:
    file = encoded(Image.fromarray(noise()), "JPEG")
    large = file + bytes(MAX_BYTES - len(file))
    assert eyes.whole(CHAT, body(url_part(data_url(large))))
    status, error = eyes.refused(CHAT, body(url_part(data_url(large + bytes(3)))))
    assert (status, f"more than {MAX_BYTES} bytes" in error["message"]) == (400, True)
    status, error = eyes.refused(CHAT, body(url_part(data_url(2 * large))))
    assert (status, "--max-message-mib" in error["message"]) == (413, True)


HOSTILE: list[tuple[Any, str]] = [
    (url_part(data_url(b"<svg/>")), "no PNG, JPEG, WebP or GIF file"),
    (url_part(data_url(png(1 << 15, 1 << 15))), "32768 x 32768 pixels"),
    (url_part("http://127.0.0.1/"), "is not fetched from"),
    ({"type": "image_url"}, "holds no picture"),
    ({"type": "image", "image": 7}, "not a int; the bytes of a file and a URL are taken"),
    ({"type": "input_audio"}, '"text": ...} or {"type": "image_url", "image_url": {"url": ...}}'),
]


@pytest.mark.parametrize(("part", "words"), HOSTILE, ids=[words for _, words in HOSTILE])
def test_hostile_pictures_are_refused(eyes: Door, part: Any, words: str) -> None:
    status, error = eyes.refused(CHAT, body(QUESTION, part))
    assert (status, error["param"]) == (400, "messages[0].content[1]")
    assert (error["type"], words in error["message"]) == ("invalid_request_error", True), error
    assert eyes.whole(CHAT, body(QUESTION, PART))


def test_requests_that_do_not_fit_their_pictures(eyes: Door, door: Door) -> None:
    """`door` is that of a model that reads text."""
    for target, asked, words in (
        (eyes, body(*[PART] * 17), "has 17 pictures, and at most 16 are allowed"),
        (eyes, body(PART, {"type": "text", "text": "<image>"}), "2 placeholders"),
        (eyes, body(PART, truncate_prompt_tokens=3), "leave it out"),
        (eyes, body(QUESTION, chat_template_kwargs={"picture_token": "x"}), "is the server's"),
        (door, body(QUESTION, PART), "reads text alone: docs/pictures.md"),
    ):
        status, error = target.refused(CHAT, asked)
        assert (status, words in error["message"]) == (400, True), error
        assert target.whole(CHAT, body(QUESTION))
