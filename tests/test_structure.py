"""The shape of the library, read from its source with `ast`; nothing is imported."""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent / "jaxdec"
FILES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 450

LEVELS = {
    0: ("types", "reductions", "models/config", "models/eagle_config", "prompts"),
    1: ("cache", "tree", "sampling", "adjustment", "sampling_params", "drafting"),
    2: ("acceptance", "draft_length", "models", "verification"),
    3: ("drafters",),
    4: ("decoding",),
    5: ("io", "planning", "batching", "counts", "statistics", "policies"),
    6: (
        "evidence",
        "certificate",
        "advice",
        "latency",
        "scheduling",
        "prefixes",
        "serving_loop",
        "simulation",
        "speculation",
        "serving_costs",
    ),
    7: (
        "lm",
        "loaded_drafter",
        "trained",
        "shipped",
        "call",
        "concurrency",
        "strategies",
        "text",
        "server",
        "slot_group",
        "ticket",
        "traffic",
        "detokenize",
        "program",
        "measure",
        "scoring",
        "rounding",
        "training",
        "report",
        "calibration",
        "export",
    ),
    8: ("compare", "certify", "abstract_lm", "ahead", "plan", "load_run"),
    9: (
        "cli",
        "console",
        "course",
        "options",
        "plan_command",
        "show_command",
        "train_command",
        "load_command",
        "__main__",
    ),
}
"""A file imports only from lower levels, or from its own folder."""
GROUPS = (1, 6, 7, 8, 9)
"""Levels whose files may import one another (without a circle)."""
MAY_JIT = (
    "decoding",
    "batching",
    "lm",
    "measure",
    "scoring",
    "rounding",
    "program",
    "training",
    "planning",
)


def name_of(path: pathlib.Path) -> str:
    """``models/decoder`` for jaxdec/models/decoder.py; a package is its folder."""
    relative = path.relative_to(ROOT).with_suffix("")
    parts = [part for part in relative.parts if part != "__init__"]
    return "/".join(parts)


NAMES = {name_of(path): path for path in FILES}
each_file = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(ROOT))
)


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def level_of(name: str) -> int:
    """The level of a file: its own entry, else that of its folder."""
    found = [n for n, names in LEVELS.items() if name in names]
    if not found:
        folder = name.split("/")[0]
        found = [n for n, names in LEVELS.items() if folder in names]
    assert found, f"jaxdec/{name} has no level: place it in tests/test_structure.py"
    return found[0]


def imports_of(path: pathlib.Path) -> set[str]:
    """The files of the library that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            # `from jaxdec import tree` names a file, `from jaxdec.types import x` too.
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[0] != "jaxdec":
                continue
            for size in range(len(parts), 1, -1):
                if (name := "/".join(parts[1:size])) in NAMES:
                    found.add(name)
                    break
    return found


@each_file
def test_imports_point_down(path):
    name = name_of(path)
    if not name:
        return  # The public surface imports what it shows.
    level, folder = level_of(name), name.split("/")[0] if "/" in name else None
    for other in imports_of(path):
        is_own_folder = folder is not None and other.split("/")[0] == folder
        is_group = level in GROUPS and level_of(other) == level
        assert level_of(other) < level or is_own_folder or is_group, (
            f"{name} (level {level}) imports {other} (level {level_of(other)})"
        )


def test_imports_have_no_circle():
    graph = {name: imports_of(path) - {name} for name, path in NAMES.items() if name}
    done: set[str] = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@each_file
def test_no_file_does_two_jobs(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@each_file
def test_jit_is_where_loops_are_driven(path):
    name = name_of(path)
    uses = [
        node
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("jit", "pmap")
        or isinstance(node, ast.ImportFrom)
        and any(alias.name == "jit" for alias in node.names)
    ]
    assert not uses or name.split("/")[0] in MAY_JIT


@each_file
def test_public_names_are_documented(path):
    module = parsed(path)
    assert ast.get_docstring(module), "the module"
    for node in module.body:
        is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if is_definition and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@each_file
def test_no_postponed_annotations(path):
    """jaxtyping reads annotations when a function is defined."""
    for node in ast.walk(parsed(path)):
        assert not (isinstance(node, ast.ImportFrom) and node.module == "__future__")


@each_file
def test_nothing_private_crosses_files(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] == "jaxdec":
                for alias in node.names:
                    assert not alias.name.startswith("_") and alias.name != "*"


WAYS = {"drafters/recurrent", "drafters/recurrent_tree"}
"""Ways of drafting that several networks share."""


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("drafters/")])
def test_drafters_know_neither_engine_nor_rule_nor_each_other(name):
    imported = imports_of(NAMES[name])
    assert not imported & {"decoding", "acceptance"}
    others = {n for n in imported if n.startswith("drafters/")} - WAYS
    assert others <= ({"drafters/dflash"} if name == "drafters/dspark" else set())


def test_models_know_no_drafter_and_the_engine_knows_only_none():
    for name, path in NAMES.items():
        drafters = {n for n in imports_of(path) if n.startswith("drafters/")}
        if name.startswith("models"):
            assert not drafters
        if name == "decoding":
            assert drafters == {"drafters/none"}
            assert not any(n.startswith("models") for n in imports_of(path))
