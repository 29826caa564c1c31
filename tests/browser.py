"""A real browser for tests of the page: Debian's Chromium, driven by Playwright. What the page throws fails a test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: apt-get install chromium")

WIDE, NARROW = 1280, 360
TIMEOUT_MS = 60_000
"""For a machine on which much else runs; nothing waits that long where all is well."""
Scheme = Literal["light", "dark"]


@contextmanager
def launch() -> Iterator[Browser]:
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        # As root, which CI is, Chromium runs without its sandbox only; containers have little shared memory.
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, width: int = WIDE, scheme: Scheme = "light", **more: Any) -> Iterator[Page]:
    """A page of its own, at `url`; at its end it must have thrown nothing."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    thrown: list[str] = []
    page.on("pageerror", lambda error: thrown.append(str(error)))
    try:
        page.goto(url)
        yield page
        assert thrown == []
    finally:
        context.close()


def violations(page: Page) -> list[str]:
    """What axe finds wrong with the page as it stands, by the rules of WCAG 2.2 AA and good practice."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {node['html']}: {node['failureSummary']}" for each in found for node in each["nodes"]]


def overflowing(page: Page) -> list[str]:
    """Boxes whose content is wider than they are."""
    find = (
        "() => [...document.querySelectorAll('html, section, article, form')]"
        ".filter((box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.id || box.textContent)"
    )
    found: list[str] = page.evaluate(find)
    return found
