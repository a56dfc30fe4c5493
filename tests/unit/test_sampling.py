"""Sampling against a plain Python implementation in float64, and drawn frequencies against probabilities."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime.sampling import Sampler, SamplingParams

# a filter's limit must not fall onto a token's own share: float32 and float64 may then decide differently
MARGIN = 1e-5


def brute_force(logits, temperature, top_k, top_p, min_p):
    """Return (probabilities, whether a limit was too close to call)."""
    largest = max(logits)
    shares = [math.exp((x - largest) / temperature) for x in logits]
    is_close = False

    def keep_only(wanted):
        total = sum(shares[i] for i in wanted)
        return [shares[i] / total if i in wanted else 0.0 for i in range(len(shares))]

    everything = set(range(len(logits)))
    shares = keep_only(everything)
    if 0 < top_k < len(logits):
        limit = sorted(logits)[-top_k]
        shares = keep_only({i for i in everything if logits[i] >= limit})  # equals stay together
    if top_p < 1:
        mass, wanted = 0.0, set()
        # stable: of equals the lower id first
        for i in sorted(everything, key=lambda i: -shares[i]):
            is_close |= abs(mass - top_p) < MARGIN
            if mass < top_p:
                wanted.add(i)
            mass += shares[i]
        shares = keep_only(wanted)
    if min_p > 0:
        limit = min_p * max(shares)
        is_close |= any(0 < abs(s - limit) < MARGIN for s in shares)
        shares = keep_only({i for i in everything if shares[i] >= limit})
    return shares, is_close


@settings(deadline=None, max_examples=150)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=1, max_size=12),
    temperature=st.sampled_from([0.1, 0.5, 1.0, 1.7]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
)
def test_probabilities(logits, temperature, top_k, top_p, min_p):
    """Small integers as logits, so that ties are common."""
    wanted, is_close = brute_force(logits, temperature, top_k, top_p, min_p)
    assume(not is_close)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor([float(x) for x in logits])
    found = Sampler(params, len(logits)).probabilities(row)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=1e-6)


def test_filters_apply_in_their_order():
    """0.4 0.3 0.2 0.1: after top-k 2 they are 4/7 3/7, so top-p 0.5 keeps one; the other way round, two."""
    row = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    found = Sampler(SamplingParams(top_k=2, top_p=0.5), 4).probabilities(row)
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0, 0.0, 0.0]))


def draws(params, logits, count, num_tokens=None):
    sampler = Sampler(params, num_tokens or len(logits))
    row = torch.tensor([logits])
    return [sampler(row) for _ in range(count)]


def test_greedy_takes_the_largest():
    assert draws(SamplingParams(temperature=0, seed=1), [0.1, 3.0, -2.0], 5) == [1] * 5


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 2.0])
def test_padding_is_never_drawn(temperature):
    """Rows of the head above the vocabulary hold anything, often the largest logit of all."""
    logits = [0.0, 1.0, 0.5, 90.0, math.inf]
    params = SamplingParams(temperature=temperature, seed=0)
    assert max(draws(params, logits, 200, num_tokens=3)) <= 2


@pytest.mark.parametrize("temperature", [1e-6, 1e-35])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_tiny_temperature_is_greedy(temperature, scale):
    logits = [-3.0 * scale, 5.0 * scale, 4.9 * scale]
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.9, min_p=0.1, seed=0)
    found = Sampler(params, 3).probabilities(torch.tensor(logits))
    assert found.tolist() == [0.0, 1.0, 0.0]
    assert draws(params, logits, 5) == [1] * 5


def test_seeds():
    logits = [0.0] * 50
    first = draws(SamplingParams(seed=7), logits, 20)
    assert draws(SamplingParams(seed=7), logits, 20) == first
    assert draws(SamplingParams(seed=8), logits, 20) != first
    assert draws(SamplingParams(), logits, 20) != draws(SamplingParams(), logits, 20)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**70 + 3])
def test_any_integer_is_a_seed(seed):
    assert draws(SamplingParams(seed=seed), [0.0] * 50, 5) == draws(
        SamplingParams(seed=seed), [0.0] * 50, 5
    )


def test_draws_leave_other_randomness_alone():
    """A request with a seed must not change what torch's own generator gives to others, nor be changed by it."""
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    first = draws(SamplingParams(seed=7), [0.0] * 50, 5)
    assert torch.equal(torch.rand(3), wanted)
    assert draws(SamplingParams(seed=7), [0.0] * 50, 5) == first


def test_frequencies():
    """4,000 draws with a fixed seed: chi-square of five tokens below 18.5 (one in a thousand, 4 degrees)."""
    logits = [2.0, 1.0, 0.0, -1.0, 0.5, -30.0]
    params = SamplingParams(temperature=1.3, seed=3)
    count = 4000
    found = Counter(draws(params, logits, count))
    wanted, _ = brute_force(logits, 1.3, 0, 1.0, 0.0)
    assert 5 not in found
    assert sum((found[i] - count * wanted[i]) ** 2 / (count * wanted[i]) for i in range(5)) < 18.5
