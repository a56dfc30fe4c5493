"""What `serve` makes of its config before the model is there: the key, the room for copies, and their name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from conf.schema import ServeConfig
from runtime.errors import UserError
from runtime.units import GIB
from stages import serve
from stages.serve import open_store, read_key, with_room_for_snapshots
from stages.stage import Output


def test_the_key_comes_from_a_file_the_config_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("NVMOE_API_KEY", raising=False)
    file = tmp_path / "key"
    file.write_text("s3cret\nnotes\n")
    assert read_key(ServeConfig(api_key_file=str(file), api_key="other")) == "s3cret"
    assert read_key(ServeConfig(api_key="other")) == "other"
    assert read_key(ServeConfig()) is None
    monkeypatch.setenv("NVMOE_API_KEY", "third")
    assert read_key(ServeConfig()) == "third"
    assert read_key(ServeConfig(api_key="other")) == "other"
    monkeypatch.delenv("NVMOE_API_KEY")
    assert read_key(ServeConfig(api_key="")) is None
    file.write_text("\n")
    with pytest.raises(UserError, match="has no key in its first line"):
        read_key(ServeConfig(api_key_file=str(file)))
    with pytest.raises(UserError, match="cannot be read"):
        read_key(ServeConfig(api_key_file=str(tmp_path / "missing")))


def test_room_for_copies_is_taken_out_of_the_memory_plan(make_config):
    for fields, room in (
        ({"snapshots.ram_gib": 0.5}, 0.5),
        ({"snapshots.ram_gib": 0.0}, 0.0),
        ({"hw.ram_gib": 0.5}, 0.0625),
    ):
        config = make_config(**{"hw.reserve_gib": 0.25, **fields})
        if "hw.ram_gib" in fields:
            config.hw.reserve_gib = 0.0
        before = config.hw.reserve_gib
        found = with_room_for_snapshots(config)
        assert found.snapshots.ram_gib == pytest.approx(room)
        assert found.hw.reserve_gib == pytest.approx(before + room)
        assert config.hw.reserve_gib == before


def test_a_folder_that_cannot_be_written_costs_the_copies_on_the_disk_alone(
    make_config, tmp_path, caplog
):
    (tmp_path / "file").write_text("in the way")
    config = make_config(**{"snapshots.ram_gib": 0.01})
    config.paths.snapshots = str(tmp_path / "file")
    state = SimpleNamespace(tensors=dict)
    engine = SimpleNamespace(new_state=lambda: state, prefill_tokens=1, device=torch.device("cpu"))
    store = open_store(config, {}, engine)
    assert store.is_enabled
    assert store.num_saved == 0
    assert "snapshots.disk_gib=0" in caplog.text


def test_whatever_decides_a_states_bytes_decides_where_its_copies_are(make_config, tmp_path):
    def folder(revision: str = "a", pieces: int = 512, dtype=torch.float32, **fields) -> str:
        config = make_config(**{"snapshots.ram_gib": 0.01, "model.revision": revision, **fields})
        config.paths.snapshots = str(tmp_path)
        state = SimpleNamespace(tensors=lambda: {"keys": torch.zeros(1, dtype=dtype)})
        engine = SimpleNamespace(
            new_state=lambda: state, prefill_tokens=pieces, device=torch.device("cpu")
        )
        inputs = {"download": Output(tmp_path, {"facts": {}, "key": revision})}
        store = open_store(config, inputs, engine)
        store.close()
        return str(store._disk._folder)

    first = folder()
    assert folder() == first
    others = [
        folder(revision="b"),
        folder(pieces=256),
        folder(dtype=torch.bfloat16),
        folder(**{"model.deltanet": "fp8_rows"}),
        folder(**{"drafts.enabled": True}),
        folder(**{"hw.dtype": "bfloat16"}),
    ]
    assert len({first, *others}) == 1 + len(others)
    # what changes no bit changes no name
    assert folder(**{"cache.ram_gib": 0.5, "prefetch.experts": 0, "serve.queue": 3}) == first


@pytest.mark.parametrize(("is_direct", "how"), [(True, "direct"), (False, "page cache")])
def test_a_slow_drive_is_told_at_the_start(monkeypatch, caplog, is_direct, how):
    """What a token would take with nothing in RAM, from the rate of just now."""
    asked = []

    def measure_drive(duration_s: float) -> float:
        asked.append(duration_s)
        return 0.1

    engine = SimpleNamespace(
        measure_drive=measure_drive, is_direct=is_direct, routed_nbytes=GIB // 4
    )
    monkeypatch.setattr(serve, "open_engine", lambda *_: engine)
    with caplog.at_level(logging.INFO, "stages"):
        assert serve.open_and_tell(None, {}, None) is engine
    assert asked
    assert "0.10 GiB/s" in caplog.text
    assert how in caplog.text
    assert "at most 0.40 tok/s" in caplog.text
