"""Tables of slides, valid and invalid; splits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sft.common.errors import InputError, SourceError
from sft.wsi.cli import read_config
from sft.wsi.config import AugmentConfig, DataConfig, ModelConfig, RanksConfig, TaskConfig, TaskKind, TrainConfig
from sft.wsi.data.splits import assign_splits
from sft.wsi.data.table import SlideRecord, SlideTable, read_table
from sft.wsi.data.tissue import read_mask
from sft.wsi.errors import DatasetError


def _table(folder: Path, text: str, *slides: str, encoding: str = "utf-8") -> Path:
    for name in slides:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"slide")
    table = folder / "table.csv"
    table.write_bytes(text.encode(encoding))
    return table


def _problems(table: Path, task: TaskConfig | None = None, root: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(DatasetError) as caught:
        read_table(table, task or TaskConfig(), root=root)
    assert isinstance(caught.value, InputError)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "slide", "classes"),
    [
        ("image,type\nnormal_001.tif,normal\ntumor_001.tif,tumor\n", "tumor_001.tif", ("normal", "tumor")),
        ("case_id,slide_id,label\nA-1,A-1-DX1,LUAD\nA-2,A-2-DX1,LUSC\n", "A-2-DX1.svs", ("LUAD", "LUSC")),
        ("image_id,data_provider,isup_grade,gleason_score\n00f7,karolinska,0,0+0\n00a9,radboud,4,4+4\n", "00a9.tiff", ("0", "4")),
    ],
    ids=["camelyon16", "tcga", "panda"],
)
def test_tables_of_published_data_sets(text: str, slide: str, classes: tuple[str, ...], tmp_path: Path) -> None:
    suffix = Path(slide).suffix
    first = text.split("\n")[1].split(",")[1 if "slide_id" in text else 0].removesuffix(suffix)
    table = read_table(_table(tmp_path, text, first + suffix, slide), TaskConfig())
    assert table.classes == classes and table.records[1].path.name == slide and table.records[1].target == (1.0,)
    assert table.records[1].patient == ("A-2" if "case_id" in text else slide.removesuffix(suffix))


def test_each_slide_has_a_name_of_its_own(tmp_path: Path) -> None:
    slides = ("d_x-4.svs", "d/x.svs", "d_x.svs", "e/x.svs", "f/d_x.svs")
    table = read_table(_table(tmp_path, "slide,label\n" + "".join(f"{s},{i % 2}\n" for i, s in enumerate(slides)), *slides), TaskConfig())
    assert len({record.name for record in table.records}) == len(slides)


def test_aliases_a_byte_order_mark_and_semicolons(tmp_path: Path) -> None:
    text = "Case_ID; Slide_ID ;TARGET;Partition;MPP\r\np1;a;tumor;training;0.25\r\n\r\np2;sub/b.svs;normal;dev;\r\n"
    table = read_table(_table(tmp_path, text, "a.svs", "sub/b.svs", encoding="utf-8-sig"), TaskConfig())
    assert table.classes == ("normal", "tumor")
    first, second = table.records
    assert (first.name, first.path, first.target, first.patient, first.split, first.mpp) == (
        "a",
        tmp_path / "a.svs",
        (1.0,),
        "p1",
        "train",
        0.25,
    )
    assert (second.name, second.path, second.target, second.split, second.mpp) == ("b", tmp_path / "sub" / "b.svs", (0.0,), "val", None)


def test_all_problems_of_a_table_are_reported_at_once(tmp_path: Path) -> None:
    text = (
        "slide,label,patient,split,mpp\n"
        "a.svs,x,p1,train,0.5\n"
        "a.svs,y,p2,val,0.5\n"  # the same file
        "gone.svs,x,p3,train,0.5\n"
        "empty.svs,y,p4,train,0.5\n"
        "../outside.svs,x,p5,train,0.5\n"
        "/etc/passwd,x,p6,train,0.5\n"
        "b.svs,,p1,test,0.5\n"  # no label, and a patient of another split
        "c.svs,y,p7,somewhere,-1\n"
        "d.svs,y,p8,train\n"  # a cell is missing
        ",y,p9,train,0.5\n"
        "e.svs,y,p10,,nan\n"
    )
    table = _table(tmp_path, text, "a.svs", "b.svs", "c.svs", "d.svs", "e.svs")
    (tmp_path / "empty.svs").write_bytes(b"")
    problems = "\n".join(_problems(table, root=tmp_path))
    expected = (
        "line 3: slide a.svs is on line 2 already", "line 4: slide", "is missing", "line 5:", "has no bytes",
        "line 6: slide '../outside.svs' is outside of", "line 7: slide '/etc/passwd' is outside of", "line 8: slide 'b.svs' has no label",
        "line 9: split 'somewhere'", "line 9: mpp -1", "line 10: 4 cells under 5 columns", "line 11: no slide", "line 12: mpp 'nan'",
        "patient 'p1' is in train (line 2), test (line 8)", "line 9, 12: no split",
    )  # fmt: skip
    for text in expected:
        assert text in problems, text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"slide,label\n", "no slides"),
        (b"slide,label\n\xff\xfe,x\n", "not UTF-8"),
        (b"slide,label\na\0b,x\n", "zero bytes"),
        (b'slide,label\n"a.svs,x\n', "close the quotes"),
        (b"picture,thing\na,b\n", "no column slide"),
        (b"slide,thing\na,b\n", "no column label"),
        (b"slide,slide,label\na,a,b\n", "2 times"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, content: bytes, message: str) -> None:
    table = tmp_path / "table.csv"
    table.write_bytes(content)
    assert any(message in problem for problem in _problems(table))


def test_a_missing_table_is_a_dataset_error(tmp_path: Path) -> None:
    assert "check the path" in _problems(tmp_path / "none.csv")[0]
    assert "cannot be read" in _problems(tmp_path)[0]


def test_other_content_of_a_mask_is_another_table(tmp_path: Path) -> None:
    """Regression: a run was continued and evaluated on other label maps without an error."""
    table = _table(tmp_path, "slide,mask\na.svs,a.png\n", "a.svs", "a.png", "b.png")
    task = TaskConfig(kind="segmentation", classes=["x", "y"])
    before = read_table(table, task).digest()
    assert read_table(_table(tmp_path, "slide,mask\na.svs,b.png\n"), task).digest() == before  # the same bytes elsewhere
    (tmp_path / "c.png").write_bytes(b"others")
    assert read_table(_table(tmp_path, "slide,mask\na.svs,c.png\n"), task).digest() != before
    (tmp_path / "a.png").write_bytes(b"written over")
    assert read_table(_table(tmp_path, "slide,mask\na.svs,a.png\n"), task).digest() != before


_TILES = partial(ModelConfig, encoder="tiles")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(device="gpu"), "train.device gpu: give cpu, cuda, or cuda:N"),
        (lambda: TrainConfig(device="meta"), "train.device meta"),
        (lambda: TrainConfig(epochs=cast(Any, None)), "train.epochs is null"),
        (lambda: TrainConfig(lr=float("inf")), "train.lr inf: give a number above 0 that float32 holds"),
        (lambda: TrainConfig(lr=1e300), "train.lr 1e[+]300: give a number above 0 that float32 holds"),
        (lambda: TrainConfig(weight_decay=float("nan")), "train.weight_decay"),
        (lambda: DataConfig(csv=Path("t.csv"), fold=3), "data.fold 3 without data.num_folds"),
        (lambda: DataConfig(csv=Path("t.csv"), num_folds=2), "data.num_folds 2: give at least 3"),
        (lambda: ModelConfig(attention_dim=10**10), "model.attention_dim 10000000000: give 1 to"),
        (lambda: ModelConfig(tile_px=256), "model.tile_px 256 with model.encoder slide: it is for tiles; give model.encoder tiles"),
        (lambda: ModelConfig(lora_rank=8), "model.lora_rank 8 with model.encoder slide"),
        (lambda: _TILES(tile_px=0), "model.tile_px 0: give an integer from 1 to 65536"),
        (lambda: _TILES(stride_px=-1), "model.stride_px -1: give an integer"),
        (lambda: _TILES(min_tissue=1.5), "model.min_tissue 1.5: give a share of a tile, 0 to 1"),
        (lambda: _TILES(tile=[8, 8]), r"model.tile \[8, 8\] with model.encoder tiles: it divides whole slides"),
        (lambda: _TILES(lora_layers=["qkv"]), r"model.lora_layers \[qkv\] without model.lora_rank: give the rank"),
        (lambda: _TILES(lora_rank=2, lora_layers=[]), r"model.lora_layers \[\]: name a layer"),
        *(
            (lambda make=make, name=name: make(**{name: None}), f"{group}.{name} is null: give a value")
            for group, make, name in (
                ("data", partial(DataConfig, csv=Path("t.csv")), "tissue"),
                ("data", DataConfig, "csv"),
                ("task", TaskConfig, "kind"),
                ("task", TaskConfig, "class_weights"),
                ("model", ModelConfig, "norm"),
                ("model", ModelConfig, "budget"),
                ("augment", AugmentConfig, "flips"),
                ("augment", AugmentConfig, "stain"),
                ("train", TrainConfig, "precision"),
                ("train", TrainConfig, "schedule"),
                ("ranks", RanksConfig, "bands"),
            )
        ),
    ],
)
def test_settings_that_would_fail_later_or_be_ignored(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_duplicate_keys_and_files_that_are_no_text(tmp_path: Path) -> None:
    """Regression: the last one was used, and the others were dropped."""
    path = tmp_path / "config.yaml"
    path.write_text("data:\n  csv: t.csv\nmodel:\n  budget: 1GiB\nmodel:\n  budget: 2GiB\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 3: model is given 2 times"):
        read_config(path)
    path.write_text("data:\n  csv: t.csv\n  csv: u.csv\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2: csv is given 2 times"):
        read_config(path)
    path.write_bytes("data:\n  csv: tä.csv\n".encode("latin-1"))
    with pytest.raises(InputError, match="byte 14 is not UTF-8"):
        read_config(path)


def test_paths_stay_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for path in ("../secret.svs", "x/../../secret.svs", str(tmp_path / "secret.svs"), "../root2/a.svs"):
        table = _table(tmp_path, f"slide,label\n{path},x\n", "secret.svs", "root2/a.svs", "root/in.svs")
        assert "outside of" in _problems(table, root=root)[0], path
    table = _table(tmp_path, "slide,label\nx/../in.svs,x\n")
    assert read_table(table, TaskConfig(), root=root).records[0].path == root / "in.svs"


def test_an_ambiguous_name_is_refused_and_equal_stems_get_different_names(tmp_path: Path) -> None:
    table = _table(tmp_path, "slide,label\na,x\n", "a.svs", "a.tif")
    assert "could be a.svs, a.tif" in _problems(table)[0]
    table = _table(tmp_path, "slide,label\none/a.svs,x\ntwo/a.svs,y\n", "one/a.svs", "two/a.svs")
    assert [record.name for record in read_table(table, TaskConfig()).records] == ["one_a.svs", "two_a.svs"]


@pytest.mark.parametrize(
    ("kind", "text", "targets"),
    [
        ("classification", "slide,label\na.svs,10\nb.svs,9\n", [(1.0,), (0.0,)]),
        ("multilabel", 'slide,label\na.svs,"er;pr"\nb.svs,\n', [(1.0, 1.0), (0.0, 0.0)]),
        ("regression", "slide,label\na.svs,1.5\nb.svs,-2\n", [(1.5,), (-2.0,)]),
        ("cox", "slide,time,event\na.svs,3,1\nb.svs,4.5,0\n", [(3.0, 1.0), (4.5, 0.0)]),
        ("hazard", "slide,survival_months,censorship\na.svs,3,1\nb.svs,4.5,0\n", [(3.0, 0.0), (4.5, 1.0)]),
        ("hazard", "slide,time,censored\na.svs,3,1.0\nb.svs,4.5,False\n", [(3.0, 0.0), (4.5, 1.0)]),
        ("classification", "slide,label\na.svs,²\nb.svs,--1\n", [(1.0,), (0.0,)]),
    ],
)
def test_targets_of_each_kind(tmp_path: Path, kind: TaskKind, text: str, targets: Sequence[tuple[float, ...]]) -> None:
    table = read_table(_table(tmp_path, text, "a.svs", "b.svs"), TaskConfig(kind=kind))
    assert [record.target for record in table.records] == targets


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("classification", "slide,label\na.svs,z\n", "label 'z' is not one of x, y"),
        ("multilabel", 'slide,label\na.svs,"x;z"\n', "label z is not one of x, y"),
        ("regression", "slide,label\na.svs,many\n", "label 'many' is not a number"),
        ("regression", "slide,label\na.svs,1_000\n", "label '1_000' is not a number"),
        ("regression", "slide,label\na.svs,1e308\n", "label '1e308' is not a number"),
        ("cox", "slide,time,event,censored\na.svs,1,1,1\n", "event '1' and censored '1' contradict each other"),
        ("cox", "slide,time,event\na.svs,-1,1\n", "time '-1'"),
        ("cox", "slide,time,event\na.svs,1,2\n", "event '2'"),
        ("cox", "slide,time,censored\na.svs,1,maybe\n", "censored 'maybe' is neither 1 nor 0"),
        ("hazard", "slide,time\na.svs,1\n", "no column event"),
        ("segmentation", "slide,mask\na.svs,\n", "has no mask"),
    ],
)
def test_wrong_targets(tmp_path: Path, kind: TaskKind, text: str, message: str) -> None:
    classes = ["x", "y"] if kind in ("classification", "multilabel", "segmentation") else None
    problems = _problems(_table(tmp_path, text, "a.svs"), TaskConfig(kind=kind, classes=classes))
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize("text", ["nan", "NA", "n/a", "<NA>"])
def test_a_placeholder_of_a_label_is_no_class(text: str, tmp_path: Path) -> None:
    """Otherwise a network would learn it as a class."""
    path = _table(tmp_path, f"slide,label\na.svs,x\nb.svs,{text}\n", "a.svs", "b.svs")
    for kind in cast("list[TaskKind]", ["classification", "multilabel"]):
        (problem,) = _problems(path, TaskConfig(kind=kind))
        assert f"line 3: label {text!r} is what programs write for one that is missing" in problem
        assert len(read_table(path, TaskConfig(kind=kind, classes=["x", text])).records) == 2


@pytest.mark.parametrize("text", ["NaN", "NA", "null"])
def test_a_placeholder_of_a_patient_is_no_patient(text: str, tmp_path: Path) -> None:
    """Otherwise slides without a patient would be averaged, and kept in one split."""
    problems = _problems(_table(tmp_path, f"slide,label,patient\na.svs,x,{text}\nb.svs,y,p\n", "a.svs", "b.svs"), TaskConfig())
    message = f"line 2: patient {text!r} is what programs write for one that is missing; leave the cell empty, or name the patient"
    assert problems == (message,)


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    long = "a" * 300 + ".svs"
    first, second = _problems(_table(tmp_path, f"slide,label,mask\n{long},x,\nb.svs,y,{long}\n", "b.svs"), TaskConfig())
    assert first.startswith("line 2: slide ") and second.startswith("line 3: mask ")
    assert "is missing; check the name" in first and "is missing; check the name" in second


def test_links_to_a_slide_are_that_slide(tmp_path: Path) -> None:
    """Otherwise one slide could be in two splits, for training and validation."""
    path = _table(tmp_path, "slide,label,split\na.svs,x,train\nb.svs,y,val\nc.svs,y,train\n", "a.svs")
    (tmp_path / "b.svs").symlink_to("a.svs")
    os.link(tmp_path / "a.svs", tmp_path / "c.svs")
    problems = _problems(path, TaskConfig())
    assert problems == ("line 3: slide b.svs is on line 2 already; leave one", "line 4: slide c.svs is on line 2 already; leave one")


def test_folds_of_a_table_with_splits_are_refused() -> None:
    table = _made(9, 1)
    splits = SlideTable(records=tuple(replace(record, split="train") for record in table.records), classes=table.classes)
    with pytest.raises(DatasetError, match=r"data\.num_folds 3, but the table has splits"):
        assign_splits(splits, DataConfig(csv=Path("t.csv"), num_folds=3), "classification", seed=0)


def _made(num_patients: int, slides_each: int) -> SlideTable:
    records = [
        SlideRecord(
            name=f"s{patient}-{number}", path=Path(f"s{patient}-{number}"), target=(float(patient % 3 == 0),), patient=f"p{patient}",
            split=None, mpp=None, mask=None, row=2,
        )
        for patient in range(num_patients)
        for number in range(slides_each)
    ]  # fmt: skip
    return SlideTable(records=tuple(records), classes=("no", "yes"))


def test_folds_share_no_patient_are_stratified_and_cover_every_slide_once() -> None:
    table, tested = _made(30, 3), []
    for fold in range(5):
        config = DataConfig(csv=Path("t.csv"), num_folds=5, fold=fold)
        assigned = assign_splits(table, config, "classification", seed=1)
        assert assigned == assign_splits(table, config, "classification", seed=1)
        patients = {split: {r.patient for r in assigned.records if r.split == split} for split in ("train", "val", "test")}
        assert not (patients["train"] & patients["val"] or patients["train"] & patients["test"] or patients["val"] & patients["test"])
        assert {split: len(names) for split, names in patients.items()} == {"train": 18, "val": 6, "test": 6}
        positive = {r.patient for r in assigned.records if r.split == "test" and r.target == (1.0,)}
        assert len(positive) == 2
        tested += [r.name for r in assigned.records if r.split == "test"]
    assert sorted(tested) == sorted(record.name for record in table.records)


def test_a_class_that_no_slide_has_is_refused() -> None:
    """A misspelt name in task.classes would be an output that is never positive."""
    table = _made(9, 1)
    several = SlideTable(
        records=tuple(replace(record, target=(*(record.target or ()), 1.0, 0.0)) for record in table.records), classes=("a", "b", "tumuor")
    )
    with pytest.raises(DatasetError, match=r"class 'tumuor' of task\.classes is the label of no slide"):
        assign_splits(several, DataConfig(csv=Path("t.csv")), "multilabel", seed=0)


def test_shares_of_the_patients_and_too_few_of_them() -> None:
    config = DataConfig(csv=Path("t.csv"), val_fraction=0.25, test_fraction=0.2)
    assigned = assign_splits(_made(20, 2), config, "classification", seed=0)
    sizes = {split: len({r.patient for r in assigned.records if r.split == split}) for split in ("train", "val", "test")}
    assert sizes == {"train": 11, "val": 5, "test": 4}
    with pytest.raises(DatasetError, match="2 patients, 1 for test and 1 for val: none is left to train on"):
        assign_splits(_made(2, 2), config, "classification", seed=0)
    with pytest.raises(DatasetError, match="2 patients for 5 folds"):
        assign_splits(_made(2, 2), DataConfig(csv=Path("t.csv"), num_folds=5), "classification", seed=0)


@pytest.mark.parametrize("share", [0.3, 0.35, 0.4, 0.7])
@pytest.mark.parametrize("num_patients", [20, 27])
def test_shares_hold_in_all_and_in_each_class(share: float, num_patients: int) -> None:
    table = _made(num_patients, 3)
    config = DataConfig(csv=Path("t.csv"), val_fraction=share)
    assigned = assign_splits(table, config, "classification", seed=4)
    patients = {split: {r.patient for r in assigned.records if r.split == split} for split in ("train", "val")}
    assert not patients["train"] & patients["val"] and len(patients["val"]) == round(share * num_patients)
    for target in ((0.0,), (1.0,)):
        of_class = {r.patient for r in table.records if r.target == target}
        assert abs(len(patients["val"] & of_class) - share * len(of_class)) < 1
    turned = assign_splits(SlideTable(records=table.records[::-1], classes=table.classes), config, "classification", seed=4)
    assert {r.name: r.split for r in turned.records} == {r.name: r.split for r in assigned.records}
    other = assign_splits(table, config, "classification", seed=5)
    assert other != assigned


def test_the_only_patient_of_a_class_is_trained_on() -> None:
    table = _made(8, 1)
    records = tuple(replace(record, target=(float(number == 3),)) for number, record in enumerate(table.records))
    for seed in range(5):
        config = DataConfig(csv=Path("t.csv"), val_fraction=0.4, test_fraction=0.2)
        assigned = assign_splits(SlideTable(records=records, classes=table.classes), config, "classification", seed=seed)
        assert assigned.records[3].split == "train"


def test_a_split_that_cannot_be_learnt_from_is_refused() -> None:
    table = _made(6, 1)
    records = tuple(replace(record, split="train" if record.target == (0.0,) else "val") for record in table.records)
    with pytest.raises(DatasetError, match=r"class 'yes' has no training slide \(it is on line .*\); the training slides have 'no'"):
        assign_splits(SlideTable(records=records, classes=table.classes), DataConfig(csv=Path("t.csv")), "classification", seed=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data:\n  csv: t.csv\ntrain:\n#  lr: 0.1\n", "line 3: train has no settings below it"),
        ("data: [t.csv]\n", "line 1: data has no settings"),
        ("data:\n  csv: t.csv\nmodel:\n  options: # {}\n", "line 4: options has no settings"),
        ("data:\n  csv: t.csv\nmodel:\n  options: &a\n    deep: [*a]\n", "line 4: an alias of what it is part of"),
        ("train: &a\n  <<: *a\n", "an alias of what it is part of"),
    ],
)
def test_unreadable_lines_of_tables_are_named(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=words):
        read_config(tmp_path / "c.yaml")


def test_a_budget_may_be_a_number_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data:\n  csv: t.csv\n  host_budget: 4096\nmodel:\n  budget: 2097152\nrun: r\n")
    config = read_config(tmp_path / "c.yaml")
    assert (config.model.budget, config.data.host_budget) == (2097152, 4096)
    (tmp_path / "c.yaml").write_text("data:\n  csv: t.csv\nmodel:\n  budget: 0\nrun: r\n")
    with pytest.raises(InputError, match="a byte size must be positive, got 0"):
        read_config(tmp_path / "c.yaml")


def test_masks_of_several_images(tmp_path: Path) -> None:
    import tifffile

    mask = np.arange(48 * 64, dtype=np.uint8).reshape(48, 64) % 3
    stack, pyramid = tmp_path / "stack.tif", tmp_path / "pyramid.tif"
    tifffile.imwrite(stack, np.stack([mask, 2 - mask]), photometric="minisblack", metadata=None)
    with tifffile.TiffWriter(pyramid) as writer:
        writer.write(mask, photometric="minisblack", metadata=None)
        writer.write(mask[::2, ::2], photometric="minisblack", subfiletype=1, metadata=None)
    with pytest.raises(SourceError, match=r"has 2 images of 64 x 48 px, of which one is read"):
        read_mask(stack)
    assert np.array_equal(read_mask(pyramid), mask)


def _long_table(folder: Path, rows: list[str], head: str = "slide,label", **task: Any) -> DatasetError:
    """The error of a table with these rows and one slide, ``a.tif``."""
    (folder / "a.tif").write_bytes(b"slide")
    (folder / "long.csv").write_text("\n".join([head, *rows]) + "\n")
    with pytest.raises(DatasetError) as caught:
        read_table(folder / "long.csv", TaskConfig(**task))
    return caught.value


@pytest.mark.parametrize(
    ("row", "head", "count", "first"),
    [
        ("a.tif,x", "slide,label", 2999, "line 3: slide a.tif is on line 2 already"),
        ("m{0}.tif,x", "slide,label", 3000, "line 2: slide "),
        ("{0}/m.tif,x", "slide,label", 3000, "line 2: slide "),
        ("../m{0}.tif,x", "slide,label", 3000, "line 2: slide '../m0.tif' is outside of"),
        ("a.tif,", "slide,label", 5999, "line 2: slide 'a.tif' has no label"),
        ("a.tif,x,y", "slide,label", 3000, "line 2: 3 cells under 2 columns"),
        ("a.tif,x,0.5,here", "slide,label,mpp,split", 5999, "line 2: split 'here' is not one of"),
        ("a.tif,x,-1", "slide,label,mpp", 5999, "line 2: mpp -1 is not a number"),
    ],
)
def test_long_lists_of_problems_end(tmp_path: Path, row: str, head: str, count: int, first: str) -> None:
    error = _long_table(tmp_path, [row.format(number) for number in range(3000)], head)
    lines = str(error).splitlines()
    assert len(error.problems) == count and len(lines) == 22
    assert f"{count:,} problems" in lines[0] and lines[1].startswith(f"  - {first}") and lines[-1] == f"  - and {count - 20:,} more"


def test_a_name_is_looked_up_once_and_a_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work on the file system does not grow with repeated names, nor with the extensions that a name may have."""
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        real = getattr(os, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            calls[name] += str(tmp_path) in str(arguments[0])
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, counted)

    for name in ("stat", "listdir", "access"):
        count(name)
    _long_table(tmp_path, ["a.tif,x"] * 500)
    repeated = Counter(calls)
    calls.clear()
    _long_table(tmp_path, [f"m{number},x" for number in range(500)])
    assert max(repeated["stat"], repeated["listdir"], repeated["access"]) <= 5, repeated
    assert calls["listdir"] == 1 and calls["stat"] <= 505 and calls["access"] <= 5, calls


def test_labels_that_are_no_classes(tmp_path: Path) -> None:
    rows = [f"a.tif,label{number}" for number in range(10_001)]
    for kind in ("classification", "multilabel"):
        error = _long_table(tmp_path, rows, kind=kind)
        assert error.problems[0].startswith("10,001 different labels are not classes (label0, label1, ")
    error = _long_table(tmp_path, ["a.tif,x"], classes=[f"c{number}" for number in range(500)])
    assert error.problems[0].endswith("c19, and 480 more")
    header = ",".join(["slide", *(f"column{number}" for number in range(500))])
    assert "column18, and 481 more" in _long_table(tmp_path, ["a.tif" + "," * 500], header).problems[0]


def test_more_rows_than_slides_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.wsi.data.table._MAX_ROWS", 100)
    assert _long_table(tmp_path, ["a.tif,x"] * 100).problems[0].startswith("line 3: slide a.tif")
    assert _long_table(tmp_path, ["a.tif,x"] * 101).problems == (
        "more than 100 rows are too many for a table of slides; give the CSV file",
    )
    monkeypatch.setattr("sft.wsi.data.table._MAX_BYTES", 64)
    assert "more than 64 bytes" in _long_table(tmp_path, ["a.tif,x"] * 50).problems[0]
    with pytest.raises(DatasetError, match="a pipe or a device, not a file"):
        read_table(Path("/dev/zero"), TaskConfig())


def test_devices_are_no_slides(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tif")
    assert "pipe.tif is neither a file nor a folder" in _long_table(tmp_path, ["pipe.tif,x"]).problems[0]
