"""What may import what, as far as `lint-imports` cannot see it: modules that load in milliseconds stay so."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE = [
    "conf.schema", "runtime.experts.cache", "runtime.experts.schedule", "runtime.experts.layout",
    "runtime.experts.drive", "runtime.experts.reader", "runtime.budget", "runtime.stats",
    "runtime.errors", "runtime.units", "runtime.checkpoint", "stages.core", "stages.stage", "run",
    "runtime.laws", "runtime.advisor.validator", "runtime.advisor.own_runs", "stages.advise", "stages.advise_check",
]  # fmt: skip


def loaded_by(*modules: str) -> dict[str, list[str]]:
    """Import each module in turn in one fresh interpreter; return the heavy ones that came with it."""
    code = (
        "import importlib, sys\n"
        "heavy = ('torch', 'hydra', 'omegaconf', 'transformers', 'fastapi', 'huggingface_hub')\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    print(name, *[h for h in heavy if h in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


def test_pure_modules_import_nothing_heavy():
    assert loaded_by(*PURE) == {name: [] for name in PURE}


def test_kernels_init_is_empty():
    """A package of this name exists on PyPI, and `import transformers` looks into ours."""
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text())
    assert [node for node in tree.body if not isinstance(node, ast.Expr)] == []


@pytest.mark.parametrize("folder", ["runtime", "kernels"])
def test_nothing_below_the_stages_reads_the_environment(folder):
    """Options are keys: a variable that changes behaviour would be in no record and no --help."""
    for path in (ROOT / folder).rglob("*.py"):
        assert "os.environ" not in path.read_text(), path
        assert "getenv" not in path.read_text(), path
