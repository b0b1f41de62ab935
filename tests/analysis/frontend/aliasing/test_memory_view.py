"""Addresses of views, compared with an enumeration."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from sft.analysis.frontend.aliasing.memory_view import MemoryView

_dims = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3)


def _addresses(view: MemoryView) -> dict[tuple[int, ...], int]:
    indices = product(*map(range, view.sizes))
    return {index: view.offset_bytes + sum(i * s for i, s in zip(index, view.strides_bytes, strict=True)) for index in indices}


@given(dims=_dims, strides=st.lists(st.integers(0, 9), min_size=3, max_size=3), offsets=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_views_are_compared_by_their_addresses(dims: list[tuple[int, int]], strides: list[int], offsets: tuple[int, int]) -> None:
    sizes = tuple(size for size, _ in dims)
    view = MemoryView(sizes, tuple(stride for _, stride in dims), offsets[0], 1)
    other = MemoryView(sizes, tuple(strides[: len(sizes)]), offsets[1], 1)
    written, read = _addresses(view), _addresses(other)
    assert view.overlaps(other) == bool(set(written.values()) & set(read.values()))
    if not view.has_shared_elements:
        assert len(set(written.values())) == len(written)
        if view.repeats(other):
            assert all(read[index] == address for index, address in written.items() if address in read.values())
    if view.coincides_with(other):
        assert written == read
