"""Training, validation and test slides that share no patient, stratified by what is predicted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

from sft.wsi.config import DataConfig, TaskKind
from sft.wsi.errors import DatasetError
from sft.wsi.table import SlideRecord, SlideTable, Split

__all__ = ["assign_splits"]


def assign_splits(table: SlideTable, config: DataConfig, kind: TaskKind, seed: int) -> SlideTable:
    """The table with a split for each slide: its own where it has them, else folds, else shares of the patients.

    Args:
        table: the slides.
        config: folds or shares.
        kind: what is predicted; classes are stratified by class, values by quarters, survival by events.
        seed: of the shuffling.

    Raises:
        DatasetError: there are too few patients, or a split lacks slides or classes that it needs.
    """
    where = str(config.csv)
    records = list(table.records)
    if not any(record.split is not None for record in records):
        splits = _derived(records, config, kind, seed, where)
        records = [replace(record, split=split) for record, split in zip(records, splits, strict=True)]
    problems = []
    training = [record for record in records if record.split == "train"]
    if not training:
        problems.append("no slides to train on; give some the split train")
    if kind == "classification" and training:
        seen = {int(record.target[0]) for record in training if record.target}
        problems += [f"class {name!r} has no training slide" for index, name in enumerate(table.classes) if index not in seen]
        if len(table.classes) < 2:
            problems.append(f"one class ({', '.join(table.classes)}) leaves nothing to learn; give two or more")
    if kind in ("cox", "hazard") and training and not any(record.target and record.target[1] for record in training):
        problems.append("no training slide has an event; survival cannot be learnt from censored slides alone")
    if problems:
        raise DatasetError(where, problems)
    return SlideTable(records=tuple(records), classes=table.classes)


def _derived(records: Sequence[SlideRecord], config: DataConfig, kind: TaskKind, seed: int, where: str) -> list[Split]:
    splits: list[Split] = ["train"] * len(records)
    if config.num_folds is not None:
        folds = _folds(records, kind, config.num_folds, seed, where)
        test, val = config.fold, (config.fold + 1) % config.num_folds
        named: dict[int, Split] = {val: "val", test: "test"}
        return [named.get(fold, "train") for fold in folds]
    rest = list(range(len(records)))
    for name, share in (("test", config.test_fraction), ("val", config.val_fraction / (1 - config.test_fraction))):
        if share <= 0:
            continue
        folds = _folds([records[index] for index in rest], kind, max(2, round(1 / share)), seed, where)
        for index, fold in zip(rest, folds, strict=True):
            if fold == 0:
                splits[index] = "test" if name == "test" else "val"
        rest = [index for index in rest if splits[index] == "train"]
    return splits


def _folds(records: Sequence[SlideRecord], kind: TaskKind, num_folds: int, seed: int, where: str) -> list[int]:
    patients = [record.patient for record in records]
    if len(set(patients)) < num_folds:
        problem = f"{len(set(patients))} patients for {num_folds} folds; give data.num_folds or data.val_fraction that they suffice for"
        raise DatasetError(where, [problem])
    folds = [0] * len(records)
    splitter = StratifiedGroupKFold(n_splits=num_folds, shuffle=True, random_state=seed)
    strata = _strata(records, kind, num_folds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with fewer slides than folds: some folds lack it, which is no mistake
        for number, (_, held) in enumerate(splitter.split(np.zeros(len(records)), strata, patients)):
            for index in held:
                folds[int(index)] = number
    return folds


def _strata(records: Sequence[SlideRecord], kind: TaskKind, num_folds: int) -> list[str]:
    """What is balanced between the folds; one stratum where none would have a slide for each fold."""
    targets = [record.target for record in records]
    if kind == "regression":
        values = np.array([target[0] if target else np.nan for target in targets])
        edges = np.nanquantile(values, (0.25, 0.5, 0.75))
        strata = [str(np.searchsorted(edges, value)) for value in values]
    elif kind in ("cox", "hazard"):
        strata = [str(target[1]) if target else "" for target in targets]
    else:
        strata = [str(target) for target in targets]
    largest = max(strata.count(stratum) for stratum in set(strata))
    return strata if largest >= num_folds else [""] * len(strata)
