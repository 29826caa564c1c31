"""The container format of GGUF files, versions 2 and 3, little-endian: metadata and the place of each tensor.

Owns the byte layout. Knows nothing of what keys and tensors mean. The gguf library has a reader too, which is made for
editing files: it keeps several array objects for each string of a vocabulary, takes more than twenty times as long, and
reads on behind the end of a file for as long as a damaged length says.

Layout: "GGUF", version u32, tensor count u64, key count u64; then the keys, each a name, a type and a value; then the
tensors, each a name, its dimensions (innermost first), a type and an offset; then, aligned, the data. A string is a u64
length and UTF-8 bytes. An array is a type, a u64 length and the elements.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufFormatError(ValueError):
    """The bytes are no whole GGUF file; the message says where they go wrong."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as stored: rows of quantised blocks, still in the mapped file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: npt.NDArray[np.uint8]

    def dequantise(self) -> npt.NDArray[np.float32]:
        """The values as float32. Raises NotImplementedError for types that hold no weights."""
        values: npt.NDArray[np.float32] = dequantize(self.rows, self.kind)
        return values.reshape(self.shape)


def read_gguf(path: Path) -> tuple[dict[str, object], dict[str, StoredTensor]]:
    """The metadata and tensors of a file. Raises OSError or GgufFormatError."""
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise GgufFormatError("it is empty") from error
    cursor = _Cursor(mapped)
    if cursor.take(4) != b"GGUF":
        raise GgufFormatError("it does not start with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise GgufFormatError(f"its version is {version}, expected 2 or 3")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise GgufFormatError(f"it has the key {key} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    places: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name = cursor.text()
        if name in places:
            raise GgufFormatError(f"it has the tensor {name} twice")
        shape = tuple(reversed(cursor.numbers("Q", cursor.number("I"))))
        places[name] = (shape, cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise GgufFormatError(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    return metadata, {name: _locate(mapped, name, start, *place) for name, place in places.items()}


def _locate(mapped: mmap.mmap, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
    try:
        quantisation = GGMLQuantizationType(kind)
    except ValueError as error:
        raise GgufFormatError(f"the tensor {name} has the unknown type {kind}") from error
    block_values, block_bytes = GGML_QUANT_SIZES[quantisation]
    if not shape or shape[-1] % block_values:
        raise GgufFormatError(f"the tensor {name} has the shape {shape}, not in blocks of {block_values}")
    row_bytes = shape[-1] // block_values * block_bytes
    size = row_bytes
    for extent in shape[:-1]:
        size *= extent
    if size == 0 or start + offset + size > len(mapped):
        raise GgufFormatError(f"the tensor {name} reaches behind the end, or is empty")
    data = np.frombuffer(mapped, dtype=np.uint8, count=size, offset=start + offset)
    return StoredTensor(shape, quantisation, data.reshape(-1, row_bytes))


class _Cursor:
    """Reads values one behind the other and never past the end."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        start = self.position
        if size > len(self._data) - start:
            raise GgufFormatError(f"it ends early, where {size} more bytes should follow byte {start}")
        self.position += size
        return self._data[start : self.position]

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        layout = f"<{count}{code}"
        # The size first: a damaged count must not become an allocation.
        return struct.unpack(layout, self.take(count * struct.calcsize(f"<{code}")))

    def number(self, code: str) -> int:
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise GgufFormatError(f"the string before byte {self.position} is not UTF-8") from error

    def value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise GgufFormatError(f"the type before byte {self.position} is the unknown {kind}")
        element, count = self.number("I"), self.number("Q")
        if element in _SCALARS:
            return list(self.numbers(_SCALARS[element], count))
        if element != _STRING:
            raise GgufFormatError(f"the array at byte {self.position} has elements of the type {element}")
        return [self.text() for _ in range(count)]
