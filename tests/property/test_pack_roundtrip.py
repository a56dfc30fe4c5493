"""Experts in the packed store: random contents come back, the format is pinned, each damage is refused."""

import json
import random
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from conf.schema import DriveConfig
from kernels.formats import nvfp4_dequantize, nvfp4_quantize
from kernels.reference import nvfp4_swiglu_expert, swiglu
from runtime.checkpoint import Checkpoint, Extent, TensorInfo
from runtime.errors import UserError
from runtime.experts.arena import HostArena
from runtime.experts.layout import PACK_VERSION, ExpertKey, Nvfp4Shape, PackedLayout, PackHeader
from runtime.experts.reader import DirectReader
from runtime.models.qwen_weights import QwenSpec, expert_name, read_expert_block


def header_of(shape, num_layers, num_experts, **changes):
    values = {
        "version": PACK_VERSION,
        "num_layers": num_layers,
        "num_experts": num_experts,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "record_nbytes": shape.record_nbytes,
        "payload_nbytes": shape.payload_nbytes,
        "source_revision": "test",
    }
    return PackHeader(**{**values, **changes})


def write_pack(root, header, blocks):
    (root / "experts.bin").write_bytes(b"".join(blocks))
    (root / "pack.json").write_text(header.to_json())


def read_all(layout, keys):
    reader = DirectReader(layout.files, DriveConfig())
    arena = HostArena(len(keys), layout.record_nbytes)
    done = SimpleQueue()
    for row, key in enumerate(keys):
        reader.submit(key, layout.spans(key), arena.view(row), on_done=done.put)
    assert all(done.get(timeout=60).error is None for _ in keys)
    reader.close()
    return arena


@given(
    hidden=st.sampled_from([16, 48, 128]),
    intermediate=st.sampled_from([16, 32, 80]),
    num_layers=st.integers(1, 3),
    num_experts=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_every_block_comes_back(
    tmp_path_factory, hidden, intermediate, num_layers, num_experts, seed
):
    root = tmp_path_factory.mktemp("pack")
    shape, rng = Nvfp4Shape(hidden, intermediate), random.Random(seed)
    keys = [ExpertKey(layer, e) for layer in range(num_layers) for e in range(num_experts)]
    blocks = [rng.randbytes(shape.record_nbytes) for _ in keys]
    write_pack(root, header_of(shape, num_layers, num_experts), blocks)
    layout = PackedLayout.open(root)
    assert layout.shape == shape
    order = rng.sample(range(len(keys)), len(keys))
    arena = read_all(layout, [keys[i] for i in order])
    for row, i in enumerate(order):
        assert arena.view(row) == blocks[i]
        assert arena.rows[row].numpy().tobytes() == blocks[i]  # both views are the same bytes


def packed_checkpoint(root, hidden, inner, tensors):
    """A checkpoint of one expert whose six tensors lie in one plain file."""
    path, infos, at = root / "weights", {}, 0
    key = ExpertKey(0, 0)
    for part, (dtype, rows, columns, raw) in tensors.items():
        name = f"{expert_name(key)}{part}"
        infos[name] = TensorInfo(name, dtype, (rows, columns), Extent(path, at, len(raw)))
        at += len(raw)
    path.write_bytes(b"".join(raw for *_, raw in tensors.values()))
    spec = object.__new__(QwenSpec)
    object.__setattr__(spec, "hidden", hidden)
    object.__setattr__(spec, "intermediate", inner)
    return read_expert_block(Checkpoint(root, infos), spec, key)


def test_golden_block(tmp_path):
    """gate, up, down codes, then gate, up, down scales, then zeros: this order is the format."""
    tensors = {
        "up_proj.weight": ("U8", 16, 16, b"u" * 256),
        "down_proj.weight_scale": ("F8_E4M3", 32, 1, b"D" * 32),
        "down_proj.weight": ("U8", 32, 8, b"d" * 256),
        "gate_proj.weight_scale": ("F8_E4M3", 16, 2, b"G" * 32),
        "up_proj.weight_scale": ("F8_E4M3", 16, 2, b"U" * 32),
        "gate_proj.weight": ("U8", 16, 16, b"g" * 256),
    }
    block = packed_checkpoint(tmp_path, 32, 16, tensors)
    golden = b"g" * 256 + b"u" * 256 + b"d" * 256 + b"G" * 32 + b"U" * 32 + b"D" * 32
    assert block == golden.ljust(4096, b"\0")
    assert header_of(Nvfp4Shape(32, 16), 1, 2).to_json() == (
        '{\n "version": 1,\n "num_layers": 1,\n "num_experts": 2,\n "hidden": 32,\n "intermediate": 16,\n'
        ' "record_nbytes": 4096,\n "payload_nbytes": 864,\n "source_revision": "test"\n}\n'
    )


def test_bundled_expert_verbatim(tiny_qwen):
    spec = QwenSpec.from_config(json.loads((tiny_qwen / "config.json").read_text()))
    checkpoint, key = Checkpoint.open(tiny_qwen), ExpertKey(6, 41)
    wanted = b""
    for suffix in ("weight", "weight_scale"):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = f"{expert_name(key)}{projection}.{suffix}"
            with safe_open(checkpoint.info(name).extent.file, "pt") as f:
                wanted += f.get_tensor(name).view(torch.uint8).numpy().tobytes()
    assert read_expert_block(checkpoint, spec, key) == wanted.ljust(24576, b"\0")


def test_quantised_packed_and_applied(tmp_path):
    """Weights through quantise, pack and the expert kernel: what the plain dequantised weights give."""
    hidden, inner = 64, 32
    generator = torch.Generator().manual_seed(0)
    tensors, weights, scales = {}, [], []
    for name, rows, columns in (
        ("gate", inner, hidden),
        ("up", inner, hidden),
        ("down", hidden, inner),
    ):
        codes, steps, s2 = nvfp4_quantize(torch.randn(rows, columns, generator=generator))
        weights.append(nvfp4_dequantize(codes, steps, s2))
        scales.append(s2)
        raw = codes.numpy().tobytes(), steps.view(torch.uint8).numpy().tobytes()
        tensors[f"{name}_proj.weight"] = ("U8", rows, columns // 2, raw[0])
        tensors[f"{name}_proj.weight_scale"] = ("F8_E4M3", rows, columns // 16, raw[1])
    block = packed_checkpoint(tmp_path, hidden, inner, tensors)
    x = torch.randn(5, hidden, generator=generator)
    got = nvfp4_swiglu_expert(
        x, torch.frombuffer(block, dtype=torch.uint8), torch.stack(scales), inner
    )
    torch.testing.assert_close(got, swiglu(x, *weights), rtol=1e-4, atol=1e-4)


def damage_json(change):
    def damage(root: Path):
        path = root / "pack.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    return damage


def resize(by):
    def damage(root: Path):
        path = root / "experts.bin"
        raw = path.read_bytes() + bytes(max(0, by))
        path.write_bytes(raw[: len(raw) + min(0, by)])

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda root: (root / "pack.json").unlink(), "pack.json", id="no header"),
        pytest.param(lambda root: (root / "pack.json").write_bytes(b"\xff{"), "pack.json", id="bytes"),
        pytest.param(lambda root: (root / "pack.json").write_text("{"), "pack.json", id="cut header"),
        pytest.param(lambda root: (root / "pack.json").write_text("[]"), "pack.json", id="list"),
        pytest.param(lambda root: (root / "pack.json").write_text("{}"), "pack.json", id="no keys"),
        pytest.param(damage_json({"more": 1}), "pack.json", id="unknown key"),
        pytest.param(damage_json({"version": 2}), "version 2, expected 1", id="version"),
        pytest.param(damage_json({"hidden": 64}), "sizes", id="sizes"),
        pytest.param(damage_json({"record_nbytes": 8192}), "sizes", id="record size"),
        pytest.param(damage_json({"num_experts": 3}), r"16,384 bytes, 24,576", id="count"),
        pytest.param(lambda root: (root / "experts.bin").unlink(), "0 bytes, 16,384", id="no blocks"),
        pytest.param(resize(-1), "16,383 bytes, 16,384", id="one byte short"),
        pytest.param(resize(1), "16,385 bytes, 16,384", id="one byte more"),
    ],
)  # fmt: skip
def test_a_damaged_pack_is_refused(tmp_path, damage, message):
    shape = Nvfp4Shape(32, 16)
    write_pack(tmp_path, header_of(shape, 2, 2), [bytes(4096)] * 4)
    PackedLayout.open(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        PackedLayout.open(tmp_path)
    assert "repack" in caught.value.hint
