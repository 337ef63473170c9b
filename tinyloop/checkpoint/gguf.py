"""The GGUF container: metadata fields and tensors of one memory-mapped file. Knows nothing of what they mean.

Own header reader, because the one of the gguf package builds an array per token string: 2.8 s for SmolLM2's 49k tokens
and merges, here under 0.1 s. Dequantising is that package's, but for the two kinds that most files are made of, which
take it three times as long. Format: GGUF 2 and 3, little-endian.
"""

import math
import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tinyloop.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_DIMENSIONS = 4
_CHUNK = 8192  # blocks that are dequantised at a time: they stay in the cache


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in torch order (GGUF stores it reversed); `start` and `size` are in bytes."""

    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    start: int
    size: int


class GGUFFile:
    """A GGUF file. Raises CheckpointError naming the file if it is truncated or malformed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        try:
            self.fields, self.tensors = _parse(self._data)
        except _Malformed as error:
            raise CheckpointError(f"{path}: {error}") from error

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str) -> torch.Tensor:
        """f32, f16 and bf16 tensors as they are, mapped; quantised ones as new float32 tensors, whose source then no
        longer counts as memory of this process."""
        info = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, info.size, info.start)
        if info.kind.name in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[info.kind.name]).view(info.shape)
        try:
            tensor = _dequantized(raw, info)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: tensor {name} has unsupported type {info.kind.name}") from error
        self._let_go(info)
        return tensor

    def _let_go(self, info: TensorInfo) -> None:
        """Unload a tensor's pages; who reads them again gets them from the file."""
        if hasattr(mmap, "MADV_DONTNEED"):  # Windows lacks it
            first = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._data.madvise(mmap.MADV_DONTNEED, first, info.start + info.size - first)


def _dequantized(raw: NDArray[np.uint8], info: TensorInfo) -> torch.Tensor:
    """In float32. Raises NotImplementedError for a kind that the package does not know either."""
    if info.kind.name not in _OWN:
        return torch.from_numpy(dequantize(raw.reshape(*info.shape[:-1], -1), info.kind))
    size, size_bytes = GGML_QUANT_SIZES[info.kind]
    blocks, values = torch.from_numpy(raw).view(-1, size_bytes), torch.empty(info.shape)
    for source, target in zip(torch.split(blocks, _CHUNK), torch.split(values.view(-1, size), _CHUNK), strict=True):
        _OWN[info.kind.name](source, target)
    return values


def _q4_1(blocks: torch.Tensor, values: torch.Tensor) -> None:
    """Blocks of a scale, an offset and 16 bytes: the low halves of all bytes come first."""
    scale, offset = blocks[:, :4].view(torch.float16).float().T[:, :, None]
    values[:, :16] = blocks[:, 4:] & 15
    values[:, 16:] = blocks[:, 4:] >> 4
    values.mul_(scale).add_(offset)


def _q8_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    """Blocks of a scale and 32 whole numbers."""
    values.copy_(blocks[:, 2:].view(torch.int8)).mul_(blocks[:, :2].view(torch.float16).float())


_OWN = {"Q4_1": _q4_1, "Q8_0": _q8_0}


class _Malformed(Exception):
    """What is wrong with the bytes; GGUFFile adds the file's name."""


def _map(path: Path) -> mmap.mmap:
    # Copy-on-write: torch wants writable memory, and the file must never change.
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read, or is empty") from error


class _Cursor:
    """Reads values one after another and refuses to run past the end."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at, self._end = data, at, len(data)

    def take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > self._end:
            raise _Malformed("truncated: the header runs past the end of the file")
        return self.data[start : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """So many, one behind the other: most of a header."""
        data, at, found = self.data, self.at, []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > self._end:
                raise _Malformed("truncated: the header runs past the end of the file")
            found.append(data[start:at])
        self.at = at
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError as error:
            raise _Malformed("a string in the header is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(_code(kind))

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self.strings(count)
        code = _code(kind)  # refuses arrays of arrays too: no model uses them
        size = struct.calcsize("<" + code) * count
        return list(struct.unpack(f"<{count}{code}", self.take(size)))


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise _Malformed(f"a field has unknown type {kind}")
    return _SCALARS[kind]


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if data[:4] != b"GGUF":
        raise _Malformed("not a GGUF file")
    cursor = _Cursor(data, 4)
    version, tensor_count, field_count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in (2, 3):
        raise _Malformed(f"GGUF version {version} (or byte order) is not supported, only 2 and 3 little-endian")
    fields = {}
    for _ in range(field_count):
        key = cursor.string()
        fields[key] = cursor.value(cursor.scalar("I"))
    return fields, _tensor_infos(cursor, tensor_count, fields.get("general.alignment", 32))


def _tensor_infos(cursor: _Cursor, count: int, alignment: Any) -> dict[str, TensorInfo]:
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise _Malformed(f"general.alignment is {alignment!r}, expected a multiple of 8")
    heads = [_tensor_head(cursor) for _ in range(count)]
    base = -(-cursor.at // alignment) * alignment
    infos = {name: _locate(name, shape, kind, base + offset) for name, shape, kind, offset in heads}
    for name, info in infos.items():
        if info.start + info.size > len(cursor.data):
            raise _Malformed(f"truncated: tensor {name} runs past the end of the file")
    return infos


def _tensor_head(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.string(), cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise _Malformed(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))
    return name, shape[::-1], cursor.scalar("I"), cursor.scalar("Q")


def _locate(name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
    try:
        ggml = GGMLQuantizationType(kind)
    except ValueError as error:
        raise _Malformed(f"tensor {name} has unknown type {kind}") from error
    block, block_bytes = GGML_QUANT_SIZES[ggml]
    if shape[-1] % block or start % 8:
        raise _Malformed(f"tensor {name} is not aligned to blocks of its type {ggml.name}")
    return TensorInfo(shape, ggml, start, math.prod(shape) // block * block_bytes)
