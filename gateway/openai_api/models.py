"""What `GET /v1/models` lists."""

from __future__ import annotations

from gateway.openai_api.shape import Json


def model_card(model: str, created: int, max_context: int | None) -> Json:
    """An entry of the list; `max_model_len` is vLLM's name for the context, left out where it is not known."""
    card: Json = {"id": model, "object": "model", "created": created, "owned_by": "verbatim"}
    return card if max_context is None else card | {"max_model_len": max_context}
