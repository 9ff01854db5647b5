# SPDX-License-Identifier: Apache-2.0
"""configs/README.md is what the keys and the recipes say today, and the check notices if it is not."""

import pytest

from executor import config_docs
from executor.config import RunConfig
from executor.config_errors import walk
from executor.errors import UserError


def test_readme_is_current():
    assert config_docs.main(["--check"]) == 0, "run python -m executor.config_docs"


def test_every_key_and_recipe_has_a_described_row(capsys):
    assert config_docs.main(["--print"]) == 0
    text = capsys.readouterr().out
    rows = {row.split(" | ")[0].strip("| `"): row for row in text.splitlines() if row.startswith("| ")}
    for dotted, field in walk(RunConfig):
        assert field.description, dotted
        if "." in dotted:
            assert field.description in rows[dotted.rpartition(".")[2]].replace("&lt;", "<")
    for path in config_docs.CONFIGS.glob("*.yaml"):
        assert path.read_text(encoding="utf-8").startswith(f"# {config_docs.purpose(path)}\n")
        assert f"| [{path.name}]({path.name}) | {config_docs.purpose(path)} |" in text


def test_check_notices_a_new_recipe_and_a_recipe_without_purpose(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config_docs, "CONFIGS", tmp_path)
    (tmp_path / "one.yaml").write_text("# One.\n")
    assert config_docs.main(["--check"]) == 1
    assert config_docs.main([]) == 0
    assert config_docs.main(["--check"]) == 0
    (tmp_path / "two.yaml").write_text("# Two.\n")
    assert config_docs.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err
    (tmp_path / "two.yaml").write_text("model_config:\n")
    with pytest.raises(UserError, match=r"two\.yaml: the first line must be"):
        config_docs.main([])
