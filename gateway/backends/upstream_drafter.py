"""Windows drafted by an OpenAI server, for verifiers of ours: "another server" is as good a fast path as any.

The server takes the context as token ids (as vLLM, SGLang and OpenAI's completions do) and answers with text, which
becomes token ids again here. Where that cuts the text into other tokens than the server had chosen, the draft is wrong
from there on, which costs time and changes nothing. Above temperature 0 the server's chance is not the verifier's, so
drafts mostly fail: this is for greedy traffic.
"""

from __future__ import annotations

import asyncio

import msgspec

from backend.protocol import DraftRequest, DraftResponse, DraftToken
from gateway.backends.client import translated
from gateway.backends.upstream import UpstreamGroup
from gateway.errors import BackendFailed
from gateway.text.model_text import ModelText

_HEADERS = ((b"content-type", b"application/json"),)


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class UpstreamDrafter:
    """Drafts for one model, which clients call `model`."""

    def __init__(self, upstreams: UpstreamGroup, model: str, text: ModelText, call_timeout_s: float) -> None:
        self._upstreams = upstreams
        self._model = model
        self._text = text
        self._call_timeout_s = call_timeout_s

    def __repr__(self) -> str:
        return f"<UpstreamDrafter {self._upstreams!r}>"

    async def draft(self, request: DraftRequest) -> DraftResponse:
        """Raises `BackendError`."""
        sampling = request.sampling
        body = {
            "model": self._model,
            "prompt": request.context,
            "max_tokens": request.count,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        with translated():
            async with (
                asyncio.timeout(self._call_timeout_s),
                self._upstreams.post(b"/completions", _HEADERS, msgspec.json.encode(body), {}) as response,
            ):
                status, content = response.status, await response.read()
        if status != 200:
            raise BackendFailed(f"the upstream that drafts answered status {status}")
        try:
            (choice,) = msgspec.json.decode(content, type=_Completion).choices
        except ValueError as error:
            raise BackendFailed(f"the upstream's draft cannot be read: {error}") from error
        ids = [*self._text.encode(choice.text, special_tokens=False)] if choice.text else []
        if choice.finish_reason == "stop" and request.stop_ids:
            ids.append(request.stop_ids[0])
        # Neither logprobs nor margins are known; nothing that verifies asks for them.
        return DraftResponse([DraftToken(id_, 0.0, 0.0) for id_ in ids[: request.count]], fingerprint="")
