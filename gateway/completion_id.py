"""The id of an answer: for verified answers a digest of all that determines the answer's body, so that it repeats.

The digest is over a JSON array of typed, delimited values, never over text joined together. Left out, and why:
`Completion.windows` never changes the result. Everything else of a completion and its jobs is in,
a job's sampling with every field it has; what the endpoint adds to it is in the view's key.
"""

from __future__ import annotations

import hashlib

import msgspec

from gateway.domain import Completion, Job


def completion_id(completion: Completion, view_key: list[object]) -> str:
    """An id equal for equal verified requests and, but for the chance of a collision, only for these."""
    key = [
        completion.fingerprint,
        completion.model,
        completion.mode,
        list(completion.stops),
        [_job_key(job) for job in completion.jobs],
        completion.choices,
        completion.continues,
        list(completion.spelled),
        view_key,
    ]
    return hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:32]


def _job_key(job: Job) -> list[object]:
    return [list(job.prompt), job.sampling, job.max_tokens, list(job.stop_ids), job.top_logprobs]
