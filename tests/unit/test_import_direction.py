"""The core knows no product, no product knows another, and no two modules import each other."""

import ast
import graphlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

PACKAGE = "sinkscope"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE

# The core knows no product, and products don't know each other. A higher number may import a lower one. Files without
# a folder stand on errors and on each other, but for what CORE says.
CORE = {
    "errors": 0,
    "arguments": 1,
    "atomic": 1,
    "memory": 1,
    "names": 1,
    "processes": 1,
    "progress": 1,
    "runtime": 1,
    "statistics": 1,
    "user_paths": 1,
    "measures": 1,
    "kernels": 2,
    "attention": 3,
    "pages": 3,
    "results": 4,
    "models": 5,
    "tracing": 6,
    "interventions": 7,
}
PRODUCTS = ("studies", "audits", "initial_bias", "fingerprints", "pretrain", "compare", "explore")
COMMAND_LINE = ("cli", "cli_options", "cli_output", "__main__", "")
"""The command line may know everything; so may the file `cli.py` of a room. The package root lists the public names."""
# Measures must work for someone who has activations and torch, and nothing else of ours.
MEASURES_MAY_IMPORT = set(sys.stdlib_module_names) | {"torch", "jaxtyping"}


def test_the_package_keeps_the_direction():
    assert violations(SOURCE) == []


def test_a_room_says_what_is_in_which_of_its_files():
    for guide in SOURCE.glob("*/__init__.py"):
        named = set(re.findall(r"\w+\.py\b", guide.read_text(encoding="utf-8")))
        assert named, f"{guide.parent.name}/__init__.py names no file"
        files = {path.name for path in guide.parent.glob("*.py")} | {path.name for path in SOURCE.glob("*.py")}
        assert named <= files, f"{guide.parent.name}/__init__.py names files that are not there"


def test_measures_import_torch_only():
    assert foreign_imports_of_measures(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        (
            "models/anatomy.py",
            "from sinkscope.tracing.trace import trace",
            "models.anatomy imports upward: tracing.trace",
        ),
        ("models/anatomy.py", "from ..tracing import trace", "models.anatomy imports upward: tracing.trace"),
        ("models/anatomy.py", "import sinkscope", "models.anatomy imports upward: the package root"),
        ("models/anatomy.py", "def f():\n    import sinkscope.cli", "models.anatomy imports upward: cli"),
        (
            "models/anatomy.py",
            "import importlib\nimportlib.import_module('sinkscope.cli')",
            "models.anatomy imports upward: cli",
        ),
        ("tracing/trace.py", "from sinkscope import studies", "tracing.trace imports upward: studies"),
        ("studies/page.py", "from sinkscope.audits import page", "studies.page imports another product: audits.page"),
        ("runtime.py", "from sinkscope import measures, tracing", "runtime imports upward: tracing"),
        ("novelty.py", "", "novelty is in no room of CORE or PRODUCTS"),
    ],
)
def test_control_a_planted_upward_import_is_reported(tmp_path, file, line, complaint):
    root = planted(tmp_path, {file: line})
    assert violations(root) == [complaint]


def test_control_a_planted_cycle_is_reported(tmp_path):
    root = planted(
        tmp_path,
        {
            "models/anatomy.py": "def later():\n    from sinkscope.models.loading import load",
            "models/loading.py": "from sinkscope.models import anatomy",
        },
    )
    (complaint,) = violations(root)
    assert complaint.startswith("cycle: ")
    assert {"models.anatomy", "models.loading"} <= set(complaint.removeprefix("cycle: ").split(" -> "))


def test_control_a_measure_that_needs_numpy_is_reported(tmp_path):
    root = planted(tmp_path, {"measures/sink_score.py": "import torch\nimport numpy as np"})
    assert foreign_imports_of_measures(root) == ["measures.sink_score imports numpy"]


def test_control_a_clean_package_is_not_reported(tmp_path):
    root = planted(
        tmp_path, {"cli.py": "from sinkscope.models import anatomy\nfrom sinkscope.errors import InputError"}
    )
    assert violations(root) == []
    assert foreign_imports_of_measures(root) == []


def planted(tmp_path: Path, files: dict[str, str]) -> Path:
    """A small package in which every import is allowed, with `files` written over it."""
    root = tmp_path / PACKAGE
    base = {
        "__init__.py": "from sinkscope.tracing.trace import trace",
        "errors.py": "",
        "runtime.py": "from sinkscope.errors import InputError",
        "cli.py": "",
        "measures/__init__.py": "",
        "measures/sink_score.py": "import torch",
        "models/__init__.py": "",
        "models/anatomy.py": "import torch",
        "tracing/__init__.py": "",
        "tracing/trace.py": "from sinkscope.measures import sink_score\ntrace = 1",
        "studies/__init__.py": "",
        "audits/__init__.py": "",
        "audits/page.py": "",
    }
    for name, text in (base | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def violations(root: Path) -> list[str]:
    modules = modules_of(root)
    graph = {
        name: {name_of(target, modules) for target in imports_of(name, path, root)} for name, path in modules.items()
    }
    graph = {name: {target for target in targets if target not in (None, name)} for name, targets in graph.items()}
    complaints = [f"{name} is in no room of CORE or PRODUCTS" for name in modules if level_of(name) is None]
    for name, targets in sorted(graph.items()):
        complaints += [complaint for target in sorted(targets) if (complaint := wrong(name, target))]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        complaints.append("cycle: " + " -> ".join(name or PACKAGE for name in error.args[1]))
    return complaints


def wrong(name: str, target: str) -> str | None:
    """What is wrong with a module that imports another; None where nothing is."""
    own, other = level_of(name), level_of(target)
    if own is None or other is None or own == TOP or room_of(name) == room_of(target):
        return None
    if own == other == PRODUCT:
        return f"{name} imports another product: {target}"
    if other > own:
        return f"{name} imports upward: {target or 'the package root'}"
    return None


PRODUCT, TOP = 100, 101


def room_of(name: str) -> str:
    return name.split(".")[0]


def level_of(name: str) -> int | None:
    if room_of(name) in COMMAND_LINE or name.endswith("cli"):
        return TOP
    return PRODUCT if room_of(name) in PRODUCTS else CORE.get(room_of(name))


def foreign_imports_of_measures(root: Path) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, path in sorted(modules_of(root).items())
        if name.split(".")[0] == "measures"
        for target in sorted(imports_of(name, path, root))
        if target.split(".")[0] not in MEASURES_MAY_IMPORT | {PACKAGE}
    ]


def modules_of(root: Path) -> dict[str, Path]:
    """Every module by its name below the package; the package root is ""."""
    modules = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def name_of(target: str, modules: dict[str, Path]) -> str | None:
    """The module of ours that holds `target` (a module, or a name inside one); None for other packages."""
    if target.split(".")[0] != PACKAGE:
        return None
    parts = target.split(".")[1:]
    while parts and ".".join(parts) not in modules:
        parts.pop()
    return ".".join(parts)


def imports_of(name: str, path: Path, root: Path) -> set[str]:
    """Every imported name with its full path, wherever in the file the import stands."""
    package = [PACKAGE, *path.relative_to(root).parent.parts]
    targets = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            targets.update(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                targets.add(node.args[0].value)
    return targets


SCRIPTS = sorted(
    path for folder in ("benchmarks", "examples", "lab") for path in (SOURCE.parents[1] / folder).rglob("*.py")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_is_there(script):
    """No test runs the benchmarks, and a name that has moved would only be missed on the machine that they are for."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sinkscope"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), (
                    alias.name
                )
