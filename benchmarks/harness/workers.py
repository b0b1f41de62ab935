"""One process for each measurement, and pairs of processes that take turns.

A fresh process starts with an empty allocator and no warm caches. If memory runs out, the kernel kills the worker and not the benchmark.
Timings come in pairs: the workers of plain and of the other method keep their models. The coordinator starts one step in one, then one in
the other, and the order alternates from round to round. Only one computes at any time. A machine that slows down (other users, heat) then
slows both steps of a round, and the ratio within a round stays.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from types import TracebackType
from typing import Any, TypeVar

import torch

import sft
from harness.cases import Case, build, prepare

__all__ = ["Refused", "Round", "StepWorker", "Steps", "WorkerError", "call_in_process", "run_pairs"]

Question = TypeVar("Question")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of a worker, and its reason."""

    kind: str
    """`does not fit`, `no plan`, `refused`, `timed out` or `failed`."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One step of each of two methods, one right after the other."""

    plain_seconds: float | None
    """None where plain does not fit."""
    other_seconds: float
    plain_first: bool

    @property
    def ratio(self) -> float | None:
        """The other method's time over plain's."""
        return None if self.plain_seconds is None else self.other_seconds / self.plain_seconds


class Refused(Exception):
    """A method cannot run a case; the message is the reason."""


class WorkerError(Exception):
    """Missing result of a worker; `kind` is the reason in two words, as in `Failure`."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


def _explain(error: Exception) -> Failure:
    message = str(error).strip() or type(error).__name__
    if isinstance(error, Refused):
        return Failure(kind="refused", message=message)
    if isinstance(error, sft.BudgetError):
        return Failure(kind="no plan", message=message)
    if isinstance(error, MemoryError) or "can't allocate memory" in message or "not enough memory" in message:
        return Failure(kind="does not fit", message=message.splitlines()[0])
    return Failure(kind="failed", message=f"{type(error).__name__}: {message}")


def _answer(connection: Connection, case: Question, function: Callable[[Question], Any]) -> None:
    """Main function of a worker that calls one function."""
    try:
        connection.send(function(case))
    except Exception as error:  # the coordinator raises it
        connection.send(_explain(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A case that is ready to run."""

    step: Callable[[], object]
    """Run one step; this is timed."""
    reset: Callable[[], object]
    """Drop the results of a step."""


def start_case(case: Case) -> Steps:
    """Build and prepare a case."""
    torch.set_num_threads(case.threads)
    built = build(case)
    step, _ = prepare(case, built)
    return Steps(step=step, reset=built.body.zero_grad)


def _serve_steps(connection: Connection, case: Question, start: Callable[[Question], Steps]) -> None:
    """Main function of a timing worker: run one step for each request and send its seconds, until the request to stop."""
    try:
        steps = start(case)
        connection.send(None)
        while connection.recv():
            gc.collect()
            started = time.perf_counter()
            steps.step()
            connection.send(time.perf_counter() - started)
            steps.reset()
    except EOFError:
        pass  # the coordinator has gone
    except Exception as error:  # the coordinator raises it
        connection.send(_explain(error))


class _Process:
    """A spawned worker and the pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: Any, context: ForkServerContext | SpawnContext | None = None) -> None:
        context = context or multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: Any = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()  # so that the pipe ends when the worker does

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """Next message of the worker; a worker that sends nothing for `timeout_seconds` is killed.

        Raises:
            WorkerError: it failed, or was killed.
        """
        if not self.connection.poll(timeout_seconds):
            self.process.kill()
            raise WorkerError("timed out", f"no answer after {timeout_seconds:g} s")
        try:
            answer = self.connection.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            kind = "does not fit" if code == -9 else "failed"
            raise WorkerError(kind, f"the worker ended with exit code {code}") from None
        if isinstance(answer, Failure):
            raise WorkerError(answer.kind, answer.message)
        return answer

    def close(self) -> None:
        """End the worker."""
        self.connection.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def call_in_process(
    function: Callable[[Question], Result],
    case: Question,
    *,
    timeout_seconds: float | None = None,
    context: ForkServerContext | SpawnContext | None = None,
) -> Result:
    """Return `function(case)`, run in a process of its own.

    Args:
        function: importable by the process.
        case: pickled.
        timeout_seconds: when the process is killed; never by default.
        context: how the process starts; spawned by default.

    Raises:
        WorkerError: the function raised, or its process was killed.
    """
    process = _Process(_answer, case, function, context=context)
    try:
        result: Result = process.receive(timeout_seconds)
    finally:
        process.close()
    return result


class StepWorker:
    """A process that builds one case and runs a step on request.

    Args:
        case: pickled.
        start: builds and prepares it in the process.
    """

    def __init__(self, case: Question, start: Callable[[Question], Steps]) -> None:
        self._process = _Process(_serve_steps, case, start)

    def __enter__(self) -> StepWorker:
        try:
            self._process.receive()
        except WorkerError:
            self._process.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # the process has ended, and its own error is raised
            self._process.connection.send(False)
        self._process.close()

    def step(self) -> float:
        """Run one step; returns its seconds on the worker's clock."""
        self._process.connection.send(True)
        return float(self._process.receive())


def run_pairs(plain: Case | None, other: Case, num_rounds: int, after_round: Callable[[], None]) -> list[Round]:
    """Alternate steps of plain and another method.

    Args:
        plain: the plain case; None where it does not fit, then the other runs alone.
        other: the case compared with it.
        num_rounds: rounds to return, the first of which is the warm-up.
        after_round: called after every round.

    Raises:
        WorkerError: a worker failed.
    """
    rounds = []
    with StepWorker(other, start_case) as other_worker:
        if plain is None:
            for _ in range(num_rounds):
                rounds.append(Round(plain_seconds=None, other_seconds=other_worker.step(), plain_first=False))
                after_round()
            return rounds
        with StepWorker(plain, start_case) as plain_worker:
            for index in range(num_rounds):
                plain_first = index % 2 == 0
                if plain_first:
                    plain_seconds = plain_worker.step()
                    other_seconds = other_worker.step()
                else:
                    other_seconds = other_worker.step()
                    plain_seconds = plain_worker.step()
                rounds.append(Round(plain_seconds=plain_seconds, other_seconds=other_seconds, plain_first=plain_first))
                after_round()
    return rounds
