"""One verify call as a state machine over passes: which rows it still needs, and what it commits.

Pure: no clock, no I/O. A pass may do less than was asked for, or begin further back than the one before it ended,
because KV was evicted in between; choices are told apart by their row, so neither matters.
"""

from __future__ import annotations

from backend.protocol import Finish, VerifiedToken, VerifyRequest
from backend.sglang.passes import Done, Span


class Replay:
    """From a call to its answer. `max_context` is the backend's."""

    def __init__(self, call: VerifyRequest, max_context: int):
        self._call = call
        self._tokens = [*call.context, *call.draft]
        self._first = len(call.context) - 1
        self._max_context = max_context
        self.agreed = 0
        self.tokens: list[VerifiedToken] = []
        self.finish: Finish | None = None
        self.done = False
        self.broken = False
        """Whether the logits of a row that counts were not finite: then there is no answer."""

    def __repr__(self) -> str:
        return (
            f"<Replay {len(self.tokens)} of {len(self._call.draft) + 1} rows judged, agreed={self.agreed} {self.done=}>"
        )

    @property
    def length(self) -> int:
        """Tokens whose KV the call needs."""
        return len(self._tokens)

    def span(self) -> Span:
        """What to ask the next pass for."""
        assert not self.done
        judged = len(self.tokens)
        return Span(
            tokens=self._tokens,
            wanted=self._first + judged,
            generated=self._call.generated + judged,
            sampling=self._call.sampling,
            stop_ids=self._call.stop_ids,
            top=self._call.top_logprobs,
        )

    def take(self, done: Done) -> bool:
        """Take what a pass did; whether it brought the call any further."""
        assert not self.done
        # The pass chose for the rows it was asked for, from the first one not judged yet.
        for choice in done.choices:
            if choice.id < 0:
                self.broken = self.done = True
            else:
                self._commit(VerifiedToken(id=choice.id, logprob=choice.logprob, top=choice.top))
            if self.done:
                break  # What follows was computed behind a refused draft.
        return done.stop > done.start

    def _commit(self, token: VerifiedToken) -> None:
        index = len(self.tokens)
        self.tokens.append(token)
        draft = self._call.draft
        if index < len(draft) and token.id == draft[index]:
            self.agreed += 1
        else:
            self.done = True
        if token.id in self._call.stop_ids:
            self.finish = "stop"
        elif len(self._call.context) + index + 1 >= self._max_context:
            self.finish = "length"
        self.done = self.done or self.finish is not None
