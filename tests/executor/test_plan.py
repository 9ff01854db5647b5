# SPDX-License-Identifier: Apache-2.0
"""What the plan refuses, and how it counts memory."""

import dataclasses
import resource

import pytest

from executor.config import RunConfig
from executor.errors import UserError
from executor.memory import plan_blocks, reference_workspace_bytes, workspace_bytes
from executor.model_config import read_config_json
from executor.model_runner import plan_run
from executor.moe.strategy import choose
from executor.parallel.groups import planned_groups
from executor.platform.features import GIB


def plan(*overrides, recipe="qwen3_moe_a3_tp8"):
    return plan_run(RunConfig.load(f"configs/{recipe}.yaml", overrides))[1]


@pytest.mark.parametrize("name", ["dense_tp", "embed_tp", "lmhead_tp"])
def test_sums_over_ranks_with_different_tokens_are_refused(name):
    """attn_tp 2 of 8 ranks: four groups with tokens of their own, which no all-reduce may add up."""
    sizes = {"attn_tp": 2, "dense_tp": 2, "embed_tp": 2, "lmhead_tp": 2}
    legal = [f"parallel_config.{key}_size={size}" for key, size in sizes.items()]
    legal += [
        "scheduler_config.mem_fraction_static=1.0",
        "parallel_config.moe_tp_size=1",
        "parallel_config.moe_ep_size=8",
        "scheduler_config.batch_size=8",
    ]
    assert plan(*legal).blueprint.groups.attn_dp.size == 4
    with pytest.raises(UserError, match=rf"{name}_size=4 reaches over attn_dp_size=4 .* at most attn_tp_size=2"):
        plan(*legal, f"parallel_config.{name}_size=4")
    with pytest.raises(UserError, match=r"moe_tp_size=8 reaches over attn_dp_size=4"):
        plan(*legal, "parallel_config.moe_tp_size=8", "parallel_config.moe_ep_size=1")


def test_experts_are_dealt_out_once():
    with pytest.raises(UserError, match=r"moe_tp_size=8 \* moe_ep_size=2 must equal .*world_size=8; .* moe_tp_size=4$"):
        plan("parallel_config.moe_ep_size=2")
    assert plan(recipe="qwen3_dense_8b_a3_tp2").blueprint.groups.moe_tp.size == 1  # a dense model has no such rule


def test_cache_holds_at_least_one_sequence_of_full_length_or_the_plan_refuses():
    tight = plan().memory
    per_sequence = -(-4352 // 128)
    assert tight.num_blocks == per_sequence + 1
    share = tight.total / (64 * GIB)
    assert plan(f"scheduler_config.mem_fraction_static={share + 1e-6}").memory == dataclasses.replace(
        tight, budget=int(64 * GIB * (share + 1e-6))
    )
    with pytest.raises(UserError, match=r"out of memory, predicted: 55\.\d+ GiB per rank \(weights 54\.9"):
        plan(f"scheduler_config.mem_fraction_static={share - 1e-4}")


def test_blocks_shrink_with_memory_but_not_below_one_sequence():
    fixed = dict(weights=100, kv_block=10, logits=5, workspace=5, wanted=50, smallest=8)
    assert plan_blocks(**fixed, budget=1000).num_blocks == 50
    assert plan_blocks(**fixed, budget=310).num_blocks == 20
    assert plan_blocks(**fixed, budget=150).num_blocks == 8


def test_workspace_grows_with_tokens_and_shrinks_with_ranks():
    config = plan().config
    one, eight = planned_groups(), planned_groups(attn_tp=8, moe_tp=8, dense_tp=8)
    assert workspace_bytes(config, one, 2000, 2) == 2 * workspace_bytes(config, one, 1000, 2)
    assert workspace_bytes(config, eight, 1000, 2) < workspace_bytes(config, one, 1000, 2)
    # T rows of K experts in and out, gate|up and product, and two hidden states, in bf16
    assert workspace_bytes(config, eight, 1, 2) == 2 * (2 * 4096 + 8 * (2 * 4096 + 3 * 1536 // 8))
    # scores of 128 queries and their softmax in float32, over 64 heads
    assert reference_workspace_bytes(config, one, 128, 10**6) == 2 * 4 * 128 * 64 * 10**6


@pytest.mark.parametrize(
    ("phase", "ep", "dp", "top_k", "mc2", "expected"),
    [
        ("prefill", 1, 1, 8, True, "tp"),
        ("decode", 1, 1, 8, True, "tp"),
        ("decode", 8, 1, 8, True, "ep_local"),
        ("prefill", 8, 1, 8, True, "ep_local"),
        ("decode", 8, 4, 8, True, "ep_mc2"),
        ("decode", 8, 4, 8, False, "ep_allgather"),
        ("prefill", 4, 2, 8, True, "ep_allgather"),
        ("prefill", 16, 16, 8, True, "ep_double_routing"),
    ],
)
def test_moe_strategy_of_a_phase(phase, ep, dp, top_k, mc2, expected):
    choice = choose(phase, moe_ep=ep, attn_dp=dp, top_k=top_k, has_mc2=mc2)
    assert choice.strategy == expected
    assert choice.reason


def test_a_plan_of_a_huge_context_allocates_nothing():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="out of memory, predicted"):
        plan("model_config.max_position_embeddings=2000000000", "scheduler_config.max_seq_len=null")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    "setting", ["beta_fast=0.5", "original_max_position_embeddings=1", "beta_slow=1.0e+300", "beta_fast=1.0e+308"]
)
def test_yarn_without_a_range_to_stretch_is_refused(setting):
    """transformers computes something all the same; here a wrong table is an error, not other tokens."""
    yarn = [f"model_config.rope_scaling.{s}" for s in ("factor=4.0", "original_max_position_embeddings=32768", setting)]
    with pytest.raises(UserError, match="yarn settings leave no range"):
        plan(*yarn)


def test_a_pool_of_scratch_blocks_alone_is_refused():
    with pytest.raises(UserError, match=r"num_blocks=1 leaves no block for a sequence: .* set at least 2"):
        plan("scheduler_config.num_blocks=1")


def test_not_everything_that_is_planned_can_run():
    plans = (plan(), plan(recipe="qwen3_moe_a3_ep16"))
    tp8, ep16 = ([d.value for d in p.decisions if d.what == "not built yet"] for p in plans)
    assert tp8 == ["model_config.exe_mode=ge_graph"]
    assert ep16[0].startswith("attention data parallelism, parallel_config.attn_tp_size=1 of 16 ranks")


def test_shapes_are_read_from_the_shipped_config():
    raw = read_config_json(RunConfig.load("configs/qwen3_moe_a3_tp8.yaml").model.config_dir / "config.json")
    assert plan().config.num_hidden_layers == raw["num_hidden_layers"] == 94
