"""Serve the model over HTTP until Ctrl-C."""

from __future__ import annotations

import errno
import logging
import signal
import socket
from types import FrameType

import uvicorn

from conf.schema import ServeConfig
from runtime.errors import UserError
from runtime.server.app import create_app
from runtime.server.worker import Worker
from stages.core import Stage, StageContext
from stages.opening import open_engine

log = logging.getLogger("stages")

STOP_S = 5  # an open stream gets its error frame and this long to go


class _Server(uvicorn.Server):
    """uvicorn, telling the worker at the first signal: open streams must end for the server to end."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._worker.stop()
        super().handle_exit(sig, frame)


def run(ctx: StageContext) -> None:
    """Bind first, so that a taken port is known before the model is loaded; then load and serve."""
    serve, model = ctx.cfg.serve, ctx.cfg.model
    with bind(serve) as listener:
        host, port = listener.getsockname()[:2]
        if serve.host not in ("127.0.0.1", "::1", "localhost"):
            log.warning(
                "serve.host=%s: anybody who reaches this machine can use the model", serve.host
            )
        server: _Server | None = None

        def on_failure() -> None:
            if server is not None:
                server.should_exit = True

        worker = Worker(
            lambda: open_engine(ctx.cfg, ctx.inputs, ctx.runner), serve.queue, on_failure
        )
        app = create_app(worker, serve, model.served_name, model.context_tokens)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=STOP_S
        )
        server = _Server(config, worker)
        worker.start()
        log.info("serving %s at http://%s:%d/v1 (Ctrl-C stops)", model.served_name, host, port)
        try:
            server.run(sockets=[listener])
        except (KeyboardInterrupt, SystemExit):
            # uvicorn raises the signal that ended it once more; the server has stopped cleanly
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        worker.stop()
        worker.join(STOP_S)
        if worker.failure is not None:
            raise worker.failure
    log.info("stopped")


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


STAGE = Stage(name="serve", run=run, needs=lambda cfg: tuple(cfg.model.setup), is_endpoint=True)
