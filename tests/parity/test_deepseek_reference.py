"""The reference arithmetic with the stand-in package: golden logits, experts streamed, states kept, nothing leaked."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from conf.schema import Arithmetic, ConfigError, Kernels
from runtime.engine import Engine, EngineFiles
from runtime.errors import UserError
from runtime.experts.slots import SlotExperts, passing_slots
from runtime.models import deepseek_backends as backends
from runtime.models.deepseek_model import DeepseekModel
from runtime.models.deepseek_package import PREFIX, load_package
from runtime.models.deepseek_reference import ReferenceModel
from runtime.models.deepseek_replaced import KeptWeight
from runtime.units import GIB
from tests.parity.deepseek_golden import (
    MEDIAN_BOUND,
    PROMPTS,
    fed_tokens,
    golden,
    padded_to,
    row_errors,
    wanted_logits,
)
from tests.standin import ROOT, make_patched, make_snapshot

RECORD_GIB = 12_288 / GIB  # of the golden checkpoint's experts, two pages and one


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    snapshot = make_snapshot(folder / "snapshot")
    return EngineFiles(snapshot, published=make_patched(snapshot, folder / "patched"))


@pytest.fixture
def open_reference(files, make_config):
    engines = []

    def open_engine(is_resident=False, **overrides):
        settings = {
            "model.setup": ["download", "patch"],
            "model.context_tokens": 192,
            "model.prefill_tokens": 128,
            "deepseek.arithmetic": "reference",
            "cache.ram_gib": 1.0,
            **overrides,
        }
        engines.append(Engine.open(make_config("tiny_deepseek", **settings), files, is_resident))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def logits_of(model, tokens, prompt):
    state = model.new_state()
    found = [model.prefill(tokens[:prompt], state, all_logits=True)]
    found += [model.decode(token, state) for token in tokens[prompt:]]
    assert state.position == len(tokens)
    return torch.cat(found)


# ---- numbers -----------------------------------------------------------------------------------------------------


def test_golden_logits_with_own_keys(open_reference):
    """`decode.*`: every source's own index keys."""
    model = open_reference(**{"deepseek.fix_index_keys": True}).model
    assert type(model) is ReferenceModel
    for prompt in PROMPTS:
        tokens, wanted = fed_tokens(prompt), wanted_logits(prompt)
        found = logits_of(model, tokens, len(tokens) - 24)
        errors = row_errors(found, wanted)
        print(f"{prompt}: median {errors.median():.1e}, largest {errors.max():.1e}")
        assert errors.median() < MEDIAN_BOUND
        assert (found.argmax(1) == wanted.argmax(1)).float().mean() >= 0.98


@pytest.mark.parametrize("prompt", PROMPTS)
def test_golden_tokens_with_stale_keys(open_reference, prompt):
    """`decode_stale_k.*`: at even positions an indexer of ratio 2 reads what the last source left, as released."""
    engine = open_reference()
    model, want = engine.model, golden(f"model_{prompt}")
    indexer = model.transformer.layers[1].attn.indexer
    lists = []
    indexer.register_forward_hook(lambda _m, _a, out: lists.append(out[0] - 16))
    state, tokens = model.new_state(), want["decode_stale_k.tokens"].tolist()
    logits = [model.prefill(want["input_ids"].tolist(), state)]
    lists.clear()
    logits += [model.decode(token, state) for token in tokens[:-1]]
    assert torch.cat(logits).argmax(1).tolist() == tokens
    steps = len(want["decode_stale_k.logits"])
    errors = row_errors(torch.cat(logits[1 : steps + 1]), want["decode_stale_k.logits"])
    assert errors.max() < MEDIAN_BOUND
    for found, wanted in zip(lists, want["decode_stale_k.index.1.selected"], strict=True):
        found = torch.where(found < 0, -1, found).long()
        assert torch.equal(padded_to(found, len(wanted))[0], wanted.long())


def test_own_keys_are_what_the_switch_changes(open_reference):
    """Beyond the top-k the two differ; else neither test above would see the switch."""
    tokens, prompt = fed_tokens("p100"), 100
    stale = logits_of(open_reference().model, tokens, prompt)
    wanted = wanted_logits("p100")
    assert row_errors(stale, wanted)[prompt:].max() > 0.05


def test_tilelangs_place_is_taken_by_the_patched_file(open_reference, monkeypatch):
    """With a version that is not refused the folder's own kernel.py computes, not this project's kernels."""
    monkeypatch.setattr(backends, "resolve_kernels", lambda *_: Kernels.tilelang)
    model = open_reference(**{"deepseek.fix_index_keys": True}).model
    kernel = model.parts.package.kernel
    assert kernel.act_quant_kernel(32, True, True).num_stages == 2
    tokens = fed_tokens("p40")
    errors = row_errors(logits_of(model, tokens, 40), wanted_logits("p40"))
    assert errors.median() < MEDIAN_BOUND


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_prompt_in_pieces_inside_the_layers(open_reference, monkeypatch, rows):
    """Attention and hyper-connections some rows at a time, heads in groups: not a bit changes."""
    tokens = fed_tokens("p100")
    engine = open_reference()
    wanted = logits_of(engine.model, tokens, 100)
    engine.close()
    attention, mixing = backends.attention_in_parts, backends.mixing_in_parts
    monkeypatch.setattr(backends, "attention_in_parts", lambda f, _heads: attention(f, 1, rows))
    monkeypatch.setattr(backends, "mixing_in_parts", lambda f: mixing(f, rows))
    assert torch.equal(logits_of(open_reference().model, tokens, 100), wanted)


def test_heads_in_groups_have_their_own_strides():
    """A head slice of one row says it is contiguous and keeps its old strides; the kernels look at those."""
    seen = []

    def kernel(q, kv, sink, listed, scale):
        seen.append((tuple(q.shape), q.stride(), tuple(sink.shape), listed.is_contiguous()))
        return q + sink[:, None].to(q.dtype)

    q, sink = torch.randn(1, 1, 64, 32).bfloat16(), torch.arange(64.0)
    listed = torch.zeros(1, 1, 3, dtype=torch.int32)
    found = backends.attention_in_parts(kernel, 16)(q, q[:, :, 0], sink, listed, 1.0)
    assert torch.equal(found, q + sink[:, None].bfloat16())
    assert seen == [((1, 1, 16, 32), (512, 512, 32, 1), (16,), True)] * 4


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_wo_a_is_the_converters_for_all_scale_bytes(default):
    """bf16(fp32(value) * fp32(scale)), every value under every scale but the two that are no numbers."""
    kept = KeptWeight(255 * 32, 256)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    kept.values.copy_(values.expand(255 * 32, 256))
    scales = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    kept.scale.copy_(scales[:, None].expand(255, 8))
    powers = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(255) - 127)
    wanted = (values.double() * powers[:, None]).float().to(torch.bfloat16)
    torch.set_default_dtype(default)
    found = kept.weight.view(255, 32, 256)
    torch.set_default_dtype(torch.float32)
    is_number = ~values.float().isnan()
    for row in (0, 31):
        assert torch.equal(found[:, row][:, is_number], wanted[:, is_number])
        assert found[:, row][:, ~is_number].isnan().all()


def test_native_and_reference_agree(open_reference, files, make_config):
    tokens = fed_tokens("p40")
    found = logits_of(open_reference(**{"deepseek.fix_index_keys": True}).model, tokens, 40)
    config = make_config("tiny_deepseek", **{"model.context_tokens": 192, "cache.ram_gib": 1.0})
    engine = Engine.open(config, files)
    assert type(engine.model) is DeepseekModel
    errors = row_errors(found, logits_of(engine.model, tokens, 40))
    engine.close()
    assert errors.median() < MEDIAN_BOUND


# ---- streaming ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bits_of_resident(files, make_config):
    settings = {
        "model.setup": ["download", "patch"], "model.context_tokens": 192, "deepseek.arithmetic": "reference",
    }  # fmt: skip
    engine = Engine.open(make_config("tiny_deepseek", **settings), files, is_resident=True)
    bits = logits_of(engine.model, fed_tokens("p40"), 40)
    engine.close()
    return bits


@pytest.mark.parametrize(
    "settings",
    [
        {"cache.ram_gib": 0.0, "prefetch.experts": 0},
        {"cache.ram_gib": 0.0, "prefetch.experts": 4},
        {"cache.ram_gib": 9 * RECORD_GIB, "prefetch.experts": 2, "cache.sweep_experts": 1},
        {"cache.ram_gib": 30 * RECORD_GIB, "hw.drive.window": 4, "hw.drive.pieces": 1},
        {"cache.ram_gib": 1.0, "cache.table_rows": 0, "hw.drive.simulate_latency_us": 200.0},
    ],
)
def test_streamed_equals_resident(bits_of_resident, open_reference, settings):
    engine = open_reference(**settings)
    for _ in range(2):
        assert torch.equal(logits_of(engine.model, fed_tokens("p40"), 40), bits_of_resident)
    counters = engine.counters()
    assert counters.experts.read_nbytes > 0
    assert counters.row_read_nbytes > 0
    if settings.get("prefetch.experts"):
        assert counters.experts.guesses_used > 0


class InstantCopier:
    """Slots in RAM, filled when asked: the books of the VRAM tier without a GPU."""

    def __init__(self, num_slots, record_nbytes):
        self.slots = torch.full((num_slots, record_nbytes), 0xFF, dtype=torch.uint8)

    def copy(self, slot, record):
        self.slots[slot] = record

    def mark(self, *_):
        return 0

    wait = launched = follow = synchronize = mark


@pytest.mark.parametrize(("extra", "copies"), [(0, 0), (0, 3), (40, 2)])
def test_through_slots_as_on_a_gpu(open_reference, bits_of_resident, extra, copies):
    """Batches of a prompt, waves of a token, early copies: what a slot holds is what the drive has."""
    engine = open_reference(**{"cache.ram_gib": 30 * RECORD_GIB, "prefetch.copy": copies})
    source, spec = engine.model.experts, engine.model.spec
    slots = passing_slots(copies, source.record_nbytes, spec.top_k) + extra
    copier = InstantCopier(slots, source.record_nbytes)
    engine.model.experts = SlotExperts(source, copier, spec.num_layers, spec.top_k, copies, False)
    for _ in range(2):
        assert torch.equal(logits_of(engine.model, fed_tokens("p40"), 40), bits_of_resident)
    assert not extra or engine.counters().experts.vram_hits > 0


# ---- states ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fix", [False, True], ids=["stale keys", "own keys"])
@pytest.mark.parametrize("position", [40, 41, 99, 100])
def test_a_restored_state_goes_on_as_the_first(open_reference, position, fix):
    """In a fresh process' place, a fresh engine: at even positions the stale keys are part of the state."""
    tokens = fed_tokens("p100")
    engine = open_reference(**{"deepseek.fix_index_keys": fix})
    state = engine.model.new_state()
    engine.model.prefill(tokens[:position], state)
    copy = state.tensors()
    wanted = [engine.model.decode(token, state) for token in tokens[position : position + 6]]
    engine.close()
    engine = open_reference(**{"deepseek.fix_index_keys": fix})
    state = engine.model.new_state()
    state.restore(copy)
    assert state.position == position
    found = [engine.model.decode(token, state) for token in tokens[position : position + 6]]
    assert torch.equal(torch.cat(found), torch.cat(wanted))


def test_a_copy_is_as_small_as_its_tokens(open_reference):
    model = open_reference().model
    empty = sum(t.nbytes for t in model.new_state().tensors().values())
    state = model.new_state()
    model.prefill(fed_tokens("p40")[:40], state)
    spec = model.spec
    entries = 40 // 2 + 40 // 1
    grown = sum(t.nbytes for t in state.tensors().values()) - empty
    assert grown == entries * 2 * (spec.head_dim + spec.index_dim) + 8 * 40


def test_conversations_in_turns(open_reference):
    """Each gets what it gets alone; prompts behind the first go token by token."""
    model = open_reference().model
    alone = []
    for prompt in ("p7", "p40"):
        state, tokens = model.new_state(), fed_tokens(prompt)
        rows = [model.prefill(tokens[at : at + 5], state) for at in range(0, 30, 5)]
        alone.append(torch.cat(rows))
    states, found = [model.new_state(), model.new_state()], [[], []]
    for at in range(0, 30, 5):
        for state, tokens, out in zip(states, map(fed_tokens, ("p7", "p40")), found, strict=True):
            out.append(model.prefill(tokens[at : at + 5], state))
    for out, wanted in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(out), wanted)


def test_a_prompt_given_up_between_layers_leaves_the_next_one_right(
    open_reference, bits_of_resident
):
    model = open_reference().model

    seen = []

    def stop():
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.prefill(fed_tokens("p7"), model.new_state(), after_layer=stop)
    assert torch.equal(logits_of(model, fed_tokens("p40"), 40), bits_of_resident)


# ---- isolation and memory ----------------------------------------------------------------------------------------


def test_nothing_of_the_package_is_seen_outside(files):
    outsider = sys.modules["model"] = type(sys)("model")
    paths, finders = list(sys.path), list(sys.meta_path)
    package = load_package(files.published, kernel=backends.kernel_module(Kernels.ours))
    try:
        assert sys.modules["model"] is outsider
        assert not {"kernel", "engram", "vision", "image_processor"} & sys.modules.keys()
        assert (sys.path, sys.meta_path) == (paths, finders)
        assert package.model.Block.__module__ == f"{PREFIX}model"
        assert sys.modules[f"{PREFIX}model"] is package.model
        assert not list(files.published.rglob("__pycache__"))
        with pytest.raises(UserError, match="holds one model per process"):
            load_package(files.published)
    finally:
        package.close()
        del sys.modules["model"]
    assert not [name for name in sys.modules if name.startswith(PREFIX)]
    load_package(files.published).close()  # the next may come


def test_torch_is_as_before(open_reference):
    model = open_reference().model
    model.prefill([5, 6, 7], model.new_state())
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(1).device.type == "cpu"


def test_modules_of_images_may_be_missing_their_libraries(files, tmp_path):
    folder = tmp_path / "code"
    shutil.copytree(files.published, folder)
    (folder / "image_processor.py").write_text("import no_such_library_of_pictures\n")
    package = load_package(folder, kernel=backends.kernel_module(Kernels.ours))
    with pytest.raises(UserError, match="ImageProcessor is of images"):
        package.model.ImageProcessor(None)
    package.close()
    (folder / "engram.py").write_text("import no_such_library_of_numbers\n")
    with pytest.raises(UserError, match="no_such_library_of_numbers"):
        load_package(folder)
    assert not {"model", "engram"} & sys.modules.keys()


def test_only_what_is_resident_is_allocated(open_reference):
    """No parameter of a routed expert, a table, the embedding or the head; wo_a in FP8, never twice."""
    model = open_reference().model.transformer
    names = [name for name, _ in model.named_parameters()]
    assert not [n for n in names if ".experts." in n or "engram.embed" in n or ".wo_a." in n]
    assert not [n for n in names if n in ("embed.weight", "head.weight")]
    assert not [n for n, p in model.named_parameters() if p.is_meta]
    for name, module in model.named_modules():
        if getattr(module, "scale", None) is not None and not isinstance(module, KeptWeight):
            assert module.weight.scale is module.scale, name


BUILD = """
import json, sys
from pathlib import Path
import torch
from conf.schema import Kernels
from runtime.models import deepseek_backends as backends, deepseek_reference as reference
from runtime.models import deepseek_replaced as replaced
from runtime.models.deepseek_package import load_package

def peak_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmPeak")).split()[1]) // 1024

folder = Path(sys.argv[1])
package = load_package(folder, backends.kernel_module(Kernels.ours))
parts = replaced.Parts(package, torch.device("cpu"), None, None, None, Kernels.ours)
replaced.replace_classes(parts, Kernels.ours)
args = reference.model_args(package, folder / "config.json", 8192)
tokenizer = reference.FastTokenizer(Path(sys.argv[2]))
before = peak_mib()
model = reference.build(parts, args, tokenizer)
held = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
print(peak_mib() - before, held // 2**20)
"""


def test_building_the_released_shape_allocates_its_dense_part_alone(files, tmp_path):
    """Two layers of 384 experts and a table of 384 million rows: 14 GB, 101 GB, 4 GB of head and embedding as written.

    Counted in addresses, touched or not.
    """
    folder = tmp_path / "code"
    shutil.copytree(files.published, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "vocab_size": 129280, "dim": 5120, "moe_inter_dim": 2304, "n_layers": 2, "n_heads": 64,
        "n_routed_experts": 384, "n_activated_experts": 6, "q_lora_rank": 1280, "head_dim": 512,
        "rope_head_dim": 64, "o_groups": 8, "o_lora_rank": 1024, "window_size": 128,
        "compress_ratios": [0, 0], "kv_source_layers": [], "index_source_layers": [],
        "engram_layer_ids": [1], "engram_num_embeddings": [384006168], "engram_n_heads": 8,
        "engram_vocab_size": 16000000, "engram_head_dim": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = files.snapshot / "tokenizer.json"
    command = [sys.executable, "-c", BUILD, str(folder), str(tokenizer)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak_mib, held_mib = map(int, found.stdout.split())
    print(f"{held_mib} MiB held, {peak_mib} MiB more at the peak than before")
    assert 400 < held_mib < 600
    assert peak_mib < held_mib + 300  # wo_a in bf16 for a moment, and what an allocator rounds up


# ---- choices -----------------------------------------------------------------------------------------------------


def test_reference_needs_its_code(make_config, files, open_reference):
    with pytest.raises(ConfigError, match=r"comes without it: set deepseek.arithmetic=native"):
        make_config("tiny_deepseek", **{"deepseek.arithmetic": "reference"})
    config = open_reference().config
    with pytest.raises(UserError, match="no patch stage made it"):
        Engine.open(config, dataclasses.replace(files, published=None))


@pytest.mark.parametrize(
    ("version", "capability", "match"),
    [
        ("0.1.9", (12, 0), None),
        ("0.1.10", (12, 0), None),
        ("0.2.0+cu128", (9, 0), None),
        ("0.1.8", (12, 0), "refused.*sm_120.*cosine 0.0006"),
        ("0.1.8", (10, 0), "refused.*sm_100"),
        ("0.1.8", (9, 0), "refused, 0.1.9 or later"),
        ("0.1.7.post3", (12, 0), "refused"),
        (None, (12, 0), "not installed"),
        ("0.1.9", None, "need a CUDA device"),
    ],
)
def test_tilelang_versions(version, capability, match):
    fault = backends.tilelang_fault(version, capability)
    if match is None:
        assert fault is None
    else:
        assert re.search(match, fault)


def test_auto_is_native_without_a_gpu_or_tilelang(make_config, monkeypatch):
    config = make_config("tiny_deepseek", **{"hw.device": "cuda"})  # planned for, not opened
    monkeypatch.setattr(backends, "capability", lambda: None)
    assert backends.resolve_arithmetic(config, has_code=True) is Arithmetic.native
    monkeypatch.setattr(backends, "capability", lambda: (12, 0))
    monkeypatch.setattr(backends, "tilelang_version", lambda: "0.1.9")
    assert backends.resolve_arithmetic(config, has_code=True) is Arithmetic.reference
    assert backends.resolve_arithmetic(config, has_code=False) is Arithmetic.native
    on_cpu = make_config("tiny_deepseek")
    assert backends.resolve_arithmetic(on_cpu, has_code=True) is Arithmetic.native
    monkeypatch.setattr(backends, "tilelang_version", lambda: "0.1.8")
    assert backends.resolve_arithmetic(config, has_code=True) is Arithmetic.native


def test_tilelang_asked_for_and_absent_is_refused(make_config):
    config = make_config("tiny_deepseek", **{"deepseek.kernels": "tilelang"})
    with pytest.raises(UserError, match=r"deepseek.kernels=tilelang cannot be used"):
        backends.resolve_kernels(config, torch.device("cpu"))
