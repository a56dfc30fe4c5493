"""Numbers against references: perplexity, greedy answers, the same tokens for every setting, and controls that must
break.

A red row is recorded, shown, and stops `serve` and `chat` until it is mended (or force=true). What is computed is in
`verify_rows`; what a family's references are like, in `runtime/models/<family>_checks.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from conf.schema import RunConfig
from runtime.errors import VerificationError
from stages.opening import engine_files, setup_stages, uses_published_code
from stages.stage import Output, Stage, StageContext
from stages.verify_published import PUBLISHED_PARTS
from stages.verify_rows import PARTS, Case

# what an engine may need
MADE = ("download", "patch", "mirror", "repack", "checksums", "residents")


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides what is computed."""
    params = {
        **dataclasses.asdict(cfg.verify),
        "device": cfg.hw.device,
        "dtype": cfg.hw.dtype.value,
    }
    if uses_published_code(cfg):
        params |= {
            "arithmetic": "reference",
            "kernels": cfg.deepseek.kernels.value,
            "fix_index_keys": cfg.deepseek.fix_index_keys,
        }
    return params


def run(ctx: StageContext) -> None:
    """Compute every row; none is skipped because an earlier one is red."""
    case = Case.open(ctx.cfg, engine_files(ctx.inputs))
    parts = PUBLISHED_PARTS if uses_published_code(ctx.cfg) else PARTS
    for part in ctx.todo(list(parts), "parts"):
        ctx.done(part, rows=[dataclasses.asdict(row) for row in parts[part](case)])
    rows = [row for part in parts for row in ctx.units[part]["rows"]]
    ctx.facts = {"rows": rows, "red": [row["name"] for row in rows if not row["is_ok"]]}


def show(_cfg: RunConfig, output: Output) -> None:
    """Print the table; raise VerificationError when a row is red."""
    rows = output.facts["rows"]
    widths = [max(len(row[column]) for row in rows) for column in ("name", "found", "wanted")]
    for row in rows:
        cells = (
            row[column].ljust(width)
            for column, width in zip(("name", "found", "wanted"), widths, strict=True)
        )
        print("  ".join((*cells, "ok" if row["is_ok"] else "RED")))
    if output.facts["red"]:
        raise VerificationError(
            f"{len(output.facts['red'])} of {len(rows)} rows are red: {', '.join(output.facts['red'])}",
            "find the cause, then run again with force=[verify]",
        )


STAGE = Stage(
    name="verify",
    run=run,
    params=params,
    show=show,
    needs=lambda cfg: tuple(name for name in MADE if name in setup_stages(cfg)),
)
