"""The runner of stages, resumable steps of the set-up: it decides, locks, resumes and records.

A stage is a description (`stages.stage`); all care for crashes is here. Work goes to `<stage>-<key>.partial/`; each
finished unit is journalled after its bytes are on the disk; the record is written last and the folder renamed, so
that a finished name means finished. Knows no model and imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from conf.schema import RunConfig
from runtime.errors import UserError
from runtime.units import format_nbytes
from stages.disk_room import DISK_MARGIN_NBYTES, DiskRoom, disk_rooms
from stages.files import file_digest, fsync_folder, read_json, sample_digest, write_atomically
from stages.lock import Lock
from stages.stage import (
    JOURNAL_NAME,
    PLAN_NAME,
    Decision,
    Output,
    Stage,
    StageContext,
    StagesByName,
)

log = logging.getLogger("stages")

RECORD_NAME = "record.json"


class Runner:
    """Runs stages for one config, each only when its record does not match."""

    def __init__(
        self,
        cfg: RunConfig,
        artifacts: Path,
        stages: Mapping[str, Stage] | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """run_dir: the folder of this run, where an end point may leave its result; None for none."""
        self.cfg = cfg
        self.run_dir = run_dir
        self.exit_code = 0  # what an end point that did its work wants the process to end with
        self.root = artifacts / cfg.model.name
        self.stages = StagesByName() if stages is None else stages

    # ---- deciding -------------------------------------------------------------------------------------------------

    def order(self, targets: Iterable[str]) -> list[str]:
        """Return the targets and all that they need, each once, needs first."""
        ordered: list[str] = []

        def visit(name: str) -> None:
            for need in self.stages[name].needs(self.cfg):
                visit(need)
            if name not in ordered:
                ordered.append(name)

        for target in targets:
            visit(target)
        return ordered

    def key(self, name: str) -> str:
        """Return the identity of a stage's output: name, version, params and the keys of what it needs."""
        stage = self.stages[name]
        needs = [self.key(need) for need in stage.needs(self.cfg)]
        identity = json.dumps([name, stage.version, stage.params(self.cfg), needs], sort_keys=True)
        return blake3(identity.encode()).hexdigest(length=6)

    def folder(self, name: str) -> Path:
        """Return the place of a stage's output for this config."""
        return self.root / f"{name}-{self.key(name)}"

    def find(self, name: str) -> Output | None:
        """Return a stage's finished output for this config, if there is one."""
        record = read_json(self.folder(name) / RECORD_NAME)
        is_whole = record is not None and {"inputs", "files", "facts", "digest"} <= record.keys()
        return Output(self.folder(name), record) if record is not None and is_whole else None

    def decide(self, name: str) -> Decision:
        """Say what would be done with a stage now, and why."""
        stage = self.stages[name]
        if stage.is_endpoint:
            return Decision("run", "asked for")
        if name in self.cfg.forced_stages:
            return Decision("run", "forced")
        output = self.find(name)
        reason = None if output is None else self._stale(output)
        if output is not None and reason is None:
            return Decision("skip", "record matches")
        partial = _partial(self.folder(name))
        if partial.exists() and self._is_resumable(stage, partial):
            units = _read_journal(partial)
            total = (read_json(partial / PLAN_NAME) or {}).get("num_units")
            of = f" of {total}" if total else ""
            return Decision("resume", f"{len(units)}{of} units are done")
        return Decision("run", reason or self._why_new(stage))

    def _stale(self, output: Output) -> str | None:
        """Return why a finished output may not be used, or None."""
        for need, recorded in output.record["inputs"].items():
            current = self.find(need)
            if current is not None and current.record["digest"] != recorded:
                return f"the output of {need} changed"
        for name, recorded in output.record["files"].items():
            path = output.root / name  # an absolute name stays as it is
            if not path.exists():
                return f"{name} is missing"
            found = path.stat()
            if found.st_size != recorded["nbytes"]:
                return f"{name} has {format_nbytes(found.st_size)}, the record says {format_nbytes(recorded['nbytes'])}"
            if name.startswith("/") and found.st_mtime_ns != recorded["mtime_ns"]:
                return f"{name} was written after it was checked"
            if sample_digest(path) != recorded["sample"]:
                return f"{name} is not what was written: a sampled checksum differs"
        return None

    def _is_resumable(self, stage: Stage, partial: Path) -> bool:
        plan = read_json(partial / PLAN_NAME)
        return plan is not None and plan.get("inputs") == self._input_digests(stage)

    def _input_digests(self, stage: Stage) -> dict[str, str]:
        outputs = {need: self.find(need) for need in stage.needs(self.cfg)}
        return {
            need: output.record["digest"] for need, output in outputs.items() if output is not None
        }

    def _why_new(self, stage: Stage) -> str:
        """Compare with the newest other output of this stage."""
        others = [
            path for path in self.root.glob(f"{stage.name}-*/{RECORD_NAME}") if path.is_file()
        ]
        if not others:
            return "no record"
        record = read_json(max(others, key=lambda path: path.stat().st_mtime_ns)) or {}
        if record.get("version") != stage.version:
            return f"version {record.get('version')} -> {stage.version}"
        old, new = record.get("params", {}), stage.params(self.cfg)
        changed = [
            f"{k} {old.get(k)} -> {new.get(k)}"
            for k in sorted({*old, *new})
            if old.get(k) != new.get(k)
        ]
        return ", ".join(changed) if changed else "what it is made from changed"

    # ---- running --------------------------------------------------------------------------------------------------

    def explain(self, targets: Sequence[str]) -> list[tuple[str, Decision]]:
        """Return what `run` would do, in order; nothing is changed."""
        steps: list[tuple[str, Decision]] = []
        fresh: set[str] = set()
        for name in self.order(targets):
            decision = self.decide(name)
            upstream = [need for need in self.stages[name].needs(self.cfg) if need in fresh]
            if decision.action == "skip" and upstream:
                decision = Decision("run", f"if the new output of {' and '.join(upstream)} differs")
            if decision.action != "skip":
                fresh.add(name)
            steps.append((name, decision))
        return steps

    def run(self, targets: Sequence[str]) -> None:
        """Run the targets and what they need."""
        self._make_root()
        checked_disk = False
        for name in self.order(targets):
            stage, decision = self.stages[name], self.decide(name)
            log.info("%s: %s", name, decision)
            inputs = {
                need: output
                for need in stage.needs(self.cfg)
                if (output := self.find(need)) is not None
            }
            if stage.is_endpoint:
                stage.run(StageContext(self.cfg, stage, inputs, self.root, self))
                continue
            if decision.action != "skip":
                if not checked_disk:
                    checked_disk = self._check_disk(targets)
                with Lock(self.root / f"{name}-{self.key(name)}.lock"):
                    decision = self.decide(name)  # another run may have finished it a moment ago
                    if decision.action != "skip":
                        with _disk_errors(name, stage.disk_root(self.cfg) or self.root):
                            self._make(stage, inputs, decision)
            output = self.find(name)
            assert output is not None, f"{name} finished without a record"
            if decision.action == "skip":
                stage.watch(self.cfg, output)
            if name in targets:
                stage.show(self.cfg, output)

    def _make_root(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the folder {self.root}: {error.strerror}",
                "set paths.outputs (or paths.artifacts) to a folder that you may write to",
            ) from error

    def _check_disk(self, targets: Sequence[str]) -> bool:
        """Refuse before the first byte when the coming stages need more disk than there is.

        Returns whether every stage knew what it needs; one whose inputs are not made yet says what it expects.
        """
        if not self.cfg.check_disk:
            return True
        is_complete = True
        needed: dict[Path, dict[str, int]] = {}
        for name in self.order(targets):
            stage = self.stages[name]
            if stage.is_endpoint or self.decide(name).action == "skip":
                continue
            inputs = {
                need: output
                for need in stage.needs(self.cfg)
                if (output := self.find(need)) is not None
            }
            is_ready = len(inputs) == len(stage.needs(self.cfg))
            is_complete = is_complete and is_ready
            nbytes = stage.disk_nbytes(self.cfg, inputs) if is_ready else stage.expected_nbytes(self.cfg)  # fmt: skip
            root = stage.disk_root(self.cfg)
            if root is None:
                nbytes -= _allocated(_partial(self.folder(name)))
            needed.setdefault(root or self.root, {})[name] = max(0, nbytes)
            for folder, more in stage.elsewhere(self, inputs if is_ready else None).items():
                needed.setdefault(folder, {})[name] = more
        for room in disk_rooms(needed):
            if room.need_nbytes and room.need_nbytes + DISK_MARGIN_NBYTES > room.free_nbytes:
                parts = ", ".join(
                    f"{name} {format_nbytes(n)}" for name, n in room.parts.items() if n
                )
                total = format_nbytes(room.need_nbytes + DISK_MARGIN_NBYTES)
                key = "paths.artifacts" if self.root in room.roots else "paths.hub (or HF_HOME)"
                if any(
                    str(root) in [drive.folder for drive in self.cfg.hw.drives]
                    for root in room.roots
                ):
                    key = "hw.drives"
                raise UserError(
                    f"{room.roots[0]} has {format_nbytes(room.free_nbytes)} free, the coming stages need {total} "
                    f"({parts})",
                    f"free some disk, or set {key} to a folder on a larger drive; check_disk=false starts all the same",
                )
        return is_complete

    def expected_disk(self, targets: Sequence[str]) -> list[DiskRoom]:
        """Return what the coming stages will write where, from the config alone; nothing is asked or changed."""
        needed: dict[Path, dict[str, int]] = {}
        for name in self.order(targets):
            stage = self.stages[name]
            if not stage.is_endpoint and self.decide(name).action != "skip":
                root = stage.disk_root(self.cfg) or self.root
                needed.setdefault(root, {})[name] = max(0, stage.expected_nbytes(self.cfg))
                for folder, more in stage.elsewhere(self, None).items():
                    needed.setdefault(folder, {})[name] = more
        return disk_rooms(needed)

    def _make(self, stage: Stage, inputs: Mapping[str, Output], decision: Decision) -> None:
        final = self.folder(stage.name)
        partial = _partial(final)
        if decision.action != "resume" and partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(exist_ok=True)
        digests = self._input_digests(stage)
        write_atomically(partial / PLAN_NAME, json.dumps({"inputs": digests}) + "\n")
        units = _read_journal(partial)
        # written anew: a crash may have left half a line at its end
        lines = [json.dumps({"unit": unit, **facts}) + "\n" for unit, facts in units.items()]
        write_atomically(partial / JOURNAL_NAME, "".join(lines))
        ctx = StageContext(self.cfg, stage, inputs, partial, self, units=units)
        started = time.time()
        stage.run(ctx)
        self._finish(ctx, partial, final, digests, started)

    def _finish(
        self,
        ctx: StageContext,
        partial: Path,
        final: Path,
        digests: Mapping[str, str],
        started: float,
    ) -> None:
        files = {
            str(path.relative_to(partial)): _describe(
                path, ctx.digests.get(str(path.relative_to(partial)))
            )
            for path in sorted(partial.rglob("*"))
            # what a link leads to is used in place: the stage names it in `external`
            if path.is_file()
            and not path.is_symlink()
            and path.name not in (JOURNAL_NAME, PLAN_NAME, RECORD_NAME)
        }
        files |= {
            str(path.resolve()): _describe(path, digest) for path, digest in ctx.external.items()
        }
        contents = {
            Path(name).name: [entry["nbytes"], entry["blake3"]] for name, entry in files.items()
        }
        record = {
            "stage": ctx.stage.name,
            "version": ctx.stage.version,
            "key": final.name.rsplit("-", 1)[1],
            "params": ctx.stage.params(self.cfg),
            "inputs": dict(digests),
            "files": files,
            "facts": ctx.facts,
            "digest": blake3(json.dumps([contents, ctx.facts], sort_keys=True).encode()).hexdigest(
                length=16
            ),
            "duration_s": round(time.time() - started, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_atomically(partial / RECORD_NAME, json.dumps(record, indent=1) + "\n")
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        fsync_folder(final.parent)
        # after the rename: a crash before it can still go on
        for name in (JOURNAL_NAME, PLAN_NAME):
            (final / name).unlink(missing_ok=True)
        shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def _disk_errors(stage: str, root: Path) -> Iterator[None]:
    """Turn a full disk into a sentence, wherever in the making it is met."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"{stage} ran out of disk in {root}: {error.strerror}",
            "what is finished is kept: free some disk and run the same command again",
        ) from error


def _describe(path: Path, digest: str | None) -> dict[str, Any]:
    found = path.stat()
    return {
        "nbytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "blake3": digest or file_digest(path),
        "sample": sample_digest(path),
    }


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _allocated(folder: Path) -> int:
    """Return the bytes that a folder's files take on the disk already."""
    return (
        sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        if folder.exists()
        else 0
    )


def _read_journal(partial: Path) -> dict[str, dict[str, Any]]:
    """Return the finished units; a last line cut short by a crash does not count."""
    units: dict[str, dict[str, Any]] = {}
    path = partial / JOURNAL_NAME
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            units[entry.pop("unit")] = entry
    return units
