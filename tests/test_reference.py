"""The API reference: every public name says what it takes, gives and refuses."""

import ast
import functools
import importlib
import inspect
import pathlib
import pkgutil
import re
import shlex
import textwrap
import types

import pdoc.__main__

import jaxdec

COMMON = frozenset(
    """
    params cache state sequences request commit draft model drafter lm tokens position
    mask config batch_size capacity vocab_size taps dtype key net processor
    """.split()
)
"""Parameters that mean one thing in the whole library, and are described where their
types are (`jaxdec.types`, `jaxdec.models`)."""
ERRORS = {"CheckpointError", "RuntimeError", "TypeError", "ValueError"}


def _modules():
    """The modules that the reference shows, and those inside them."""
    for name in jaxdec.__all__:
        module = getattr(jaxdec, name)
        if isinstance(module, types.ModuleType):
            yield module
            folder = getattr(module, "__path__", ())
            for inner in pkgutil.iter_modules(folder, f"{module.__name__}."):
                yield importlib.import_module(inner.name)


def _names(module) -> list[str]:
    """What a module shows: its `__all__`, or else what it defines."""
    own = vars(module).get("__all__")
    return own or [
        name
        for name, item in vars(module).items()
        if not name.startswith("_")
        and getattr(item, "__module__", None) == module.__name__
    ]


def _public() -> dict:
    """Every function, class, method and property that the reference shows, by name."""
    found = {}
    for module in (jaxdec, *_modules()):
        for name in _names(module):
            item = getattr(module, name)
            # The same object may have several names; the shortest comes first.
            if item in found.values() or not _is_code(item):
                continue
            found[f"{module.__name__}.{name}"] = item
    for name, item in list(found.items()):
        if inspect.isclass(item):
            found |= {
                f"{name}.{own}": member
                for own, member in vars(item).items()
                if not own.startswith("_") and _is_ours(_function(member))
            }
    return found


def _is_code(item) -> bool:
    return inspect.isclass(item) or inspect.isfunction(item)


def _is_ours(function) -> bool:
    return function is not None and function.__module__.startswith("jaxdec")


def _function(item):
    """The function behind a method or a property; None for anything else."""
    if isinstance(item, property):
        item = item.fget
    elif isinstance(item, functools.cached_property):
        item = item.func
    elif isinstance(item, classmethod | staticmethod):
        item = item.__func__
    return inspect.unwrap(item) if inspect.isfunction(item) else None


PUBLIC = _public()
FUNCTIONS = {n: f for n, item in PUBLIC.items() if (f := _function(item)) is not None}


def _args(doc: str) -> set[str]:
    """The names in a docstring's section ``Args``."""
    lines = iter(doc.splitlines())
    found = set()
    for line in lines:
        if line == "Args:":
            break
    for line in lines:
        if line and not line.startswith(" "):
            break
        name = re.match(r" {4}\*{0,2}(\w+):", line)
        found |= {name[1]} if name else set()
    return found


def _raises(function) -> set[str]:
    """Errors that a function's own statements raise; those inside it do not count."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    found, left = set(), list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(ast.unparse(node.exc.func).split(".")[-1])
        left.extend(ast.iter_child_nodes(node))
    return found & ERRORS


def test_the_reference_shows_the_library():
    assert len(PUBLIC) > 200
    assert {"jaxdec.generate", "jaxdec.LM.save", "jaxdec.tree.depth"} <= set(PUBLIC)


def test_every_public_name_has_a_docstring():
    # A named tuple without one gets its signature from Python.
    made = re.compile(r"^\w+\(.*\)$")
    bare = [
        name
        for name, item in PUBLIC.items()
        if not (doc := inspect.getdoc(item)) or made.fullmatch(doc)
    ]
    assert not bare


def test_a_section_args_names_every_parameter_and_no_other():
    wrong = {}
    for name, function in FUNCTIONS.items():
        asked = set(inspect.signature(function).parameters) - {"self", "cls"}
        told = _args(inspect.getdoc(function) or "")
        if told and told != asked:
            wrong[name] = told ^ asked
    assert not wrong


def test_parameters_are_told_where_they_are_not_common():
    """One alone is what the first line speaks of; several need a word each.

    Not so the parts of the networks: they are for those who read the code.
    """
    wrong = {}
    for name, function in FUNCTIONS.items():
        doc = inspect.getdoc(function) or ""
        asked = set(inspect.signature(function).parameters) - {"self", "cls"}
        left = {p for p in asked - COMMON - _args(doc) if f"`{p}`" not in doc}
        if len(left) > 1 and not function.__module__.startswith("jaxdec.models."):
            wrong[name] = left
    assert not wrong


def test_errors_are_told():
    wrong = {}
    for name, function in FUNCTIONS.items():
        doc = inspect.getdoc(function) or ""
        if left := {error for error in _raises(function) if error not in doc}:
            wrong[name] = left
    assert not wrong


def test_the_reference_is_made_by_the_command_of_the_readme(tmp_path):
    text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    words = shlex.split(re.search(r"&& (pdoc .*)", text)[1])
    words[words.index("api")] = str(tmp_path)
    # One page takes as long as ten tests; that of the library holds what matters.
    rest = [f"!jaxdec.{m}" for m in ("drafters", "models", "sampling", "draft_length")]
    pdoc.__main__.cli([*words[1:], *rest])
    pages = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert {"index.html", "jaxdec.html", "jaxdec/tree.html"} <= pages
    assert not {"jaxdec/certify.html", "jaxdec/compare.html"} & pages
    page = (tmp_path / "jaxdec.html").read_text()
    for name in jaxdec.__all__:
        is_module = isinstance(getattr(jaxdec, name), types.ModuleType)
        assert is_module or f'id="{name}"' in page, name
    # A shape, an argument of a section Args, and no name that is nobody's affair.
    assert "B L" in page and "<strong>max_new_tokens:</strong>" in page
    assert "_prepare" in vars(jaxdec.Server) and 'id="Server._prepare"' not in page
