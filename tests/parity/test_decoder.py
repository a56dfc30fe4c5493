"""Decode steps of fixed shapes against the layers' own path, on the CPU: the same functions that a GPU replays."""

from __future__ import annotations

import gc

import pytest
import torch

from runtime.models.lanes import Lanes
from runtime.models.qwen_decode import Decoder

# masked softmax over the whole window against softmax over the visible positions: another order of fp32 sums
TOLERANCE = 1e-4


@pytest.fixture
def decoder(resident_engine) -> Decoder:
    return Decoder(resident_engine.model, 300, has_graphs=False)


# block of 8; 128 is the indexer's budget
@pytest.mark.parametrize("prompt_tokens", [1, 7, 8, 125, 170])
def test_steps_equal_the_layers_own_path(
    resident_engine, decoder, heldout_tokens, prompt_tokens: int
):
    model = resident_engine.model
    prompt, rest = (
        heldout_tokens[:prompt_tokens],
        heldout_tokens[prompt_tokens : prompt_tokens + 40],
    )
    one, two = model.new_state(), model.new_state()
    model.prefill(prompt, one)
    model.prefill(prompt, two)
    for token in rest:
        found, wanted = decoder.step(token, one)[0].clone(), model.decode(token, two)[0]
        assert float((found - wanted).abs().max()) < TOLERANCE
        assert int(found.argmax()) == int(wanted.argmax())
    for name, tensor in one.tensors().items():
        assert torch.allclose(tensor.float(), two.tensors()[name].float(), atol=1e-3), name


def test_conversations_take_turns_in_the_buffers(resident_engine, decoder, heldout_tokens):
    """Two conversations step by step in turn, one of them with a prompt in between: each as if it were alone."""
    model = resident_engine.model
    texts = heldout_tokens[:60], heldout_tokens[100:160]

    def alone(text):
        state = model.new_state()
        model.prefill(text[:20], state)
        logits = [decoder.step(token, state)[0].clone() for token in text[20:30]]
        model.prefill(text[30:40], state)
        return torch.stack(
            logits + [decoder.step(token, state)[0].clone() for token in text[40:60]]
        )

    wanted = [alone(text) for text in texts]
    states = [model.new_state(), model.new_state()]
    found: list[list[torch.Tensor]] = [[], []]
    for text, state in zip(texts, states, strict=True):
        model.prefill(text[:20], state)
    for at in range(20, 60):
        for i in (0, 1):
            if at == 30:
                model.prefill(texts[i][30:40], states[i])
            if not 30 <= at < 40:
                found[i].append(decoder.step(texts[i][at], states[i])[0].clone())
    for i in (0, 1):
        assert torch.equal(torch.stack(found[i]), wanted[i])


def test_lanes_keep_each_conversations_buffers(resident_engine, heldout_tokens):
    """Two conversations in turns on two lanes, and a third in the buffers of one that is over."""
    model = resident_engine.model
    first, second = (Decoder(model, 300, has_graphs=False) for _ in range(2))
    lanes = Lanes([first, second])
    states = [model.new_state() for _ in range(2)]
    texts = [heldout_tokens[:12], heldout_tokens[100:112]]
    found = [[], []]
    for step in range(12):
        for number, (text, state) in enumerate(zip(texts, states, strict=True)):
            found[number].append(lanes.step(text[step], state)[0].clone())
    assert {first.bound, second.bound} == set(states)
    for text, logits in zip(texts, found, strict=True):
        alone, state = Decoder(model, 300, has_graphs=False), model.new_state()
        wanted = [alone.step(token, state)[0].clone() for token in text]
        assert torch.equal(torch.stack(logits), torch.stack(wanted))
    kept, free = states[0], states.pop()
    del free
    gc.collect()
    third = model.new_state()
    lanes.bind(third)
    assert {first.bound, second.bound} == {kept, third}


def test_a_copied_state_goes_on_as_the_first(resident_engine, decoder, heldout_tokens):
    model = resident_engine.model
    state, copy = model.new_state(), model.new_state()
    model.prefill(heldout_tokens[:30], state)
    for token in heldout_tokens[30:45]:
        decoder.step(token, state)
    copy.restore(state.tensors())
    wanted = [decoder.step(token, state)[0].clone() for token in heldout_tokens[45:60]]
    found = [decoder.step(token, copy)[0].clone() for token in heldout_tokens[45:60]]
    assert torch.equal(torch.stack(found), torch.stack(wanted))
