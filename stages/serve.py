"""Serve the model over HTTP until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType

import torch
import uvicorn

from conf.schema import RunConfig, ServeConfig
from runtime import build, hardware
from runtime.budget import ram_limit
from runtime.engine import Engine, load_family
from runtime.errors import UserError
from runtime.living_kv.service import MemoryService
from runtime.server.app import create_app
from runtime.server.served import Served
from runtime.server.worker import Worker
from runtime.snapshot import SnapshotStore, make_key
from runtime.units import GIB
from stages.core import Runner
from stages.download import absolute, snapshot_of
from stages.opening import open_engine, setup_stages, warm_up
from stages.stage import Output, Stage, StageContext

log = logging.getLogger("stages")

STATE_FORMAT = 1  # one more whenever the arithmetic changes what a state holds, or how
KEY_VARIABLE = "NVMOE_API_KEY"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
DRIVE_PROBE_S = 0.5
STOP_S = 5  # an open stream gets its error frame and this long to go


class _Server(uvicorn.Server):
    """uvicorn, telling the worker at the first signal: open streams must end for the server to end."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; unlike uvicorn's own, do not raise them again: the server stops cleanly."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in STOP_SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._worker.stop()
        super().handle_exit(sig, frame)  # the second Ctrl-C does not wait for anybody


def run(ctx: StageContext) -> None:
    """Bind first, so that a taken port is known before the model is loaded; then load and serve."""
    if ctx.cfg.serve.replicas > 1:
        _run_replicas(ctx)
        return
    serve, model = ctx.cfg.serve, ctx.cfg.model
    key = read_key(serve)
    with bind(serve) as listener:
        host, port = listener.getsockname()[:2]
        if serve.host not in ("127.0.0.1", "::1", "localhost") and key is None:
            log.warning(
                "serve.host=%s: anybody who reaches this machine can use the model; serve.api_key_file=FILE asks for "
                "a key",
                serve.host,
            )
        server: _Server | None = None

        def on_failure() -> None:
            if server is not None:
                server.should_exit = True

        worker = make_worker(ctx.cfg, ctx.inputs, ctx.runner, on_failure)
        config = uvicorn.Config(
            create_app(worker, serve, key),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=STOP_S,
            server_header=False,
        )
        server = _Server(config, worker)
        worker.start()
        log.info(
            "serving %s at http://%s:%d/v1, a chat page at http://%s:%d/ (Ctrl-C stops)",
            model.served_name, host, port, host, port,
        )  # fmt: skip
        server.run(sockets=[listener])
        worker.stop()
        worker.join(STOP_S)
        if worker.failure is not None:
            raise worker.failure
    log.info("stopped")


def make_worker(
    cfg: RunConfig, inputs: Mapping[str, Output], runner: Runner, on_failure: Callable[[], None]
) -> Worker:
    """Return a worker that is not started, for what the set-up stages have made."""
    cfg, model = with_room_for_snapshots(cfg), cfg.model

    def open_warm() -> Engine:
        engine = open_and_tell(cfg, inputs, runner)
        warm_up(engine, inputs)
        return engine

    served = Served(
        model.served_name,
        model.revision,
        load_family(model.family).open_codec(snapshot_of(inputs["download"])),
        model.context_tokens,
        build.version(),
        build.commit(),
    )
    return Worker(
        served,
        open_warm,
        lambda engine: open_store(cfg, inputs, engine),
        cfg.serve.queue,
        on_failure,
        cfg.serve.max_batch,
        lambda engine: MemoryService(
            engine, snapshot_of(inputs["download"]), absolute(cfg.paths.memory), cfg.memory
        ),
    )


def _run_replicas(ctx: StageContext) -> None:
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"serve.replicas={ctx.cfg.serve.replicas} needs Ray Serve, which cannot be imported: {error}",
            "pip install -c constraints.txt -e '.[replicas]'",
        ) from error
    from stages import replicas

    replicas.run(ctx)


def wait_for_signal() -> None:
    """Return at the first SIGINT or SIGTERM."""
    is_over = threading.Event()
    before = {sig: signal.signal(sig, lambda *_: is_over.set()) for sig in STOP_SIGNALS}
    try:
        is_over.wait()
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def open_and_tell(cfg: RunConfig, inputs: Mapping[str, Output], runner: Runner) -> Engine:
    """Open the engine, and say what the drive gives: a slow folder must not look like a slow engine."""
    engine = open_engine(cfg, inputs, runner)
    rate = engine.measure_drive(DRIVE_PROBE_S)
    how = "direct reads" if engine.is_direct else "through the page cache"
    log.info(
        "the drive gives %.2f GiB/s of experts now (%s): at most %.2f tok/s while none is in RAM",
        rate, how, rate * GIB / engine.routed_nbytes,
    )  # fmt: skip
    return engine


def read_key(serve: ServeConfig) -> str | None:
    """Return the key that requests must send, from a file, the config or the environment. Raises UserError."""
    if serve.api_key_file is None:
        # a secret is no option: in a variable it is in no record of a run
        return serve.api_key or os.environ.get(KEY_VARIABLE) or None
    path = absolute(serve.api_key_file)
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"serve.api_key_file={path} cannot be read: {error}",
            "write the key into its first line",
        ) from error
    if not lines[0].strip():
        raise UserError(
            f"serve.api_key_file={path} has no key in its first line", "write the key there"
        )
    return lines[0].strip()


def with_room_for_snapshots(cfg: RunConfig) -> RunConfig:
    """Return the config whose memory plan leaves out what copies of conversations may take, which is a number then."""
    room = cfg.snapshots.ram_gib
    if room is None:
        total, available = hardware.total_ram_nbytes(), hardware.available_ram_nbytes()
        limit = ram_limit(cfg.hw.ram_gib, total, available, cfg.hw.reserve_gib)
        room = min(1.0, limit / GIB / 8)
    hw = replace(cfg.hw, reserve_gib=cfg.hw.reserve_gib + room)
    return replace(cfg, hw=hw, snapshots=replace(cfg.snapshots, ram_gib=room))


def open_store(cfg: RunConfig, inputs: Mapping[str, Output], engine: Engine) -> SnapshotStore:
    """Open the store of conversations under the name of everything that decides a state's bytes."""
    state = engine.new_state().tensors()
    facts = {
        "format": STATE_FORMAT,
        "version": build.version(),
        "torch": torch.__version__,
        "arithmetic": (torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()),
        "model": cfg.model.name,
        "revision": cfg.model.revision,
        "files": {name: output.record for name, output in inputs.items()},
        "deltanet": cfg.model.deltanet,
        "pieces": engine.prefill_tokens,
        "device": str(engine.device.type),
        "dtype": cfg.hw.dtype,
        "graphs": cfg.hw.has_graphs,
        "drafts": cfg.drafts.enabled,
        "deepseek": str(cfg.deepseek),
        "state": {name: str(tensor.dtype) for name, tensor in state.items()},
    }
    folder = absolute(cfg.paths.snapshots) / cfg.model.name / make_key(facts)
    ram_nbytes = int((cfg.snapshots.ram_gib or 0) * GIB)
    disk_nbytes = int(cfg.snapshots.disk_gib * GIB)
    try:
        return SnapshotStore(ram_nbytes, folder if ram_nbytes else None, disk_nbytes)
    except OSError as error:
        log.warning(
            "conversations will not outlast this server: %s cannot be used (%s); set paths.snapshots=FOLDER, or "
            "snapshots.disk_gib=0 for none",
            folder, error.strerror,
        )  # fmt: skip
        return SnapshotStore(ram_nbytes)


def bind(serve: ServeConfig) -> socket.socket:
    """Return a listening socket. Raises UserError when host or port cannot be used."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            serve.host, serve.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise UserError(
            f"serve.host={serve.host} is no address of this machine: {error}",
            "use serve.host=127.0.0.1",
        ) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        what = "is taken by another program" if taken else f"cannot be used: {error.strerror}"
        raise UserError(
            f"{serve.host}:{serve.port} {what}", "choose another with serve.port=8001"
        ) from error
    return listener


STAGE = Stage(name="serve", run=run, needs=setup_stages, is_endpoint=True)
