"""Bring one file over HTTP: resumed, watched, retried, hashed while its bytes pass.

A file grows under a temporary name beside its place and appears there by rename, after its hash was right. Knows URLs
and hashes; knows no model and no stage.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from blake3 import blake3
from huggingface_hub import get_session

from runtime.errors import UserError, VerificationError
from runtime.units import format_duration, format_nbytes
from stages.files import fsync_folder

log = logging.getLogger("stages")

INCOMPLETE = ".nvmoe.incomplete"  # not huggingface_hub's own suffix: its files are not resumed
RANGE_NBYTES = 8 * 2**30  # of one request: no single answer of more than 50 GB is given by the hub
PROGRESS_NBYTES = 2**16  # fewer bytes than this are no progress
WRONG_BYTES_TRIES = 2  # a file whose hash is wrong is fetched anew this often in all
MAX_WAIT_S, MAX_RETRY_AFTER_S = 30.0, 300.0
POINTER = b"version https://git-lfs"


class RemoteFile(NamedTuple):
    """A file as a listing describes it."""

    path: str  # relative, with slashes
    nbytes: int
    etag: str  # its name in the hub's cache: SHA-256 of a large file, git's blob id of a small one

    @property
    def is_large(self) -> bool:
        """Whether the listing has its SHA-256."""
        return len(self.etag) == 64


class Fetched(NamedTuple):
    """What is known of a file whose bytes were checked."""

    blake3: str
    mtime_ns: int


class NoProgressError(Exception):
    """A connection that is open and gives nothing."""


class StoppedError(Exception):
    """Another file failed, so this one ends too."""


@dataclass(slots=True)
class Patience:
    """How long and how often; `sleep` is replaced by tests."""

    stall_s: float
    retries: int  # in a row without progress
    sleep: Callable[[float], None] = time.sleep
    stop: threading.Event = field(default_factory=threading.Event)

    def wait(self, attempt: int, retry_after_s: float | None) -> float:
        """Wait before try number `attempt` (from 1): ever longer, or as the server asked. Returns the seconds."""
        seconds = min(MAX_WAIT_S, 2.0 ** (attempt - 1)) * random.uniform(0.75, 1.25)
        if retry_after_s is not None:
            seconds = min(MAX_RETRY_AFTER_S, max(seconds, retry_after_s))
        self.sleep(seconds)
        return seconds


class Digests:
    """The hashes of a file's bytes so far: the hub's, to compare, and blake3, to record."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._ours = blake3()
        if file.is_large:
            self._theirs = hashlib.sha256()
        else:  # git's blob id
            self._theirs = hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        """Take in the next bytes."""
        self._ours.update(data)
        self._theirs.update(data)

    @property
    def found(self) -> str:
        """The hash that must equal the file's etag."""
        return self._theirs.hexdigest()

    @property
    def blake3(self) -> str:
        """The hash that is recorded."""
        return self._ours.hexdigest(length=16)


def hash_file(path: Path, file: RemoteFile, upto: int | None = None) -> Digests:
    """Return the hashes of the first `upto` bytes of a file, of all by default."""
    digests = Digests(file)
    left = path.stat().st_size if upto is None else upto
    with open(path, "rb") as f:
        while left and (data := f.read(min(left, 2**24))):
            digests.update(data)
            left -= len(data)
    return digests


def check_status(status: int, headers: Mapping[str, str], what: str, endpoint: str) -> None:
    """Raise UserError for an answer that no second try would better. what: `ORG/NAME`, with the file behind a space."""
    code = headers.get("x-error-code", "")
    repo = what.partition(" ")[0]
    if status in (401, 403) or code == "GatedRepo":
        if status == 401 and code == "RepoNotFound":
            raise UserError(
                f"{endpoint} knows no repository {repo}, or this token may not see it (HTTP 401)",
                "check model.repo; for a private or gated model set HF_TOKEN, or run `hf auth login`",
            )
        raise UserError(
            f"{endpoint} refuses {what} (HTTP {status})",
            f"accept the model's terms at {endpoint}/{repo}, then set HF_TOKEN or run `hf auth login`",
        )
    if status == 404:
        what_is = {"RevisionNotFound": "no such revision", "EntryNotFound": "no such file"}
        raise UserError(
            f"{endpoint} does not have {what}: {what_is.get(code, 'not found')} (HTTP 404)",
            "check model.repo, model.revision and model.files",
        )
    if 400 <= status < 500 and status not in (408, 416, 425, 429):
        raise UserError(
            f"{endpoint} answers HTTP {status} for {what}", "check HF_ENDPOINT and the proxy"
        )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks us to wait, if it says so in seconds."""
    value = headers.get("retry-after", "")
    return float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else None


def fetch(
    url: str,
    file: RemoteFile,
    target: Path,
    headers: Mapping[str, str],
    repo: str,
    endpoint: str,
    patience: Patience,
    on_bytes: Callable[[int], None] = lambda _count: None,
) -> Fetched:
    """Bring a file to `target` and return its hash; bytes of an earlier try are kept and continued.

    on_bytes: told how many bytes arrived, and less than 0 when some are thrown away.
    Raises UserError, VerificationError when the bytes are wrong time after time, StoppedError.
    """
    with _claim(target, patience) as temporary:
        if temporary is None:  # another run has finished it
            return Fetched(hash_file(target, file).blake3, target.stat().st_mtime_ns)
        for number in range(1, WRONG_BYTES_TRIES + 1):
            digests = _fill(
                url, file, temporary, headers, f"{repo} {file.path}", endpoint, patience, on_bytes
            )
            if digests.found == file.etag:
                break
            os.truncate(temporary, 0)
            on_bytes(-file.nbytes)
            message = (
                f"{file.path} came with wrong bytes: its hash is {digests.found}, the hub's metadata say "
                f"{file.etag}"
            )
            if number == WRONG_BYTES_TRIES:
                raise VerificationError(
                    f"{message} ({number} times)",
                    "try again, without a proxy or mirror in between (HF_ENDPOINT); the other files are kept",
                )
            log.warning("%s: fetching it again", message)
        temporary.rename(target)
        fsync_folder(target.parent)
        return Fetched(digests.blake3, target.stat().st_mtime_ns)


@contextlib.contextmanager
def _claim(target: Path, patience: Patience) -> Iterator[Path | None]:
    """Lock the temporary file of `target`; None when another run finishes the target while we wait."""
    temporary = target.with_name(target.name + INCOMPLETE)
    is_told = False
    while True:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(fd, temporary):
                break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                os.close(fd)
                raise UserError(
                    f"the filesystem of {target.parent} has no file locks: {error.strerror}",
                    "set paths.hub=DIR to a folder on a local drive",
                ) from error
            if not is_told:
                log.info("%s is being fetched by another run: waiting for it", target.name)
                is_told = True
            patience.sleep(1.0)
        os.close(fd)  # of a file that was renamed under us, or is another's
        if patience.stop.is_set():
            raise StoppedError
        if target.exists():
            yield None
            return
    try:
        if target.exists():
            temporary.unlink(missing_ok=True)
            yield None
        else:
            yield temporary
    finally:
        os.close(fd)


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _fill(
    url: str,
    file: RemoteFile,
    temporary: Path,
    headers: Mapping[str, str],
    what: str,
    endpoint: str,
    patience: Patience,
    on_bytes: Callable[[int], None],
) -> Digests:
    """Ask for bytes until the file has its size; return the hashes of all of them, on the disk."""
    have = min(temporary.stat().st_size, file.nbytes)
    digests = hash_file(temporary, file, have)
    tries, furthest = 0, have
    with open(temporary, "r+b") as out:
        out.truncate(have)
        out.seek(have)
        while have < file.nbytes:
            wait_s, why = None, ""
            try:
                for data in _ask(url, file, have, headers, what, endpoint, patience):
                    if data is None:  # the server ignores ranges: from the start
                        on_bytes(-have)
                        have, digests = 0, Digests(file)
                        out.seek(0)
                        out.truncate()
                        continue
                    out.write(data)
                    digests.update(data)
                    have += len(data)
                    on_bytes(len(data))
            except _RetryError as error:
                why, wait_s = str(error), error.after_s
            except (httpx2.RequestError, NoProgressError) as error:
                why = _describe(error, patience)
            out.flush()
            if have >= file.nbytes:
                break
            # a server that starts from 0 each time and always breaks there makes no progress
            tries = 1 if have - furthest >= PROGRESS_NBYTES else tries + 1
            furthest = max(furthest, have)
            why = why or "the answer ended early"
            at = f"{have / file.nbytes:.1%} of {format_nbytes(file.nbytes)}"
            if tries > patience.retries:
                raise UserError(
                    f"cannot fetch {what} from {endpoint}: {why}, {tries} times in a row at {at}",
                    "what has arrived is kept: run the same command again to go on; HF_ENDPOINT=URL names a mirror, "
                    "and what `hf download` fetches into the same cache is used",
                )
            log.warning(
                "%s: %s at %s: trying again (%d of %d)", file.path, why, at, tries, patience.retries
            )
            waited = patience.wait(tries, wait_s)
            log.debug("waited %s", format_duration(waited))
            if patience.stop.is_set():
                raise StoppedError
        os.fsync(out.fileno())
    return digests


class _RetryError(Exception):
    """An answer that may be better next time."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


def _describe(error: Exception, patience: Patience) -> str:
    if isinstance(error, (httpx2.ReadTimeout, NoProgressError)):
        return f"stalled: no bytes for {format_duration(patience.stall_s)}"
    if isinstance(error, httpx2.ConnectError):
        return f"no connection ({error})"
    return f"the connection broke ({str(error) or type(error).__name__})"


def _ask(
    url: str,
    file: RemoteFile,
    have: int,
    headers: Mapping[str, str],
    what: str,
    endpoint: str,
    patience: Patience,
) -> Iterator[bytes | None]:
    """Yield the bytes from `have` on of one request; None first when the server starts again from 0."""
    last = min(file.nbytes, have + RANGE_NBYTES) - 1
    wanted = {**headers, "Accept-Encoding": "identity", "Range": f"bytes={have}-{last}"}
    timeout = httpx2.Timeout(patience.stall_s)
    with get_session().stream(
        "GET", url, headers=wanted, timeout=timeout, follow_redirects=True
    ) as answer:
        if answer.status_code == 403 and answer.history:  # a signed address that has run out
            raise _RetryError("the file's server refuses (HTTP 403)")
        check_status(answer.status_code, answer.headers, what, endpoint)
        if answer.status_code not in (200, 206):
            raise _RetryError(f"HTTP {answer.status_code}", retry_after_s(answer.headers))
        left = last + 1 - have
        if answer.status_code == 200:
            _check_length(answer, file, what, endpoint)
            left = file.nbytes
            if have:
                yield None
        elif not answer.headers.get("content-range", "").startswith(f"bytes {have}-"):
            given = answer.headers.get("content-range")
            raise _RetryError(f"asked for bytes {have}-{last}, got {given!r}")
        yield from _watched(answer, left, what, patience)


def _check_length(answer: Any, file: RemoteFile, what: str, endpoint: str) -> None:
    """Refuse a whole answer of another length, and say when it is a Git-LFS pointer."""
    length = answer.headers.get("content-length")
    if length is None or int(length) == file.nbytes:
        return
    start = next(answer.iter_raw(64), b"")
    if start.startswith(POINTER):
        raise UserError(
            f"{endpoint} gives a Git-LFS pointer in the place of {what}",
            "this mirror does not hold the file itself: use another HF_ENDPOINT",
        )
    raise _RetryError(
        f"the answer has {int(length):,} bytes, the hub's metadata say {file.nbytes:,}"
    )


def _watched(answer: Any, left: int, what: str, patience: Patience) -> Iterator[bytes]:
    """Yield at most `left` bytes; NoProgressError when hardly any arrive for `stall_s`, though the line is open."""
    since, arrived = time.monotonic(), 0
    for (
        data
    ) in answer.iter_raw():  # as they come: a size would hold bytes back that a stall then loses
        if patience.stop.is_set():
            raise StoppedError
        if len(data) > left:
            raise _RetryError(f"more bytes than {what} has")
        left -= len(data)
        arrived += len(data)
        yield data
        now = time.monotonic()
        if arrived >= PROGRESS_NBYTES:
            since, arrived = now, 0
        elif now - since > patience.stall_s and left:
            raise NoProgressError
