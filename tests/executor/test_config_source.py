# SPDX-License-Identifier: Apache-2.0
"""A file that is no mapping, and an override that is no ``section.key=value``, are refused in one line."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.config import RunConfig
from executor.config_source import apply_overrides
from executor.errors import UserError


def message(path):
    with pytest.raises(UserError) as caught:
        RunConfig.load(path, [])
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", ": the file is empty; at least model_config.model_name must be given"),
        (b"# only a comment\n", ": the file is empty; at least model_config.model_name must be given"),
        (b"- a\n- b\n", ": the top level must be a mapping of sections (`model_config:`), not list"),
        (b"just words\n", ": the top level must be a mapping of sections (`model_config:`), not str"),
        (b"a: b\xff\n", ": not UTF-8 at byte 4; save the file as UTF-8"),
        (b"a: [1\nb: 2\n", ", line 2, column 2: not valid YAML: expected ',' or ']', but got ':'"),
        (b"a: b: c\n", ", line 1, column 5: not valid YAML: mapping values are not allowed here"),
        (b"a: 1\n---\nb: 2\n", ", line 2, column 1: not valid YAML: but found another document"),
        (
            b"s:\n  k: a\n  k: b\n",
            ", line 3, column 3: not valid YAML: duplicate key `k`; remove one of the two",
        ),
        (
            b"s: {}\nt: {}\ns: {}\n",
            ", line 3, column 1: not valid YAML: duplicate key `s`; remove one of the two",
        ),
        (b"a: 2024-13-45\n", ": not valid YAML: month must be in 1..12"),
    ],
)
def test_a_bad_file_is_named_with_the_place(tmp_path, content, text):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert message(path).startswith(f"{path}{text}")


# PyYAML answers these with exceptions of five different kinds, in its own words.
@pytest.mark.parametrize(
    "content",
    [
        b"a: \x07\n",
        b"a: !!bool maybe\n",
        b"a: !!timestamp x\n",
        b"a: !!python/object:os.system x\n",
        b"[" * 20000,
    ],
    ids=["control character", "KeyError", "AttributeError", "foreign tag", "RecursionError"],
)
def test_what_the_parser_rejects_otherwise_is_one_line_too(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert message(path).startswith(str(path))
    assert "not valid YAML" in message(path)


def test_a_path_that_is_no_readable_file_is_named(tmp_path, monkeypatch):
    missing = tmp_path / "none.yaml"
    assert message(missing) == f"{missing}: no such file; configs/README.md lists the shipped recipes"
    assert message(tmp_path) == f"{tmp_path}: is a directory; name one YAML file in it"
    (tmp_path / "f").write_text("x")
    assert message(tmp_path / "f" / "g.yaml") == f"{tmp_path}/f/g.yaml: cannot be read: Not a directory"
    assert "cannot be read" in message("nul\0.yaml")

    def denied(path):
        raise PermissionError(13, "Permission denied")  # chmod would not stop a test that runs as root

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert message("r.yaml") == "r.yaml: cannot be read: Permission denied"


def test_a_merged_key_may_be_overridden_but_not_written_twice(tmp_path):
    path = tmp_path / "r.yaml"
    base = "model_config: {model_name: a, rope_scaling: &r {factor: 2, beta_fast: 8}}\n"
    path.write_text(f"{base}data_config: {{<<: {{dataset: x}}, dataset: y}}\n")
    assert RunConfig.load(path, []).data.dataset == "y"
    path.write_text(f"{base}data_config: {{<<: *r, <<: *r}}\n")
    assert "duplicate key `<<`" in message(path)


EXAMPLE = "expected section.key=value, such as scheduler_config.batch_size=4"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("batch_size", f"override `batch_size`: {EXAMPLE}"),
        ("batch_size=4", f"override `batch_size=4`: {EXAMPLE}"),
        ("a..b=1", f"override `a..b=1`: {EXAMPLE}"),
        ("=1", f"override `=1`: {EXAMPLE}"),
        ("s.k.x=1", "override `s.k.x`: `s.k` holds a value, not a section of keys"),
        (
            "s.k=b: c: d",
            "override `s.k=b: c: d`, line 1, column 5: not valid YAML: mapping values are not allowed here",
        ),
        (
            "s.k={x: 1, x: 2}",
            "override `s.k={x: 1, x: 2}`, line 1, column 8: not valid YAML: duplicate key `x`; remove one of the two",
        ),
    ],
)
def test_a_malformed_override_is_quoted_back(override, text):
    with pytest.raises(UserError) as caught:
        apply_overrides({"s": {"k": "value"}}, [override])
    assert str(caught.value) == text


def test_an_override_changes_one_place_even_when_yaml_aliases_share_it():
    mapping = yaml.safe_load("one: &a {k: {x: 1, y: 2}}\ntwo: *a\n")
    changed = apply_overrides(mapping, ["one.k.x=5"])
    assert changed == {"one": {"k": {"x": 5, "y": 2}}, "two": {"k": {"x": 1, "y": 2}}}
    assert mapping == {"one": {"k": {"x": 1, "y": 2}}, "two": {"k": {"x": 1, "y": 2}}}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=40) | st.text("ab:-[]{}&*!#|>'\" \n\t<0.", max_size=30).map(str.encode))
def test_random_bytes_are_never_a_recipe_and_never_another_exception(tmp_path, content):
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(content)
    message(path)


@settings(deadline=None, max_examples=60)
@given(value=st.text("ab:-[]{}&*!#|>'\" \n\t<0.", max_size=20))
def test_an_override_takes_any_value_that_yaml_takes_and_refuses_the_others(value):
    try:
        expected = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, TypeError):
        with pytest.raises(UserError, match="not valid YAML"):
            apply_overrides({}, [f"s.k={value}"])
        return
    try:
        assert apply_overrides({}, [f"s.k={value}"]) == {"s": {"k": expected}}
    except UserError as error:  # the one thing we refuse beyond safe_load
        refusal = str(error)
    else:
        return
    assert "duplicate key" in refusal
