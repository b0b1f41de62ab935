"""The gate on memory floors: the networks of the small table, the comparison itself, and the generated page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.floors.floor import Floor, NetworkFloors, measure_floors
from tests.floors.networks import SMALL
from tests.floors.table import PAGE, TABLES, differences, page, read_table

pytestmark = pytest.mark.usefixtures("without_proposals")

_MIB = 2**20


@pytest.mark.parametrize("name", SMALL)
def test_no_floor_has_risen(name: str) -> None:
    network = SMALL[name]
    measured = measure_floors(network.built(), network.shape)
    assert differences(read_table(TABLES["small"]), {name: measured}) == []


def test_the_small_table_has_all_networks_and_no_other() -> None:
    assert list(read_table(TABLES["small"])) == sorted(SMALL)


def test_the_page_is_generated_from_the_tables() -> None:
    expected = page({name: read_table(path) for name, path in TABLES.items()})
    assert PAGE.read_text() == expected, "run python tests/floors/__main__.py --write"


_FLOORS = NetworkFloors(
    shape=(1, 3, 512, 512),
    training=Floor(resident_bytes=_MIB, least_bytes=10 * _MIB, plain_bytes=100 * _MIB),
    inference=Floor(resident_bytes=_MIB, least_bytes=4 * _MIB, plain_bytes=20 * _MIB),
    whole={"mixes all pixels": ("attention: matmul",)},
)


def test_a_floor_within_the_tolerance_passes() -> None:
    slightly_higher = replace(_FLOORS, training=Floor(resident_bytes=_MIB, least_bytes=int(10.4 * _MIB), plain_bytes=100 * _MIB))
    assert differences({"net": _FLOORS}, {"net": slightly_higher}) == []
    assert differences({"net": _FLOORS, "another": _FLOORS}, {"net": replace(_FLOORS, whole={})}) == []


def test_a_risen_floor_is_named_with_its_pass_and_bytes() -> None:
    higher = replace(_FLOORS, training=Floor(resident_bytes=_MIB, least_bytes=12 * _MIB, plain_bytes=100 * _MIB))
    (line,) = differences({"net": _FLOORS}, {"net": higher})
    assert line == "net, training: the floor rose by 20%, from 10.00 MiB to 12.00 MiB"


def test_an_operator_that_left_the_strips_is_named_with_its_reason() -> None:
    whole = {"mixes all pixels": ("attention: matmul", "attention: softmax"), "pads the batch": ("(the model itself): pad",)}
    lines = differences({"net": _FLOORS}, {"net": replace(_FLOORS, whole=whole)})
    assert lines == [
        "net: attention: softmax streamed and now runs whole: mixes all pixels",
        "net: (the model itself): pad streamed and now runs whole: pads the batch",
    ]


def test_a_network_that_cannot_be_planned_any_more_fails() -> None:
    (line,) = differences({"net": _FLOORS}, {"net": NetworkFloors(shape=(1, 3, 512, 512), problem="UnsupportedError: no rule")})
    assert "cannot be planned any more: UnsupportedError: no rule" in line


def test_a_network_without_a_row_fails() -> None:
    (line,) = differences({}, {"net": _FLOORS})
    assert "not in the table" in line


def test_floors_are_the_same_after_a_file() -> None:
    assert NetworkFloors.from_json(_FLOORS.to_json() | {"shape": [1, 3, 512, 512]}) == _FLOORS
