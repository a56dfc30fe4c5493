"""Recordings: any frames come back; cut and damaged files; what an engine asked for is what is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine import Engine
from runtime.errors import UserError
from runtime.experts.routes import (
    Guesses,
    Kind,
    RouteHeader,
    RouteRecorder,
    RouteTrace,
    Step,
    read_routes,
    write_routes,
)
from runtime.session import Session

HEADER = RouteHeader("a model", num_layers=3, num_experts=300, top_k=4, record_nbytes=8192)

ids = st.lists(st.integers(0, 299), max_size=6).map(tuple)


@st.composite
def layers_of_a_forward(draw):
    """One token, one piece of a prompt, or a moment of forgetting."""
    kind = draw(st.sampled_from(Kind))
    if kind is Kind.forget:
        return [(kind, 0, (), (), ())]
    found = []
    for layer in sorted(draw(st.sets(st.integers(0, 2), min_size=1))):
        guesses = draw(ids) if kind is Kind.decode else ()
        scores = tuple(draw(st.integers(-9, 9)) / 4 for _ in guesses) if draw(st.booleans()) else ()
        found.append((kind, layer, draw(ids), guesses, scores))
    return found


def trace_of(forwards) -> RouteTrace:
    """Number the forwards as a recorder does: two pieces that look like one are one."""
    steps, number, last = [], -1, (-1, None)
    for kind, layer, experts, guesses, scores in [step for f in forwards for step in f]:
        if kind is not last[1] or layer <= last[0]:
            number += 1
        last = (layer, kind)
        steps.append(Step(kind, number, layer, experts, guesses, scores))
    return RouteTrace(HEADER, steps)


@given(forwards=st.lists(layers_of_a_forward(), max_size=5), cut=st.integers(0, 40))
def test_a_round_trip_and_a_cut_file(tmp_path_factory, forwards, cut):
    path = tmp_path_factory.mktemp("routes") / "routes.bin"
    trace = trace_of(forwards)
    write_routes(path, trace)
    assert read_routes(path) == trace
    whole = path.read_bytes()
    head = len(whole.split(b"\n", 2)[0]) + len(whole.split(b"\n", 2)[1]) + 2
    path.write_bytes(whole[: max(head, len(whole) - cut)])
    found = read_routes(path)
    assert found.steps == trace.steps[: len(found.steps)], "whole frames stay"
    assert len(found.steps) == len(trace.steps) or cut


def test_forwards():
    trace = trace_of(
        [
            [(Kind.sweep, 0, (1, 2), (), ()), (Kind.sweep, 2, (3,), (), ())],
            [(Kind.decode, 0, (1,), (), ())],
            [(Kind.decode, 0, (2,), (), ()), (Kind.decode, 1, (4,), (), ())],
        ]
    )
    assert [len(group) for group in trace.forwards()] == [2, 1, 2]
    assert trace.num_tokens == 2


def test_files_that_are_none(tmp_path):
    path = tmp_path / "routes.bin"
    with pytest.raises(UserError, match=r"cannot read routes from .*No such file"):
        read_routes(path)
    path.write_bytes(b"\x7fELF")
    with pytest.raises(UserError, match="holds no routes"):
        read_routes(path)
    path.write_bytes(b'NVMOE-ROUTES 1\n{"model": 3}\n')
    with pytest.raises(UserError, match=r"the header of .* cannot be read"):
        read_routes(path)


def test_an_expert_that_the_model_does_not_have(tmp_path):
    path = tmp_path / "routes.bin"
    write_routes(path, RouteTrace(HEADER, [Step(Kind.decode, 0, 1, (299,))]))
    path.write_bytes(path.read_bytes().replace(b'"num_experts": 300', b'"num_experts": 299'))
    with pytest.raises(UserError, match=r"is damaged: .* \(3 layers of 299\)"):
        read_routes(path)


def test_a_recording_is_never_overwritten(tmp_path):
    RouteRecorder(tmp_path / "routes.bin", HEADER).close()
    with pytest.raises(UserError, match="File exists"):
        RouteRecorder(tmp_path / "routes.bin", HEADER)


def test_scores_are_kept_as_half_floats(tmp_path):
    recorder = RouteRecorder(tmp_path / "routes.bin", HEADER)
    recorder.decoded(0, [1], Guesses([2, 3], [0.25, 1e9]))
    recorder.decoded(1, [1], [2])
    recorder.close()
    first, second = read_routes(tmp_path / "routes.bin").steps
    assert first.scores == (0.25, 65504.0)
    assert second.scores == ()


def test_an_engine_writes_what_it_asks_for(
    open_tiny, make_config, tiny_files, tmp_path, heldout_tokens, monkeypatch
):
    """Against a spy at the same door; the tokens are those of an engine that does not record."""
    engine = Engine.open(make_config(**{"prefetch.experts": 2}), tiny_files)
    experts, seen = engine.model.experts, []
    real_waves, real_sweep = experts.waves, experts.sweep

    def waves(layer, ids, guesses=()):
        seen.append((Kind.decode, layer, tuple(ids), tuple(guesses)))
        return real_waves(layer, ids, guesses)

    def sweep(layer, ids, hold=1):
        seen.append((Kind.sweep, layer, tuple(ids), ()))
        return real_sweep(layer, ids, hold)

    monkeypatch.setattr(experts, "waves", waves)
    monkeypatch.setattr(experts, "sweep", sweep)
    engine.record_routes(tmp_path / "routes.bin")
    session, plain = Session(engine), Session(open_tiny())
    for count in (9, 10, 11, 12):
        assert session.sync(heldout_tokens[:count]).equal(plain.sync(heldout_tokens[:count]))
    engine.forget_experts()
    engine.close()
    trace = read_routes(tmp_path / "routes.bin")
    assert trace.steps.pop().kind is Kind.forget
    assert [(s.kind, s.layer, s.experts, s.guesses) for s in trace.steps] == seen
    assert len(seen) == 4 * 8
    assert trace.num_tokens == 3
    assert (trace.header.num_experts, trace.header.record_nbytes) == (64, 24576)
    for step in trace.steps[8:]:
        assert len(step.scores) == len(step.guesses) == (6 if step.layer < 7 else 0)
        assert list(step.scores) == sorted(step.scores, reverse=True)
