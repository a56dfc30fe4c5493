"""Synthetic Qwen3-MoE checkpoints through stages, engine, copies of conversations and server, beside transformers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_setup import make_runner
from transformers import Qwen3MoeForCausalLM

from runtime.checkpoint import Checkpoint, read_header
from runtime.engine import Engine
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey
from runtime.experts.shared import pause
from runtime.experts.spread_reader import SpreadReader
from runtime.models import dense_state, qwen3_moe
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.snapshot import SnapshotStore
from runtime.together import Together
from runtime.units import GIB
from stages import synthetic_qwen3_moe as synthetic
from stages.core import Runner
from stages.opening import engine_files, setup_stages
from tests.unit.stub_server import StubServer

SMALL = Path(__file__).resolve().parents[1] / "data" / "qwen3_moe_small"
MODEL = ("model=qwen3_moe_synthetic", "hw=cpu", "hw.compute_threads=1", "hw.reserve_gib=0")


def small_runner(outputs: Path, *overrides: str) -> Runner:
    """Return a runner of a synthetic checkpoint of few and small layers."""
    sizes = (f"model.path={SMALL}", "model.context_tokens=512", "model.synthetic.disk_gib=0.2")
    return make_runner(outputs, *MODEL, *sizes, "cache.ram_gib=0.001", *overrides)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Runner:
    """A finished set-up: not to be changed."""
    runner = small_runner(tmp_path_factory.mktemp("synthetic"))
    runner.run(["download"])
    return runner


@pytest.fixture(scope="module")
def root(made) -> Path:
    return made.find("synthetic").root


@pytest.fixture
def engine(made):
    engine = Engine.open(made.cfg, engine_files({"download": made.find("download")}))
    yield engine
    engine.close()


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def test_transformers_reads_it_and_gives_the_same_logits(engine, root):
    model = Qwen3MoeForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    ids = torch.randint(4608, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    state = engine.model.new_state()
    found = [engine.model.prefill(ids[:50], state, True)]
    found += [engine.model.decode(token, state) for token in ids[50:]]
    assert (torch.cat(found) - wanted).abs().max() <= 2e-5 * wanted.std()
    assert wanted.std() > 0.3, "so small that nothing would show"


def test_a_shard_has_its_tensors_by_name_and_each_expert_in_one_run(root):
    for file in sorted(root.glob("*.safetensors")):
        assert list(read_header(file)) == sorted(read_header(file))
    layout = qwen3_moe.expert_layout(
        qwen3_moe.read_spec(root), engine_files({"download": _Snapshot(root)})
    )
    assert (layout.num_layers, layout.num_experts) == (4, 24)
    keys = itertools.starmap(ExpertKey, itertools.product(range(4), range(24)))
    assert {len(layout.spans(key)) for key in keys} == {1}


class _Snapshot:
    """What `engine_files` asks of a finished download."""

    def __init__(self, root: Path) -> None:
        self.root, self.facts = root, {"snapshot": str(root)}


def test_same_seed_same_bytes_other_seed_others(made, tmp_path):
    def hashes(runner):
        files = runner.find("synthetic").record["files"]
        return {name: entry["blake3"] for name, entry in files.items() if name.endswith("tensors")}

    again = small_runner(tmp_path / "again")
    again.run(["synthetic"])
    assert hashes(again) == hashes(made)
    other = small_runner(tmp_path / "other", "model.synthetic.seed=1")
    other.run(["synthetic"])
    assert not hashes(other).items() & hashes(made).items()


def test_the_budget_decides_the_experts_of_the_released_shape(tmp_path):
    def plan(*overrides):
        return synthetic.make_plan(make_runner(tmp_path, *MODEL, *overrides).cfg)

    whole = plan("model.synthetic.disk_gib=60")
    assert (whole.spec.depth, whole.spec.num_experts) == (48, 128)
    # the index of the release says 61,064,245,248 bytes of tensors
    tensors = sum(t.nbytes for n in range(49) for t in synthetic.shard_tensors(whole, n))
    assert tensors == 61_064_245_248
    cut = plan("model.synthetic.disk_gib=5", "model.synthetic.layers=8")
    assert 8 <= cut.spec.num_experts < 128
    assert synthetic.setup_nbytes(cut) <= 5 * GIB
    more = [t for n in range(9) for t in synthetic.shard_tensors(cut, n)]
    expert = sum(t.nbytes for t in more if ".experts.0." in t.name)
    assert synthetic.setup_nbytes(cut) + expert > 5 * GIB, "one more would have fitted"
    with pytest.raises(UserError, match="at least 8"):
        plan("model.synthetic.experts=7")


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_the_plan_made_before_any_file_is_that_of_the_files(made, root):
    spec, cfg = qwen3_moe.read_spec(root), made.cfg
    files = engine_files({"download": made.find("download")})
    layout = qwen3_moe.expert_layout(spec, files)
    found = qwen3_moe.model_sizes(spec, files, layout, cfg, torch.float32)
    planned = qwen3_moe.planned_sizes(spec, cfg, torch.float32, has_gpu=False)
    assert planned.residents_nbytes == found.residents_nbytes
    assert 0 <= planned.record_nbytes - found.record_nbytes <= 4096
    loaded = sum(Checkpoint.open(root).load(name).nbytes for name in spec.resident_shapes())
    assert found.residents_nbytes + found.embedding_nbytes > loaded + dense_state.CPU_SCORES_NBYTES
    short = dataclasses.replace(cfg.model, prefill_tokens=64)
    fewer = qwen3_moe.planned_sizes(
        spec, dataclasses.replace(cfg, model=short), torch.float32, has_gpu=False
    )
    assert fewer.residents_nbytes < planned.residents_nbytes


def test_a_plan_in_bf16_knows_what_a_cpus_products_keep(root, made, monkeypatch):
    spec = qwen3_moe.read_spec(root)

    def residents(dtype, has_gpu=False):
        return qwen3_moe.planned_sizes(spec, made.cfg, dtype, has_gpu).residents_nbytes

    with_products = residents(torch.bfloat16)
    others = residents(torch.float32), residents(torch.bfloat16, has_gpu=True)
    monkeypatch.setattr(qwen3_moe, "PRODUCTS_NBYTES", 0)
    assert with_products - residents(torch.bfloat16) == 96 * 2**20
    assert others == (residents(torch.float32), residents(torch.bfloat16, has_gpu=True))


def test_a_plan_holds_the_scores_of_its_device(root, made, monkeypatch):
    """Attention's line of the scratch: scores, masked scores and probabilities in fp32."""
    spec = qwen3_moe.read_spec(root)

    def fixed(has_gpu):
        return qwen3_moe.planned_sizes(spec, made.cfg, torch.float32, has_gpu).scratch[0][0]

    on_cpu, on_gpu = fixed(has_gpu=False), fixed(has_gpu=True)
    for name in ("CPU_SCORES_NBYTES", "SCORES_NBYTES"):
        monkeypatch.setattr(qwen3_moe, name, 0)
    found = on_cpu - fixed(has_gpu=False), on_gpu - fixed(has_gpu=True)
    assert found == (3 * dense_state.CPU_SCORES_NBYTES, 3 * dense_state.SCORES_NBYTES)


def test_mirrored_shards_give_the_same_logits(made, engine, tmp_path, monkeypatch):
    """Each expert is verified on its first read; both drives give some."""
    (tmp_path / "b").mkdir()
    drives = f"hw.drives=[{{}},{{folder:{tmp_path}/b}}]"
    outputs = Path(made.cfg.paths.outputs)
    runner = small_runner(outputs, drives, "hw.spread=mirror", "cache.verify=true")
    names = setup_stages(runner.cfg)
    assert names == ("download", "mirror", "checksums")
    runner.run(names)
    counts = [0, 0]

    def counted(fd, buffers, offset):
        counts[os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path / "b"))] += 1
        return os.preadv(fd, buffers, offset)

    ids = torch.randint(4608, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    with monkeypatch.context() as patch:
        patch.setattr(SpreadReader.__init__, "__defaults__", (counted,))
        mirrored = Engine.open(runner.cfg, engine_files({n: runner.find(n) for n in names}))
    found = []
    try:
        for each in (engine, mirrored):
            state = each.new_state()
            prompt = each.model.prefill(ids[:50], state, True)
            found.append([prompt, *(each.model.decode(token, state) for token in ids[50:])])
    finally:
        mirrored.close()
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))
    assert min(counts) > sum(counts) / 4


def test_a_token_reads_the_residents_and_its_experts(engine, root):
    spec, found = qwen3_moe.read_spec(root), Checkpoint.open(root)
    residents = sum(found.load(name).nbytes for name in spec.resident_shapes())
    embedding = 2 * spec.vocab_size * spec.hidden
    # layers, chosen experts, matrices, bytes of a value
    experts = 4 * 4 * 3 * 2 * spec.hidden * spec.expert_intermediate
    assert engine.dense_nbytes == residents - embedding + experts


def test_streamed_is_resident_through_the_configuration(made, engine):
    files = engine_files({"download": made.find("download")})
    resident = Engine.open(made.cfg, files, is_resident=True)
    ids = list(range(100, 140))
    outs = []
    for opened in (resident, engine, engine):
        state = opened.model.new_state()
        first = opened.model.prefill(ids, state)
        outs.append(torch.cat([first, *(opened.model.decode(i, state) for i in ids[:6])]))
    resident.close()
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])
    assert engine.counters().experts.misses > 0
    assert engine.counters().experts.guesses_used > 0


def test_a_second_turn_from_a_copy_is_the_uninterrupted_one(engine, tmp_path):
    params = SamplingParams(temperature=0.0, max_tokens=6)

    def answer(session, prompt):
        return [piece.token for piece in session.generate(prompt, params)]

    prompt = list(range(50, 90))
    plain = Session(engine)
    first = answer(plain, prompt)
    turn = [*prompt, *first, 7, 8, 9]
    wanted = answer(plain, turn)
    stored = Session(engine, SnapshotStore(1 << 26, tmp_path, 1 << 26))
    assert answer(stored, prompt) == first
    answer(stored, [5, 6, 7])  # another conversation in between
    assert answer(stored, turn) == wanted
    assert stored.cached_tokens > len(prompt)


def test_company_changes_no_number(made):
    """Three conversations that are decoded together, each beside the same alone."""
    files = engine_files({"download": made.find("download")})
    serve = dataclasses.replace(made.cfg.serve, max_batch=3)
    engine = Engine.open(dataclasses.replace(made.cfg, serve=serve), files)
    alone = Engine.open(made.cfg, files, is_resident=True)

    def talk(model, start, out):
        state = model.new_state()
        ids = list(range(start, start + 20))
        out.append(model.prefill(ids, state, after_layer=pause))
        out.extend(model.decode(token, state) for token in ids[:5])

    wanted: list[list[torch.Tensor]] = [[], [], []]
    found: list[list[torch.Tensor]] = [[], [], []]
    together = Together(engine.shared)
    for number in range(3):
        talk(alone.model, 100 * number, wanted[number])
        together.start(partial(talk, engine.model, 100 * number, found[number]))
    while len(together):
        together.round()
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(torch.cat(one), torch.cat(other))
    engine.close()
    alone.close()


def test_the_server_answers(made):
    engine = Engine.open(made.cfg, engine_files({"download": made.find("download")}))
    engine.is_closed = True  # the worker closes it; the stub asks
    with StubServer(engine) as server:
        one, two = (server.ask(max_tokens=8, temperature=0).choices[0].message for _ in range(2))
        assert one.content == two.content
        assert one.content


def test_bench_and_plan_run_from_the_command_line(cli):
    same = (*MODEL, f"model.path={SMALL}", "model.context_tokens=512")
    sizes = ("model.synthetic.disk_gib=0.2", "bench.tokens=4", "bench.repeats=1")
    result = cli(*same, *sizes, "bench.prompt_length=8", "bench.warmup_tokens=1", "stages=[bench]")
    assert result.returncode == 0, result.stderr
    assert "tok/s" in result.stdout
    rates = ("hw.rates.drive_gib_s=5", "hw.rates.memory_gib_s=40")
    result = cli(*MODEL[1:], "stages=[plan]", "model=qwen3_30b_a3b", *rates)
    # how it ends depends on this machine's disk
    assert "moe_layers = 48, experts = 128" in result.stdout
    assert "expected: " in result.stdout
    for stage in ("repack", "verify"):
        result = cli("model=qwen3_30b_a3b", f"stages=[{stage}]")
        assert result.returncode != 0
        assert "is not for model=qwen3_30b_a3b" in result.stderr


def test_the_bundled_config_is_the_releases():
    config = json.loads((synthetic.RELEASED / "config.json").read_text())
    spec = qwen3_moe.read_spec(synthetic.RELEASED)
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (spec.depth, spec.num_layers, spec.num_experts, spec.top_k) == (48, 48, 128, 8)
