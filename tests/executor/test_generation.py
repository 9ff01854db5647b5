# SPDX-License-Identifier: Apache-2.0
"""Batching changes nothing: batch position, chunking, refill order and garbage in the cache leave each answer alone."""

import random

import pytest
import torch

from executor.errors import UserError
from executor.generation import generate
from executor.model_runner import NonFiniteLogits
from executor.sampler import SamplingParams
from executor.scheduler import Request
from tests.models import checkpoints as ck

KINDS = {"dense": {"tie_word_embeddings": True}, "moe": {"norm_topk_prob": True}}
PROMPTS = ck.random_prompts([1, 17, 5, 40, 16, 2, 33], seed=1)
NEW = 12


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    """A random model, its folder, and transformers' greedy answers to PROMPTS, each asked alone."""
    model = ck.make(request.param, **KINDS[request.param])
    folder = ck.save(model, tmp_path_factory.mktemp(request.param))
    answers = [
        model.generate(
            torch.tensor([p]),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(p) :].tolist()
        for p in PROMPTS
    ]
    return folder, answers


def ask(made, prompts, new=NEW, **options):
    requests = [Request(prompt=p, max_new_tokens=new, **options) for p in prompts]
    return generate(made, requests, vocab_limit=96, after_step=lambda scheduler: scheduler.check())


def tokens(answers):
    return [answer.output for answer in answers]


def poison(made):
    for cache in made.caches:
        cache.key.fill_(float("nan"))
        cache.value.fill_(float("nan"))


def test_every_batch_position_gives_the_tokens_of_a_single_run(checkpoint):
    folder, expected = checkpoint
    made = ck.runner(folder)
    for turn in range(len(PROMPTS)):
        order = [(turn + i) % len(PROMPTS) for i in range(len(PROMPTS))]
        answers, _ = ask(made, [PROMPTS[i] for i in order])
        assert tokens(answers) == [expected[i] for i in order]


@pytest.mark.parametrize("alive", [1, 2, 3])
def test_dead_rows_and_garbage_in_the_cache_change_nothing(checkpoint, alive):
    """Every slot of the cache holds NaN, the scratch slots of dead rows too, and nothing of it reaches a live row."""
    folder, expected = checkpoint
    clean, poisoned = ck.runner(folder), ck.runner(folder)
    poison(poisoned)
    seen: list[list[torch.Tensor]] = [[], []]
    for logits, made in zip(seen, (clean, poisoned)):
        step = made.step

        def record(batch, step=step, logits=logits):
            result = step(batch)
            logits.append(result[:alive])
            return result

        made.step = record
        answers, _ = ask(made, PROMPTS[:alive])
        assert tokens(answers) == expected[:alive]
    assert len(seen[0]) == len(seen[1]) > NEW - 1
    # dense: bit-equal. MoE: garbage rows are routed to other experts, whose matmuls then have another number of rows
    # and may sum in another order, which is float32 rounding (1e-6 at unit scale)
    tolerance = 1e-5 if made.plan.config.moe_layers else 0
    for a, b in zip(*seen):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("max_prefill_tokens", [5, 7, 16, 640])
def test_chunked_and_mixed_prefill(checkpoint, max_prefill_tokens):
    """Prompts are cut into chunks that share steps with running answers; the tokens stay those of a single run."""
    folder, expected = checkpoint
    made = ck.runner(folder, scheduler__max_prefill_tokens=max_prefill_tokens)
    mixed = []
    step = made.step

    def watch(batch):
        assert batch.num_tokens <= max(max_prefill_tokens, 4)
        lengths = [b - a for a, b in zip([0, *batch.actual_seq_qlen], batch.actual_seq_qlen)]
        mixed.append(batch.phase == "prefill" and len(set(lengths)) > 1)
        return step(batch)

    made.step = watch
    answers, tally = ask(made, PROMPTS)
    assert tokens(answers) == expected
    assert any(mixed)
    assert tally.prompt_tokens == sum(map(len, PROMPTS))


def test_two_hundred_requests_through_four_rows_and_a_small_pool(checkpoint):
    """First come, first served, refilled as rows and blocks come free; each answer is that of the request alone, no
    block is lost, and a step never exceeds its budget."""
    folder, _ = checkpoint
    rng = random.Random(0)
    prompts = ck.random_prompts([rng.choice((1, 2, 15, 16, 17, 30, rng.randrange(1, 60))) for _ in range(200)], seed=2)
    requests = [Request(prompt=p, max_new_tokens=rng.randrange(1, 9)) for p in prompts]
    made = ck.runner(folder, scheduler__num_blocks=12, scheduler__max_prefill_tokens=24, scheduler__max_seq_len=80)
    poison(made)
    started: list[int] = []
    free: list[int] = []

    def check(scheduler):
        scheduler.check()
        assert len(scheduler.running) <= 4
        started.extend(s.number for s in scheduler.running if s.number not in started)
        free.append(scheduler.pool.num_free)

    answers, _ = generate(made, requests, vocab_limit=96, after_step=check)
    assert started == sorted(started)
    assert free[-1] == 11  # all but the scratch block
    assert min(free) < 4  # the pool was the bottleneck, or the test tests nothing
    single = ck.runner(folder, scheduler__batch_size=1, scheduler__max_seq_len=80)
    for request, answer in zip(requests, answers):
        alone, _ = generate(single, [request], vocab_limit=96)
        assert answer.output == alone[0].output
        assert len(answer.output) == request.max_new_tokens


def test_stop_reasons(checkpoint):
    folder, expected = checkpoint
    made = ck.runner(folder, scheduler__max_seq_len=48)
    first = expected[1]
    cut = next(i for i, token in enumerate(first) if token not in first[:i] and i > 2)
    (by_eos,), _ = ask(made, [PROMPTS[1]], eos_ids=frozenset({first[cut], 95_000}))
    assert (by_eos.stop_reason, by_eos.output) == ("eos", first[: cut + 1])
    (by_length,), _ = ask(made, [PROMPTS[1]], new=3)
    assert (by_length.stop_reason, by_length.output) == ("length", first[:3])
    (by_context,), _ = ask(made, [PROMPTS[3]])
    assert (by_context.stop_reason, by_context.output) == ("context", expected[3][:8])


def test_prompt_at_the_limit_of_the_context(checkpoint):
    folder, _ = checkpoint
    made = ck.runner(folder, scheduler__max_seq_len=48)
    (answer,), _ = ask(made, ck.random_prompts([47]))
    assert (answer.stop_reason, len(answer.output)) == ("context", 1)
    for length in (48, 49):
        with pytest.raises(UserError, match=f"has {length} tokens, which leaves no room"):
            ask(made, ck.random_prompts([length]))
    with pytest.raises(UserError, match="empty"):
        ask(made, [[]])


def test_prompt_that_the_cache_can_never_hold(checkpoint):
    folder, _ = checkpoint
    made = ck.runner(folder, scheduler__num_blocks=3, scheduler__max_seq_len=64)
    (answer,), _ = ask(made, ck.random_prompts([20]))  # 20 + 12 tokens: exactly two blocks
    assert len(answer.output) == NEW
    with pytest.raises(UserError, match="needs 3 cache blocks, the cache has 2"):
        ask(made, ck.random_prompts([21]))


@pytest.mark.parametrize("max_prefill_tokens", [8, 640])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_non_finite_logits_stop_the_run_and_name_the_first_layer(checkpoint, layer, max_prefill_tokens):
    """Also when it appears in a chunk of a prompt from which no token is chosen."""
    folder, _ = checkpoint
    made = ck.runner(folder, scheduler__max_prefill_tokens=max_prefill_tokens)
    made.model.layers[layer].self_attn.o_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteLogits, match=rf"first layer with NaN or infinity is model\.layers\.{layer}$"):
        ask(made, PROMPTS[:2])


def test_seeded_sampling_does_not_depend_on_the_batch(checkpoint):
    folder, expected = checkpoint
    made = ck.runner(folder)
    params = [SamplingParams(temperature=1.0, top_k=20, seed=seed) for seed in range(len(PROMPTS))]
    requests = [Request(prompt=p, max_new_tokens=NEW, sampling=s) for p, s in zip(PROMPTS, params)]
    together, _ = generate(made, requests, vocab_limit=96)
    alone = [generate(made, [request], vocab_limit=96)[0][0].output for request in requests]
    assert tokens(together) == alone
    assert alone != expected  # it did sample


def test_vocab_limit(checkpoint):
    """Ids beyond the tokenizer are never chosen, though the model's favourite is often among them."""
    folder, expected = checkpoint
    made = ck.runner(folder)
    answers = generate(made, [Request(prompt=p, max_new_tokens=NEW) for p in PROMPTS], vocab_limit=40)[0]
    assert max(max(answer.output) for answer in answers) < 40 <= max(max(e) for e in expected)
