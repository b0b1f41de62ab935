"""Slides are opened ahead of their use: once each, in a thread, with errors raised at the use."""

from __future__ import annotations

import csv
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.common.errors import SourceError
from sft.common.interval import Interval
from sft.sources import ArrayImage, Cached, Normalized
from sft.wsi.data.dataset import THREAD_NAME, SlideDataset, SlidePrefetcher, decode_ahead, decode_first_rows
from tests.helpers.wsi import real_pixels, write_config, write_task
from tests.helpers.wsi import run_wsi as main


def test_a_started_slide_is_opened_once() -> None:
    ahead, threads = SlidePrefetcher(), []

    def opened() -> tuple[Any, ...]:
        threads.append(threading.current_thread().name)
        return (len(threads),)

    ahead.start("a", opened)
    assert ahead.take("a", opened) == (1,)
    assert ahead.take("a", opened) == (2,), "it was taken: there is nothing ahead any more"
    assert threads == [THREAD_NAME, threading.main_thread().name]


def test_another_slide_than_the_one_begun_is_opened_alone_after_it() -> None:
    ahead = SlidePrefetcher()
    running, release = threading.Event(), threading.Event()

    def slow() -> tuple[Any, ...]:
        running.set()
        release.wait(10)
        running.clear()
        return ("slow",)

    ahead.start("a", slow)
    assert running.wait(10)
    threading.Timer(0.05, release.set).start()
    assert ahead.take("b", lambda: (running.is_set(),)) == (False,), "two concurrent openings would share a reader"
    assert ahead.waited_seconds > 0


def test_an_error_belongs_to_the_slide_that_has_it() -> None:
    ahead = SlidePrefetcher()

    def broken() -> tuple[Any, ...]:
        raise SourceError("slide a is broken")

    ahead.start("a", broken)
    assert ahead.take("b", lambda: ("b",)) == ("b",)
    ahead.start("a", broken)
    with pytest.raises(SourceError, match="slide a is broken"):
        ahead.take("a", lambda: ("a",))
    ahead.start("a", broken)
    ahead.drop()


def test_prefetching_continues_until_the_slide_is_taken() -> None:
    ahead, made, some = SlidePrefetcher(), [], threading.Event()

    def further(inputs: tuple[Any, ...]) -> Iterator[None]:
        for number in itertools.count():
            made.append((inputs, number))
            if number == 2:
                some.set()
            yield

    ahead.start("a", lambda: ("a",), further)
    assert some.wait(10)
    assert ahead.take("a", lambda: ("opened again",)) == ("a",)
    many = len(made)
    assert made == [(("a",), number) for number in range(many)]
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD_NAME], "prefetching continues after the slide is taken"


def test_prefetch_errors_are_raised_by_the_reader() -> None:
    ahead = SlidePrefetcher()

    def further(inputs: tuple[Any, ...]) -> Iterator[None]:
        yield
        raise SourceError("tile 7 is broken")

    ahead.start("a", lambda: ("a",), further)
    assert ahead.take("a", lambda: ("opened again",)) == ("a",)


class _Counted(ArrayImage):
    tile_height_px = 64

    def __init__(self, num_rows: int = 200) -> None:
        super().__init__(real_pixels()[:num_rows, :96].copy())
        self.read_rows: list[tuple[int, int]] = []

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Any:
        self.read_rows.append((y, h))
        return super().read(x, y, w, h, level)


def test_the_beginning_is_decoded_once() -> None:
    image = _Counted()
    source = Normalized(image, mean=(0.5,) * 3, std=(0.5,) * 3)
    decode_first_rows(source)
    assert image.read_rows == [(0, 64)]
    source.rows(Interval(0, 40), torch.empty(1, 3, 40, 96))
    assert image.read_rows == [(0, 64)], "the block is there already"


_BLOCK_BYTES = 64 * 96 * 3


@pytest.mark.parametrize(
    ("budget_bytes", "current_rows", "ready"),
    [
        (8 * _BLOCK_BYTES, 200, 4),  # both slides, of 3.1 blocks each, fit
        (6 * _BLOCK_BYTES, 200, 2),  # of the second one as many rows as fit next to the first one's
        (4 * _BLOCK_BYTES, 200, 1),
        (2 * _BLOCK_BYTES, 200, 1),  # the first may fill the budget: only the first rows of the second one
        (4 * _BLOCK_BYTES, 64, 3),  # a small slide leaves more
    ],
)
def test_two_slides_share_the_budget_of_decoded_rows(budget_bytes: int, current_rows: int, ready: int) -> None:
    images = [_Counted(current_rows), _Counted()]
    caches = [Cached(image, host_budget_bytes=budget_bytes) for image in images]
    current, following = (Normalized(cache, mean=(0.5,) * 3, std=(0.5,) * 3) for cache in caches)
    decode_first_rows(following)
    for _ in decode_ahead((following, "labels"), (current, "labels")):
        pass
    assert images[1].read_rows == [(64 * number, min(64, 200 - 64 * number)) for number in range(ready)]
    out = torch.empty(1, 3, current_rows, 96)
    current.rows(Interval(0, current_rows), out)
    if ready > 1:
        assert caches[0].kept_bytes + caches[1].kept_bytes <= budget_bytes
    following.rows(Interval(0, 200), torch.empty(1, 3, 200, 96))
    assert len(set(images[1].read_rows)) == len(images[1].read_rows) == 4, "no block is decoded twice"


def test_a_source_without_a_cache_and_one_of_bands_are_left_alone() -> None:
    image = _Counted()
    source = Normalized(image, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert not list(decode_ahead((source,), (source,)))
    cached = Normalized(Cached(image, host_budget_bytes="1MiB"), mean=(0.5,) * 3, std=(0.5,) * 3)
    assert not list(decode_ahead((cached,), (source,), num_bands=2)), "a band reads its own rows only"
    assert not image.read_rows


def test_validation_and_evaluation_open_every_slide_but_the_first_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"s{number}.tif,{'ab'[number % 2]},p{number},{'train' if number < 2 else 'val'}" for number in range(5)]
    write_task(tmp_path, num_slides=5, size_px=96)
    (tmp_path / "slides.csv").write_text("\n".join(["slide,label,patient,split", *rows]) + "\n")
    config = write_config(tmp_path / "c.yaml", tmp_path / "slides.csv", tmp_path / "run", train={"epochs": 1})
    opened: list[tuple[str, str]] = []
    plain = SlideDataset.source

    def noted(self: SlideDataset, record: Any, *rest: Any) -> Any:
        if not rest:
            opened.append((threading.current_thread().name, record.name))
        return plain(self, record, *rest)

    monkeypatch.setattr(SlideDataset, "source", noted)
    once = [(threading.main_thread().name, "s2"), (THREAD_NAME, "s3"), (THREAD_NAME, "s4")]
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    assert opened == 2 * once, "after the epoch, and of the best model"
    opened.clear()
    assert main(["evaluate", str(tmp_path / "run"), "--bootstrap", "0"]) == 0
    assert opened == once


def test_training_opens_every_slide_but_the_first_of_an_epoch_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_task(tmp_path, num_slides=8)
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", train={"epochs": 1, "accumulate": 2})
    opened: list[tuple[str, str]] = []
    plain = SlideDataset.source

    def noted(self: SlideDataset, record: Any, *rest: Any) -> Any:
        if record.split == "train" and rest:
            opened.append((threading.current_thread().name, record.name))
        return plain(self, record, *rest)

    monkeypatch.setattr(SlideDataset, "source", noted)
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    with (tmp_path / "run" / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    order = [name for row in rows for name in row["slides"].split()]
    in_order = [(thread, name) for thread, name in opened if name in order][-len(order) :]
    assert [name for _, name in in_order] == order and len(order) == 4
    assert [thread for thread, _ in in_order] == [threading.main_thread().name] + [THREAD_NAME] * 3
    assert all(0 <= float(row["waited_seconds"]) <= float(row["seconds"]) + 1e-3 for row in rows)
