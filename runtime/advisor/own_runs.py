"""Run reports: this project's own bench results as documents, and every report beside what the laws predict."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.advisor.facts import HERE, Machine
from runtime.advisor.kb import KnowledgeBase
from runtime.advisor.ledger import Ledger
from runtime.advisor.speeds import HIT_EXPONENT, OWN_ENGINE, Speeds
from runtime.quantities import GIB_BYTES

BENCH_NAME = "bench.json"


@dataclass(frozen=True, slots=True)
class Here:
    """What makes a bench one of this machine, and which model is asked about, if the base does not have it."""

    host: str
    ram_bytes: float | None
    model: Mapping[str, Any]


def read_own_runs(
    kb: KnowledgeBase, outputs: Path, here: Here | None = None
) -> list[dict[str, Any]]:
    """Return runs made of the bench results under a folder.

    Left out: models that neither the base nor `here` has, machines that are neither in the base nor this one, simulated
    drives, and synthetic checkpoints, whose routes are not the model's.
    """
    found = []
    for path in sorted(outputs.glob(f"**/{BENCH_NAME}")):
        try:
            run = _run(kb, json.loads(path.read_text()), path, here)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if run is not None:
            found.append(run)
    return found


def _run(
    kb: KnowledgeBase, bench: Mapping[str, Any], path: Path, here: Here | None
) -> dict[str, Any] | None:
    config = bench["config"]
    if str(config["model"].get("source")) == "synthetic":
        return None
    model = kb.find("model", str(bench["model"])).document
    if model is None and here is not None and here.model["name"] == bench["model"]:
        model = here.model
    system: Mapping[str, Any] | None
    system = next((s for s in kb.all("system") if s.get("hw") == config["hw"]["name"]), None)
    if system is None and here is not None and bench["machine"]["host"] == here.host:
        system = {"id": HERE, "name": f"this machine, {here.host}", "ram_bytes": here.ram_bytes}
    if (
        model is None
        or system is None
        or not model["variants"]
        or config["hw"]["drive"]["simulate_gib_s"]
        or any(drive["simulate_gib_s"] for drive in config["hw"].get("drives", ()))
    ):
        return None
    cache = config["cache"]["ram_gib"]
    cache_bytes = float(system["ram_bytes"]) / 2 if cache is None else float(cache) * GIB_BYTES
    variant = model["variants"][0]
    speed = bench["decode_tok_s"]
    day = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
    run: dict[str, Any] = {
        "id": f"run-own-{path.parent.name.lower()}",
        "name": f"bench of {bench['model']} on {system['name']}",
        "model": model["id"],
        "variant": variant["id"],
        "system": system["id"],
        "engine": OWN_ENGINE,
        "placement": "disk+ram" if cache_bytes else "disk",
        "metric": "decode_tok_s",
        "value": [float(speed["min"]), float(speed["max"])],
        "unit": "tok/s",
        "date": day,
        "evidence": "measured",
        "role": "fact",
        "sources": [path.name],
        "status": "checked",
    }
    if cache_bytes:
        run["cache_bytes"] = cache_bytes
    if (hit_rate := _hit_rate(kb, bench, model, variant)) is not None:
        run["hit_rate"] = hit_rate
    return run


def _hit_rate(
    kb: KnowledgeBase,
    bench: Mapping[str, Any],
    model: Mapping[str, Any],
    variant: Mapping[str, Any],
) -> float | None:
    """Return the share of a token's routed bytes that the drive did not have to give, by the bytes that it gave."""
    if "total" not in bench or "expert_bytes" not in variant:
        return None
    total, counters = bench["total"], bench["total"]["counters"]
    needed: float = kb.laws["L04"](
        moe_layers=model["moe_layers"], top_k=model["top_k"], expert_bytes=variant["expert_bytes"]
    )
    used = 1 - counters["wasted_nbytes"] / max(1, counters["read_nbytes"])
    given: float = float(total["read_nbytes_per_token"]) * used / needed
    return min(1.0, max(0.0, 1.0 - given))


def compare_own(
    kb: KnowledgeBase,
    model: Mapping[str, Any],
    variant: Mapping[str, Any],
    machine: Machine | None,
    own_runs: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return own benches of a variant on a machine beside what the laws say, and the ceiling with the hits they had.

    role is `bound` where the laws count no arithmetic, as on a CPU: there, predicted is what no run passes.
    """
    if machine is None or machine.runs_of is None:
        return []
    speeds = Speeds(kb, Ledger(kb.laws), model, variant)
    rows = []
    for run in own_runs:
        if (run["model"], run["variant"], run["system"]) != (
            model["id"],
            variant["id"],
            machine.runs_of,
        ):
            continue
        speed = speeds.streamed(machine, float(run.get("cache_bytes", 0.0)))
        if speed is None or machine.disk_bw is None:
            continue
        hit = run.get("hit_rate", 0.0)
        ceiling = min(v for name, v in speed.ceilings.items() if name != "drive")
        if hit < 1:
            routed = kb.laws["L04"](
                moe_layers=model["moe_layers"],
                top_k=model["top_k"],
                expert_bytes=variant["expert_bytes"],
            )
            drive = kb.laws["L12"](disk_bw=machine.disk_bw, h=hit, routed_bytes_per_token=routed)
            ceiling = min(ceiling, drive)
        predicted = speed.mid if speed.law_mid is None else speed.law_mid
        row = _row(run, "bound" if speed.is_bound else "pred", "L14", predicted, ceiling)
        rows.append(row | {"is_above_ceiling": row["measured"][0] > 1.01 * ceiling})
    return rows


def compare(kb: KnowledgeBase) -> list[dict[str, Any]]:
    """Return every report that has a role beside a fact with what the laws predict of it, and by how much they differ.

    error is predicted over the nearest end of what was measured, less one: 0 within a range.
    """
    rows = []
    for run in kb.all("run"):
        if run.get("role", "fact") == "fact":
            continue
        predicted, law = predict(kb, run)
        rows.append(_row(run, run["role"], law, predicted, ceiling(kb, run)))
    return rows


def _row(
    run: Mapping[str, Any], role: str, law: str, predicted: float, most: float | None
) -> dict[str, Any]:
    value = run["value"]
    low, high = value if isinstance(value, list) else (value, value)
    error = 0.0 if low <= predicted <= high else predicted / (low if predicted < low else high) - 1
    return {
        "run": run["id"],
        "name": run["name"],
        "role": role,
        "law": law,
        "predicted": predicted,
        "measured": [low, high],
        "unit": run["unit"],
        "error": error,
        "error_of_middle": predicted / ((low + high) / 2) - 1,
        "ceiling": most,
    }


def _of(kb: KnowledgeBase, run: Mapping[str, Any]) -> tuple[Any, Any, Any, dict[str, float]]:
    model, system = kb.get("model", run["model"]), kb.get("system", run["system"])
    variant = next(v for v in model["variants"] if v["id"] == run["variant"])
    drive = kb.get("drive", system["drives"][0])
    given: dict[str, float] = {"disk_bw": drive["read_bw_measured"], "pcie_bw": system["pcie_bw"]}
    if model["arch"] != "dense":
        sizes = {"moe_layers": model["moe_layers"], "expert_bytes": variant["expert_bytes"]}
        given["set"] = kb.laws["L03"](**sizes, experts=model["experts"])
        given["B"] = kb.laws["L04"](**sizes, top_k=model["top_k"])
    return model, variant, system, given


def predict(
    kb: KnowledgeBase, run: Mapping[str, Any], calibration: Mapping[str, Any] | None = None
) -> tuple[float, str]:
    """Return what the laws say a run gives, in its unit, and the law.

    calibration: of the run's engine, or another; with rest_s, s, t_layer_s and so on.
    """
    model, variant, system, given = _of(kb, run)
    if run.get("placement") == "vram":
        gpu = kb.get("gpu", system["gpu"][0])
        speed = kb.laws["L16"](
            eta=0.75, vram_bw=gpu["vram_bw"], weights_bytes=variant["active_resident_bytes"]
        )
        return speed, "L16"
    if calibration is None:
        engine = kb.get("engine", run["engine"])
        calibration = engine["calibrations"][0]
    assert calibration is not None
    disk = calibration.get("disk_bw", given["disk_bw"])
    if run["metric"] == "prefill_s":
        total = float(calibration["prefill_start_s"])
        for piece in run["pieces"]:
            total += kb.laws["L15"](
                routed_set_bytes=given["set"],
                top_k=model["top_k"],
                experts=model["experts"],
                n=piece,
                beta=0.70,
                disk_bw=disk,
                r=calibration["prefill_tok_s"],
            )
        return total, "L15"
    hit = run.get("hit_rate")
    if run["placement"] == "ram":
        hit = 1.0
    if hit is None:
        hit = kb.laws["L13"](
            cache_bytes=run.get("cache_bytes", 0), routed_set_bytes=given["set"], a=HIT_EXPONENT[1]
        )
    fixed = 0.0
    if "rest_s" in calibration:
        fixed = max(0.0, float(calibration["rest_s"]) - given["B"] / given["pcie_bw"])
    time = kb.laws["L14"](
        B=given["B"],
        h=hit,
        disk_bw=disk,
        pcie_bw=given["pcie_bw"],
        layers=model["layers"],
        t_layer=calibration.get("t_layer_s", 0.0),
        t_fixed=fixed,
        s=calibration["s"],
    )
    return 1 / time, "L14"


def ceiling(kb: KnowledgeBase, run: Mapping[str, Any]) -> float | None:
    """Return the speed that no run may pass, by the law of the part that bounds it; None for prompts."""
    if run["metric"] != "decode_tok_s":
        return None
    _, variant, system, given = _of(kb, run)
    if run.get("placement") == "vram":
        gpu = kb.get("gpu", system["gpu"][0])
        return kb.laws["L09"](
            vram_bw=gpu["vram_bw"],
            active_resident_bytes=variant["active_resident_bytes"],
            routed_bytes_per_token=0,
        )
    link = kb.laws["L11"](pcie_bw=given["pcie_bw"], routed_bytes_per_token=given["B"])
    hit = run.get("hit_rate", 1.0 if run["placement"] == "ram" else 0.0)
    if run.get("cache_bytes") and "hit_rate" not in run:
        hit = kb.laws["L13"](
            cache_bytes=run["cache_bytes"], routed_set_bytes=given["set"], a=HIT_EXPONENT[1]
        )
    if hit >= 1:
        return link
    drive = kb.laws["L12"](disk_bw=given["disk_bw"], h=hit, routed_bytes_per_token=given["B"])
    return min(link, drive)
