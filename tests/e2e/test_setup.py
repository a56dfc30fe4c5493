"""The set-up stages on the bundled model: right bytes, whatever stops them; damage is found and named.

Run as a program (`kill FOLDER`), this file is the process whose children are killed.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_setup import ROOT, SETUP, make_runner

from runtime.errors import UserError, VerificationError
from stages import spot_check
from stages.core import Runner
from stages.stage import StageContext

HIDDEN, INTERMEDIATE, NUM_LAYERS, NUM_EXPERTS = 256, 48, 8, 64  # of the bundled model
CODES, SCALES, RECORD = HIDDEN * INTERMEDIATE // 2, HIDDEN * INTERMEDIATE // 16, 24576
PREFIX = "model.language_model."


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, read by the format's own library."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


@pytest.fixture(scope="module")
def original(tiny_qwen) -> dict[str, torch.Tensor]:
    return checkpoint_tensors(tiny_qwen)


@pytest.fixture
def copy_of_outputs(outputs, tmp_path) -> Path:
    """A finished set-up that may be damaged."""
    return shutil.copytree(outputs, tmp_path / "copy")


@pytest.fixture
def snapshot(tiny_qwen, tmp_path) -> Path:
    """A snapshot folder that may be damaged."""
    return shutil.copytree(tiny_qwen, tmp_path / "snapshot")


def local_runner(snapshot: Path, tmp_path: Path, *overrides: str) -> Runner:
    return make_runner(
        tmp_path / "outputs", "model.source=local", f"model.path={snapshot}", *overrides
    )


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of a folder and of everything in it."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in (folder, *sorted(folder.rglob("*")))
    }


# ---- right bytes -------------------------------------------------------------------------------------------------


def test_every_expert_of_the_pack_is_the_checkpoints(outputs, original):
    pack = make_runner(outputs).find("repack").root
    blocks = (pack / "experts.bin").read_bytes()
    scalars = (pack / "scalars.f32").read_bytes()
    checksums = (pack / "checksums.bin").read_bytes()
    assert len(blocks) == NUM_LAYERS * NUM_EXPERTS * RECORD
    for number in range(NUM_LAYERS * NUM_EXPERTS):
        layer, expert = divmod(number, NUM_EXPERTS)
        name = f"{PREFIX}layers.{layer}.mlp.experts.{expert}."
        wanted, values = b"", []
        for tail in ("weight", "weight_scale"):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                tensor = original[f"{name}{projection}.{tail}"]
                wanted += tensor.view(torch.uint8).numpy().tobytes()
        for tail in ("weight_scale_2", "input_scale"):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                tensor = original.get(f"{name}{projection}.{tail}", torch.tensor(math.nan))
                values.append(tensor.item())
        block = blocks[number * RECORD : (number + 1) * RECORD]
        assert block == wanted.ljust(RECORD, b"\0"), name
        assert scalars[number * 24 : number * 24 + 24] == struct.pack("<6f", *values), name
        assert checksums[number * 8 : number * 8 + 8] == blake3(block).digest(length=8), name


def test_residents_are_the_checkpoints_and_nothing_is_lost(outputs, original):
    path = make_runner(outputs).find("residents").root / "residents.safetensors"
    found = load_file(path)
    for name, tensor in found.items():
        full = name if name in original else f"{PREFIX}{name}"
        assert tensor.dtype == original[full].dtype, name
        assert torch.equal(tensor, original[full]), name
    rest = set(original) - set(found) - {f"{PREFIX}{name}" for name in found}
    rest = {name for name in rest if ".mlp.experts." not in name and "ngram_embedding" not in name}
    assert rest == set(), "neither resident nor streamed"


def test_tables_point_at_the_rows(outputs, tiny_qwen, original):
    tables = json.loads((make_runner(outputs).find("residents").root / "tables.json").read_text())
    assert len(tables["parts"]) == 4
    for i, (file, offset, nbytes) in enumerate(tables["parts"]):
        name = f"{PREFIX}layers.1.ple.ple_embedding.ngram_embedding.shard_{i}.weight"
        raw = (tiny_qwen / file).read_bytes()[offset : offset + nbytes]
        assert raw == original[name].view(torch.uint8).numpy().tobytes()
    assert nbytes == tables["rows_per_part"] * tables["row_nbytes"]


def test_fp8_rows_are_near_the_released_matrices(outputs, tmp_path, original):
    shutil.copytree(outputs, tmp_path / "o")
    runner = make_runner(tmp_path / "o", "model.deltanet=fp8_rows")
    steps = dict(runner.explain(["residents"]))
    assert str(steps["residents"]) == "run: deltanet bf16 -> fp8_rows"
    assert str(steps["download"]) == "skip: record matches"
    runner.run(["residents"])
    found = load_file(runner.find("residents").root / "residents.safetensors")
    quantised = [name for name in found if f"{name}_scale" in found]
    assert len(quantised) == 3 * 6, "three matrices in each of six DeltaNet layers"
    for name in quantised:
        wanted, scale = original[f"{PREFIX}{name}"].float(), found[f"{name}_scale"][:, None]
        error = (found[name].float() * scale - wanted).abs()
        # E4M3 has three bits behind the point, and steps of 2**-9 below its normal numbers
        assert (error <= wanted.abs() * 2**-4 + scale * 2**-10).all(), name
    assert (
        (runner.find("residents").facts["nbytes"])
        < 0.9 * make_runner(outputs).find("residents").facts["nbytes"]
    )


def test_nothing_is_done_twice_and_only_what_depends_is_done_again(outputs):
    assert {str(d) for _, d in make_runner(outputs).explain(SETUP)} == {"skip: record matches"}
    checks = dict(make_runner(outputs, "spot_check.experts=all").explain(SETUP))
    assert str(checks.pop("spot_check")) == "run: experts 64 -> all"
    assert {str(d) for d in checks.values()} == {"skip: record matches"}
    for override in ("hw.ram_gib=1", "cache=none", "prefetch=none", "model.context_tokens=64"):
        decisions = make_runner(outputs, override).explain(SETUP)
        assert {d.action for _, d in decisions} == {"skip"}, (
            f"{override} changes no byte on the disk"
        )


# ---- stopped -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> list[dict]:
    """What the kill program saw, one entry per place of death."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, __file__, "kill", str(folder)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'e2e'}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_sigkill_anywhere_costs_at_most_one_unit_and_no_byte(killed, outputs, fault_row):
    runner = make_runner(outputs)
    assert {entry["stage"] for entry in killed} == {"repack", "residents"}
    wanted = {
        name: {
            file: entry["blake3"]
            for file, entry in runner.find(name).record["files"].items()
            if not file.startswith("/")
        }
        for name in ("repack", "residents")
    }
    wanted["repack"]["experts.bin"] = blake3(
        (runner.find("repack").root / "experts.bin").read_bytes()
    ).hexdigest(length=16)
    for entry in killed:
        where = f"{entry['stage']} killed at {entry['at']}"
        assert entry["died"], where
        assert not entry["finished_name"], f"{where}: a finished name"
        done, total = entry["units_done"], entry["units_total"]
        assert f"{entry['stage']}: resume: {done} of {total} units are done" in entry["log"], (
            f"{where}: {entry['log']}"
        )
        assert entry["units_run"] == total - done, where
        assert entry["files"] == wanted[entry["stage"]], where
    fault_row(
        f"kill -9 in {len(killed)} places of repack and residents", "resume: N of M units are done",
        "the same bytes as without",
    )  # fmt: skip


def test_a_full_disk_when_the_room_is_taken(outputs, tmp_path, monkeypatch, fault_row):
    def no_room(_fd: int, _offset: int, _nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    runner = make_runner(tmp_path)
    for stage in ("repack", "residents"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", no_room)
            with pytest.raises(UserError) as caught:
                runner.run([stage])
        assert f"{stage} ran out of disk in {runner.root}" in caught.value.message
        assert "No space left on device" in caught.value.message
        runner.run([stage])
        assert (
            runner.find(stage).record["digest"] == make_runner(outputs).find(stage).record["digest"]
        )
    fault_row("the disk is full when room is taken", caught.value.message, "then it ends well")


def test_too_little_disk_is_said_with_numbers_before_repacking(tmp_path, monkeypatch, fault_row):  # fmt: skip
    usage = shutil.disk_usage(tmp_path)._replace(free=70 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    runner = make_runner(tmp_path)
    with pytest.raises(UserError) as caught:
        runner.run(SETUP)
    # 512 blocks of 24 KiB with a checksum and six scalars each, and the residents as released
    assert "70.00 MiB free" in caught.value.message
    assert "repack 12.02 MiB" in caught.value.message
    assert "residents 12.3" in caught.value.message
    assert not [path for path in runner.root.rglob("*") if path.name.startswith("experts")]
    fault_row("too little disk for the set-up", caught.value.message, "not a byte written")


# ---- damage ------------------------------------------------------------------------------------------------------


def check_pack(runner: Runner, out: Path) -> None:
    """Run the check itself: the runner would notice some of these harms before, by its sampled checksums."""
    out.mkdir(exist_ok=True)
    inputs = {name: runner.find(name) for name in ("download", "repack")}
    spot_check.run(StageContext(runner.cfg, spot_check.STAGE, inputs, out, runner))


@pytest.mark.parametrize(
    ("layer", "expert", "at", "part", "offset"),
    [
        (0, 0, 0, "gate codes", 0),
        (0, 63, CODES, "up codes", 0),
        (3, 17, 3 * CODES - 1, "down codes", CODES - 1),
        (5, 5, 3 * CODES, "gate scales", 0),
        (5, 6, 3 * CODES + 2 * SCALES - 1, "up scales", SCALES - 1),
        (7, 63, 3 * CODES + 2 * SCALES, "down scales", 0),
        (7, 63, RECORD - 1, "padding", None),
        (4, 0, 3 * (CODES + SCALES), "padding", None),
    ],
)
def test_one_flipped_bit_is_found_and_named(
    copy_of_outputs, tmp_path, layer, expert, at, part, offset
):
    runner = make_runner(copy_of_outputs, "spot_check.experts=all")
    path = runner.find("repack").root / "experts.bin"
    in_file = (layer * NUM_EXPERTS + expert) * RECORD + at
    with open(path, "r+b") as f:
        f.seek(in_file)
        (byte,) = f.read(1)
        f.seek(in_file)
        f.write(bytes([byte ^ 1]))
    with pytest.raises(VerificationError) as caught:
        check_pack(runner, tmp_path / "out")
    message = caught.value.message
    assert f"layer {layer}, expert {expert}, {part}" in message
    if offset is not None:
        assert f"byte {offset:,}:" in message
    assert f"the pack has 0x{byte ^ 1:02X}, the checkpoint 0x{byte:02X}" in message
    assert f"byte {in_file:,} of {path}" in message
    assert "force=[repack]" in caught.value.hint
    assert caught.value.exit_code == 3


def test_damage_between_the_samples_is_found_and_the_hint_mends_it(copy_of_outputs, fault_row):
    """Through the runner, at a place that its samples do not see; then the hint's command is typed."""
    runner = make_runner(copy_of_outputs, "spot_check.experts=all")
    path = runner.find("repack").root / "experts.bin"
    with open(path, "r+b") as f:
        f.seek(100 * RECORD + 5)
        f.write(b"\xa5\x5a")
    assert runner.decide("repack").action == "skip"
    with pytest.raises(
        VerificationError, match=r"layer 1, expert 36, gate codes, byte [56]:"
    ) as caught:
        runner.run(["spot_check"])
    assert runner.find("spot_check") is None, "no record of a check that failed"
    make_runner(copy_of_outputs, "spot_check.experts=all", "force=[repack]").run(["spot_check"])
    assert runner.find("spot_check").facts["experts"] == 512
    fault_row("two bytes of the pack change", caught.value.message, "repacked, right again")


@pytest.mark.parametrize(
    ("file", "at", "message"),
    [
        ("scalars.f32", (2 * NUM_EXPERTS + 9) * 24 + 4, "layer 2, expert 9, global scale of up"),
        ("scalars.f32", 511 * 24 + 8, "layer 7, expert 63, global scale of down"),
        ("checksums.bin", (6 * NUM_EXPERTS + 1) * 8 + 7, "layer 6, expert 1: the block is right"),
    ],
)
def test_wrong_scalars_and_checksums_are_found(copy_of_outputs, tmp_path, file, at, message):
    runner = make_runner(copy_of_outputs, "spot_check.experts=all")
    with open(runner.find("repack").root / file, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))
    assert runner.decide("repack").reason.startswith(f"{file} is not what was written")
    with pytest.raises(VerificationError, match=message):
        check_pack(runner, tmp_path / "out")


def test_a_shortened_pack(copy_of_outputs, tmp_path, fault_row):
    runner = make_runner(copy_of_outputs)
    path = runner.find("repack").root / "experts.bin"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(
        UserError, match=r"experts\.bin has 12,582,911 bytes, 12,582,912 were written"
    ) as caught:
        check_pack(runner, tmp_path / "out")
    assert runner.decide("repack").action == "run"
    fault_row("the pack is one byte short", caught.value.message, "repacked at the next run")


@pytest.mark.parametrize("wanted", [1, 8, 64, 511, 512, 9999])
def test_how_many_experts_are_checked(outputs, wanted):
    layout = spot_check.PackedLayout.open(make_runner(outputs).find("repack").root)
    chosen = spot_check.choose(str(wanted), 0, layout)
    assert (
        len(chosen) == len(set(chosen)) == min(512, max(wanted, len(chosen) if wanted < 10 else 0))
    )
    assert {(0, 0), (7, 63)} <= set(chosen)
    assert {key.layer for key in chosen} == set(range(8)), "one of every layer at least"
    assert chosen == sorted(chosen), "in the order of the file"
    if 10 <= wanted < 511:
        assert chosen != spot_check.choose(str(wanted), 1, layout)


# ---- snapshots ---------------------------------------------------------------------------------------------------


def test_a_truncated_shard_is_refused_by_name(snapshot, tmp_path):
    shard = snapshot / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    runner = local_runner(snapshot, tmp_path)
    with pytest.raises(UserError) as caught:
        runner.run(["repack"])
    assert f"{shard.name} is truncated" in caught.value.message
    assert "4,206,916" in caught.value.message, "the size that was found"
    assert runner.find("download") is None


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_missing_file_is_named_before_anything_is_made(snapshot, tmp_path, name):
    (snapshot / name).unlink()
    with pytest.raises(UserError, match=f"has no {name}"):
        local_runner(snapshot, tmp_path).run(SETUP)


def test_missing_shards_are_all_named(snapshot, tmp_path):
    for i in (1, 3):
        (snapshot / f"model-0000{i}-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"2 of 4 .*missing.*model-00001-of-00003.*model-00003-of"):
        local_runner(snapshot, tmp_path).run(SETUP)


def test_a_config_that_is_no_json(snapshot, tmp_path):
    (snapshot / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        local_runner(snapshot, tmp_path).run(SETUP)


def test_another_architecture_is_refused_by_key(snapshot, tmp_path):
    config = json.loads((snapshot / "config.json").read_text())
    config["model_type"] = "llama"
    (snapshot / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model_type='llama'"):
        local_runner(snapshot, tmp_path).run(SETUP)


def _flip_in_file(path: Path, offset: int) -> None:
    before = path.stat()
    with open(path, "r+b") as f:
        f.seek(offset)
        (byte,) = f.read(1)
        f.seek(offset)
        f.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))


def test_a_shard_changed_after_the_check_is_hashed_and_packed_again(snapshot, tmp_path):
    runner = local_runner(snapshot, tmp_path)
    runner.run(["repack"])
    shard = snapshot / "model-00002-of-00003.safetensors"
    with safe_open(shard, "pt") as f:
        codes = next(name for name in sorted(f.keys()) if name.endswith("gate_proj.weight"))
    header_nbytes = struct.unpack("<Q", shard.read_bytes()[:8])[0]
    header = json.loads(shard.read_bytes()[8 : 8 + header_nbytes])
    _flip_in_file(shard, 8 + header_nbytes + header[codes]["data_offsets"][0])
    assert str(runner.decide("download")) == f"run: {shard} was written after it was checked"
    old = runner.find("repack").record["digest"]
    runner.run(["repack"])
    assert runner.find("repack").record["digest"] != old
    assert (
        runner.find("repack").record["inputs"]["download"]
        == runner.find("download").record["digest"]
    )


def test_a_shard_changed_while_the_check_was_stopped_is_hashed_anew(
    snapshot, tmp_path, monkeypatch
):
    """The hash in the record must be that of the file whose size and time stand beside it."""
    runner = local_runner(snapshot, tmp_path)
    shard, real = snapshot / "model-00001-of-00003.safetensors", StageContext.done

    def stop(ctx: StageContext, unit: str, **facts: object) -> None:
        real(ctx, unit, **facts)
        if unit == shard.name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StageContext, "done", stop)
        with pytest.raises(KeyboardInterrupt):
            runner.run(["download"])
    _flip_in_file(shard, shard.stat().st_size - 1)
    assert runner.decide("download").action == "resume"
    runner.run(["download"])
    recorded = runner.find("download").record["files"][str(shard)]["blake3"]
    assert recorded == blake3(shard.read_bytes()).hexdigest(length=16)


def test_a_hub_cache_of_links_into_blobs(tiny_qwen, tmp_path):
    """As huggingface_hub lays it out: the snapshot's files are links to files named by their hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(tiny_qwen.iterdir())):
        shutil.copyfile(path, blobs / f"{i:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{i:040x}")
    runner = local_runner(snapshot, tmp_path)
    runner.run(["repack"])
    assert local_runner(snapshot, tmp_path).decide("download").action == "skip"
    shard = (snapshot / "model-00003-of-00003.safetensors").resolve()
    _flip_in_file(shard, shard.stat().st_size - 1)
    assert runner.decide("download").action == "run"


def test_a_snapshot_is_never_written_to(snapshot, tmp_path):
    """Also one that cannot be: 0555, as a shared or mounted model folder is."""
    for path in snapshot.iterdir():
        path.chmod(0o444)
    snapshot.chmod(0o555)
    try:
        before = states(snapshot)
        local_runner(snapshot, tmp_path).run(SETUP)
        assert states(snapshot) == before
    finally:
        snapshot.chmod(0o755)


def test_the_bundled_model_is_not_written_to(outputs, tiny_qwen, tmp_path):
    before = states(tiny_qwen)
    make_runner(tmp_path).run(["download"])
    assert states(tiny_qwen) == before


# ---- the killed process ------------------------------------------------------------------------------------------


def _in_child(function: Callable[[], None]) -> int:
    """Run in a fork; return its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return os.waitpid(child, 0)[1]


def _kill_everywhere(root: Path) -> None:
    """Kill repack and residents after n units and inside of units, run them again, print what was seen.

    Everything runs in forks of this process, which itself starts no thread: torch is loaded once.
    """
    torch.set_num_threads(1)
    os.fsync = lambda _fd: None  # a kill loses no written byte; a power cut is not what is tested
    start = root / "start"
    assert _in_child(lambda: make_runner(start).run(["download"])) == 0
    picks = random.Random(3)
    places = [("repack", "unit", n) for n in (1, 8)]
    places += [("repack", "write", n) for n in (1, picks.randrange(2, 8 * 66))]
    places += [("residents", "unit", n) for n in (1, picks.randrange(2, 9))]
    places += [("residents", "write", n) for n in (2, picks.randrange(3, 150))]
    results = []
    for i, (stage, what, n) in enumerate(places):
        outputs = shutil.copytree(start, root / str(i))
        status = _in_child(lambda o=outputs, s=stage, w=what, k=n: _run_and_die(o, s, w, k))
        runner = make_runner(outputs)
        folder = runner.folder(stage)
        partial = folder.with_name(folder.name + ".partial")
        journal = partial / "journal.jsonl"
        result = {
            "stage": stage,
            "at": f"{what} {n}",
            "died": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
            "finished_name": folder.exists(),
            "units_done": len(journal.read_text().splitlines()) if journal.exists() else None,
            "units_total": json.loads((partial / "plan.json").read_text())["num_units"],
        }
        seen = outputs / "seen.json"
        status = _in_child(lambda o=outputs, s=stage, f=seen: _resume(o, s, f))
        assert status == 0
        result |= json.loads(seen.read_text())
        results.append(result)
        shutil.rmtree(outputs)
    print(json.dumps(results))


def _run_and_die(outputs: Path, stage: str, what: str, n: int) -> None:
    left = n

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            result = real(*args, **kwargs)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    if what == "unit":
        StageContext.done = dying(StageContext.done)
    else:
        real, name = (
            os.pwrite,
            {"repack": "experts.bin", "residents": "residents.safetensors"}[stage],
        )
        dies = dying(real)

        def pwrite(fd: int, data: object, offset: int) -> int:
            if Path(os.readlink(f"/proc/self/fd/{fd}")).name != name:
                return real(fd, data, offset)
            half = memoryview(data)[: max(1, len(data) // 2)]
            return dies(fd, half, offset) if left == 1 else dies(fd, data, offset)

        os.pwrite = pwrite
    make_runner(outputs).run([stage])


def _resume(outputs: Path, stage: str, seen: Path) -> None:
    log = outputs / "log.txt"
    logging.basicConfig(filename=log, level=logging.INFO, force=True)
    units, real = [], StageContext.done

    def done(ctx: StageContext, unit: str, **facts: object) -> None:
        units.append(unit)
        real(ctx, unit, **facts)

    StageContext.done = done
    runner = make_runner(outputs)
    runner.run([stage])
    root = runner.find(stage).root
    files = {
        path.name: blake3(path.read_bytes()).hexdigest(length=16)
        for path in root.iterdir()
        if path.name != "record.json"
    }
    seen.write_text(json.dumps({"units_run": len(units), "files": files, "log": log.read_text()}))


if __name__ == "__main__":
    {"kill": _kill_everywhere}[sys.argv[1]](Path(sys.argv[2]))
