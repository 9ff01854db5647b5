# SPDX-License-Identifier: Apache-2.0
"""Our logits equal transformers' on the same checkpoint: every model option, both expert layouts, ragged batches."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import checkpoints as ck
from tests.models import naive

# float32 sums in another order: logits of about unit scale differ by some 1e-6; 1e-4 is the promise
FP32 = 1e-4
PROMPTS = ck.random_prompts([1, 2, 17, 64, 5])

OPTIONS = {
    "dense": ("dense", {}),
    "dense tied": ("dense", {"tie_word_embeddings": True}),
    "dense attention_bias": ("dense", {"attention_bias": True}),
    "dense head_dim absent": ("dense", {"head_dim": ..., "hidden_size": 64}),
    "dense head_dim * heads > hidden": ("dense", {"head_dim": 32}),
    "dense head_dim * heads == hidden": ("dense", {"head_dim": 12}),
    "dense one kv head": ("dense", {"num_key_value_heads": 1}),
    "dense as many kv heads as heads": ("dense", {"num_key_value_heads": 4}),
    "dense eps": ("dense", {"rms_norm_eps": 1e-2}),
    "dense yarn": (
        "dense",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e4,
            }
        },
    ),
    "dense yarn, attention_factor and betas": (
        "dense",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.5,
                "original_max_position_embeddings": 64,
                "rope_theta": 5e5,
                "attention_factor": 1.3,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            }
        },
    ),
    "moe": ("moe", {}),
    "moe norm_topk_prob": ("moe", {"norm_topk_prob": True}),
    "moe not norm_topk_prob": ("moe", {"norm_topk_prob": False}),
    "moe head_dim absent": ("moe", {"head_dim": ...}),
    "moe tied": ("moe", {"tie_word_embeddings": True}),
    "moe attention_bias": ("moe", {"attention_bias": True}),
    "moe top 1": ("moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    "moe top all": ("moe", {"num_experts_per_tok": 6}),
    "moe decoder_sparse_step": ("moe", {"decoder_sparse_step": 2}),
    "moe mlp_only_layers": ("moe", {"mlp_only_layers": [0, 2], "norm_topk_prob": True}),
    "moe yarn": (
        "moe",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e6,
            }
        },
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_equal_transformers(name, tmp_path):
    kind, options = OPTIONS[name]
    model = ck.make(kind, **options)
    made = ck.runner(ck.save(model, tmp_path))
    expected = ck.oracle_logits(model, PROMPTS)
    assert 0.3 < expected.std() < 3  # the tolerance speaks of logits at about unit scale
    torch.testing.assert_close(ck.prefill_logits(made, PROMPTS), expected, rtol=0, atol=FP32)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_long_prompt(kind, tmp_path):
    model = ck.make(kind)
    made = ck.runner(ck.save(model, tmp_path))
    prompts = ck.random_prompts([600])
    torch.testing.assert_close(ck.prefill_logits(made, prompts), ck.oracle_logits(model, prompts), rtol=0, atol=FP32)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dense", {"tie_word_embeddings": True}), ("moe", {"norm_topk_prob": True}), ("moe", {"mlp_only_layers": [1]})],
)
def test_float64_equals_a_naive_model(kind, options, tmp_path):
    """In float64 nothing is rounded to less on the way: ours equals a plain float64 model to float64's own precision,
    in every step of a run (prefill, chunk, decode). float32 anywhere would show as 1e-7 and more."""
    model = ck.make(kind, **options)
    folder = ck.save(model, tmp_path)
    (ids,) = ck.random_prompts([21])
    expected = naive.logits(folder, ids)
    made = ck.runner(folder, model__dtype="float64")
    for rows, got in ck.step_by_step(made, [ids]):
        torch.testing.assert_close(got, expected[rows], rtol=0, atol=1e-10)
    # and the naive model is Qwen3: float32 transformers agrees with it as float32 does
    torch.testing.assert_close(ck.oracle_logits(model, [ids])[0].double(), expected[-1], rtol=0, atol=FP32)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_step_equals_transformers(name, tmp_path):
    """Not only the first prefill: half of each prompt at once, the next part as a chunk over the cache, the rest token
    by token in decode steps of a ragged batch."""
    kind, options = OPTIONS[name]
    model = ck.make(kind, **options)
    made = ck.runner(ck.save(model, tmp_path))
    prompts = ck.random_prompts([40, 23, 31])
    with torch.no_grad():
        full = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    for rows, got in ck.step_by_step(made, prompts):
        expected = torch.stack([logits[row] for logits, row in zip(full, rows)])
        torch.testing.assert_close(got, expected, rtol=0, atol=FP32)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_bfloat16_error_is_not_larger_than_transformers_own(kind, tmp_path):
    """Against float32 logits, our bf16 error may not exceed that of transformers in bf16 by more than noise: both
    round at about as many points, so their errors are of one size. Eight seeds, since
    a flipped expert dominates one."""
    ours, theirs = [], []
    for seed in range(8):
        folder = ck.save(ck.make(kind, seed=seed).bfloat16(), tmp_path / str(seed))
        exact = ck.oracle_logits(ck.load(folder, torch.float32), PROMPTS)
        mine = ck.prefill_logits(ck.runner(folder, model__dtype="bfloat16"), PROMPTS).float()
        other = ck.oracle_logits(ck.load(folder, torch.bfloat16), PROMPTS).float()
        ours.append(float((mine - exact).abs().mean()))
        theirs.append(float((other - exact).abs().mean()))
    print(f"mean bf16 error over 8 seeds: ours {sum(ours) / 8:.5f}, transformers {sum(theirs) / 8:.5f}")
    assert sum(ours) < 1.25 * sum(theirs)  # 1.25: the means of 8 seeds scatter by some 10 percent
    assert sum(theirs) > 0


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_source_dtypes(source, tmp_path):
    """A checkpoint of any float dtype loads into any model dtype as torch converts it."""
    folder = ck.save(ck.make("moe").to(source), tmp_path)
    made, model = ck.runner(folder), ck.load(folder, torch.float32)
    torch.testing.assert_close(ck.prefill_logits(made, PROMPTS), ck.oracle_logits(model, PROMPTS), rtol=0, atol=FP32)


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        ({0, 1, 2}, ("gate_up_proj", "down_proj")),
        ({1}, ("gate_up_proj", "down_proj")),
        ({0, 2}, ("gate_up_proj",)),
        ({0, 1}, ("down_proj",)),
    ],
)
def test_fused_expert_layouts_load_the_same_weights(layers, parts, tmp_path):
    """Experts one by one, fused, and mixtures by layer and by matrix fill bit-equal parameters."""
    model = ck.make("moe")
    alone = ck.runner(ck.save(model, tmp_path / "alone"))
    folder = ck.save(model, tmp_path / "fused")
    ck.fuse_experts(folder, layers, parts)
    fused = ck.runner(folder)
    for (name, a), (_, b) in zip(alone.model.named_parameters(), fused.model.named_parameters()):
        assert torch.equal(a, b), name
    torch.testing.assert_close(ck.prefill_logits(fused, PROMPTS), ck.oracle_logits(model, PROMPTS), rtol=0, atol=FP32)


def test_num_experts_has_two_spellings(tmp_path):
    model = ck.make("moe")
    folder = ck.save(model, tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    assert "num_local_experts" in raw  # what transformers 5 writes
    before = ck.prefill_logits(ck.runner(folder), PROMPTS)
    ck.edit_config(folder, lambda raw: raw.update(num_experts=raw.pop("num_local_experts")))
    assert torch.equal(ck.prefill_logits(ck.runner(folder), PROMPTS), before)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("rope_type_key", ["type", "rope_type"])
def test_rope_settings_have_two_spellings(kind, rope_type_key, tmp_path):
    """4.x: rope_theta and rope_scaling; 5.x: rope_parameters. The tables are the same."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32}
    model = ck.make(kind, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **yarn})
    folder = ck.save(model, tmp_path)
    before = ck.runner(folder).model.rotary_emb

    def to_old_spelling(raw):
        del raw["rope_parameters"]
        raw.update(rope_theta=1e6, rope_scaling={rope_type_key: "yarn", **yarn})

    ck.edit_config(folder, to_old_spelling)
    after = ck.runner(folder).model.rotary_emb
    assert torch.equal(before.cos, after.cos)
    assert torch.equal(before.sin, after.sin)


def test_yarn_from_the_recipe_equals_yarn_in_the_checkpoint(tmp_path):
    """model_config.rope_scaling extends the context without touching the checkpoint's files."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    plain = ck.make("dense", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    folder = ck.save(plain, tmp_path / "plain")
    before = (folder / "config.json").read_bytes()
    made = ck.runner(folder, model__rope_scaling=yarn)
    assert (folder / "config.json").read_bytes() == before
    extended = ck.make("dense", rope_parameters={"rope_theta": 1e6, **yarn})
    torch.testing.assert_close(ck.prefill_logits(made, PROMPTS), ck.oracle_logits(extended, PROMPTS), rtol=0, atol=FP32)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_names_without_model_prefix(kind, tmp_path):
    """A base model saves its tensors without ``model.``; with tied embeddings that is all a model needs."""
    model = ck.make(kind, tie_word_embeddings=True)
    folder = ck.save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "model.safetensors")
    torch.testing.assert_close(
        ck.prefill_logits(ck.runner(folder), PROMPTS), ck.oracle_logits(model, PROMPTS), rtol=0, atol=FP32
    )


@pytest.mark.parametrize("shard_size", ["20KB", "200KB"])
def test_sharded_checkpoints(shard_size, tmp_path):
    model = ck.make("moe")
    folder = ck.save(model, tmp_path, max_shard_size=shard_size)
    assert len(list(folder.glob("*.safetensors"))) > 1
    torch.testing.assert_close(
        ck.prefill_logits(ck.runner(folder), PROMPTS), ck.oracle_logits(model, PROMPTS), rtol=0, atol=FP32
    )


@pytest.mark.parametrize("out_in_order", [True, False])
def test_memory_order_does_not_change_the_answer(out_in_order, tmp_path, monkeypatch):
    """[in, out] storage, as on an NPU, holds the same matrices as [out, in] storage, as on a CPU."""
    import dataclasses

    from executor.platform import features, select

    model = ck.make("moe", norm_topk_prob=True)
    folder = ck.save(model, tmp_path)
    machine = dataclasses.replace(features.cpu(), out_in_order=out_in_order)
    monkeypatch.setattr(select, "cpu", lambda: machine)
    made = ck.runner(folder)
    assert made.model.layers[0].mlp.experts.w13.mT.is_contiguous() is out_in_order
    torch.testing.assert_close(ck.prefill_logits(made, PROMPTS), ck.oracle_logits(model, PROMPTS), rtol=0, atol=FP32)
