"""What `GET /v1/models` lists."""

from __future__ import annotations

from gateway.openai_api.shape import Json


def model_card(model: str, created: int, max_context: int) -> Json:
    """An entry of the list; `max_model_len` is vLLM's name for the context."""
    return {"id": model, "object": "model", "created": created, "owned_by": "verbatim", "max_model_len": max_context}
