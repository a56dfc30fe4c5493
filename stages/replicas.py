"""`serve` on several machines: a whole server on each, behind one address, on Ray Serve (`serve.replicas`).

Each replica sets its model up on its own machine's drive and keeps its own copies of conversations; requests of one
conversation go to the same replica. One that is lost takes along the requests that it was answering; the others go on,
and Ray starts another. The project must be installed on every machine of the cluster.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from conf.schema import RunConfig
from runtime.server.affinity import conversation_key, preference
from runtime.server.app import create_app
from runtime.server.errors import ApiError
from runtime.server.guard import MAX_BODY_NBYTES
from runtime.server.in_process import Asked, Head, respond
from stages.core import Runner
from stages.download import absolute
from stages.opening import setup_stages
from stages.serve import bind, make_worker, read_key, wait_for_signal
from stages.stage import StageContext

log = logging.getLogger("stages")

APP_NAME = "nvmoe"
NO_LIMIT = 10_000  # each replica's own queue says when it is full
LOST = "the machine that computed this answer is lost: send the request again"


class AffinityRouter(RequestRouter):
    """Sends a conversation to the replica that its key prefers, of those that are there; the rest to any."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates, the preferred one first."""
        key = pending_request.metadata.session_id if pending_request is not None else ""
        if not key:
            return [random.sample(candidate_replicas, len(candidate_replicas))]
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[named[name]] for name in preference(key, list(named))]


class Replica:
    """One whole server, without a socket of its own."""

    def __init__(self, cfg: RunConfig, key: str | None) -> None:
        """Set the model up on this machine and load it; ready when this returns."""
        names = setup_stages(cfg)
        runner = Runner(cfg, absolute(cfg.paths.artifacts))
        runner.run(names)
        inputs = {name: output for name in names if (output := runner.find(name)) is not None}
        is_over = threading.Event()
        self._worker = make_worker(cfg, inputs, runner, is_over.set)
        self._app = create_app(self._worker, cfg.serve, key)
        self._worker.start()
        self._worker.wait_until_loaded()

    async def answer(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """Yield a response's head, then its body in parts."""
        async for part in respond(self._app, asked):
            yield part

    def check_health(self) -> None:
        """Raise when the engine is lost; Ray then starts another replica."""
        if self._worker.failure is not None:
            raise self._worker.failure

    def __del__(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.stop()


class Front:
    """Takes requests in and hands each to the replica that its conversation belongs to."""

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its answer back; a lost replica is an error in OpenAI's shape."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_NBYTES:  # the replica refuses it
                break
        asked = Asked(
            request.method,
            request.url.path,
            request.scope["query_string"],
            tuple(request.headers.raw),
            body,
            None if request.client is None else (request.client.host, request.client.port),
        )
        to_replica = self._replicas.options(stream=True, session_id=conversation_key(body))
        parts = to_replica.answer.remote(asked)
        try:
            head = await anext(parts)
        except (RayError, RayServeException) as error:
            return _refusal(error)
        assert isinstance(head, Head)
        headers = {name.decode(): value.decode() for name, value in head.headers}
        is_stream = headers.get("content-type", "").startswith("text/event-stream")
        return StreamingResponse(_pass_on(parts, is_stream), head.status, headers)


def _refusal(error: Exception) -> Response:
    log.warning("a request failed: %s", error)
    answer = ApiError.internal(error) if isinstance(error, RayTaskError) else _lost()
    return JSONResponse(answer.body(), answer.status, headers=answer.headers)


def _lost() -> ApiError:
    return ApiError(503, LOST, "replica_lost")


async def _pass_on(parts: Any, is_stream: bool) -> AsyncIterator[bytes]:
    """Yield the body's parts; an open stream whose replica is lost ends with an error frame."""
    try:
        async for part in parts:
            yield part
    except (RayError, RayServeException) as error:
        log.warning("a stream broke: %s", error)
        if not is_stream:
            raise
        yield b"data: " + json.dumps(_lost().body()).encode() + b"\n\n"
    finally:
        parts.cancel()  # nothing, when it is over


def run(ctx: StageContext) -> None:
    """Start the replicas and serve until a signal; joins the cluster that RAY_ADDRESS or this machine has."""
    cfg = ctx.cfg
    key = read_key(cfg.serve)
    bind(cfg.serve).close()  # a taken port is known before anything is started
    ray.init(log_to_driver=True, ignore_reinit_error=True)
    try:
        serve.start(http_options={"host": cfg.serve.host, "port": cfg.serve.port})
        serve.run(application(cfg, key), name=APP_NAME)
        log.info(
            "%d replicas of %s at http://%s:%d/v1 (Ctrl-C stops)",
            cfg.serve.replicas, cfg.model.served_name, cfg.serve.host, cfg.serve.port,
        )  # fmt: skip
        wait_for_signal()
    finally:
        serve.shutdown()
        ray.shutdown()


def application(cfg: RunConfig, key: str | None) -> serve.Application:
    """Return what Ray Serve runs.  key: that requests must send."""
    resources = {"num_cpus": 1, "num_gpus": 1 if cfg.hw.device != "cpu" and _has_gpus() else 0}
    replica = serve.deployment(
        Replica,
        name="replica",
        num_replicas=cfg.serve.replicas,
        max_replicas_per_node=1,  # each has a drive and a memory plan of its own
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(request_router_class=AffinityRouter),
    )
    front = serve.deployment(
        Front, name="front", max_ongoing_requests=NO_LIMIT, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(replica.bind(cfg, key))


def _has_gpus() -> bool:
    return torch.cuda.is_available() or ray.cluster_resources().get("GPU", 0) > 0
