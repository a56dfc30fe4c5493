"""`doctor` on this machine with short measurements, and on made-up ones: every verdict, with what to do about it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_setup import make_runner

from runtime import cgroups, drives, hardware
from runtime.drives import DriveRate
from runtime.errors import UserError
from runtime.mounts import Mount
from runtime.units import GIB
from stages import doctor, doctor_drives, doctor_gpu, doctor_host, opening
from stages.core import Runner
from stages.doctor_record import Record
from stages.doctor_report import Report, check_steadiness

SHORT = ("hw=cpu", "doctor.each_s=0.02", "doctor.sustained_s=0", "doctor.probe_gib=0.1")


def run_doctor(runner: Runner, run_dir) -> dict:
    runner.run_dir = run_dir
    runner.run(["doctor"])
    return json.loads((run_dir / "doctor.json").read_text())


def rows(report: Report) -> dict[str, tuple[str, str]]:
    return {f"{f.area}: {f.what}": (f.verdict, f.advice) for f in report.findings}


def test_this_machine_and_then_plan(tmp_path, capsys):
    runner = make_runner(tmp_path, *SHORT)
    record = run_doctor(runner, tmp_path)
    out = capsys.readouterr().out
    areas = {finding["area"] for finding in record["findings"]}
    assert areas == {"software", "limits", "CPU", "memory", "GPU", "drive", "model"}
    assert record["rates"]["drive_gib_s"] > 0
    assert record["rates"]["ram_gib_s"] > 0
    assert len(out.splitlines()) > len(record["findings"])
    for finding in record["findings"]:
        assert finding["verdict"] in ("ok", "warn", "bad")
        assert bool(finding["advice"]) == (finding["verdict"] != "ok"), finding
    assert not list(tmp_path.rglob("*probe*")), "the probe file is gone"
    runner.run(["plan"])
    plan = json.loads((tmp_path / "plan.json").read_text())
    disk = next(x for x in plan["lines"] if x["law"] == "L14")["inputs"]["disk_bw"]
    assert disk == record["rates"]["drive_gib_s"] * GIB


def test_a_model_that_is_here_is_measured_on_its_own_files(tmp_path, monkeypatch):
    runner = make_runner(tmp_path, *SHORT)
    runner.run(["repack"])
    read = []
    real = drives.measure_rate

    def measure(files, *args):
        read.extend(files)
        return real(files, *args)

    monkeypatch.setattr(drives, "measure_rate", measure)
    monkeypatch.setattr(doctor_drives, "LEAST_FILE_NBYTES", 1)
    run_doctor(runner, tmp_path)
    assert {path.name for path in read} == {"experts.bin"}


def test_something_bad_ends_with_code_1_after_the_table(tmp_path, monkeypatch, capsys):
    spinning = Mount("/", "ext4", "sda", is_rotational=True)
    monkeypatch.setattr(doctor_drives, "find_mount", lambda _path: spinning)
    with pytest.raises(UserError, match="drive: experts"):
        run_doctor(make_runner(tmp_path, *SHORT), tmp_path)
    out = capsys.readouterr().out
    assert "put it on an NVMe drive" in out
    assert (tmp_path / "doctor.json").exists()


@pytest.mark.parametrize(
    ("mount", "verdict", "said"),
    [
        (Mount("/", "ext4", "nvme0n1", False, "X", "32.0 GT/s PCIe x4", "32.0 GT/s PCIe x4"), "ok", ""),
        (Mount("/", "ext4", "nvme0n1", False, "X", "8.0 GT/s PCIe x2", "32.0 GT/s PCIe x4"), "warn", "another slot"),
        (Mount("/", "ext4", "vda", True), "ok", ""),
        (Mount("/", "ext4", "sda", True), "bad", "NVMe"),
        (Mount("/", "9p", "C:"), "bad", "WSL"),
        (Mount("/", "nfs4", "server:/x"), "warn", "local drive"),
        (Mount("/", "fuse.sshfs", "x"), "warn", "local drive"),
        (Mount("/", "tmpfs", "tmpfs"), "warn", "RAM"),
    ],
)  # fmt: skip
def test_what_the_experts_lie_on(tmp_path, mount, verdict, said):
    report = Report()
    doctor_drives.check_place(report, "experts", tmp_path, mount, is_read=True)
    found, advice = rows(report)["drive: experts"]
    assert found == verdict
    assert said in advice


def test_a_drive_that_throttles_counts_with_what_it_holds(tmp_path, monkeypatch, make_config):
    slowing = (4.0, 4.1, 3.9, 2.0, 1.0, 1.1)
    monkeypatch.setattr(
        doctor_drives, "measure_rate", lambda *_: DriveRate(2, 4, 3.0, True, slowing)
    )
    report = Report(rates={"drive_gib_s": 4.0})
    cfg = make_config()
    doctor_drives._check_sustained(report, cfg, [], 4096, DriveRate(2, 4, 4.0, True))
    assert rows(report)["drive: held for 20 s"][0] == "warn"
    assert report.rates["drive_gib_s"] == pytest.approx(1.05)
    monkeypatch.setattr(
        doctor_drives, "measure_rate", lambda *_: DriveRate(2, 4, 4.0, True, (4.0,) * 6)
    )
    report = Report(rates={"drive_gib_s": 4.0})
    doctor_drives._check_sustained(report, cfg, [], 4096, DriveRate(2, 4, 4.0, True))
    assert rows(report)["drive: held for 20 s"][0] == "ok"


def test_a_better_setting_is_named(tmp_path, monkeypatch, make_config):
    grid = [DriveRate(1, 1, 1.0, True), DriveRate(2, 4, 2.0, True), DriveRate(4, 2, 4.0, True)]
    ceiling = [DriveRate(8, 1, 3.5, True)]
    monkeypatch.setattr(
        doctor_drives, "measure_grid", lambda *args: ceiling if args[3] == (8,) else grid
    )
    path = tmp_path / "x"
    path.write_bytes(bytes(8192))
    report = Report()
    settings = {"doctor.sustained_s": 0, "hw.drive.window": 2, "hw.drive.pieces": 4}
    doctor_drives._check_rates(report, make_config(**settings), [path], 4096)
    verdict, advice = rows(report)["drive: reads as configured"]
    assert verdict == "warn"
    assert "hw.drive.window=4 hw.drive.pieces=2" in advice
    assert report.rates["drive_gib_s"] == 4.0


def test_a_drive_that_cannot_be_read(tmp_path, monkeypatch):
    def broken(*_args) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor_drives, "measure_grid", broken)
    with pytest.raises(UserError, match="drive: reading"):
        run_doctor(make_runner(tmp_path, *SHORT), tmp_path)
    assert not list(tmp_path.rglob("*probe*"))


@pytest.mark.parametrize(
    ("versions", "capability", "what", "verdict"),
    [
        ({"tilelang": "0.1.8"}, (12, 0), "software: tilelang", "bad"),
        ({"tilelang": "0.1.8"}, (9, 0), "software: tilelang", None),
        ({"tilelang": "0.1.9"}, (12, 0), "software: tilelang", None),
        ({"triton": None}, (12, 0), "software: triton", "bad"),
    ],
)
def test_known_bad_software(monkeypatch, versions, capability, what, verdict):
    import torch

    real = doctor_host._version
    monkeypatch.setattr(
        doctor_host, "_version", lambda n: versions[n] if n in versions else real(n)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    report = Report()
    doctor_host.check_software(report, has_gpu=True)
    assert rows(report).get(what, (None,))[0] == verdict


@pytest.mark.parametrize(
    ("number", "verdict"), [("float8_e8m0fnu", "bad"), ("float4_e2m1fn_x2", "warn")]
)
def test_a_torch_without_small_numbers(monkeypatch, number, verdict):
    import torch

    monkeypatch.delattr(torch, number)
    report = Report()
    doctor_host.check_software(report, has_gpu=False)
    assert rows(report)["software: torch"][0] == verdict


def test_swap_and_a_cpu_quota_are_warned_of(monkeypatch):
    monkeypatch.setattr(hardware, "swap_used_nbytes", lambda: 2 * GIB)
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: 0.5)
    report = Report()
    doctor_host.check_memory(report, [])
    doctor_host.check_cores(report)
    assert rows(report)["memory: swap"][0] == "warn"
    assert rows(report)["CPU: container"][0] == "warn"


@pytest.mark.parametrize(
    ("granted", "verdict", "said"),
    [(2**40, "ok", "256.00 MiB of 256.00 MiB"), (130 * 2**20, "warn", "64.00 MiB of 256.00 MiB"), (1, "bad", "0 B of")],
)  # fmt: skip
def test_how_much_may_be_pinned(granted, verdict, said):
    class System:
        used = 0

        def register(self, _address: int, nbytes: int) -> bool:
            if System.used + nbytes > granted:
                return False
            System.used += nbytes
            return True

        def unregister(self, _address: int) -> None:
            """Nothing to undo."""

        def check(self) -> None:
            """All is well."""

    System.used = 0
    report = Report()
    doctor_gpu.check_pinning(report, 256 * 2**20, System())
    (found,) = report.findings
    assert (found.verdict, said in found.value) == (verdict, True)
    assert ("shrinks" in found.advice) == (verdict != "ok")


def test_a_narrow_link_of_the_card(tmp_path):
    class Card:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 1, 0

    folder = tmp_path / "0000:01:00.0"
    folder.mkdir()
    values = {
        "current_link_speed": "32 GT/s",
        "current_link_width": "4",
        "max_link_speed": "32 GT/s",
        "max_link_width": "16",
    }
    for name, value in values.items():
        (folder / name).write_text(value)
    for width, verdict in (("4", "warn"), ("16", "ok")):
        (folder / "current_link_width").write_text(width)
        report = Report()
        doctor_gpu.check_link(report, Card(), tmp_path)
        assert rows(report)["GPU: link"][0] == verdict


def test_memory_that_does_not_suffice(make_config, monkeypatch):
    cfg = make_config("qwen", **{"hw.ram_gib": 2.0})
    spec = doctor.planned_spec(cfg)
    report = Report(rates={"drive_gib_s": 1.0, "ram_gib_s": 10.0})
    sizes = doctor._sizes(cfg, spec, has_gpu=False)
    doctor.check_fit(report, cfg, sizes, has_gpu=False)
    assert rows(report)["model: memory plan"][0] == "bad"
    report = Report(rates={"drive_gib_s": 1.0, "ram_gib_s": 10.0})
    monkeypatch.setattr(hardware, "total_ram_nbytes", lambda: (64 * GIB, "a test"))
    cfg.hw = replace(cfg.hw, ram_gib=14.0)  # room for residents, not for one token's experts
    doctor.check_fit(report, cfg, sizes, has_gpu=False)
    assert rows(report)["model: expert cache"][0] == "warn"


@pytest.mark.parametrize(
    ("mount", "said"),
    [
        (Mount("/", "9p", "C:"), "network or foreign"),
        (Mount("/", "tmpfs", "tmpfs"), "take RAM"),
        (Mount("/", "ext4", "x"), ""),
    ],
)
def test_a_slow_place_is_named_when_an_engine_starts(tmp_path, monkeypatch, caplog, mount, said):
    monkeypatch.setattr(opening, "find_mount", lambda _path: mount)
    opening.warn_of_slow_place(tmp_path)
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_the_kernel_check_passes_a_right_kernel_and_no_other(family, monkeypatch):
    """In Triton's interpreter, or on the GPU where there is one."""
    import torch

    from kernels import mxfp4_expert, nvfp4_expert
    from stages.doctor_kernels import expert_error

    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = SimpleNamespace(hidden=256, intermediate=96)
    name, error, limit = expert_error(family, spec, device)
    assert error <= limit
    module = nvfp4_expert if family == "qwen" else mxfp4_expert
    real = getattr(module, name)

    def wrong(x, table, *rest, **more):
        return real(x * 1.01, table, *rest, **more)

    monkeypatch.setattr(module, name, wrong)
    assert expert_error(family, spec, device)[1] > limit

    def nothing(*_args, **_more) -> None:
        """Leaves what stood there: NaN."""

    monkeypatch.setattr(module, name, nothing)
    assert expert_error(family, spec, device)[1] == float("inf")


@pytest.mark.parametrize("family", ["dense", "qwen3_moe"])
def test_no_kernel_is_checked_where_plain_torch_computes_the_experts(family):
    from stages.doctor_kernels import expert_error

    assert expert_error(family, SimpleNamespace(hidden=256, intermediate=96)) is None


def test_a_rate_that_moved_since_the_last_time_is_said():
    rates = {"drive_gib_s": 2.0, "ram_gib_s": 30.0}
    before = Record(rates, "2026-11-30T09:05:18Z", model="tiny")
    report = Report(rates={"drive_gib_s": 1.5, "ram_gib_s": 31.0})
    assert check_steadiness(report, before, "tiny") == ["drive_gib_s"]
    assert rows(report)["steady: drive_gib_s"][0] == "warn"
    assert check_steadiness(Report(rates={"drive_gib_s": 1.9}), before, "tiny") == []
