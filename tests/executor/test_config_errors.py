# SPDX-License-Identifier: Apache-2.0
"""A wrong key or value stops the run with one line that names it, its constraint and, if any, the fix."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from executor.config import RunConfig
from executor.config_source import apply_overrides
from executor.errors import UserError

MINIMAL = {"model_config": {"model_name": "case"}}
SECTIONS = {name: list(keys) for name, keys in RunConfig.from_mapping(MINIMAL).to_mapping().items()}


def message(mapping):
    with pytest.raises(UserError) as caught:
        RunConfig.from_mapping(mapping)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("parallel_config.attn_tp=3", "did you mean `attn_tp_size`?"),
        ("parallel_config.attn=3", "did you mean `attn_tp_size`?"),
        ("parallel_config.moe_p_size=1", "did you mean `moe_tp_size` or `moe_ep_size`?"),
        ("model_config.batch_size=1", "did you mean `scheduler_config.batch_size`?"),
        ("model_config.rope_scaling.factr=4", "did you mean `factor`?"),
        ("output_config.qqq=1", "legal: dir"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one(override, hint):
    found = message(apply_overrides(MINIMAL, [override]))
    assert found == f"unknown key `{override.partition('=')[0]}`; {hint}"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("paralel_config", "did you mean `parallel_config`?"),
        ("model", "did you mean `model_config`?"),  # the Python attribute is not a second spelling of the key
        ("batch_size", "did you mean `scheduler_config.batch_size`?"),
        (7, f"legal: {', '.join(SECTIONS)}"),
        (None, f"legal: {', '.join(SECTIONS)}"),
    ],
)
def test_an_unknown_section_gets_the_nearest_one(key, hint):
    assert message({**MINIMAL, key: {}}) == f"unknown key `{key}`; {hint}"


@pytest.mark.parametrize(
    ("override", "shown", "expected"),
    [
        ("parallel_config.world_size='8'", '"8"', "integer >= 1 and <= 65536; write 8 without quotes"),
        ("parallel_config.world_size='8.5'", '"8.5"', "integer >= 1 and <= 65536"),
        ("parallel_config.world_size=0", "0", "integer >= 1 and <= 65536"),
        ("parallel_config.world_size=1.0", "1.0", "integer >= 1 and <= 65536"),
        ("scheduler_config.batch_size=true", "true", "integer >= 1 and <= 2147483647"),
        ("scheduler_config.batch_size=null", "null", "integer >= 1 and <= 2147483647"),
        ("scheduler_config.block_size=24", "24", "integer >= 16 and <= 1024 and a multiple of 16"),
        ("scheduler_config.mem_fraction_static=0", "0", "number > 0 and <= 1"),
        ("scheduler_config.mem_fraction_static=true", "true", "number > 0 and <= 1"),
        ("sampling_config.temperature=.nan", "NaN", "number >= 0 or null"),
        ("sampling_config.temperature=.inf", "Infinity", "number >= 0 or null"),
        (
            "sampling_config.min_p=1e-6",
            '"1e-6"',
            "number >= 0 and <= 1 or null; write 1.0e-06 without quotes",
        ),
        ("sampling_config.do_sample=maybe", '"maybe"', "true or false or null"),
        ("sampling_config.stop=x", '"x"', "list of non-empty text"),
        ("model_config.with_ckpt=1", "1", "true or false"),
        ("model_config.with_ckpt='true'", '"true"', "true or false"),
        ("model_config.model_name=8", "8", "non-empty text; put it in quotes"),
        ("model_config.model_name=''", '""', "non-empty text"),
        ("model_config.exe_mode=turbo", '"turbo"', "one of eager, inductor, ge_graph, npugraph_ex"),
        ("model_config.platform_version=910", "910", "one of auto, cpu, a2, a3, 950"),
        ("model_config.platform_version=950.0", "950.0", "one of auto, cpu, a2, a3, 950"),
        ("model_config.rope_scaling=4", "4", "mapping of keys or null"),
        ("model_config.rope_scaling.factor=0.5", "0.5", "number >= 1 and <= 10000 or null"),
        ("output_config.dir=2024-01-01", "datetime.date(2024, 1, 1)", "non-empty text; put it in quotes"),
    ],
)
def test_a_wrong_value_is_shown_with_its_constraint(override, shown, expected):
    found = message(apply_overrides(MINIMAL, [override]))
    assert found == f"{override.partition('=')[0]}={shown}: expected {expected}"


def test_a_wrong_list_element_is_named_by_its_place():
    for stop, shown in ((["a", 1], "[1]=1"), ([""], '[0]=""')):
        found = message({**MINIMAL, "sampling_config": {"stop": stop}})
        assert found == f"sampling_config.stop{shown}: expected list of non-empty text"


def test_missing_keys_and_empty_sections():
    assert message({}) == "missing key `model_config`: expected mapping of keys"
    assert message({"model_config": {}}) == "missing key `model_config.model_name`: expected non-empty text"
    expected = "data_config=null: expected mapping of keys; remove the line or put keys under it"
    assert message({**MINIMAL, "data_config": None}) == expected


def test_of_several_errors_the_first_is_told_and_the_rest_counted():
    two = {"model_name": "case", "dtype": "int8", "exe_mode": "x"}
    found = message({"model_config": two})
    assert found.startswith('model_config.exe_mode="x": expected one of eager, ')
    assert found.endswith(" (and 1 more error)")
    # a typo goes first, as it explains the missing key
    found = message({"model_config": {"model_nam": "x", "dtype": "int8"}})
    assert found == "unknown key `model_config.model_nam`; did you mean `model_name`? (and 2 more errors)"


@st.composite
def one_letter_typos(draw):
    """A section, one of its keys, and that key with a letter dropped, added, or swapped with the next one."""
    section = draw(st.sampled_from(list(SECTIONS)))
    key = draw(st.sampled_from(SECTIONS[section]))
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_"))
    swapped = key[:at] + key[at : at + 2][::-1] + key[at + 2 :]
    typo = draw(st.sampled_from([key[:at] + key[at + 1 :], key[:at] + letter + key[at:], swapped]))
    assume(not any(typo in keys for keys in SECTIONS.values()))
    return section, key, typo


@settings(deadline=None, max_examples=60)
@given(one_letter_typos())
def test_a_one_letter_typo_is_answered_with_the_original(case):
    section, key, typo = case
    found = message({**MINIMAL, section: {**MINIMAL.get(section, {}), typo: 1}})
    head, _, tail = found.partition("; did you mean ")
    assert head == f"unknown key `{section}.{typo}`"
    assert f"`{key}`" in tail  # when two keys are equally near, both are offered


any_yaml = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=5,
)
places = [*SECTIONS, *(f"{name}.{key}" for name, keys in SECTIONS.items() for key in keys)]


@settings(deadline=None, max_examples=60)
@given(place=st.sampled_from([*places, "model_config.rope_scaling.factor"]), value=any_yaml)
def test_any_value_loads_or_is_refused_in_one_printable_line(place, value):
    mapping = {"model_config": {"model_name": "case"}}
    *sections, key = place.split(".")
    node = mapping
    for section in sections:
        node = node.setdefault(section, {})
    node[key] = value
    try:
        config = RunConfig.from_mapping(mapping)
    except UserError as error:
        refusal = str(error)
    else:
        assert RunConfig.from_mapping(config.to_mapping()) == config
        return
    assert refusal.isprintable()
    assert place in refusal


def test_a_value_that_contains_itself_is_refused_like_any_other():
    loop = []
    loop.append(loop)
    expected = "sampling_config.stop[0]=[[...]]: expected list of non-empty text"
    assert message({**MINIMAL, "sampling_config": {"stop": loop}}) == expected
