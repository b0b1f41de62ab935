"""What the operators behind a place need, read off one program of all of them.

Every instruction of a program belongs to an operator, so the program of a run also tells what the operators behind any place would need
alone. (Those before a place: ``sft.plan.outline``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sft.lower.program import Instruction

__all__ = ["suffix_peaks"]

Floats = npt.NDArray[np.float64]


def suffix_peaks(instructions: Sequence[Instruction], place: Mapping[str, int], cuts: Iterable[int]) -> Floats:
    """Most bytes alive at once in the storages of the operators from each cut on, while those operators run.

    Args:
        instructions: of one program, or of its halves in a row.
        place: where each operator stands.
        cuts: places.
    """
    cuts = np.array(list(cuts), dtype=np.int64)
    #: of each storage its operator's place and its bytes; and when it comes or goes, the storage, come or gone
    owners: list[int] = []
    sizes: list[int] = []
    number_of: dict[int, int] = {}
    changes: list[tuple[int, int, int]] = []
    # What is alive grows when something comes; what goes has gone when something comes the next time.
    times: list[int] = []
    for instruction in instructions:
        made = [out for out in instruction.outputs if out is not None and out.root == out.number]
        if made:
            times.append(place[instruction.owner])
        for out in made:
            number_of[out.number] = len(owners)
            changes.append((len(times) - 1, len(owners), 1))
            owners.append(place[instruction.owner])
            sizes.append(out.num_bytes)
        changes += [(len(times), number_of[number], -1) for number in instruction.frees if number in number_of]
    if not times:
        return np.zeros(len(cuts))
    at, storages, signs = np.array(changes, dtype=np.int64).T
    starts = np.array(owners, dtype=np.int64)[storages]
    # Of places only those between two cuts are told apart; what is made behind a cut counts from the cut on.
    ends = np.unique(cuts)
    cells = np.searchsorted(ends, starts, side="right") * (len(times) + 1) + at
    weights = signs * np.array(sizes, dtype=np.float64)[storages]
    alive = np.bincount(cells, weights=weights, minlength=(len(ends) + 1) * (len(times) + 1)).reshape(len(ends) + 1, -1)[1:, :-1]
    alive = np.cumsum(np.cumsum(alive[::-1], axis=0)[::-1], axis=1)
    alive[np.array(times)[None, :] < ends[:, None]] = 0.0  # it is made by an operator that does not run
    found: Floats = alive.max(axis=1)[np.searchsorted(ends, cuts)]
    return found
