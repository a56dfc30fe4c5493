"""The HTTP server, and what it keeps of conversations: `serve`, `snapshots`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ServeConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    queue: int = 8  # requests that may wait; one more gets 429
    replicas: int = 1  # servers behind this address, each on a machine of its own (Ray Serve)
    max_batch: int = 1  # conversations decoded together: an expert that several need is read once
    keep_alive_s: float = 10.0  # a comment frame this often while a stream is silent; 0 is never
    keep_alive_chunks: bool = False  # as empty chunks, for clients whose watchdogs count only those
    strict_model: bool = True  # false: any model name in a request means this model
    api_key: str | None = None  # that requests must send; better in a file, or in NVMOE_API_KEY
    api_key_file: str | None = None  # a file whose first line is the key
    open_metrics: bool = True  # /metrics without the key
    # pages of other hosts that may use this server from a browser; ["*"]: all
    cors_origins: list[str] = field(default_factory=list)
    reasoning_alias: bool = False  # send `reasoning` beside `reasoning_content`


@dataclass
class SnapshotsConfig:
    """Copies of conversations' states while serving, that follow-ups go on from, also after a restart."""

    ram_gib: float | None = None  # 0: none; null: an eighth of what may be used, at most 1
    disk_gib: float = 4.0  # they hold the conversations' tokens; 0: none
    every_tokens: int = 2048  # a copy at least this often in a long prompt, in RAM alone; 0: none


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "serve.port": (0, 65535),
    "serve.queue": (0, 10000),
    "serve.replicas": (1, 1024),
    "serve.max_batch": (1, 64),
    "serve.keep_alive_s": (0, 3600),
    "snapshots.ram_gib": (0, 2**20),
    "snapshots.disk_gib": (0, 2**20),
    "snapshots.every_tokens": (0, 2**24),
}
