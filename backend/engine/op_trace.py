"""Which op's bits differ between two ways of computing the same rows: for error messages, at the price of a slow pass.

Wraps a lane's ops so that every output row leaves a digest. An op whose rows are the first to differ, in the order of
the program, had equal inputs: it is the one at fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from backend.kernels.ops import Ops

_OPS = ("linear", "rms_norm", "rope", "swiglu", "attention")


@dataclass(slots=True)
class OpTrace:
    """The ops called, in order: their names and a digest of each row of what they returned."""

    calls: list[tuple[str, list[bytes]]] = field(default_factory=list)

    def watch(self, ops: Ops) -> Ops:
        """The same ops, which note what they return."""
        watched: dict[str, Any] = {name: self._watched(name, getattr(ops, name)) for name in _OPS}
        return replace(ops, **watched)

    def take(self) -> list[tuple[str, list[bytes]]]:
        """What was noted since it was last asked."""
        calls, self.calls = self.calls, []
        return calls

    def _watched(self, name: str, op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(*args: Any) -> torch.Tensor:
            output = op(*args)
            rows = output.detach().cpu().flatten(1).contiguous().view(torch.uint8).numpy()
            self.calls.append((name, [hashlib.sha256(row.tobytes()).digest() for row in rows]))
            return output

        return watched
