"""What the span of a request says of it, in the words of OpenTelemetry's conventions for HTTP and generative AI.

Words of our own begin with `verbatim.`.
"""

from __future__ import annotations

from gateway.telemetry.record import Record

PROVIDER = "verbatim"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""The conventions' names of what these routes do."""


def finish_span(record: Record) -> None:
    """End the span of a request that has ended."""
    span = record.span
    if not span.recording:
        return
    operation = OPERATIONS.get(record.route)
    attributes: dict[str, str | int | float | bool] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "verbatim.request_id": record.request_id,
    }
    if operation is not None:
        attributes["gen_ai.operation.name"] = operation
        attributes["gen_ai.provider.name"] = PROVIDER
    if record.model:
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = record.model
    if record.prompt_tokens:
        attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.completion_tokens
    for name in ("tenant", "mode", "via", "cache"):
        if value := getattr(record, name):
            attributes[f"verbatim.{name}"] = value
    if record.mode:
        attributes["gen_ai.request.stream"] = record.stream
    if record.first_at is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_at - record.began
    span.set(attributes)
    span.rename(f"{operation} {record.model}" if operation and record.model else f"{record.method} {record.route}")
    # By the conventions a server's span is not in error where the client is to blame.
    span.end(record.code if record.status >= 500 or (record.code and record.status < 400) else "")
