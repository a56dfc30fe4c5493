"""Launches that are captured once as CUDA graphs, in one pool, and replayed by name."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """The graphs of one decoder. Everything that a launch reads or writes lies at a fixed address."""

    def __init__(self, is_on: bool, beside: Graphs | None = None) -> None:
        """is_on: capture and replay (CUDA); else every launch runs as it is.

        beside: of another decoder, to share memory with: no two launches run at the same time.
        """
        self.is_on = is_on
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._captured: list[torch.cuda.CUDAGraph] = [] if beside is None else beside._captured

    def run(self, name: Hashable, launch: Callable[[], None], is_first: bool) -> None:
        """Run a launch, from its second time on as a graph.

        is_first: of the first step, which compiles kernels and sets up libraries; a capture must not meet that.
        """
        if not self.is_on or is_first:
            launch()
            return
        graph = self._graphs.get(name)
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            pool = self._captured[0].pool() if self._captured else None
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                launch()
            self._graphs[name] = graph
            self._captured.append(graph)
        graph.replay()
