"""The comparison of methods for large images: measurements and tables."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import peers
import pytest
import torch
from harness.peer_measure import EXACT, PeerReading, Question, check_outcome, measure_peer, save_reference
from harness.peer_report import (
    PeerRecord,
    Situation,
    best_own,
    comparison_tables,
    page_tables,
    peers_figure,
    write_page,
)
from harness.peers import METHODS, NETWORKS, PeerCase, _chosen_tile_px, build_peer, prepare_peer
from harness.workers import Refused, WorkerError
from rich.console import Console

_ROOT = Path(__file__).resolve().parents[2]
_TINY = PeerCase(network="VGG-like", height=64, width=64, method="plain", threads=1, channels=4)
_EAGER = ("plain", "plain, channels last", "checkpoint_sequential", "checkpoint each block")


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """The float64 step of the tiny case."""
    path = tmp_path / "reference.pt"
    save_reference(Question(case=replace(_TINY, method="checkpoint each block"), reference=path))
    return path


@pytest.mark.parametrize("method", [*_EAGER, "tiles of the SFT paper", "sft", "sft, channels last"])
def test_every_method_takes_the_same_step(method: str, reference: Path) -> None:
    reading = measure_peer(Question(case=replace(_TINY, method=method, budget_bytes=2**24), reference=reference))
    assert reading.error < 1e-4 and reading.num_untrained == 0 and reading.num_parameters == 26
    assert reading.metered_bytes is not None and reading.metered_bytes > 0
    assert (reading.plan is not None) == METHODS[method].is_budgeted


def test_a_reference_that_does_not_fit_is_taken_in_strips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def call(function: object, question: Question) -> None:
        tried.append(question.case.method)
        if question.case.method == tried[0]:
            raise WorkerError("does not fit", "22 GiB")

    monkeypatch.setattr(peers, "call_in_process", call)
    bench = peers.Bench(peers.parse_arguments(["--out", str(tmp_path)]), Console())
    bench.save_reference(_TINY, tmp_path / "reference.pt")
    assert bench.references == {"VGG-like, 64": "sft"} and len(tried) == 2


def test_running_statistics_of_checkpointed_norms_are_wrong() -> None:
    case = replace(_TINY, method="checkpoint each block", norms="trained")
    assert check_outcome(case).text.startswith("wrong")
    assert check_outcome(replace(case, method="sft")).text == "exact"
    outcome = check_outcome(replace(case, method="checkpoint each block", norms="frozen"))
    assert outcome.error is not None and outcome.error <= EXACT


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lightstream", None)
    with pytest.raises(Refused, match=r"lightstream.* is not installed: pip install"):
        prepare_peer(replace(_TINY, method="lightstream, tile chosen"), build_peer(_TINY))


def test_the_chosen_tiles_cover_the_image() -> None:
    for network in NETWORKS.values():
        for size in (1024, 2048, 4096):
            tile = _chosen_tile_px(network, size)
            assert tile % network.stride_px == 0 and tile <= size
    assert _chosen_tile_px(NETWORKS["VGG-like"], 1024) < 1024
    assert _chosen_tile_px(NETWORKS["ResNet-18"], 1024) == 1024  # its halo of 977 px allows no smaller tile


def _record(method: str, process_bytes: int, seconds: list[float]) -> PeerRecord:
    reading = PeerReading(
        process_bytes=process_bytes, metered_bytes=None, resident_bytes=1, error=1e-6, worst_tensor="x", num_parameters=2, num_untrained=0,
        prepare_seconds=0.0, step_seconds=0.0, plan=None,
    )  # fmt: skip
    return PeerRecord(case=replace(_TINY, method=method), reading=reading, seconds=seconds, plain_seconds=[2.0] * len(seconds))


def test_each_row_names_the_fastest_plan_in_its_memory() -> None:
    plain, small = _record("plain", 100 * 2**20, [2.0, 2.0, 2.0]), _record("checkpoint each block", 50 * 2**20, [3.0, 3.0, 3.0])
    own = [_record("sft", 90 * 2**20, [1.5]), _record("sft", 60 * 2**20, [1.0]), _record("sft", 40 * 2**20, [1.8])]
    assert best_own(plain, own) is own[1] and best_own(small, own) is own[2]
    refused = PeerRecord(case=replace(_TINY, method="lightstream, tile chosen"), status="refused", note="no tile")
    records = [plain, small, *own, refused]
    (table,) = comparison_tables(records)
    assert [row[-1] for row in table.rows[:2]] == ["0.50", "0.60"]
    assert "refused: no tile" in table.markdown()
    assert peers_figure(records) is not None and peers_figure([refused]) is None
    assert [PeerRecord.from_json(json.loads(json.dumps(asdict(record)))) for record in records] == records


def test_a_page_gets_its_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- tables -->\nold\n<!-- end of tables -->\n\nend\n")
    records = [_record("plain", 100 * 2**20, [2.0, 2.5, 3.0]), _record("sft", 90 * 2**20, [1.5])]
    for _ in range(2):
        write_page(page, "2026-01-01-cpu-peers", records, {"VGG-like, 1024²": {"sft": "exact"}})
    text = page.read_text()
    assert "old" not in text and text.count("| sft | exact |") == 1 and text.endswith("\nend\n")
    assert "| plain | 100.0 | 1.0e-06 | 2.50 | 90.0 | 1.50 | 0.60 |" in text


def test_the_page_has_the_newest_result() -> None:
    newest = max((_ROOT / "benchmarks" / "results").glob("*-cpu-peers.json"))
    raw = json.loads(newest.read_text())
    records = [PeerRecord.from_json(record) for record in raw["records"]]
    assert page_tables(newest.stem, records, raw["outcomes"]) in (_ROOT / "docs" / "benchmarks" / "peers.md").read_text()


def test_situations_and_arguments() -> None:
    case = Situation(text="", network="ResNet-18", size=1024, norms="trained").case("sft", 1, True)
    assert (case.height, case.double, case.norms) == (128, True, "trained")
    assert peers.parse_arguments(["--quick"]).sizes == [256]
    with pytest.raises(SystemExit):
        peers.parse_arguments(["--workers", "1"])
    assert torch.get_num_threads() == 1
