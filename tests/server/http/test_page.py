"""The page at `/`: its files and its feed, and in a real browser all that a user does with it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from support.browser import WAIT_S, Browser, open_browser
from support.namespaces import children_of
from support.server_process import ServerProcess, serving
from support.small_llavas import LLAVA_TEMPLATE, teach, write_llava
from support.waiting import wait_until

from server.http.open_port import open_port, read_answer, request
from server.http.openai_door import Door
from tpengine.server.auth import Authenticator
from tpengine.server.http import page
from tpengine.server.http.page import FEED, FILES, page_routes
from tpengine.server.state import ServerState

KEY = "key-0123456789abcdef"
SHOTS = os.environ.get("TPENGINE_TEST_SCREENSHOTS")
"""Folder for pictures of the page, as those in docs/; None: none are made."""
QUESTION = "Tell me everything about the town of Saltby."
SETTINGS = {"temperature": "0.7", "top_p": "0.9", "seed": "0"}
"""With these the embedded model answers the question with more than 400 tokens."""
TAGS = '<img src=x onerror="alert(1)"><script>alert(2)</script> & <b>é東🙂</b>\n</li> &lt;'
THOUGHTS = "<i>Hm</i>, 東京 …"
RANKS = ["--executor", "processes", "-tp", "2", "--device", "cpu", "--dtype", "float32"]
RANKS += ["--keep-kv", "never"]  # else a recovery is over before the page shows it
RANKS += ["--num-device-blocks-override", "256", "--http-port", "0", "--api-key", KEY]
RECORD = """window.shown = new Set();
new MutationObserver(() => {
  shown.add(document.body.innerText);
  if (document.querySelector("#log li:last-child .text")?.textContent.length > arguments[0])
    document.querySelector("#send").click();
}).observe(document.body, {subtree: true, childList: true, characterData: true});"""
"""Keeps all texts that the page shows from now on, and presses Stop when an answer has more
characters than the argument."""
TRANSFER = """const bytes = Uint8Array.from(atob(arguments[0]), (one) => one.charCodeAt(0));
const data = new DataTransfer(), more = {bubbles: true, cancelable: true};
data.items.add(new File([bytes], "a.png", {type: "image/png"}));
const [input, chat] = ["#input", "#chat"].map((place) => document.querySelector(place));
input.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, ...more}));
chat.dispatchEvent(new DragEvent("drop", {dataTransfer: data, ...more}));"""
"""Pastes a PNG file, whose bytes are the argument in base64, and drops it."""
ANSWER = "#log li:last-child .text"
NOTE = "#log li:last-child .note"
ENTER, ESCAPE, TAB, SHIFT_ENTER = "\ue007", "\ue00c", "\ue004", "\ue008\ue007\ue000"
"""Keys, as the protocol of WebDriver writes them."""


def test_files_need_no_key_and_the_feed_does() -> None:
    with open_port(authenticator=Authenticator([KEY])) as port:
        for path in FILES:
            answer = port.send(request(path))
            assert answer.status == 200
            policy = answer.headers["content-security-policy"].split("; ")
            assert policy[:3] == ["default-src 'none'", "script-src 'self'", "style-src 'self'"]
            assert {"frame-ancestors 'none'", "require-trusted-types-for 'script'"} < {*policy}
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cache-control"] == "no-cache"
            with port.connect() as client:
                same = f"if-none-match: W/{answer.headers['etag']}"
                client.sendall(request(path, same) + request(path, method="HEAD") + request(path))
                stream = client.makefile("rb")
                answers = [read_answer(stream, has_body) for has_body in (False, False, True)]
                assert [a.status for a in answers] == [304, 200, 200]
                assert {a.headers["etag"] for a in answers} == {answer.headers["etag"]}
        assert port.send(request("/", method="POST")).error["code"] == "method_not_allowed"
        assert port.send(request(FEED)).error["code"] == "invalid_api_key"
        answer = port.send(request(FEED, f"authorization: Bearer {KEY}"))
        assert answer.headers["cache-control"] == "no-store"
        state = json.loads(answer.body)
        assert (state["state"], state["model"], "engine" in state) == ("loading", "none", False)


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/../app.py", "/page/..%2fapp.py", "/page//etc/passwd",
             "/page/%2e%2e/app.py", "/page/index.html", "/index.html", "/favicon.ico"],
)  # fmt: skip
def test_no_other_file_is_served(path: str) -> None:
    with open_port() as port:
        assert port.send(request(path)).error["code"] == "unknown_url"


def test_the_files_keep_to_their_policy() -> None:
    """Browsers that do not know the last two words of the policy rely on this."""
    for path in sorted(Path(page.__file__).with_name("page").iterdir()):
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<style|\sstyle=|\son\w+=", text)
    (script,) = re.findall(r"<script.*", bytes(FILES["/"].body).decode())
    assert script == '<script type="module" src="page/app.js"></script>'


def test_the_feed_of_a_server(server: ServerProcess, door: Door) -> None:
    """The figures are those of the other reports."""
    assert door.whole("completions", {"prompt": [5, 6, 7], "max_tokens": 3})
    assert door.open(FEED, {}).status == 405
    state = json.load(door.open(FEED))
    engine, loads = state["engine"], server.loads()
    assert state["state"] == "running"
    assert (engine["epoch"], engine["recovery"], engine["recoveries"]) == (1, None, [])
    assert engine["cache"]["num_total_blocks"] == loads.num_total_blocks
    assert engine["output_tokens"] == server.metric("tpengine:generation_tokens_total")
    (rank,) = engine["ranks"]
    for use, num_bytes in rank["memory_bytes"].items():
        assert server.metric("tpengine:rank_memory_bytes", rank="0", use=use) == num_bytes
    assert rank["memory_bytes"]["weights"] > 0
    assert rank["stage"] == ""
    assert rank["memory_bytes"]["kv_cache"] % loads.num_total_blocks == 0


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """The browser of all tests."""
    shared_browser.show(1200, 800)
    yield shared_browser
    shared_browser.driver.get("about:blank")


def leave(browser: Browser, expected: str = "none") -> None:
    """Leaves the page before its server ends. Its console holds no other errors than expected."""
    browser.driver.get("about:blank")
    assert [error for error in browser.errors() if expected not in error] == []


def visit(browser: Browser, address: str) -> None:
    """Opens the page in a new state, and waits for its first picture."""
    browser.driver.get(address)
    browser.wait_for("#status", "running")
    browser.wait_for("#model", "embedded")


def fill(browser: Browser, **settings: str) -> None:
    """Writes into the settings."""
    browser.find("#settings summary").click()
    for name, value in settings.items():
        browser.find(f"[name={name}]").send_keys(value)
    browser.find("#settings summary").click()


def ask(browser: Browser, text: str) -> None:
    browser.find("#input").send_keys(text, ENTER)


def too_wide(browser: Browser) -> list[str]:
    """What is wider than its place, on the page and in its parts that scroll."""
    script = """return [...document.querySelectorAll("*")].filter((one) =>
      one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 1
      && getComputedStyle(one).display !== "inline" && !["INPUT", "TEXTAREA"].includes(one.tagName)
    ).map((one) => one.tagName + one.id + one.className)"""
    return browser.driver.execute_script(script)


def picture(browser: Browser, name: str) -> None:
    if SHOTS is not None:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        browser.driver.save_screenshot(str(Path(SHOTS) / f"page-{name}.png"))


def whole_answer(door: Door) -> str:
    """The text that the question and the settings give without the page."""
    body: dict[str, Any] = {name: json.loads(value) for name, value in SETTINGS.items()}
    body["messages"] = [{"role": "user", "content": QUESTION}]
    return str(door.whole("chat/completions", body)["choices"][0]["message"]["content"])


@pytest.mark.check
def test_an_answer_streams_and_stops(browser: Browser, server: ServerProcess, door: Door) -> None:
    """At a width of 360 pixels no part is too wide."""
    whole = whole_answer(door)
    visit(browser, server.http_address)
    assert browser.driver.switch_to.active_element.get_attribute("id") == "input"
    fill(browser, **SETTINGS)
    browser.find("#input").click()
    browser.type("A line", SHIFT_ENTER, "and another")
    assert browser.driver.switch_to.active_element.get_property("value") == "A line\nand another"
    browser.find("#input").clear()
    browser.driver.execute_script(RECORD, 50)
    ask(browser, QUESTION)
    browser.wait_for(NOTE, "stopped")
    cut = browser.text(ANSWER)
    assert whole.startswith(cut)
    assert 50 < len(cut) < len(whole)
    assert browser.driver.execute_script("return shown.size") > 5
    wait_until(lambda: server.loads().num_running == 0, WAIT_S)
    assert server.loads().num_free_blocks == server.loads().num_total_blocks
    visit(browser, server.http_address)
    fill(browser, **SETTINGS)
    ask(browser, QUESTION)
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s", browser.wait_for(NOTE, "stop"))
    assert browser.text(ANSWER) == whole
    browser.show(360, 740)
    assert too_wide(browser) == []
    browser.wait_for("#running", "0")
    picture(browser, "phone")
    browser.find("#settings summary").click()
    assert too_wide(browser) == []
    browser.find("#toggle").click()
    assert browser.find("#engine").is_displayed()
    assert not browser.find("#chat").is_displayed()
    assert too_wide(browser) == []
    picture(browser, "phone-engine")
    leave(browser)


@pytest.mark.check
def test_every_control_is_reached_by_tab_and_seen(browser: Browser, server: ServerProcess) -> None:
    visit(browser, server.http_address)
    browser.find("#settings summary").click()
    browser.find("h1").click()
    reached = []
    for _ in range(11):
        browser.type(TAB)
        focused = browser.driver.switch_to.active_element
        reached.append(focused.get_attribute("id") or focused.get_attribute("name") or "summary")
        assert focused.value_of_css_property("outline-style") == "solid", reached
    settings = ["temperature", "top_p", "max_tokens", "seed", "system"]
    assert reached == ["new", "log-box", "summary", *settings, "input", "send", "engine"]
    leave(browser)


@pytest.mark.check
def test_a_rank_is_killed_while_an_answer_streams(browser: Browser, tmp_path: Path) -> None:
    """The server wants a key. The answer is that of an undisturbed run, and the picture shows the
    recovery."""
    with ServerProcess(*RANKS, log=tmp_path / "log") as server:
        browser.driver.get(server.http_address)
        wait_until(lambda: browser.find("#key-dialog").is_displayed(), WAIT_S)
        browser.type("not-the-key-of-this-server", ENTER)
        browser.wait_for("#key-problem", "does not know this key")
        browser.type(KEY, ENTER)
        browser.wait_for("#status", "running")
        visit(browser, server.http_address)  # the tab has kept the key
        fill(browser, **SETTINGS)
        ask(browser, QUESTION)
        browser.wait_for(NOTE, "stop")
        undisturbed = browser.text(ANSWER)
        browser.find("#new").click()
        assert browser.text("#log") == ""
        ranks = list(map(int, re.findall(r"pid (\d+)", browser.text("#ranks"))))
        browser.driver.execute_script(RECORD, len(undisturbed))
        ask(browser, QUESTION)
        wait_until(lambda: len(browser.text(ANSWER)) > len(undisturbed) // 6, WAIT_S)
        # The template first: new ranks then import for so long that the page shows it.
        for pid in (*set(children_of(server.pid)) - set(ranks), ranks[1]):
            os.kill(pid, signal.SIGKILL)
        browser.wait_for("#status", "recovering")
        browser.wait_for("#phases", "imports")
        picture(browser, "recovery")
        browser.wait_for(NOTE, "tokens/s", "stop")
        wanted = ["recovering", "Rank 1 was lost (execute_model, step ", "killed by signal 9"]
        wanted += ["imports …", "starting", "1 request kept", "A lost rank is being replaced"]
        shown = browser.driver.execute_script("return [...shown]")
        assert any(all(words in text for words in wanted) for text in shown), shown
        assert browser.text(ANSWER) == undisturbed
        browser.wait_for("#status", "running")
        assert not browser.find("#recovery").is_displayed()
        assert browser.text("#num-recoveries") == "1"
        browser.wait_for("#recoveries", "Epoch 2", "1 request kept", "longest pause", "SIGKILL")
        browser.wait_for("#running", "0")
        browser.show(1200, 800, "dark")
        picture(browser, "dark")
        browser.show(360, 740)
        assert too_wide(browser) == []
        browser.find("#key").click()
        browser.find("#key-forget").click()
        browser.wait_for("#status", "no key")
        ask(browser, "Hello")
        wait_until(lambda: browser.find("#key-dialog").is_displayed(), WAIT_S)
        browser.type(ESCAPE)
        browser.wait_for("#log li:last-child .error", "needs a token")
        leave(browser, "401")


def drawn(shape: str, colour: str) -> Image.Image:
    image = Image.new("RGB", (320, 320), "white")
    getattr(ImageDraw.Draw(image), shape)((60, 60, 260, 260), fill=colour)
    return image


@pytest.mark.check
def test_pictures_are_chosen_pasted_dropped_and_removed(browser: Browser, tmp_path: Path) -> None:
    """The model was taught what two pictures show."""
    lessons = {"A red circle.": drawn("ellipse", "#d02020")}
    lessons["A blue square."] = drawn("rectangle", "#2040d0")
    folder = write_llava(tmp_path, "<s>" + LLAVA_TEMPLATE)
    teach(folder, "What is this?", lessons)
    files = [tmp_path / f"{i}.png" for i in range(2)]
    for file, picture_drawn in zip(files, lessons.values(), strict=True):
        picture_drawn.save(file)
    room = ("--http-port=0", "--cpu-kv-cache-space=0.01", "--dtype=float32")
    with serving(folder, f"--model={folder}", *room, "--served-model-name=llava") as seeing:
        browser.driver.get(seeing.http_address)
        browser.wait_for("#model", "llava")
        wait_until(lambda: browser.find("#picture").is_displayed(), WAIT_S)
        fill(browser, temperature="0", max_tokens="30")
        browser.find("#picture-file").send_keys("\n".join(map(str, files)))
        wait_until(lambda: num_shown(browser, "#pictures") == 2, WAIT_S)
        browser.find("#pictures button").click()
        shown = zip(reversed(files), reversed(lessons), strict=True)
        for place, (file, answer) in enumerate(shown):
            if place:
                encoded = base64.b64encode(file.read_bytes()).decode()
                browser.driver.execute_script(TRANSFER, encoded)
                wait_until(lambda: num_shown(browser, "#pictures") == 2, WAIT_S)
                browser.find("#pictures button").click()
                browser.find("#new").click()
            ask(browser, "What is this?")
            browser.wait_for(NOTE, "stop")
            assert (browser.text(ANSWER), num_shown(browser, "#log")) == (answer, 1)
            assert num_shown(browser, "#pictures") == 0
        browser.find("#picture-file").send_keys(str(files[1]))
        wait_until(lambda: num_shown(browser, "#pictures") == 1, WAIT_S)
        picture(browser, "picture")
        browser.show(360, 740)
        assert too_wide(browser) == []
        (tmp_path / "not.png").write_text("no picture")
        browser.find("#picture-file").send_keys(str(tmp_path / "not.png"))
        ask(browser, "And this?")
        browser.wait_for("#log li:last-child .error", "no PNG, JPEG, WebP or GIF")
        assert num_shown(browser, "#pictures") == 2  # they can be removed, and sent again
        leave(browser, "400")


def num_shown(browser: Browser, place: str) -> int:
    """Pictures that an element shows."""
    return len(browser.driver.find_elements("css selector", f"{place} img"))


def stub() -> Starlette:
    """A server with the page and answers of the test's own."""
    asked: list[Any] = []

    async def cut(*events: str, end: str = "data: [DONE]\r\n\r\n") -> AsyncIterator[bytes]:
        """The bytes of a stream; all characters and ends of lines are cut in two, by a pause after
        which the browser has read. A stream without an end goes on until its client has left."""
        lines = [event.replace(", ", ",\r\ndata: ", 1) for event in events]  # one event, two lines
        whole = ": a comment\r\n\r\n" + "".join(f"id: 1\r\ndata: {line}\r\n\r\n" for line in lines)
        for part in re.split(rb"(?<=\r)|(?=[\x80-\xbf])", (whole + end).encode()):
            yield part
            await asyncio.sleep(0.03)
        while not end:
            yield f"data: {events[0]}\r\n\r\n".encode()
            await asyncio.sleep(0.02)

    def chunk(**delta: str) -> str:
        whole = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        return json.dumps(whole, ensure_ascii=False)

    async def feed(call: Request) -> Any:
        return JSONResponse({"state": "running", "uptime_s": 1.0})

    async def models(call: Request) -> Any:
        return JSONResponse({"data": [{"id": "one"}, {"id": "<b>two</b>"}]})

    async def chat(call: Request) -> Any:
        asked.append(await call.json())
        match asked[-1]["messages"][-1]["content"]:
            case "untemplated":
                why = "this model's tokenizer has no chat template (chat_template in its ...)"
                return JSONResponse({"error": {"message": why}}, 400)
            case "cut":
                return StreamingResponse(cut(chunk(content="some"), end=": none\r"))
            case "endless":
                return StreamingResponse(cut(chunk(content="more "), end=""))
            case "error":
                return StreamingResponse(cut('{"error": {"message": "<b>no memory</b>"}}'))
        return StreamingResponse(cut(chunk(reasoning_content=THOUGHTS), chunk(content=TAGS)))

    async def completions(call: Request) -> Any:
        asked.append(await call.json())
        return StreamingResponse(cut('{"choices": [{"index": 0, "text": "continued"}]}'))

    routes = [Route(FEED, feed), Route("/v1/models", models)]
    routes += [Route("/v1/chat/completions", chat, methods=["POST"])]
    routes += [Route("/v1/completions", completions, methods=["POST"])]
    app = Starlette(routes=[*routes, *page_routes(ServerState(["stub"], 1.0))])
    app.state.asked = asked
    return app


@pytest.mark.check
def test_text_with_tags_stays_text(browser: Browser) -> None:
    """Text of the model, of the user, of errors and of names, wherever the stream is cut."""
    app = stub()
    with open_port(app=app) as port:  # at its end no connection may be left
        browser.driver.get(f"http://127.0.0.1:{port.port}")
        browser.wait_for("#models", "one", "<b>two</b>")
        browser.driver.execute_script("document.querySelector('#input').value = arguments[0]", TAGS)
        browser.find("#input").send_keys(ENTER)
        browser.wait_for(NOTE, "token")
        wait_until(lambda: browser.text("#send") == "Send", WAIT_S)
        assert app.state.asked[0]["model"] == "one"
        assert browser.text(ANSWER) == TAGS
        assert browser.text("#log li:first-child .text") == TAGS
        assert browser.text("#log li:last-child .reasoning p") == THOUGHTS
        ask(browser, "error")
        assert browser.wait_for("#log li:last-child .error", "memory") == "<b>no memory</b>"
        assert browser.find("#input").get_property("value") == "error"
        browser.find("#input").clear()
        ask(browser, "cut")
        browser.wait_for("#log li:last-child .error", "cut before its end")
        assert browser.text(ANSWER) == "some"
        browser.find("#input").clear()
        ask(browser, "endless")
        browser.wait_for(ANSWER, "more more")
        browser.type(ESCAPE)
        browser.wait_for(NOTE, "stopped")
        wait_until(lambda: port.held()[2] == 0, WAIT_S)  # the task of the stream has ended
        said = [message["content"] for message in app.state.asked[-1]["messages"]]
        assert said == [TAGS, TAGS, "endless"]  # what failed is no part of the conversation
        browser.find("#new").click()
        ask(browser, "untemplated")
        assert browser.wait_for(ANSWER, "continued")
        assert app.state.asked[-1]["prompt"] == "untemplated"
        browser.wait_for("#notice", "no chat template")
        script = "return document.querySelectorAll('#log :is(img, script, b, i)').length"
        assert browser.driver.execute_script(script) == 0
        browser.show(360, 740)
        wait_until(lambda: browser.text("#send") == "Send", WAIT_S)
        for keys in ("w" * 400, ENTER):
            browser.find("#input").send_keys(keys)
            assert too_wide(browser) == []
        assert "w" * 400 in browser.text("#log")
        leave(browser, "400 (Bad Request)")
