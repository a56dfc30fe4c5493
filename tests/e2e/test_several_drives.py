"""Experts on several drives, from the set-up's side: what is written, stopped, full, missing, damaged and measured.

Run as a program (`kill FOLDER`) it dies by SIGKILL inside of repack and mirror, goes on, and prints what was left.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_setup import ROOT, make_runner

from conf.schema import ConfigError
from runtime.errors import UserError, VerificationError
from runtime.experts.layout import ExpertKey, PackedLayout
from runtime.experts.spread import SpreadPack, open_pack
from stages import spot_check
from stages.core import Runner
from stages.doctor_record import read_record
from stages.opening import engine_files, setup_stages
from stages.stage import StageContext

LAYERS, EXPERTS, RECORD = 8, 64, 24576
EVERY = [ExpertKey(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
MODES = {
    "stripe": ("stripe", ["rate_gib_s:4.1", "rate_gib_s:2.0"]),
    "split": ("split", ["share:2", "share:1"]),
    "mirror": ("mirror", ["limit_gib:null", "limit_gib:null"]),
    "mirror of three": ("mirror", ["limit_gib:null", "limit_gib:0.004", "limit_gib:0.008"]),
}


@pytest.fixture(autouse=True, scope="module")
def _no_power_cut():
    """Nothing here is about what a power cut leaves: waiting for the disk would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        yield


def told(folder: Path, mode: str) -> list[str]:
    """Return the overrides of a mode, and make its drives' folders."""
    spread, drives = MODES[mode]
    for i in range(len(drives)):
        (folder / f"d{i}").mkdir(parents=True, exist_ok=True)
    listed = ",".join(f"{{folder:{folder}/d{i},{what}}}" for i, what in enumerate(drives))
    return [f"hw.drives=[{listed}]", f"hw.spread={spread}"]


def make(folder: Path, mode: str, *more: str) -> Runner:
    return make_runner(folder / "out", *told(folder, mode), *more)


def original_pack(outputs: Path) -> bytes:
    """Return all blocks as repack writes them to one drive, which has tests of its own."""
    return (make_runner(outputs).find("repack").root / "experts.bin").read_bytes()


def blocks(layout: PackedLayout, copy) -> bytes:
    """Read a record by plain file reads."""
    record = bytearray(layout.record_nbytes)
    for span in copy:
        with open(layout.files[span.file_idx], "rb") as f:
            f.seek(span.offset)
            record[span.dest : span.dest + span.nbytes] = f.read(span.nbytes)
    return bytes(record)


def check_whole(runner: Runner, wanted: bytes) -> SpreadPack:
    """Every copy of every expert is what a single drive would have; nothing unfinished is left."""
    layout = open_pack(runner.find("repack").root)
    assert isinstance(layout, SpreadPack)
    for number, key in enumerate(EVERY):
        for copy in layout.copies(key):
            assert blocks(layout, copy) == wanted[number * RECORD : (number + 1) * RECORD], key
    for place in layout.places:
        left = {path.name for path in Path(place).parent.iterdir()}
        assert left == {Path(place).name}, "nothing unfinished"
    return layout


@pytest.fixture(scope="module", params=sorted(MODES))
def packed(request, tmp_path_factory) -> tuple[Path, str]:
    """A folder in which the tiny model is packed on several drives in one mode: not to be changed."""
    folder = tmp_path_factory.mktemp("packed")
    make(folder, request.param).run(["repack"])
    return folder, request.param


def test_every_copy_is_what_one_drive_would_have(packed, outputs):
    folder, mode = packed
    runner = make(folder, mode)
    check_whole(runner, original_pack(outputs))
    one = make_runner(outputs).find("repack")
    for name in ("scalars.f32", "checksums.bin", "pack.json"):
        assert (runner.find("repack").root / name).read_bytes() == (one.root / name).read_bytes()
    assert not (runner.find("repack").root / "experts.bin").exists(), "the blocks are on the drives"
    assert runner.decide("repack").action == "skip"


def test_one_drive_is_what_it_was(outputs):
    """Without hw.drives neither the key nor the files know of any of this."""
    runner = make_runner(outputs)
    assert runner.stages["repack"].params(runner.cfg) == {"layout": 1}
    root = runner.find("repack").root
    assert {path.name for path in root.iterdir()} == {
        "experts.bin", "scalars.f32", "checksums.bin", "pack.json", "record.json",
    }  # fmt: skip
    assert type(open_pack(root)) is PackedLayout
    assert set(runner.find("repack").facts) == {"tensors", "record_nbytes"}


def test_spot_check_reads_every_copy_and_names_what_is_wrong(packed, tmp_path):
    folder, mode = packed
    runner = make(folder, mode, "spot_check.experts=all")
    runner.run(["spot_check"])
    assert runner.find("spot_check").facts["experts"] == len(EVERY)
    layout = open_pack(runner.find("repack").root)
    key = ExpertKey(5, 17)
    for copy in layout.copies(key):
        span = copy[-1]
        at = span.nbytes // 2 + 1
        flip(layout.files[span.file_idx], span.offset + at)
        ctx = StageContext(
            runner.cfg, runner.stages["spot_check"],
            {name: runner.find(name) for name in ("download", "repack")}, tmp_path, runner,
        )  # fmt: skip
        with pytest.raises(VerificationError) as caught:
            spot_check.run(ctx)
        flip(layout.files[span.file_idx], span.offset + at)
        said = caught.value.message
        assert "layer 5, expert 17" in said
        assert f"byte {span.offset + at:,} of {layout.files[span.file_idx]}" in said
        assert f"drive {span.file_idx} of hw.drives" in said
        part, start = next(
            (name, start)
            for name, (start, nbytes) in layout.shape.parts().items()
            if start <= span.dest + at < start + nbytes
        )
        assert f"{part}, byte {span.dest + at - start:,}:" in said


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as f:
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ 1]))


def test_damage_that_samples_show_is_told_before_a_token(packed):
    folder, mode = packed
    runner = make(folder, mode)
    layout = open_pack(runner.find("repack").root)
    flip(layout.files[1], 7)  # the first sample is at the beginning
    with pytest.raises(VerificationError, match="sampled checksum") as caught:
        runner.run(["repack"])
    flip(layout.files[1], 7)
    assert str(layout.files[1]) in caught.value.message
    runner.run(["repack"])


# ---- stopped, full, exchanged ----------------------------------------------------------------------------------------


class Stopped(BaseException):
    """A stop that no handler may catch."""


def stop_after(monkeypatch, count: int) -> None:
    real, left = StageContext.done, itertools.count(1)

    def done(ctx, unit, **facts):
        real(ctx, unit, **facts)
        if next(left) == count:
            raise Stopped

    monkeypatch.setattr(StageContext, "done", done)


@pytest.mark.parametrize("mode", ["split", "mirror"])
def test_a_drive_that_was_exchanged_meanwhile_is_noticed(tmp_path, outputs, monkeypatch, mode):
    runner = make(tmp_path, mode)
    runner.run(["download"])
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            runner.run(["repack"])
    assert runner.decide("repack").action == "resume"
    shutil.rmtree(tmp_path / "d1")
    (tmp_path / "d1").mkdir()
    runner.run(["repack"])
    check_whole(runner, original_pack(outputs))


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_on_one_drive_is_named(tmp_path, outputs, monkeypatch, call):
    """When the room is taken, or in the middle; the rest is kept and the same command goes on."""
    runner, real, left = make(tmp_path, "stripe"), getattr(os, call), itertools.count()

    first = 50 if call == "pwrite" else 0

    def full(fd, *args):
        is_there = str(tmp_path / "d1") in os.readlink(f"/proc/self/fd/{fd}")
        if is_there and next(left) >= first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(UserError) as caught:
            runner.run(["repack"])
    assert f"repack ran out of disk on drive 1 of hw.drives ({tmp_path / 'd1'})" in caught.value.message  # fmt: skip
    assert "No space left" in caught.value.message
    assert runner.find("repack") is None
    assert not list(tmp_path.glob("d*/tiny/*-drive?")), "no part has its name"
    assert runner.decide("repack").action == "resume"
    runner.run(["repack"])
    check_whole(runner, original_pack(outputs))


def test_too_little_room_is_said_before_the_first_byte(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=70 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(UserError) as caught:
        make(tmp_path, "mirror").run(["repack"])
    assert "repack 24.02 MiB" in caught.value.message
    assert not list(tmp_path.glob("d*/*"))


def test_limits_that_are_too_small(tmp_path):
    small = f"{{folder:{tmp_path},limit_gib:0.004}}"
    runner = make_runner(tmp_path / "out", f"hw.drives=[{small},{small}]")
    with pytest.raises(UserError, match=r"room for .*, the experts are 12\.00 MiB"):
        runner.run(["repack"])


def test_a_folder_that_is_not_mounted_is_not_made(tmp_path):
    runner = make(tmp_path, "stripe")
    (tmp_path / "d1").rmdir()
    with pytest.raises(UserError, match=r"hw\.drives\[1\]\.folder .*/d1 is not a folder") as caught:
        runner.run(["repack"])
    assert "mount the drive" in caught.value.hint
    assert not (tmp_path / "d1").exists()


def test_two_folders_of_one_drive_are_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        make(tmp_path, "split").run(["repack"])
    folders = f"({tmp_path}/d0 and {tmp_path}/d1)"
    assert f"drives 0 and 1 of hw.drives {folders} lie on the same drive" in caplog.text


def test_force_packs_anew_and_leaves_no_old_part(tmp_path, outputs):
    make(tmp_path, "mirror").run(["repack"])
    token = json.loads(next(tmp_path.glob("d0/tiny/*/part.json")).read_text())["token"]
    runner = make(tmp_path, "mirror", "force=[repack]")
    runner.run(["repack"])
    check_whole(runner, original_pack(outputs))
    assert json.loads(next(tmp_path.glob("d0/tiny/*/part.json")).read_text())["token"] != token


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hw.drives=[{folder:/a}]"], "hw.drives has one drive"),
        (["hw.drives=[{share:1},{}]"], r"hw.drives\[1\].share is missing"),
        (["hw.drives=[{rate_gib_s:1},{rate_gib_s:0}]"], r"hw.drives\[1\].rate_gib_s must be"),
        (["hw.drives=[{},{limit_gib:-1}]"], r"hw.drives\[1\].limit_gib must be"),
        (["hw.drives=[{},{}]", "hw.drive.window=32", "hw.drive.pieces=8"], "512 reader threads"),
        (["hw.drives=[{},{}]", "model=tiny_deepseek"], "set hw.spread=mirror"),
        (["hw.drives=[{},{}]", "hw.drive.process=true"], "hw.drive.process reads from one drive"),
        (["stages=[mirror]"], r"stages=\[mirror\] is not for model=tiny"),
        (
            [
                "hw.drives=[{},{}]",
                "hw.spread=mirror",
                "model=dense_synthetic",
                "model.weights=nvfp4",
            ],
            "not of model.weights=nvfp4",
        ),
    ],
)
def test_what_cannot_be_meant(tmp_path, overrides, said):
    with pytest.raises(ConfigError, match=said):
        make_runner(tmp_path, *overrides)


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_measures_each_drive(tmp_path, capsys):
    short = ("hw=cpu", "doctor.each_s=0.02", "doctor.sustained_s=0", "doctor.probe_gib=0.03")
    runner = make(tmp_path, "split", *short)
    runner.run_dir = tmp_path
    runner.run(["doctor"])
    record = json.loads((tmp_path / "doctor.json").read_text())
    rates = record["rates"]
    assert rates["drive_0_gib_s"] > 0
    assert rates["drive_1_gib_s"] > 0
    assert rates["drive_gib_s"] == pytest.approx(rates["drive_0_gib_s"] + rates["drive_1_gib_s"])
    found = {finding["what"]: finding for finding in record["findings"]}
    assert found["1: shared"]["verdict"] == "warn"
    assert "hw.drives[0]" in found["1: shared"]["value"]
    for i in range(2):
        assert str(tmp_path / f"d{i}") in found[f"{i}: place"]["value"]
        own = record["drives"][i]
        assert (own["drive"], own["folder"]) == (i, str(tmp_path / f"d{i}"))
        assert own["drive_gib_s"] == rates[f"drive_{i}_gib_s"]
    kept = read_record(runner, RECORD)
    assert {name: kept.rates[name] for name in rates} == rates
    assert not kept.notes
    assert read_record(make_runner(tmp_path / "out"), RECORD).rates["drive_gib_s"] in (
        rates["drive_0_gib_s"], rates["drive_1_gib_s"]
    ), "one drive, of the same kind"  # fmt: skip
    assert not list(tmp_path.rglob("*probe*"))
    (tmp_path / "d1").rmdir()
    with pytest.raises(UserError, match="1: place"):
        runner.run(["doctor"])
    capsys.readouterr()


# ---- shards ----------------------------------------------------------------------------------------------------------


def make_mirror(folder: Path, *more: str) -> Runner:
    (folder / "d1").mkdir(parents=True, exist_ok=True)
    drives = f"hw.drives=[{{}},{{folder:{folder}/d1}}]"
    return make_runner(folder / "out", "model=tiny_deepseek", drives, "hw.spread=mirror", *more)


def shards(tiny_qwen) -> dict[str, bytes]:
    found = (tiny_qwen.parent / "tiny-deepseek").glob("*.safetensors")
    return {path.name: path.read_bytes() for path in found}


def check_copies(runner: Runner, wanted: dict[str, bytes]) -> list[Path]:
    record = json.loads((runner.find("mirror").root / "drives.json").read_text())
    assert record["folders"][0] == ""
    folder = Path(record["folders"][1])
    for name in record["files"][1]:
        assert (folder / name).read_bytes() == wanted[name]
    assert {path.name for path in folder.iterdir()} == {*record["files"][1], "part.json"}
    return [folder / name for name in record["files"][1]]


def test_shards_are_mirrored_and_force_mends_a_copy(tmp_path, tiny_qwen):
    runner = make_mirror(tmp_path)
    runner.run(["mirror"])
    copies = check_copies(runner, shards(tiny_qwen))
    assert len(copies) == 8, "those with experts, and no other"
    times = {copy: copy.stat().st_mtime_ns for copy in copies}
    flip(copies[3], 1000)
    make_mirror(tmp_path, "force=[mirror]").run(["mirror"])
    check_copies(runner, shards(tiny_qwen))
    changed = [copy for copy in copies if copy.stat().st_mtime_ns != times[copy]]
    assert changed == [copies[3]], "the others were hashed, not copied"
    flip(copies[2], 0)
    with pytest.raises(VerificationError, match="sampled checksum"):
        runner.run(["mirror"])


def test_limits_that_leave_a_shard_nowhere_are_refused_before_a_copy(tmp_path):
    (tmp_path / "d1").mkdir()
    drive = f"{{folder:{tmp_path}/d1,limit_gib:0.004}}"
    more = (f"hw.drives=[{drive},{drive}]", "hw.spread=mirror")
    with pytest.raises(UserError, match=r"leave \d of 8 shards without a place"):
        make_runner(tmp_path / "out", "model=tiny_deepseek", *more).run(["mirror"])
    assert not list(tmp_path.glob("d1/*"))


def test_a_mirrored_shard_that_reads_back_wrong_never_gets_its_name(tmp_path, monkeypatch):
    from stages import mirror

    real = mirror._copy

    def damaged(source, target):
        digest = real(source, target)
        flip(target, 77)
        return digest

    monkeypatch.setattr(mirror, "_copy", damaged)
    with pytest.raises(VerificationError, match="reads back wrong"):
        make_mirror(tmp_path).run(["mirror"])
    assert not list(tmp_path.glob("d1/*/*/*.safetensors"))


def test_answers_from_mirrored_shards(tmp_path, monkeypatch, caplog):
    """With both copies, with the originals failing, and without the other drive: the tokens of one drive."""
    from runtime.engine import Engine
    from runtime.experts import spread_reader
    from runtime.sampling import SamplingParams
    from runtime.session import Session

    verified = ("cache.ram_gib=0", "cache.verify=true")
    runner = make_mirror(tmp_path, "hw=cpu", "hw.compute_threads=1", *verified)
    assert setup_stages(runner.cfg) == ("download", "mirror", "checksums")
    runner.run(["mirror", "checksums"])
    inputs = {name: runner.find(name) for name in setup_stages(runner.cfg)}

    def answer(files, preadv=os.preadv):
        defaults = (preadv,)
        with monkeypatch.context() as patch:
            patch.setattr(spread_reader.SpreadReader.__init__, "__defaults__", defaults)
            engine = Engine.open(runner.cfg, files)
        try:
            greedy = SamplingParams(temperature=0, max_tokens=6)
            pieces = Session(engine).generate([5, 6, 7, 8], greedy)
            return [piece.token for piece in pieces]
        finally:
            engine.close()

    single = make_runner(tmp_path / "out", "model=tiny_deepseek", "hw=cpu", "cache.ram_gib=0")
    engine = Engine.open(single.cfg, engine_files({"download": inputs["download"]}))
    try:
        pieces = Session(engine).generate([5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=6))
        wanted = [piece.token for piece in pieces]
    finally:
        engine.close()
    counts = [0, 0]

    def counted(fd, buffers, offset):
        counts["d1" in os.readlink(f"/proc/self/fd/{fd}")] += 1
        return os.preadv(fd, buffers, offset)

    def failing(fd, buffers, offset):
        if "d1" not in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    caplog.clear()
    assert answer(engine_files(inputs), counted) == wanted
    assert min(counts) > sum(counts) / 4, "both drives read"
    assert not caplog.records
    assert answer(engine_files(inputs), failing) == wanted
    assert "drive 0 of hw.drives" in caplog.text

    def turned(fd, buffers, offset):
        got = failing(fd, buffers, offset)
        buffers[0][got // 2] ^= 16
        return got

    with pytest.raises(VerificationError, match=r"came from .* or .* with wrong bytes") as caught:
        answer(engine_files(inputs), turned)
    assert "force=[mirror]" in caught.value.hint
    os.rename(tmp_path / "d1", tmp_path / "unplugged")
    assert answer(engine_files(inputs)) == wanted
    assert "drive 1 of hw.drives" in caplog.text


# ---- killed ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, __file__, "kill", str(folder)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'e2e'}"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_sigkill_anywhere_leaves_nothing_that_looks_finished(killed, outputs, tiny_qwen):
    pack, wanted = original_pack(outputs), shards(tiny_qwen)
    assert len(killed) == len(PLACES)
    for entry in killed:
        assert entry["died"], entry
        assert not entry["is_finished"], entry
        folder = Path(entry["folder"])
        if entry["mode"] == "shards":
            check_copies(make_mirror(folder), wanted)
        else:
            check_whole(make(folder, entry["mode"]), pack)


PLACES = [  # mode, what kills, at which call
    ("mirror", "done", 3),
    ("stripe", "pwrite", 200),
    ("split", "pwrite", 701),
    ("mirror of three", "posix_fallocate", 2),
    ("mirror of three", "rename", 2),
    ("shards", "rename", 3),
]


def _in_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def _kill_everywhere(root: Path) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda _fd: None  # a kill loses no written byte
    results = []
    for number, (mode, what, n) in enumerate(PLACES):
        folder = root / str(number)
        runner = make_mirror(folder) if mode == "shards" else make(folder, mode)
        stage = "mirror" if mode == "shards" else "repack"
        assert _in_child(lambda r=runner: r.run(["download"])) == 0
        status = _in_child(lambda r=runner, s=stage, w=what, k=n: _run_and_die(r, s, w, k))
        result = {
            "mode": mode, "at": f"{what} {n}", "folder": str(folder),
            "died": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
            "is_finished": runner.find(stage) is not None,
        }  # fmt: skip
        assert _in_child(lambda r=runner, s=stage: r.run([s])) == 0
        results.append(result)
    print(json.dumps(results))


def _run_and_die(runner: Runner, stage: str, what: str, n: int) -> None:
    left = n

    def dying(real: Callable[..., object], counts: Callable[..., bool]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            result = real(*args, **kwargs)
            left -= counts(*args)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    if what == "done":
        StageContext.done = dying(StageContext.done, lambda *_: True)
    elif what == "rename":  # of a part, or of a shard's copy
        Path.rename = dying(
            Path.rename, lambda path, *_: "/d" in str(path) and str(path).endswith(".partial")
        )
    else:
        on_drive = lambda fd, *_: "/d" in os.readlink(f"/proc/self/fd/{fd}")  # noqa: E731
        setattr(os, what, dying(getattr(os, what), on_drive))
    runner.run([stage])


if __name__ == "__main__":
    logging.disable()
    _kill_everywhere(Path(sys.argv[2]))
