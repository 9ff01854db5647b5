# SPDX-License-Identifier: Apache-2.0
"""Sampling against transformers' logits processors, counted frequencies, and its own batch."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from executor.errors import UserError
from executor.sampler import Sampler, SamplingParams, distribution, penalize, warn_if_greedy_thinking

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [151645, 151643]}


def library_probs(logits_V, params: SamplingParams, history: list[int], nudge: float = 0.0):
    """What transformers would draw from, float64 ``[V]``; ``nudge`` moves the top-p and min-p thresholds."""
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(min(1.0, params.top_p * (1 + nudge))))
    if params.min_p:
        steps.append(MinPLogitsWarper(min(1.0, params.min_p * (1 + nudge))))
    ids = torch.tensor([history or [logits_V.shape[0]]])  # an id beyond the row: the library ignores it
    return steps(ids, logits_V.double()[None])[0].softmax(0)


def our_probs(logits_V, params: SamplingParams, history: list[int]):
    ids, probs = distribution(penalize(logits_V, history, params.repetition_penalty), params)
    assert ids.tolist() == sorted(set(ids.tolist()))
    return torch.zeros_like(logits_V).index_copy(0, ids, probs)


def random_logits(seed: int, size: int, scale: float):
    """bfloat16 values in float32: equal logits are common, as they are in the model's own output."""
    draws = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    return draws.bfloat16().float()


sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 2, 5, 20, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
)


@settings(deadline=None, max_examples=60)
@given(
    params=sampling_params,
    seed=st.integers(0, 2**32),
    size=st.integers(1, 120),
    scale=st.sampled_from([0.01, 1.0, 6.0]),
    history=st.lists(st.integers(0, 130), max_size=20),
)
def test_kept_tokens_and_probabilities_equal_transformers(params, seed, size, scale, history):
    logits = random_logits(seed, size, scale)
    expected = library_probs(logits, params, history)
    for nudge in (-1e-4, 1e-4):  # a token that sits on a threshold is decided by rounding: not a fair example
        assume(torch.equal(library_probs(logits, params, history, nudge) > 0, expected > 0))
    ours = our_probs(logits, params, history).double()
    # The library's unstable sort picks freely among equal tokens at the border of top-p: sets may differ.
    differ = (ours > 1e-30) != (expected > 1e-30)  # far below, fp32 rounds to 0 what float64 does not
    assert len(set(penalize(logits, history, params.repetition_penalty)[differ].tolist())) <= 1
    close = {"rtol": 2e-5, "atol": 1e-30}  # fp32 exp of arguments down to -70
    torch.testing.assert_close(ours.sort().values, expected.sort().values, **close)
    torch.testing.assert_close(ours[~differ], expected[~differ], **close)


@pytest.mark.parametrize("top_p", [0.5, 0.95])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_top_p_over_the_full_vocabulary(top_p, scale):
    """The shortcut that spares a sort of 151,936 values changes nothing, for a flat and for a peaked row."""
    logits = torch.randn(151936, generator=torch.Generator().manual_seed(5)) * scale
    params = SamplingParams(temperature=1.0, top_p=top_p)
    ours, expected = our_probs(logits, params, []), library_probs(logits, params, [])
    # The library adds 151,936 float64 terms, we add fp32 ones: a few tokens at the threshold may differ.
    differ = (ours > 0) != (expected > 0)
    assert expected[differ].sum() < 1e-5  # softmax in fp32 is off by 1e-7 relative; 1e-5 of mass is 100 x that
    assert abs(expected[ours > 0].sum() - 1) < 1e-5  # the same bound, seen from the other side
    assert 1 < (ours > 0).sum() < 151936


def chi_square(counts, probs) -> tuple[float, int]:
    likely = probs * counts.sum() >= 5  # the usual validity rule; the rest is pooled into one bin
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    expected = torch.cat([probs[likely], probs[~likely].sum()[None]]) * counts.sum()
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1


def test_frequencies_follow_the_probabilities():
    draws = 6000
    params = SamplingParams(temperature=0.8, top_k=25, top_p=0.97, seed=11)
    logits = random_logits(3, 60, 1.5)
    sampler, generator = Sampler(60), params.generator()
    counts = torch.zeros(60, dtype=torch.float64)
    for _ in range(draws):
        counts[sampler.sample(logits[None], [params], [[]], [generator])[0]] += 1
    value, freedom = chi_square(counts, library_probs(logits, params, []))
    bound = freedom + 4 * math.sqrt(2 * freedom)  # mean + 4 standard deviations; the seed makes it repeatable
    assert value < bound
    warmer = SamplingParams(temperature=0.9, top_k=25, top_p=0.97)
    assert chi_square(counts, library_probs(logits, warmer, []))[0] > bound  # the test can tell 0.8 from 0.9
    assert counts[library_probs(logits, params, []) == 0].sum() == 0


@settings(deadline=None, max_examples=30)
@given(params=sampling_params, seed=st.integers(0, 2**32))
def test_each_token_takes_one_number_and_inverts_the_distribution(params, seed):
    logits, history = random_logits(seed, 40, 2.0), [1, 2, 3]
    generator, twin = (torch.Generator().manual_seed(seed) for _ in range(2))
    probs = our_probs(logits, params, history).double()
    for _ in range(3):
        token = Sampler(40).sample(logits[None], [params], [history], [generator])[0]
        u = torch.rand((), dtype=torch.float64, generator=twin)
        below, upto = probs[:token].sum(), probs[: token + 1].sum()
        assert below - 1e-6 <= u <= upto + 1e-6  # fp32 probabilities add up to 1 within 1e-7 each way
        assert probs[token] > 0


def rows_of_a_batch():
    wishes = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=2),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=2.0, min_p=0.05, seed=1),
    ]
    logits = torch.stack([random_logits(20 + i, 200, 2.0) for i in range(len(wishes))]).bfloat16()
    return wishes, logits


def streams(order: list[int], steps: int = 12) -> dict[int, list[int]]:
    """The tokens of each row when the rows of ``order`` run together, in that order."""
    wishes, logits = rows_of_a_batch()
    generators = [wishes[i].generator() for i in order]
    history = [[i, 7] for i in order]
    for step in range(steps):
        shifted = torch.stack([logits[i].roll(step) for i in order])
        picked = Sampler(200).sample(shifted, [wishes[i] for i in order], history, generators)
        for ids, token in zip(history, picked):
            ids.append(token)
    return {i: ids[2:] for i, ids in zip(order, history)}


def test_a_seeded_stream_ignores_position_and_neighbours():
    together = streams([0, 1, 2, 3, 4])
    assert streams([4, 2, 0, 3, 1]) == together
    for i, tokens in together.items():
        assert streams([i])[i] == tokens
    assert len(set(together[0])) > 4  # it does sample


def test_same_seed_same_stream_and_other_seed_other_stream():
    def run(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        generator = params.generator()
        flat = torch.zeros(1, 1000)
        return [Sampler(1000).sample(flat, [params], [[]], [generator])[0] for _ in range(8)]

    assert run(3) == run(3)
    assert run(3) != run(4)  # by chance equal once in 1000**8


@pytest.mark.parametrize("beyond", [1e30, math.inf, math.nan])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(temperature=5.0, seed=0),
        SamplingParams(temperature=5.0, top_k=3, top_p=0.9, seed=0),
    ],
)
def test_ids_beyond_the_tokenizer_are_never_drawn(params, beyond):
    logits = random_logits(1, 64, 1.0)[None].clone()
    logits[:, 50:] = beyond
    generator = params.generator()
    # history names forbidden ids too: the penalty must not index outside the allowed part
    drawn = {Sampler(50).sample(logits, [params], [[49, 50, 63]], [generator])[0] for _ in range(100)}
    assert max(drawn) < 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ties(dtype):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]], dtype=dtype)
    assert Sampler(5).sample(logits, [SamplingParams()], [[]], [None]) == [1]  # greedy: the lowest id
    penalised = SamplingParams(repetition_penalty=2.0)
    assert Sampler(5).sample(logits, [penalised], [[1]], [None]) == [3]
    ids, probs = distribution(logits[0].float(), SamplingParams(temperature=1.0, top_k=1))
    assert ids.tolist() == [1, 3, 4]  # every token equal to the k-th stays
    torch.testing.assert_close(probs, torch.full((3,), 1 / 3))  # default fp32 tolerance: one division


@pytest.mark.parametrize("top_p", [0.001, 0.1, 0.3, 0.6, 0.9])
def test_of_ties_at_the_border_of_top_p_the_lowest_ids_stay(top_p):
    # 77 * top_p is no integer, so the number of kept tokens does not hang on rounding
    logits, params = torch.zeros(77), SamplingParams(temperature=1.0, top_p=top_p)
    ids, _ = distribution(logits, params)
    assert ids.tolist() == list(range(int((library_probs(logits, params, []) > 0).sum())))


def test_a_top_p_below_rounding_keeps_the_likeliest_token():
    for seed in range(20):  # in fp32 some of these rows add up to less than 1 - 1e-12
        logits = random_logits(seed, 50, 1.0)
        ids, probs = distribution(logits, SamplingParams(temperature=1.0, top_p=1e-12))
        assert ids.tolist() == [int(logits.argmax())]
        assert probs.tolist() == [1.0]


def test_repetition_penalty_alone_equals_transformers_and_leaves_the_row_alone():
    logits = random_logits(8, 30, 2.0)
    before = logits.clone()
    history = [3, 3, 29, 0]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([history]), logits[None])[0]
    assert torch.equal(penalize(logits, [*history, 30, 500], 1.7), expected)
    assert torch.equal(logits, before)


def test_a_vanishing_temperature_is_greedy_and_does_not_overflow():
    logits = random_logits(2, 50, 3.0)
    logits[17] = 40.0
    params = SamplingParams(temperature=1e-4, seed=0)
    assert Sampler(50).sample(logits[None], [params], [[]], [params.generator()]) == [17]


@pytest.mark.parametrize("value", [1e-46, 9e-5, 1e5])
def test_temperatures_that_float32_cannot_divide_by_are_refused(value):
    with pytest.raises(UserError, match=r"temperature=.* must be 0, which means greedy, or a number in \[1e-4, 1e4\]"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=0)])
def test_logits_that_are_not_finite_stop_the_run(fault, params):
    logits = torch.zeros(3, 8)
    logits[1, 4] = fault
    with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
        Sampler(8).sample(logits, [params] * 3, [[]] * 3, [params.generator()] * 3)
    logits[1] = -math.inf
    with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
        Sampler(8).sample(logits, [params] * 3, [[]] * 3, [params.generator()] * 3)


def test_masked_tokens_are_allowed_and_never_drawn():
    logits = torch.full((1, 6), -math.inf)
    logits[0, [2, 4]] = 0.0
    params = SamplingParams(temperature=1.0, top_k=5, seed=0)
    generator = params.generator()
    assert {Sampler(6).sample(logits, [params], [[]], [generator])[0] for _ in range(40)} == {2, 4}


def test_shapes_must_agree_and_an_empty_batch_is_empty():
    assert Sampler(4).sample(torch.zeros(0, 4), [], [], []) == []
    with pytest.raises(ValueError, match="params"):
        Sampler(4).sample(torch.zeros(2, 4), [SamplingParams()], [[], []], [None, None])
    with pytest.raises(ValueError, match="vocab_limit"):
        Sampler(0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_bad_values_name_the_key_in_one_line(key, value):
    for build in (
        lambda: SamplingParams(**{key: value}),
        lambda: SamplingParams.resolve(QWEN3, {key: value}),
    ):
        with pytest.raises(UserError, match=rf"^sampling_config\.{key}=.*must be ") as error:
            build()
        assert "\n" not in str(error.value)
    if key != "seed":
        with pytest.raises(UserError, match=rf"^generation_config\.json: {key}="):
            SamplingParams.resolve({**QWEN3, key: value}, {})


@pytest.mark.parametrize(
    ("file", "asked", "expected"),
    [
        ({}, {}, SamplingParams()),
        ({"temperature": 0.6, "top_k": 20}, {}, SamplingParams()),  # do_sample absent: greedy
        ({"do_sample": False, "temperature": 0.6}, {}, SamplingParams()),
        (QWEN3, {}, SamplingParams(0.6, 20, 0.95)),
        (QWEN3, {"temperature": None, "top_p": None, "seed": 4}, SamplingParams(0.6, 20, 0.95, seed=4)),
        (QWEN3, {"top_k": 0, "min_p": 0.1}, SamplingParams(0.6, 0, 0.95, 0.1)),
        (QWEN3, {"do_sample": False}, SamplingParams()),
        (QWEN3, {"do_sample": False, "temperature": 0.9}, SamplingParams()),
        (QWEN3, {"temperature": 0}, SamplingParams()),
        ({**QWEN3, "top_k": None}, {}, SamplingParams(0.6, 50, 0.95)),  # absent key: the library's 50
        ({}, {"temperature": 0.8}, SamplingParams(0.8, 50)),  # a temperature alone asks for sampling
        ({}, {"do_sample": True}, SamplingParams(1.0, 50)),
        ({}, {"top_p": 0.5}, SamplingParams()),  # a filter alone does not
        ({"repetition_penalty": 1.1}, {}, SamplingParams(repetition_penalty=1.1)),  # greedy keeps it
        (QWEN3, {"stop": ["x"], "ignore_eos": True}, SamplingParams(0.6, 20, 0.95)),
    ],
)
def test_resolve(file, asked, expected):
    assert SamplingParams.resolve(file, asked) == expected


def test_absent_keys_take_the_defaults_of_the_installed_transformers():
    defaults = GenerationConfig._get_default_generation_params()
    ours = SamplingParams.resolve({}, {"do_sample": True})
    for key in ("temperature", "top_k", "top_p", "repetition_penalty"):
        assert getattr(ours, key) == defaults[key]
    assert "min_p" not in defaults
    assert ours.min_p == 0


def test_sampling_at_temperature_zero_is_refused():
    with pytest.raises(UserError, match=r"sampling_config\.do_sample=true with temperature 0"):
        SamplingParams.resolve(QWEN3, {"do_sample": True, "temperature": 0.0})
    with pytest.raises(UserError, match=r"^sampling_config\.do_sample='yes': must be true or false$"):
        SamplingParams.resolve({}, {"do_sample": "yes"})


def test_generators():
    assert SamplingParams(seed=3).generator() is None
    free = SamplingParams(temperature=1.0)
    assert free.generator().initial_seed() != free.generator().initial_seed()  # equal once in 2**64
    assert SamplingParams(temperature=1.0, seed=9).generator().initial_seed() == 9


def test_greedy_thinking_is_warned_about():
    assert "temperature=0.6" in warn_if_greedy_thinking(SamplingParams(), True)
    assert warn_if_greedy_thinking(SamplingParams(), False) is None
    assert warn_if_greedy_thinking(SamplingParams(temperature=0.6), True) is None
