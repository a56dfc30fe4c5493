"""A model repository on the Hugging Face hub, and the hub cache that all tools of this machine share.

Resolves a revision once, picks the files that are wanted, and knows where each lies in the cache
(`models--ORG--NAME/blobs/<etag>`, linked from `snapshots/<commit>`). Knows no stage; bytes are brought by `transfer`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import constants, get_session, get_token

from conf.schema import HubConfig, RunConfig
from runtime.errors import UserError
from stages.files import absolute
from stages.transfer import INCOMPLETE, Patience, RemoteFile, check_status, retry_after_s

log = logging.getLogger("stages")

COMMIT = re.compile(r"[0-9a-f]{40}")
ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
API_TIMEOUT_S = 30.0


class UnreachableError(UserError):
    """No answer from the hub, time after time, or it may not be asked (HF_HUB_OFFLINE)."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    def file(self, path: str) -> RemoteFile | None:
        """Return the file of this name, if there is one."""
        return next((file for file in self.files if file.path == path), None)


class Hub:
    """The hub that HF_ENDPOINT names, asked with HF_TOKEN."""

    def __init__(self, config: HubConfig, patience: Patience | None = None) -> None:
        self.endpoint: str = constants.ENDPOINT
        self.is_offline: bool = constants.HF_HUB_OFFLINE
        self.patience = patience or Patience(config.stall_s, config.retries)

    def headers(self) -> dict[str, str]:
        """Return what is sent with every request; the token goes to the hub alone, not to where it redirects."""
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        return {"user-agent": "nvmoe"} | ({"authorization": f"Bearer {token}"} if token else {})

    def url(self, repo: str, commit: str, path: str) -> str:
        """Return where a file's bytes are asked for."""
        return f"{self.endpoint}/{repo}/resolve/{commit}/{quote(path)}"

    def resolve(self, repo: str, revision: str, retries: int | None = None) -> Listing:
        """Return the commit that a revision is now, with all files and their hashes, in one answer.

        Raises UserError for a refused or unknown repository, UnreachableError when nobody answers.
        """
        if self.is_offline:
            raise UnreachableError(
                f"HF_HUB_OFFLINE is set: {self.endpoint} is not asked for {repo}",
                "unset HF_HUB_OFFLINE to fetch what is missing",
            )
        url = f"{self.endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}"
        most = self.patience.retries if retries is None else retries
        for attempt in range(1, most + 2):
            wait_s = None
            try:
                answer = get_session().get(
                    url, params={"blobs": True}, headers=self.headers(),
                    timeout=min(API_TIMEOUT_S, self.patience.stall_s), follow_redirects=True,
                )  # fmt: skip
                what = f"{repo} at revision {revision}"
                check_status(answer.status_code, answer.headers, what, self.endpoint)
                if answer.status_code == 200:
                    return _listing(repo, answer.content, self.endpoint)
                why, wait_s = f"HTTP {answer.status_code}", retry_after_s(answer.headers)
            except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
                raise UserError(
                    f"HF_ENDPOINT={self.endpoint} is no address: {error}",
                    "write it as https://host, or unset HF_ENDPOINT",
                ) from error
            except httpx2.RequestError as error:
                why = str(error) or type(error).__name__
            if attempt <= most:
                log.warning("%s: %s: trying again (%d of %d)", self.endpoint, why, attempt, most)
                self.patience.wait(attempt, wait_s)
        raise UnreachableError(
            f"no answer from {self.endpoint} for {repo}: {why}",
            "check the line, HF_ENDPOINT and the proxy (HTTPS_PROXY), then run the same command again",
        )


def _listing(repo: str, content: bytes, endpoint: str) -> Listing:
    try:
        data = json.loads(content)
        files = tuple(
            RemoteFile(
                entry["rfilename"],
                int(entry["size"]),
                (entry.get("lfs") or {}).get("sha256") or entry["blobId"],
            )
            for entry in data["siblings"]
        )
        commit = str(data["sha"])
        usable = COMMIT.fullmatch(commit) and all(
            ETAG.fullmatch(f.etag) and _is_safe(f.path) for f in files
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        usable = None
    if not usable:
        raise UserError(
            f"{endpoint} answers for {repo}, but not as the Hugging Face hub does",
            "check HF_ENDPOINT and the proxy: a log-in page in between looks like this",
        )
    return Listing(repo, commit, files)


def _is_safe(path: str) -> bool:
    return not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


class HubCache:
    """One repository in the cache folder."""

    def __init__(self, root: Path | None, repo: str) -> None:
        """root: None for the folder that HF_HUB_CACHE and HF_HOME name."""
        self.root = Path(constants.HF_HUB_CACHE) if root is None else root
        self.folder = self.root / f"models--{repo.replace('/', '--')}"

    def blob(self, file: RemoteFile) -> Path:
        """Return where a file's bytes lie, or will."""
        return self.folder / "blobs" / file.etag

    def has(self, file: RemoteFile) -> bool:
        """Say whether a file is here with its full size; its bytes are another matter."""
        return _size(self.blob(file)) == file.nbytes

    def missing_nbytes(self, file: RemoteFile) -> int:
        """Return how many bytes of a file are still to be written."""
        if self.has(file):
            return 0
        partial = _size(self.blob(file).with_name(file.etag + INCOMPLETE))
        return file.nbytes - min(partial or 0, file.nbytes)

    def prepare(self) -> None:
        """Make the folders. Raises UserError where nobody may write."""
        try:
            (self.folder / "blobs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write to the hub cache {self.root}: {error.strerror}",
                "set paths.hub=DIR (or HF_HOME) to a folder that you may write to",
            ) from error

    def link(self, commit: str, file: RemoteFile) -> None:
        """Put a file's link into the snapshot of its commit, as huggingface_hub does; nothing where it stands."""
        at = self.folder / "snapshots" / commit / file.path
        if not at.exists():
            link_relative(at, self.blob(file))

    def note_ref(self, revision: str, commit: str) -> None:
        """Remember which commit a moving name was."""
        if not COMMIT.fullmatch(revision):
            ref = self.folder / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)

    def cached(self, repo: str, revision: str) -> Listing | None:
        """Return what the cache holds of a revision without asking anybody; None when it holds nothing."""
        commit = revision
        if not COMMIT.fullmatch(revision):
            try:
                commit = (self.folder / "refs" / revision).read_text().strip()
            except OSError:
                return None
        snapshot = self.folder / "snapshots" / commit
        files = []
        for path in sorted(snapshot.rglob("*")):
            etag = path.resolve().name
            if path.is_file() and ETAG.fullmatch(etag):
                relative = path.relative_to(snapshot).as_posix()
                files.append(RemoteFile(relative, path.stat().st_size, etag))
        return Listing(repo, commit, tuple(files)) if files else None


def hub_cache(cfg: RunConfig) -> HubCache:
    """Return the place in the hub cache of a config's repository."""
    root = None if cfg.paths.hub is None else absolute(cfg.paths.hub).resolve()
    return HubCache(root, cfg.model.repo or "")


def link_relative(at: Path, target: Path) -> None:
    """Make a link that still holds when the folder above both is moved."""
    at.parent.mkdir(parents=True, exist_ok=True)
    if at.is_symlink():
        at.unlink()
    at.symlink_to(os.path.relpath(target, at.parent.resolve()))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


# ---- which files -----------------------------------------------------------------------------------------------------


def matching(files: Sequence[RemoteFile], patterns: Sequence[str]) -> list[RemoteFile]:
    """Return the files that patterns ask for: by name in the top folder, with a slash inside of folders."""
    return [f for f in files if any(_matches(f.path, pattern) for pattern in patterns)]


def _matches(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def is_weights(path: str) -> bool:
    """Say whether a file holds tensors."""
    return path.endswith(".safetensors")


def needed_shards(index: Mapping[str, str], leave_out: Sequence[str]) -> set[str]:
    """Return the shards with at least one tensor that no pattern of `leave_out` names."""
    shards: set[str] = set()
    for name, shard in index.items():
        if shard not in shards and not any(fnmatchcase(name, pattern) for pattern in leave_out):
            shards.add(shard)
    return shards


def trimmed_index(text: bytes, shards: Collection[str]) -> bytes:
    """Return a weight index without the tensors of other shards; the very bytes when none are there."""
    data: dict[str, Any] = json.loads(text)
    kept = {name: shard for name, shard in data["weight_map"].items() if shard in shards}
    if len(kept) == len(data["weight_map"]):
        return text
    return json.dumps(data | {"weight_map": kept}, indent=1).encode() + b"\n"


def read_index(read: Callable[[], bytes]) -> dict[str, str] | None:
    """Return tensor -> shard of an index file; None when it is not one (the checkpoint's own check says how)."""
    try:
        weight_map = json.loads(read())["weight_map"]
    except (ValueError, KeyError, TypeError):
        return None
    usable = isinstance(weight_map, dict) and all(isinstance(s, str) for s in weight_map.values())
    return weight_map if usable else None
