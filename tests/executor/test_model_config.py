# SPDX-License-Identifier: Apache-2.0
"""``config.json`` in all its spellings, and the one line that refuses what is wrong or not supported."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from executor.errors import UserError
from executor.model_config import RopeConfig, read_config_json, with_overrides
from executor.model_runner import runner_class
from tests.models import checkpoints as ck

DENSE = dict(
    model_type="qwen3",
    **ck.SMALL,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    attention_bias=False,
    tie_word_embeddings=False,
    rope_theta=1e6,
    torch_dtype="bfloat16",
)
MOE = {**DENSE, **ck.EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 1}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}


def parse(base, **changes):
    """ModelConfig of ``base`` with changes; ``...`` leaves a key out."""
    raw = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    before = copy.deepcopy(raw)
    try:
        return runner_class(raw["model_type"]).parse_config(raw)
    finally:
        assert raw == before  # what was read from the file is the caller's


def refused(base, **changes):
    with pytest.raises(UserError) as caught:
        parse(base, **changes)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


def test_shapes_are_read():
    config = parse(DENSE)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (96, 48, 80)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (3, 4, 2)
    assert (config.head_dim, config.rms_norm_eps, config.max_position_embeddings) == (16, 1e-6, 1024)
    assert (config.attention_bias, config.tie_word_embeddings, config.dtype) == (False, False, "bfloat16")
    assert config.rope == RopeConfig(rope_theta=1e6)
    assert config.moe is None
    assert config.moe_layers == ()
    moe = parse(MOE)
    assert (moe.moe.num_experts, moe.moe.num_experts_per_tok, moe.moe.moe_intermediate_size) == (6, 3, 24)
    assert moe.moe.norm_topk_prob is True
    assert moe.moe_layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"num_experts": 12}, 12),
        ({"num_experts": ..., "num_local_experts": 12}, 12),
        ({"num_experts": 6, "num_local_experts": 12}, 12),
    ],
)
def test_spellings_of_the_number_of_experts(spelling, expected):
    """Where both are given and differ, transformers decides which counts."""
    assert parse(MOE, **spelling).moe.num_experts == expected
    raw = {key: value for key, value in {**MOE, **spelling}.items() if value is not ...}
    assert AutoConfig.for_model(**raw).num_experts == expected


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": [0, 2]}, (1,)),
        ({"mlp_only_layers": None}, (0, 1, 2)),
        ({"num_experts": 0}, ()),
        ({"decoder_sparse_step": 4}, ()),
    ],
)
def test_sparse_layers(changes, layers):
    assert parse(MOE, **changes).moe_layers == layers


@pytest.mark.parametrize(
    ("changes", "head_dim"),
    [
        (dict(model_type="qwen3_moe", head_dim=...), 12),  # hidden_size / heads
        (dict(model_type="qwen3_moe", head_dim=None), 12),
        (dict(model_type="qwen3", head_dim=...), 128),  # the default of Qwen3Config
        (dict(model_type="qwen3", head_dim=32), 32),
    ],
)
def test_head_dim(changes, head_dim):
    assert parse(MOE, **changes).head_dim == head_dim


@pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([7, 9], (7, 9)), ([], ()), (None, ()), (..., ()), (0, (0,))])
@pytest.mark.parametrize("base", [DENSE, MOE], ids=["dense", "moe"])
def test_eos_token_id(base, eos, expected):
    assert parse(base, eos_token_id=eos).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, "bfloat16"), ({"torch_dtype": ...}, None), ({"torch_dtype": ..., "dtype": "float16"}, "float16")],
)
def test_dtype_has_two_spellings(changes, dtype):
    assert parse(DENSE, **changes).dtype == dtype


ROPE_SPELLINGS = [
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}},
    {"rope_theta": ..., "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    {"rope_theta": ..., "rope_parameters": {"type": "yarn", "rope_theta": 1e6, **YARN}},
    {"rope_theta": ..., "rope_scaling": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
]


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS)
@pytest.mark.parametrize("base", [DENSE, MOE], ids=["dense", "moe"])
def test_spellings_of_rope_settings(base, spelling):
    config = parse(base, **spelling)
    assert config.rope == RopeConfig(rope_type="yarn", rope_theta=1e6, **YARN)
    assert config.context_length == 1024  # 4 * 256, which is also max_position_embeddings
    assert parse(base, **spelling, max_position_embeddings=512).context_length == 1024


def test_settings_of_yarn_are_kept():
    given_ = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False}
    assert parse(DENSE, rope_scaling={"rope_type": "yarn", **given_}).rope == RopeConfig(
        rope_type="yarn", rope_theta=1e6, **given_
    )


def test_no_rope_settings_mean_the_default():
    for changes in ({"rope_scaling": None}, {"rope_scaling": {"rope_type": "default"}}, {"rope_scaling": {}}):
        config = parse(DENSE, **changes)
        assert config.rope == RopeConfig(rope_theta=1e6)
        assert config.context_length == 1024


def test_yarn_without_original_length_takes_max_position_embeddings():
    rope = parse(DENSE, rope_scaling={"rope_type": "yarn", "factor": 2.0}).rope
    assert rope.original_max_position_embeddings == 1024
    assert parse(DENSE, rope_scaling={"rope_type": "yarn", "factor": 2.0}).context_length == 2048


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS[:3])
def test_overrides_replace_every_spelling(spelling):
    raw = {key: value for key, value in {**DENSE, **spelling}.items() if value is not ...}
    before = copy.deepcopy(raw)
    wanted = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    config = runner_class("qwen3").parse_config(with_overrides(raw, wanted, 2048))
    assert config.rope == RopeConfig(rope_theta=1e6, **wanted)
    assert config.max_position_embeddings == 2048
    assert raw == before
    assert with_overrides(raw, None, None) == raw


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", sorted({*ROPE_INIT_FUNCTIONS, "mrope", "YaRN", ""} - {"default", "yarn"}))
def test_unknown_rope_types(kind, section, type_key):
    message = refused(DENSE, **{section: {type_key: kind, "factor": 2.0}})
    assert message == f"config.json: {section}.{type_key}={kind!r} is not supported; one of default, yarn"


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ("yarn", "rope_scaling='yarn' must be an object"),
        ([1], "rope_scaling=[1] must be an object"),
        ({"rope_type": "yarn"}, "rope_scaling.factor=None must be a number >= 1"),
        ({"type": "yarn", "original_max_position_embeddings": 64}, "rope_scaling.factor=None must be a number >= 1"),
        ({"rope_type": "yarn", "factor": 0.5}, "rope_scaling.factor=0.5 must be a number >= 1"),
        ({"rope_type": "yarn", "factor": "4"}, "rope_scaling.factor='4' must be a positive number"),
        ({"rope_type": "yarn", "factor": True}, "rope_scaling.factor=True must be a positive number"),
        ({"rope_type": "yarn", "factor": float("inf")}, "rope_scaling.factor=inf must be a positive number"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": "x"}, "rope_scaling.beta_fast='x' must be a positive number"),
        (
            {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": -1},
            "rope_scaling.original_max_position_embeddings=-1 must be a positive number",
        ),
        ({"rope_type": "yarn", **YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ],
)
def test_bad_rope_settings(rope, words, capsys):
    assert words in refused(DENSE, rope_scaling=rope)
    assert capsys.readouterr().err == ""  # transformers does not add lines of its own


REFUSED = {
    "sliding window": ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
    "hidden_act": ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only silu"),
    "quantization": (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config (fp8) is not supported yet; use a BF16 checkpoint",
    ),
    "quantization, odd": ({"quantization_config": "int8"}, "quantization_config (int8) is not supported"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
    "no kv heads": ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be an integer >= 1"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads=0 must be an integer >= 1"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be an integer >= 1"),
    "negative width": ({"hidden_size": -48}, "hidden_size=-48 must be an integer >= 1"),
    "no context": ({"max_position_embeddings": 0}, "max_position_embeddings=0 must be an integer >= 1"),
    "text for a number": ({"hidden_size": "48"}, "'hidden_size' expected int, got str"),
    "fraction": ({"vocab_size": 1.5}, "'vocab_size' expected int, got float"),
    "odd head_dim": ({"head_dim": 15}, "head_dim`=15"),
    "rope_theta": ({"rope_theta": 0}, "rope_theta=0 must be a positive number"),
    "eos": ({"eos_token_id": "<|im_end|>"}, "'eos_token_id'"),
    "dtype": ({"torch_dtype": "brainfloat"}, "brainfloat"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("base", [DENSE, MOE], ids=["dense", "moe"])
def test_refused(base, name):
    changes, words = REFUSED[name]
    assert words in refused(base, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be between 1 and num_experts=6"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be between 1 and num_experts=6"),
        ({"num_experts": -1}, "num_experts=-1 must be an integer >= 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size=0 must be at least 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be at least 1"),
    ],
)
def test_refused_experts(changes, words):
    assert words in refused(MOE, **changes)


@pytest.mark.parametrize("base", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_missing_keys(base, key):
    assert refused(base, **{key: ...}) == (
        f"config.json: missing key {key}; use the config.json that came with the weights"
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", None, 3, ""])
def test_unsupported_model_types(model_type):
    with pytest.raises(UserError, match=r"^config\.json: model_type=.* is not supported; one of qwen3, qwen3_moe$"):
        runner_class(model_type)


VALUES = (
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
)


@settings(deadline=None, max_examples=60)
@given(key=st.sampled_from(sorted({*MOE, "rope_scaling", "rope_parameters", "quantization_config"})), value=VALUES)
def test_any_value_is_read_or_refused_in_one_line(key, value):
    raw, message = {**MOE, key: value}, "config.json: "
    try:
        runner_class(raw["model_type"] if isinstance(raw["model_type"], str) else None).parse_config(raw)
    except UserError as error:
        message = str(error)
    assert message.startswith("config.json: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100000, "not JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b'"qwen3"', "expected a JSON object, found str"),
    ],
)
def test_unreadable_files(content, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_config_json(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {words}")
    assert message.endswith("download it again")
    assert "\n" not in message


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(UserError, match="no such file; a model directory holds"):
        read_config_json(tmp_path / "config.json")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        read_config_json(tmp_path / "config.json")
    (tmp_path / "good.json").write_text(json.dumps(DENSE))
    assert read_config_json(tmp_path / "good.json") == DENSE


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("head_dim", -16, "head_dim=-16"),
        ("head_dim", 7, "`head_dim`=7"),  # transformers sees this one first
        ("rms_norm_eps", -1.0, "rms_norm_eps=-1.0"),
        ("rms_norm_eps", 0.0, "rms_norm_eps=0.0"),
    ],
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_values_that_would_give_nonsense_are_refused(kind, key, value, word):
    raw = {"model_type": kind, **ck.SMALL, **(ck.EXPERTS if kind == "qwen3_moe" else {}), key: value}
    with pytest.raises(UserError, match=rf"^config\.json: .*{word}"):
        runner_class(kind).parse_config(raw)
