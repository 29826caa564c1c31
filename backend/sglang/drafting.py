"""Drafts and streams in SGLang's own batches: the rule by which their tokens are chosen, and what is reported of them.

A request of ours carries a `Rule` among its sampling parameters. SGLang batches it with all others, takes it for a
greedy one, and calls its sampler; then its token is chosen again from the untouched logits by the verifier's own rule.
A stock seeded token would depend on the batch: its noise is indexed by rank as soon as a batch-mate filters, and a
draft that agrees with its verification only by luck is worth nothing. Rows of other requests stay as SGLang left them.

It ends behind a token in its rule's stop ids and nowhere else. SGLang can stop at the model's own ids as well, or at
none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

from backend.kernels.adjust import Past
from backend.kernels.ops import Ops
from backend.kernels.sampling import Draw, choose, top_scores
from backend.protocol import Sampling
from backend.sglang.provenance import Provenance

PARAMETER = "verbatim"
"""Name of the rule among a request's `custom_params`."""
_OURS = "verbatim_ours"
"""Name of the attribute of a batch's sampling info that holds them, from the forward to the sampler."""

log = logging.getLogger(__name__)


class Rule(msgspec.Struct, frozen=True):
    """How the tokens of one request are chosen. The last `generated` ids of its prompt were generated.

    Scores reported among the top ones are logits where `as_logits`, else logprobs.
    """

    sampling: Sampling
    generated: int
    stop_ids: frozenset[int]
    as_logits: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a batch whose token is chosen by a rule."""

    index: int
    draw: Draw
    as_logits: bool


@dataclass(frozen=True, slots=True)
class Drafter:
    """What the hooks of one worker share: whose KV is whose, and the arithmetic of choosing."""

    provenance: Provenance
    ops: Ops

    def forward(self, stock: Callable[..., Any], worker: Any, batch: Any, *rest: Any, **options: Any) -> Any:
        """Around TpModelWorker.forward_batch_generation: note what it writes, and attach the rows that are ours."""
        if batch is not None:
            if batch.out_cache_loc is not None:
                self.provenance.wrote_fast(batch.out_cache_loc.to(torch.int64))
            rows = [row for index, req in enumerate(batch.reqs) if (row := _row(index, req)) is not None]
            if rows and batch.sampling_info is not None:
                setattr(batch.sampling_info, _OURS, _Ours(rows, self.ops))
        return stock(worker, batch, *rest, **options)


@dataclass(frozen=True, slots=True)
class _Ours:
    """The rows of a batch whose tokens we choose, and how."""

    rows: list[Row]
    ops: Ops


def sample(
    stock: Callable[..., Any],
    sampler: Any,
    output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_counts: list[int],
    *rest: Any,
    **options: Any,
) -> Any:
    """Around Sampler.forward: choose the tokens of our rows by their rules."""
    ours: _Ours | None = getattr(sampling_info, _OURS, None)
    if ours is None:
        return stock(sampler, output, sampling_info, return_logprob, top_counts, *rest, **options)
    setattr(sampling_info, _OURS, None)
    rows, ops = ours.rows, ours.ops
    indices = torch.tensor([row.index for row in rows], device=output.next_token_logits.device)
    # A copy: the stock sampler works in place.
    logits = output.next_token_logits[indices].float()
    ids = stock(sampler, output, sampling_info, return_logprob, top_counts, *rest, **options)
    chosen = choose(logits, [row.draw for row in rows], ops.sample)
    ids[indices] = chosen.to(ids.dtype)
    if return_logprob:
        scores = ops.logprobs(logits)
        output.next_token_logprobs[indices] = scores.gather(1, chosen[:, None])[:, 0].to(output.next_token_logprobs)
        for place, row in enumerate(rows):
            _report_top(output, row, top_counts[row.index], (logits if row.as_logits else scores)[place])
    return ids


def _report_top(output: Any, row: Row, count: int, scores: torch.Tensor) -> None:
    if count == 0:
        return
    top = top_scores(scores, count)
    output.next_token_top_logprobs_val[row.index] = scores.new_tensor([token.score for token in top])
    output.next_token_top_logprobs_idx[row.index] = torch.tensor([token.id for token in top], device=scores.device)


def ends(stock: Callable[..., bool], req: Any, accepted: list[int]) -> bool:
    """Around Req._check_token_based_finish: whether the last tokens, just accepted, end the request."""
    rule = _rule(req)
    if rule is None:
        return stock(req, accepted)
    for index, token in enumerate(accepted):
        if token in rule.stop_ids:
            req.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            req.finished_len = len(req.output_ids) - len(accepted) + index + 1
            return True
    return False


def _row(index: int, req: Any) -> Row | None:
    rule = _rule(req)
    if rule is None:
        return None
    tokens = [*req.origin_input_ids, *req.output_ids]
    past = None
    if rule.sampling.adjusts:
        past = Past(tokens, rule.generated + len(req.output_ids), rule.stop_ids)
    return Row(index, Draw(rule.sampling, len(tokens), past), rule.as_logits)


def _rule(req: Any) -> Rule | None:
    """The request's rule, decoded once and kept with it."""
    try:
        known: Rule | None = req.verbatim_rule
    except AttributeError:
        known = req.verbatim_rule = _decode(req.sampling_params.custom_params)
    return known


def _decode(parameters: Any) -> Rule | None:
    if not isinstance(parameters, dict) or PARAMETER not in parameters:
        return None
    try:
        return msgspec.json.decode(parameters[PARAMETER], type=Rule)
    except (msgspec.DecodeError, TypeError) as error:
        # Somebody else's request: it gets what stock SGLang makes of it.
        log.warning("a request's parameter %r holds no rule: %s", PARAMETER, error)
        return None
