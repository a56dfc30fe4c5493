"""Conversations that go on from copies in RAM while their state is in a decoder's buffers on the GPU."""

from __future__ import annotations

import pytest
import torch

from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.snapshot import SnapshotStore

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.mark.parametrize("graphs", [True, False])
def test_a_second_turn_is_the_uninterrupted_runs(open_tiny, heldout_tokens, tmp_path, graphs):
    """With another conversation in between, and from the file."""
    settings = {"hw.device": "cuda", "cache.ram_gib": 1.0, "hw.graphs": graphs}
    engine = open_tiny(**settings)
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    prompt, more = heldout_tokens[:41], heldout_tokens[100:109]
    plain = Session(engine)
    first = [piece.token for piece in plain.generate(prompt, greedy)]
    second = prompt + first + more
    wanted = plain.sync(second).clone()
    answered = [piece.token for piece in plain.generate(second, greedy)]

    store = SnapshotStore(64 * MIB, tmp_path, 64 * MIB)
    session = Session(engine, store)
    assert [piece.token for piece in session.generate(prompt, greedy)] == first
    session.sync(heldout_tokens[200:230])
    store.close()
    for source in (store, SnapshotStore(64 * MIB, tmp_path, 64 * MIB)):
        session._store = source
        session.sync(heldout_tokens[300:310])
        found = session.sync(second).clone()
        assert session.cached_tokens == len(prompt) + len(first) - 1
        assert torch.equal(found, wanted)
        assert [piece.token for piece in session.generate(second, greedy)] == answered
        kept = source.longest(second)
        assert kept is not None
        assert all(not tensor.is_cuda for tensor in kept.tensors.values())
