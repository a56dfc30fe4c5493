"""`stages=[verify]` on the bundled DeepSeek model: green as it is, red when its bytes are damaged, and then no chat."""

from __future__ import annotations

import re
import shutil

import pytest
from tiny_setup import ROOT, make_runner

from runtime.checkpoint import Checkpoint
from runtime.errors import VerificationError
from runtime.models.deepseek_controls import CONTROLS
from stages import verify, verify_rows

TINY = ROOT / "runtime" / "bundled" / "tiny-deepseek"
MODEL = ("model=tiny_deepseek", "hw=cpu", "hw.compute_threads=1")


@pytest.mark.slow
def test_the_whole_table_from_nothing(cli, tmp_path):
    """The real program, with few documents, for which no perplexity is recorded. Twice: nothing is computed again."""
    words = (*MODEL, "stages=[verify]", "verify.documents=2", "verify.control_documents=4")
    done = cli(*words)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert all(line.endswith("  ok") for line in lines)
    names = [re.split(r"  +", line)[0] for line in lines]
    assert names[:2] == ["expert arithmetic against float64", "greedy answers as the reference's"]
    assert re.search(r"reference's +8 of 8 +all +ok", done.stdout)
    assert sum(name.startswith("same tokens: ") for name in names) == 5
    assert [n.split(": ")[1] for n in names if n.startswith("control")] == list(CONTROLS)
    assert "repack" not in done.stderr
    again = cli(*words)
    assert again.stdout == done.stdout
    assert "verify: skip: record matches" in again.stderr


@pytest.fixture
def damaged(tmp_path):
    """A copy of the snapshot; gate and up of the experts of layer 3 are twice what they were."""
    folder = shutil.copytree(TINY, tmp_path / "snapshot")
    checkpoint = Checkpoint.open(folder)
    for expert in range(48):
        for part in ("w1", "w3"):
            extent = checkpoint.info(f"layers.3.ffn.experts.{expert}.{part}.scale").extent
            with open(extent.file, "r+b") as file:
                file.seek(extent.offset)
                scales = file.read(extent.nbytes)
                file.seek(extent.offset)
                file.write(bytes(scale + 1 for scale in scales))
    return folder


def test_damaged_bytes_are_red_and_stop_chat(cli, tmp_path, damaged, monkeypatch):
    """In one run of verify's answers alone; what it leaves behind is what chat looks at."""
    words = (*MODEL, "model.source=local", f"model.path={damaged}")
    runner = make_runner(tmp_path / "outputs", *words)
    monkeypatch.setattr(verify, "PARTS", {"answers": verify_rows.answer_rows})
    with pytest.raises(VerificationError, match=r"1 of 1 rows are red: greedy answers"):
        runner.run(["verify"])
    chat = (*words, "stages=[chat]", "prompt=Hello!", "max_tokens=2")
    refused = cli(*chat)
    assert refused.returncode == 3, refused.stderr
    assert refused.stdout == ""
    assert "verify found wrong numbers on this machine: greedy answers" in refused.stderr
    assert "force=[verify]" in refused.stderr
    assert cli(*chat, "force=true").returncode == 0
