"""Debian's Chromium without a window, driven by Selenium."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.system_packages import require
from support.third_party import selenium_packages
from support.waiting import wait_until

WAIT_S = 60.0
_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --hide-scrollbars"
)


class Browser:
    """A browser with one page.

    Attributes:
        driver: Selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show(self, width: int, height: int, scheme: str = "light") -> None:
        """Sets the size of the page in pixels, and whether its user prefers light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def find(self, selector: str) -> Any:
        """The first element of a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """The text of the last element of a selector as its nodes hold it; empty: there is none."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''"
        return str(self.driver.execute_script(script, selector))

    def wait_for(self, selector: str, *words: str) -> str:
        """Waits until the text of `text` has these words, or any if none are given; returns it."""
        shown = ""

        def is_there() -> bool:
            nonlocal shown
            shown = self.text(selector)
            return bool(shown) and all(word in shown for word in words)

        wait_until(is_there, WAIT_S, f"{selector} has no {words}", lambda: shown)
        return shown

    def type(self, *keys: str) -> None:
        """Sends keys to the element that has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def errors(self) -> list[str]:
        """What the console has said since the last call: errors of scripts and of the network, and
        violations of the page's policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in an empty folder."""
    chromium, driver = require("chromium", "chromium"), require("chromedriver", "chromium-driver")
    if (packages := selenium_packages()) not in sys.path:
        sys.path.append(packages)  # at the end: what both have comes from this environment
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*_OPTIONS.split(), f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.chrome.service.Service(driver)
    with webdriver.Chrome(options=options, service=service) as started:
        started.set_script_timeout(WAIT_S)
        started.set_page_load_timeout(WAIT_S)
        yield Browser(started)
