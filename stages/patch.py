"""Copy a release's inference code and change one line of it: the race in the kernel that quantises activations.

The snapshot is never changed. A kernel.py that is not the known one is refused, and so is any other outcome than one
changed line; then nothing is left behind.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from conf.schema import RunConfig
from runtime.errors import UserError, VerificationError
from stages.download import snapshot_of
from stages.files import fsync_folder
from stages.stage import Output, Stage, StageContext

log = logging.getLogger("stages")

FOLDER = "inference"
KERNEL = "kernel.py"
NEEDED = (KERNEL, "model.py", "engram.py", "config.json")
FACTORY, VARIABLE = "act_quant_kernel", "num_stages"

# what the changed line was tried with. Of kernel.py the SHA-256 is published, its BLAKE3 is not: that one is recorded
# as it is found
REVISION = "dba1be0a40aa45a94ad051997016db3960a90277"
KNOWN_SHA256 = {
    KERNEL: "1236c3507019ed176f5dba5e04bcea58867cf654818c6cf138ed4845398c2455",
    "model.py": "4e9ae23620edc8028ccc5d5fef552ab7fdc7dcd6f79608754fe9f67644056f65",
    "config.json": "2e84f45cf1dac8c7fcbb200e96667d4b913275690668ed496f24c7747207a809",
}
FETCH_AGAIN = "fetch the snapshot again at the pinned revision, byte for byte"
OR_UNKNOWN = f"{FETCH_AGAIN}; or add patch.allow_unknown=true to change its one line all the same"


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides what is refused."""
    return {"revision": cfg.model.revision, "allow_unknown": cfg.patch.allow_unknown}


def run(ctx: StageContext) -> None:
    """Check kernel.py, write the changed copy beside the other files, show the difference."""
    source = snapshot_of(ctx.inputs["download"]) / FOLDER
    missing = [name for name in NEEDED if not (source / name).is_file()]
    if missing:
        raise UserError(
            f"{source} has no {', '.join(missing)}: this snapshot came without the release's own code",
            f"fetch the folder {FOLDER} of the same revision, or set deepseek.arithmetic=native",
        )
    old = (source / KERNEL).read_bytes()
    check_known(source / KERNEL, old, ctx.cfg.model.revision, ctx.cfg.patch.allow_unknown)
    new = patched(source / KERNEL, old)
    diff = difference(old, new)
    names = _copy(source, ctx.out)
    _write(ctx.out / KERNEL, new)
    fsync_folder(ctx.out)
    digests = {name: _sha256((ctx.out / name).read_bytes()) for name in names if name != KERNEL}
    for name, wanted in KNOWN_SHA256.items():
        if name != KERNEL and digests[name] != wanted:
            log.warning(
                "patch: %s/%s has SHA-256 %s, the one that was tried has %s: its code is used as it is",
                FOLDER, name, digests[name], wanted,
            )  # fmt: skip
    ctx.facts = {
        "before": _hashes(old),
        "after": _hashes(new),
        "is_known": _sha256(old) == KNOWN_SHA256[KERNEL],
        "sha256": digests,
        "diff": diff,
    }
    log.info("patch: %s/%s, one line:\n%s", FOLDER, KERNEL, diff)


def check_known(path: Path, data: bytes, revision: str, is_unknown_allowed: bool) -> None:
    """Raise unless these are the bytes that the changed line was tried with.

    With `is_unknown_allowed` only what can never be changed rightly is refused.
    """
    if b"\r" in data:
        raise VerificationError(
            f"{path} has CRLF line ends: something turned its text into Windows form, so it is not the "
            "release's file any more",
            f"{FETCH_AGAIN} (git: core.autocrlf=false)",
        )
    if is_patched(data):
        raise VerificationError(
            f"{path} is patched already: {FACTORY} sets {VARIABLE} = 2, and the snapshot must be as released",
            FETCH_AGAIN,
        )
    if is_unknown_allowed:
        return
    if revision != REVISION:
        raise VerificationError(
            f"model.revision is {revision}, and the change to {KERNEL} is known for {REVISION} alone",
            "set model.revision to that one and fetch it, or add patch.allow_unknown=true",
        )
    found = _sha256(data)
    if found != KNOWN_SHA256[KERNEL]:
        raise VerificationError(
            f"{path} is not the known file: SHA-256 {found}, expected {KNOWN_SHA256[KERNEL]}",
            OR_UNKNOWN,
        )


def patched(path: Path, data: bytes) -> bytes:
    """Return kernel.py with the one line changed: `num_stages` of the factory is 2, whatever the mode.

    As released it is 0 where scales are rounded or the result is written in place, and rows beyond the 64th race.
    Raises VerificationError unless exactly one line is to be changed.
    """
    found = [node for node in _assignments(data) if _is_choice(node.value)]
    lines = data.splitlines(keepends=True)
    if len(found) != 1 or found[0].lineno != found[0].end_lineno:
        raise VerificationError(
            f"{path} has {len(found)} lines in {FACTORY} that set {VARIABLE} to 0 or 2, expected exactly one",
            f"this is code of another release: {FETCH_AGAIN}, or set deepseek.arithmetic=native",
        )
    node = found[0]
    at = node.lineno - 1
    line, value = lines[at], node.value
    lines[at] = line[: value.col_offset] + b"2" + line[value.end_col_offset :]
    changed = b"".join(lines)
    if len(difference(data, changed).splitlines()) != 2 or not is_patched(changed):
        raise VerificationError(
            f"{path} does not differ in exactly one line after the change", FETCH_AGAIN
        )
    return changed


def is_patched(data: bytes) -> bool:
    """Say whether the factory sets the number of stages to 2 and to nothing else."""
    values = [node.value for node in _assignments(data)]
    return bool(values) and all(isinstance(v, ast.Constant) and v.value == 2 for v in values)


def _assignments(data: bytes) -> list[ast.Assign]:
    """Return where the factory assigns the variable; none in bytes that are no Python."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return []
    factories = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == FACTORY
    ]
    return [
        node
        for factory in factories
        for node in ast.walk(factory)
        if isinstance(node, ast.Assign)
        and [t.id for t in node.targets if isinstance(t, ast.Name)] == [VARIABLE]
    ]


def _is_choice(value: ast.expr) -> bool:
    """Say whether an expression is `0 if round_scale or inplace else 2`."""
    return ast.unparse(value) == "0 if round_scale or inplace else 2"


def difference(old: bytes, new: bytes) -> str:
    """Return the lines that differ, with `-` and `+` before them."""
    before, after = (data.decode().splitlines() for data in (old, new))
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _copy(source: Path, target: Path) -> list[str]:
    """Copy every file but compiled ones.  Returns their names, relative to the folder."""
    names = []
    for path in sorted(source.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(source)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if str(name) != KERNEL:
                _write(target / name, path.read_bytes())
            names.append(str(name))
    return names


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hashes(data: bytes) -> dict[str, str]:
    return {"sha256": _sha256(data), "blake3": blake3(data).hexdigest()}


def disk_nbytes(_cfg: RunConfig, inputs: Mapping[str, Output]) -> int:
    """Return the size of the copied folder."""
    source = snapshot_of(inputs["download"]) / FOLDER
    return sum(path.stat().st_size for path in source.rglob("*") if path.is_file())


def show(_cfg: RunConfig, output: Output) -> None:
    """Print the difference and the hashes of both files."""
    facts = output.facts
    print(facts["diff"])
    for what in ("before", "after"):
        known = ""
        if what == "before":
            known = "  the known file" if facts["is_known"] else "  NOT the known file"
        print(f"{what}: sha256 {facts[what]['sha256']}{known}")
        print(f"{what}: blake3 {facts[what]['blake3']}  as found: no published one to compare with")
    print(f"the changed copy: {output.root}")


STAGE = Stage(
    name="patch",
    run=run,
    params=params,
    show=show,
    needs=lambda _cfg: ("download",),
    disk_nbytes=disk_nbytes,
)
