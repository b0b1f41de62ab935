"""Stores of weights: record layouts, generations, and the effects of a crash, a full disk or a damaged file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sft
from sft.weights import DiskStore, HostStore, RecordLayout, Store, TensorSpec
from tests.helpers.fork_server import fork_context

_SPECS = (
    TensorSpec(name="bias", shape=(5,), dtype=torch.bfloat16),
    TensorSpec(name="weight", shape=(3, 5), dtype=torch.float64),
    TensorSpec(name="count", shape=(), dtype=torch.int64),
    TensorSpec(name="weight:momentum", shape=(3, 5), dtype=torch.float32, is_state=True),
)
_EQUAL = [RecordLayout.of(_SPECS)] * 4
_DIFFERENT = [RecordLayout.of(_SPECS), RecordLayout.of(_SPECS[:1]), RecordLayout.of(_SPECS[1:])]


def _fill(block: int, views: dict[str, Tensor]) -> None:
    for place, view in enumerate(views.values()):
        view.copy_(torch.arange(view.numel()).view(view.shape) + 100 * block + 10 * place)


def _make(kind: str, folder: Path, layouts: list[RecordLayout]) -> Store:
    if kind == "disk":
        return DiskStore.create(folder / "weights.safetensors", layouts, _fill)
    store = HostStore(layouts)
    for block, layout in enumerate(layouts):
        _fill(block, layout.views(store.record(block)))
    return store


def _contents(store: Store) -> list[dict[str, list[float]]]:
    records = [layout.views(store.record(block)) for block, layout in enumerate(store.layouts)]
    return [{name: view.double().flatten().tolist() for name, view in views.items()} for views in records]


_both = pytest.mark.parametrize("kind", ["host", "disk"])


def test_records_are_aligned_and_weights_come_first() -> None:
    layout = RecordLayout.of(_SPECS)
    assert [field.spec.name for field in layout.fields] == ["weight", "count", "bias", "weight:momentum"]
    assert (layout.weight_bytes, layout.record_bytes) == (192, 256)
    assert all(field.offset_bytes % field.spec.dtype.itemsize == 0 for field in layout.fields)
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    layout.views(record[192:], "state")["weight:momentum"].fill_(2.0)
    assert layout.views(record)["weight:momentum"].sum() == 30
    assert set(layout.views(record[:192], "weights")) == {"weight", "count", "bias"}


@_both
@pytest.mark.parametrize("layouts", [_EQUAL, _DIFFERENT], ids=["equal", "different"])
def test_generations_are_copied_aborted_and_committed(kind: str, layouts: list[RecordLayout], tmp_path: Path) -> None:
    store = _make(kind, tmp_path, layouts)
    first = _contents(store)
    new = torch.arange(layouts[2].record_bytes, dtype=torch.int64).to(torch.uint8)
    store.begin()
    store.write(2, new)
    assert _contents(store) == first  # readers get the current generation until the next one is complete
    store.abort()
    assert _contents(store) == first and store.generation == 0
    store.begin()
    store.write(2, new)
    half = layouts[0].part_bytes("state")
    store.write(0, torch.zeros(half, dtype=torch.uint8), "state")
    store.commit({"note": "one"})
    contents = _contents(store)
    assert torch.equal(store.record(2), new)
    assert contents[1] == first[1]
    assert contents[0] == {**first[0], "weight:momentum": [0.0] * 15}
    assert (store.generation, store.metadata) == (1, {"note": "one"})
    store.close()


@_both
def test_stacked_views_are_the_records(kind: str, tmp_path: Path) -> None:
    store = _make(kind, tmp_path, _EQUAL)
    stacked = store.layouts[0].stacked(store.all_records(), 4)
    for block in range(4):
        for name, view in store.layouts[0].views(store.record(block)).items():
            assert torch.equal(stacked[name][block], view)
            assert stacked[name][block].data_ptr() == view.data_ptr()


@_both
def test_the_order_of_calls_is_checked(kind: str, tmp_path: Path) -> None:
    store = _make(kind, tmp_path, _EQUAL)
    with pytest.raises(sft.InputError, match="begin"):
        store.write(0, torch.zeros(256, dtype=torch.uint8))
    with pytest.raises(sft.InputError, match="begin"):
        store.commit()
    store.begin()
    with pytest.raises(sft.InputError, match="before"):
        store.begin()
    store.abort()
    store.abort()


def test_any_reader_of_safetensors_reads_the_file(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path / "w", _DIFFERENT, _fill)
    tensors = load_file(tmp_path / "w")
    for block, layout in enumerate(store.layouts):
        for field in layout.fields:
            name = f"{block}._state.{field.spec.name}" if field.spec.is_state else f"{block}.{field.spec.name}"
            assert torch.equal(tensors[name], layout.views(store.record(block))[field.spec.name])


def test_a_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "w"
    store = DiskStore.create(path, _DIFFERENT, _fill, metadata={"step": "7"}, durable=False)
    (tmp_path / "w.next").write_bytes(b"of a run that was killed")
    again = DiskStore.open(path)
    assert _contents(again) == _contents(store)
    assert (again.layouts, again.metadata) == (store.layouts, {"step": "7"})
    assert os.listdir(tmp_path) == ["w"]
    again.record(0).fill_(7)  # the mapping is private: the file keeps its content
    assert _contents(DiskStore.open(path)) == _contents(store)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"abc")


def _scribble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10:14] = b"\xff\xff\xff\xff"
    path.write_bytes(data)


def _foreign(path: Path) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"1234")


@pytest.mark.parametrize(
    "damage",
    [_cut, _lengthen, _scribble, _foreign, Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"x" * 99)],
)
def test_damaged_and_foreign_files_are_refused(damage: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "w"
    DiskStore.create(path, _EQUAL, _fill)
    damage(path)
    with pytest.raises(sft.SourceError, match="w"):
        DiskStore.open(path)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "replace"])
def test_a_failing_disk_loses_no_data(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore.create(tmp_path / "w", _EQUAL, _fill)
    before = _contents(store)

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(sft.SourceError, match="No space left"):
            try:
                store.begin()
                store.write(1, torch.zeros(256, dtype=torch.uint8))
                store.commit()
            finally:
                store.abort()
    assert os.listdir(tmp_path) == ["w"]
    assert _contents(store) == before == _contents(DiskStore.open(tmp_path / "w"))
    store.begin()
    store.write(1, torch.zeros(256, dtype=torch.uint8))
    store.commit()
    assert not store.record(1).any()


def test_metadata_without_space_is_refused_and_no_data_is_lost(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path / "w", _EQUAL, _fill)
    store.begin()
    with pytest.raises(sft.InputError, match="room"):
        store.commit({"long": "x" * 5000})
    store.abort()
    assert _contents(DiskStore.open(tmp_path / "w")) == _contents(store)


def _write_until_killed(path: Path) -> None:
    store = DiskStore.open(path)
    for generation in range(1, 4):
        store.begin()
        for block in range(4):
            if generation == 3 and block == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            store.write(block, torch.full((256,), generation, dtype=torch.uint8))
        store.commit({"generation": str(generation)})


def test_a_killed_process_leaves_the_last_complete_generation(tmp_path: Path) -> None:
    path = tmp_path / "w"
    DiskStore.create(path, _EQUAL, _fill)
    process = fork_context().Process(target=_write_until_killed, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["w", "w.next"]
    store = DiskStore.open(path)
    assert store.metadata == {"generation": "2"}
    assert all(bool((store.record(block) == 2).all()) for block in range(4))
    assert os.listdir(tmp_path) == ["w"]


def _writer(path: Path) -> DiskStore:
    store = DiskStore.open(path)
    store.reserve()
    return store


@pytest.mark.usefixtures("frozen_objects")
def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "w"
    DiskStore.create(path, _EQUAL, _fill)
    first, second = DiskStore.open(path), DiskStore.open(path)  # readers, until they begin to write
    first.begin()
    with pytest.raises(sft.SourceError, match="w is in use: another model of this process writes to it"):
        second.begin()
    second.abort()  # which is not that of the first one
    DiskStore.open(path)
    first.write(1, torch.full((_EQUAL[0].record_bytes,), 7, dtype=torch.uint8))
    first.commit()
    for _ in range(2):  # also between two generations
        with pytest.raises(sft.SourceError, match="in use"):
            second.begin()
        with pytest.raises(sft.SourceError, match="in use"):
            _writer(path)
        with pytest.raises(sft.SourceError, match="in use"):
            DiskStore.create(path, _EQUAL, _fill)
        first.begin()
        first.commit()
    assert _contents(DiskStore.open(path)) == _contents(first) != _contents(second)
    first.close()
    with pytest.raises(sft.SourceError, match="was replaced after its weights were read"):
        second.begin()
    second.close()
    third = _writer(path)
    third.begin()
    third.commit()
    assert [each.name for each in tmp_path.iterdir()] == ["w"]


@pytest.mark.usefixtures("frozen_objects")
def test_a_store_that_replaces_another_takes_its_lock_over(tmp_path: Path) -> None:
    path = tmp_path / "w"
    old = DiskStore.create(path, _EQUAL, _fill)

    def fail(*_: object) -> None:
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        DiskStore.create(path, _EQUAL, fail, replaces=old)
    with pytest.raises(sft.SourceError, match="in use"):  # the old one keeps it
        _writer(path)
    new = DiskStore.create(path, _DIFFERENT, _fill, replaces=old)
    old.close()
    with pytest.raises(sft.SourceError, match="in use"):
        _writer(path)
    new.close()
    _writer(path).close()


def _reserve(path: Path, connection: Connection, *, forks: bool) -> None:
    """Lock a store; close it, and wait, or end."""
    os.setsid()
    store = DiskStore.open(path)
    store.reserve()
    if forks and os.fork() == 0:
        time.sleep(60)  # a worker that outlives the closing of the store
    connection.send("reserved")
    if connection.recv() == "close":
        store.close()
        connection.send("closed")
        connection.recv()


@pytest.mark.parametrize("end", ["close", "close fork", "kill", "exit"])
def test_the_second_process_is_refused_and_the_first_continues(tmp_path: Path, end: str) -> None:
    path = tmp_path / "w"
    DiskStore.create(path, _EQUAL, _fill).close()
    context = fork_context()
    ours, theirs = context.Pipe()
    holder = context.Process(target=_reserve, args=(path, theirs), kwargs={"forks": end.endswith("fork")})
    holder.start()
    assert holder.pid is not None
    try:
        assert ours.recv() == "reserved"
        with pytest.raises(sft.SourceError) as caught:
            _writer(path)
        message = str(caught.value)
        assert str(path) in message and "writes to it" in message
        assert f"another process ({holder.pid})" in message or not Path("/proc/locks").exists()
        assert len(_contents(DiskStore.open(path))) == len(_EQUAL)  # a reader
        if end.startswith("close"):
            ours.send("close")
            assert ours.recv() == "closed"
        elif end == "kill":
            holder.kill()
            holder.join()
        else:
            ours.send("end")
            holder.join()
        _writer(path).close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        holder.join()


@pytest.mark.usefixtures("frozen_objects")
def test_a_killed_writer_has_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "w"
    store = DiskStore.create(path, _EQUAL, _fill)
    store.begin()
    holder = [store]
    holder.append(holder)  # type: ignore[arg-type]  # a cycle, as models have
    del store, holder
    _writer(path).begin()


def test_a_file_that_was_moved_away_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "w"
    store = DiskStore.create(path, _EQUAL, _fill)
    path.rename(tmp_path / "backup")
    store.begin()
    store.commit()
    assert _contents(DiskStore.open(path)) == _contents(DiskStore.open(tmp_path / "backup"))


def test_files_and_mappings_are_released(tmp_path: Path) -> None:
    def num_open() -> tuple[int, int]:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return len(os.listdir("/proc/self/fd")), sum(str(tmp_path) in line for line in maps)

    before = num_open()
    store = DiskStore.create(tmp_path / "w", _EQUAL, _fill)
    for _ in range(5):
        store.begin()
        store.commit()
    store.begin()
    assert num_open() == (before[0] + 3, 1)  # those of the mapping, the lock, and the next generation
    store.close()
    del store
    assert num_open() == before
    assert os.listdir(tmp_path) == ["w"]


def test_bad_layouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(sft.InputError, match="one name"):
        RecordLayout.of([_SPECS[0], _SPECS[0]])
    with pytest.raises(sft.InputError, match="nothing to store"):
        RecordLayout.of([])
    with pytest.raises(sft.InputError, match="at least one block"):
        HostStore([])
    strange = [RecordLayout.of([TensorSpec(name="z", shape=(2,), dtype=torch.complex64)])]
    with pytest.raises(sft.InputError, match="complex64"):
        DiskStore.create(tmp_path / "w", strange, _fill)
    assert os.listdir(tmp_path) == []


def test_interrupts_leave_a_resumable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time of Ctrl-C the generation is the old or the new one, no lock remains, and the next generation can begin."""
    store = _make("disk", tmp_path, _EQUAL)
    assert isinstance(store, DiskStore)
    old = _contents(store)

    def interrupted(call: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            call(*arguments)
            raise KeyboardInterrupt

        return run

    for name in ("posix_fallocate", "fstat"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, interrupted(getattr(os, name)))
            with pytest.raises(KeyboardInterrupt):
                store.begin()
        store.begin()
        store.abort()
    assert _contents(store) == old and store.generation == 0
    for number, name in enumerate(("fsync", "replace")):
        store.begin()
        store.write(1, store.record(0).clone())
        with monkeypatch.context() as patch:
            patch.setattr(os, name, interrupted(getattr(os, name)))
            with pytest.raises(KeyboardInterrupt):
                store.commit()
        store.abort()
        assert store.generation == number and (_contents(store)[1] == old[0]) == (name == "replace")
        assert _contents(DiskStore.open(store.path)) == _contents(store)
    store.begin()
    store.commit()
    assert [each.name for each in tmp_path.iterdir()] == [store.path.name]
