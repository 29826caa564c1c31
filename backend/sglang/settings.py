"""What the launcher tells the adapter in SGLang's processes, carried in the environment: SGLang starts them itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backend.protocol import VerifyShape

VARIABLE = "VERBATIM_VERIFY_SHAPE"


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The fixed shape of verification passes."""

    shape: VerifyShape

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AdapterSettings | None:
        """The launcher's settings, or None in a process that it did not start."""
        text = environment.get(VARIABLE)
        if text is None:
            return None
        groups, _, window = text.partition("x")
        return cls(VerifyShape(groups=int(groups), window=int(window)))

    def to_environment(self) -> dict[str, str]:
        """The variables for `from_environment`."""
        return {VARIABLE: f"{self.shape.groups}x{self.shape.window}"}
