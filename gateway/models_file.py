"""The models file: which models the gateway serves, and which backends serve each of them.

    version: 1
    models:
      smollm2:                              # what clients call it
        backends:                           # speak the window protocol; equal fingerprints stand in for each other
          - url: http://10.0.0.1:9000
          - url: http://10.0.0.2:9000
        fingerprint: 5f0c...                # optional: without it the first backend in this order that is ready decides
        upstreams:                          # OpenAI servers, to which mode off is passed through
          - url: https://api.example.com/v1
            key_env: EXAMPLE_API_KEY        # the environment variable that holds the key
            model: smollm2-135m             # what the upstream calls it, where that differs
        drafts: upstreams                   # who drafts for the backends' verifiers; backends, if not given

Owns the keys and their checks; how mistakes are said is policies.sections' business. Reads no file itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gateway.base_url import parse_base_url
from policies.kinds import Name, Whole, Word
from policies.sections import Mistakes, Section, open_document

VERSION = 1

_KEY = re.compile(r"[!-~]+")
"""What can stand behind `Bearer` in a header."""


class Drafts(StrEnum):
    """Who drafts for the verifiers."""

    BACKENDS = "backends"
    UPSTREAMS = "upstreams"


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """An OpenAI server. `url` is what clients would use as base URL; `key` its API key, which no repr shows."""

    url: str
    model: str
    key: str | None

    def __repr__(self) -> str:
        return f"UpstreamConfig({self.url!r}, {self.model!r}, {'with key' if self.key else 'without key'})"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model; at least one of `backends` (base URLs) and `upstreams` is not empty.

    `name` None stands for what the backend calls it.
    """

    name: str | None
    backends: tuple[str, ...] = ()
    fingerprint: str | None = None
    upstreams: tuple[UpstreamConfig, ...] = ()
    drafts: Drafts = Drafts.BACKENDS


def load_models(text: str, file: str, env: Mapping[str, str]) -> tuple[ModelConfig, ...]:
    """The models of a file's text; `file` is what mistakes call it. Raises `FileMistakes` with all of them."""
    mistakes = Mistakes(file)
    root = open_document(text, mistakes)
    root.require("version", Whole(VERSION, VERSION).parse)
    section = root.section("models")
    root.close()
    models = [] if section is None else [_model(name, entry, env) for name, entry in section.entries()]
    if not models:
        root.mistake("names no model; list at least one under the key 'models'")
    mistakes.raise_any()
    return tuple(models)


def _model(name: str, section: Section, env: Mapping[str, str]) -> ModelConfig:
    backends = [_backend(item) for item in section.items("backends")]
    fingerprint = section.take("fingerprint", Name().parse)
    upstreams = [_upstream(name, item, env) for item in section.items("upstreams")]
    drafts = section.take("drafts", Word(Drafts).parse) or Drafts.BACKENDS
    section.close()
    if not name:
        section.mistake("a model's name must not be empty")
    if not backends and not upstreams:
        section.mistake("has no backends and no upstreams")
    known = [url for url in backends if url]
    if len(set(known)) < len(known):
        section.mistake("lists a URL twice", "backends")
    if drafts is Drafts.UPSTREAMS and not (backends and upstreams):
        section.mistake("needs backends, which verify, and upstreams, which draft", "drafts")
    return ModelConfig(name, tuple(backends), fingerprint, tuple(upstreams), drafts)


def _backend(section: Section) -> str:
    url = section.require("url", parse_base_url)
    section.close()
    return url or ""


def _upstream(name: str, section: Section, env: Mapping[str, str]) -> UpstreamConfig:
    url = section.require("url", parse_base_url)
    variable = section.take("key_env", Name().parse)
    model = section.take("model", Name().parse)
    section.close()
    key = None if variable is None else env.get(variable)
    if variable is not None and not key:
        section.mistake(f"the environment variable {variable} is not set", "key_env")
    if key and not _KEY.fullmatch(key):
        said = "holds what no header may: a line break at its end, perhaps"
        section.mistake(f"the environment variable {variable} {said}", "key_env")
    return UpstreamConfig(url or "", model or name, key)
