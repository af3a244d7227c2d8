"""The layout is the map: import order, no torch where there must be none, sizes, stages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.stages import STAGES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "headrace"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 500, 60, 150

# What each part may import of ours. A part may always import itself.
BASE = {"messages", "errors", "config", "stages"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "extras": set(),
    "stages": set(),
    "messages": {"errors"},
    "foreign_json": {"errors"},
    "config": {"errors", "messages", "draws", "prices"},
    "draws": {"errors"},
    "prices": {"errors"},
    "observe": {"errors", "extras", "stages"},
    "kv": BASE | {"observe"},
    "children": set(),
    "runtime_folder": set(),
    "pages": set(),
    "bytecode": set(),
    "web_page": {"errors", "config"},
    "sources": BASE | {"children"},
    "quant": BASE,
    "text": BASE | {"sources", "observe", "children", "native", "foreign_json"},
    "engine": BASE | {"kv", "observe"},
    "kernels": {"errors", "messages", "config", "children"},
    "native": {"errors", "sources"},
    "grammar": BASE | {"children", "draws"},
    "models": BASE | {"extras", "sources", "quant"},
    "backends": BASE | {"extras", "kernels", "native", "models", "sampling"},
    "sampling": BASE,
    "runner": BASE
    | {"models", "native", "sampling", "sources", "quant", "kernels", "backends", "observe", "kv"},
    "hooks": {"errors", "extras"},
    "homes": set(),
    "error_bodies": {"errors"},
    "request_path": {"errors"},
    "gateway": BASE
    | {"kv", "observe", "children", "runtime_folder", "sources", "text", "web_page", "foreign_json"}
    | {"extras", "homes", "request_path", "error_bodies"},
    "sim": BASE | {"gateway", "engine", "kv", "bench"},
    "api": BASE
    | {"text", "engine", "sources", "observe", "asked", "draws", "beams", "grammar"}
    | {"homes", "hooks", "pages", "prices", "vectors", "web_page", "foreign_json"}
    | {"request_path", "error_bodies"},
    "bench": BASE
    | {"extras", "sources", "text", "engine", "models", "runner", "quant", "backends"},
    "params": {"errors", "draws", "grammar"},
    "asked": BASE | {"sources", "text", "draws"},
    "beams": {"messages"},
    "vectors": BASE | {"sources"},
    "completion": BASE | {"text", "params"},
    "pooled": {"completion", "sources", "vectors"},
    "progress": set(),
    "load_bar": set(),
    "inspection": BASE | {"models", "sources", "text"},
    "accelerators": set(),
    "planning": BASE | {"accelerators", "inspection", "models", "sources"},
    "llm": BASE
    | {"launch", "text", "engine", "sources", "params", "progress", "asked", "draws"}
    | {"load_bar"}
    | {"beams", "completion", "grammar", "vectors", "pooled"},
    "launch": {"*"},
    "replicas": {"*"},
    "supervisor": {"*"},
    "cli": {"*"},
    "__init__": {"llm", "params", "completion", "grammar", "pooled"},
}
SEAM = "headrace.engine.protocol"  # what a runner implements: runner and backends may import it
NO_TORCH = {"api", "grammar", "text", "engine", "kv", "sources", "observe", "messages", "errors"}
NO_TORCH |= {
    "gateway",
    "hooks",
    "config",
    "inspection",
    "planning",
    "accelerators",
    "vectors",
    "web_page",
    "homes",
    "error_bodies",
    "request_path",
    "stages",
    "backends/fake",
    "bytecode",
    "backends/choose",
    "backends/cuda/context",
    "kernels/key",
}
# What serves a packed model on a processor.
NO_TORCH |= {"sampling", "native", "quant/ggml", "models/order", "models/outline", "models/rope"}
NO_TORCH |= {f"backends/cpu/{name}" for name in ("batch", "computes", "kv_memory", "native")}
NO_TORCH |= {f"runner/{name}" for name in ("fit", "pack", "rows", "runner", "work", "worker")}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module == "headrace" else [str(node.module)]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT what it may import"
    allowed = MAY_IMPORT[part]
    for name in imports(path):
        if name.startswith("headrace."):
            target = name.split(".")[1]
            known = "*" in allowed or target in allowed | {part, "__version__"}
            known |= name == SEAM and part in {"runner", "backends"}
            assert known, f"{path.relative_to(ROOT)} imports headrace.{target}"


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_torch_above_the_runner(path: Path) -> None:
    inside = str(path.relative_to(PACKAGE).with_suffix(""))
    if any(inside == part or inside.startswith(part + "/") for part in NO_TORCH):
        bad = [n for n in imports(path) if n.split(".")[0] in {"torch", "transformers"}]
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


def docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return (first.end_lineno or 0) - first.lineno + 1 if first.value.value else 0
    return 0


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Triton kernel: it may be longer, for it cannot be cut into functions of Python."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_small_files_and_functions(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    docs = sum(docstring_lines(node) for node in ast.walk(tree))
    assert len(text.splitlines()) - docs <= MAX_FILE_LINES, path
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node)
            limit = MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES
            assert lines <= limit, f"{path}: {node.name} has {lines} lines"


@pytest.mark.parametrize("top", ["tests", "benchmarks"])
def test_small_files_around_the_package(top: str) -> None:
    for path in (ROOT / top).rglob("*.py"):
        assert len(path.read_text().splitlines()) <= MAX_FILE_LINES, path


PAGE = sorted([*PACKAGE.rglob("*.js"), *PACKAGE.rglob("*.css")])
# A function or method of JavaScript: its first line, and the end of it at the same depth.
JS_FUNCTION = re.compile(
    r"^( *)(?:export )?(?:static |async )*(?:function\*? |#?\w+\()(?!.*;$).*\{$\n((?:.*\n)*?)^\1\}",
    re.MULTILINE,
)


@pytest.mark.parametrize("path", PAGE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_small_files_of_the_page(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES, path
    assert max(map(len, text.splitlines())) <= 100, path
    for match in JS_FUNCTION.finditer(text):
        lines = match[0].count("\n") + 1
        assert lines <= MAX_FUNCTION_LINES, f"{path}: {match[0].splitlines()[0]} has {lines} lines"


def test_the_measure_of_javascript_finds_functions() -> None:
    text = "".join(path.read_text() for path in PAGE if path.suffix == ".js")
    assert len(JS_FUNCTION.findall(text)) >= text.count("\nexport function ") > 20


def test_the_design_names_every_part_once() -> None:
    layout = (ROOT / "docs" / "design.md").read_text().split("```")[1]
    named = re.findall(r"^  (\w+)(?:\.py|/) |\b(\w+)\.py[,:] ", layout, re.MULTILINE)
    for part in sorted({part_of(path) for path in files()} - {"__init__"}):
        assert sum(part in names for names in named) == 1, part


def test_every_stage_is_claimed() -> None:
    assert [stage.number for stage in STAGES] == list(range(1, 12))
    for stage in STAGES:
        for module in stage.modules:
            assert (PACKAGE / module).exists(), f"stage {stage.number} claims {module}"


def test_no_junk_drawer() -> None:
    assert not [path for path in files() if path.stem in {"utils", "helpers", "common", "misc"}]


def triton_kernels() -> list[tuple[Path, ast.FunctionDef]]:
    """Every function that Triton compiles, in the package, the tests and the benchmarks."""
    paths = [
        path for top in ("headrace", "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")
    ]
    trees = [(path, ast.parse(path.read_text())) for path in sorted(paths)]
    return [
        (path, node)
        for path, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and is_kernel(node)
    ]


def test_every_kernel_names_its_plain_reference() -> None:
    paths = {path for path, node in triton_kernels() if node.name.endswith("_kernel")}
    for path in sorted(paths):
        if path.is_relative_to(PACKAGE):
            assert "reference" in path.read_text(), f"{path.relative_to(ROOT)}: and of what?"


# Names that Triton's launcher uses for itself.
LAUNCHER_NAMES = {"params", "options", "backend", "specialization", "grid", "warmup", "self"}


def test_triton_kernels_are_what_its_compiler_takes() -> None:
    """The interpreter, which runs them here, takes more than the compiler on a card."""
    kernels = triton_kernels()
    assert len(kernels) > 20
    for path, node in kernels:
        where = f"{path.relative_to(ROOT)}: {node.name}"
        for arg in node.args.args:
            assert arg.arg not in LAUNCHER_NAMES, f"{where}: {arg.arg} is the launcher's own name"
            written = ast.unparse(arg.annotation) if arg.annotation else "tl.constexpr"
            assert written == "tl.constexpr", f"{where}: {arg.arg} is annotated {written}"
        returned = ast.unparse(node.returns) if node.returns else "None"
        assert returned == "None", f"{where} returns {returned}"
