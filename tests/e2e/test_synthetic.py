"""Checkpoints of random bytes: the release's layout, the same bytes every time, within the budget, and computable."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_setup import make_runner

from kernels.formats import nvfp4_dequantize
from runtime.checkpoint import Checkpoint
from runtime.engine import Engine
from runtime.errors import UserError
from runtime.models import qwen_weights as weights
from runtime.models.qwen import read_spec
from runtime.models.qwen_moe import Moe
from runtime.units import GIB
from stages import synthetic_qwen as synthetic
from stages.core import Runner
from stages.download import snapshot_of
from stages.files import file_digest
from stages.opening import engine_files
from stages.stage import StageContext
from stages.synthetic_parts import generator, make_header, normal, to_bf16

SETUP = ["download", "repack", "residents"]
PREFIX = "model.language_model."
HEADS = "layers.1.ple.ple_embedding.ngram_heads"
LAYERS, EXPERTS = 5, 10  # more layers than one pattern of three and one


def small_runner(outputs: Path, tiny_qwen: Path, *overrides: str) -> Runner:
    """Return a runner of a synthetic checkpoint in the bundled model's dimensions."""
    sizes = (f"layers={LAYERS}", f"experts={EXPERTS}", "disk_gib=1", "ngram_rows=2000")
    return make_runner(
        outputs,
        "model=qwen_synthetic",
        f"model.path={tiny_qwen}",
        "model.context_tokens=512",
        "hw=cpu",
        *(f"model.synthetic.{size}" for size in sizes),
        *overrides,
    )


def files(runner: Runner) -> dict[str, str]:
    """Return the hash of each file of the checkpoint."""
    return {n: e["blake3"] for n, e in runner.find("synthetic").record["files"].items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_qwen) -> Runner:
    """A finished set-up of a small synthetic checkpoint: not to be changed."""
    runner = small_runner(tmp_path_factory.mktemp("synthetic"), tiny_qwen)
    runner.run(SETUP)
    return runner


@pytest.fixture(scope="module")
def root(made) -> Path:
    return made.find("synthetic").root


@pytest.fixture(scope="module")
def checkpoint(root) -> Checkpoint:
    return Checkpoint.open(root)


def load(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.load(PREFIX + name).float()


# ---- the release's layout ----------------------------------------------------------------------------------------


def test_every_tensor_of_the_layout_is_there_and_none_besides(root, checkpoint):
    spec = read_spec(root)
    assert (spec.num_layers, spec.num_experts) == (LAYERS, EXPERTS)
    assert spec.is_attention == (False, False, False, True, False)
    counts = weights.account(checkpoint, spec)
    assert counts == {
        "residents": len(spec.resident_shapes()),
        "expert blocks": 6 * LAYERS * EXPERTS,
        "expert scalars": 6 * LAYERS * EXPERTS,
        "n-gram table": 1 + spec.table_parts,
    }
    for name, shape in spec.resident_shapes().items():
        checkpoint.info(name, "I64" if "ple_embedding" in name else "BF16", shape)
    library = {n: t for path in checkpoint.files() for n, t in load_file(path).items()}
    assert set(library) == set(checkpoint.tensors), "the format's own library agrees"


def test_names_and_forms_are_those_of_the_trained_model(checkpoint, tiny_qwen):
    """But for the sizes that were cut, and the input scales that the bundled model does not have."""
    trained = Checkpoint.open(tiny_qwen).tensors
    for name, info in checkpoint.tensors.items():
        if name.endswith("input_scale") or "self_attn" in name:
            continue
        other = trained[name]
        assert info.dtype == other.dtype, name
        if not name.endswith("mlp.gate.weight") and "ngram_embedding.shard" not in name:
            assert info.shape == other.shape, name


def test_the_released_config_gives_the_released_sizes(tmp_path):
    cfg = make_runner(
        tmp_path,
        *("model=qwen_synthetic", "model.synthetic.disk_gib=300"),
        "model.synthetic.ngram_rows=320000000",
    ).cfg
    plan = synthetic.make_plan(cfg)
    assert (plan.spec.num_layers, plan.spec.num_experts) == (48, 512)
    assert plan.table.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert (plan.table.sizes[0], plan.table.sizes[-1]) == (20000003, 20000171)
    assert plan.table.offsets[-1] == 300001275
    assert plan.table.rows_per_part == 2500012
    total = sum(t.nbytes for t in synthetic.shard_tensors(plan, 0))
    total += sum(t.nbytes for t in synthetic.table_tensors(plan))
    total += 36 * sum(t.nbytes for t in synthetic.shard_tensors(plan, 1))
    total += sum(t.nbytes for t in synthetic.shard_tensors(plan, 4)) * 12
    ple = sum(t.nbytes for t in synthetic.residents_of(plan, 1) if ".ple." in t.name)
    assert total + ple == 67_947_724_800 + 589_824 + 51_200_245_762 + 9_895_397_400


def test_the_ngram_constants_follow_the_rule_of_the_trained_model(tiny_qwen):
    """Its own three tensors were made by other code."""
    config = json.loads((tiny_qwen / "config.json").read_text())["text_config"]
    trained = Checkpoint.open(tiny_qwen)
    table = synthetic.make_table(read_spec(tiny_qwen), config["ngram_vocab_size_base"], config)
    name = f"{PREFIX}layers.1.ple.ple_embedding."
    assert list(table.multipliers) == trained.load(f"{name}layer_multipliers").tolist()
    assert list(table.sizes) == trained.load(f"{name}ngram_heads_vocab_sizes").tolist()
    assert list(table.offsets) == trained.load(f"{name}ngram_heads_offsets").tolist()
    assert table.rows_per_part == weights.read_ngram_table(trained, read_spec(tiny_qwen))[0].rows_per_part  # fmt: skip


def test_heads_of_the_cut_table_are_disjoint_and_inside(root, checkpoint):
    sizes = checkpoint.load(f"{PREFIX}{HEADS}_vocab_sizes").tolist()
    offsets = checkpoint.load(f"{PREFIX}{HEADS}_offsets").tolist()
    table, _ = weights.read_ngram_table(checkpoint, read_spec(root))
    assert len(set(sizes)) == len(sizes)
    assert offsets == [sum(sizes[:i]) for i in range(len(sizes))]
    assert 2000 <= sum(sizes) <= table.num_rows < 2300


# ---- values ------------------------------------------------------------------------------------------------------


def test_no_value_is_nan_and_no_block_scale_is_negative(checkpoint):
    for name, info in checkpoint.tensors.items():
        raw = np.frombuffer(checkpoint.read(info), np.uint8)
        if info.dtype == "F8_E4M3":
            assert (raw & 0x7F).max() < 0x7F, name
            if name.endswith("weight_scale"):
                assert 0x30 <= raw.min() <= raw.max() <= 0x3F, name
        elif info.dtype != "U8":
            assert torch.isfinite(checkpoint.load(name).double()).all(), name


def test_experts_have_the_deviation_that_keeps_activations_of_order_one(checkpoint):
    seen = []
    for projection, columns in (("gate_proj", 256), ("up_proj", 256), ("down_proj", 48)):
        for expert in (0, EXPERTS - 1):
            name = f"{PREFIX}layers.2.mlp.experts.{expert}.{projection}."
            parts = (checkpoint.load(f"{name}{tail}") for tail in ("weight", "weight_scale"))
            scale = checkpoint.load(f"{name}weight_scale_2")
            matrix = nvfp4_dequantize(*parts, scale)
            assert abs(matrix.mean()) < 0.05 * matrix.std()
            assert matrix.std() * math.sqrt(columns) == pytest.approx(1, abs=0.15)
            seen.append(scale.item())
    assert len(set(seen)) == len(seen), "experts differ in their global scales too"


def test_residents_have_the_deviations_that_they_should(checkpoint):
    for name in (
        "layers.0.linear_attn.in_proj_qkv.weight",
        "layers.3.self_attn.q_proj.weight",
        "layers.4.mlp_hyper_connection.input_mix_weight_up.weight",
        "layers.1.ple.key_proj.weight",
    ):
        matrix = load(checkpoint, name)
        assert matrix.std() * math.sqrt(matrix.shape[-1]) == pytest.approx(1, abs=0.05)
        assert abs(matrix.mean()) < 0.02 * matrix.std()
    assert load(checkpoint, "layers.0.attn_hyper_connection.hc_norm.weight").abs().max() < 0.4
    assert load(checkpoint, "layers.0.linear_attn.norm.weight").mean() == pytest.approx(1, abs=0.1)
    rate = load(checkpoint, "layers.0.linear_attn.A_log").exp()
    step = torch.nn.functional.softplus(load(checkpoint, "layers.0.linear_attn.dt_bias"))
    keep = torch.exp(-rate * step)
    assert ((keep > 0) & (keep < 1)).all()


def test_rows_of_a_matrix_are_independent(checkpoint):
    rows = load(checkpoint, "embed_tokens.weight")
    rows = rows / rows.norm(dim=1, keepdim=True)
    likeness = (rows @ rows.T).fill_diagonal_(0).abs()
    assert likeness.max() < 0.45, "of 10 million pairs of random rows of 256: 0.35"
    assert likeness.square().mean() * 256 == pytest.approx(1, abs=0.05)


def test_bf16_is_rounded_to_the_nearest_even():
    values = normal(generator(0, "x"), 10000)
    wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (to_bf16(values) == wanted).all()
    assert values.std() == pytest.approx(1, abs=0.03)
    assert abs(values.mean()) < 0.03


# ---- the same bytes ----------------------------------------------------------------------------------------------


def test_the_same_bytes_again_and_others_for_another_seed(made, tiny_qwen, tmp_path):
    again = small_runner(tmp_path / "again", tiny_qwen)
    again.run(["synthetic"])
    assert files(again) == files(made)
    assert again.find("synthetic").record["digest"] == made.find("synthetic").record["digest"]
    other = small_runner(tmp_path / "other", tiny_qwen, "model.synthetic.seed=1")
    other.run(["synthetic"])
    differ = {name for name, digest in files(other).items() if digest != files(made)[name]}
    assert differ == {name for name in files(made) if name.endswith(".safetensors")}


def test_the_bytes_are_pinned(made):
    """Another processor or library must give these; on purpose changed bytes need a new `version` of the stage."""
    found = {name: digest for name, digest in files(made).items() if name in PINNED}
    assert found == PINNED


def test_the_keys_are_pinned(made):
    """A checkpoint made by an earlier version is found again."""
    assert made.key("synthetic") == "9c75ae5aabfb"
    assert made.find("synthetic").record["digest"] == "b79b77561215adc7072e68955a411910"


PINNED = {
    "model-00001-of-00006.safetensors": "533b3f3f3d002bbd954ce01befe90b43",
    "model-00002-of-00006.safetensors": "44c561d08d39f86843201bc0c3bf567c",
    "model-fp8-ple.safetensors": "17b2d2be6b249768ac97691b6e0fe2ce",
}


def test_recorded_hashes_are_those_of_the_files(made, root):
    for name, digest in files(made).items():
        assert file_digest(root / name) == digest, name


def test_an_experts_bytes_do_not_depend_on_how_many_there_are(made, checkpoint, tiny_qwen, tmp_path):  # fmt: skip
    runner = small_runner(
        tmp_path, tiny_qwen, "model.synthetic.layers=2", "model.synthetic.experts=7"
    )
    runner.run(["synthetic"])
    fewer = Checkpoint.open(runner.find("synthetic").root)
    for name, info in fewer.tensors.items():
        if not name.endswith("mlp.gate.weight"):
            assert fewer.read(info) == checkpoint.read(checkpoint.tensors[name]), name


def _run_and_die(runner: Runner, what: str, count: int) -> int:
    """Make the checkpoint in a fork that is killed at a unit's journal line or inside a write; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        left = count
        done, pwrite = StageContext.done, os.pwrite

        def dying_done(ctx: StageContext, unit: str, **facts: object) -> None:
            nonlocal left
            done(ctx, unit, **facts)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def dying_pwrite(fd: int, data: memoryview, offset: int) -> int:
            nonlocal left
            left -= 1
            if left == 0:
                pwrite(fd, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return pwrite(fd, data, offset)

        if what == "unit":
            StageContext.done = dying_done
        else:
            os.pwrite = dying_pwrite
        runner.run(["synthetic"])
    finally:
        os._exit(1)  # not reached where the kill worked


@pytest.mark.parametrize(
    ("what", "count"), [("unit", 1), ("unit", 4), ("unit", 7), ("write", 3), ("write", 140)]
)
def test_sigkill_anywhere_then_the_same_command_gives_the_same_bytes(
    made, tiny_qwen, tmp_path, what, count, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda _fd: None)  # a kill loses no written byte
    runner = small_runner(tmp_path, tiny_qwen)
    status = _run_and_die(runner, what, count)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not runner.folder("synthetic").exists(), "a finished name"
    decision = runner.decide("synthetic")
    assert decision.action == "resume"
    done = int(decision.reason.split()[0])
    assert done == count if what == "unit" else done < 7
    units, real = [], StageContext.done

    def noted(ctx: StageContext, unit: str, **facts: object) -> None:
        units.append(unit)
        real(ctx, unit, **facts)

    monkeypatch.setattr(StageContext, "done", noted)
    runner.run(["synthetic"])
    assert len(units) == 7 - done, "finished files are not made again"
    assert files(runner) == files(made)


# ---- the budget --------------------------------------------------------------------------------------------------


def set_up_nbytes(outputs: Path) -> int:
    return sum(path.stat().st_size for path in outputs.rglob("*") if path.is_file())


def test_as_many_experts_as_fit(tiny_qwen, tmp_path):
    runner = small_runner(
        tmp_path,
        tiny_qwen,
        *("model.synthetic.experts=null", "model.synthetic.disk_gib=0.025"),
        "model.deltanet=fp8_rows",
    )
    runner.run(SETUP)
    plan, budget = synthetic.make_plan(runner.cfg), int(0.025 * GIB)
    experts = runner.find("synthetic").facts["experts"]
    assert 6 < experts < 64
    used = set_up_nbytes(tmp_path)
    assert used <= budget
    these, one_more = (
        synthetic.table_setup_nbytes(dataclasses.replace(plan.spec, num_experts=n), plan.table)
        for n in (experts, experts + 1)
    )
    assert used <= these <= budget < one_more
    runner.cfg.model.synthetic.experts = experts + 1
    with pytest.raises(UserError, match=r"model\.synthetic\.disk_gib=0\.025 allows"):
        synthetic.make_plan(runner.cfg)


@pytest.mark.parametrize("disk_gib", [40, 100])
def test_the_budget_of_the_released_shapes(tmp_path, disk_gib):
    """All names are counted here, of the headers and of the index."""
    cfg = make_runner(tmp_path, "model=qwen_synthetic", f"model.synthetic.disk_gib={disk_gib}").cfg
    plan = synthetic.make_plan(cfg)
    experts = plan.spec.num_experts
    block = 2_764_800
    per_expert = 48 * (2 * (block + 24) + 8)
    headers = 0
    for number in (0, 1, 48, 49):
        tensors = synthetic.shard_tensors(plan, number)
        times = 47 if number == 1 else 1
        headers += times * (
            len(make_header(tensors, synthetic.METADATA, synthetic.ALIGN_NBYTES))
            + 60 * len(tensors)
        )
        headers += times * sum(len(tensor.name) for tensor in tensors)
    residents = 2 * 9_895_397_400 - 36 * 2560 * (10240 + 6144 + 6144)  # DeltaNet in FP8 rows
    residents -= 2 * 2 * 48 * 2560 * (512 - experts)  # rows of routers
    table = plan.table.rows_per_part * 128 * 160
    total = headers + residents + table + experts * per_expert
    assert total < disk_gib * GIB
    assert total + 1.2 * per_expert > disk_gib * GIB


def test_the_budget_grows_the_checkpoint_up_to_the_release(tmp_path):
    experts = [
        synthetic.make_plan(
            make_runner(tmp_path, "model=qwen_synthetic", f"model.synthetic.disk_gib={gib}").cfg
        ).spec.num_experts
        for gib in (40, 60, 1000)
    ]
    assert 10 < experts[0] < experts[1] < experts[2] == 512


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["disk_gib=10"], r"48 layers of 10 experts \(the fewest.*\) need 18\.\d\d GiB for checkpoint, pack and "
         r"residents, model.synthetic.disk_gib=10 allows 10.00 GiB\nhint: set model.synthetic.disk_gib=18"),
        (["experts=400"], r"48 layers of 400 experts need 1\d\d\.\d\d GiB .*\n.* or model.synthetic.experts=1\d\d$"),
        (["experts=9"], r"experts is 9: at least 10 .* at most 512"),
        (["experts=513", "disk_gib=500"], "experts is 513: at least 10 .* at most 512"),
        (["layers=1"], "layers is 1: at least 2 .* at most 48"),
        (["layers=49"], "layers is 49: .*\n.*layers=48"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_numbers_before_anything_is_written(
    tmp_path, overrides, message
):
    runner = make_runner(
        tmp_path, "model=qwen_synthetic", *(f"model.synthetic.{o}" for o in overrides)
    )
    with pytest.raises(UserError, match=message):
        runner.run(SETUP)
    assert set_up_nbytes(tmp_path) == 0


def test_a_disk_too_small_for_the_whole_set_up_is_refused_at_the_start(
    tmp_path, tiny_qwen, monkeypatch
):
    runner = small_runner(tmp_path, tiny_qwen)
    plan = synthetic.make_plan(runner.cfg)
    needed = synthetic.setup_nbytes(plan)
    usage = shutil.disk_usage(tmp_path)._replace(free=needed)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(UserError, match="the coming stages need"):
        runner.run(SETUP)


def test_a_folder_without_a_config_and_a_small_vocabulary_are_refused(tmp_path, tiny_qwen):
    runner = small_runner(tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*config.json"):
        runner.explain(SETUP)
    config = json.loads((tiny_qwen / "config.json").read_text())
    config["text_config"]["vocab_size"] = 4000
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="vocab_size 4000, the bundled tokenizer has 4608 tokens"):
        runner.explain(SETUP)


def test_a_model_that_is_not_synthetic_has_no_such_stage(tmp_path):
    with pytest.raises(UserError, match="model=tiny is not synthetic: its source is bundled"):
        make_runner(tmp_path).run(["synthetic"])


# ---- among the stages --------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_made(tmp_path):
    steps = make_runner(tmp_path, "model=qwen_synthetic").explain(SETUP)
    assert [name for name, _ in steps] == ["synthetic", *SETUP]
    assert {str(decision) for _, decision in steps} == {"run: no record"}
    assert set_up_nbytes(tmp_path) == 0


def test_the_second_run_skips_all_and_another_seed_makes_all_anew(made, tiny_qwen, tmp_path):
    assert {str(d) for _, d in made.explain(SETUP)} == {"skip: record matches"}
    assert snapshot_of(made.find("download")) == made.find("synthetic").root
    outputs = shutil.copytree(made.root.parents[1], tmp_path / "outputs")
    other = small_runner(outputs, tiny_qwen, "model.synthetic.seed=1")
    steps = dict(other.explain(SETUP))
    assert str(steps["synthetic"]) == "run: seed 0 -> 1"
    other.run(SETUP)
    for name in SETUP:
        assert other.find(name).record["digest"] != made.find(name).record["digest"], name
    other.cfg.model.synthetic.disk_gib = 2.0
    assert {d.action for _, d in other.explain(SETUP)} == {"skip"}, "the budget is no byte"


def test_a_checkpoint_made_again_is_checked_again_and_packed_once(made, tiny_qwen, tmp_path):
    runner = small_runner(tmp_path, tiny_qwen)
    runner.run(["repack"])
    packed = runner.find("repack").record["finished"], runner.folder("repack").stat().st_mtime_ns
    forced = small_runner(tmp_path, tiny_qwen, "force=[synthetic]")
    forced.run(["repack"])
    assert (forced.find("repack").record["finished"], forced.folder("repack").stat().st_mtime_ns) == packed  # fmt: skip
    assert runner.decide("download").action == "skip"
    shard = runner.find("synthetic").root / "model-00002-of-00006.safetensors"
    os.utime(shard, ns=(0, 0))
    assert runner.decide("download").action == "run", "written after it was checked"


# ---- computing ---------------------------------------------------------------------------------------------------


def open_engine(runner: Runner) -> Engine:
    runner.cfg.hw.compute_threads, runner.cfg.cache.ram_gib = 1, 0.5
    return Engine.open(runner.cfg, engine_files({name: runner.find(name) for name in SETUP}))


def decode_logits(engine: Engine, count: int) -> torch.Tensor:
    """Return the logits of a prompt's end and of `count` greedy tokens below the tokenizer's size."""
    state = engine.new_state()
    rows = [engine.model.prefill(list(range(10, 42)), state)]
    for _ in range(count):
        token = int(rows[-1][0, : engine.num_tokens].argmax())
        rows.append(engine.model.decode(token, state))
    return torch.cat(rows)


def test_an_engine_opens_and_decodes_finite_logits_with_a_spread(made):
    engine = open_engine(made)
    try:
        logits = decode_logits(engine, 20)
        assert engine.codec.decode(engine.codec.encode("Hello")) == "Hello"
    finally:
        engine.close()
    assert logits.shape == (21, 4608)
    assert torch.isfinite(logits).all()
    assert (logits.std(dim=1) > 0.1).all()
    assert (logits.std(dim=1) < 10).all()
    assert (logits[1:] - logits[:-1]).abs().amax(dim=1).min() > 0.1, "not the same for every token"


def share_of_most_used(runner: Runner, monkeypatch) -> float:
    """Return the share of all choices that falls on the tenth of the experts chosen most, over all layers."""
    counts: Counter[tuple[int, int]] = Counter()
    real = Moe.route

    def route(moe: Moe, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, shares = real(moe, x)
        counts.update((moe.layer, expert) for expert in ids.flatten().tolist())
        return ids, shares

    runner.run(SETUP)
    engine = open_engine(runner)
    with monkeypatch.context() as patch:
        patch.setattr(Moe, "route", route)
        engine.model.prefill(list(range(100, 228)), engine.new_state())
    engine.close()
    top = 0
    for layer in range(LAYERS):
        used = sorted((n for (at, _), n in counts.items() if at == layer), reverse=True)
        top += sum(used[:4])
    return top / counts.total()


def test_skew_makes_some_experts_more_popular(tiny_qwen, tmp_path, monkeypatch):
    shares = [
        share_of_most_used(
            small_runner(
                tmp_path,
                tiny_qwen,
                f"model.synthetic.skew={skew}",
                "model.synthetic.experts=40",
                "prefetch=none",
            ),
            monkeypatch,
        )
        for skew in (0.0, 1.5)
    ]
    assert 0.1 < shares[0] < 0.35, "four of forty"
    assert shares[1] > 1.5 * shares[0], shares


def test_the_header_is_the_formats(checkpoint, root):
    for path in checkpoint.files():
        (nbytes,) = struct.unpack("<Q", path.read_bytes()[:8])
        assert (8 + nbytes) % synthetic.ALIGN_NBYTES == 0
