"""Takes the pictures in docs/images of the page over the real engine: `make screenshots`.

Only where asked, by VERBATIM_SCREENSHOTS, so that a test run leaves the tree as it was. What the pictures show has to
be so: bfloat16 answers that differ in mode off, and one answer in mode verified.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest
from browser import NARROW, Scheme, launch, needs_chromium, opened
from playwright.sync_api import Browser, FloatRect, Page, expect
from up_process import up_process

from policies.api_keys import new_key

WHERE = os.environ.get("VERBATIM_SCREENSHOTS")
pytestmark = [
    needs_chromium,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not WHERE, reason="pictures are taken where VERBATIM_SCREENSHOTS names a folder"),
]
KEY, KEPT = new_key()
POLICY = "version: 1\nanonymous: a\ntenants: {a: {cache: {scope: tenant}}}\n"
TRIES = 6
HEAD = 530
WATCHED_S = 125
"""The dashboard looks back two minutes."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy.write_text(POLICY)
    with up_process("--dtype", "bfloat16", "--admin-key", KEPT.hash, "--policy", str(policy)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch() as running:
        yield running


def take(page: Page, name: str) -> None:
    assert WHERE is not None
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=Path(WHERE) / f"{name}.png", full_page=True)


def take_the_head(page: Page, name: str, of: str) -> None:
    """The upper part of an element, for the README."""
    assert WHERE is not None
    box = page.locator(of).bounding_box()
    assert box is not None
    clip: FloatRect = {"x": box["x"] - 12, "y": box["y"] - 12, "width": box["width"] + 24, "height": HEAD}
    page.screenshot(path=Path(WHERE) / f"{name}.png", full_page=True, clip=clip)


def take_on_a_phone(page: Page, name: str, scheme: Scheme, at: str) -> None:
    """One screen of it, from an element on. The page draws itself anew at its next look."""
    assert WHERE is not None
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": NARROW, "height": 740})
    page.wait_for_function("[...document.querySelectorAll('main svg')].every((svg) => svg.clientWidth < 360)")
    page.locator(at).evaluate("element => scrollTo(0, element.getBoundingClientRect().top + scrollY - 12)")
    page.screenshot(path=Path(WHERE) / f"{name}.png")


def test_playground(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/ui", device_scale_factor=1.5) as page:
        page.set_default_timeout(300_000)
        ask = page.get_by_role("button", name="Ask")
        off, verified = page.locator("[data-mode=off] .headline"), page.locator("[data-mode=verified] .headline")
        expect(page.get_by_label("Model")).to_have_value("smollm2-135m-instruct")
        for _ in range(TRIES):
            ask.click()
            ask.wait_for()
            expect(verified).to_have_text("1 answer, 8 times, bit for bit")
            if "different" in (off.text_content() or ""):
                break
        assert "different answers" in (off.text_content() or "")
        take(page, "playground")
        take_the_head(page, "answers", "#panels")
        take_on_a_phone(page, "playground-phone", "dark", "#summary")


def test_dashboard(browser: Browser, url: str) -> None:
    done = threading.Event()
    asking = [
        threading.Thread(target=keep_asking, args=(url, done, verified, late_s))
        for verified, late_s in ((True, 0), (True, 10), (False, 0), (False, 5))
    ]
    with opened(browser, f"{url}/ui#key={KEY}", scheme="dark", device_scale_factor=1.5) as page:
        page.get_by_role("link", name="Dashboard").click()
        for thread in asking:
            thread.start()
        try:
            page.wait_for_timeout(1000 * WATCHED_S)
            take(page, "dashboard")
            take_on_a_phone(page, "dashboard-phone", "light", "#card-windows")
        finally:
            done.set()
            for thread in asking:
                thread.join()


def keep_asking(url: str, done: threading.Event, verified: bool, late_s: float) -> None:
    """Everyday traffic on many subjects; who comes late asks what others asked before."""
    done.wait(late_s)
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
        for n in count():
            if done.is_set():
                return
            subject = ("bees", "bread", "the moon", "chess", "rain", "sailing", "clay")[n * n % 7]
            body = {
                "model": "smollm2-135m-instruct",
                "messages": [{"role": "user", "content": f"Tell me about {subject}, part {n // 5}."}],
                "max_tokens": 32 + n % 5 * 24,
                "is_deterministic": verified,
                "stream": True,
            }
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            time.sleep(n % 3 / 2)
