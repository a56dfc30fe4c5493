"""Run reports: this project's own bench results as documents, and every report beside what the laws predict."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.advisor.kb import KnowledgeBase
from runtime.advisor.speeds import HIT_EXPONENT, OWN_ENGINE
from runtime.quantities import GIB_BYTES

BENCH_NAME = "bench.json"


def read_own_runs(kb: KnowledgeBase, outputs: Path) -> list[dict[str, Any]]:
    """Return runs made of the bench results under a folder; those of models or machines that the base does not have are
    left out, and so are synthetic checkpoints: their routes are not the model's.
    """
    found = []
    for path in sorted(outputs.glob(f"**/{BENCH_NAME}")):
        try:
            run = _run(kb, json.loads(path.read_text()), path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if run is not None:
            found.append(run)
    return found


def _run(kb: KnowledgeBase, bench: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    config = bench["config"]
    if str(config["model"].get("source")) == "synthetic":
        return None
    model = kb.find("model", str(bench["model"])).document
    system = next((s for s in kb.all("system") if s.get("hw") == config["hw"]["name"]), None)
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
    speed = bench["decode_tok_s"]
    day = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
    run: dict[str, Any] = {
        "id": f"run-own-{path.parent.name.lower()}",
        "name": f"bench of {bench['model']} on {system['name']}",
        "model": model["id"],
        "variant": model["variants"][0]["id"],
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
    return run


def compare(kb: KnowledgeBase) -> list[dict[str, Any]]:
    """Return every report that has a role beside a fact with what the laws predict of it, and by how much they differ.

    error is predicted over the nearest end of what was measured, less one: 0 within a range.
    """
    rows = []
    for run in kb.all("run"):
        if run.get("role", "fact") == "fact":
            continue
        predicted, law = predict(kb, run)
        value = run["value"]
        low, high = value if isinstance(value, list) else (value, value)
        middle = (low + high) / 2
        error = (
            0.0 if low <= predicted <= high else predicted / (low if predicted < low else high) - 1
        )
        rows.append(
            {
                "run": run["id"],
                "name": run["name"],
                "role": run["role"],
                "law": law,
                "predicted": predicted,
                "measured": [low, high],
                "unit": run["unit"],
                "error": error,
                "error_of_middle": predicted / middle - 1,
                "ceiling": ceiling(kb, run),
            }
        )
    return rows


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
