"""The README says what is there: its tables of choices are compared with conf/, its commands with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conf.schema import STAGES, known_keys

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "group", ["model", "hw", "cache", "prefetch", "serve", "simulate", "memory"]
)
def test_every_choice_of_a_group_is_in_the_readme_with_its_own_first_line(group: str):
    for path in (ROOT / "conf" / group).glob("*.yaml"):
        what = path.read_text().splitlines()[0].removeprefix("# ")
        assert f"| `{group}={path.stem}` | {what} |" in README


def test_every_stage_is_in_the_readme():
    for name in STAGES:
        assert f"| `{name}` |" in README


def test_every_override_in_the_documents_is_a_key():
    keys = known_keys()
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "EXPERIMENTS.md"):
        text = (ROOT / name).read_text()
        for key in re.findall(
            r"(?<![\w.])((?:hw|cache|prefetch|deepseek|serve|model|paths|memory|verify|bench|simulate|spot_check)\.[a-z_.]+)=",
            text,
        ):
            assert key in keys, f"{name}: {key}"


def test_every_file_named_in_the_architecture_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for row in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            path = name if "/" in name or (ROOT / name).exists() else f"{folder}/{name}"
            folder = path.rpartition("/")[0]
            if "<" not in path:
                assert (ROOT / path).exists(), path
