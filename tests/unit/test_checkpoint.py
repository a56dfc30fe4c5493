"""Safetensors headers: what the library writes is read back, and every damage has its own error."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoint import (
    DTYPE_NBYTES,
    INDEX_NAME,
    BadHeaderError,
    BadOffsetsError,
    Checkpoint,
    CheckpointError,
    Extent,
    IndexMismatchError,
    MissingShardError,
    MissingTensorError,
    PointerFileError,
    ShortFileError,
    TrailingBytesError,
    UnknownDtypeError,
    read_extent,
    read_header,
)

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip


def entry(dtype="U8", shape=(4,), start=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def write(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def write_indexed(root, shards, weight_map):
    """shards: file name -> tensor names, four bytes each."""
    for file, names in shards.items():
        header = {n: entry(start=4 * i, end=4 * i + 4) for i, n in enumerate(names)}
        write(root / file, header, bytes(range(4 * len(names))))
    (root / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return root


def random_tensor(dtype, shape, generator):
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    top = 2 if dtype is torch.bool else 256  # any bit pattern, NaN too: bytes are compared
    raw = torch.randint(0, top, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


def raw_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist()


def test_every_dtype_of_the_library_is_read_back_equal(tmp_path):
    assert TORCH_DTYPES.keys() == DTYPE_NBYTES.keys()
    generator = torch.Generator().manual_seed(0)
    # scalar, empty, odd sizes: the data of one dtype starts at any byte of the next
    tensors = {
        f"{name}{list(shape)}": random_tensor(dtype, shape, generator)
        for name, dtype in TORCH_DTYPES.items()
        for shape in ((), (0,), (1,), (3,), (2, 0, 5), (3, 5, 7))
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        loaded = checkpoint.load(name)
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape), name
        assert raw_bytes(loaded) == raw_bytes(tensor), name
        assert checkpoint.info(name).dtype == name.split("[")[0]


def test_a_file_cut_anywhere_is_short(tmp_path):
    header = {"a": entry("F32", (2,), 0, 8), "b": entry("U8", (3,), 8, 11)}
    whole = write(tmp_path / "w", header, bytes(11)).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for n in range(len(whole)):
        cut.write_bytes(whole[:n])
        with pytest.raises(ShortFileError, match=r"cut\.safetensors"):
            read_header(cut)
    cut.write_bytes(whole)
    assert list(read_header(cut)) == ["a", "b"]


@pytest.mark.parametrize(
    ("header", "data", "error"),
    [
        pytest.param(b"{", b"", BadHeaderError, id="not JSON"),
        pytest.param(b"", b"", BadHeaderError, id="empty header"),
        pytest.param(b'{"\xff": 1}', b"", BadHeaderError, id="not UTF-8"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", b"", BadHeaderError, id="endless number"),
        pytest.param(b"[" * 200_000, b"", BadHeaderError, id="nested without end"),
        pytest.param([entry()], bytes(4), BadHeaderError, id="not an object"),
        pytest.param({"a": [0, 4]}, bytes(4), BadHeaderError, id="entry is a list"),
        pytest.param({"a": None}, bytes(4), BadHeaderError, id="entry is null"),
        pytest.param(
            {"a": {"dtype": "U8", "shape": [4]}}, bytes(4), BadHeaderError, id="no offsets"
        ),
        pytest.param(
            {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}},
            bytes(4),
            BadHeaderError,
            id="three offsets",
        ),
        pytest.param({"a": entry(shape=(-4,))}, bytes(4), BadHeaderError, id="negative shape"),
        pytest.param({"a": entry(shape=(4.0,))}, bytes(4), BadHeaderError, id="float shape"),
        pytest.param({"a": entry(start=-4, end=0)}, bytes(4), BadHeaderError, id="below the data"),
        pytest.param({"a": entry(shape=(True,), end=True)}, b"1", BadHeaderError, id="bool"),
        pytest.param({"a": entry("F4")}, bytes(4), UnknownDtypeError, id="unknown dtype"),
        pytest.param({"a": entry(["U8"])}, bytes(4), BadHeaderError, id="dtype is a list"),
        pytest.param({"a": entry(shape=(5,))}, bytes(4), BadOffsetsError, id="too small for shape"),
        pytest.param({"a": entry("F16", (4,))}, bytes(4), BadOffsetsError, id="wrong dtype size"),
        pytest.param({"a": entry(start=4, end=0)}, bytes(4), BadOffsetsError, id="end first"),
        pytest.param(
            {"a": entry(), "b": entry(start=3, end=7)}, bytes(7), BadOffsetsError, id="overlap"
        ),
        pytest.param({"a": entry(), "b": entry()}, bytes(4), BadOffsetsError, id="same bytes"),
        pytest.param(
            {"a": entry(), "b": entry(start=5, end=9)}, bytes(9), BadOffsetsError, id="hole"
        ),
        pytest.param(
            {"a": entry(start=1, end=5)}, bytes(5), BadOffsetsError, id="hole before the first"
        ),
        pytest.param({"a": entry()}, bytes(3), ShortFileError, id="one byte short"),
        pytest.param(
            {"a": entry("U8", (2**62,), 0, 2**62)}, bytes(4), ShortFileError, id="far out of range"
        ),
        pytest.param({"a": entry()}, bytes(5), TrailingBytesError, id="one byte more"),
        pytest.param({}, bytes(1), TrailingBytesError, id="data without tensors"),
    ],
)
def test_damage_has_its_error(tmp_path, header, data, error):
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(error, match=r"model\.safetensors") as caught:
        read_header(path)
    assert type(caught.value) is error
    assert str(path) in caught.value.hint  # what to delete


def test_an_absurd_header_size_is_not_a_short_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"<!DOCTYPE html>" + bytes(100))  # an error page saved as the file
    with pytest.raises(BadHeaderError):
        read_header(path)


def test_lfs_pointer(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 10005510304\n"
    )
    with pytest.raises(PointerFileError, match="git lfs pull"):
        read_header(path)


def test_entries_in_any_order_and_metadata(tmp_path):
    header = {"z": entry(start=4, end=8), "__metadata__": {"k": "v"}, "a": entry()}
    infos = read_header(write(tmp_path / "f", header, b"aaaazzzz"))
    assert list(infos) == ["a", "z"]  # file order
    assert bytes(read_extent(infos["z"].extent)) == b"zzzz"


def test_an_empty_tensor_where_another_starts(tmp_path):
    """Listed behind it, with the same offset: neither overlap nor hole."""
    header = {"a": entry(), "empty": entry("F32", (0, 3), 0, 0), "last": entry("F32", (0,), 4, 4)}
    assert list(read_header(write(tmp_path / "f", header, bytes(4)))) == ["empty", "a", "last"]


def test_indexed_checkpoint(tmp_path):
    shards = {"m-1": ["a", "b"], "m-2": ["c"]}
    root = write_indexed(tmp_path, shards, {"c": "m-2", "b": "m-1", "a": "m-1"})
    checkpoint = Checkpoint.open(root)
    assert checkpoint.files() == [root / "m-1", root / "m-2"]
    assert checkpoint.load("b").tolist() == [4, 5, 6, 7]
    (root / "m-2").unlink()
    with pytest.raises(MissingShardError, match="m-2"):
        Checkpoint.open(root)


def test_folder_without_weights(tmp_path):
    with pytest.raises(MissingShardError, match=INDEX_NAME):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        pytest.param({"a": "m-1", "c": "m-2"}, "b", id="a header has more"),
        pytest.param(
            {"a": "m-1", "b": "m-1", "c": "m-2", "d": "m-2"}, "d", id="the index has more"
        ),
        pytest.param({"a": "m-1", "b": "m-2", "c": "m-2"}, "b", id="in the other shard"),
    ],
)
def test_index_that_disagrees(tmp_path, weight_map, named):
    root = write_indexed(tmp_path, {"m-1": ["a", "b"], "m-2": ["c"]}, weight_map)
    with pytest.raises(IndexMismatchError, match=rf"tensor {named}\b"):
        Checkpoint.open(root)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "9" * 5000, '{"weight_map": ["m-1"]}'])
def test_index_that_is_none(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(IndexMismatchError):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("shard", [5, [], None])
def test_index_with_a_shard_that_is_no_name(tmp_path, shard):
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


def test_info_checks_what_the_caller_relies_on(tmp_path):
    write(tmp_path / "model.safetensors", {"a": entry()}, bytes(4))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.info("a", ("BF16", "U8"), (4,)).shape == (4,)
    for arguments in (("b",), ("a", "I8"), ("a", ("BF16", "F32")), ("a", "U8", (2, 2))):
        with pytest.raises(MissingTensorError, match=rf"tensor {arguments[0]}\b"):
            checkpoint.info(*arguments)


def test_a_file_that_shrank_after_its_header_was_read(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(10))
    with pytest.raises(ShortFileError, match=r"byte 10\b.*12\b"):
        read_extent(Extent(path, 4, 8))
