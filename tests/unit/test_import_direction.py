"""No import runs from a lower layer to a higher one, and no two modules import each other."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

PACKAGE = "sinkscope"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE

# The longest matching prefix counts; the package root is the top layer because it lists the public names.
LAYERS = {
    "errors": 0,
    "runtime": 0,
    "arguments": 0,
    "user_paths": 0,
    "processes": 0,
    "progress": 0,
    "memory": 0,
    "statistics": 0,
    "results": 0,
    "measures": 0,
    "kernels": 0,
    "attention": 1,
    "models": 2,
    "capture": 3,
    "interventions": 4,
    "pretrain": 5,
    "studies": 6,
    "origins": 6,
    "remedies": 6,
    "report": 7,
    "explore": 8,
    "commands": 9,
    "cli": 9,
    "__main__": 9,
    "": 9,
}
# Layer 0 stands on nothing: beside errors, which anyone may import, these are its only inner imports.
WITHIN_LAYER_0 = {
    ("arguments", "measures.sink_score"),
    ("arguments", "user_paths"),
    ("arguments", "memory"),
    ("processes", "arguments"),
    ("results.run_folder", "results.tables"),
    ("results.run_folder", "results"),
    ("results.run_folder", "results.atomic"),
    ("results.parts", "results.atomic"),
    ("results.parts", "processes"),
    ("results.parts", ""),
    ("results.tables", "results.atomic"),
    ("results.run_folder", "results.validated"),
    ("results.tables", "results.validated"),
    ("results.result", "results.run_folder"),
    ("results.result", "results.tables"),
    *((f"results.{name}", "user_paths") for name in ("atomic", "run_folder", "parts", "result")),
    ("measures.super_neurons", "measures.dimension_disparity"),
    ("measures.super_neurons", "measures"),
    ("measures.dimension_disparity", "measures.spectrum"),
    ("measures.contraction", "measures.spectrum"),
    ("kernels.token_statistics", "measures.dimension_disparity"),
    *((f"kernels.{name}", "kernels.jit") for name in ("attention_received", "head_rms_norm", "token_statistics")),
}
# Measures must work for someone who has activations and torch, and nothing else of ours.
MEASURES_MAY_IMPORT = set(sys.stdlib_module_names) | {"torch", "jaxtyping"}


def test_the_package_keeps_the_direction():
    assert violations(SOURCE) == []


def test_measures_import_torch_only():
    assert foreign_imports_of_measures(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        (
            "models/anatomy.py",
            "from sinkscope.tracing.trace import trace",
            "models.anatomy imports upward: capture.trace",
        ),
        ("models/anatomy.py", "from ..capture import trace", "models.anatomy imports upward: capture.trace"),
        ("models/anatomy.py", "import sinkscope", "models.anatomy imports upward: the package root"),
        ("models/anatomy.py", "def f():\n    import sinkscope.cli", "models.anatomy imports upward: cli"),
        (
            "models/anatomy.py",
            "import importlib\nimportlib.import_module('sinkscope.cli')",
            "models.anatomy imports upward: cli",
        ),
        (
            "measures/sink_score.py",
            "from sinkscope import runtime",
            "measures.sink_score may not import runtime: both stand in layer 0",
        ),
        ("novelty.py", "", "novelty has no layer"),
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
        "capture/__init__.py": "",
        "capture/trace.py": "from sinkscope.measures import sink_score\ntrace = 1",
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
    complaints = [f"{name} has no layer" for name in modules if layer_of(name) is None]
    for name, targets in sorted(graph.items()):
        for target in sorted(targets):
            lower, upper = layer_of(name), layer_of(target)
            if lower is None or upper is None:
                continue
            if upper > lower:
                complaints.append(f"{name} imports upward: {target or 'the package root'}")
            elif lower == upper == 0 and target != "errors" and (name, target) not in WITHIN_LAYER_0:
                complaints.append(f"{name} may not import {target}: both stand in layer 0")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        complaints.append("cycle: " + " -> ".join(name or PACKAGE for name in error.args[1]))
    return complaints


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


def layer_of(name: str) -> int | None:
    return LAYERS.get(name.split(".")[0])


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
