"""DeepSeek's layers and whole model against recorded states, logits and answers of the reference."""

import json

import pytest
import torch

from tests.parity.deepseek_golden import (
    GOLDEN,
    LAYER_BOUND,
    MEDIAN_BOUND,
    PROMPTS,
    TINY,
    Layers,
    fed_tokens,
    golden,
    in_pieces,
    make_model,
    padded_to,
    relative_error,
    row_errors,
    spec_of,
    wanted_logits,
)

SPEC = spec_of(GOLDEN / "checkpoint")
ROWS_EQUAL = 0.9
ARGMAX_EQUAL = 0.98


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def layers():
    """What each layer makes of golden inputs: part -> layer -> (streams, pre, slots, scores, routes)."""
    run, found = Layers(make_model()), {}
    for part in ("prefill", "decode0", "decode1"):
        found[part] = {}
        for layer, streams, pre, choice in run.step(part):
            route = run.routes[layer]
            found[part][layer] = (streams, pre, choice.slots, choice.scores, route)
    return run, found


@pytest.mark.parametrize("layer", range(SPEC.num_layers))
@pytest.mark.parametrize("part", ["prefill", "decode0", "decode1"])
def test_layer_from_golden_inputs(layers, part, layer):
    """decode0 leaves a group of two incomplete, decode1 completes it."""
    run, found = layers
    streams, pre, *_ = found[part][layer]
    wanted, wanted_pre = run.wanted(part, layer)
    error, equal = relative_error(streams, wanted), (streams == wanted).flatten(1).all(1)
    print(f"relative error {error:.1e}, {equal.float().mean():.1%} of rows equal")
    assert streams.dtype == wanted.dtype
    assert error < LAYER_BOUND
    assert equal.float().mean() >= ROWS_EQUAL
    torch.testing.assert_close(pre, wanted_pre, rtol=0, atol=1e-3)


def recorded(part, kind, layer, name):
    """Rows of the golden model file that belong to a part of the layers' file."""
    rows = golden("model_p40")
    if part == "prefill":
        return rows[f"prefill.{kind}.{layer}.{name}"]
    step = int(part.removeprefix("decode"))
    return rows[f"decode.{kind}.{layer}.{name}"][step : step + 1]


@pytest.mark.parametrize("layer", SPEC.index_sources)
@pytest.mark.parametrize("part", ["prefill", "decode0", "decode1"])
def test_choices_from_golden_inputs(layers, part, layer):
    """Of equal scores the lowest place wins: rows with a tie at the cut count, too, if their scores are the golden."""
    _, _, slots, scores, _ = layers[1][part][layer]
    wanted = recorded(part, "index", layer, "selected")
    wanted_scores = recorded(part, "index", layer, "scores")[:, : scores.shape[1]]
    same_scores = (scores == wanted_scores).all(1)
    assert same_scores.float().mean() >= ROWS_EQUAL
    decided = same_scores | (recorded(part, "index", layer, "margin") > 0)
    found = padded_to(slots, wanted.shape[1])
    assert torch.equal(found[decided], wanted.long()[decided])


def test_golden_choices_have_ties_at_the_cut():
    """Else the tie rule would not be tested."""
    ties = sum(
        int((recorded("prefill", "index", layer, "margin") == 0).sum())
        for layer in SPEC.index_sources
    )
    assert ties > 0


@pytest.mark.parametrize("layer", range(SPEC.num_layers))
@pytest.mark.parametrize("part", ["prefill", "decode0", "decode1"])
def test_routes_from_golden_inputs(layers, part, layer):
    ids, weights = layers[1][part][layer][4]
    clear = recorded(part, "router", layer, "margin") > 1e-4
    assert clear.float().mean() >= ROWS_EQUAL
    wanted = recorded(part, "router", layer, "indices").long()
    assert torch.equal(ids[clear].sort(1).values, wanted[clear].sort(1).values)
    assert (ids == wanted)[clear].float().mean() >= ARGMAX_EQUAL  # best first
    totals = torch.full((len(ids),), SPEC.route_scale)
    torch.testing.assert_close(weights.sum(1), totals, rtol=1e-6, atol=0)
    same = (ids == wanted).all(1)
    wanted_weights = recorded(part, "router", layer, "weights")
    torch.testing.assert_close(weights[same], wanted_weights[same], rtol=0, atol=1e-3)


@pytest.mark.parametrize("layer", SPEC.kv_sources)
def test_compressed_entries_from_golden_inputs(layers, layer):
    """What later tokens read: entries and index keys of the prompt, and of the first decoded tokens."""
    run, _ = layers
    cache, ratio = run.state.compressed[layer], SPEC.compress_ratios[layer]
    names = ["prefill", *([] if ratio == 2 else ["decode0"]), "decode1"]
    for found, name in ((cache.entries, "compress_kv"), (cache.keys, "index.k")):
        wanted = torch.cat([run.records[f"{part}.{layer}.{name}"] for part in names])
        assert cache.length == len(wanted) == 42 // ratio
        equal = (found[: cache.length] == wanted).all(1).float().mean()
        assert equal >= ROWS_EQUAL


def assert_same_text(found, wanted):
    errors = row_errors(found, wanted)
    same = (found.argmax(1) == wanted.argmax(1)).float().mean()
    print(f"median {errors.median():.1e}, largest {errors.max():.1e}, {same:.1%} of tokens equal")
    assert errors.median() < MEDIAN_BOUND
    assert same >= ARGMAX_EQUAL


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_with_golden_tokens(model, prompt):
    """The prompt in one piece, then 24 tokens one by one, as the reference had them."""
    tokens = fed_tokens(prompt)
    state = model.new_state()
    found = [model.prefill(tokens[:-24], state, all_logits=True)]
    found += [model.decode(token, state) for token in tokens[-24:]]
    assert state.position == len(tokens)
    assert_same_text(torch.cat(found), wanted_logits(prompt))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens(model, prompt):
    wanted = golden(f"model_{prompt}")["decode.tokens"].tolist()
    assert greedy(model, fed_tokens(prompt)[:-24], len(wanted)) == wanted


def greedy(model, prompt, count):
    state = model.new_state()
    logits, found = model.prefill(prompt, state), []
    while True:
        found.append(int(logits[0].argmax()))
        if len(found) == count:
            return found
        logits = model.decode(found[-1], state)


@pytest.mark.parametrize(
    ("prompt", "sizes"),
    [
        ("p1", (25,)),
        ("p1", (3, 1, 5, 2)),
        ("p7", (31,)),
        ("p7", (1, 31)),
        ("p7", (7, 3, 1)),
        ("p7", (1,)),
        ("p7", (3, 1, 5, 2)),
        ("p40", (64,)),
        ("p40", (1, 64)),
        ("p40", (63, 1)),
        ("p40", (3, 1, 5, 2)),
        ("p40", (17, 16, 15)),
        ("p40", (1,)),
        ("p100", (124,)),
        ("p100", (1, 124)),
        ("p100", (99, 1, 24)),
        ("p100", (33, 31, 7, 1, 19)),
        ("p100", (2, 5, 13)),
    ],
    ids=str,
)
def test_prompt_in_pieces(model, prompt, sizes):
    """Golden logits for any pieces, and for decoded tokens taken as a prompt; one limit splits a group of two."""
    found = in_pieces(model, fed_tokens(prompt), sizes)
    assert_same_text(found, wanted_logits(prompt))


def test_logits_of_the_last_token_alone(model):
    tokens = fed_tokens("p40")
    state = model.new_state()
    last = model.prefill(tokens, state)
    assert last.shape == (1, SPEC.vocab_size)
    every = in_pieces(model, tokens, (len(tokens),))
    torch.testing.assert_close(last[0], every[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", [(64,), (40, 1)], ids=str)
def test_same_bits_again_and_in_any_order_of_arrival(model, sizes):
    tokens = fed_tokens("p40")
    first = in_pieces(model, tokens, sizes)
    assert torch.equal(in_pieces(model, tokens, sizes), first)
    for seed in (1, 2):
        assert torch.equal(in_pieces(make_model(seed=seed), tokens, sizes), first)


def test_conversations_do_not_touch_each_other(model):
    """Two states in turns: each gets what it gets alone."""
    alone = [in_pieces(model, fed_tokens(prompt), (5,)) for prompt in ("p7", "p40")]
    states, found = [model.new_state(), model.new_state()], [[], []]
    for at in range(0, 64, 5):
        for state, tokens, out in zip(states, map(fed_tokens, ("p7", "p40")), found, strict=True):
            if at < len(tokens):
                out.append(model.prefill(tokens[at : at + 5], state, all_logits=True))
    for out, wanted in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(out), wanted)


STOP_TOKENS = (2, 0)
CUT_AT = 90
ANSWERS = json.loads((TINY / "golden_answers.json").read_text())["greedy"]


@pytest.fixture(scope="module")
def tiny_model():
    return make_model(TINY)


@pytest.mark.parametrize("answer", ANSWERS, ids=[a["question"] for a in ANSWERS])
def test_answers_of_the_trained_model(tiny_model, answer):
    """Token for token; then a stop token, unless the recorded answer was cut at its length."""
    wanted = answer["answer_own_keys_ids"]
    found = greedy(tiny_model, answer["prompt_ids"], len(wanted) + 1)
    assert found[:-1] == wanted
    assert found[-1] in STOP_TOKENS or len(wanted) == CUT_AT
