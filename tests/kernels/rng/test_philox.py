"""Philox: the published vectors, an independent evaluation in Python's integers, and Triton, all with the same words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sft.kernels.rng.philox import draw_seed, key_of, philox4x32
from tests.helpers.triton_process import interpret, needs_triton

# Known answers that Random123 publishes (file kat_vectors): counter, key, result; the third is digits of pi.
_KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
_Words = tuple[int, ...]
_WORD = st.integers(0, 2**32 - 1)


def _ours(counter: _Words, key: _Words) -> _Words:
    c0, c1, c2, c3 = (torch.tensor(word, dtype=torch.int64) for word in counter)
    return tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (key[0], key[1])))


def python_philox(counter: _Words, key: _Words) -> _Words:
    """The definition, in integers without bounds."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k0, second % 2**32, first >> 32 ^ c[3] ^ k1, first % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "answer"), _KNOWN)
def test_known_answers(counter: _Words, key: _Words, answer: _Words) -> None:
    assert python_philox(counter, key) == answer
    assert _ours(counter, key) == answer


@given(st.tuples(_WORD, _WORD, _WORD, _WORD), st.tuples(_WORD, _WORD))
def test_equals_the_definition(counter: _Words, key: _Words) -> None:
    assert _ours(counter, key) == python_philox(counter, key)


def test_broadcasts_and_leaves_the_counter_alone() -> None:
    rows, columns = torch.arange(3).view(3, 1), torch.arange(5)
    zero = torch.zeros((), dtype=torch.int64)
    words = philox4x32((rows, columns, zero, zero), (1, 2))
    assert all(word.shape == (3, 5) and word.dtype == torch.int64 for word in words)
    assert tuple(int(word[2, 4]) for word in words) == python_philox((2, 4, 0, 0), (1, 2))
    assert torch.equal(rows, torch.arange(3).view(3, 1)) and torch.equal(columns, torch.arange(5)) and not zero


def test_seeds() -> None:
    assert key_of(0x0123456789ABCDEF) == (0x89ABCDEF, 0x01234567)
    assert key_of(-(2**63)) == key_of(2**63) == (0, 2**31)
    generator = torch.Generator().manual_seed(5)
    seeds = [draw_seed(generator) for _ in range(100)]
    assert len(set(seeds)) == 100 and all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) >= 2**63 and any(key_of(seed)[0] >= 2**31 for seed in seeds)
    torch.manual_seed(9)
    first = draw_seed()
    torch.manual_seed(9)
    assert draw_seed() == first != draw_seed()


@needs_triton
def test_triton_gives_the_same_words(tmp_path: Path) -> None:
    drawn = torch.randint(2**32, (64 - len(_KNOWN), 6), generator=torch.Generator().manual_seed(0))
    known = torch.tensor([[*counter, *key] for counter, key, _ in _KNOWN])
    words = torch.cat([known, drawn])
    (result,) = interpret([{"run": "philox", "words": words}], tmp_path)
    assert [tuple(row) for row in result[: len(_KNOWN)].tolist()] == [answer for _, _, answer in _KNOWN]
    expected = [python_philox(tuple(row[:4]), tuple(row[4:])) for row in words.tolist()]
    assert [tuple(row) for row in result.tolist()] == expected
