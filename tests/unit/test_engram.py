"""Engram of DeepSeek-V4.1-Flash: classes, hashes, rows and their values, equal to the golden vectors."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open
from tokenizers import Tokenizer, decoders, models

from runtime.checkpoint import Checkpoint, CheckpointError, read_extent
from runtime.errors import UserError
from runtime.models.deepseek_engram import (
    DEAD,
    EngramHash,
    EngramLayout,
    build_token_map,
    dequantize_rows,
    read_engram_tables,
)
from runtime.models.deepseek_weights import DeepseekSpec

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "deepseek_golden"
TINY = ROOT / "runtime" / "bundled" / "tiny-deepseek"
PROMPTS = ["p1", "p7", "p40", "p100"]

# specification, appendix A
MULTIPLIERS = (
    (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (67716810739261, 51510806800915, 30921347202721, 82619226485591),
)
PRIMES = """
16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183
16000189 16000207 16000211 16000253 16000277 16000289 16000307 16000321
16000339 16000381 16000393 16000399 16000403 16000409 16000447 16000463
16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627
16000667 16000669 16000693 16000697 16000711 16000729 16000759 16000769
16000781 16000799 16000813 16000819 16000841 16000877 16000879 16000889
"""


def read_spec(folder):
    return DeepseekSpec.from_config(json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "engram.safetensors")


@pytest.fixture(scope="module")
def spec():
    return read_spec(GOLDEN / "checkpoint")


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint.open(GOLDEN / "checkpoint")


@pytest.fixture(scope="module")
def token_map():
    return build_token_map(GOLDEN / "checkpoint" / "tokenizer.json")


@pytest.fixture(scope="module")
def hasher(spec, token_map):
    return EngramHash(spec, token_map)


@pytest.fixture(scope="module")
def released(spec):
    """The golden spec with the released Engram."""
    return dataclasses.replace(
        spec,
        engram_layers=(1, 14),
        engram_rows=(384006168, 384016682),
        engram_vocab_size=16_000_000,
        engram_heads=8,
        engram_head_dim=256,
        engram_classes=99092,
    )


def as_tensor(rows, spec):
    """[tokens, layers, columns], as the golden file has them."""
    return torch.stack([torch.tensor(r).view(-1, spec.engram_columns) for r in rows], dim=1)


def test_golden_token_map(token_map, golden, spec):
    assert token_map == golden["token_map"].tolist()
    assert token_map[spec.engram_pad_id] == golden["pad_compressed_id"].item()
    assert len(set(token_map)) == max(token_map) + 1 == spec.engram_classes == 429


def test_tiny_token_map_has_the_classes_of_its_config():
    token_map = build_token_map(TINY / "tokenizer.json")
    assert len(token_map) == 4608
    assert len(set(token_map)) == read_spec(TINY).engram_classes == 3711


def test_what_shares_a_class(tmp_path):
    """Case, accents, compatibility forms and outer space do not count; a lone space and parts of letters do."""
    words = [
        "Cafe", " cafe", "CAFÉ", "cafe\n\t", "caf", "ﬁ", "fi", "a \n b", "a b", "\t\n", " ", "\u3000", "Σ", "σ", "ς",
        "\x1c", "\ue000",
    ]  # fmt: skip
    alphabet = dict(zip(_byte_values(), _byte_letters(), strict=True))
    vocab = {"".join(alphabet[b] for b in word.encode()): i for i, word in enumerate(words)}
    vocab |= {alphabet[0xD0]: len(words), alphabet[0xD1]: len(words) + 1}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<S>", "<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = build_token_map(tmp_path / "tokenizer.json")
    classes = dict(zip([*words, "D0", "D1", "<S>", "<s>"], found, strict=True))
    assert found == [0, 0, 0, 0, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 6, 7, 4, 8, 9, 10, 10], classes


def _byte_values():
    """GPT-2's order: the printable bytes, then the others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [b for b in range(256) if b not in printable]


def _byte_letters():
    printable = [chr(b) for b in _byte_values()[:188]]
    return printable + [chr(256 + i) for i in range(256 - 188)]


def test_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer"):
        build_token_map(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer"):
        build_token_map(tmp_path / "tokenizer.json")


def test_released_constants(released):
    layout = EngramLayout.derive(released)
    primes = [int(n) for n in PRIMES.split()]
    assert layout.multipliers == MULTIPLIERS
    assert layout.primes == (tuple(primes[:24]), tuple(primes[24:]))
    assert [sum(p) for p in layout.primes] == [384_006_168, 384_016_682]
    for sizes, offsets in zip(layout.primes, layout.offsets, strict=True):
        assert list(offsets) == [sum(sizes[:i]) for i in range(24)]
    assert (2**63 - 1) // 99092 // 2 == 46_539_438_283_891


def test_golden_constants(spec, golden):
    layout = EngramLayout.derive(spec)
    assert [list(m) for m in layout.multipliers] == golden["multipliers"].tolist()
    assert [list(p) for p in layout.primes] == golden["primes"].flatten(1).tolist()
    assert [list(o) for o in layout.offsets] == golden["offsets"].tolist()


def test_rows_that_do_not_follow_are_refused(spec):
    with pytest.raises(UserError, match=r"layer 3 has 865 rows .* 864 follow"):
        EngramLayout.derive(dataclasses.replace(spec, engram_rows=(660, 865)))


def test_a_first_size_that_is_prime_itself(spec):
    sizes = EngramLayout.derive(
        dataclasses.replace(spec, engram_vocab_size=101, engram_rows=(660, 864))
    )
    assert sizes == EngramLayout.derive(spec)
    with pytest.raises(UserError, match="layer 1"):
        EngramLayout.derive(dataclasses.replace(spec, engram_vocab_size=102))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_golden_rows_at_once(hasher, spec, golden, prompt):
    tokens = golden[f"{prompt}.input_ids"].tolist()
    assert torch.equal(as_tensor(hasher.row_ids(tokens), spec), golden[f"{prompt}.hash_ids"])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 24])
def test_golden_rows_in_steps(hasher, spec, golden, prompt, step):
    """Each step gets the three tokens before it, or everything before it."""
    tokens, wanted = golden[f"{prompt}.input_ids"].tolist(), golden[f"{prompt}.hash_ids"]
    for start in range(0, len(tokens), step):
        new = tokens[start : start + step]
        for context in (tokens[max(0, start - 3) : start], tokens[:start]):
            found = as_tensor(hasher.row_ids(new, context), spec)
            assert torch.equal(found, wanted[start : start + step])


@pytest.mark.parametrize("step", [1, 7, 40])
def test_golden_rows_around_dead_positions(hasher, spec, golden, step):
    is_live = golden["masked.token_mask"].tolist()
    assert [i for i, live in enumerate(is_live) if not live] == [3, 4, 5, 6, 20]
    tokens = [
        token if live else DEAD
        for token, live in zip(golden["p40.input_ids"].tolist()[:40], is_live, strict=True)
    ]
    for start in range(0, 40, step):
        found = hasher.row_ids(tokens[start : start + step], tokens[max(0, start - 3) : start])
        assert torch.equal(as_tensor(found, spec), golden["masked.hash_ids"][start : start + step])


def test_released_rows_by_plain_integers(released):
    """Section 3.3 spelled out, at classes up to the largest: nothing overflows."""
    hasher = EngramHash(released, range(99092))
    tokens = [99091, 99090, 0, 99091, 99091, 2, 7, 99091]
    primes = [int(n) for n in PRIMES.split()]
    for layer, found in enumerate(hasher.row_ids(tokens)):
        sizes, wanted = primes[24 * layer : 24 * layer + 24], []
        for t in range(len(tokens)):
            products = [(tokens[t - s] if t >= s else 2) * MULTIPLIERS[layer][s] for s in range(4)]
            assert max(products) < 2**63
            hashed = list(itertools.accumulate(products, lambda a, b: a ^ b))[1:]
            wanted += [hashed[c // 8] % sizes[c] + sum(sizes[:c]) for c in range(24)]
        assert found == wanted


def test_no_tokens(hasher):
    assert hasher.row_ids([], [5, 6]) == [[], []]


@pytest.mark.parametrize(
    ("tokens", "context"), [([512], []), ([1], [512]), ([-2], []), ([1], [-7])]
)
def test_an_id_that_is_no_token(hasher, tokens, context):
    with pytest.raises(IndexError, match=r"0\.\.511"):
        hasher.row_ids(tokens, context)


def test_a_map_of_another_tokenizer_is_refused(spec):
    with pytest.raises(UserError, match=r"3,711 token classes.*engram_compressed_vocab_size=429"):
        EngramHash(spec, build_token_map(TINY / "tokenizer.json"))
    with pytest.raises(UserError, match="gives 0 token classes"):
        EngramHash(spec, [])
    small = dataclasses.replace(spec, engram_classes=2, engram_pad_id=2)
    with pytest.raises(UserError, match=r"engram_pad_token_id=2 .* 2 tokens"):
        EngramHash(small, [0, 1])


def test_tables_in_place(checkpoint, spec):
    for layer, table in zip(spec.engram_layers, read_engram_tables(checkpoint, spec), strict=True):
        rows = spec.engram_rows[spec.engram_layers.index(layer)]
        assert (table.values.num_rows, table.values.row_nbytes) == (rows, 64)
        assert (table.scales.num_rows, table.scales.row_nbytes) == (rows, 2)
        name = f"layers.{layer}.engram.embed."
        for part, dtype in ((table.values, "weight"), (table.scales, "scale")):
            (extent,) = part.parts
            with safe_open(extent.file, "pt") as f:
                wanted = f.get_tensor(name + dtype).view(torch.uint8)
            for row in (0, 1, rows - 1):
                _, offset = part.locate(row)
                raw = extent.file.read_bytes()[offset : offset + part.row_nbytes]
                assert list(raw) == wanted[row].tolist()


def test_tiny_tables():
    spec = read_spec(TINY)
    tables = read_engram_tables(Checkpoint.open(TINY), spec)
    assert [t.values.num_rows for t in tables] == [30106, 30454]
    assert [t.scales.row_nbytes for t in tables] == [2, 2]


def test_a_table_of_another_size_is_named(checkpoint, spec):
    with pytest.raises(CheckpointError, match=r"layers\.3\.engram\.embed\.weight"):
        read_engram_tables(checkpoint, dataclasses.replace(spec, engram_rows=(660, 865)))


def test_golden_row_values(checkpoint, spec, golden):
    """From token ids to the joined rows, through the bytes on the drive."""
    for index, table in enumerate(read_engram_tables(checkpoint, spec)):
        ids = golden["p40.hash_ids"][:40, index].flatten()
        planes = []
        for part in table:
            raw = torch.frombuffer(read_extent(part.parts[0]), dtype=torch.uint8)
            planes.append(raw.view(part.num_rows, part.row_nbytes)[ids])
        wanted = golden[f"p40.layer{spec.engram_layers[index]}.rows"]
        found = dequantize_rows(*planes)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.view(40, 6, 64).view(torch.int16), wanted.view(torch.int16))


def test_every_value_under_every_scale():
    """All 254 finite E4M3 codes times all 255 finite powers of two, one rounding each."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    values = torch.cat([codes, torch.zeros(2, dtype=torch.uint8)]).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 8).contiguous()
    found = dequantize_rows(values, scales)
    exact = values.view(torch.float8_e4m3fn).double() * torch.tensor(
        [math.ldexp(1.0, s - 127) for s in range(255)], dtype=torch.float64
    ).unsqueeze(1)
    is_normal = (exact.abs() >= 2.0**-126) & (exact.abs() < 2.0**127) | (exact == 0)
    assert is_normal.float().mean() > 0.9
    assert torch.equal(found[is_normal].double(), exact[is_normal])
    assert found[127, :254].tolist() == codes.view(torch.float8_e4m3fn).float().tolist()
