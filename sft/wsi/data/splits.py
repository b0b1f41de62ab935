"""Training, validation and test splits that share no patient, stratified by the target."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

from sft.wsi.config import DataConfig, TaskKind
from sft.wsi.data.table import SlideRecord, SlideTable, Split
from sft.wsi.errors import DatasetError
from sft.wsi.train.optim import philox_generator

__all__ = ["assign_splits"]

#: Lines that a message lists.
_MAX_LINES = 5


def assign_splits(table: SlideTable, config: DataConfig, kind: TaskKind, seed: int) -> SlideTable:
    """Table with a split for each slide: its own if given, else folds, else shares of the patients.

    Args:
        table: the slides.
        config: folds or shares.
        kind: of task; classes are stratified by class, values by quarters, survival by events.
        seed: of the shuffling.

    Raises:
        DatasetError: too few patients, or a split lacks slides or classes that it needs.
    """
    where = str(config.csv)
    records = list(table.records)
    if config.num_folds is not None and any(record.split is not None for record in records):
        raise DatasetError(where, [f"data.num_folds {config.num_folds}, but the table has splits; leave out one of the two"])
    if not any(record.split is not None for record in records):
        splits = _derive_splits(records, config, kind, seed, where)
        records = [replace(record, split=split) for record, split in zip(records, splits, strict=True)]
    problems = []
    training = [record for record in records if record.split == "train"]
    if not training:
        problems.append("no slides to train on; give some the split train")
    if kind == "classification" and training:
        present = {int(record.target[0]) for record in training if record.target}
        of_training = ", ".join(repr(name) for index, name in enumerate(table.classes) if index in present)
        problems += [
            f"class {name!r} has no training slide{_lines_of(records, index)}; the training slides have {of_training}"
            for index, name in enumerate(table.classes)
            if index not in present
        ]
        if len(table.classes) < 2:
            problems.append(f"one class ({', '.join(table.classes)}) leaves nothing to learn; give two or more")
    if kind == "multilabel" and training:
        # A fold may lack a rare class; a class that no slide of the table has is a misspelt name.
        targets = [record.target for record in records if record.target]
        absent = [name for index, name in enumerate(table.classes) if not any(target[index] for target in targets)]
        problems += [f"class {name!r} of task.classes is the label of no slide; correct the name, or leave it out" for name in absent]
    if kind in ("cox", "hazard") and training and not any(record.target and record.target[1] for record in training):
        problems.append("no training slide has an event; survival cannot be learnt from censored slides alone")
    if problems:
        raise DatasetError(where, problems)
    return SlideTable(records=tuple(records), classes=table.classes)


def _lines_of(records: Sequence[SlideRecord], number: int) -> str:
    """The lines of the table with a class, and their splits; empty without any."""
    rows = [f"{record.row} ({record.split})" for record in records if record.target and int(record.target[0]) == number]
    more = f" and {len(rows) - _MAX_LINES} more" if len(rows) > _MAX_LINES else ""
    return f" (it is on line {', '.join(rows[:_MAX_LINES])}{more})" if rows else ""


def _derive_splits(records: Sequence[SlideRecord], config: DataConfig, kind: TaskKind, seed: int, where: str) -> list[Split]:
    if config.num_folds is not None:
        folds = _folds(records, kind, config.num_folds, seed, where)
        test, val = config.fold, (config.fold + 1) % config.num_folds
        named: dict[int, Split] = {val: "val", test: "test"}
        return [named.get(fold, "train") for fold in folds]
    unassigned = _patients(records, _strata(records, kind), seed)
    num_patients = sum(map(len, unassigned.values()))
    shares: dict[Split, float] = {"test": config.test_fraction, "val": config.val_fraction}
    counts = {split: max(1, round(share * num_patients)) for split, share in shares.items() if share > 0}
    if sum(counts.values()) >= num_patients:
        counts_text = " and ".join(f"{count} for {split}" for split, count in counts.items())
        raise DatasetError(where, [f"{num_patients} patients, {counts_text}: none is left to train on; give more, or smaller shares"])
    split_of: dict[str, Split] = {}
    for split, count in counts.items():
        for patient in _sample_stratified(unassigned, count):
            split_of[patient] = split
    return [split_of.get(record.patient, "train") for record in records]


def _patients(records: Sequence[SlideRecord], strata: Sequence[str], seed: int) -> dict[str, list[str]]:
    """Patients by their strata, in random order; the order does not depend on the order of rows."""
    of_patient: dict[str, set[str]] = {}
    for record, stratum in zip(records, strata, strict=True):
        of_patient.setdefault(record.patient, set()).add(stratum)
    names = sorted(of_patient)
    patients: dict[str, list[str]] = {}
    for number in philox_generator(seed, "splits").permutation(len(names)).tolist():
        patients.setdefault(" ".join(sorted(of_patient[names[number]])), []).append(names[number])
    return dict(sorted(patients.items()))


def _sample_stratified(left: dict[str, list[str]], count: int) -> list[str]:
    """Take ``count`` patients, of each stratum its share up to rounding; the last patient of a stratum only if all others are taken."""
    sizes = {stratum: len(patients) for stratum, patients in left.items()}
    share = count / sum(sizes.values())
    sample: list[str] = []
    for _ in range(count):
        stratum = max(
            (stratum for stratum, patients in left.items() if patients),
            key=lambda name: (len(left[name]) > 1, share * sizes[name] - (sizes[name] - len(left[name]))),
        )
        sample.append(left[stratum].pop())
    return sample


def _folds(records: Sequence[SlideRecord], kind: TaskKind, num_folds: int, seed: int, where: str) -> list[int]:
    patients = [record.patient for record in records]
    if len(set(patients)) < num_folds:
        problem = f"{len(set(patients))} patients for {num_folds} folds; give data.num_folds or data.val_fraction that they suffice for"
        raise DatasetError(where, [problem])
    folds = [0] * len(records)
    splitter = StratifiedGroupKFold(n_splits=num_folds, shuffle=True, random_state=seed)
    strata = _strata(records, kind)
    if max(Counter(strata).values()) < num_folds:
        strata = [""] * len(records)  # none has a slide for each fold
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with fewer slides than folds: some folds lack it, which is no mistake
        for number, (_, indices) in enumerate(splitter.split(np.zeros(len(records)), strata, patients)):
            for index in indices:
                folds[int(index)] = number
    return folds


def _strata(records: Sequence[SlideRecord], kind: TaskKind) -> list[str]:
    """Stratum of each slide, balanced between the splits."""
    targets = [record.target for record in records]
    if kind == "regression":
        values = np.array([target[0] if target else np.nan for target in targets])
        edges = np.nanquantile(values, (0.25, 0.5, 0.75))
        return [str(np.searchsorted(edges, value)) for value in values]
    if kind in ("cox", "hazard"):
        return [str(target[1]) if target else "" for target in targets]
    return [str(target) for target in targets]
