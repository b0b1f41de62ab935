"""Dataclasses parsed from JSON: the written value, or an error with its place."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sft
from sft.common.dataclass_json import dataclass_from_dict, parse_json_object


@dataclass(frozen=True, kw_only=True)
class Leaf:
    name: str
    kind: Literal["a", "b"] = "a"
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tree:
    leaves: tuple[Leaf, ...]
    pair: tuple[int, float] = (1, 2.0)
    table: tuple[tuple[str, int], ...] = ()
    shift: int = field(default=0, metadata={"minimum": None, "former": "move"})
    colour: str = field(default="red", metadata={"choices": ("red", "blue")})
    on: bool = False
    seconds: float | None = None
    first: Leaf | None = None


_LEAVES = st.builds(Leaf, name=st.text(), kind=st.sampled_from(["a", "b"]), numbers=st.lists(st.integers(0, 2**63 - 1)).map(tuple))
_NUMBERS = st.floats(0, 2.0**62)


@given(
    st.builds(
        Tree,
        leaves=st.lists(_LEAVES, max_size=3).map(tuple),
        pair=st.tuples(st.integers(0, 2**63 - 1), _NUMBERS),
        table=st.lists(st.tuples(st.text(), st.integers(0, 2**63 - 1)), max_size=3).map(tuple),
        shift=st.integers(-(2**63) + 1, 2**63 - 1),
        colour=st.sampled_from(["red", "blue"]),
        on=st.booleans(),
        seconds=st.none() | _NUMBERS,
        first=st.none() | _LEAVES,
    )
)
def test_json_round_trip(tree: Tree) -> None:
    assert dataclass_from_dict(Tree, parse_json_object(json.dumps(asdict(tree)))) == tree


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leaves": 3}, "leaves is 3, expected a list"),
        ({"leaves": [{"name": "x"}, {"name": 7}]}, r"leaves\[1\].name is 7, expected a text"),
        ({"leaves": ["x"]}, r"leaves\[0\] is 'x', expected an object"),
        ({"leaves": [{"kind": "a"}]}, r"leaves\[0\] lacks name"),
        ({"leaves": [{"name": "x", "kind": "c"}]}, r"leaves\[0\].kind is 'c', expected one of 'a', 'b'"),
        ({"leaves": [{"name": "x", "kind": []}]}, r"leaves\[0\].kind is \[\], expected one of"),
        ({"leaves": [{"name": "x", "numbers": [1, True]}]}, r"numbers\[1\] is True, expected an integer"),
        ({"pair": [1]}, r"pair is \[1\], expected a list of 2"),
        ({"pair": [1, "2"]}, r"pair\[1\] is '2', expected a number"),
        ({"table": [["x", 1.5]]}, r"table\[0\]\[1\] is 1.5, expected an integer"),
        ({"on": 1}, "on is 1, expected true or false"),
        ({"seconds": "1" * 99}, r"seconds is '1+\.\.\., expected a number"),
        ({"leaves": [{"name": "x", "numbers": [1, -1]}]}, r"numbers\[1\] is -1, expected at minimum 0"),
        ({"pair": [1, -0.5]}, r"pair\[1\] is -0.5, expected at minimum 0"),
        ({"pair": [1, math.inf]}, r"pair\[1\] is inf, expected a finite number below 2\*\*63"),
        ({"seconds": math.nan}, "seconds is nan, expected a finite number"),
        ({"pair": [10**25, 1.0]}, r"pair\[0\] is a number of 84 bits, expected a finite number"),
        ({"seconds": 10**400}, "seconds is a number of 1329 bits, expected a finite number"),
        ({"pair": [1, 10**4000]}, r"pair\[1\] is a number of 13288 bits"),
        ({"shift": -(2**63)}, "shift is a number of 64 bits"),
        ({"colour": "green"}, "colour is 'green', expected one of 'red', 'blue'"),
        ({f"more{number}": 1 for number in range(3000)}, "'more1014', and 2,980 more$"),
        ({"more": 1}, "Tree has the unknown 'more'"),
        ({"move": 1, "shift": 1}, "Tree has the unknown 'move'"),
        ({"move": 1.5}, "shift is 1.5, expected an integer"),
    ],
)
def test_invalid_fields_are_refused_with_their_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(sft.InputError, match=message):
        dataclass_from_dict(Tree, {"leaves": [], **change})


def test_a_field_is_read_under_its_earlier_name() -> None:
    assert dataclass_from_dict(Tree, {"leaves": [], "move": -3}) == Tree(leaves=(), shift=-3)


@pytest.mark.parametrize("text", ["", "[]", "3", "null", '{"a": ', "[" * 100_000, '{"a": ' * 100_000])
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(sft.InputError):
        parse_json_object(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("budget_bytes",), "11GiB"),
        (("flops",), None),
        (("segments", 0, "strip_rows"), "all"),
        (("segments", 0, "mode"), "fast"),
        (("segments", 0, "nodes"), "conv"),
        (("segments", 0, "nodes"), []),
        (("segments", 0, "state_every"), 0),
        (("segments", 0, "state_slots"), -1),
        (("timeline", "entries", 0, "peak_bytes"), 1.5),
        (("timeline",), []),
        (("mesh",), {"ranks": []}),
        (("budget_bytes",), -1),
        (("projected_peak_bytes",), -6),
        (("flops",), -(10**9)),
        (("plain_flops",), -1),
        (("host_bytes",), -1),
        (("projected_seconds",), -1.0),
        (("projected_seconds",), float("inf")),
        (("streamed_weights",), -1),
        (("repeat_budgets",), [-5]),
        (("dtype",), "int3"),
        (("dtype",), ""),
        (("input_shapes",), [[1, 3, -1, -1]]),
        (("input_placements",), ["moon"]),
        (("output_placements",), ["disk"]),
        (("segments", 0, "strip_rows"), 10**25),
        (("segments", 0, "num_steps"), -1),
        (("segments", 0, "num_panels"), -2),
        (("segments", 0, "flops"), -1),
        (("segments", 0, "working_bytes"), -1),
        (("segments", 0, "placement"), "disk"),
        (("timeline", "entries", 0, "flops"), -1),
        (("timeline", "entries", 0, "estimated_seconds"), -1.0),
        (("timeline", "entries", 0, "estimated_seconds"), float("nan")),
        (("timeline", "entries", 0, "copied_bytes"), -1),
        (("timeline", "entries", 0, "begin_bytes"), -1),
        (("search_limits", "max_projections"), -1),
    ],
)
def test_a_damaged_plan_is_refused_when_parsed(path: tuple[Any, ...], value: Any) -> None:
    data = json.loads(sft.plan(nn.Conv2d(3, 2, 3), (1, 3, 16, 16)).to_json())
    parent = data
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    with pytest.raises(sft.InputError, match=r"cannot read the plan: .*; make a new one") as refused:
        sft.Plan.from_json(json.dumps(data))
    assert str(path[-1]) in str(refused.value) or value == []
