# SPDX-License-Identifier: Apache-2.0
"""Recipes, shipped shapes, and what a loaded config holds: values, overrides, rules between keys."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from executor.config import REPOSITORY_ROOT, RunConfig
from executor.config_source import apply_overrides
from executor.errors import UserError

RECIPES = sorted((REPOSITORY_ROOT / "configs").glob("*.yaml"))
SHAPES = sorted((REPOSITORY_ROOT / "assets" / "model_configs").glob("*/config.json"))
MINIMAL = {"model_config": {"model_name": "case"}}

# The documented keys, written out: a list derived from the code would not notice a key that was lost.
KEYS = {
    "model_config": """model_name model_path with_ckpt exe_mode dtype platform_version enable_profiler
        enable_cache_compile compile_cache_dir compile_cache_gib unfused shipped_converters enable_weight_nz
        force_eplb enable_thinking rope_scaling
        max_position_embeddings""",
    "data_config": "dataset input_truncated_len chat_template system_prompt",
    "parallel_config": """world_size attn_tp_size dense_tp_size moe_tp_size moe_ep_size embed_tp_size
        lmhead_tp_size sequence_parallel_prefill moe_prefill_strategy moe_decode_strategy
        timeout_seconds hccl_buffer_size hosts""",
    "scheduler_config": """batch_size max_new_tokens max_prefill_tokens max_seq_len block_size
        mem_fraction_static num_blocks decode_buckets""",
    "sampling_config": "do_sample temperature top_k top_p min_p repetition_penalty seed ignore_eos stop",
    "output_config": "dir",
}


def load(*overrides):
    return RunConfig.from_mapping(apply_overrides(MINIMAL, overrides))


def test_the_keys_are_the_documented_ones():
    found = {section: set(values) for section, values in load().to_mapping().items()}
    assert found == {section: set(names.split()) for section, names in KEYS.items()}


# ---- recipes and shapes ----


def test_the_recipes_are_there():
    assert {path.stem for path in RECIPES} >= {"qwen3_moe_tiny", "qwen3_dense_tiny", "qwen3_moe_a3_tp8"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_repeats_no_default(path):
    loaded, defaults = RunConfig.load(path, []).to_mapping(), load().to_mapping()
    for section, values in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        for key, value in values.items():
            assert loaded[section][key] == value
            assert value != defaults[section][key], f"{section}.{key} repeats its default"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_finds_its_shapes_and_they_split(path):
    config = RunConfig.load(path, [])
    if config.model.model_path is not None:
        assert config.model.config_dir == REPOSITORY_ROOT / config.model.model_path
        return
    shapes = json.loads((config.model.config_dir / "config.json").read_text())
    parallel = config.parallel
    assert shapes["num_attention_heads"] % parallel.attn_tp_size == 0
    assert shapes["vocab_size"] % parallel.embed_tp_size == 0
    assert shapes["vocab_size"] % parallel.lmhead_tp_size == 0
    if "num_experts" in shapes:
        assert shapes["moe_intermediate_size"] % parallel.moe_tp_size == 0
        assert shapes["num_experts"] % parallel.moe_ep_size == 0
    else:
        assert shapes["intermediate_size"] % parallel.dense_tp_size == 0


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.parent.name)
def test_shipped_shapes_have_the_parameters_of_their_name(path):
    c = json.loads(path.read_text())
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    attention = 2 * hidden * c["head_dim"] * (c["num_attention_heads"] + c["num_key_value_heads"])
    mlp = 3 * hidden * c.get("moe_intermediate_size", c["intermediate_size"])
    gate = hidden * c.get("num_experts", 0)
    vocab = c["vocab_size"] * hidden * (1 if c["tie_word_embeddings"] else 2)

    def billions(experts):
        return (layers * (attention + gate + experts * mlp) + vocab) / 1e9

    total, *active = (float(n) for n in re.findall(r"(\d+(?:\.\d+)?)B", path.parent.name))
    assert billions(c.get("num_experts", 1)) == pytest.approx(total, rel=0.06)  # 14.8 is called 14
    for size in active:
        assert billions(c["num_experts_per_tok"]) == pytest.approx(size, rel=0.12)  # 3.3 is called 3
    assert c["max_window_layers"] == layers


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.parent.name)
def test_transformers_reads_the_shipped_shapes(path):
    from transformers import AutoConfig

    written, read = json.loads(path.read_text()), AutoConfig.from_pretrained(path.parent)
    for key in ("model_type", "hidden_size", "head_dim", "num_key_value_heads", "tie_word_embeddings"):
        assert getattr(read, key) == written[key]
    assert read.rope_parameters["rope_theta"] == 1000000


# ---- values ----


def test_a_config_is_frozen_hashable_and_round_trips():
    config = load("sampling_config.stop=[a, b]", "model_config.rope_scaling={factor: 2}")
    for target, name in ((config, "model"), (config.model, "dtype"), (config.model.rope_scaling, "factor")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(target, name, None)
    assert config.sampling.stop == ("a", "b")
    again = RunConfig.from_mapping(yaml.safe_load(yaml.safe_dump(config.to_mapping())))
    assert again == config
    assert hash(again) == hash(config)
    assert config != load()


def test_overrides_win_over_the_file_and_the_last_one_wins(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model_config: {model_name: file, dtype: float16}\nscheduler_config:\n")
    batches = ["scheduler_config.batch_size=2", "scheduler_config.batch_size=4"]
    config = RunConfig.load(path, ["model_config.dtype=auto", *batches])
    assert (config.model.model_name, config.model.dtype, config.scheduler.batch_size) == ("file", "auto", 4)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("scheduler_config.batch_size=8", 8),
        ("scheduler_config.mem_fraction_static=1", 1.0),
        ("sampling_config.temperature=0.6", 0.6),
        ("sampling_config.seed=null", None),
        ("sampling_config.seed=", None),
        ("sampling_config.do_sample=false", False),
        ("sampling_config.ignore_eos=yes", True),  # YAML 1.1, as yaml.safe_load reads it
        ("data_config.system_prompt='a=b: c'", "a=b: c"),
        ("data_config.system_prompt=x=y", "x=y"),
        ("model_config.platform_version=950", "950"),
        ("model_config.rope_scaling.factor=4.0", 4.0),
        ("model_config.rope_scaling.factor=4", 4.0),
    ],
)
def test_an_override_is_yaml_and_arrives_with_its_type(override, value):
    node = load(override).to_mapping()
    for key in override.partition("=")[0].split("."):
        node = node[key]
    assert node == value
    assert type(node) is type(value)


def test_a_rope_override_keeps_its_siblings_and_drops_nulls():
    model = load("model_config.rope_scaling={factor: 2.0}", "model_config.rope_scaling.beta_fast=16").model
    assert model.rope_scaling.as_dict() == {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0}
    assert load("model_config.rope_scaling.rope_type=default").model.rope_scaling.as_dict() == {"rope_type": "default"}


def test_derived_paths():
    config = load("data_config.dataset=a/b.txt", "output_config.dir=/x", "model_config.model_path=~/m")
    assert config.data.dataset_path == REPOSITORY_ROOT / "a/b.txt"
    assert config.output.path == Path("/x")
    assert config.model.config_dir == Path("~/m").expanduser()
    assert load().model.config_dir == REPOSITORY_ROOT / "assets/model_configs/case"
    assert load().data.dataset_path is None


# ---- rules between keys ----


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"parallel_config": {"world_size": 8, "attn_tp_size": 3}},
            "parallel_config.attn_tp_size=3 does not divide parallel_config.world_size=8; legal: 1, 2, 4, 8",
        ),
        (
            {"parallel_config": {"world_size": 6, "dense_tp_size": 4}},
            "parallel_config.dense_tp_size=4 does not divide parallel_config.world_size=6; legal: 1, 2, 3, 6",
        ),
        (
            {"parallel_config": {"world_size": 4, "moe_tp_size": 4, "hosts": ["a", "b", "c"]}},
            "parallel_config.hosts has 3 entries, which does not divide parallel_config.world_size=4; "
            "machines run equally many ranks",
        ),
        (
            {
                "parallel_config": {"world_size": 4, "moe_tp_size": 4, "attn_tp_size": 2},
                "scheduler_config": {"batch_size": 3},
            },
            "scheduler_config.batch_size=3 must be a multiple of attn_dp_size=2 "
            "(parallel_config.world_size=4 / attn_tp_size=2)",
        ),
        (
            {"model_config": {"model_name": "Qwen/Qwen3-8B"}},
            'model_config.model_name="Qwen/Qwen3-8B" must be a directory name, without slashes; '
            "a location belongs in model_config.model_path",
        ),
        (
            {"model_config": {"model_name": "case", "dtype": "float64", "platform_version": "a2"}},
            "model_config.dtype=float64 runs on a CPU only, not on model_config.platform_version=a2; "
            "use dtype bfloat16 or float16",
        ),
        (
            {"scheduler_config": {"max_seq_len": 256}},
            "scheduler_config.max_new_tokens=256 leaves no room for a prompt in "
            "scheduler_config.max_seq_len=256; max_seq_len counts prompt and answer",
        ),
        (
            {"model_config": {"model_name": "case", "rope_scaling": {"beta_fast": 16}}},
            "missing key `model_config.rope_scaling.factor`: model_config.rope_scaling.rope_type=yarn needs "
            "a number >= 1",
        ),
    ],
)
def test_a_rule_between_keys_names_both(sections, text):
    with pytest.raises(UserError) as caught:
        RunConfig.from_mapping({**MINIMAL, **sections})
    assert str(caught.value) == text


@settings(deadline=None, max_examples=60)
@given(
    world=st.integers(1, 12),
    sizes=st.lists(st.sampled_from([1, 1, 2, 3, 4, 5]), min_size=6, max_size=6),
    batch=st.integers(1, 12),
)
def test_a_layout_is_accepted_exactly_when_the_rules_hold(world, sizes, batch):
    names = KEYS["parallel_config"].split()[1:7]
    split = {"world_size": world, **dict(zip(names, sizes))}
    # brute force: the ranks fall into whole groups, and every attention replica gets equally many sequences
    whole = [any(split[name] * groups == world for groups in range(1, 13)) for name in names]
    replicas = world // split["attn_tp_size"]
    even = any(replicas * each == batch for each in range(1, 13))
    mapping = {**MINIMAL, "parallel_config": split, "scheduler_config": {"batch_size": batch}}
    if all(whole) and even:
        assert RunConfig.from_mapping(mapping).parallel.attn_dp_size == replicas
    else:
        with pytest.raises(UserError, match=r"does not divide|must be a multiple"):
            RunConfig.from_mapping(mapping)
