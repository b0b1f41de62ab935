"""Header of a file of blocks: the safetensors format with one record layout per block.

The format is public (a length, a JSON header, bytes), so any safetensors reader can read these files. Tensors are named
``<block>.<name>``, as in the state dict of an ``nn.Sequential``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sft.common.errors import InputError, SourceError
from sft.weights.record import ALIGNMENT_BYTES, RecordField, RecordLayout, TensorSpec

__all__ = ["header_bytes", "read_header"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: Name of padding tensors, since safetensors allows no gaps.
_GAP = "_gap"
_STATE = "_state"
_FORMAT_METADATA = {"format": "pt", "sft": "blocks-1"}


def header_bytes(layouts: Sequence[RecordLayout], metadata: Mapping[str, str], *, room_bytes: int) -> bytes:
    """The bytes before the data: at least ``room_bytes``, in whole cache lines.

    Raises:
        InputError: they exceed ``room_bytes``.
    """
    entries: dict[str, Any] = {"__metadata__": {**metadata, **_FORMAT_METADATA}}
    start = 0
    for block, layout in enumerate(layouts):
        end = start
        for field in layout.fields:
            spec, begin = field.spec, start + field.offset_bytes
            if spec.dtype not in _NAMES:
                raise InputError(f"weights of type {spec.dtype} cannot be stored in a file; there are {', '.join(map(str, _NAMES))}")
            _fill_gap(entries, block, end, begin)
            end = begin + spec.num_bytes
            name = f"{block}.{_STATE}.{spec.name}" if spec.is_state else f"{block}.{spec.name}"
            entries[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        start += layout.record_bytes
        _fill_gap(entries, block, end, start)
    text = json.dumps(entries, separators=(",", ":")).encode()
    least = 8 + len(text)
    size = max(room_bytes, -(-least // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    if room_bytes and size > room_bytes:
        raise InputError(f"the metadata takes {size} bytes with the header, and there is room for {room_bytes}; keep it short")
    return (size - 8).to_bytes(8, "little") + text + b" " * (size - least)


def _fill_gap(entries: dict[str, Any], block: int, begin: int, end: int) -> None:
    if begin != end:
        entries[f"{block}.{_GAP}.{begin}"] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def read_header(path: Path, text: bytes) -> tuple[tuple[RecordLayout, ...], dict[str, str]]:
    """Layouts and metadata of a header.

    Raises:
        SourceError: :func:`header_bytes` did not write it.
    """
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        if metadata.pop("sft") != _FORMAT_METADATA["sft"]:
            raise KeyError("sft")
        metadata.pop("format", None)
        by_block: dict[int, list[tuple[int, int, TensorSpec | None]]] = {}
        for name, entry in entries.items():
            number, _, key = name.partition(".")
            begin, end = entry["data_offsets"]
            is_state = key.startswith(_STATE + ".")
            spec = TensorSpec(
                name=key.removeprefix(_STATE + "."), shape=tuple(entry["shape"]), dtype=_DTYPES[entry["dtype"]], is_state=is_state
            )
            is_gap = key.startswith(_GAP + ".")
            if not is_gap and spec.num_bytes != end - begin:
                raise ValueError(f"{name} has {spec.num_bytes} bytes in {end - begin}")
            by_block.setdefault(int(number), []).append((begin, end, None if is_gap else spec))
        if sorted(by_block) != list(range(len(by_block))) or not by_block:
            raise ValueError("its blocks are not numbered from 0")
        same: dict[RecordLayout, RecordLayout] = {}
        layouts, start = [], 0
        for block in range(len(by_block)):
            layout, start = _layout(by_block[block], start)
            layouts.append(same.setdefault(layout, layout))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise SourceError(
            f"{path} is not a file of blocks written by sft ({type(error).__name__}: {error}). Load weights of another origin with "
            "load_state_dict."
        ) from error
    return tuple(layouts), metadata


def _layout(entries: Iterable[tuple[int, int, TensorSpec | None]], start: int) -> tuple[RecordLayout, int]:
    """Layout of a block, and the end of its record."""
    ordered = sorted(entries, key=lambda entry: entry[:2])
    end = start
    for begin, stop, _ in ordered:
        if begin != end or stop < begin:
            raise ValueError(f"bytes {end}..{begin} belong to nothing")
        end = stop
    fields = tuple(RecordField(spec=spec, offset_bytes=begin - start) for begin, _, spec in ordered if spec is not None)
    states = [field.offset_bytes for field in fields if field.spec.is_state]
    layout = RecordLayout(fields=fields, weight_bytes=min(states, default=end - start), record_bytes=end - start)
    if layout != RecordLayout.of(field.spec for field in fields):
        raise ValueError("its tensors lie in another order")
    return layout, end
