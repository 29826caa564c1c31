"""`verbatim receipts` and `verbatim replay`: make the keys of receipts, check receipts, compute answers again.

Owns what is printed and the exit statuses: 0 it holds, 1 it does not, 2 there is nothing to judge (a mistake in the
command, or no receipt), 3 nothing can be said of it here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import click
import httpx

from backend.protocol import Info
from gateway.backends.client import BackendClient
from gateway.errors import GatewayError, RequestError
from gateway.http.client import HttpClient
from gateway.openai_api.parsers import PARSERS
from gateway.prompt_tokens import PromptTokens
from gateway.receipts.chain import prompt_digest
from gateway.receipts.key_files import write_new_key
from gateway.receipts.keys import PublicKeys, read_jwks
from gateway.receipts.receipt import ReceiptError, Statement, parse
from gateway.receipts.replay import Difference
from gateway.receipts.replay import replay as compute_again
from gateway.text.model_text import load_text

FETCH_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 900.0

RECEIPT = click.argument("receipt", type=click.File("rb"))
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class _DoesNotHold(click.ClickException):
    """The receipt is wrong."""

    exit_code = 1


class _NothingToJudge(click.ClickException):
    """There is no receipt, or not all that is needed to look at it."""

    exit_code = 2


class _CannotSay(click.ClickException):
    """The backend is not one that could tell."""

    exit_code = 3


@click.group()
def receipts() -> None:
    """Receipts of verified answers: the keys that sign them, and checking them. See docs/receipts.md."""


@receipts.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def new_key(folder: Path) -> None:
    """Put a new key into FOLDER, which a gateway started with --receipt-keys FOLDER signs with from then on."""
    try:
        path, key = write_new_key(folder, datetime.now(UTC))
    except OSError as error:
        raise click.ClickException(f"cannot write a key into {folder}: {error.strerror}") from error
    click.echo(f"{path}\nkid {key.public.kid}")


@receipts.command()
@RECEIPT
@click.option("--keys", required=True, help="The public keys: a JSON Web Key Set, as a file or a URL.")
def verify(receipt: IO[bytes], keys: str) -> None:
    """Check the signature and the chains of RECEIPT (- for standard input), without any backend."""
    public = _public_keys(keys)
    try:
        found = public.check(receipt.read())
    except ReceiptError as error:
        raise _DoesNotHold(f"does not hold: {error}") from error
    click.echo(f"holds: {_say(found.statement)}\nsigned with {found.signature.kid}")


@click.command()
@RECEIPT
@click.option(
    "--backend",
    default="http://127.0.0.1:8043",
    show_default=True,
    envvar="VERBATIM_BACKEND",
    help="Base URL of a backend with the receipt's fingerprint.",
)
@click.option("--keys", help="Check the signature first, with these public keys: a JSON Web Key Set, a file or a URL.")
@click.option("--request", "body", type=FILE, help="The request's body as it was sent, for a receipt without prompt.")
def replay(receipt: IO[bytes], backend: str, keys: str | None, body: Path | None) -> None:
    """Compute the answer of RECEIPT (- for standard input) again, by verification alone, and compare every bit.

    Exits with status 0 if all is the same, with 1 and the first position that differs if not, with 2 for what is no
    receipt, and with 3 where nothing can be said: the backend has another fingerprint, does not verify, or fails.
    """
    raw = receipt.read()
    try:
        found = parse(raw) if keys is None else _public_keys(keys).check(raw)
    except ReceiptError as error:
        raise _NothingToJudge(f"no receipt that holds: {error}") from error
    content = None if body is None else body.read_bytes()
    try:
        difference = asyncio.run(_replay(found.statement, backend, content))
    except RequestError as error:
        raise _NothingToJudge(f"the request cannot be read: {error.message}") from error
    except GatewayError as error:
        raise _CannotSay(f"{backend} cannot compute it again: {error.message}") from error
    if difference is not None:
        raise _DoesNotHold(f"differs at {difference}")
    click.echo(f"the same to the last bit: {_say(found.statement)}")


async def _replay(statement: Statement, url: str, content: bytes | None) -> Difference | None:
    async with HttpClient(connect_timeout_s=CONNECT_TIMEOUT_S, silence_timeout_s=CALL_TIMEOUT_S) as http:
        client = BackendClient(http, url, CALL_TIMEOUT_S)
        info = await client.info()
        expected = statement.answer.fingerprint
        if info.fingerprint != expected:
            message = f"{url} has the fingerprint {info.fingerprint}, the receipt {expected}: its bits are others"
            raise _CannotSay(message)
        if "verify" not in info.roles:
            raise _CannotSay(f"{url} does not verify")
        prompts = await _prompts(statement, client, info, content)
        return await compute_again(client, info, statement.answer, prompts)


async def _prompts(
    statement: Statement, client: BackendClient, info: Info, content: bytes | None
) -> Sequence[Sequence[int]]:
    """The prompts' tokens: the receipt's own, or made anew of the request."""
    if content is not None and hashlib.sha256(content).hexdigest() != statement.request.digest:
        raise _NothingToJudge("the request is not the one that the receipt is of: its digest is another")
    kept = [prompt.tokens for prompt in statement.answer.prompts if prompt.tokens is not None]
    if len(kept) == len(statement.answer.prompts):
        return kept
    if content is None:
        raise _NothingToJudge("the receipt does not hold its prompt: give the request with --request")
    parse_body = PARSERS.get(statement.request.route)
    if parse_body is None:
        raise _NothingToJudge(f"no request goes to {statement.request.route}")
    order = parse_body(content, None).order
    text = load_text(await client.tokenizer(), datetime.now)
    made = await PromptTokens(info, text).encode(order.prompts, fitting=False)
    if [prompt_digest(ids).hex() for ids in made] != [prompt.digest for prompt in statement.answer.prompts]:
        raise _CannotSay("the request makes another prompt now: a template may tell the date")
    return made


def _public_keys(place: str) -> PublicKeys:
    try:
        if place.startswith(("http://", "https://")):
            response = httpx.get(place, timeout=FETCH_TIMEOUT_S)
            response.raise_for_status()
            return read_jwks(response.content)
        return read_jwks(Path(place).read_bytes())
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise click.BadParameter(f"no keys can be read there: {error}", param_hint="--keys") from error


def _say(statement: Statement) -> str:
    choices, issued = statement.answer.choices, statement.issued
    tokens = sum(len(choice.tokens) for choice in choices)
    said = f"{tokens} tokens" if len(choices) == 1 else f"{tokens} tokens in {len(choices)} choices"
    at = datetime.fromtimestamp(issued.at, UTC)
    return f"{issued.id}, {said} of {statement.answer.model}, issued {at:%Y-%m-%d %H:%M:%S} UTC"
