"""A small repository on the stand-in of the hub, and the machine that downloads it."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

from hub_server import COMMIT, REPO, HubServer, sha256

from stages.core import Runner

NUM_SHARDS = 4
DRAFT = "model-draft.safetensors"
BIG = "model-00002-of-00004.safetensors"


def shard(tensors: dict[str, bytes]) -> bytes:
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def make_files(seed: int = 0) -> dict[str, bytes]:
    """A small repository: four shards of text tensors, one of drafts alone, and files that nobody wants."""
    noise = random.Random(seed)
    names = [f"model-{i:05}-of-{NUM_SHARDS:05}.safetensors" for i in range(1, NUM_SHARDS + 1)]
    files = {name: shard({f"layers.{i}.w": noise.randbytes(300_000)}) for i, name in enumerate(names)}  # fmt: skip
    files[DRAFT] = shard({"mtp.0.w": noise.randbytes(200_000)})
    weight_map = {f"layers.{i}.w": name for i, name in enumerate(names)} | {"mtp.0.w": DRAFT}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files |= {"config.json": b"{}", "tokenizer.json": b'{"version": "1.0"}', "README.md": b"# x"}
    files["inference/model.py"] = b"print()\n"
    return files


class Machine:
    """This machine's side: config, cache folder, artifacts; pauses are noted and not waited for."""

    def __init__(self, hub: HubServer, root: Path, make_config) -> None:
        self.hub, self.root, self._make_config = hub, root, make_config
        self.cache = root / "hub"
        self.pauses: list[tuple[int, float | None]] = []

    def runner(self, artifacts: str = "artifacts", **overrides) -> Runner:
        settings = {
            "model.source": "hub", "model.repo": REPO, "model.revision": COMMIT, "model.path": None,
            "model.files": ["*.json", "model-*.safetensors", "inference/*.py"], "model.leave_out": ["mtp.*"],
            "paths.hub": str(self.cache), "hub.stall_s": 0.2, "hub.retries": 4, "hub.files_at_once": 2,
        }  # fmt: skip
        cfg = self._make_config(**{**settings, **overrides})
        return Runner(cfg, self.root / artifacts)

    def download(self, **overrides) -> dict[str, bytes]:
        """Run the stage; return the snapshot's files."""
        runner = self.runner(**overrides)
        runner.run(["download"])
        snapshot = Path(runner.find("download").facts["snapshot"])
        return {
            p.relative_to(snapshot).as_posix(): p.read_bytes()
            for p in snapshot.rglob("*")
            if p.is_file()
        }

    def blob(self, name: str) -> Path:
        return self.cache / "models--someone--tiny/blobs" / sha256(self.hub.commits[COMMIT][name])


def wanted(hub: HubServer, commit: str = COMMIT) -> dict[str, bytes]:
    """What a snapshot must hold, byte for byte, but for the index, which names no draft."""
    files = {n: d for n, d in hub.commits[commit].items() if n not in (DRAFT, "README.md")}
    index = json.loads(files["model.safetensors.index.json"])
    del index["weight_map"]["mtp.0.w"]
    files["model.safetensors.index.json"] = json.dumps(index, indent=1).encode() + b"\n"
    return files
