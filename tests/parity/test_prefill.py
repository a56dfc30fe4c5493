"""A prompt in any pieces is the same prompt; a saved state is the whole conversation."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from runtime.session import Session

# 160 tokens: two chunks of the delta rule (64) and a half, and beyond the indexer's budget of 128 tokens
NUM_TOKENS = 160
# Measured on x86 (fp32): 1.7e-5 at most over all splits below, on logits of standard deviation 4.7. Chunked and
# stepwise delta rule, and sums over one row and over many, round differently; a token seen twice or a window of
# the convolutions cut at a piece's limit gives 1e-2 and more.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(resident_engine):
    return resident_engine.model


@pytest.fixture(scope="module")
def tokens(heldout_tokens):
    found = heldout_tokens[60 : 60 + NUM_TOKENS]
    assert 0 in found  # an n-gram boundary
    return found


@pytest.fixture(scope="module")
def one_by_one(model, tokens):
    """Logits after every token, each decoded alone."""
    state = model.new_state()
    return torch.cat([model.decode(token, state) for token in tokens])


def in_pieces(model, tokens, sizes):
    """Return the logits after every token; the last size is repeated to the end."""
    state, at, out = model.new_state(), 0, []
    sizes = list(sizes)
    while at < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out.append(model.prefill(tokens[at : at + size], state, all_logits=True))
        at += size
    return torch.cat(out)


def assert_same(found, wanted):
    difference = (found - wanted).abs().max()
    print(f"largest difference {difference:.2e}")
    assert difference < TOLERANCE
    assert torch.equal(found.argmax(1), wanted.argmax(1))


@pytest.mark.parametrize(
    "sizes",
    [
        (NUM_TOKENS,),
        (7,),
        (63, 64, 33),
        (64,),
        (65, 1, 63, 31),
        (1, NUM_TOKENS),
        (NUM_TOKENS - 1, 1),
        (128, 32),  # the budget exactly, then beyond
        (130, 1, 5, 1, 2, 21),
    ],
    ids=str,
)
def test_pieces_equal_single_tokens(model, tokens, one_by_one, sizes):
    assert_same(in_pieces(model, tokens, sizes), one_by_one)


@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6))
def test_any_pieces_equal_single_tokens(model, tokens, one_by_one, sizes):
    assert_same(in_pieces(model, tokens, [*sizes, 50]), one_by_one)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 129])
def test_thresholds_of_the_operations(model, tokens, one_by_one, count):
    """One piece of `count` tokens: chunk limits of the delta rule, the indexer's budget; then a decoded token."""
    state = model.new_state()
    found = model.prefill(tokens[:count], state, all_logits=True)
    after = model.decode(tokens[count], state)
    assert_same(torch.cat([found, after]), one_by_one[: count + 1])


@pytest.mark.parametrize("count", [69, 70, 71, 140, 141])
def test_thresholds_of_the_piece(open_tiny, tokens, one_by_one, count):
    """A session cuts a prompt into pieces of 70: around one and two of them; a rest of one token is decoded."""
    session = Session(open_tiny(**{"model.prefill_tokens": 70}))
    found = session.sync(tokens[:count])
    assert session.tokens == tokens[:count]
    assert_same(found, one_by_one[count - 1 : count])


def test_last_logits_are_those_of_the_last_token(model, tokens, one_by_one):
    assert_same(model.prefill(tokens[:65], model.new_state()), one_by_one[64:65])


# ---- saved states ----------------------------------------------------------------------------------------------------

SAVED_AT = 207  # beyond the indexer's budget, with seven tokens in the open block
ENDS_AT = 250  # the block must not only close, its key must decide whether a later token sees it (35 tokens on)


def continued(model, state, tokens):
    """Go on with single tokens and then a piece."""
    out = [model.decode(token, state) for token in tokens[SAVED_AT : SAVED_AT + 2]]
    out.append(model.prefill(tokens[SAVED_AT + 2 :], state, all_logits=True))
    return torch.cat(out)


@pytest.fixture(scope="module")
def long_tokens(heldout_tokens):
    return heldout_tokens[60 : 60 + ENDS_AT]


@pytest.fixture(scope="module")
def saved(model, long_tokens):
    """(a snapshot, the logits of the conversation that went on after it was taken)."""
    tokens = long_tokens
    state = model.new_state()
    model.prefill(tokens[: SAVED_AT - 3], state)
    for token in tokens[SAVED_AT - 3 : SAVED_AT]:
        model.decode(token, state)
    snapshot = state.tensors()
    return snapshot, continued(model, state, tokens)


def test_restored_conversation_goes_on_the_same(model, long_tokens, saved):
    """Twice from one snapshot: neither the original nor a copy that goes on may write into it."""
    snapshot, wanted = saved
    for _ in range(2):
        state = model.new_state()
        model.prefill(long_tokens[:9], state)  # restoring replaces whatever was there
        state.restore(snapshot)
        assert state.position == SAVED_AT
        assert torch.equal(continued(model, state, long_tokens), wanted)


def test_every_saved_tensor_counts(model, long_tokens, saved):
    """A snapshot without any one of its tensors is another conversation: none is dead weight, none is missing."""
    snapshot, wanted = saved
    unused = []
    for name, tensor in snapshot.items():
        state = model.new_state()
        assert tensor.numel(), name
        state.restore({**snapshot, name: torch.zeros_like(tensor)})
        if torch.equal(continued(model, state, long_tokens), wanted):
            unused.append(name)
    assert unused == []
