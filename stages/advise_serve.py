"""Serve the advisor: MCP over stdio or HTTP, plain HTTP beside it. Loopback unless told otherwise."""

from __future__ import annotations

import contextlib
import sys

from runtime.advisor import kb as knowledge
from runtime.advisor.server import build_app, build_server
from runtime.advisor.service import Service
from stages.advise import outputs_of
from stages.stage import Stage, StageContext


def run(ctx: StageContext) -> None:
    """Serve until stopped; a broken knowledge base is refused before the port opens."""
    advise = ctx.cfg.advise
    knowledge.load()
    service = Service(outputs=outputs_of(ctx.cfg))
    with contextlib.suppress(KeyboardInterrupt):
        if advise.transport == "stdio":
            build_server(service).run("stdio")
            return
        import uvicorn

        print(f"advisor: http://{advise.host}:{advise.port}/llms.txt, MCP at /mcp", file=sys.stderr)
        uvicorn.run(
            build_app(service, advise.host, advise.port),
            host=advise.host,
            port=advise.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
        )


STAGE = Stage(name="advise_serve", run=run, is_endpoint=True)
