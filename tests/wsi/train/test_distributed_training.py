"""Training on several ranks takes the steps of one process, also after failures, and may continue with another number of ranks."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from sft.common.errors import RankError
from sft.wsi.parsers import config_parser
from sft.wsi.train.checkpoint import CheckpointFolder
from sft.wsi.train.distributed import rendezvous_ranks
from sft.wsi.train.optim import philox_generator
from tests.helpers.crash_injection import Death, _arrange
from tests.helpers.ranks import RankFailedError, Ranks, ranks_of
from tests.helpers.wsi import damage_tile, read_rows, real_pixels, tissue_places, write_config, write_slide, write_table

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")

_ROOT = Path(__file__).resolve().parents[3]
_GROUPS = "sft.wsi.train.grad_accumulation:GradientAccumulator"
#: Tolerance of weights in double precision after a few steps, for another order of summation.
_TOLERANCE = 1e-12


def _command(rank: int, arguments: list[str], death: Death | None = None, dies: int = 0) -> tuple[int, str]:
    """The command line on a rank, in double precision: its exit code and standard error."""
    from tests.helpers.wsi import run_wsi as main

    if death is not None and rank == dies:
        _arrange(death)
    said = io.StringIO()
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings("always", ".* not to the same bits")
            code = main(arguments)
    finally:
        torch.set_default_dtype(torch.float32)
    return code, said.getvalue()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_of(1, tmp_path_factory.mktemp("alone")) as rank_pool:
        yield rank_pool


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_of(2, tmp_path_factory.mktemp("pair")) as rank_pool:
        yield rank_pool


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six slides to train on, the fifth of which cannot be decoded at its end, and three to validate on; and tables of them."""
    folder = tmp_path_factory.mktemp("slides")
    rows = []
    for number, (top, left) in enumerate(tissue_places(144)[:9]):
        crop = real_pixels()[top : top + 136, left : left + 128]
        write_slide(folder / f"s{number}.tif", crop[..., ::-1] if number % 2 else crop)
        survival = {"time": str(1 + number % 4), "event": str(int(number != 2))}
        label = {"label": ("plain", "swapped")[number % 2], "split": "val" if number >= 6 else "train"}
        rows.append({"slide": f"s{number}.tif", **label, **survival})
    damage_tile(folder / "s4.tif")
    write_table(folder / "damaged.csv", rows)
    sound = [row for row in rows if row["slide"] != "s4.tif"]
    write_table(folder / "sound.csv", sound)
    write_table(folder / "cox.csv", [{name: cell for name, cell in row.items() if name != "label"} for row in sound])
    return folder


def _config(folder: Path, slides: Path, name: str, table: str = "damaged.csv", **groups: dict[str, Any]) -> list[str]:
    """A command that trains in groups of two, the last of which is smaller, and skips unreadable slides."""
    train = {"on_error": "skip", "clip_norm": 1.0, "warmup_steps": 2, **groups.pop("train", {})}
    settings: dict[str, Any] = {"augment": {"rotations": False}, "model": {"norm": "frozen"}, **groups, "train": train}
    ranks = settings.pop("ranks", None)
    path = write_config(folder / f"{name}.yaml", slides / table, folder / name, **settings)
    if ranks is not None:
        path.write_text(path.read_text() + yaml.safe_dump({"ranks": ranks}), encoding="utf-8")
    return ["train", "--config", str(path), "--bootstrap", "0"]


@pytest.fixture(scope="module")
def reference(alone: Ranks, slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result of training in one process."""
    folder = tmp_path_factory.mktemp("reference")
    ((code, said),) = alone.run(_command, _config(folder, slides, "run"))
    assert code == 3, said
    return folder / "run"


@pytest.fixture(scope="module")
def shared(pair: Ranks, slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result of training in two replicas."""
    folder = tmp_path_factory.mktemp("shared")
    (code, said), (other, silence) = pair.run(_command, _config(folder, slides, "run"))
    assert code == other == 0, said
    assert "left out: s4" in said and "1 slide was left out" in said and silence == ""
    return folder / "run"


def _weights(run: Path, kind: str = "last") -> dict[str, torch.Tensor]:
    checkpoint = CheckpointFolder(run / "checkpoints").load(kind)
    assert checkpoint is not None
    return checkpoint.weights


def _assert_close(run: Path, reference: Path) -> None:
    """The same steps on the same slides, to the same weights."""
    for kind in ("last", "best"):
        ours, theirs = _weights(run, kind), _weights(reference, kind)
        assert ours.keys() == theirs.keys()
        for name, weight in theirs.items():
            error = (ours[name].double() - weight.double()).abs().max() / weight.double().abs().max().clamp_min(1e-3)
            assert error <= _TOLERANCE, f"{kind} {name}: {error}"
    for name, columns in (("steps.csv", ("loss", "lr", "grad_norm")), ("metrics.csv", ("train_loss", "val_loss"))):
        mine, expected = read_rows(run / name), read_rows(reference / name)
        assert [row.get("slides") for row in mine] == [row.get("slides") for row in expected] and expected, name
        for row, other in zip(mine, expected, strict=True):
            assert [float(row[c]) for c in columns] == pytest.approx([float(other[c]) for c in columns], rel=1e-10), name
    predicted = [[row["slide"] for row in read_rows(folder / "val" / "predictions.csv")] for folder in (run, reference)]
    assert predicted[0] == predicted[1]
    assert [row["slide"] for row in read_rows(run / "failed.csv")] == [row["slide"] for row in read_rows(reference / "failed.csv")]


def _assert_same_bits(run: Path, other: Path) -> None:
    for kind in ("last", "best"):
        weights, other_weights = _weights(run, kind), _weights(other, kind)
        assert all(torch.equal(weights[name], other_weights[name]) for name in other_weights)
    for name in ("metrics.csv", "val/predictions.csv", "val/metrics.json"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name


def test_replicas_take_the_steps_of_one_process(shared: Path, reference: Path) -> None:
    _assert_close(shared, reference)
    steps = read_rows(shared / "steps.csv")
    assert sorted(len(row["slides"].split()) for row in steps[:3]) == [1, 2, 2]


def test_bands_take_the_steps_of_one_process(pair: Ranks, slides: Path, reference: Path, tmp_path: Path) -> None:
    (code, said), _ = pair.run(_command, _config(tmp_path, slides, "run", ranks={"bands": 2}))
    assert code == 0, said
    _assert_close(tmp_path / "run", reference)
    assert "band" in (tmp_path / "run" / "plan.txt").read_text()


def test_two_replicas_of_two_bands_take_the_steps_of_one_process(slides: Path, reference: Path, tmp_path: Path) -> None:
    with ranks_of(4, tmp_path) as four:
        code, said = four.run(_command, _config(tmp_path, slides, "run", ranks={"bands": 2}))[0]
    assert code == 0, said
    _assert_close(tmp_path / "run", reference)


def test_the_risks_of_a_group_are_those_of_all_replicas(alone: Ranks, pair: Ranks, slides: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"task": {"kind": "cox"}, "model": {"norm": "calibrated"}}
    # The last bias has no gradient but rounding errors, which Adam would make a step of.
    settings["train"] = {"accumulate": 3, "monitor": "c_index", "epochs": 1, "optimizer": "sgd"}
    for ranks, name in ((alone, "one"), (pair, "two")):
        code, said = ranks.run(_command, _config(tmp_path, slides, name, "cox.csv", **settings))[0]
        assert code == 0, said
    _assert_close(tmp_path / "two", tmp_path / "one")


def test_label_maps_are_dealt_out_and_shared(alone: Ranks, pair: Ranks, slides: Path, tmp_path: Path) -> None:
    rows = []
    for number in (0, 1, 2, 6):
        top, left = tissue_places(144)[number]
        mask = tmp_path / f"m{number}.npy"
        np.save(mask, (real_pixels()[top : top + 136, left : left + 128].mean(2) < 170).astype(np.uint8))
        rows.append({"slide": str(slides / f"s{number}.tif"), "mask": str(mask), "split": "val" if number > 5 else "train"})
    table = write_table(tmp_path / "t.csv", rows)
    settings: dict[str, Any] = {"task": {"kind": "segmentation", "classes": ["light", "dark"]}, "model": {"head": "segmentation"}}
    settings["data"] = {"slides": "/"}
    settings["train"] = {"epochs": 1}
    for ranks, name, bands in ((alone, "one", 1), (pair, "replicas", 1), (pair, "bands", 2)):
        code, said = ranks.run(_command, _config(tmp_path, table.parent, name, "t.csv", ranks={"bands": bands}, **settings))[0]
        assert code == 0, said
    _assert_close(tmp_path / "replicas", tmp_path / "one")
    _assert_close(tmp_path / "bands", tmp_path / "one")


_TILES: dict[str, Any] = {"backbone": "tests.helpers.wsi:tile_net", "encoder": "tiles", "tile_px": 32, "stride_px": 52}


@pytest.mark.parametrize(
    ("head", "kind"), [("attention", "classification"), pytest.param("max", "cox", marks=pytest.mark.slow), ("gap", "cox")]
)
def test_ranks_share_the_tiles_of_a_slide(head: str, kind: str, alone: Ranks, pair: Ranks, slides: Path, tmp_path: Path) -> None:
    """Six tiles of a slide; on one slide a tile of the second rank cannot be read; dropout after the pooling."""
    settings: dict[str, Any] = {"model": {**_TILES, "head": head, "norm": "calibrated", "dropout": 0.5 * (kind == "classification")}}
    settings |= {"task": {"kind": kind}, "train": {"epochs": 1, "optimizer": "sgd"}}
    if kind == "cox":
        settings["train"] |= {"accumulate": 3, "monitor": "c_index"}
    table = "cox.csv" if kind == "cox" else "damaged.csv"
    for ranks, name, bands in ((alone, "one", 1), (pair, "bands", 2)):
        code, said = ranks.run(_command, _config(tmp_path, slides, name, table, ranks={"bands": bands}, **settings))[0]
        assert code in (0, 3), said
    _assert_close(tmp_path / "bands", tmp_path / "one")


@pytest.mark.slow
def test_two_replicas_share_the_tiles_of_their_slides(alone: Ranks, slides: Path, tmp_path: Path) -> None:
    """More ranks than tiles: one rank has none."""
    settings: dict[str, Any] = {"model": {**_TILES, "tile_px": 110, "head": "attention", "norm": "frozen"}}
    settings["train"] = {"epochs": 1, "optimizer": "sgd"}
    with ranks_of(4, tmp_path) as four:
        for ranks, name, bands in ((alone, "one", 1), (four, "four", 2)):
            code, said = ranks.run(_command, _config(tmp_path, slides, name, "sound.csv", ranks={"bands": bands}, **settings))[0]
            assert code == 0, said
    _assert_close(tmp_path / "four", tmp_path / "one")


def test_tiles_that_draw_random_numbers_are_not_shared(pair: Ranks, slides: Path, tmp_path: Path) -> None:
    model = {**_TILES, "options": {"dropout": 0.1}, "norm": "frozen"}
    (code, said), _ = pair.run(_command, _config(tmp_path, slides, "run", "sound.csv", ranks={"bands": 2}, model=model))
    assert code == 1 and "the backbone draws random numbers for each tile" in said and "ranks.bands 1" in said, said


def test_running_statistics_are_those_of_the_first_replica(alone: Ranks, pair: Ranks, slides: Path, tmp_path: Path) -> None:
    train = {"epochs": 1, "accumulate": 5, "on_error": "raise"}
    settings: dict[str, Any] = {"model": {"norm": "train"}, "train": train}
    code, said = pair.run(_command, _config(tmp_path, slides, "two", "sound.csv", **settings))[0]
    assert code == 0, said
    (step,) = read_rows(tmp_path / "two" / "steps.csv")
    first = step["slides"].split()[::2]
    rows = [row for row in read_rows(slides / "sound.csv") if row["split"] == "val" or row["slide"].removesuffix(".tif") in first]
    settings["data"] = {"slides": str(slides)}
    # In the order of the first replica; the single process draws its order among three slides.
    order = philox_generator(0, "order", 0).permutation(3).tolist()
    placed = dict(zip(order, first, strict=True))
    training = [next(row for row in rows if row["slide"] == f"{placed[number]}.tif") for number in range(3)]
    write_table(tmp_path / "few.csv", [*training, *(row for row in rows if row["split"] == "val")])
    code, said = alone.run(_command, _config(tmp_path, tmp_path, "one", "few.csv", **settings))[0]
    assert code == 0, said
    assert read_rows(tmp_path / "one" / "steps.csv")[0]["slides"].split() == first
    ours, theirs = _weights(tmp_path / "two"), _weights(tmp_path / "one")
    statistics = [name for name in theirs if "running" in name or "num_batches" in name]
    assert len(statistics) == 6
    for name in statistics:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-12, atol=1e-14), name


def test_errors_of_one_rank_stop_all_ranks(pair: Ranks, slides: Path, tmp_path: Path) -> None:
    for bands in (1, 2):
        command = _config(tmp_path, slides, f"r{bands}", ranks={"bands": bands}, train={"on_error": "raise", "accumulate": 6})
        (code, said), (other, silence) = pair.run(_command, command)
        assert code == other == 1 and silence == ""
        # The damaged tile is in the lower band.
        rank = philox_generator(0, "order", 0).permutation(6).tolist().index(4) % 2 if bands == 1 else 1
        assert said.splitlines()[-1].startswith(f"error: slide s4 cannot be read (rank {rank}): "), said
    cases = [
        (_config(tmp_path, slides, "three", ranks={"bands": 3}), "ranks.bands 3, and 2 processes: start a multiple of 3"),
        (["plan", *_config(tmp_path, slides, "plan")[1:3]], "plan is for one process, and 2 were started"),
        (["doctor"], "several ranks can train and evaluate"),
    ]
    for arguments, message in cases:
        (code, said), (other, silence) = pair.run(_command, arguments)
        assert code == other == 1 and message in said and len(said.splitlines()) == 1 and silence == "", said
    assert not list((tmp_path / "r1").rglob("best-*"))


def _other_seed(rank: int, command: list[str]) -> tuple[int, str]:
    return _command(rank, [*command, "--train.seed", str(rank)])


def test_different_runs_on_ranks_are_refused(pair: Ranks, slides: Path, tmp_path: Path) -> None:
    for code, said in pair.run(_other_seed, _config(tmp_path, slides, "run")):
        assert code == 1 and ("were started with different train.seed" in said or not said)
    assert not (tmp_path / "run").exists()


def test_one_process_plans_for_the_bands_of_a_slide(alone: Ranks, slides: Path, tmp_path: Path) -> None:
    command = _config(tmp_path, slides, "run", ranks={"bands": 2})
    ((code, said),) = alone.run(_command, command)
    assert code == 1 and "ranks.bands 2, and one process" in said
    for arguments in ([*command, "--dry-run"], ["plan", *command[1:3], "--size", "4096", "4096"]):
        ((code, said),) = alone.run(_command, arguments)
        assert code == 0 and "of 2 band(s)" in said, said


def test_evaluation_is_shared_and_the_same(pair: Ranks, shared: Path, tmp_path: Path) -> None:
    for bands in (1, 2):
        arguments = ["evaluate", str(shared), "--bootstrap", "0", "--bands", str(bands), "--out", str(tmp_path / str(bands)), "--json"]
        (code, said), (other, silence) = pair.run(_command, arguments)
        assert code == other == 0 and '"metrics"' in said and silence == ""
        mine, expected = read_rows(tmp_path / str(bands) / "predictions.csv"), read_rows(shared / "val" / "predictions.csv")
        assert [row["slide"] for row in mine] == [row["slide"] for row in expected] and len(mine) == 3
        for ours, theirs in zip(mine, expected, strict=True):
            assert float(ours["p_plain"]) == pytest.approx(float(theirs["p_plain"]), rel=1e-12)


def test_a_killed_rank_is_named_and_the_run_continues_to_the_same_bits(pair: Ranks, shared: Path, slides: Path, tmp_path: Path) -> None:
    command = _config(tmp_path, slides, "run")
    with ranks_of(2, tmp_path) as dying, pytest.raises(RankFailedError, match=r"^rank 1: the process ended$"):
        dying.run(_answer, command, tmp_path / "said.txt")
    said = (tmp_path / "said.txt").read_text()
    assert said.startswith("1\n") and "error: rank 1 does not answer (it died" in said, said
    assert not list((tmp_path / "run").rglob(".partial-*")) and list((tmp_path / "run" / "checkpoints").glob("last-*"))
    (code, said), _ = pair.run(_command, command)
    assert code == 0 and "resuming from step 1," in said and "not to the same bits" not in said, said
    _assert_same_bits(tmp_path / "run", shared)


def _answer(rank: int, command: list[str], path: Path) -> None:
    """Run until rank 1 is killed in the middle of the second group; the output of rank 0 goes to a file."""
    code, said = _command(rank, command, Death(place=f"{_GROUPS}._forward", call=2), dies=1)
    path.write_text(f"{code}\n{said}")


def test_a_run_continues_with_another_number_of_ranks(alone: Ranks, pair: Ranks, reference: Path, slides: Path, tmp_path: Path) -> None:
    for name, first, second in (("fewer", pair, alone), ("more", alone, pair)):
        command = _config(tmp_path, slides, name)
        asked = Death(place=f"{_GROUPS}._forward", call=4 // len(first.connections), manner="term")  # in the second group
        for code, said in first.run(_command, command, asked, len(first.connections) - 1):  # only the last one is terminated
            assert code == 75 and ("interrupted: SIGTERM: saved at step 1," in said or not said)
        code, said = second.run(_command, command)[0]
        assert code in (0, 3) and "resuming from step 1," in said, said
        assert "It continues, but not to the same bits" in said
        _assert_close(tmp_path / name, reference)


def test_restarted_ranks_ignore_keys_of_earlier_ones() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # not in the list of what the module exports
    names: list[str] = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as threads:
            others = [threads.submit(rendezvous_ranks, store, rank, 3, timedelta(seconds=60)) for rank in (1, 2)]
            names.append(rendezvous_ranks(store, 0, 3, timedelta(seconds=60)))
            assert [other.result() for other in others] == [names[-1]] * 2
    assert len(set(names)) == 3
    with pytest.raises(RankError, match=r"ranks \[1, 2\] have not come within 0:00:00.1"):
        rendezvous_ranks(store, 0, 3, timedelta(seconds=0.1))
    with pytest.raises(RankError, match="rank 0 has not come"):
        rendezvous_ranks(store, 1, 3, timedelta(seconds=0.1))


@pytest.mark.slow
def test_torchrun_restarts_killed_ranks(slides: Path, tmp_path: Path) -> None:
    """One of two ranks is killed from outside; the other one reports it, and torchrun starts both again."""
    command = _config(tmp_path, slides, "run")
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*torchrun, "-m", "sft.wsi", *command, "--trust", "tests"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as run:
        while not list((tmp_path / "run" / "checkpoints").glob("last-00000002")) and run.poll() is None:
            time.sleep(0.01)
        *_, last = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(last), signal.SIGKILL)
        said = run.communicate(timeout=400)[0].decode()
    assert run.returncode == 0, said
    assert "error: rank 1 does not answer" in said and "resuming from step" in said, said
    assert "Traceback (most recent call last)" not in said, said
    assert len(read_rows(tmp_path / "run" / "steps.csv")) == 6 and len(read_rows(tmp_path / "run" / "metrics.csv")) == 2
    assert (tmp_path / "run" / "summary.md").exists()


def test_torchrun_passes_every_option() -> None:
    """Its parser reads all options, and refuses prefixes of two of its own, such as `--run`; `--folder` is an alias."""
    launcher = pytest.importorskip("torch.distributed.run").get_args_parser()
    names = {name for action in config_parser()._actions for name in action.option_strings}
    names.add("--trust")
    assert {"--run", "--folder", "--config", "--ranks.bands"} <= names
    for name in sorted(names - {"--run"}):
        arguments = ["train", name, "x"]
        assert launcher.parse_args(["--nproc-per-node", "2", "-m", "sft.wsi", *arguments]).training_script_args == arguments
