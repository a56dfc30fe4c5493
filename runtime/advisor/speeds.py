"""How fast a model is on a machine, by where its weights are: bands by the laws, replaced by what was measured.

Measured beats calculated: a run of the same variant, on the same machine, with a cache within 20 %, is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.advisor.facts import Machine
from runtime.advisor.kb import KnowledgeBase
from runtime.advisor.ledger import Ledger

# (least speed, expected, most speed) of what no data sheet says; from the spread that was seen
HIT_EXPONENT = (0.50, 0.32, 0.15)
LAYER_S = (2.8e-3, 1.5e-3, 0.3e-3)
OVERLAP = (1.0, 0.55, 0.2)
DENSE_SHARE = (0.62, 0.75, 0.88)
UNIFIED_MOE_SHARE = (0.45, 0.65, 0.88)  # of memory's rate: 0.48 was seen (run-ext-07)
CACHE_TOLERANCE = 0.20
OWN_ENGINE = "engine-nvmoe"


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second: a band, where it comes from, and what bounds it."""

    lo: float
    mid: float
    hi: float
    calc: str | None = None  # of `mid`
    run: str | None = None  # the measured run, where there is one
    is_bound: bool = False  # only an upper bound: the arithmetic is not counted
    ceilings: Mapping[str, float] = field(default_factory=dict)
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    hit_rate: float | None = None
    law_mid: float | None = None  # what the law says where a run was taken


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model's variant; None where they are not known."""

    routed_set: float | None
    routed_token: float | None


class Speeds:
    """Speeds of one variant, every evaluated law in the ledger."""

    def __init__(
        self,
        kb: KnowledgeBase,
        ledger: Ledger,
        model: Mapping[str, Any],
        variant: Mapping[str, Any],
        own_runs: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.kb, self.ledger, self.model, self.variant = kb, ledger, model, variant
        self._runs = [*kb.all("run"), *own_runs]

    @property
    def is_moe(self) -> bool:
        return self.model["arch"] in ("moe", "hybrid-moe")

    def routed_set(self) -> tuple[float, str] | None:
        """Return all routed bytes (L03), None for a dense model or unknown sizes."""
        if not self.is_moe or "expert_bytes" not in self.variant:
            return None
        m = self.model
        return self.ledger.compute(
            "L03",
            moe_layers=m["moe_layers"],
            experts=m["experts"],
            expert_bytes=self.variant["expert_bytes"],
        )

    def routed_token(self) -> tuple[float, str] | None:
        """Return routed bytes of a token (L04)."""
        if not self.is_moe or "expert_bytes" not in self.variant:
            return None
        m = self.model
        return self.ledger.compute(
            "L04",
            moe_layers=m["moe_layers"],
            top_k=m["top_k"],
            expert_bytes=self.variant["expert_bytes"],
        )

    def token_bytes(self) -> tuple[float, str | None]:
        """Return the bytes of weights that a token needs beside residents: routed ones (L04), all of a dense model."""
        return self.routed_token() or (self.active_resident(), None)

    def kv(self, tokens: float, users: float) -> tuple[float, str] | None:
        """Return bytes of keys and values by the law of the model's kind; None when its shape is not known."""
        m = self.model
        kind = m.get("kv_kind")
        if kind == "gqa":
            return self.ledger.compute(
                "L05",
                attn_layers=m["attn_layers"],
                n_kv_heads=m["n_kv_heads"],
                head_dim=m["head_dim"],
                kv_bytes=2,
                tokens=tokens,
                seqs=users,
            )
        if kind == "mla":
            return self.ledger.compute(
                "L06",
                attn_layers=m["attn_layers"],
                kv_lora_rank=m["kv_lora_rank"],
                rope_dim=m["rope_dim"],
                kv_bytes=2,
                tokens=tokens,
                seqs=users,
            )
        if kind == "hybrid":
            return self.ledger.compute(
                "L07",
                attn_layers=m["attn_layers"],
                sliding_layers=m.get("sliding_layers", 0),
                n_kv_heads=m["n_kv_heads"],
                head_dim=m["head_dim"],
                kv_bytes=2,
                tokens=tokens,
                window=m.get("window", 1),
                linear_state_bytes=m["linear_state_bytes"],
                seqs=users,
            )
        if kind == "compressed":
            return self.ledger.compute(
                "L07C",
                kv_bytes_per_token=m["kv_bytes_per_token"],
                tokens=tokens,
                linear_state_bytes=m["linear_state_bytes"],
                seqs=users,
            )
        return None

    def resident(self, tokens: float, users: float, with_experts: bool) -> tuple[float, str]:
        """Return the fast memory that is needed (L08), with all routed experts in it or without."""
        weights = float(self.variant.get("resident_bytes", self.variant["file_bytes"]))
        routed = self.routed_set() if with_experts else None
        kv = self.kv(tokens, users)
        return self.ledger.compute(
            "L08",
            resident_weights=weights + (routed[0] if routed else 0),
            kv=kv[0] if kv else 0,
            activation_peak=float(self.variant.get("activation_bytes", 0)),
            staging_ring=0,
            runtime_ctx=0,
        )

    # ---- where the weights are -----------------------------------------------------------------------------------

    def streamed(self, machine: Machine, cache: float) -> Speed | None:
        """Experts from the drive, with a RAM cache; None when a rate or size is not known."""
        routed, routed_set = self.routed_token(), self.routed_set()
        disk = machine.disk_bw
        if routed is None or routed_set is None or disk is None:
            return None
        if cache < routed[0]:
            cache = 0.0  # an LRU smaller than one token's experts finds nothing
        cache = min(cache, routed_set[0])
        hits = [
            self.ledger.compute("L13", cache_bytes=cache, routed_set_bytes=routed_set[0], a=a)[0]
            for a in HIT_EXPONENT
        ]
        return self._timed(machine, routed[0], disk, hits, "disk+ram" if cache else "disk", cache)

    def from_ram(self, machine: Machine) -> Speed | None:
        """All experts in RAM, copied or read over the link; without a card by RAM's rate alone, an upper bound."""
        routed = self.routed_token()
        if routed is None:
            return None
        if machine.gpu is None:
            return self.on_cpu(machine)
        disk = machine.disk_bw or 1e9  # not read: every expert is found
        return self._timed(machine, routed[0], disk, [1.0, 1.0, 1.0], "ram", None)

    def on_cpu(self, machine: Machine) -> Speed | None:
        """The CPU alone, all weights in RAM: the ceiling of RAM (L10)."""
        if machine.ram_bw is None:
            return None
        routed = self.routed_token()
        top, calc = self.ledger.compute(
            "L10",
            ram_bw=machine.ram_bw,
            h_vram=0,
            routed_bytes_per_token=routed[0] if routed else 0,
            cpu_resident_bytes=self.active_resident(),
        )
        return Speed(0.0, top, top, calc, is_bound=True, ceilings={"RAM": top})

    def active_resident(self) -> float:
        """Return the resident bytes that each token reads."""
        known = self.variant.get("active_resident_bytes", self.variant.get("resident_bytes"))
        return float(known if known is not None else self.variant["file_bytes"])

    def in_vram(self, gpu: Mapping[str, Any], machine: Machine | None, kv: float) -> Speed:
        """Everything in the memory of one card."""
        run = self.measured(machine, "vram", None) if machine is not None else None
        bandwidth = float(gpu["vram_bw"])
        routed = self.routed_token()
        ceiling, _ = self.ledger.compute(
            "L09",
            vram_bw=bandwidth,
            active_resident_bytes=self.active_resident(),
            routed_bytes_per_token=routed[0] if routed else 0,
            kv_read_bytes=kv,
        )
        if routed is None:
            found = [
                self.ledger.compute(
                    "L16",
                    eta=eta,
                    vram_bw=bandwidth,
                    weights_bytes=self.active_resident(),
                    kv_read_bytes=kv,
                )
                for eta in DENSE_SHARE
            ]
            lo, mid, hi = (value for value, _ in found)
            return self._with_run(run, Speed(lo, mid, hi, found[1][1], ceilings={"VRAM": ceiling}))
        rest, _ = self.ledger.compute(
            "L14F",
            host_read_bytes=0,
            pcie_bw=bandwidth,
            active_resident_bytes=self.active_resident() + kv,
            mem_bw=bandwidth,
        )
        times = [
            self.ledger.compute(
                "L14",
                B=routed[0],
                h=1,
                disk_bw=1e9,
                pcie_bw=bandwidth,
                layers=self.model["layers"],
                t_layer=t_layer,
                t_fixed=rest,
                s=0,
            )
            for t_layer in LAYER_S
        ]
        lo, mid, hi = (1 / value for value, _ in times)
        return self._with_run(run, Speed(lo, mid, hi, times[1][1], ceilings={"VRAM": ceiling}))

    def unified(self, machine: Machine) -> Speed | None:
        """Everything in unified memory: the ceiling of its bandwidth, and what is seen of such ceilings below it."""
        top = self.on_cpu(machine)
        if top is None:
            return None
        assert machine.ram_bw is not None
        routed = self.routed_token()
        found = [
            self.ledger.compute(
                "L10",
                ram_bw=share * machine.ram_bw,
                h_vram=0,
                routed_bytes_per_token=routed[0] if routed else 0,
                cpu_resident_bytes=self.active_resident(),
            )
            for share in (UNIFIED_MOE_SHARE if routed else DENSE_SHARE)
        ]
        lo, mid, hi = (value for value, _ in found)
        return Speed(lo, mid, hi, found[1][1], ceilings={"memory": top.hi})

    # ---- L14 and its parameters ----------------------------------------------------------------------------------

    def _timed(
        self,
        machine: Machine,
        routed: float,
        disk: float,
        hits: Sequence[float],
        placement: str,
        cache: float | None,
    ) -> Speed | None:
        is_gpu = machine.gpu is not None
        link = machine.pcie_bw if is_gpu else machine.ram_bw
        if link is None:
            return None
        calibration = self.calibration(machine)
        layers = float(self.model.get("layers", self.model["moe_layers"]))
        common: dict[str, Any] = {"B": routed, "disk_bw": disk, "pcie_bw": link, "layers": layers}
        if calibration is not None:
            rest = max(0.0, float(calibration["rest_s"]) - routed / link)
            settings = [(0.0, rest, float(calibration["s"]))] * 3
        elif is_gpu:
            settings = [(t, 0.0, s) for t, s in zip(LAYER_S, OVERLAP, strict=True)]
        else:
            reading, _ = self.ledger.compute(
                "L14F",
                host_read_bytes=0,
                pcie_bw=link,
                active_resident_bytes=self.active_resident(),
                mem_bw=link,
            )
            settings = [(0.0, reading, s) for s in OVERLAP]
        times = [
            self.ledger.compute("L14", h=h, t_layer=t, t_fixed=f, s=s, **common)
            for h, (t, f, s) in zip(hits, settings, strict=True)
        ]
        lo, mid, hi = (1 / value for value, _ in times)
        ceilings = {
            "link" if is_gpu else "RAM": self.ledger.compute(
                "L11", pcie_bw=link, routed_bytes_per_token=routed
            )[0]
        }
        if hits[2] < 1:  # what the luckiest cache allows
            ceilings["drive"] = self.ledger.compute(
                "L12", disk_bw=disk, h=hits[2], routed_bytes_per_token=routed
            )[0]
        t, f, s = settings[1]
        parts = self.kb.laws["L14"].parts(h=hits[1], t_layer=t, t_fixed=f, s=s, **common)
        milliseconds = {
            "drive": parts["t_disk"] * 1e3,
            "rest": parts["R"] * 1e3,
            "token": times[1][0] * 1e3,
        }
        least = lo if is_gpu else 0.0  # a CPU's arithmetic is not counted
        bound = not is_gpu
        speed = Speed(least, mid, hi, times[1][1], None, bound, ceilings, milliseconds, hits[1])
        return self._with_run(self.measured(machine, placement, cache), speed)

    def calibration(self, machine: Machine) -> Mapping[str, Any] | None:
        """Return the newest calibration of this variant on this machine."""
        found = [
            c
            for engine in self.kb.all("engine")
            for c in engine.get("calibrations", ())
            if c["model"] == self.model["id"]
            and c["variant"] == self.variant["id"]
            and c["system"] == machine.calibrated_as
            and "rest_s" in c
        ]
        return min(found, key=lambda c: float(c["rest_s"])) if found else None

    def measured(
        self, machine: Machine | None, placement: str, cache: float | None
    ) -> Mapping[str, Any] | None:
        """Return the run that replaces the law: of this project's engine if there is one, else the best."""
        if machine is None or machine.runs_of is None:
            return None
        routed = self.routed_set()
        most = None if routed is None else routed[0]
        found = [
            run
            for run in self._runs
            if run["metric"] == "decode_tok_s"
            and run["evidence"] == "measured"
            and run.get("model") == self.model["id"]
            and run.get("variant") == self.variant["id"]
            and run.get("system") == machine.runs_of
            and run.get("placement") == placement
            and _is_near(run.get("cache_bytes"), cache, most)
        ]
        return max(
            found,
            key=lambda run: (run["engine"] == OWN_ENGINE, run["date"], _range(run)[1]),
            default=None,
        )

    @staticmethod
    def _with_run(run: Mapping[str, Any] | None, speed: Speed) -> Speed:
        if run is None:
            return speed
        lo, hi = _range(run)
        return Speed(
            lo,
            (lo + hi) / 2,
            hi,
            None,
            run["id"],
            False,
            speed.ceilings,
            speed.parts_ms,
            speed.hit_rate,
            speed.mid,
        )


def _range(run: Mapping[str, Any]) -> tuple[float, float]:
    value = run["value"]
    low, high = value if isinstance(value, list) else (value, value)
    return float(low), float(high)


def _is_near(run_cache: float | None, cache: float | None, most: float | None) -> bool:
    """Whether two caches are alike; neither holds more than all routed bytes."""
    if not run_cache or not cache:
        return not run_cache and not cache
    if most is not None:
        run_cache, cache = min(run_cache, most), min(cache, most)
    return abs(run_cache - cache) <= CACHE_TOLERANCE * cache
