"""Which table rows a token needs: the published vectors, from constants derived here with plain integers."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from runtime.checkpoint import Checkpoint, Extent
from runtime.models.qwen_model import Ple
from runtime.rows import RowTable

EOS, HEADS, VOCAB = 248044, 8, 248320

# specification, appendix B: tokens from an empty context, rows of heads 0..15
VECTORS = """
9707: 16410909, 39682429, 55103279, 60931720, 87006904, 116506179, 131512017, 152932897, 169641436, 182022480, 209277433, 237891023, 256841529, 277007269, 290665954, 300984276
11: 18158303, 36390029, 45652312, 70783524, 98191154, 114024957, 127804916, 159566246, 175132467, 192583600, 217919476, 237199054, 259336807, 261799367, 289359313, 307699687
1879: 6380558, 26411572, 56460672, 78566983, 94693008, 106742196, 124822692, 148942556, 164226950, 190352573, 210933682, 238908951, 242182004, 265475238, 299910982, 312121804
248044: 18827606, 27700912, 56521518, 65780303, 81132822, 100518937, 120474864, 142052741, 163793416, 184135950, 219854666, 227756662, 248975183, 271245822, 285569892, 318943450
314: 8260854, 33106041, 59264976, 60072089, 98935463, 112687005, 134061582, 143955837, 178749106, 199051338, 215607266, 231149282, 254184348, 278446456, 293473221, 310651623
2001: 5856173, 25242257, 54975642, 76647512, 92408179, 104337021, 122238348, 146121840, 160422013, 182017932, 205651970, 226550590, 251029236, 275858420, 297546152, 306568227
248319: 14050029, 21157844, 59096366, 65120935, 83416240, 110450110, 131877770, 148751508, 163250688, 186851054, 206373379, 225160375, 248013854, 271920027, 286789403, 302890280
0: 3745007, 25177969, 59639583, 68080282, 84924354, 118004746, 128374230, 156931756, 176658937, 191889199, 214212374, 225019246, 242093785, 260069218, 286261388, 318722933
248044: 16421076, 34964127, 58645314, 64737717, 85974391, 107327379, 120238726, 145766809, 167206240, 197096504, 210176586, 239333033, 244402808, 270436996, 292662780, 305397995
248044: 9663979, 26558231, 56120240, 74755659, 80459717, 109265651, 132697467, 151022725, 170054832, 192967038, 200687722, 225763581, 259275737, 272983544, 297596484, 300986548
77: 16611476, 29512305, 49704971, 66165983, 89881645, 105251896, 139055756, 152191225, 178497739, 192880870, 205859405, 228292887, 258357841, 269648670, 287018169, 315908561
"""  # noqa: E501
LINES = [line.split(": ") for line in VECTORS.strip().splitlines()]
TOKENS = [int(token) for token, _ in LINES]
ROWS = [int(row) for _, rows in LINES for row in rows.split(", ")]


def derive(vocab, base, heads, seed=1234):
    """Multipliers, head sizes and offsets by the formulae of section 2.5."""
    gold, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x):
        x = (x + gold) & mask
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 & mask
        x ^= x >> 27
        x = x * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    half = max(1, (2**63 - 1) // vocab // 2)
    multipliers = [2 * (mix((seed + gold * (i + 1)) & mask) % half) + 1 for i in range(3)]
    sizes, n = [], base
    while len(sizes) < 2 * heads:
        if all(n % d for d in range(2, int(n**0.5) + 1)):
            sizes.append(n)
        n += 1
    offsets = [sum(sizes[:h]) for h in range(2 * heads)]
    return multipliers, sizes, offsets


def hasher(constants, eos, heads):
    ple = object.__new__(Ple)
    ple.spec = SimpleNamespace(eos=eos, heads_per_ngram=heads)
    ple.multipliers, ple.sizes, ple.offsets = (torch.tensor(values) for values in constants)
    return ple


@pytest.fixture(scope="module")
def released():
    return derive(VOCAB, 20_000_000, HEADS)


def test_the_derived_constants_are_the_released_ones(released):
    multipliers, sizes, offsets = released
    assert multipliers == [23703573157769, 20109073645365, 8052911324071]
    assert sizes[:3] + sizes[-2:] == [20000003, 20000023, 20000033, 20000161, 20000171]
    assert offsets[-1] + sizes[-1] == 320_001_446
    assert (VOCAB - 1) * max(multipliers) < 2**63  # int64 products do not overflow


def test_published_rows_all_at_once(released):
    assert hasher(released, EOS, HEADS).row_ids(TOKENS, [EOS, EOS]) == ROWS


@pytest.mark.parametrize("split", [[1] * 11, [2, 1, 5, 3], [4, 7]])
def test_published_rows_in_pieces_with_the_context_carried(released, split):
    ple, context, rows, at = hasher(released, EOS, HEADS), [EOS, EOS], [], 0
    for n in split:
        rows += ple.row_ids(TOKENS[at : at + n], context)
        context = [*context, *TOKENS[at : at + n]][-2:]
        at += n
    assert rows == ROWS


def ngram_rows(tokens, multipliers, sizes, offsets, eos, heads):
    """Appendix A's loop."""
    p1, p2, out = eos, eos, []
    for t in tokens:
        far = eos if p1 == eos else p2
        two = (t * multipliers[0]) ^ (p1 * multipliers[1])
        three = two ^ (far * multipliers[2])
        out += [offsets[h] + (two if h < heads else three) % sizes[h] for h in range(2 * heads)]
        p1, p2 = t, p1
    return out


def test_random_text_with_many_boundaries(released):
    rng = random.Random(0)
    tokens = [rng.choice([EOS, 0, rng.randrange(VOCAB)]) for _ in range(300)]
    ids = hasher(released, EOS, HEADS).row_ids(tokens, [EOS, EOS])
    assert ids == ngram_rows(tokens, *released, EOS, HEADS)


def test_the_bundled_checkpoint_has_derived_constants(tiny_qwen):
    c = json.loads((tiny_qwen / "config.json").read_text())["text_config"]
    heads = c["heads_per_ngram"]
    constants = derive(c["vocab_size"], c["ngram_vocab_size_base"], heads, c["seed"])
    checkpoint = Checkpoint.open(tiny_qwen)
    name = "model.language_model.layers.1.ple.ple_embedding."
    for tensor, wanted in zip(
        ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"),
        constants,
        strict=True,
    ):
        assert checkpoint.load(name + tensor).tolist() == wanted


@pytest.mark.parametrize(
    ("row", "part", "within"), [(16410909, 6, 1410837), (39682429, 15, 2182249)]
)
def test_part_of_a_row(tmp_path, row, part, within):
    """The appendix's two examples, with parts 98..101 stored out of order: place by number, not by position."""
    rows, nbytes = 2_500_012, 400_001_920
    slots = [*range(98), 100, 101, 98, 99, *range(102, 128)]
    parts = [Extent(tmp_path, 416_370 + nbytes * slot, nbytes) for slot in slots]
    table = RowTable(tuple(parts), rows, 160)
    assert table.num_rows == 320_001_536
    assert table.locate(row) == (part, 416_370 + nbytes * part + 160 * within)
    assert table.locate(245_001_176) == (98, 416_370 + nbytes * 100)
