"""The draft head of Qwen: its arithmetic, what it keeps of a conversation, and its way back. Random weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from conf.schema import DraftSource
from kernels import reference as ops
from runtime.checkpoint import Checkpoint, CheckpointError, torch_dtype
from runtime.engine import Engine
from runtime.experts.layout import ExpertKey
from runtime.models import qwen, qwen_drafts, qwen_model
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_drafts import MTP_DEPTH, Mtp, MtpLayout, MtpNbytes, mtp_nbytes
from runtime.sampling import SamplingParams
from runtime.session import Session
from tests.parity.qwen_mtp import SHARD, make_mtp_snapshot
from tests.parity.row_checks import answer, check_half_right, check_rows, same
from tests.parity.test_decoded_rows import with_rows


@pytest.fixture(scope="module")
def snapshot(tiny_qwen, tmp_path_factory):
    return make_mtp_snapshot(tiny_qwen, tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def checkpoint(snapshot):
    return Checkpoint.open(snapshot)


@pytest.fixture(scope="module")
def open_mtp(tiny_files, make_config, snapshot):
    engines = []

    def open_engine(**overrides):
        fields = {"cache.ram_gib": 1.0, "drafts.enabled": True, "drafts.gate": False, **overrides}
        engines.append(Engine.open(make_config(**fields), replace(tiny_files, snapshot=snapshot)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def headed(open_mtp):
    return open_mtp().model


@pytest.fixture(scope="module")
def taps(headed, heldout_tokens):
    """The main model's last streams for 150 tokens: beyond the indexer's budget of 128."""
    headed.model.prefill(heldout_tokens[:150], headed.model.new_state())
    return headed.model.taps()


@pytest.mark.parametrize("known", [1, 2, 9, 150])
def test_a_guess_is_the_layer_over_all_pairs(headed, taps, checkpoint, heldout_tokens, known):
    """Written out from the published description, without what is kept between calls; all rows at once."""
    mtp, spec = headed.heads, headed.heads.spec
    weights = {
        name.removeprefix("mtp."): checkpoint.load(name)
        for name in checkpoint.tensors
        if name.startswith("mtp.") and ".experts." not in name
    }

    def zrms(x, name):
        x, gain = x.double(), 1 + weights[f"{name}.weight"].double()
        return x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * gain

    following = torch.tensor(heldout_tokens[1 : known + 1])
    embedded = zrms(mtp.embedding[following], "pre_fc_norm_embedding")
    streams = zrms(taps[:known].flatten(1), "pre_fc_norm_hidden").view(known, spec.streams, -1)
    joined = streams @ weights["fc_hidden.weight"].double().t()
    joined += (embedded @ weights["fc_embedding.weight"].double().t()).unsqueeze(1)
    state = mtp.new_state()
    with torch.inference_mode():
        x, amount = mtp.attention_mixer.read(joined.float())
        y = mtp.attention(x, state.cache, 0, *mtp._tables(0, known))
        last = joined[-1:].float() + amount[-1:] * y[-1:].unsqueeze(1)
        x, amount = mtp.mlp_mixer.read(last)
        last = last + amount * moe(mtp, x, checkpoint).unsqueeze(1)
        wanted = torch.nn.functional.linear(mtp.final_mixer.mix(last)[0], mtp.head)
    told = mtp.new_state()
    mtp.seed(heldout_tokens[:known], taps[:known], told)
    found = mtp.propose(int(following[-1]), told, 1)
    assert (found.logits - wanted).abs().max() < 1e-4 * wanted.std()
    assert found.tokens == [int(wanted.argmax())]


def moe(mtp, x, checkpoint):
    """The expert block with weights read and dequantised here, tile by tile."""

    def matrix(expert, part):
        name = f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight"
        values, scale = checkpoint.load(name).double(), checkpoint.load(f"{name}_scale_inv")
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                tile = values[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
                tile *= float(scale[row, column])
        return values

    ids, weights = mtp.moe.route(x)
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    for expert, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True):
        gate, up, down = (matrix(expert, part) for part in ("gate", "up", "down"))
        u = x[0].double()
        total += weight * (down @ (torch.nn.functional.silu(gate @ u) * (up @ u)))
    return total.float().unsqueeze(0) + mtp.moe.share(x)


@pytest.mark.parametrize("sizes", [(1,), (3, 40, 2, 1), (149, 1)])
def test_seeding_in_pieces(headed, taps, heldout_tokens, sizes):
    mtp = headed.heads
    whole, state, at, i = mtp.new_state(), mtp.new_state(), 0, 0
    mtp.seed(heldout_tokens[:150], taps, whole)
    while at < 150:
        end = min(at + sizes[i % len(sizes)], 150)
        mtp.seed(heldout_tokens[at:end], taps[at:end], state)
        at, i = end, i + 1
    found, wanted = state.tensors(), whole.tensors()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-4) for name in wanted)
    assert {name: t.shape for name, t in found.items()} == {n: t.shape for n, t in wanted.items()}


def test_guessing_and_rejected_seeds_leave_no_trace(headed, taps, heldout_tokens):
    mtp = headed.heads
    for known in (1, 8, 9, 60):
        state = mtp.new_state()
        mtp.seed(heldout_tokens[:known], taps[:known], state)
        clean = state.tensors()
        first = mtp.propose(5, state, MTP_DEPTH)
        assert same(state.tensors(), clean)
        for token in range(MTP_DEPTH + 1):
            mtp.seed([token], taps[90 + token : 91 + token], state)
        state.take_back(known)
        assert same(state.tensors(), clean)
        again = mtp.propose(5, state, MTP_DEPTH)
        assert torch.equal(again.logits, first.logits)
        copy = mtp.new_state()
        copy.restore(clean)
        assert torch.equal(mtp.propose(5, copy, MTP_DEPTH).logits, first.logits)
    with pytest.raises(ValueError, match="cannot go back to 40"):
        state.take_back(40)


def test_a_head_that_knows_nothing_guesses_nothing(headed):
    assert headed.heads.propose(5, headed.heads.new_state(), 2).tokens == []


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=14),
        SamplingParams(temperature=0.8, seed=4, top_p=0.9, repetition_penalty=1.2, max_tokens=14),
    ],
)
def test_answers_are_those_without_drafts(open_mtp, open_tiny, heldout_tokens, params):
    engine = open_mtp(**{"drafts.depth": 3, "drafts.ram_gib": 0.001})
    assert engine.drafting.report()["source"] == "heads"
    told, states = [], []
    for each in (engine, open_tiny()):
        session = Session(each)
        pieces = list(session.generate(heldout_tokens[:30], params))
        told.append([(p.token, tuple(p.events), p.finish) for p in pieces])
        states.append(getattr(session._state, "main", session._state).tensors())
    assert told[0] == told[1]
    assert same(*states)
    assert engine.drafting.proposed > 0
    assert engine.drafting.passes + engine.drafting.accepted == 13
    assert engine.model.experts.counters.read_nbytes > 0


@pytest.fixture(scope="module")
def decoded(open_mtp):
    """An engine whose main model decodes as on a GPU, by decoders of fixed shapes; 39 experts are kept."""
    engine = open_mtp(**{"cache.ram_gib": 0.0009, "prefetch.experts": 2})
    main = engine.model.model

    def decoder(**more):
        return Decoder(main, 300, has_graphs=False, **more)

    with_rows(main, decoder(), decoder)
    return engine


def test_heads_read_of_a_row_what_they_read_of_a_single_step(decoded, taps, heldout_tokens):
    main, rows = decoded.model.model, heldout_tokens[21:26]
    plain, state = main.new_state(), main.new_state()
    for each in (plain, state):
        main.prefill(heldout_tokens[:21], each)
        main.taps()
    single = []
    for token in rows:
        main.decode(token, plain)
        single.append(main.taps())
    found = main.attempt(rows, state).taps
    assert torch.equal(found, torch.cat(single))
    assert torch.allclose(found, taps[21:26], atol=1e-4 * float(taps.std()))


def test_a_pass_that_compiles_is_known_behind_heads(decoded, monkeypatch):
    monkeypatch.setattr(decoded.model.model, "is_settled", lambda count: count == 3)
    assert [decoded.drafting._is_settled(count) for count in (2, 3)] == [False, True]


@pytest.mark.parametrize("start", [21, 130])
def test_heads_and_decoders_go_back_together(decoded, heldout_tokens, start):
    check_rows(decoded.model, heldout_tokens, start, MTP_DEPTH + 1)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_with_decoders_are_those_without_drafts(
    decoded, open_tiny, heldout_tokens, temperature
):
    asked = heldout_tokens[:40], SamplingParams(temperature=temperature, seed=3, max_tokens=30)
    wanted = answer(open_tiny(), *asked)
    heads, before = decoded.drafting.source, decoded.drafting.report()
    assert answer(decoded, *asked) == wanted
    report = decoded.drafting.report()
    assert (report["source"], heads) == ("heads", decoded.model)
    assert report["proposed"] > before["proposed"]
    try:
        check_half_right(decoded, wanted, *asked)
    finally:
        decoded.drafting.source = heads


def test_all_of_the_head_is_where_the_model_computes(headed, checkpoint, monkeypatch):
    """Fake tensors of two devices refuse to meet; the embedding table may be on another one, as with a GPU."""
    spec, layout = headed.heads.spec, MtpLayout(checkpoint, headed.heads.spec)
    here, streams = torch.device("meta"), (spec.streams, spec.hidden)
    tokens = list(range(150))
    # fake tensors have no addresses
    monkeypatch.setattr(qwen_model, "joined", torch.cat)
    monkeypatch.setattr(
        qwen_drafts,
        "open_part",
        lambda record, part: record.new_empty(part.shape, dtype=torch_dtype(part.dtype)),
    )
    with FakeTensorMode():
        weights = {
            name: torch.empty(shape, device=here) for name, shape in spec.mtp_shapes().items()
        }
        table = torch.empty(spec.vocab_size, spec.hidden)
        main = SimpleNamespace(spec=spec, device=here, embedding=table, head=table.to(here))
        mtp = Mtp(main, weights, layout, experts=None)
        state = mtp.new_state()
        for taken in (tokens, tokens[:1]):
            mtp.seed(taken, torch.empty(len(taken), *streams, device=here), state)
        kept = state.tensors()
        assert {tensor.device.type for tensor in kept.values()} == {"cpu"}
        cache = state.cache
        for tensor in (state.waiting, cache.keys, cache.values, cache.pooled, cache.open_block):
            assert tensor.device == here
        first = mtp.new_state()
        mtp.seed(tokens[:8], torch.empty(8, *streams, device=here), first)
        mtp.moe.rows = lambda xs, experts, guesses: [
            mtp.moe.share(x) + expert_sum(mtp, x, layout) for x in xs
        ]
        assert mtp._layer(mtp._join([5], first.waiting), first.cache, 7).device == here
        assert mtp.propose(5, mtp.new_state(), 2).logits.device == here


def expert_sum(mtp, x, layout):
    """One expert of a route, computed."""
    record = torch.empty(layout.record_nbytes, dtype=torch.uint8).to(x.device)
    ids, weights = mtp.moe.route(x)
    assert ids.device == x.device
    matrices = mtp.moe.matrices(3, record)
    return weights[:, :1] * ops.scaled_swiglu_expert(x, *matrices, mtp.moe.scales[3])


def test_what_the_head_takes_is_planned(checkpoint, headed, open_mtp, tiny_files, snapshot):
    """Weights and state where it computes, rows for its experts in RAM, whatever computes."""
    engine, spec = open_mtp(**{"drafts.depth": 2}), headed.heads.spec
    found = mtp_nbytes(checkpoint, spec, engine.config, torch.float32)
    heads = engine.model.heads
    dense = [n for n in checkpoint.tensors if n.startswith("mtp.") and ".experts." not in n]
    assert found.weights == sum(4 * checkpoint.load(name).numel() for name in dense)
    rows = heads.experts.cache.num_rows
    assert found.expert_rows == (rows + 1) * MtpLayout(checkpoint, spec).record_nbytes
    state = heads.new_state()
    window = engine.config.model.context_tokens
    heads.seed([1] * window, torch.zeros(window, spec.streams, spec.hidden), state)
    cache = state.cache
    held = sum(t.nbytes for t in (cache.keys, cache.values, cache.pooled))
    assert found.state / 2 <= held <= found.state
    files, dtype = replace(tiny_files, snapshot=snapshot), torch.float32
    sizes = [
        qwen.model_sizes(spec, files, engine._layout, config, dtype)
        for config in (engine.config, with_lookup(engine.config))
    ]
    more = [
        getattr(sizes[0], name) - getattr(sizes[1], name)
        for name in ("residents_nbytes", "embedding_nbytes", "state_nbytes")
    ]
    assert MtpNbytes(*more) == found


def with_lookup(config):
    return replace(config, drafts=replace(config.drafts, source=DraftSource.lookup))


def test_records_hold_the_tensors(checkpoint, headed):
    layout = MtpLayout(checkpoint, headed.heads.spec)
    record = bytearray(layout.record_nbytes)
    for span in layout.spans(ExpertKey(0, 63)):
        data = layout.files[span.file_idx].read_bytes()[span.offset : span.offset + span.nbytes]
        record[span.dest : span.dest + len(data)] = data
    for part in layout.parts(63):
        found = bytes(record[part.offset : part.offset + part.nbytes])
        assert found == bytes(checkpoint.read(checkpoint.info(f"mtp.{part.name}")))


def test_a_head_of_another_shape_is_refused(snapshot, headed):
    checkpoint = Checkpoint.open(snapshot)
    name = "mtp.layers.0.mlp.experts.3.up_proj.weight_scale_inv"
    checkpoint.tensors[name] = checkpoint.tensors[name]._replace(shape=(3, 1))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale_inv"):
        MtpLayout(checkpoint, headed.heads.spec)
    assert (snapshot / SHARD).is_file()
