# SPDX-License-Identifier: Apache-2.0
"""What the plan refuses, and how it counts memory."""

import dataclasses
import resource

import pytest

from executor.config import RunConfig
from executor.errors import UserError
from executor.memory import feed_forward_rows, plan_blocks, reference_workspace_bytes, workspace_bytes
from executor.model_config import read_config_json
from executor.model_runner import plan_run
from executor.moe.strategy import choose
from executor.parallel.groups import planned_groups
from executor.platform.features import NPU


def plan(*overrides, recipe="qwen3_moe_a3_tp8"):
    return plan_run(RunConfig.load(f"configs/{recipe}.yaml", overrides))[1]


def test_a_dense_model_has_no_rule_about_experts():
    assert plan(recipe="qwen3_dense_8b_a3_tp2").blueprint.groups.moe_tp.size == 1


def test_cache_holds_at_least_one_sequence_of_full_length_or_the_plan_refuses():
    tight = plan().memory
    per_sequence = -(-4352 // 128)
    assert tight.num_blocks == per_sequence + 1
    capacity = NPU["a3"].memory_bytes
    share = tight.total / capacity
    assert plan(f"scheduler_config.mem_fraction_static={share + 1e-6}").memory == dataclasses.replace(
        tight, budget=int(capacity * (share + 1e-6))
    )
    with pytest.raises(UserError, match=r"out of memory, predicted: 56\.\d+ GiB per rank \(weights 54\.9"):
        plan(f"scheduler_config.mem_fraction_static={share - 1e-4}")


def test_blocks_shrink_with_memory_but_not_below_one_sequence():
    parts, cache = {"weights": 100, "logits": 5, "workspace": 3, "runtime": 2}, dict(kv_block=10, wanted=50, smallest=8)
    assert plan_blocks(parts, **cache, budget=1000).num_blocks == 50
    assert plan_blocks(parts, **cache, budget=310).num_blocks == 20
    assert plan_blocks(parts, **cache, budget=150).num_blocks == 8


def test_what_a_card_has_free_limits_the_blocks_but_never_below_what_is_needed():
    parts = {"weights": 100, "runtime": 50}  # what the runtime holds is not free any more
    planned = plan_blocks(parts, kv_block=10, budget=1000, wanted=50, smallest=8)
    assert planned.within(10_000) == planned
    assert planned.within(309).num_blocks == 20
    with pytest.raises(UserError, match=r"out of memory: .* are free, the run needs"):
        planned.within(179)


def test_workspace_grows_with_tokens_and_shrinks_with_ranks():
    eight = plan().blueprint
    one = dataclasses.replace(eight, groups=planned_groups())
    assert workspace_bytes(one, "prefill", 2000) == 2 * workspace_bytes(one, "prefill", 1000)
    assert workspace_bytes(eight, "prefill", 1000) < workspace_bytes(one, "prefill", 1000)
    # T rows of K experts in and out, gate|up and product, and two hidden states, in bf16
    assert workspace_bytes(eight, "decode", 1) == 2 * (2 * 4096 + 8 * (2 * 4096 + 3 * 1536 // 8))
    # scores of 128 queries and their softmax in float32, over 64 heads
    long = dataclasses.replace(one, max_positions=10**6)
    assert reference_workspace_bytes(long, "prefill", 128) == 2 * 4 * 128 * 64 * 10**6


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ep_allgather", 100 * 16 * 8),  # every rank routes the tokens of all, and the operator has room for every copy
        ("ep_double_routing", 100 * 8),
        ("ep_mc2", 100 * 16 * 8),  # room for all tokens of all ranks, each at 8 of the 8 local experts
    ],
)
def test_rows_at_the_experts_of_one_rank(strategy, expected):
    blueprint = dataclasses.replace(plan(recipe="qwen3_moe_a3_ep16").blueprint, moe_strategies={"decode": strategy})
    assert feed_forward_rows(blueprint, "decode", 100)[1] == expected


@pytest.mark.parametrize(
    ("phase", "ep", "sharded", "top_k", "mc2", "expected"),
    [
        ("prefill", 1, False, 8, True, "tp"),
        ("decode", 1, True, 8, True, "tp"),
        ("decode", 8, False, 8, True, "ep_local"),
        ("prefill", 8, False, 8, True, "ep_local"),
        ("decode", 8, True, 8, True, "ep_mc2"),
        ("decode", 8, True, 8, False, "ep_allgather"),
        ("prefill", 4, True, 8, True, "ep_allgather"),
        ("prefill", 16, True, 8, True, "ep_double_routing"),
    ],
)
def test_moe_strategy_of_a_phase(phase, ep, sharded, top_k, mc2, expected):
    facts = dict(sharded=sharded, moe_ep=ep, top_k=top_k, mc2_refusal=None if mc2 else "there are none", static=False)
    choice = choose(phase, **facts, wanted=None)
    assert choice.strategy == expected
    assert choice.reason
    assert choose(phase, **facts, wanted=expected).strategy == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("moe_prefill_strategy=ep_allgather", r"tokens are replicated in prefill, moe_ep_size=1; legal: tp$"),
        ("moe_decode_strategy=ep_local", r"moe_decode_strategy=ep_local cannot work .* legal: tp$"),
        ("attn_tp_size=3", r"attn_tp_size=3 does not divide parallel_config.world_size=8; legal: 1, 2, 4, 8"),
        ("moe_ep_size=2", r"moe_tp_size=8 \* moe_ep_size=2 must equal world_size=8; legal .*: 8 \* 1, 4 \* 2, 2 \* 4"),
    ],
)
def test_layouts_that_cannot_work_are_refused_with_the_legal_ones(setting, message):
    with pytest.raises(UserError, match=message):
        plan(f"parallel_config.{setting}")


def test_sizes_that_do_not_fit_the_model_are_refused_with_those_that_do():
    sizes = [f"parallel_config.{s}" for s in ("world_size=24", "attn_tp_size=24", "moe_tp_size=24")]
    with pytest.raises(
        UserError,
        match=r"attn_tp_size=24 does not fit num_attention_heads=64 and num_key_value_heads=4 of this model; "
        r"legal with world_size=24: 1, 2, 4, 8$",
    ):
        plan(*sizes)


def test_a_compiled_decode_step_has_static_shapes():
    """The recipe asks for a graph; routing twice has shapes that depend on the router."""
    twice = "parallel_config.moe_decode_strategy=ep_double_routing"
    with pytest.raises(UserError, match=r"ep_double_routing cannot .* shapes static; legal: ep_mc2, ep_allgather$"):
        plan(twice, recipe="qwen3_moe_a3_ep16")
    eager = plan(twice, "model_config.exe_mode=eager", recipe="qwen3_moe_a3_ep16")
    assert eager.blueprint.moe_strategies["decode"] == "ep_double_routing"


def test_mc2_is_refused_with_the_limit_that_it_breaks():
    """The widest step of a rank may be larger than the kernels take; asked for by name, that is an error."""
    wide = ("scheduler_config.batch_size=16384", "scheduler_config.max_prefill_tokens=2048")
    chosen = plan(*wide, "scheduler_config.num_blocks=100", recipe="qwen3_moe_a3_ep16")
    assert chosen.blueprint.moe_strategies["decode"] == "ep_allgather"
    with pytest.raises(UserError, match=r"moe_decode_strategy=ep_mc2 cannot work in this layout \(.*512"):
        plan(*wide, "parallel_config.moe_decode_strategy=ep_mc2", recipe="qwen3_moe_a3_ep16")


def test_groups_of_the_same_ranks_share_one_communicator_but_mc2_has_its_own():
    def of(recipe, *overrides):
        return plan(*overrides, recipe=recipe).memory.parts["communicators"]

    one = 2 * 200 << 20  # HCCL's default, to send and to receive
    assert of("qwen3_dense_8b_a3_tp1") == 0
    assert of("qwen3_moe_a3_tp8") == one  # attention, experts, embedding and head: the same eight ranks
    assert of("qwen3_moe_a3_tp8", "parallel_config.hccl_buffer_size=100") == one // 2
    both = of("qwen3_moe_a3_ep16")
    small = plan(recipe="qwen3_moe_a3_ep16").buffer_mib["mc2"]
    assert both == one + (2 * small << 20)


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
    asked = plan("model_config.enable_weight_nz=true")
    assert [d.value for d in asked.decisions if d.what == "not built yet"] == ["model_config.enable_weight_nz=true"]


@pytest.mark.parametrize(("platform", "mode"), [("cpu", "ge_graph"), ("cpu", "npugraph_ex"), ("a3", "inductor")])
def test_a_mode_that_the_platform_does_not_have_is_refused(platform, mode):
    with pytest.raises(UserError, match=f"exe_mode={mode} does not run on {platform}; one of eager, "):
        plan(f"model_config.platform_version={platform}", f"model_config.exe_mode={mode}")


def test_shapes_are_read_from_the_shipped_config():
    raw = read_config_json(RunConfig.load("configs/qwen3_moe_a3_tp8.yaml").model.config_dir / "config.json")
    assert plan().config.num_hidden_layers == raw["num_hidden_layers"] == 94
