"""Parses and checks `POST /v1/completions`.

Owns the list of its fields and the four ways to write a prompt: a text, a list of texts, token ids, a list of lists of
token ids. Knows nothing of models, policies or capacity.

Where OpenAI leaves room: `max_tokens` is 16 where it is not given, as in OpenAI's legacy API and in vLLM. A text is
tokenised with the special tokens that the model's tokenizer puts around any text, unless `add_special_tokens`, which is
vLLM's, is false. `echo` shows the prompt as it was sent. Its logprobs would take a call that scores given tokens, which
the window protocol does not have, so `echo` with `logprobs` is refused. `best_of` beyond `n` would choose among answers
by their logprobs, and is refused.
"""

from __future__ import annotations

from gateway.domain import Order, TextPrompt, TokenPrompt
from gateway.openai_api.ask import Ask
from gateway.openai_api.body import Rules, read_body, take, take_rest
from gateway.openai_api.completion_response import CompletionView
from gateway.openai_api.generation import ENGINES_OWN, GenerationFields, check_format, check_generation, facts_of
from gateway.openai_api.response_format import FREE, FormatFields, format_of
from gateway.openai_api.sampling import require, sampling_of, stop_ids_of

ROUTE = "/v1/completions"
DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5

RULES = Rules(
    neutral={**ENGINES_OWN, "service_tier": ("auto", "default")},
    refused=frozenset({"suffix"}),
    free=FREE,
)


class CompletionFields(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


PARTS = (FormatFields, CompletionFields)
"""What a body is made of."""


def parse_completion(content: bytes, determinism_header: str | None) -> Ask:
    """Parse a request body; raises `RequestError` naming the field at fault."""
    fields = read_body(content, RULES)
    form = format_of(take(fields, FormatFields))
    body = take_rest(fields, CompletionFields)
    check_generation(body)
    check_format(form, body)
    prompts = _prompts(body)
    require(body.best_of is None or body.best_of == body.n, "best_of", "is not supported beyond n")
    require(
        body.logprobs is None or 0 <= body.logprobs <= MAX_LOGPROBS,
        "logprobs",
        f"must be between 0 and {MAX_LOGPROBS}",
    )
    require(not body.echo or body.logprobs is None, "echo", "is not supported together with logprobs")
    order = Order(
        model=body.model,
        prompts=prompts,
        sampling=sampling_of(body, form.grammar),
        facts=facts_of(body, determinism_header, ROUTE),
        max_tokens=body.max_tokens,
        stops=body.stops,
        stop_ids=stop_ids_of(body),
        choices=body.n,
        top_logprobs=body.logprobs or 0,
        ignore_eos=body.ignore_eos,
        grammar_field=form.field,
    )
    view = CompletionView(logprobs=body.logprobs is not None, echo=prompts if body.echo else ())
    return Ask(order, view, body.stream, body.include_usage)


def _prompts(body: CompletionFields) -> tuple[TextPrompt | TokenPrompt, ...]:
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    require(len(given) > 0, "prompt", "must not be empty")
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) == len(given):
        special_tokens = body.add_special_tokens is not False
        return tuple(TextPrompt(text, special_tokens) for text in texts)
    require(body.add_special_tokens is None, "add_special_tokens", "says nothing about token ids")
    ids = [item for item in given if isinstance(item, int)]
    lists = [ids] if len(ids) == len(given) else [item for item in given if isinstance(item, list)]
    require(
        len(ids) == len(given) or len(lists) == len(given),
        "prompt",
        "must hold texts, token ids or lists of token ids, not some of each",
    )
    require(all(item and min(item) >= 0 for item in lists), "prompt", "must hold token ids of 0 or more, at least one")
    return tuple(TokenPrompt(tuple(item)) for item in lists)
