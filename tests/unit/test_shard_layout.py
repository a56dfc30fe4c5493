"""Experts inside released shards: every byte of every record, and every checkpoint whose runs are in pieces."""

import json
import math
import random
import tempfile
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conf.schema import DriveConfig
from runtime.checkpoint import Checkpoint, CheckpointError, Extent
from runtime.experts.arena import HostArena
from runtime.experts.layout import ExpertKey
from runtime.experts.reader import DirectReader
from runtime.experts.shard_layout import Fp4Shape, ShardLayout, expert_tensors
from runtime.models.deepseek_weights import (
    DeepseekSpec,
    draft_expert_layout,
    draft_expert_prefix,
    expert_layout,
    expert_prefix,
)
from runtime.units import PAGE_NBYTES

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "deepseek_golden" / "checkpoint"
TINY = ROOT / "runtime" / "bundled" / "tiny-deepseek"
CLASSES = ("BF16", "F8_E8M0", "F8_E4M3", "I8")  # the order of a released shard


def prefix_of(key):
    return f"layers.{key.layer}.ffn.experts.{key.expert}."


def write_shard(path, tensors, pad, rng):
    """A shard of random bytes: tensors by dtype class, then by name as strings. pad: spaces after the header."""
    at, header = 0, {}
    for name, (dtype, shape) in sorted(
        tensors.items(), key=lambda item: (CLASSES.index(item[1][0]), item[0])
    ):
        nbytes = math.prod(shape) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + rng.randbytes(at))
    return path


def layer_tensors(shape, layer, num_experts, fillers):
    """The experts of a layer among other tensors; fillers: bytes of one tensor before each class of theirs."""
    tensors = {
        f"layers.{layer}.attn.wkv.scale": ("F8_E8M0", [fillers[0]]),
        f"layers.{layer}.ffn.shared_experts.w1.scale": ("F8_E8M0", [fillers[1]]),
        f"layers.{layer}.ffn.shared_experts.w1.weight": ("F8_E4M3", [fillers[2]]),
        f"layers.{layer}.norm.weight": ("BF16", [fillers[3]]),
    }
    for expert in range(num_experts):
        for name, (rows, cols) in shape.matrices().items():
            prefix = prefix_of(ExpertKey(layer, expert))
            tensors[f"{prefix}{name}.weight"] = ("I8", [rows, cols // 2])
            tensors[f"{prefix}{name}.scale"] = ("F8_E8M0", [rows, cols // 32])
    return tensors


def check_expert(layout, key, record, weights, scales):
    """weights, scales: the tensors' bytes in file order."""
    at_weights, at_scales = layout.payload_offsets(key)
    codes, factors = b"".join(weights), b"".join(scales)
    assert record[at_weights : at_weights + len(codes)] == codes
    assert record[at_scales : at_scales + len(factors)] == factors
    assert len(codes) + len(factors) == layout.shape.payload_nbytes
    payload = codes + factors
    names = [f"{w} codes" for w in ("w1", "w2", "w3")] + [f"{w} scales" for w in ("w1", "w2", "w3")]
    parts = layout.shape.parts()
    assert list(parts) == names
    for name, raw in zip(names, [*weights, *scales], strict=True):
        offset, nbytes = parts[name]
        assert payload[offset : offset + nbytes] == raw


def check_spans(layout, key):
    first, second = layout.spans(key)
    for span in (first, second):
        assert (
            span.offset % PAGE_NBYTES == span.nbytes % PAGE_NBYTES == span.dest % PAGE_NBYTES == 0
        )
        assert 0 < span.nbytes - span.need_nbytes + 1 <= PAGE_NBYTES
    assert (first.dest, second.dest) == (0, first.nbytes)
    assert second.dest + second.nbytes <= layout.record_nbytes


@st.composite
def cases(draw):
    shape = Fp4Shape(draw(st.sampled_from([32, 64, 96])), draw(st.sampled_from([32, 64])))
    layers = [
        (draw(st.integers(0, PAGE_NBYTES)), draw(st.tuples(*[st.integers(0, 5000)] * 4)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return shape, draw(st.sampled_from([1, 2, 10, 11, 13, 101, 112])), layers


@given(case=cases(), is_one_file=st.booleans(), seed=st.integers(0, 2**32))
@example(case=(Fp4Shape(64, 32), 384, [(8, (40, 24, 32, 16))]), is_one_file=False, seed=0)
@settings(max_examples=25, deadline=None)
def test_bytes_of_a_fake_release(case, is_one_file, seed):
    shape, num_experts, layers = case
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder, shards = Path(name), {}
        for layer, (pad, fillers) in enumerate(layers):
            file = "model-1.safetensors" if is_one_file else f"model-{layer + 1}.safetensors"
            tensors = layer_tensors(shape, layer, num_experts, fillers)
            shards[file] = (pad, shards.get(file, (0, {}))[1] | tensors)
        for file, (pad, tensors) in shards.items():
            write_shard(folder / file, tensors, pad, rng)
        weight_map = {tensor: file for file, (_, tensors) in shards.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        checkpoint = Checkpoint.open(folder)
        layout = ShardLayout(checkpoint, shape, len(layers), num_experts, prefix_of)
        assert (layout.num_layers, layout.num_experts) == (len(layers), num_experts)
        assert layout.files == tuple(folder / file for file in sorted(shards))
        contents = {path: path.read_bytes() for path in layout.files}
        used = 0
        for layer in range(len(layers)):
            for expert in range(num_experts):
                key = ExpertKey(layer, expert)
                check_spans(layout, key)
                used = max(used, sum(span.nbytes for span in layout.spans(key)))
                record = bytearray(b"\xa5" * layout.record_nbytes)
                for span in layout.spans(key):
                    raw = contents[layout.files[span.file_idx]][span.offset :][: span.nbytes]
                    assert len(raw) >= span.need_nbytes
                    record[span.dest : span.dest + len(raw)] = raw
                runs = []
                for infos in expert_tensors(checkpoint, shape, prefix_of(key)):
                    extents = [info.extent for info in infos]
                    runs.append([contents[e.file][e.offset : e.offset + e.nbytes] for e in extents])
                check_expert(layout, key, record, *runs)
        assert layout.record_nbytes == used
        last = max(str(e) for e in range(num_experts))  # of the last layer, in string order
        weights, _ = layout.spans(ExpertKey(len(layers) - 1, int(last)))
        file = layout.files[weights.file_idx]
        assert weights.offset + weights.need_nbytes == file.stat().st_size


@pytest.mark.parametrize(
    ("folder", "layout_of", "name_of", "nbytes"),
    [
        (TINY, expert_layout, expert_prefix, 26_112),
        (GOLDEN, expert_layout, expert_prefix, 13_056),
        (GOLDEN, draft_expert_layout, draft_expert_prefix, 13_056),
    ],
)
def test_records_are_the_tensors(folder, layout_of, name_of, nbytes):
    """Every expert through the engine's reader, against each tensor read by itself."""
    spec = DeepseekSpec.from_config(json.loads((folder / "config.json").read_text()))
    checkpoint = Checkpoint.open(folder)
    layout = layout_of(checkpoint, spec)
    assert layout.shape.payload_nbytes == nbytes
    reader = DirectReader(layout.files, DriveConfig())
    arena = HostArena(1, layout.record_nbytes)
    done = SimpleQueue()
    try:
        for layer in range(layout.num_layers):
            for expert in range(layout.num_experts):
                key = ExpertKey(layer, expert)
                check_spans(layout, key)
                job = reader.submit(key, layout.spans(key), arena.view(0), on_done=done.put)
                assert done.get(timeout=60) is job
                assert job.error is None
                runs = [
                    [checkpoint.read(info) for info in infos]
                    for infos in expert_tensors(checkpoint, layout.shape, name_of(key))
                ]
                check_expert(layout, key, bytes(arena.view(0)), *runs)
    finally:
        reader.close()


def test_released_shape():
    shape = Fp4Shape(5120, 2304)
    c, s = 5_898_240, 368_640
    assert shape.parts() == {
        "w1 codes": (0, c),
        "w2 codes": (c, c),
        "w3 codes": (2 * c, c),
        "w1 scales": (17_694_720, s),
        "w2 scales": (17_694_720 + s, s),
        "w3 scales": (17_694_720 + 2 * s, s),
    }
    assert shape.payload_nbytes == 18_800_640
    assert shape.matrices() == {"w1": (2304, 5120), "w2": (5120, 2304), "w3": (2304, 5120)}


@pytest.fixture
def fake(tmp_path):
    """A checkpoint of 2 layers of 12 experts in one file, and its shape."""
    shape = Fp4Shape(64, 32)
    tensors = layer_tensors(shape, 0, 12, (1, 2, 3, 4)) | layer_tensors(shape, 1, 12, (5, 6, 7, 8))
    write_shard(tmp_path / "model.safetensors", tensors, 5, random.Random(0))
    return Checkpoint.open(tmp_path), shape


def moved(checkpoint, name, by=0, file=None):
    """The same checkpoint with one tensor elsewhere."""
    info = checkpoint.info(name)
    extent = Extent(file or info.extent.file, info.extent.offset + by, info.extent.nbytes)
    tensors = {**checkpoint.tensors, name: info._replace(extent=extent)}
    return Checkpoint(checkpoint.root, tensors)


@pytest.mark.parametrize(
    "key", [ExpertKey(0, 0), ExpertKey(0, 10), ExpertKey(1, 11), ExpertKey(1, 2)]
)
@pytest.mark.parametrize("kind", ["weight", "scale"])
@pytest.mark.parametrize(
    ("matrix", "pair"), [("w1", ("w1", "w2")), ("w2", ("w1", "w2")), ("w3", ("w2", "w3"))]
)
@pytest.mark.parametrize("by", [-1, 1, 4096])
def test_two_tensors_that_do_not_touch_are_named(fake, key, kind, matrix, pair, by):
    checkpoint, shape = fake
    first, second = (f"{prefix_of(key)}{name}.{kind}" for name in pair)
    broken = moved(checkpoint, f"{prefix_of(key)}{matrix}.{kind}", by)
    message = rf"layer {key.layer}, expert {key.expert}: {second} .* does not follow {first},"
    with pytest.raises(CheckpointError, match=message):
        ShardLayout(broken, shape, 2, 12, prefix_of)


def test_a_run_in_two_files_is_refused(fake, tmp_path):
    checkpoint, shape = fake
    name = f"{prefix_of(ExpertKey(1, 3))}w3.scale"
    broken = moved(checkpoint, name, file=tmp_path / "other.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"{name} .* of other\.safetensors\) does not follow"
    ):
        ShardLayout(broken, shape, 2, 12, prefix_of)


def test_weights_and_scales_may_be_in_two_files(fake, tmp_path):
    checkpoint, shape = fake
    other = tmp_path / "a.safetensors"
    for layer in range(2):
        for expert in range(12):
            for matrix in ("w1", "w2", "w3"):
                name = f"{prefix_of(ExpertKey(layer, expert))}{matrix}.scale"
                checkpoint = moved(checkpoint, name, file=other)
    layout = ShardLayout(checkpoint, shape, 2, 12, prefix_of)
    assert layout.files == (other, tmp_path / "model.safetensors")
    assert [span.file_idx for span in layout.spans(ExpertKey(1, 5))] == [1, 0]


@pytest.mark.parametrize("change", ["gone", "dtype", "shape"])
@pytest.mark.parametrize("kind", ["weight", "scale"])
def test_a_tensor_that_is_not_as_it_must_be_is_named(fake, change, kind):
    checkpoint, shape = fake
    name = f"{prefix_of(ExpertKey(1, 11))}w2.{kind}"
    info = checkpoint.info(name)
    tensors = dict(checkpoint.tensors)
    if change == "gone":
        del tensors[name]
    else:
        new = {"dtype": {"dtype": "U8"}, "shape": {"shape": info.shape[::-1]}}[change]
        tensors[name] = info._replace(**new)
    with pytest.raises(CheckpointError, match=name):
        ShardLayout(Checkpoint(checkpoint.root, tensors), shape, 2, 12, prefix_of)
