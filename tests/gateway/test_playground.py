"""The playground in a real browser, over a toy backend whose fast path answers differently from call to call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from browser import NARROW, WIDE, Scheme, launch, needs_chromium, opened, overflowing, violations
from playwright.sync_api import Browser, Locator, Page, Route, expect
from served import served
from toy_backend import DropAfter, HangAfter, Status, ToyBackend, on
from toy_model import EOS, ToyModel, ids

from backend.protocol import StreamEvent, StreamRequest, VerifyRequest, VerifyResponse
from gateway.ui.pages import PAGE
from policies.api_keys import new_key
from policies.document import FixedPolicy
from policies.loader import load_policy

pytestmark = needs_chromium

SAID = "The sky is blue because air scatters it."
PARTING = 16  # "because"


def scripted(text: str = SAID) -> ToyModel:
    return ToyModel([*ids(text), EOS])


def with_token(event: StreamEvent, **changes: Any) -> StreamEvent:
    return msgspec.structs.replace(event, tokens=[msgspec.structs.replace(event.tokens[0], **changes)])


@dataclass
class Restless(ToyBackend):
    """Its fast path says another word in every third answer, and other logprobs in every second."""

    model: ToyModel = field(default_factory=scripted)
    words: bool = True
    logprobs: bool = True

    def stream(self, request: StreamRequest) -> list[StreamEvent]:
        nth = self.calls["/v1/stream"] - 1
        events = super().stream(request)
        if self.logprobs and nth % 2:
            events[2] = with_token(events[2], logprob=events[2].tokens[0].logprob - 2**-20)
        if self.words and nth % 3 and len(events) == len(SAID) + 1:
            for place, char in enumerate("as its" if nth % 3 == 1 else "since ", PARTING):
                events[place] = with_token(events[place], id=ids(char)[0])
        return events


@dataclass
class Liar(ToyBackend):
    """Verifies another first logprob each time."""

    model: ToyModel = field(default_factory=scripted)

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        response = super().verify(request)
        if request.generated == 0:
            first = response.tokens[0]
            lie = msgspec.structs.replace(first, logprob=first.logprob - self.calls["/v1/verify"] * 2**-20)
            return msgspec.structs.replace(response, tokens=[lie, *response.tokens[1:]])
        return response


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch() as running:
        yield running


def playground(page: Page, *, repeats: int = 4, load: int = 0) -> None:
    """The form filled in, once the models are known."""
    expect(page.get_by_label("Model")).to_have_value("toy")
    page.get_by_label("Answers each").fill(str(repeats))
    page.get_by_label("Max tokens").fill("128")
    page.get_by_label("Other requests in flight").fill(str(load))


def run(page: Page, **fields: int) -> None:
    playground(page, **fields)
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("button", name="Ask")).to_be_visible()


def panel(page: Page, mode: str) -> Locator:
    return page.get_by_role("region", name=f"Mode {mode}")


def headline(page: Page, mode: str) -> Locator:
    return panel(page, mode).locator(".headline")


def test_it_shows_what_differs_and_what_does_not(browser: Browser) -> None:
    with served(Restless()) as there, opened(browser, f"{there.url}/ui") as page:
        run(page, repeats=6)
        expect(headline(page, "off")).to_have_text("3 different answers")
        expect(panel(page, "off").locator(".why")).to_have_text(
            f"First differs at token {PARTING + 1}. Logprobs differ from token 3 on."
        )
        cards = panel(page, "off").get_by_role("article")
        expect(cards).to_have_count(3)
        expect(cards.locator("h3")).to_have_text(
            ["Answer A: 2 of 6 answers", *(f"Answer {x}: 2 of 6 answers" for x in "BC")]
        )
        # Which of the three is A is a matter of which request came first.
        assert sorted(cards.locator("mark").all_text_contents()) == ["a", "b", "s"]
        expect(cards.locator(".shared")).to_have_text(["The sky is blue "] * 3)
        expect(cards.nth(1).locator(".parts")).to_have_text(f"parts from A at token {PARTING + 1}")
        picture = panel(page, "off").get_by_role("img")
        expect(picture).to_have_accessible_name(re.compile("3 different answers"))
        expect(picture.locator(".leaf")).to_have_text(["2×"] * 3)  # noqa: RUF001  # as the page writes it
        expect(picture.locator(".divide")).to_have_text(f"differs at token {PARTING + 1}")
        expect(picture.locator(".strand.trunk")).to_have_count(6)

        expect(headline(page, "verified")).to_have_text("1 answer, 6 times, bit for bit")
        expect(panel(page, "verified").locator(".answer")).to_have_text([SAID])
        expect(panel(page, "verified").get_by_role("listitem")).to_have_text(
            [f"Request {n}: complete, answer A" for n in range(1, 7)]
        )
        expect(page.get_by_role("status")).to_have_text(re.compile("off: 3 different.*verified: 1 answer, 6.times"))


def test_words_that_agree_are_not_all(browser: Browser) -> None:
    with served(Restless(words=False)) as there, opened(browser, f"{there.url}/ui") as page:
        run(page)
        expect(headline(page, "off")).to_have_text("1 answer, but 2 sets of logprobs")
        expect(panel(page, "off").locator(".why")).to_contain_text("the logprobs differ from token 3 on")
        expect(headline(page, "verified")).to_have_text("1 answer, 4 times, bit for bit")


def test_equal_answers_in_mode_off_are_called_luck(browser: Browser) -> None:
    with served(ToyBackend(model=scripted())) as there, opened(browser, f"{there.url}/ui") as page:
        run(page)
        expect(headline(page, "off")).to_have_text("1 answer, 4 times")
        expect(panel(page, "off").locator(".why")).to_contain_text("Nothing promises it")


def test_a_broken_guarantee_is_an_alarm(browser: Browser) -> None:
    with served(Liar()) as there, opened(browser, f"{there.url}/ui") as page:
        run(page)
        expect(headline(page, "verified")).to_have_text("1 answer, but 4 sets of logprobs")
        expect(panel(page, "verified").locator(".why")).to_contain_text("breaks the guarantee")
        expect(panel(page, "verified")).to_have_attribute("data-tone", "broken")


def test_without_logprobs_characters_are_compared(browser: Browser) -> None:
    def without(route: Route) -> None:
        response = route.fetch()
        body = re.sub(r'"logprobs":\{"content":\[.*?\],"refusal":null\}', '"logprobs":null', response.text())
        route.fulfill(response=response, body=body)

    with served(Restless()) as there, opened(browser, f"{there.url}/ui") as page:
        page.route("**/v1/chat/completions", without)
        run(page)
        expect(panel(page, "off").locator(".why")).to_have_text(f"First differs at character {PARTING + 1}.")
        expect(headline(page, "verified")).to_have_text("1 answer, 4 times")
        expect(panel(page, "verified").locator(".why")).to_contain_text("Compared by their text")


def test_answers_out_of_the_log_are_said_to_be(browser: Browser) -> None:
    text = "version: 1\nanonymous: a\ntenants: {a: {cache: {scope: tenant, from_client: false}}}\n"
    policies = FixedPolicy(load_policy(text, "policy.yaml"))
    with served(ToyBackend(model=scripted()), policies=policies) as there, opened(browser, f"{there.url}/ui") as page:
        run(page)
        run(page)
        expect(panel(page, "verified").locator(".why")).to_contain_text("4 of them came out of the commit log")


def test_answers_nobody_verified_are_not_called_verified(browser: Browser) -> None:
    policy = load_policy(
        "version: 1\nanonymous: a\ntenants: {a: {determinism: {no_verifier: degrade}}}\n", "policy.yaml"
    )
    toy = ToyBackend(model=scripted(), roles=("draft",))
    with served(toy, policies=FixedPolicy(policy)) as there, opened(browser, f"{there.url}/ui") as page:
        run(page)
        expect(headline(page, "verified")).to_have_text("4 answers not verified")


def test_the_load_travels_beside_the_answers(browser: Browser) -> None:
    toy = ToyBackend(model=scripted())
    with served(toy) as there, opened(browser, f"{there.url}/ui") as page:
        run(page, load=8)
        expect(headline(page, "verified")).to_have_text("1 answer, 4 times, bit for bit")
    streams = [request for request in toy.requests if isinstance(request, StreamRequest)]
    assert len(streams) > 4 and any(request.sampling.temperature == 1 for request in streams)


def test_answers_show_while_they_are_written(browser: Browser) -> None:
    toy = ToyBackend(model=scripted(), faults=on("/v1/stream", HangAfter(6)))
    with served(toy) as there, opened(browser, f"{there.url}/ui") as page:
        playground(page)
        page.get_by_role("button", name="Ask").click()
        expect(headline(page, "off")).to_have_text("1 answer so far")
        expect(panel(page, "off").locator(".answer")).to_have_text("The sk")
        expect(panel(page, "off").get_by_role("listitem").first).to_have_text("Request 1: being written, answer A")
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Ask")).to_be_focused()
        expect(panel(page, "off").locator(".why")).to_contain_text("0 of 4 came to their end.")


def test_what_a_model_or_an_error_says_is_never_markup(browser: Browser) -> None:
    evil = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
    refusal = f'{{"error": {{"type": "any", "message": "{evil}"}}}}'.replace('"window', "'window").replace('1">', "1'>")
    toy = Restless(model=scripted(evil), faults=on("/v1/stream", Status(400, refusal.encode()), nth=0))
    with served(toy) as there, opened(browser, f"{there.url}/ui") as page:
        run(page)
        expect(panel(page, "verified").locator(".answer")).to_have_text([evil])
        expect(panel(page, "off").locator(".trouble")).to_contain_text("<script>window.pwned=1</script>")
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("window.pwned") is None
        # And should the page ever forget, the browser refuses.
        refused = "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }"
        assert page.evaluate(refused) == "TypeError"


def test_tokens_that_are_parts_of_characters_make_whole_ones(browser: Browser) -> None:
    said = "Ein Stück Käse, 日本 🧀"
    with served(ToyBackend(model=scripted(said))) as there, opened(browser, f"{there.url}/ui") as page:
        run(page)
        expect(panel(page, "verified").locator(".answer")).to_have_text([said])


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser) -> None:
    key, kept = new_key()
    text = f'version: 1\ntenants: {{a: {{keys: [{{id: "{kept.id}", hash: "{kept.hash}"}}]}}}}\n'
    policies = FixedPolicy(load_policy(text, "policy.yaml"))
    with served(ToyBackend(model=scripted()), policies=policies) as there, opened(browser, f"{there.url}/ui") as page:
        expect(page.get_by_role("alert")).to_contain_text("An API key is needed here")
        field = page.get_by_role("textbox", name="API key")
        expect(field).to_have_attribute("aria-invalid", "true")
        field.fill(key)
        field.press("Tab")
        expect(page.get_by_role("alert")).to_be_hidden()
        run(page)
        expect(headline(page, "verified")).to_have_text("1 answer, 4 times, bit for bit")
        page.reload()
        expect(page.get_by_label("Model")).to_have_value("toy")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert key not in page.url


def test_a_limit_is_said_with_its_wait(browser: Browser) -> None:
    text = "version: 1\nanonymous: a\ntenants: {a: {limits: {requests_per_minute: 3}}}\n"
    policies = FixedPolicy(load_policy(text, "policy.yaml"))
    with served(ToyBackend(model=scripted()), policies=policies) as there, opened(browser, f"{there.url}/ui") as page:
        run(page)
        troubles = page.locator("#panels .trouble")
        expect(troubles.first).to_contain_text(
            re.compile(r"requests? failed 429 rate_limit_exceeded: .*again in \d+ s")
        )


def test_a_backend_that_is_gone_and_a_stream_that_breaks_off(browser: Browser) -> None:
    toy = ToyBackend(model=scripted(), faults=on("/v1/stream", DropAfter(4)))
    with served(toy) as there, opened(browser, f"{there.url}/ui") as page:
        run(page, repeats=2)
        expect(headline(page, "off")).to_have_text("No answer")
        expect(panel(page, "off").locator(".trouble")).to_contain_text("2 requests failed")
        expect(headline(page, "verified")).to_have_text("1 answer, 2 times, bit for bit")
        toy.faults = lambda path, nth: Status(503)
        run(page, repeats=2)
        expect(panel(page, "verified").locator(".trouble")).to_contain_text("503 backend_unavailable")


def test_a_gateway_that_is_gone(browser: Browser) -> None:
    with served(ToyBackend(model=scripted())) as there, opened(browser, f"{there.url}/ui") as page:
        playground(page)
        page.context.set_offline(True)
        run(page)
        expect(panel(page, "off").locator(".trouble")).to_contain_text("The gateway does not answer")


def test_a_field_that_says_nothing_sensible_is_named(browser: Browser) -> None:
    toy = ToyBackend(model=scripted())
    with served(toy) as there, opened(browser, f"{there.url}/ui") as page:
        run(page, repeats=99)
        expect(page.get_by_role("alert")).to_contain_text("Answers each:")
        expect(page.get_by_label("Answers each")).to_be_focused()
        page.get_by_label("Answers each").fill("4")
        page.get_by_label("Prompt").fill("  ")
        page.get_by_role("button", name="Ask").click()
        expect(page.get_by_role("alert")).to_have_text("Prompt: say something.")
    assert toy.calls["/v1/stream"] == 0


# --- for everybody ---------------------------------------------------------------------------------------------------


def test_all_of_it_works_from_the_keyboard(browser: Browser) -> None:
    with served(Restless()) as there, opened(browser, f"{there.url}/ui") as page:
        expect(page.get_by_label("Model")).to_have_value("toy")
        walked: list[str] = []
        for _ in range(12):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                "() => { const at = document.activeElement, style = getComputedStyle(at);"
                " return [at.id || at.textContent.trim(), style.outlineStyle !== 'none' && style.outlineWidth]; }"
            )
            assert outline, f"{name} does not show that it has the focus"
            walked.append(name)
        controls = ["prompt", "model", "repeats", "max-tokens", "temperature", "seed", "load", "run"]
        assert walked == ["Skip to the content", "Verbatim", "Playground", "Dashboard", *controls]
        page.keyboard.press("Enter")
        expect(headline(page, "off")).to_have_text("3 different answers")
        expect(page.get_by_role("button", name="Ask")).to_be_focused()
        page.get_by_label("Prompt").focus()
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("button", name="Ask")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_axe_finds_nothing(browser: Browser, scheme: Scheme, width: int) -> None:
    with served(Restless()) as there, opened(browser, f"{there.url}/ui", width=width, scheme=scheme) as page:
        playground(page, repeats=6)
        page.locator("summary").click()
        assert violations(page) == []
        run(page, repeats=6)
        assert violations(page) == []
        assert overflowing(page) == []


def test_who_wants_no_motion_gets_none(browser: Browser) -> None:
    toy = ToyBackend(model=scripted(), faults=on("/v1/stream", HangAfter(6)))
    with served(toy) as there, opened(browser, f"{there.url}/ui", reduced_motion="reduce") as page:
        playground(page)
        page.get_by_role("button", name="Ask").click()
        page.wait_for_selector(".caret")
        assert page.evaluate("getComputedStyle(document.querySelector('.caret')).animationName") == "none"
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Ask")).to_be_focused()


# --- the comparison alone --------------------------------------------------------------------------------------------


def compared(page: Page, *answers: str, state: str = "done") -> Any:
    """The verdict over answers of one token a letter; the logprob of a capital letter is another one."""
    build = """
      async ([answers, state]) => {
        const { verdict } = await import("./ui/compare.js");
        const small = (letter) => letter.toLowerCase();
        const logprob = (letter) => (letter === small(letter) ? "-1" : "-2");
        const token = (letter) => ({ id: small(letter), text: letter, logprob: logprob(letter) });
        return verdict(answers.map((text) => ({ state, said: { mode: "verified" }, tokens: [...text].map(token) })));
      }"""
    return page.evaluate(build, [answers, state])


def test_the_comparison(browser: Browser) -> None:
    with served(ToyBackend()) as there, opened(browser, f"{there.url}/ui") as page:
        same = compared(page, "abc", "abc")
        assert (same["distinct"], same["firstDifference"], same["bitwise"]) == (1, None, 1)
        bits = compared(page, "abc", "aBc", "abC")
        assert (bits["distinct"], bits["bitwise"], bits["firstLogprobDifference"]) == (1, 3, 1)
        words = compared(page, "abcd", "abxd", "abxy", "abxd")
        assert (words["distinct"], words["firstDifference"]) == (3, 2)
        assert [group["members"] for group in words["groups"]] == [[1, 3], [0], [2]]
        ended = compared(page, "abc", "ab")
        assert (ended["distinct"], ended["firstDifference"]) == (2, 2)
        written = compared(page, "abc", "ab", "ax", state="streaming")
        assert (written["distinct"], written["firstDifference"]) == (2, 1)
        assert compared(page, "abc", state="failed")["distinct"] == 0


def test_a_logprob_is_compared_digit_by_digit(browser: Browser) -> None:
    read = 'JSON.parse("[-1.1920928955078125e-07]", (key, value, context) => context?.source ?? value)[0]'
    with served(ToyBackend()) as there, opened(browser, f"{there.url}/ui") as page:
        assert page.evaluate(read) == "-1.1920928955078125e-07"
    assert "context?.source" in (PAGE / "ask.js").read_text()
