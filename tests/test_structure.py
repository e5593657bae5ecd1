"""The shape of the code: imports go one way, files stay short and say what they own."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nano_oasis"
MAX_LINES = 350  # of any file, tests and benchmarks too
FILES = sorted(p for p in PACKAGE.rglob("*.py"))

# The table of docs/01-tour.md. A module may import its own level and below.
LEVELS = {
    "config": 0, "request": 0, "metrics": 0,
    "memory.blocks": 1, "kernels": 1,
    "memory": 2,
    "scheduler": 3,
    "weights": 4, "tokenizer": 4, "rope": 4, "layer": 4, "model": 4, "sampler": 4,
    "spec": 5, "spec.train": 9,  # a command: it prints, and shares its options' ways with the others
    "runner": 6,
    "door": 7, "text": 7, "outputs": 7, "engine": 7, "build": 7, "kv_build": 7, "async_engine": 7, "llm": 7,
    "openai_api": 8,
    "server": 9, "cli": 9, "serve": 9, "chat": 9, "bench": 9, "eval": 9,
}  # fmt: skip
NO_TORCH = ("config", "request", "metrics", "memory.blocks", "scheduler", "openai_api")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def level_of(module: str) -> int:
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        if ".".join(parts[:n]) in LEVELS:
            return LEVELS[".".join(parts[:n])]
    raise AssertionError(f"{module} has no level: add it to LEVELS and to docs/01-tour.md")


def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the direction"
            base = node.module or ""
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downwards(path):
    if name_of(path) in ("", "__init__"):
        return  # the package's front door names things lazily
    own = level_of(name_of(path))
    for target in imports_of(path):
        inner = target.removeprefix("nano_oasis.")
        if (
            inner == target
            or not (PACKAGE / inner.split(".")[0]).with_suffix("").exists()
            | (PACKAGE / (inner.split(".")[0] + ".py")).exists()
        ):
            continue
        assert level_of(inner) <= own, f"{name_of(path)} (level {own}) imports {target} ({level_of(inner)})"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_torch_stays_out_of_the_pure_parts(path):
    if name_of(path).startswith(NO_TORCH):
        assert not [t for t in imports_of(path) if t.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_short_and_introduce_themselves(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    if text.strip() and path.name != "__init__.py":
        intro = ast.get_docstring(ast.parse(text)) or ""
        assert re.search(r"\bOwns\b", intro) and re.search(r"[Mm]ust\s+not\s+know", intro), path.name


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_files_beside_the_package_are_short_too(folder):
    lengths = {str(p): len(p.read_text().splitlines()) for p in (ROOT / folder).rglob("*.py")}
    assert lengths and not {path: n for path, n in lengths.items() if n > MAX_LINES}
