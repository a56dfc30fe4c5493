"""DeepSeek checkpoints of random bytes: the release's places and sizes, cuts that can be computed, the same bytes."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_setup import make_runner
from tokenizers import Tokenizer

from kernels.formats import fp8_blocks_dequantize, mxfp4_dequantize
from runtime.checkpoint import Checkpoint, read_header
from runtime.engine import Engine
from runtime.errors import UserError
from runtime.models.deepseek import read_spec
from runtime.models.deepseek_engram import EngramHash, build_token_map, dequantize_rows
from runtime.models.deepseek_moe import Moe
from runtime.models.deepseek_weights import DeepseekSpec, account, expert_layout, resident_shapes
from runtime.units import GIB
from stages import synthetic_deepseek as synthetic
from stages.core import Runner
from stages.opening import engine_files
from stages.stage import StageContext
from stages.synthetic_parts import make_header

TINY = synthetic.TOKENIZER  # sizes of the bundled model
SETUP = ["download"]
LAYERS, EXPERTS = 6, 10


def small_runner(outputs: Path, *overrides: str) -> Runner:
    """Return a runner of a synthetic checkpoint in the bundled model's dimensions."""
    sizes = (f"layers={LAYERS}", f"experts={EXPERTS}", "disk_gib=1", "ngram_rows=2000")
    return make_runner(
        outputs,
        *("model=deepseek_synthetic", f"model.path={TINY}", "model.context_tokens=256", "hw=cpu"),
        *(f"model.synthetic.{size}" for size in sizes),
        *overrides,
    )


def full_plan(tmp_path: Path, *overrides: str) -> synthetic.Plan:
    """Return a plan in the released sizes."""
    sizes = (f"model.synthetic.{override}" for override in overrides)
    return synthetic.make_plan(make_runner(tmp_path, "model=deepseek_synthetic", *sizes).cfg)


def files(runner: Runner) -> dict[str, str]:
    """Return the hash of each file of the checkpoint."""
    return {n: e["blake3"] for n, e in runner.find("synthetic").record["files"].items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Runner:
    """A finished set-up of a small synthetic checkpoint: not to be changed."""
    runner = small_runner(tmp_path_factory.mktemp("synthetic"))
    runner.run(SETUP)
    return runner


@pytest.fixture(scope="module")
def root(made) -> Path:
    return made.find("synthetic").root


@pytest.fixture(scope="module")
def checkpoint(root) -> Checkpoint:
    return Checkpoint.open(root)


# ---- the release's layout ----------------------------------------------------------------------------------------


def test_uncut_every_shard_has_the_published_size_and_the_experts_the_published_places(tmp_path):
    """Sizes, header ends and first weight bytes of the release, as listed for its shards 2 to 43, 47 and 48."""
    plan = full_plan(tmp_path, "disk_gib=600", "ngram_rows=384000000")
    assert (plan.spec.num_layers, plan.spec.num_experts) == (40, 384)
    assert plan.spec.engram_rows == (384_006_168, 384_016_682)
    names = synthetic.shard_names(plan)
    assert len(names) == 44
    ends, sizes, codes_at = {}, {}, {}
    for number in (0, 1, 3, 10, 11, 15, 21, 25, 40, 41, 42, 43):  # a layer is behind the embedding
        tensors = synthetic.shard_tensors(plan, number)
        header = make_header(tensors, synthetic.METADATA, synthetic.ALIGN_NBYTES)
        ends[number] = len(header)
        sizes[number] = len(header) + sum(tensor.nbytes for tensor in tensors)
        codes_at[number] = sizes[number] - sum(t.nbytes for t in tensors if t.dtype == "I8")
    assert sizes == {
        0: 1_323_858_272, 1: 7_389_759_032, 3: 7_405_953_784, 10: 7_389_759_032, 11: 7_389_761_368,
        15: 7_405_956_128, 21: 7_400_713_088, 25: 7_395_337_384, 40: 7_389_761_368,
        41: 1_323_837_624, 42: 101_535_150_936, 43: 101_537_926_640,
    }  # fmt: skip
    assert [ends[number] for number in (0, 1, 41, 42, 43)] == [352, 258_144, 184, 664, 672]
    skews = {number: codes_at[number] % 4096 for number in (1, 3, 11, 15, 21, 25)}
    assert skews == {1: 1592, 3: 760, 11: 3928, 15: 3104, 21: 2944, 25: 1192}
    codes = [t.name.split(".")[4] for t in synthetic.shard_tensors(plan, 1) if t.dtype == "I8"]
    assert codes[::3][:4] == ["0", "1", "10", "100"], "string order"
    assert codes[::3].index("2") == 112
    assert codes[-1] == "99"


def test_every_tensor_of_the_layout_is_there_and_none_besides(root, checkpoint):
    spec = read_spec(root)
    assert (spec.num_layers, spec.num_experts) == (LAYERS, EXPERTS)
    assert account(checkpoint, spec) == {
        "residents": len(resident_shapes(spec)),
        "experts": 6 * LAYERS * EXPERTS,
        "Engram tables": 2 * len(spec.engram_layers),
        "left out: image delimiters": 3,
        "left out: routing bias of image tokens": LAYERS,
    }
    layout = expert_layout(checkpoint, spec)  # asserts that runs are in one piece
    assert len(layout.files) == LAYERS, "one layer a shard"
    library = {n: t for path in checkpoint.files() for n, t in load_file(path).items()}
    assert set(library) == set(checkpoint.tensors), "the format's own library agrees"


def test_uncut_every_shard_is_that_of_the_trained_model(tmp_path):
    """Names, dtypes, shapes and their order; the trained model's shards were written by other code."""
    runner = small_runner(
        tmp_path,
        *("model.synthetic.layers=8", "model.synthetic.experts=48"),
        "model.synthetic.ngram_rows=30000",
    )
    plan = synthetic.make_plan(runner.cfg)
    names = synthetic.shard_names(plan)
    assert names == [path.name for path in Checkpoint.open(TINY).files()]
    for number, name in enumerate(names):
        ours = [t for t in synthetic.shard_tensors(plan, number) if not t.name.startswith("image_")]
        theirs = read_header(TINY / name).values()
        assert ours == [(info.name, info.dtype, info.shape) for info in theirs], name


def test_experts_end_with_the_file(root, checkpoint):
    """The release's last read of a shard is short."""
    for path in checkpoint.files()[1 : LAYERS + 1]:
        last = max(read_header(path).values(), key=lambda info: info.extent.offset)
        assert last.name.endswith(f"experts.{EXPERTS - 1}.w3.weight")
        assert last.extent.offset + last.extent.nbytes == path.stat().st_size


# ---- the cut -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released() -> DeepseekSpec:
    return read_spec(synthetic.RELEASED)


def kinds(spec: DeepseekSpec) -> set[tuple[int, bool, bool, bool]]:
    return {
        (ratio, spec.is_kv_source(i), spec.is_index_source(i), i in spec.engram_layers)
        for i, ratio in enumerate(spec.compress_ratios)
    }


@pytest.mark.parametrize("layers", [4, 5, 8, 11, 23, 40])
def test_a_cut_keeps_roles_that_fit_each_other(tmp_path, released, layers):
    plan = full_plan(tmp_path, f"layers={layers}", "experts=6", "ngram_rows=2000")
    spec, kept = plan.spec, json.loads(plan.config)["synthetic"]["released_layers"]
    assert spec.num_layers == len(kept) == layers
    assert kept == sorted(set(kept))
    assert spec.compress_ratios == tuple(released.compress_ratios[layer] for layer in kept)
    assert {0, 1, 2} == set(spec.compress_ratios)
    for here, there in enumerate(kept):
        assert spec.is_kv_source(here) == released.is_kv_source(there)
        assert spec.is_index_source(here) == released.is_index_source(there)
        assert (here in spec.engram_layers) == (there in released.engram_layers)
    assert spec.engram_layers
    assert kept[spec.candidate_source] == released.candidate_source
    if layers >= 8:
        assert kinds(spec) == kinds(released)
    assert (spec.num_drafts, spec.target_layers) == (0, ())


def test_which_layers_are_kept(released):
    assert synthetic.choose_layers(released, 4) == [0, 1, 2, 20]
    assert synthetic.choose_layers(released, 8) == [0, 1, 2, 3, 14, 20, 21, 24]
    assert synthetic.choose_layers(released, None) == list(range(40))
    sixteen = synthetic.choose_layers(released, 16)
    assert set(synthetic.choose_layers(released, 15)) < set(sixteen)
    assert max(b - a for a, b in itertools.pairwise([*sixteen, 40])) <= 6, "spread over the depth"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layers=3"], r"layers is 3: at least 4 \(one of each compress ratio and one with Engram: \[0, 1, 2, 20\] "
         r"of the release\), at most 40\nhint: set model.synthetic.layers=4"),
        (["experts=5"], r"experts is 5: at least 6 .* at most 384"),
        (["disk_gib=8"], r"40 layers of 6 experts \(the fewest.*\) need 1\d\.\d\d GiB for the checkpoint, "),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        full_plan(tmp_path, *overrides)


def test_a_small_vocabulary_is_refused(tmp_path):
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"]["vocab_size"] = 4000
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="vocab_size 4000, the bundled tokenizer has 4608 tokens"):
        small_runner(tmp_path, f"model.path={tmp_path}").explain(SETUP)


def test_as_many_experts_as_fit(tmp_path):
    sizes = ("model.synthetic.experts=null", "model.synthetic.disk_gib=0.014")
    runner = small_runner(tmp_path, *sizes)
    runner.run(["synthetic"])
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    experts, budget = runner.find("synthetic").facts["experts"], int(0.014 * GIB)
    assert 4 < experts < 48
    assert used <= synthetic.setup_nbytes(synthetic.make_plan(runner.cfg)) <= budget
    runner.cfg.model.synthetic.experts = experts + 1
    with pytest.raises(UserError, match=r"model\.synthetic\.disk_gib=0\.014 allows"):
        synthetic.make_plan(runner.cfg)


def test_the_released_dense_tensors_and_a_few_experts_fit_thirty_gib(tmp_path):
    plan = full_plan(tmp_path, "disk_gib=30")
    layer = sum(t.nbytes for t in synthetic.shard_tensors(plan, 1) if ".experts." in t.name)
    assert layer == plan.spec.num_experts * 18_800_640
    assert 24 <= plan.spec.num_experts <= 30
    assert synthetic.setup_nbytes(plan) <= 30 * GIB < synthetic.setup_nbytes(plan) + 40 * 18_900_000


# ---- the tokenizer -----------------------------------------------------------------------------------------------


def test_the_tokenizer_has_the_released_vocabulary_and_the_classes_that_the_config_says(tmp_path):
    plan = full_plan(tmp_path, "layers=4", "experts=6")
    path = tmp_path / "tokenizer.json"
    path.write_text(synthetic.small_files(plan)["tokenizer.json"])
    token_map = build_token_map(path)
    assert len(token_map) == plan.spec.vocab_size == 129_280
    assert max(token_map) + 1 == plan.spec.engram_classes
    EngramHash(plan.spec, token_map)
    ours, theirs = (Tokenizer.from_file(str(p)) for p in (path, TINY / "tokenizer.json"))
    for text in ("A story about a whale w4700.", " w129279 w5000", "Какая столица Италии?"):
        assert ours.encode(text).ids == theirs.encode(text).ids
    assert ours.decode([4607]) == theirs.decode([4607])
    assert [ours.decode([i]) for i in (4608, 129_279)] == [" w4608", " w129279"]


# ---- values ------------------------------------------------------------------------------------------------------


def test_no_value_is_nan(checkpoint):
    for name, info in checkpoint.tensors.items():
        raw = np.frombuffer(checkpoint.read(info), np.uint8)
        if info.dtype == "F8_E4M3":
            assert (raw & 0x7F).max() < 0x7F, name
        elif info.dtype == "F8_E8M0":
            assert 100 < raw.min() < raw.max() == raw.min() + 1 < 135, name
        elif info.dtype != "I8":
            assert torch.isfinite(checkpoint.load(name).float()).all(), name


@pytest.mark.parametrize(
    ("name", "gain"),
    [("layers.1.attn.wq_b", 1.0), ("layers.0.attn.wo_b", 1.0), ("layers.3.attn.wo_a", 0.5),
     ("layers.0.ffn.shared_experts.w2", 1.0), ("layers.1.engram.wkv", 1.0),
     ("layers.2.ffn.experts.0.w1", 1.0), ("layers.2.ffn.experts.9.w2", 1.0)],
)  # fmt: skip
def test_matrices_keep_activations_of_order_one(checkpoint, name, gain):
    """Within the step between two powers of two."""
    codes, scales = (checkpoint.load(f"{name}.{part}") for part in ("weight", "scale"))
    is_expert = ".experts." in name
    open_matrix = mxfp4_dequantize if is_expert else fp8_blocks_dequantize
    matrix = open_matrix(codes.view(torch.uint8) if is_expert else codes, scales)
    assert 0.65 < matrix.std() * math.sqrt(matrix.shape[1]) / gain < 1.5
    assert abs(matrix.mean()) < 0.05 * matrix.std()


def test_engram_rows_have_order_one(checkpoint):
    parts = (checkpoint.load(f"layers.1.engram.embed.{part}") for part in ("weight", "scale"))
    rows = dequantize_rows(*(part.view(torch.uint8) for part in parts)).float()
    assert 0.65 < rows.std() < 1.5


def test_a_stream_keeps_more_of_itself(checkpoint):
    base = checkpoint.load("layers.2.hc_ffn_base")[8:].view(4, 4)
    assert (base.softmax(-1).diagonal() > 0.7).all()


# ---- the same bytes ----------------------------------------------------------------------------------------------


def test_the_same_bytes_again_and_others_for_another_seed(made, tmp_path):
    again = small_runner(tmp_path / "again")
    again.run(["synthetic"])
    assert files(again) == files(made)
    assert {str(d) for _, d in again.explain(["synthetic"])} == {"skip: record matches"}
    other = small_runner(tmp_path / "other", "model.synthetic.seed=1")
    other.run(["synthetic"])
    differ = {name for name, digest in files(other).items() if digest != files(made)[name]}
    assert differ == {name for name in files(made) if name.endswith(".safetensors")}


def test_the_bytes_are_pinned(made):
    """Another processor or library must give these; on purpose changed bytes need a new `version` of the stage."""
    found = {name: digest for name, digest in files(made).items() if name in PINNED}
    assert found == PINNED


PINNED = {
    "model-00001-of-00010.safetensors": "f43415f58c84ae3fc98a6f4cde1a1dfd",
    "model-00002-of-00010.safetensors": "dffeabb7a529f00abaca2e648f6e3a50",
    "model-00004-of-00010.safetensors": "9aa795d69a12ef4c4dbf58bd9a101a9a",
    "model-00009-of-00010.safetensors": "6b06b677b4a7f98d69ebc7c6d7a7ce44",
}


def test_a_tensors_bytes_do_not_depend_on_how_many_experts_there_are(checkpoint, tmp_path):
    runner = small_runner(tmp_path, "model.synthetic.experts=7")
    runner.run(["synthetic"])
    fewer = Checkpoint.open(runner.find("synthetic").root)
    for name, info in fewer.tensors.items():
        if "ffn.gate" not in name:
            assert fewer.read(info) == checkpoint.read(checkpoint.tensors[name]), name


def test_what_was_stopped_goes_on_at_the_next_file_with_the_same_bytes(made, tmp_path, monkeypatch):
    runner, done = small_runner(tmp_path), StageContext.done

    def stopping(ctx: StageContext, unit: str, **facts: object) -> None:
        done(ctx, unit, **facts)
        if len(ctx.units) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(StageContext, "done", stopping)
    with pytest.raises(KeyboardInterrupt):
        runner.run(["synthetic"])
    assert str(runner.decide("synthetic")) == "resume: 4 of 10 units are done"
    monkeypatch.setattr(StageContext, "done", done)
    runner.run(["synthetic"])
    assert files(runner) == files(made)


# ---- computing ---------------------------------------------------------------------------------------------------


def open_engine(runner: Runner) -> Engine:
    runner.cfg.hw.compute_threads, runner.cfg.cache.ram_gib = 1, 0.1
    return Engine.open(runner.cfg, engine_files({name: runner.find(name) for name in SETUP}))


def test_an_engine_decodes_finite_logits_with_a_spread(made):
    engine = open_engine(made)
    try:
        state = engine.new_state()
        rows = [engine.model.prefill(list(range(10, 42)), state)]
        for _ in range(8):
            rows.append(engine.model.decode(int(rows[-1].argmax()), state))
        assert engine.codec.decode(engine.codec.encode("Hello")) == "Hello"
    finally:
        engine.close()
    logits = torch.cat(rows)
    assert torch.isfinite(logits).all()
    assert (logits.std(dim=1) > 0.3).all()
    assert (logits.std(dim=1) < 3).all()
    assert (logits[1:] - logits[:-1]).abs().amax(dim=1).min() > 0.1, "not the same for every token"
    assert len(set(logits.argmax(1).tolist())) > 1


def test_a_snapshot_in_the_released_shape_is_used_in_place(made, root, tmp_path):
    """With the folders that a snapshot has: what prompts are made from is watched, the rest of them is not."""
    snapshot = shutil.copytree(root, tmp_path / "snapshot")
    for name in ("encoding/encoding.py", "encoding/tests/test_input_1.json", "inference/model.py"):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text("pass\n")
    before = {path: path.stat().st_mtime_ns for path in snapshot.rglob("*")}
    overrides = ("model=deepseek", "model.source=local", f"model.path={snapshot}", "hw=cpu")
    runner = make_runner(tmp_path / "outputs", *overrides, "model.context_tokens=256")
    runner.run(SETUP)
    watched = {str(Path(n).relative_to(snapshot)) for n in runner.find("download").record["files"]}
    expected = {n for n in files(made) if n.endswith((".json", ".jinja", ".safetensors"))}
    assert watched - {"record.json"} == expected | {"encoding/encoding.py", "inference/model.py"}
    logits = []
    for each in (runner, made):
        engine = open_engine(each)
        logits.append(engine.model.prefill([5, 6, 7], engine.new_state()))
        engine.close()
    assert torch.equal(*logits)
    assert {path: path.stat().st_mtime_ns for path in snapshot.rglob("*")} == before
    (snapshot / "encoding" / "encoding.py").write_text("other\n")
    assert runner.decide("download").action == "run"


def shares(runner: Runner, monkeypatch) -> list[float]:
    """Return, ascending, each expert's share of the choices of its layer, as a mean over layers."""
    counts: dict[int, Counter[int]] = {}
    real = Moe.route

    def route(moe: Moe, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = real(moe, u)
        counts.setdefault(moe.layer, Counter()).update(ids.flatten().tolist())
        return ids, weights

    runner.run(SETUP)
    engine = open_engine(runner)
    with monkeypatch.context() as patch:
        patch.setattr(Moe, "route", route)
        engine.model.prefill(list(range(100, 228)), engine.new_state())
    engine.close()
    num_experts = runner.find("synthetic").facts["experts"]
    sorted_shares = [
        sorted(c[expert] / c.total() for expert in range(num_experts)) for c in counts.values()
    ]
    assert len(sorted_shares) == LAYERS
    return [sum(column) / LAYERS for column in zip(*sorted_shares, strict=True)]


def test_routes_are_even_without_skew_and_uneven_with_it(tmp_path, monkeypatch):
    even, uneven = (
        shares(
            small_runner(
                tmp_path,
                *(f"model.synthetic.skew={skew}", "model.synthetic.experts=40", "prefetch=none"),
            ),
            monkeypatch,
        )
        for skew in (0.0, 1.5)
    )
    assert sum(even[-4:]) < 0.25, "four of forty"
    assert even[0] > 0, "each is used"
    assert sum(uneven[-4:]) > 1.5 * sum(even[-4:])


def test_bench_runs_from_the_command_line(cli, made):
    """All of it: the checkpoint, the engine, the table."""
    result = cli(
        *("model=deepseek_synthetic", "hw=cpu", "stages=[bench]", f"model.path={TINY}"),
        *("model.synthetic.layers=4", "model.synthetic.experts=6", "model.synthetic.disk_gib=1"),
        *("model.synthetic.ngram_rows=2000", "model.context_tokens=64", "bench.plot=false"),
        *("bench.tokens=2", "bench.warmup_tokens=1", "bench.repeats=1", "bench.prompt_length=8"),
    )
    assert result.returncode == 0, result.stderr
    assert "synthetic: run: no record" in result.stderr
    assert "measured in this run" in result.stdout


def test_the_header_is_the_releases(checkpoint):
    for path in checkpoint.files():
        raw = path.read_bytes()
        (nbytes,) = struct.unpack("<Q", raw[:8])
        assert nbytes % 8 == 0
        assert b"__metadata__" not in raw[:64]
