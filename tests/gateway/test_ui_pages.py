"""The files at /ui: their headers, and that they need nothing from elsewhere."""

from __future__ import annotations

import re

import pytest
from launched import Gateway

from gateway.ui.pages import PAGE

NAMES = sorted(path.name for path in PAGE.iterdir())


def directives(policy: str) -> dict[str, str]:
    return dict(part.strip().split(" ", 1) for part in policy.split(";"))


@pytest.mark.parametrize("path", ["/ui", *(f"/ui/{name}" for name in NAMES)])
async def test_a_file_comes_with_a_strict_policy(gateway: Gateway, path: str) -> None:
    response = await gateway.http.get(path)
    assert response.status_code == 200
    policy = directives(response.headers["content-security-policy"])
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    expected = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    suffix = "html" if path == "/ui" else path.rpartition(".")[2]
    assert response.headers["content-type"].startswith(expected[suffix])


async def test_a_file_is_sent_once_and_then_answered_by_its_tag(gateway: Gateway) -> None:
    first = await gateway.http.get("/ui/main.js")
    again = await gateway.http.get("/ui/main.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    other = await gateway.http.get("/ui/dom.js", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200 and other.content
    assert (await gateway.http.head("/ui")).status_code == 200


async def test_a_slash_leads_to_the_page(gateway: Gateway) -> None:
    response = await gateway.http.get("/ui/")
    assert response.status_code == 308
    assert response.url.join(response.headers["location"]).path == "/ui"


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/../pages.py", "/ui/%2e%2e/pages.py", "/ui/page/main.js"])
async def test_nothing_else_is_served(gateway: Gateway, path: str) -> None:
    response = await gateway.http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"


def test_the_page_is_made_of_its_own_files_alone() -> None:
    index = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", index)
    for name in re.findall(r'(?:src|href)="([^"#]+)"', index):
        assert name.startswith("ui/") and name.removeprefix("ui/") in NAMES
    for path in PAGE.iterdir():
        text = path.read_text()
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text
        assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert name in NAMES


async def test_a_page_without_a_key_holds_no_data(gateway: Gateway) -> None:
    text = (await gateway.http.get("/ui")).text
    assert "toy" not in text
