"""The solution paths, walked always and all of them."""

from __future__ import annotations

from collections.abc import Callable

from runtime.advisor.paths import bought, cloud, owned
from runtime.advisor.verdicts import Case, Verdict

WALKERS: dict[str, Callable[[Case], Verdict]] = {
    "keep-existing": owned.keep,
    "upgrade-existing": owned.upgrade,
    "used-hardware": bought.used,
    "new-single-gpu": bought.single_gpu,
    "multi-gpu": bought.multi_gpu,
    "unified-memory": bought.unified,
    "cpu-ram-offload-moe": owned.offload,
    "cpu-only-small": owned.cpu_only,
    "smaller-model": owned.smaller,
    "cloud-api": cloud.api,
    "cloud-gpu-rent": cloud.rent,
    "nvme-expert-streaming": owned.streaming,
}


def walk(case: Case) -> dict[str, Verdict]:
    """Walk every path and return its verdict by id, in the order of paths.yaml; `case.found` is filled on the way."""
    # the local ways first: keeping and the cloud are judged against them
    for name in ("nvme-expert-streaming", "cpu-ram-offload-moe"):
        case.found[name] = WALKERS[name](case)
    for path in case.kb.paths:
        if path["id"] not in case.found:
            case.found[path["id"]] = WALKERS[path["id"]](case)
    return {path["id"]: case.found[path["id"]] for path in case.kb.paths}
