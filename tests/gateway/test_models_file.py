"""A models file is read whole or refused with file, line, path and key of every mistake."""

from __future__ import annotations

from textwrap import dedent

import pytest

from gateway.models_file import Drafts, ModelConfig, UpstreamConfig, load_models
from policies.sections import FileMistakes

WHOLE = """
    version: 1
    models:
      small:
        backends:
          - url: http://10.0.0.1:9000/
          - url: https://b.example
        fingerprint: abc
        upstreams:
          - url: https://api.example.com/v1
            key_env: KEY
            model: theirs
          - url: http://c:8000/v1
        drafts: upstreams
      other:
        upstreams: [{url: "http://d:8000/v1"}]
"""


def load(text: str, env: dict[str, str] | None = None) -> tuple[ModelConfig, ...]:
    return load_models(dedent(text), "models.yaml", {} if env is None else env)


def test_a_whole_file() -> None:
    assert load(WHOLE, {"KEY": "secret"}) == (
        ModelConfig(
            "small",
            ("http://10.0.0.1:9000", "https://b.example"),
            "abc",
            (
                UpstreamConfig("https://api.example.com/v1", "theirs", "secret"),
                UpstreamConfig("http://c:8000/v1", "small", None),
            ),
            Drafts.UPSTREAMS,
        ),
        ModelConfig("other", upstreams=(UpstreamConfig("http://d:8000/v1", "other", None),)),
    )


def test_no_repr_shows_a_key() -> None:
    assert "secret" not in repr(load(WHOLE, {"KEY": "secret"}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["models.yaml:1: the key 'version' is missing", "models.yaml:1: names no model"]),
        ("version: 2\nmodels: {m: {backends: [{url: 'http://a'}]}}", ["models.yaml:1: version: must be 1"]),
        ("version: 1\nmodel: {}", ["models.yaml:2: model: unknown key; did you mean 'models'?"]),
        ("version: 1\nmodels: {}", ["names no model"]),
        ("version: 1\nmodels: {m: {}}", ["models.yaml:2: models.m: has no backends and no upstreams"]),
        (
            "version: 1\nmodels:\n  m:\n    backend:\n      - url: http://a",
            ["models.yaml:4: models.m.backend: unknown key; did you mean 'backends'?", "has no backends"],
        ),
        (
            "version: 1\nmodels:\n  m:\n    backends:\n      - {url: 'http://a', urk: 1}\n      - {}",
            [
                "models.yaml:5: models.m.backends[0].urk: unknown key; did you mean 'url'?",
                "models.yaml:6: models.m.backends[1]: the key 'url' is missing",
            ],
        ),
        (
            "version: 1\nmodels:\n  m:\n    backends: [{url: ftp://a}, {url: 3}, {url: 'http://a?b'}, {url: 'http://a:b'}]",
            [
                *(f"models.m.backends[{i}].url: must be an http:// or https:// URL" for i in range(3)),
                "models.m.backends[3].url: has no right port",
            ],
        ),
        (
            "version: 1\nmodels: {m: {backends: [{url: 'http://a..b'}]}}",
            ["models.m.backends[0].url: must be an http:// or https:// URL"],
        ),
        (
            "version: 1\nmodels: {m: {upstreams: [{url: 'http://me:pw@a/v1'}]}}",
            ["models.m.upstreams[0].url: must not hold a user or a password"],
        ),
        (
            "version: 1\nmodels: {m: {upstreams: [{url: 'http://a/v1', key_env: NOWHERE}]}}",
            ["models.m.upstreams[0].key_env: the environment variable NOWHERE is not set"],
        ),
        (
            "version: 1\nmodels: {m: {backends: [{url: 'http://a'}, {url: 'http://a/'}]}}",
            ["backends: lists a URL twice"],
        ),
        (
            "version: 1\nmodels: {m: {backends: [{url: 'http://a'}], drafts: upstreams}}",
            ["models.m.drafts: needs backends, which verify, and upstreams, which draft"],
        ),
        (
            "version: 1\nmodels: {m: {backends: [{url: 'http://a'}], drafts: backend}}",
            ["models.m.drafts: must be one of backends, upstreams"],
        ),
        (
            "version: 1\nmodels: {m: {backends: [{url: 'http://a'}], fingerprint: 12}}",
            ["models.m.fingerprint: must be text; put it in quotes"],
        ),
        ("version: 1\nmodels: [", ["models.yaml:3: not YAML"]),
    ],
)
def test_mistakes_name_file_line_path_and_key(text: str, said: list[str]) -> None:
    with pytest.raises(FileMistakes) as caught:
        load(text)
    for part in said:
        assert part in str(caught.value)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("key", ["secret\n", "secret\r\nx: y", "sec ret", "secr\N{RIGHT SINGLE QUOTATION MARK}t"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(FileMistakes, match=r"key_env: the environment variable KEY holds what no header may") as caught:
        load(WHOLE, {"KEY": key})
    assert "sec" not in str(caught.value)
