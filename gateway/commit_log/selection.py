"""Which logs an operator means, told from their keys alone."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.commit_log.key import TAG_BYTES


@dataclass(frozen=True, slots=True)
class Selection:
    """Logs whose keys have these tags and begin with these hexadecimal digits; what is empty says nothing."""

    reader_tag: bytes = b""
    fingerprint_tag: bytes = b""
    prefix: str = ""

    def __call__(self, key: bytes) -> bool:
        return (
            key.startswith(self.reader_tag)
            and key.startswith(self.fingerprint_tag, TAG_BYTES)
            and key.hex().startswith(self.prefix)
        )

    @property
    def pattern(self) -> str:
        """A glob over keys in hexadecimal that leaves out no key of the selection, and few others."""
        if self.prefix:
            return self.prefix + "*"
        anything = "?" * (2 * TAG_BYTES)
        return (self.reader_tag.hex() or anything) + (self.fingerprint_tag.hex() or anything) + "*"
