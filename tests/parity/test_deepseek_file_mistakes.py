"""Silent errors on the way from the files: where an expert lies, where a file ends, which Engram rows a token has.

As in test_deepseek_mistakes: each is planted on purpose, and a check must see it that passes without.
"""

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from tokenizers import normalizers

from conf.schema import DirectIo, DriveConfig
from runtime import rows
from runtime.checkpoint import Checkpoint, read_extent
from runtime.errors import UserError
from runtime.experts import drive, shard_layout
from runtime.experts.arena import HostArena
from runtime.experts.layout import ExpertKey
from runtime.experts.reader import DirectReader
from runtime.models import deepseek_engram, deepseek_weights
from runtime.units import PAGE_NBYTES
from tests.parity.deepseek_golden import GOLDEN, PARTS, PROMPTS, golden, spec_of
from tests.parity.test_deepseek_mistakes import MISTAKES as ARITHMETIC
from tests.parity.test_deepseek_mistakes import Mistake

FOLDER = GOLDEN / "checkpoint"
SPEC = spec_of(FOLDER)
# specification 8.4: what can be wrong in this program, and is not of the chat encoding, the drafts or a GPU
NUMBERS = {*range(1, 23), 26, 27, 33}
BUFFERED = DriveConfig(direct=DirectIo.buffered, window=1, pieces=1)
part = functools.partial


def wrong_experts():
    """Share of experts whose payload, read as for a token, is not the tensors of their names."""
    checkpoint = Checkpoint.open(FOLDER)
    layout = deepseek_weights.expert_layout(checkpoint, SPEC)
    keys = [ExpertKey(la, e) for la in range(SPEC.num_layers) for e in range(SPEC.num_experts)]
    reader = DirectReader(layout.files, DriveConfig())
    wrong = sum(payload(reader, layout, key) != by_name(checkpoint, key) for key in keys)
    reader.close()
    return wrong / len(keys)


def payload(reader, layout, key):
    """The payload of a record; None when the reader refuses it."""
    arena = HostArena(1, layout.record_nbytes)
    try:
        reader.wait(reader.submit(key, layout.spans(key), arena.view(0)))
    except UserError:
        return None
    record, (codes, scales) = bytes(arena.view(0)), layout.payload_offsets(key)
    shape = layout.shape
    return (
        record[codes : codes + 3 * shape.codes_nbytes]
        + record[scales : scales + 3 * shape.scales_nbytes]
    )


def by_name(checkpoint, key):
    prefix = deepseek_weights.expert_prefix(key)
    names = [f"{prefix}{p}.{what}" for what in ("weight", "scale") for p in PARTS]
    return b"".join(checkpoint.read(checkpoint.info(name)) for name in names)


def unseen_ends():
    """Number of shards that may lose their last byte without an error of any expert that lies there."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(FOLDER, Path(folder) / "copy"))
        layout = deepseek_weights.expert_layout(Checkpoint.open(copy), SPEC)
        keys = [ExpertKey(la, e) for la in range(SPEC.num_layers) for e in range(SPEC.num_experts)]
        lasts = [max(keys, key=part(end_in, layout, idx)) for idx in range(len(layout.files))]
        for idx, file in enumerate(layout.files):
            with open(file, "r+b") as f:
                f.truncate(end_in(layout, idx, lasts[idx]) - 1)
        # opened behind the cut: a file that changes while it is open is another error
        reader = DirectReader(layout.files, BUFFERED)
        unseen = sum(payload(reader, layout, last) is not None for last in lasts)
        reader.close()
    return unseen


def end_in(layout, file_idx, key):
    """Where the bytes that an expert needs of a file end; 0 for none."""
    spans = [span for span in layout.spans(key) if span.file_idx == file_idx]
    return max((span.offset + span.need_nbytes for span in spans), default=0)


def wrong_row_ids():
    """Share of Engram rows of the golden prompts that are not the golden; all, when the token map is refused."""
    try:
        token_map = deepseek_engram.build_token_map(FOLDER / "tokenizer.json")
        hashes = deepseek_engram.EngramHash(SPEC, token_map)
    except UserError:
        return 1.0
    wrong = count = 0
    for prompt in PROMPTS:
        wanted = golden("engram")[f"{prompt}.hash_ids"]  # [tokens, layers, columns]
        found = hashes.row_ids(golden("engram")[f"{prompt}.input_ids"].tolist())
        rows_of = [torch.tensor(ids).view(len(wanted), -1) for ids in found]
        wrong += int((torch.stack(rows_of, dim=1) != wanted).sum())
        count += wanted.numel()
    return wrong / count


def wrong_row_bytes():
    """Share of rows of the Engram tables that are not what a plain read of the named tensors has; each read alone."""
    checkpoint, wrong, count = Checkpoint.open(FOLDER), 0, 0
    for layer, table in zip(
        SPEC.engram_layers, deepseek_engram.read_engram_tables(checkpoint, SPEC), strict=True
    ):
        for rows_of, name in zip(table, ("weight", "scale"), strict=True):
            raw = bytes(read_extent(checkpoint.info(f"layers.{layer}.engram.embed.{name}").extent))
            width = len(raw) // rows_of.num_rows
            reader = rows.RowReader(
                rows_of, DirectReader([rows_of.parts[0].file], BUFFERED), cache_rows=0
            )
            for row in range(rows_of.num_rows):
                wanted = raw[row * width : (row + 1) * width]
                wrong += read_row(reader, row) != wanted
                count += 1
            reader.close()
    return wrong / count


def read_row(reader, row):
    """One row's bytes; None for fewer than a row."""
    try:
        return bytes(reader.collect(reader.request([row])).numpy().tobytes())
    except RuntimeError:
        return None


EXPERTS = (wrong_experts, 0)
ENDS = (unseen_ends, 0)
ROW_IDS = (wrong_row_ids, 0)
ROW_BYTES = (wrong_row_bytes, 0)
CHECKS = (EXPERTS, ENDS, ROW_IDS, ROW_BYTES)


def numbered_in_file_order(patch):
    """Expert e is taken to be the e-th of its layer in the file, where names are sorted as strings."""
    good = shard_layout.ShardLayout.__init__

    def init(self, *args):
        good(self, *args)
        for first in range(0, len(self._spans), self.num_experts):
            block = slice(first, first + self.num_experts)
            pairs = sorted(
                zip(self._spans[block], self._offsets[block], strict=True),
                key=lambda pair: (pair[0][0].file_idx, pair[0][0].offset),
            )
            self._spans[block], self._offsets[block] = zip(*pairs, strict=True)

    patch.setattr(shard_layout.ShardLayout, "__init__", init)


def whole_pages_wanted(patch):
    """The last read of a file, which ends inside a page, is an error."""
    good = drive.FileSet.read

    def read(self, file_idx, buffer, offset, need_nbytes):
        del need_nbytes
        good(self, file_idx, buffer, offset, len(buffer))

    patch.setattr(drive.FileSet, "read", read)


def any_end_is_fine(patch):
    """A read that meets the end of its file is a success."""
    good = drive.FileSet.read

    def read(self, file_idx, buffer, offset, need_nbytes):
        try:
            good(self, file_idx, buffer, offset, need_nbytes)
        except EOFError:
            return

    patch.setattr(drive.FileSet, "read", read)


def case_kept(patch):
    patch.setattr(normalizers, "Lowercase", normalizers.NFC)


def every_token_its_own_class(patch):
    patch.setattr(deepseek_engram, "build_token_map", lambda file: list(range(SPEC.vocab_size)))


def classes_in_another_order(patch):
    """As many classes, numbered from the last token on: the count alone does not tell."""
    good = deepseek_engram.build_token_map

    def build_token_map(file):
        order = list(dict.fromkeys(reversed(good(file))))
        return [order.index(found) for found in good(file)]

    patch.setattr(deepseek_engram, "build_token_map", build_token_map)


class _ValueStride(rows.RowTable):
    """Scales placed as if their rows were as long as the values'."""

    def locate(self, row):
        part, start = super().locate(0)
        return part, start + row * SPEC.engram_head_dim % self.parts[0].nbytes


def scales_with_the_values_stride(patch):
    good = deepseek_engram.read_engram_tables

    def read_engram_tables(*args):
        return [
            table._replace(
                scales=_ValueStride(
                    table.scales.parts, table.scales.rows_per_part, table.scales.row_nbytes
                )
            )
            for table in good(*args)
        ]

    patch.setattr(deepseek_engram, "read_engram_tables", read_engram_tables)


def first_page_only(patch):
    """A row that lies in two pages gets the bytes of the first."""
    good = rows.RowReader._plan

    def plan(self, wanted):
        spans, missing = good(self, wanted)
        need = [min(span.need_nbytes, PAGE_NBYTES) for span in spans]
        spans = [
            span._replace(nbytes=PAGE_NBYTES, need_nbytes=n)
            for span, n in zip(spans, need, strict=True)
        ]
        return spans, missing

    patch.setattr(rows.RowReader, "_plan", plan)


MISTAKES = {
    "8 experts numbered in file order": Mistake(numbered_in_file_order, EXPERTS),
    "19 case kept": Mistake(case_kept, ROW_IDS),
    "19 every token its own class": Mistake(every_token_its_own_class, ROW_IDS),
    "19 classes in another order": Mistake(classes_in_another_order, ROW_IDS),
    "21 scales with the values' stride": Mistake(scales_with_the_values_stride, ROW_BYTES),
    "21 first page of a row only": Mistake(first_page_only, ROW_BYTES),
    "26 end of file is an error": Mistake(whole_pages_wanted, EXPERTS),
    "26 end of file is a success": Mistake(any_end_is_fine, ENDS),
}


@pytest.mark.parametrize(("measure", "bound"), CHECKS, ids=[m.__name__ for m, _ in CHECKS])
def test_check_passes_without_a_mistake(measure, bound):
    assert measure() <= bound


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_seen(monkeypatch, mistake):
    measure, bound = mistake.seen_by
    mistake.plant(monkeypatch)
    found = measure()
    print(f"{measure.__name__}: {found:.2g}, right: {bound} at most")
    assert not found <= bound


def test_every_check_sees_something():
    assert {m.seen_by for m in MISTAKES.values()} == set(CHECKS)


def test_every_number_has_a_mistake():
    assert {int(name.split()[0]) for name in (*ARITHMETIC, *MISTAKES)} == NUMBERS


def test_a_wrong_map_is_refused_by_its_count(monkeypatch):
    """19: it is said when the model is opened, not seen in its text."""
    case_kept(monkeypatch)
    token_map = deepseek_engram.build_token_map(FOLDER / "tokenizer.json")
    with pytest.raises(UserError, match=r"token classes, the checkpoint's config\.json says"):
        deepseek_engram.EngramHash(SPEC, token_map)


def test_the_shards_have_what_these_mistakes_need():
    """More than ten experts, a file that ends inside a page with an expert, and a row in two pages."""
    checkpoint = Checkpoint.open(FOLDER)
    layout = deepseek_weights.expert_layout(checkpoint, SPEC)
    assert SPEC.num_experts > 10
    assert any(
        span.need_nbytes < span.nbytes and span.offset + span.nbytes > file.stat().st_size
        for idx, file in enumerate(layout.files)
        for la in range(SPEC.num_layers)
        for e in range(SPEC.num_experts)
        for span in layout.spans(ExpertKey(la, e))
        if span.file_idx == idx
    )
    tables = deepseek_engram.read_engram_tables(checkpoint, SPEC)
    starts = [
        table.values.locate(row)[1] for table in tables for row in range(table.values.num_rows)
    ]
    width = SPEC.engram_head_dim
    assert any(start // PAGE_NBYTES != (start + width - 1) // PAGE_NBYTES for start in starts)
