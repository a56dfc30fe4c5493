"""What `bench` shows, from numbers that can be checked by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from conf.schema import RunConfig
from runtime.head_shares import HeadReport, Timing
from runtime.stats import ExpertCounters, Rates, TokenStats, summarize
from runtime.units import GIB, MIB
from stages import bench_report
from stages.bench import _Around
from stages.bench_report import (
    Bench,
    Drafted,
    Repeat,
    document,
    draw,
    format_gate,
    format_report,
    spread,
    table_rows,
)

RATES = Rates(drive_gib_s=2.0, memory_gib_s=10.0)


def token(position: int, total_ms: float, copied_nbytes: int = 0) -> TokenStats:
    """Wait 4 ms for the drive, 1 ms for rows, 2 ms for the device; read 3 MiB and a page."""
    counters = ExpertCounters(hits=3, misses=1, read_nbytes=3 * MIB, copied_nbytes=copied_nbytes)
    return TokenStats(position, 1, total_ms, 4.0, 1.0, 2.0, counters, 4096)


def prompt(total_ms: float, nbytes: int) -> TokenStats:
    return TokenStats(8, 8, total_ms, 0.0, 0.0, 0.0, ExpertCounters(read_nbytes=nbytes), 0)


def repeat(total_ms: float, prompt_ms: float = 100.0, nbytes: int = 0, token_ids=(5, 6, 7, 8)):
    read = prompt(prompt_ms, nbytes)
    tokens = [token(10, total_ms, MIB), token(11, total_ms + 20, MIB)]
    return Repeat(
        read, [token(9, 900)], tokens, token_ids, summarize(read, tokens, 8, GIB // 100, RATES)
    )


@pytest.fixture
def bench() -> Bench:
    repeats = [repeat(30, 400, 5 * MIB), repeat(10), repeat(15, 200, 2 * MIB)]
    tokens = [token for r in repeats for token in r.tokens]
    total = summarize(None, tokens, 0, GIB // 100, RATES)
    return Bench(RATES, "RAM plan: all of it", repeats, total, None, 3 * GIB, 0)


def test_spread():
    assert spread([3.0, 9.0, 1.0, 5.0]) == (4.0, 1.0, 9.0)
    assert spread([7.0]) == (7.0, 7.0, 7.0)


def test_a_row_per_repeat_and_one_over_all(bench):
    rows = table_rows([r.summary for r in bench.repeats], bench.total)
    # 2 tokens of 30 and 50 ms; nearest rank: p50 of two is the first
    first = ("1", "25.00", "30.00", "50.00", "4.00", "1.00", "2.00", "33.00", "3.00", "1.00")
    assert rows[0][: len(first)] == first
    assert rows[0][len(first)] == "75.0%"
    assert [row[0] for row in rows] == ["1", "2", "3", "all"]
    assert rows[3][1] == "40.00 (25.00..50.00)"
    assert rows[3][3] == "50.00", "the percentiles are of all tokens"
    assert all(len(row) == len(bench_report.HEADER) for row in rows)
    # memory: 0.01 GiB at 10 GiB/s is 1 ms; drive: 3 MiB and a page at 2 GiB/s are 1.467 ms
    assert rows[0][-2:] == ("1.47", "3.7%")


def test_the_report(bench):
    lines = format_report(bench).splitlines()
    widths = {len(line) for line in lines[:5]}
    assert len(widths) == 1, "a table's lines are equally long"
    assert lines[0].split() == " ".join(bench_report.HEADER).split()
    assert lines[-4] == (
        "prompt: 8 tokens in 0.400 s (20.0 tok/s), 5.00 MiB read; "
        "later repeats 0.150 s (53.3 tok/s), 1.00 MiB read"
    )
    assert lines[-3] == "measured in this run: drive 2.00 GiB/s, memory 10.00 GiB/s"
    assert lines[-2] == "RAM plan: all of it"
    assert lines[-1] == "peak memory 3.00 GiB"


GATE = {
    "depth": 0, "is_learning": False, "is_off": True,
    "depths": [
        {"guesses": 0, "passes": 7, "ms_per_pass": 10.0, "mib_per_pass": 1.5, "tokens_per_pass": 1.0},
        {"guesses": 1, "passes": 0, "ms_per_pass": 0.0, "mib_per_pass": 0.0, "tokens_per_pass": 1.0},
        {"guesses": 2, "passes": 3, "ms_per_pass": 31.25, "mib_per_pass": 4.25, "tokens_per_pass": 1.75},
    ],
}  # fmt: skip


def test_drafts_beside_the_same_repeats_without_them(bench, tmp_path):
    report = {
        "source": "lookup",
        "depth": 2,
        "passes": 4,
        "proposed": 6,
        "accepted": 3,
        "gate": GATE,
    }
    plain = [repeat(40), repeat(60), repeat(80)]
    tokens = [token for r in plain for token in r.tokens]
    total = summarize(None, tokens, 0, GIB // 100, RATES)
    drafted = Drafted(report, plain, total)
    found = replace(bench, drafted=drafted)
    lines = format_report(found).splitlines()[6:9]
    assert lines[0].startswith(
        "drafts (lookup): 1.00 tokens per pass of the model, 3 of 6 guesses accepted (50%)"
    )
    assert lines[1] == (
        "in turn, with drafts 40.00 tok/s and 3.00 MiB read per token; "
        "without 14.29 tok/s and 3.00 MiB read per token"
    )
    assert lines[2] == (
        "gate: drafts lose here and are off; a pass with guesses 0: 10.0 ms, 1.50 MiB, 1.00 tokens; "
        "2: 31.2 ms, 4.25 MiB, 1.75 tokens"
    )
    told = json.loads(json.dumps(document(found, RunConfig(), tmp_path)))["drafted"]
    assert (told["accepted"], told["gate"], len(told["plain"]["repeats"])) == (3, GATE, 3)
    assert told["plain"]["total"]["read_nbytes_per_token"] == total.read_nbytes_per_token
    assert found.is_repeatable
    plain[1] = repeat(60, token_ids=(5, 6, 7, 9))
    assert not found.is_repeatable, "drafts that change a token are told"
    for gate, words in (
        ({**GATE, "is_learning": True}, "gate: still learning; "),
        ({**GATE, "is_off": False, "depth": 2}, "gate: 2 guesses a pass are fastest; "),
    ):
        assert format_gate(gate).startswith(words)


def test_joules_where_the_gpu_counts_them(bench):
    line = format_report(replace(bench, joules_per_token=12.345)).splitlines()[-1]
    assert line == "peak memory 3.00 GiB; 12.35 J a token, of the GPU's board alone"


def test_a_head_that_cpu_and_gpu_share(bench, tmp_path):
    head = HeadReport(1000, 250, 4, True, Timing(250, 9.0, 10.0), 40, 9.5, 10.5)
    shared = replace(bench, head=head)
    assert "head:" not in format_report(bench)
    assert "a token CPU 9.5 ms, GPU 10.5 ms" in format_report(shared)
    assert document(bench, RunConfig(), tmp_path)["head"] is None
    found = json.loads(json.dumps(document(shared, RunConfig(), tmp_path)))["head"]
    assert found["measured"] == {"rows": 250, "cpu_ms": 9.0, "gpu_ms": 10.0}
    assert (found["cpu_rows"], found["tokens"]) == (250, 40)


def test_one_repeat_has_no_later_ones(bench):
    assert "later" not in format_report(replace(bench, repeats=bench.repeats[:1]))


def test_a_gpu_has_two_more_numbers(bench):
    text = format_report(
        replace(bench, rates=replace(RATES, pcie_gib_s=50), peak_vram_nbytes=7 * GIB)
    )
    assert "memory 10.00 GiB/s, PCIe 50.00 GiB/s" in text
    assert text.endswith("peak memory 3.00 GiB, VRAM 7.00 GiB")


def test_a_repeat_has_the_drive_of_before_and_behind_it():
    class Engine:
        found = iter([1.0, 3.0])

        def measure_rates(self, seconds):
            return Rates(drive_gib_s=2.0, memory_gib_s=10.0)

        def measure_drive(self, seconds):
            return next(self.found)

    around, read = _Around(Engine()), [token(10, 30)]
    nothing = [replace(read[0], counters=ExpertCounters(), row_read_nbytes=0)]
    assert around.behind(read) == Rates(drive_gib_s=1.5, memory_gib_s=10.0)
    assert around.behind(nothing).drive_gib_s == 1.0, "nothing was read: nothing is measured"
    assert around.behind(read).drive_gib_s == 2.0
    assert around.drive_gib_s == [2.0, 1.0, 3.0]
    assert around.overall == Rates(drive_gib_s=2.0, memory_gib_s=10.0)


def test_a_drive_that_changed():
    rates, found = Rates(drive_gib_s=1.5, memory_gib_s=10.0), [1.0, 2.0, 1.5]
    line = "measured in this run: drive 1.50 GiB/s (1.00..2.00), memory 10.00 GiB/s"
    assert bench_report.format_rates(rates, found) == line
    assert "drive 1.50 GiB/s," in bench_report.format_rates(rates, found[2:])


def test_nothing_was_measured():
    assert bench_report.format_rates(Rates()) == "measured in this run: nothing"


def test_the_document_is_json_and_whole(bench, tmp_path):
    cfg = RunConfig()
    cfg.cache.ram_gib, cfg.hw.drive.window = 0, 3
    found = json.loads(json.dumps(document(bench, cfg, tmp_path)))
    assert found["changed"] == {"cache.ram_gib": 0, "hw.drive.window": 3}
    assert found["config"]["hw"]["drive"]["direct"] == "auto"
    assert found["config"]["cache"]["ram_gib"] == 0
    assert found["decode_tok_s"] == {"median": 40.0, "min": 25.0, "max": 50.0}
    assert found["rates"] == {"drive_gib_s": 2.0, "memory_gib_s": 10.0, "pcie_gib_s": 0.0}
    assert len(found["repeats"]) == 3
    first = found["repeats"][0]
    assert first["token_ids"] == [5, 6, 7, 8]
    assert [t["position"] for t in (*first["warmup"], *first["tokens"])] == [9, 10, 11]
    assert first["tokens"][0]["host_ms"] == 23
    assert first["tokens"][0]["read_nbytes"] == 3 * MIB + 4096
    assert first["prompt"]["num_tokens"] == 8
    assert found["total"]["decode_tok_s"] == pytest.approx(1000 / (170 / 6))
    assert found["versions"].keys() == {"python", "torch", "triton", "numpy"}
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["free_disk_nbytes"] > 0
    assert found["machine"]["gpu"] is None
    assert found["is_repeatable"] is True


def test_repeats_that_decode_other_tokens(bench):
    odd = replace(bench.repeats[1], token_ids=(5, 6, 7, 9))
    assert not replace(bench, repeats=[bench.repeats[0], odd]).is_repeatable


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(bench_report, "LIBRARIES", ("numpy", "no-such-library"))
    assert bench_report.versions()["no-such-library"] is None


def test_the_plot_is_a_png(bench, tmp_path):
    assert draw(bench, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["bench.png"]


def test_a_plot_of_one_token_without_a_floor(bench, tmp_path):
    one = replace(bench.repeats[0], tokens=bench.repeats[0].tokens[:1])
    total = summarize(None, one.tokens, 0, 0, Rates())
    assert draw(replace(bench, repeats=[one], total=total), tmp_path / "bench.png")


@pytest.mark.parametrize("name", ["matplotlib", "matplotlib.figure"])
def test_without_matplotlib_there_is_one_warning_and_no_plot(
    bench, tmp_path, monkeypatch, caplog, name
):
    for module in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert not draw(bench, tmp_path / "bench.png")
    (record,) = caplog.records
    assert "no plot: matplotlib" in record.getMessage()
    assert "pip install matplotlib" in record.getMessage()
    assert not list(tmp_path.iterdir())
