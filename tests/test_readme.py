"""What README.md says is true: its commands, its code, its links and its tables."""

import ast
import functools
import inspect
import pathlib
import re
import shlex
import tomllib
import types

import jax
import jax.numpy as jnp
import pytest
import toy
import typer
from example_drafter import LastSuccessor, last_successor
from helpers_tiny import write_model

import jaxdec
from jaxdec import decoding, measure, strategies
from jaxdec.cli import app
from jaxdec.io.gguf_names import ARCHITECTURES
from jaxdec.io.hf_families import FAMILIES
from jaxdec.planning.presets import TARGETS
from jaxdec.policies import POLICIES

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [block for language, block in BLOCKS if language == "python"]
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def _commands() -> list[str]:
    """Every command line of a block or of the running text, without its comment."""
    found = []
    for language, block in BLOCKS:
        if language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                found += line.split("  #")[0].split(" && ")
    words = r"(?:jaxdec|pip install|python) [^`]+"
    found += re.findall(rf"(?<!`)`({words})`(?!`)", PROSE)
    return [" ".join(command.split()) for command in found]


COMMANDS = _commands()


def _section(title: str) -> str:
    return re.search(rf"^#+ {title}\n(.*?)(?=^##? )", TEXT, re.M | re.S)[1]


def _table(section: str) -> list[list[str]]:
    """The cells of the rows of a section's tables, titles left out."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    rules = [i for i, row in enumerate(rows) if set("".join(row)) == {"-"}]
    return [r for i, r in enumerate(rows) if i not in rules and i + 1 not in rules]


def _quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_blocks_say_what_they_are():
    assert {language for language, _ in BLOCKS} == {"python", "sh", "bibtex"}
    assert len(PYTHON) >= 5 and len(COMMANDS) >= 20


# ---- Commands ------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one(command):
    program, *words = shlex.split(command)
    programs = {
        "jaxdec": _jaxdec,
        "jupyter": _jupyter,
        "pdoc": _pdoc,
        "pip": _pip,
        "python": _python,
    }
    programs[program](words)


def _jaxdec(words):
    """The command line is read, its values are looked at, and nothing runs."""
    group = typer.main.get_command(app)
    if words == ["--help"]:
        return
    with group.make_context("jaxdec", words, resilient_parsing=True) as context:
        name, command, rest = group.resolve_command(context, words)
        # Running text may leave out what a command cannot do without.
        is_whole = f"`jaxdec {shlex.join(words)}`" not in PROSE
        with command.make_context(
            name, list(rest), parent=context, resilient_parsing=not is_whole
        ) as own:
            asked = own.params
            assert not own.args
    for option in ("strategy", "strategies"):
        for item in (asked.get(option) or "").split(","):
            if item:
                strategies.check_name(item)
    for item in (asked.get("policies") or "").split(","):
        assert not item or item in POLICIES
    if name == "plan" and asked["model"] is not None:
        assert asked["model"] in TARGETS


def _pip(words):
    assert words[0] == "install"
    for word in words[1:]:
        extra = re.fullmatch(r"\.(?:\[(\w+)\])?", word)
        if extra is None:
            known = word in ("jupyterlab", "libtpu")
            assert known or re.fullmatch(r"jax\[\w+\]", word), word
        else:
            assert extra[1] is None or extra[1] in EXTRAS


def _python(words):
    if words[:2] == ["-m", "pytest"]:
        for word in words[2:]:
            assert not word.startswith("tests") or (ROOT / word).exists(), word
        return
    source = (ROOT / words[0]).read_text()
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word}"' in source, word


def _jupyter(words):
    assert words[0] == "lab" and list((ROOT / words[1]).glob("*.ipynb"))


def _pdoc(words):
    """`test_reference.py` runs it."""
    assert "pdoc" in {re.match(r"\w+", item)[0] for item in EXTRAS["docs"]}
    assert words[-1].startswith("!jaxdec.") or words[-1] == "jaxdec"


def test_markers_are_known():
    known = {
        m.split(":")[0] for m in PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    }
    used = set(re.findall(r'-m "([^"]+)"', TEXT))
    assert used
    for expression in used:
        assert set(expression.split()) - {"not", "and"} <= known


# ---- Code ----------------------------------------------------------------------------


def test_the_example_is_the_file():
    """The drafter that the contract table tests is the one that readers see."""
    shown = re.search(
        r"<!-- example:begin -->\n```python\n(.*?)```\n<!-- example:end -->", TEXT, re.S
    )
    assert shown[1] == (ROOT / "tests" / "example_drafter.py").read_text()
    assert "(`tests/example_drafter.py`)" in TEXT


@pytest.mark.parametrize("block", PYTHON)
def test_names_and_arguments_of_code_exist(block):
    """Of all code, that of models which are too large to run here, too."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Call):
            function = _object(node.func)
            if function is not None and not inspect.isclass(function):
                kwargs = {k.arg: None for k in node.keywords if k.arg}
                inspect.signature(function).bind(*node.args, **kwargs)
        elif isinstance(node, ast.Attribute):
            _object(node)


def _object(node):
    """What ``jaxdec.a.b`` is; None for any other expression."""
    text = ast.unparse(node)
    if not re.fullmatch(r"jaxdec(\.\w+)+", text):
        return None
    found = jaxdec
    for name in text.split(".")[1:]:
        found = getattr(found, name)
    return found


def test_inline_names_exist():
    for name in re.findall(r"`jaxdec\.([\w.]+)", PROSE):
        found = jaxdec
        for part in name.split("."):
            found = getattr(found, part)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What ``jaxdec.load`` gives in place of a model from afar."""
    folder = write_model(tmp_path_factory.mktemp("tiny") / "model")
    return jaxdec.load(folder, dtype="float32")


@pytest.fixture
def run(monkeypatch, tiny):
    """Runs the block of code with these words in it; returns its names."""
    monkeypatch.setattr(jaxdec, "load", lambda name: tiny)
    # What a step costs is timed in programs of its own.
    evidence = functools.partial(measure.evidence, with_costs=False)
    monkeypatch.setattr(measure, "evidence", evidence)

    def execute(words, **names):
        (block,) = [block for block in PYTHON if words in block]
        names = {"jaxdec": jaxdec, "lm": tiny} | names
        exec(compile(block, "README.md", "exec"), names)
        return names

    return execute


def test_the_quickstart_runs(run, capsys):
    said = run('jaxdec.load("smollm2")')
    assert len(said["out"][0].tokens) == 64 and said["piece"].finish_reason == "length"
    assert capsys.readouterr().out.startswith(said["out"][0].text)


def test_the_example_learns_and_follows():
    """The last successor wins, scratch is not learned, unknown ends the draft."""
    drafter = last_successor(3, 10)
    tokens = jnp.array([[1, 2, 1, 3, 9], [4, 5, 6, 7, 8]], jnp.int32)
    commit = jaxdec.Commit(
        tokens=tokens,
        features=jnp.zeros((2, 4, 0), jnp.float32),
        length=jnp.array([4, 2], jnp.int32),
    )
    state = drafter.extend((), drafter.init(2, 8), commit)
    said = types.SimpleNamespace(anchor=jnp.array([2, 4], jnp.int32))
    _, draft = drafter.propose((), state, said)
    assert draft.length.tolist() == [3, 2]
    assert draft.tokens[0].tolist() == [1, 3, 9]
    assert draft.tokens[1, :2].tolist() == [5, 6] and draft.tokens.max() < 10


def test_the_example_drafts_in_generate(run, monkeypatch):
    monkeypatch.setattr(jaxdec, "certify", lambda *args, **options: None)
    said = run('name="last_successor"', LastSuccessor=LastSuccessor)
    evidence = said["out"].evidence
    # A model that was never trained goes in circles.
    assert evidence.num_accepted > 0 and evidence.proposal_mode == "chain"
    assert evidence.num_steps < len(said["out"][0].tokens) == 16


def test_the_engine_takes_what_is_said(run, monkeypatch):
    """Traced only: shapes and names fit."""

    def traced(*args, **options):
        made = decoding.speculative(*args, **options)
        prefill, step = (
            functools.partial(jax.eval_shape, f) for f in (made.prefill, made.step)
        )
        return made._replace(prefill=prefill, step=step)

    monkeypatch.setattr(jaxdec, "speculative", traced)
    said = run(
        "jaxdec.jit_programs",
        model=toy.tiny(),
        drafter=jaxdec.drafters.lookup.lookup(2),
        params=jaxdec.StrategyParams(target=toy.tiny_params(), drafter=()),
        request=toy.ragged(max_new=3),
    )
    assert said["state"].sequences.tokens.shape == (4, 1024)
    assert said["info"].num_emitted.shape == (4,)


def test_the_server_and_the_certificate_run(run):
    said = run("jaxdec.Server")
    assert [t.is_done for t in said["tickets"]] == [True] * 3 and said["tickets"][
        0
    ].text
    said = run('name="last_successor"', LastSuccessor=LastSuccessor)
    assert said["certificate"].passed


# ---- Tables and links ----------------------------------------------------------------


def test_links_lead_somewhere():
    titles = re.findall(r"^##+ (.+)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
    shown = re.sub(r"<!--.*?-->", "", TEXT, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", shown):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif target.startswith("http"):
            assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", target), target
        else:
            assert (ROOT / target).exists(), target


def test_files_exist_and_are_all_there():
    named = {name for row in _table(_section("Files")) for name in _quoted(row[0])}
    package = ROOT / "jaxdec"
    files = {path.name for path in package.glob("*.py") if path.stem[:2] != "__"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert named == files | folders
    for name in _quoted(PROSE):
        if re.fullmatch(r"(jaxdec|tests|\.ci)/[\w./]+", name):
            assert (ROOT / name).exists(), name


def test_strategies_are_all_there():
    rows = [row for row in _table(_section("Strategies")) if len(row) == 5]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    trees = ["eagle_tree", "eagle3_tree", "mtp_tree"]
    mixed = ["first_of", "first_of_tree"]
    known = [*strategies.BY_NAME, *strategies.TRAINED, *trees]
    assert sorted(named) == sorted([*known, "draft_model", *mixed])
    for row in rows:
        rules = _quoted(row[3])
        assert rules <= {"match", "rejection"}
        if {"lookup", *mixed, *trees} & _quoted(row[0]):
            assert rules == {"match"}
        assert row[4], "what it is tested against"


def test_formats_are_all_there():
    rows = _table(_section("Formats that load"))
    targets = [row for row in rows if _quoted(row[1]) & set(FAMILIES)]
    assert {name for row in targets for name in _quoted(row[1])} == set(FAMILIES)
    assert {n for row in targets for n in _quoted(row[2])} == set(ARCHITECTURES)
    for row in targets:
        (kind,) = _quoted(row[1])
        for name in _quoted(row[2]):
            # Converters write Mistral's files as Llama's.
            assert ARCHITECTURES[name].model_type in (kind, "llama")
