# SPDX-License-Identifier: Apache-2.0
"""What every file of the repository has to keep to: who may import whom, licence lines, sizes, the two READMEs."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("executor", "models")
MOST_LINES = 280

# Package -> what it may import of executor and models. The files directly in executor/ compose these packages and
# may import all of them; within a package everything may import everything that makes no cycle.
ARROWS = {
    "executor.platform": {"executor.errors"},
    "executor.parallel": {"executor.batch", "executor.errors", "executor.platform"},
    "executor.ops": {"executor.platform"},
    "executor.quant": {"executor.errors", "executor.storage", "executor.ops", "executor.weights"},
    "executor.layers": {
        "executor.batch",
        "executor.errors",
        "executor.kv_cache",
        "executor.model_config",
        "executor.ops",
        "executor.parallel",
        "executor.quant",
        "executor.storage",
        "executor.weights",
    },
    "executor.moe": {
        "executor.batch",
        "executor.errors",
        "executor.storage",
        "executor.model_config",
        "executor.ops",
        "executor.parallel",
        "executor.quant",
        "executor.weights",
    },
}
VENDOR = {"torch_npu", "torchair", "npugraph_ex"}
VENDOR_FILES = (
    "executor/platform/npu.py",
    "executor/graph.py",
    "executor/ge_converters.py",
    "executor/offdevice/",
    "tests/npu/",
    "tests/offdevice/",
)


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    """``executor/moe/gate.py`` is ``executor.moe.gate``, ``executor/moe/__init__.py`` is ``executor.moe``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in python_files(*CODE)}


def imports(source: str, *, for_typing: bool = True) -> Iterator[str]:
    """Modules that ``source`` imports anywhere, in functions too; under ``if TYPE_CHECKING`` only if ``for_typing``."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_typing:
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return visit(ast.parse(source))


def imports_of(path: Path, *, for_typing: bool = True) -> set[str]:
    return set(imports(path.read_text(encoding="utf-8"), for_typing=for_typing))


def inside(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_the_scanner_sees_every_form_of_import():
    source = """
import torch_npu
from executor import batch
from executor.moe.gate import Gate
if TYPE_CHECKING:
    import yaml
def f():
    from . import sibling
    import torchair.core as core
"""
    always = {"torch_npu", "executor.batch", "executor.moe.gate", ".", "torchair.core"}
    assert set(imports(source)) == always | {"yaml"}
    assert set(imports(source, for_typing=False)) == always


def test_executor_knows_models_by_name_only():
    wrong = [str(p) for p in python_files("executor") if any(inside(m, {"models"}) for m in imports_of(p))]
    assert not wrong


@pytest.mark.parametrize("package", ARROWS)
def test_arrows_between_packages(package):
    wrong = [
        f"{name} imports {module}"
        for name, path in MODULES.items()
        if inside(name, {package})
        for module in sorted(imports_of(path))
        if inside(module, set(CODE)) and not inside(module, ARROWS[package] | {package})
    ]
    assert not wrong


def test_every_package_of_the_executor_has_its_arrows():
    packages = {f"executor.{p.parent.name}" for p in (ROOT / "executor").glob("*/__init__.py")}
    assert packages - {"executor.perf", "executor.offdevice"} == set(ARROWS)


def test_references_import_only_torch_and_ops():
    allowed = {"torch", "executor.ops", "executor.platform.features"} | set(sys.stdlib_module_names)
    wrong = [
        f"{path.name} imports {module}"
        for path in python_files("executor/ops/reference")
        for module in sorted(imports_of(path))
        if not inside(module, allowed)
    ]
    assert not wrong


def test_no_cycle_of_imports():
    """TopologicalSorter raises CycleError, which names the cycle. Imports for type checkers alone do not count."""
    graph = {name: imports_of(path, for_typing=False) & MODULES.keys() for name, path in MODULES.items()}
    assert set(TopologicalSorter(graph).static_order()) == set(MODULES)


def test_vendor_packages_are_imported_in_their_places_only():
    wrong = [
        str(path.relative_to(ROOT))
        for path in python_files(*CODE, "scripts", "tests")
        if any(inside(module, VENDOR) for module in imports_of(path))
    ]
    assert not [name for name in wrong if not name.startswith(VENDOR_FILES)]


def test_licence_line():
    wrong = [
        str(path.relative_to(ROOT))
        for path in python_files(*CODE, "scripts", "tests", "benchmarks")
        if (text := path.read_text(encoding="utf-8")) and "# SPDX-License-Identifier: Apache-2.0" not in text[:80]
    ]  # an empty __init__.py holds nothing to license
    assert not wrong


def test_files_stay_readable():
    sizes = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert not {name: size for name, size in sizes.items() if size > MOST_LINES}


README = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")}
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", README)
def test_readme_gives_both_commands_early(name):
    start = README[name].splitlines()[:20]
    assert {"bash scripts/infer.sh", "bash scripts/test.sh"} <= {line.partition("#")[0].strip() for line in start}


def test_both_readmes_say_the_same():
    english, chinese = README.values()
    assert FENCED.findall(english) == FENCED.findall(chinese)
    headings = [re.findall(r"^(#+) ", FENCED.sub("", text), re.MULTILINE) for text in (english, chinese)]
    assert headings[0] == headings[1]
    rows = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in (english, chinese)]
    assert rows[0] == rows[1] > 0


@pytest.mark.parametrize("name", ["docs/architecture.md", *README])
def test_documents_name_files_that_exist(name):
    """Every path that starts with a folder of the repository, in links, code and the tree of architecture.md."""
    text = (ROOT / name).read_text(encoding="utf-8")
    folders = "assets|configs|docs|executor|models|scripts|tests"
    paths = set(re.findall(rf"(?<![\w/.-])(?:{folders})/[\w/.-]+\.(?:py|sh|md|yaml|jsonl)\b", text))
    paths |= set(_tree(text))
    assert paths
    assert not sorted(p for p in paths if not (ROOT / p).exists() and p not in TRAINED)


TRAINED = {"assets/heldout.jsonl"}  # written by scripts/train_tiny.py


def _tree(text: str) -> Iterator[str]:
    """Files of indented listings: a line ``moe/  phrase`` opens a folder, ``gate.py  phrase`` below is a file in it."""
    for block in FENCED.findall(text):
        folders: list[str] = []
        for indent, entry in re.findall(r"^( *)([\w.-]+(?:/|\.py))(?=\s|$)", block, re.MULTILINE):
            folders = folders[: len(indent) // 2]
            if entry.endswith("/"):
                folders.append(entry)
            elif folders:
                yield "".join(folders) + entry
