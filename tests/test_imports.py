import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ALLOWED = {
    "memory_runtime": {"memory_runtime"},
    "data": {"data", "memory_runtime"},
    "training": {"training", "data", "memory_runtime"},
    "serving": {"serving", "memory_runtime"},
    "benchmarks": {"benchmarks", "serving", "training", "data", "memory_runtime"},
}
THIRD_PARTY_OF_THE_RUNTIME = {"numpy"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.parametrize("package", ALLOWED)
def test_arrows_point_upwards_only(package):
    ours = set(ALLOWED)
    wrong = [(path.relative_to(ROOT).as_posix(), name) for path in (ROOT / package).rglob("*.py")
             for name in imports(path)
             if name.split(".")[0] in ours - ALLOWED[package]]
    assert wrong == []


def test_the_engine_knows_no_web_framework():
    wrong = [(path.name, name) for path in (ROOT / "serving" / "engine").rglob("*.py")
             for name in imports(path) if name.split(".")[0] in {"bentoml", "fastapi", "starlette"}]
    assert wrong == []


def test_importing_the_runtime_loads_nothing_but_numpy():
    code = (
        "import sys, json; before = set(sys.modules); import memory_runtime; "
        "print(json.dumps(sorted({m.split('.')[0] for m in set(sys.modules) - before})))")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         check=True).stdout
    loaded = {name for name in json.loads(out) if name not in sys.stdlib_module_names}
    allowed = THIRD_PARTY_OF_THE_RUNTIME | {"memory_runtime"}
    assert {name for name in loaded if not name.startswith("_")} <= allowed
