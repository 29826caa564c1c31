"""The gateway obeys its policy: over HTTP, with the toy backend behind it."""

from __future__ import annotations

import pytest
from conftest import Gateway
from toy_backend import ToyBackend

from backend.protocol import StreamRequest


@pytest.mark.parametrize(
    ("mode", "batching"), [("off", "dynamic"), ("batch_invariant", "invariant"), ("batch_of_one", "none")]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_modes_that_no_verifier_sees(
    toy: ToyBackend, gateway: Gateway, mode: str, batching: str, stream: bool
) -> None:
    response = await gateway.chat({"X-Verbatim-Determinism": mode}, max_tokens=3, stream=stream)
    assert response.status_code == 200
    assert response.headers["x-verbatim-determinism"] == mode
    assert "x-verbatim-windows" not in response.headers and "windows=" not in response.text
    (request,) = toy.requests
    assert isinstance(request, StreamRequest)
    assert request.batching == batching
    if mode != "off":
        assert request.sampling.seed == 42
