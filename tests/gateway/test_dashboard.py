"""The dashboard in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser import NARROW, WIDE, Scheme, launch, needs_chromium, opened, overflowing, violations
from playwright.sync_api import Browser, Page, Route, expect
from served import served
from test_status import CACHING, KEPT, KEY, wrong_at_four
from toy_backend import ToyBackend
from toy_model import EOS, ToyModel, ids

from gateway.ui.pages import PAGE

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch() as running:
        yield running


def toy(**more: Any) -> ToyBackend:
    return ToyBackend(model=ToyModel([*ids("as it was before, so it shall be"), EOS]), drafter=wrong_at_four, **more)


def ask(url: str, times: int, *, verified: bool) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "is_deterministic": verified}
    for _ in range(times):
        assert httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False).status_code == 200


def card(page: Page, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def test_the_key_in_the_address_opens_and_does_not_stay_there(browser: Browser) -> None:
    with served(toy(), admin_key=KEPT.hash) as there, opened(browser, f"{there.url}/ui#key={KEY}") as page:
        expect(page.get_by_role("heading", name="Ask the same thing again.")).to_be_visible()
        assert KEY not in page.url
        assert page.evaluate("[localStorage.length, document.cookie, history.length]")[:2] == [0, ""]
        page.get_by_role("link", name="Dashboard").click()
        expect(card(page, "This gateway")).to_contain_text("serving")
        expect(page.get_by_label("Admin key")).to_be_hidden()
        page.reload()
        expect(card(page, "This gateway")).to_contain_text("serving")


def test_the_key_is_asked_for(browser: Browser) -> None:
    with served(toy(), admin_key=KEPT.hash) as there, opened(browser, f"{there.url}/ui#dashboard") as page:
        field = page.get_by_label("Admin key")
        field.fill(KEY + "x")
        field.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("This key does not open it")
        field.fill(KEY)
        field.press("Enter")
        expect(card(page, "This gateway")).to_contain_text("serving")
        expect(page.get_by_role("alert")).to_be_hidden()


def test_a_gateway_without_an_admin_key_says_how_to_get_one(browser: Browser) -> None:
    with served(toy()) as there, opened(browser, f"{there.url}/ui#dashboard") as page:
        expect(page.get_by_role("alert")).to_contain_text("verbatim keys new")


def test_it_shows_what_happens(browser: Browser) -> None:
    with (
        served(toy(), admin_key=KEPT.hash, policies=CACHING) as there,
        opened(browser, f"{there.url}/ui#key={KEY}") as page,
    ):
        ask(there.url, 3, verified=True)
        page.get_by_role("link", name="Dashboard").click()
        expect(card(page, "Rollbacks by position in the answer")).to_contain_text("since the start")
        chart = card(page, "Rollbacks by position in the answer").get_by_role("img")
        expect(chart).to_have_accessible_name(re.compile(r"3 to 4: 1"))
        log = card(page, "Commit log")
        expect(log.locator(".figure")).to_contain_text("67 %")
        expect(log).to_contain_text("hits 2")
        expect(log).to_contain_text("led 1")
        expect(card(page, "Replicas")).to_contain_text("toy-1")
        expect(card(page, "Replicas")).to_contain_text("draft, verify")
        expect(card(page, "This gateway")).to_contain_text(CACHING.current.version)
        ask(there.url, 4, verified=False)
        rate = card(page, "Requests per second").get_by_role("img")
        expect(rate).to_have_accessible_name(re.compile(r"off: 0\.[1-9]|off: [1-9]"))
        first = card(page, "Latency").get_by_role("row", name=re.compile("^First token, p50"))
        expect(first.get_by_role("cell").first).to_contain_text("ms")


def test_trouble_is_seen(browser: Browser) -> None:
    def in_trouble(route: Route) -> None:
        response = route.fetch()
        status = response.json()
        status["logs"]["conflicts"] = 2
        status["requests"]["draining"] = True
        replica = status["models"][0]["replicas"][0]
        replica |= {"well": False, "trouble": "it does not answer", "fingerprint": "another"}
        route.fulfill(response=response, json=status)

    with served(toy(), admin_key=KEPT.hash) as there, opened(browser, f"{there.url}/ui#key={KEY}") as page:
        page.route("**/admin/v1/status", in_trouble)
        page.get_by_role("link", name="Dashboard").click()
        expect(card(page, "Replicas").locator(".health.ill")).to_have_text("it does not answer")
        expect(card(page, "Replicas").locator(".odd")).to_have_text("another")
        expect(card(page, "This gateway")).to_contain_text("2 conflicts in the commit log.")
        expect(card(page, "This gateway")).to_contain_text("draining")
        assert violations(page) == []


def test_a_gateway_that_stops_answering_and_comes_back(browser: Browser) -> None:
    with served(toy(), admin_key=KEPT.hash) as there, opened(browser, f"{there.url}/ui#key={KEY}") as page:
        page.get_by_role("link", name="Dashboard").click()
        expect(card(page, "This gateway")).to_contain_text("serving")
        page.context.set_offline(True)
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        page.context.set_offline(False)
        expect(page.get_by_role("alert")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_axe_finds_nothing(browser: Browser, scheme: Scheme, width: int) -> None:
    with (
        served(toy(), admin_key=KEPT.hash, policies=CACHING) as there,
        opened(browser, f"{there.url}/ui#dashboard", width=width, scheme=scheme) as page,
    ):
        ask(there.url, 2, verified=True)
        ask(there.url, 1, verified=False)
        page.get_by_label("Admin key").wait_for()
        assert violations(page) == []
        page.get_by_label("Admin key").fill(KEY)
        page.keyboard.press("Enter")
        expect(card(page, "Latency").get_by_role("columnheader", name="off")).to_be_visible()
        assert violations(page) == []
        assert overflowing(page) == []


# --- the rates alone -------------------------------------------------------------------------------------------------

RATES = "(async () => { const rates = await import('./ui/rates.js'); return %s; })()"


def test_the_rates(browser: Browser) -> None:
    with served(toy()) as there, opened(browser, f"{there.url}/ui") as page:
        looks = "[[0, 0], [1, 2], [3, 6], [4, 6]].map(([up_s, n]) => ({ up_s, n }))"
        assert page.evaluate(RATES % f"rates.rates({looks}, (look) => look.n, 1)") == [None, 2, 2, 0]
        assert page.evaluate(RATES % f"rates.rates({looks}, (look) => look.n, 9)") == [None, 2, 2, 1.5]
        again = f"rates.remember({looks}, {{ up_s: 0.5, n: 0 }}).length"
        assert page.evaluate(RATES % again) == 1, "another run of the gateway begins anew"
        many = "Array.from({ length: 500 }).reduce((looks, _, n) => rates.remember(looks, { up_s: n }), []).length"
        assert page.evaluate(RATES % many) == page.evaluate(RATES % "rates.KEPT")
        histogram = "{ bounds: [1, 2, 4], counts: [0, 10, 10, 0] }"
        assert page.evaluate(RATES % f"rates.quantile({histogram}, 0.5)") == 2
        assert page.evaluate(RATES % f"rates.quantile({histogram}, 0.75)") == 3
        assert page.evaluate(RATES % "rates.quantile({ bounds: [1, 2], counts: [0, 0, 3] }, 0.5)") == 2
        bars = page.evaluate(RATES % "rates.bars({ bounds: [0, 1, 2, 4, 8], counts: [0, 0, 1, 5, 0, 2] })")
        assert [bar["range"] for bar in bars] == ["0", "1", "2", "3 to 4", "5 to 8", "9 and on"]
        assert [bar["label"] for bar in bars] == ["0", "1", "2", "≤4", "≤8", ">8"]


def test_every_module_is_used() -> None:
    imported = {name for path in PAGE.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert {path.name for path in PAGE.glob("*.js")} == imported | {"main.js"}
