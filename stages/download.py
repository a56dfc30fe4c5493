"""Bring a model's files to this machine and check them: bundled models, local snapshots and synthetic ones, in place.

A snapshot folder is used where it is and never changed; its files are hashed once and watched from then on. A model of
the hub lies in the hub cache that all tools share: `hub` says what is wanted and where, `transfer` brings it. What is
missing is decided here, all is checked, and put together as a folder of links that later stages take for a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from conf.schema import DraftSource, RunConfig, Source
from runtime.checkpoint import INDEX_NAME, Checkpoint, IndexMismatchError
from runtime.errors import UserError, VerificationError
from runtime.units import GIB, format_nbytes
from stages.disk_room import DISK_MARGIN_NBYTES
from stages.files import file_digest, write_atomically
from stages.hub import (
    COMMIT,
    Hub,
    HubCache,
    Listing,
    UnreachableError,
    hub_cache,
    is_weights,
    matching,
    needed_shards,
    read_index,
    trimmed_index,
)
from stages.progress import Progress
from stages.stage import Output, Stage, StageContext
from stages.transfer import INCOMPLETE, Fetched, RemoteFile, StoppedError, fetch, hash_file

log = logging.getLogger("stages")

PROJECT = Path(__file__).resolve().parent.parent
NEEDED = ("config.json", "tokenizer.json")
SNAPSHOT = "snapshot"  # the folder of links
PROBE_RETRIES = 0  # when it is only asked whether a moving name has moved


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides which bytes these are."""
    # then the key of the synthetic stage says it all
    is_made = cfg.model.source is Source.synthetic
    found = {
        "source": cfg.model.source.value,
        "path": None if is_made else cfg.model.path,
        "revision": cfg.model.revision,
        "files": cfg.model.files,
    }
    if cfg.model.source is Source.hub:
        found |= {"repo": cfg.model.repo, "path": None, "leave_out": leave_out(cfg)}
    return found


def leave_out(cfg: RunConfig) -> list[str]:
    """Return the patterns of tensors that this run does not need: draft heads only where they may be used."""
    drafts = cfg.drafts.enabled and cfg.drafts.source is not DraftSource.lookup
    return [p for p in cfg.model.leave_out if not (drafts and p.startswith("mtp."))]


def snapshot_of(output: Output) -> Path:
    """Return the snapshot folder that a finished download stands for."""
    return Path(output.facts["snapshot"])


def planned_spec(cfg: RunConfig) -> Any:
    """Return the family's spec before any file is here; None without a config.json that can be used.

    It is read in the folder that `model.released` or `model.path` names.
    """
    folder = cfg.model.released or cfg.model.path
    if folder is None or not (absolute(folder) / "config.json").is_file():
        return None
    from runtime.engine import load_family  # it takes torch, which fetching does not

    try:
        return load_family(cfg.model.family).read_spec(absolute(folder))
    except (UserError, ValueError, KeyError):  # the stages themselves say what is wrong with it
        return None


def run(ctx: StageContext) -> None:
    """Check headers and index, then hash every file; of a model of the hub, fetch what is missing before."""
    if ctx.cfg.model.source is Source.hub:
        _run_hub(ctx)
        return
    made = ctx.inputs.get("synthetic")
    root = _snapshot_root(ctx.cfg) if made is None else made.root.resolve()
    checkpoint = _checked(root)
    made_files = None if made is None else [root / name for name in made.record["files"]]
    wanted = {*_wanted(root, ctx.cfg.model.files, made_files), *checkpoint.files()}
    names = sorted(str(path.relative_to(root)) for path in wanted)
    for name in names:  # hashed before a stop, written to since: again
        unit = ctx.units.get(name)
        if unit is not None and unit["mtime_ns"] != (root / name).stat().st_mtime_ns:
            del ctx.units[name]
    for name in ctx.todo(names, "files checked"):
        found = (root / name).stat()
        ctx.done(name, blake3=file_digest(root / name), mtime_ns=found.st_mtime_ns)
    ctx.external = {root / name: ctx.units[name]["blake3"] for name in names}
    ctx.facts = _facts(ctx.cfg, root, checkpoint)


def _checked(root: Path) -> Checkpoint:
    """Return a folder's checkpoint: the needed files, config.json, index and headers are in order."""
    for name in NEEDED:
        if not (root / name).is_file():
            raise UserError(
                f"{root} has no {name}", "point model.path to a complete snapshot folder"
            )
    try:
        json.loads((root / "config.json").read_text())
    except ValueError as error:
        raise UserError(
            f"{root / 'config.json'} is not JSON: {error}", "fetch the snapshot again"
        ) from error
    return Checkpoint.open(root)


def _facts(cfg: RunConfig, snapshot: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "snapshot": str(snapshot),
        "revision": cfg.model.revision,
        "num_tensors": len(checkpoint.tensors),
        "weights_nbytes": sum(path.stat().st_size for path in checkpoint.files()),
    }


def _snapshot_root(cfg: RunConfig) -> Path:
    model = cfg.model
    if model.path is None:
        raise UserError(f"model.source={model.source.value} needs a folder", "set model.path=DIR")
    root = absolute(model.path)
    if not root.is_dir():
        raise UserError(f"there is no folder {root}", "set model.path to a snapshot folder")
    return root


def absolute(path: str) -> Path:
    """Return a configured path; relative ones are taken from the project's folder."""
    expanded = Path(path).expanduser()
    return (expanded if expanded.is_absolute() else PROJECT / expanded).resolve()


def needs(cfg: RunConfig) -> tuple[str, ...]:
    """Return what makes the snapshot, where a stage does."""
    return ("synthetic",) if cfg.model.source is Source.synthetic else ()


def _wanted(root: Path, patterns: Sequence[str], made: Sequence[Path] | None) -> list[Path]:
    """Return the files that patterns ask for: by name in `root` (of `made`, if given), with a slash in its folders."""
    listed = root.iterdir() if made is None else made
    found = [path for path in listed if any(fnmatch(path.name, pattern) for pattern in patterns)]
    inside = [path for pattern in patterns if "/" in pattern for path in root.glob(pattern)]
    return [path for path in (*found, *inside) if path.is_file()]


# ---- from the hub ----------------------------------------------------------------------------------------------------


def expected_nbytes(cfg: RunConfig) -> int:
    """Return what is still to be written, from the yaml and the cache folder alone; 0 for models not of the hub."""
    if cfg.model.source is not Source.hub or cfg.model.files_gib is None:
        return 0
    return max(0, int(cfg.model.files_gib * GIB) - present_nbytes(cfg))


def present_nbytes(cfg: RunConfig) -> int:
    """Return how many of the wanted bytes are in the hub cache, half-fetched files counted in."""
    cache = hub_cache(cfg)
    listing = cache.cached(cfg.model.repo or "", cfg.model.revision)
    files = () if listing is None else matching(listing.files, cfg.model.files)
    partial = cache.folder.glob(f"blobs/*{INCOMPLETE}")
    return sum(f.nbytes for f in files) + sum(p.stat().st_size for p in partial)


def disk_nbytes(cfg: RunConfig, _inputs: Mapping[str, Output]) -> int:
    """Return the bytes still to be written into the hub cache, by the hub's own listing; 0 when it cannot be asked."""
    if cfg.model.source is not Source.hub:
        return 0
    cache = hub_cache(cfg)
    listing = _find_listing(cfg, Hub(cfg.hub), cache)
    wanted = matching(listing.files, cfg.model.files)
    index = next((f for f in wanted if f.path == INDEX_NAME), None)
    if index is not None and cache.has(index):
        wanted, _ = _with_needed_shards(cfg, cache, listing, wanted)
        return sum(cache.missing_nbytes(file) for file in wanted)
    need = sum(cache.missing_nbytes(file) for file in wanted)
    # shards that hold nothing needed are known once the index is here; until then the yaml's figure counts
    return need if cfg.model.files_gib is None else min(need, expected_nbytes(cfg))


def disk_root(cfg: RunConfig) -> Path | None:
    """Return where the bytes go, if that is not the folder of the artifacts."""
    return hub_cache(cfg).root if cfg.model.source is Source.hub else None


def watch(cfg: RunConfig, output: Output) -> None:
    """Say so when a moving revision names another commit than the one that was fetched."""
    revision, commit = cfg.model.revision, output.facts.get("commit")
    hub = Hub(cfg.hub)
    if cfg.model.source is not Source.hub or COMMIT.fullmatch(revision) or hub.is_offline:
        return
    try:
        now = hub.resolve(cfg.model.repo or "", revision, PROBE_RETRIES).commit
    except UserError as error:
        log.info("download: whether %s has moved is not known: %s", revision, error.message)
        return
    if now != commit:
        log.warning(
            "download: %s of %s has moved from %s to %s; the files here stay those of the former. "
            "To take the new ones: force=[download]",
            revision, cfg.model.repo, commit, now,
        )  # fmt: skip


def _find_listing(cfg: RunConfig, hub: Hub, cache: HubCache) -> Listing:
    """Return the commit's files as the hub lists them; as the cache has them when the hub cannot be asked."""
    repo, revision = cfg.model.repo or "", cfg.model.revision
    cached = cache.cached(repo, revision)
    try:
        # with something to fall back on nobody waits for minutes
        return hub.resolve(repo, revision, None if cached is None else 1)
    except UnreachableError as error:
        if cached is None:
            raise UserError(
                f"{error.message}, and the cache {cache.folder} has nothing of revision {revision}",
                error.hint,
            ) from error
        log.warning("download: %s: using what the cache has", error.message)
        return cached


def _with_needed_shards(
    cfg: RunConfig, cache: HubCache, listing: Listing, wanted: Sequence[RemoteFile]
) -> tuple[list[RemoteFile], list[str]]:
    """Return the files without shards that hold nothing needed, and the names of those; the index must be here.

    Raises IndexMismatchError when the index names shards that the commit does not have.
    """
    index_file = listing.file(INDEX_NAME)
    assert index_file is not None
    index = read_index(cache.blob(index_file).read_bytes)
    if index is None:  # the checkpoint's own check says what is wrong with it
        return list(wanted), []
    shards = needed_shards(index, leave_out(cfg))
    known = {file.path: file for file in listing.files}
    lacking = sorted(shards - known.keys())
    if lacking:
        raise IndexMismatchError(
            f"{listing.repo} at {listing.commit[:12]} has an index that names {len(lacking)} files which are not "
            f"there: {', '.join(lacking[:5])}",
            "choose another model.revision; where HF_HUB_OFFLINE is set: unset it to fetch them",
        )
    others = [file for file in wanted if not is_weights(file.path)]
    skipped = sorted(set(index.values()) - shards)
    return [*others, *(known[shard] for shard in sorted(shards))], skipped


def _run_hub(ctx: StageContext) -> None:
    cfg = ctx.cfg
    hub, cache = Hub(cfg.hub), hub_cache(cfg)
    listing = _find_listing(cfg, hub, cache)
    if listing.commit != cfg.model.revision:
        log.info(
            "download: %s is %s now: all files are of this commit",
            cfg.model.revision,
            listing.commit,
        )
    wanted = matching(listing.files, cfg.model.files)
    work = _HubWork(ctx, hub, cache, listing)
    small = [file for file in wanted if not is_weights(file.path)]
    weights = [file for file in wanted if is_weights(file.path)]
    work.bring(small, "small files")
    skipped: list[str] = []
    if listing.file(INDEX_NAME) is not None:
        wanted, skipped = _with_needed_shards(cfg, cache, listing, wanted)
        weights = [file for file in wanted if is_weights(file.path)]
    if skipped:
        log.info("download: not fetched, for nothing in them is needed: %s", ", ".join(skipped))
    if cfg.check_disk:
        _check_room(cache, weights)
    work.bring(weights, "weights")
    _put_together(ctx, cache, listing, [*small, *weights])
    checkpoint = _checked(ctx.out / SNAPSHOT)
    final = ctx.runner.folder(ctx.stage.name) / SNAPSHOT
    ctx.facts = _facts(cfg, final, checkpoint) | {
        "commit": listing.commit,
        "repo": listing.repo,
        "not_fetched": skipped,
        "etags": {file.path: file.etag for file in (*small, *weights)},
    }
    ctx.external = {cache.blob(file): ctx.units[file.path]["blake3"] for file in (*small, *weights)}


def _check_room(cache: HubCache, files: Sequence[RemoteFile]) -> None:
    need = sum(cache.missing_nbytes(file) for file in files) + DISK_MARGIN_NBYTES
    existing = next(path for path in (cache.root, *cache.root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if need > DISK_MARGIN_NBYTES and need > free:
        raise UserError(
            f"{cache.root} has {format_nbytes(free)} free, the files still missing need {format_nbytes(need)}",
            "free some disk, or set paths.hub=DIR (or HF_HOME) to a folder on a larger drive",
        )


def _put_together(
    ctx: StageContext, cache: HubCache, listing: Listing, files: Sequence[RemoteFile]
) -> None:
    """Make the folder of links, with an index of what was fetched; and the cache's own links, for other tools."""
    root = ctx.out / SNAPSHOT
    shutil.rmtree(root, ignore_errors=True)
    shards = {file.path for file in files if is_weights(file.path)}
    for file in files:
        at = root / file.path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(cache.blob(file).resolve())
    index = root / INDEX_NAME
    if index.exists() and read_index(index.read_bytes) is not None:
        text = index.read_bytes()
        trimmed = trimmed_index(text, shards)
        if trimmed != text:
            index.unlink()
            write_atomically(index, trimmed.decode())
    try:
        for file in files:
            cache.link(listing.commit, file)
        cache.note_ref(ctx.cfg.model.revision, listing.commit)
    except OSError as error:  # a cache that may only be read
        log.info("download: no links made in %s: %s", cache.folder, error.strerror)


class _HubWork:
    """Checks what is in the cache and fetches the rest; each file is a unit of the stage."""

    def __init__(self, ctx: StageContext, hub: Hub, cache: HubCache, listing: Listing) -> None:
        self._ctx, self._hub, self._cache, self._listing = ctx, hub, cache, listing

    def bring(self, files: Sequence[RemoteFile], what: str) -> None:
        """Return when every file is in the cache with the right bytes, and journalled."""
        self._ctx.expect(len(self._ctx.units.keys() | {file.path for file in files}))
        self._check(files, what)
        # what another run has brought since is not journalled yet: it is hashed as what is fetched
        missing = [file for file in files if file.path not in self._ctx.units]
        if not missing:
            return
        if self._hub.is_offline:
            names = ", ".join(file.path for file in missing[:5])
            raise UserError(
                f"HF_HUB_OFFLINE is set, and {len(missing)} of {len(files)} files are not in {self._cache.folder}: "
                f"{names}",
                "unset HF_HUB_OFFLINE to fetch what is missing",
            )
        self._cache.prepare()
        all_nbytes = sum(file.nbytes for file in files)
        here = all_nbytes - sum(self._cache.missing_nbytes(file) for file in missing)
        with Progress(f"download: {what}", all_nbytes, here, is_nbytes=True) as bar:
            for file, fetched in self._fetch_all(missing, bar):
                self._done(file, fetched)

    def _check(self, files: Sequence[RemoteFile], what: str) -> None:
        """Hash the files that are here and not journalled; set aside what is not the hub's."""
        here = []
        for file in files:
            path, unit = self._cache.blob(file), self._ctx.units.get(file.path)
            if not path.exists():
                self._ctx.units.pop(file.path, None)
            elif unit is None or unit["mtime_ns"] != path.stat().st_mtime_ns or unit["etag"] != file.etag:  # fmt: skip
                here.append(file)
        if not here:
            return
        with Progress(
            f"download: {what} here, checked", sum(f.nbytes for f in here), is_nbytes=True
        ) as bar:
            for file in here:
                path = self._cache.blob(file)
                mtime_ns = path.stat().st_mtime_ns
                digests = hash_file(path, file)
                if path.stat().st_size == file.nbytes and digests.found == file.etag:
                    self._done(file, Fetched(digests.blake3, mtime_ns))
                else:
                    self._set_aside(file, path, digests.found)
                bar.advance(file.nbytes)

    def _set_aside(self, file: RemoteFile, path: Path, found: str) -> None:
        message = (
            f"{file.path} in the hub cache is damaged: {path.stat().st_size:,} bytes with hash {found}, the hub's "
            f"metadata say {file.nbytes:,} bytes with {file.etag}"
        )
        aside = path.with_name(path.name + ".damaged")
        if self._hub.is_offline:
            raise VerificationError(
                message, "unset HF_HUB_OFFLINE: only this file is fetched again"
            )
        try:
            path.replace(aside)
        except OSError as error:
            raise VerificationError(
                f"{message}; it cannot be replaced: {error.strerror}",
                "set paths.hub=DIR to a folder that you may write to",
            ) from error
        self._ctx.units.pop(file.path, None)
        log.warning("%s: set aside as %s and fetched again", message, aside.name)

    def _done(self, file: RemoteFile, fetched: Fetched) -> None:
        with contextlib.suppress(OSError):  # a cache that may only be read; `_put_together` says so
            self._cache.link(self._listing.commit, file)
        self._ctx.done(file.path, blake3=fetched.blake3, mtime_ns=fetched.mtime_ns, etag=file.etag)

    def _fetch_all(
        self, files: Sequence[RemoteFile], bar: Progress
    ) -> Iterator[tuple[RemoteFile, Fetched]]:
        """Yield each file when it is whole. The first error stops all; what arrived until then is kept."""
        waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        for file in files:
            waiting.put(file)
        results: queue.SimpleQueue[tuple[RemoteFile, Fetched | BaseException]] = queue.SimpleQueue()
        headers = self._hub.headers()
        patience = replace(self._hub.patience, stop=threading.Event())

        def work() -> None:
            while not patience.stop.is_set():
                try:
                    file = waiting.get_nowait()
                except queue.Empty:
                    return
                url = self._hub.url(self._listing.repo, self._listing.commit, file.path)
                try:
                    fetched = fetch(
                        url, file, self._cache.blob(file), headers, self._listing.repo, self._hub.endpoint,
                        patience, bar.advance,
                    )  # fmt: skip
                    results.put((file, fetched))
                except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the files
                    results.put((file, error))

        # daemons: a stop must not wait for a line that has stalled
        threads = [
            threading.Thread(target=work, name=f"download-{i}", daemon=True)
            for i in range(min(self._ctx.cfg.hub.files_at_once, len(files)))
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in files:
                file, result = results.get()
                if isinstance(result, StoppedError):
                    continue
                if isinstance(result, BaseException):
                    raise result
                yield file, result
        finally:
            patience.stop.set()


STAGE = Stage(
    name="download",
    run=run,
    params=params,
    needs=needs,
    disk_nbytes=disk_nbytes,
    expected_nbytes=expected_nbytes,
    disk_root=disk_root,
    watch=watch,
)
