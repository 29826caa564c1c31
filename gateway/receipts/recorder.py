"""Writes down what an answer shows: each choice's tokens and logprobs, as its events go by.

What is written is what the answer consists of, the token that ended it included, and not what the verifier committed
beyond a stop string: so it does not matter in which windows the tokens came, or out of which log.
"""

from __future__ import annotations

from gateway.domain import ChoiceDeltas, ChoiceEvent, ChoiceFinished, Completion, Counts, Token
from gateway.receipts.chain import last_link, logprob_bits, prompt_digest
from gateway.receipts.receipt import Answer, Choice, Prompt, sampled


class Recorder:
    """One answer. `counts` are what its finished choices took."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._first = [prompt_digest(job.prompt) for job in completion.jobs[:: completion.choices]]
        self._tokens: list[list[Token]] = [[] for _ in completion.jobs]
        self._choices: dict[int, Choice] = {}
        self.counts = Counts()

    def __repr__(self) -> str:
        return f"<Recorder tokens={[len(tokens) for tokens in self._tokens]} finished={sorted(self._choices)}>"

    def add(self, event: ChoiceEvent) -> None:
        match event:
            case ChoiceDeltas():
                for delta in event.deltas:
                    self._tokens[event.index] += delta.tokens
            case ChoiceFinished():
                assert event.completion_tokens == len(self._tokens[event.index])
                self.counts += event.counts
                self._choices[event.index] = self._choice(event)

    def answer(self, *, holds_prompt: bool) -> Answer:
        """The answer, once every choice is finished."""
        completion = self._completion
        jobs = completion.jobs
        return Answer(
            fingerprint=completion.fingerprint,
            model=completion.model,
            prompts=tuple(
                Prompt(first.hex(), job.prompt if holds_prompt else None)
                for first, job in zip(self._first, jobs[:: completion.choices], strict=True)
            ),
            sampling=sampled(jobs[0].sampling),
            stop_ids=jobs[0].stop_ids,
            stops=completion.stops,
            choices=tuple(self._choices[index] for index in range(len(jobs))),
        )

    def _choice(self, event: ChoiceFinished) -> Choice:
        job, tokens = self._completion.jobs[event.index], self._tokens[event.index]
        prompt = event.index // self._completion.choices
        ids = tuple([token.id for token in tokens])
        bits = logprob_bits([token.logprob for token in tokens])
        return Choice(
            prompt=prompt,
            seed=str(job.sampling.seed),
            max_tokens=job.max_tokens,
            finish=event.finish,
            tokens=ids,
            logprobs=bits.hex(),
            chain=last_link(self._first[prompt], ids, bits).hex(),
        )
