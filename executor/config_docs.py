# SPDX-License-Identifier: Apache-2.0
"""Write ``configs/README.md`` from the declared keys and the first line of each recipe, so it cannot drift.

``python -m executor.config_docs`` writes the file; ``--print`` prints it instead; ``--check`` exits
with 1 when the file on disk differs.
"""

import argparse
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from executor.config import REPOSITORY_ROOT, RunConfig
from executor.config_errors import expected, keys, show, subsection
from executor.errors import UserError

CONFIGS = REPOSITORY_ROOT / "configs"

INTRO = """\
# Recipes and their keys

<!-- Written by `python -m executor.config_docs`; edit executor/config.py or the recipes instead. -->

A recipe is a YAML file of the sections below. Absent keys take their default; a key that is unknown, of the
wrong type or out of range stops the run with one line. Any key can be set from the command line, where the
value is YAML and the last one wins:
`--set scheduler_config.batch_size=8 --set model_config.rope_scaling.factor=4.0`.
Relative paths in a recipe start at the root of the repository.
"""


def purpose(recipe: Path) -> str:
    """The comment on the first line of a recipe. Raises UserError when the first line is not a comment."""
    first = recipe.read_text(encoding="utf-8").partition("\n")[0]
    if not first.startswith("# "):
        raise UserError(f"{recipe}: the first line must be a `# ` comment that states the recipe's purpose")
    return first.removeprefix("# ")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default()
    return f"`{show(list(value) if isinstance(value, tuple) else value)}`"


def _cell(text: str) -> str:
    """``|`` would end a table cell and ``<`` would begin an HTML tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _tables(name: str, section: type[BaseModel], level: int = 2) -> Iterator[str]:
    """The heading, the idea and the table of one section, then those of the sections inside it."""
    yield f"{'#' * level} {name}\n\n{cleandoc(section.__doc__ or '')}\n"
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in keys(section).items():
        cells = (f"`{key}`", _cell(expected(field)), _default(field), _cell(field.description or ""))
        rows.append(f"| {' | '.join(cells)} |")
    yield "\n".join(rows) + "\n"
    for key, field in keys(section).items():
        if below := subsection(field):
            yield from _tables(f"{name}.{key}", below, level + 1)


def render() -> str:
    """The whole text of ``configs/README.md``."""
    recipes = ["| recipe | purpose |", "|---|---|"]
    for path in sorted(CONFIGS.glob("*.yaml")):
        recipes.append(f"| [{path.name}]({path.name}) | {_cell(purpose(path))} |")
    parts = [INTRO, "\n".join(recipes) + "\n"]
    for name, field in keys(RunConfig).items():
        section = subsection(field)
        assert section is not None, name  # every key of RunConfig is a section
        parts += _tables(name, section)
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser("python -m executor.config_docs", description="Write configs/README.md.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="exit 1 when configs/README.md is stale")
    mode.add_argument("--print", action="store_true", help="print the text instead of writing it")
    options = parser.parse_args(arguments)
    target, text = CONFIGS / "README.md", render()
    if options.print:
        print(text, end="")
    elif not options.check:
        target.write_text(text, encoding="utf-8")
    elif not target.is_file() or target.read_text(encoding="utf-8") != text:
        print("configs/README.md is stale; run python -m executor.config_docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
