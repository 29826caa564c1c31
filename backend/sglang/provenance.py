"""Which slots of the KV pool hold the fixed lane's keys and values, one bit for each slot.

A slot in the prefix tree belongs to one path of tokens. Its bit says that the fixed lane computed it from that path, so
its content is what any other verification of the path would have computed. Every ordinary forward takes the bits of the
slots that it writes. Slots that are freed keep theirs: whoever is given one writes it before it enters the tree.
"""

from __future__ import annotations

import torch


class Provenance:
    """The bits of a pool of `size` slots, on the pool's device."""

    def __init__(self, size: int, device: torch.device | str):
        self._fixed = torch.zeros(size, dtype=torch.bool, device=device)

    def __repr__(self) -> str:
        return f"<Provenance fixed={int(self._fixed.sum())}/{len(self._fixed)}>"

    def wrote_fast(self, slots: torch.Tensor) -> None:
        """An ordinary forward writes `slots`, int64 of any shape."""
        self._fixed[slots] = False

    def wrote_fixed(self, slots: torch.Tensor) -> None:
        """A verification pass wrote `slots`."""
        self._fixed[slots] = True

    def fixed_prefix(self, slots: torch.Tensor) -> int:
        """How many leading slots of a sequence's `slots` [length] are fixed."""
        bits = self._fixed[slots]
        return len(slots) if bool(bits.all()) else int(bits.int().argmin())
