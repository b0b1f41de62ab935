"""Long-lived rank processes for many cases: starting them takes seconds, a case takes milliseconds."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.fork_server import fork_context

__all__ = ["RankFailedError", "Ranks", "ranks_of"]


class RankFailedError(AssertionError):
    """A case failed on a rank; the message is its traceback."""


class Ranks:
    """Running processes with gloo between them."""

    def __init__(self, count: int, store: Path) -> None:
        context = fork_context()
        self.connections: list[Connection] = []
        self.processes = []
        self.is_broken = False
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], *arguments: Any, timeout_seconds: float = 300.0) -> list[Any]:
        """Results of ``case(rank, *arguments)`` on each rank.

        Raises:
            RankFailedError: it raised on one of them, or did not return in time.
        """
        if self.is_broken:
            raise RankFailedError("an earlier case failed in these processes, and they may be out of step")
        for connection in self.connections:
            connection.send((case, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(self.connections):
            left = [connection for rank, connection in enumerate(self.connections) if rank not in answers]
            ready = wait(left, timeout_seconds)
            if not ready:
                self.is_broken = True
                raise RankFailedError(f"only ranks {sorted(answers)} answered within {timeout_seconds} s")
            for rank, connection in enumerate(self.connections):
                if connection not in ready:
                    continue
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = (False, "the process ended")
        failed = {rank: value for rank, (is_well, value) in sorted(answers.items()) if not is_well}
        if failed:
            self.is_broken = True
            raise RankFailedError("\n".join(f"rank {rank}: {value}" for rank, value in failed.items()))
        return [answers[rank][1] for rank in range(len(answers))]

    def close(self) -> None:
        """End the processes."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(1 if self.is_broken else 10)
            if process.is_alive():
                process.kill()


@contextmanager
def ranks_of(count: int, folder: Path) -> Iterator[Ranks]:
    """Context with a number of rank processes."""
    ranks = Ranks(count, folder / "store")
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(rank: int, count: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=60))
    while True:
        try:
            case, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send((True, case(rank, *arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()
