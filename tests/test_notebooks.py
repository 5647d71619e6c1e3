"""The course in colab/: both forms of every notebook, executed, and its exercises."""

import itertools
import os
import pathlib
import warnings

import pytest

import jaxdec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import jupytext
    import nbclient
    import nbformat

pytestmark = pytest.mark.filterwarnings("ignore")
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "colab"
NAMES = (
    "01_greedy_and_sampling",
    "02_exact_verification",
    "03_native_mtp",
    "04_eagle_trees",
    "05_parallel_drafts",
    "06_proposal_budget",
    "07_benchmark",
    "08_scheduling",
)
BLANK = "None  # your answer"
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"

EXERCISES = {
    "01_greedy_and_sampling": [
        (
            "np.exp(logits / temperature) / np.exp(logits / temperature).sum()",
            "np.exp(logits / temperature)",
        ),
        ("3", "2"),
        ("lm.kv_bytes_per_token", "lm.kv_bytes_per_token // 2"),
    ],
    "02_exact_verification": [
        ("np.minimum(p, q).sum()", "(p * q).sum()"),
        ("np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()", "p"),
        (
            "int(info.num_drafted[0] - info.num_accepted[0])",
            "int(info.num_drafted[0] - info.num_accepted[0]) + 1",
        ),
    ],
    "03_native_mtp": [
        ("1 + np.cumprod(given).sum()", "1 + sum(given)"),
        (
            "(lambda e: e.num_accepted / e.num_steps + 1)(course.evidence_of(runs[5]))",
            "course.evidence_of(runs[5]).acceptance_rate",
        ),
    ],
    "04_eagle_trees": [
        (
            "[[int(j == i or j in path(parents, i)) for j in range(len(parents) + 1)]"
            " for i in range(len(parents) + 1)]",
            "np.tri(len(parents) + 1)",
        ),
        ('["the", "dog", "barks"]', '["the", "cat", "sat"]'),
    ],
    "05_parallel_drafts": [
        ("np.cumprod(confidence)", "confidence"),
        ("2", "4"),
    ],
    "06_proposal_budget": [
        ("(round_ms / plain_ms - 1) / length", "round_ms / plain_ms / length"),
        ("5", "8"),
        (
            'course.best_length(budgets["eagle3"])',
            'course.best_length(budgets["eagle3"]) + 1',
        ),
    ],
    "07_benchmark": [
        ("comparison.advice.best", '"nobody"'),
        (
            "max(comparison.evidence, key=lambda n: "
            "comparison.evidence[n].tokens_per_step)",
            '"greedy"',
        ),
    ],
    "08_scheduling": [
        ("[5, 20, 100]", "[100, 20, 5]"),
        ("chunk_ms + step_ms", "step_ms"),
        ("np.percentile(gaps, 99)", "np.mean(gaps)"),
    ],
}
"""Right and wrong answers, in the order of the blanks."""

BEFORE = """
import numpy as np

def path(parents, node):
    above = parents[node - 1]
    return {above} | path(parents, above) if node else set()
"""
"""What answers may use."""

TRUE = {
    "01_greedy_and_sampling": """
assert answer.column("temperature") == (0.0, 0.5, 1.0, 1.5)
assert answer.row(0.0)["different"] == 1 < answer.row(1.5)["different"]
assert answer.row(0.0)["perplexity"] < answer.row(1.5)["perplexity"]
assert is_repeated == [True] * len(prompts)
assert course.plain_table(greedy).row("steps")["value"] == lesson.max_new_tokens
reads = course.reads_of(greedy)
assert len(reads.rows) == lesson.max_new_tokens
assert reads.column("cache length")[-1] == greedy.evidence.cache_length
""",
    "02_exact_verification": """
assert plain[0].tokens == drafted[0].tokens and certificate.passed
assert course.is_same(one, other) and not course.is_same(start, one)
assert int(before.cache.length[0]) == int(before.sequences.length[0]) - 1
assert int(after.cache.length[0]) == int(before.cache.length[0]) + int(
    info.num_emitted[0])
assert answer.row("emitted")["follow the target"]
assert answer.row("emitted")["how many"] == len(lesson.futures)
assert max(found.num_accepted) > 0
law = course.law_table(lm, found, target[0])
assert abs(sum(law.column("target")) - 1) < 1e-5 and len(law.rows) == 8
assert abs(sum(law.column("emitted")) - 1) < 1e-5
""",
    "03_native_mtp": """
assert answer.row(2)["measured"] == course.evidence_of(runs[2]).tokens_per_step
assert answer.rows[0][1] == 1.0
rates = answer.column("expected")
assert all(a <= b for a, b in zip(rates, rates[1:]))
table = course.native_table(runs[5])
assert table.row("modules of the drafter")["value"] == 1
assert table.row("draft tokens judged")["value"] > 0
assert [a.tokens for a in runs[2]] == [a.tokens for a in runs[5]]
assert [a.tokens for a in ignorant] == [a.tokens for a in runs[5]]
""",
    "04_eagle_trees": """
assert certificate.passed
assert answer.column("draft") == ("chain of 4", "tree of 8", "tree of 16")
assert 9 < answer.row("tree of 16")["nodes read"] <= 17
chain, small, large = answer.column("tokens per step")
assert large > chain
nodes = course.tree_of(runs["tree of 16"], step)
kept = [row for row in nodes.rows if row[4] == "accepted"]
assert len(nodes.rows) == 17 and len(kept) >= 1
assert [row[2] for row in kept] == list(range(1, len(kept) + 1))
""",
    "05_parallel_drafts": """
assert answer.column("threshold")[0] == 0.0
judged, tokens = answer.column("judged per step"), answer.column("tokens per step")
assert all(a >= b for a, b in zip(judged, judged[1:]))
assert all(a >= b for a, b in zip(tokens, tokens[1:]))
whole = course.evidence_of(runs["dspark"])
assert abs(judged[0] - whole.num_judged / whole.num_steps) < 1e-9
assert course.evidence_of(careful).num_judged <= whole.num_judged
assert sum(reliability.column("tokens")) == whole.num_judged
assert all(0 <= x <= 1 for x in reliability.column("happened"))
assert [a.tokens for a in careful] == [a.tokens for a in runs["dspark"]]
""",
    "06_proposal_budget": """
assert answer.column("strategy") == ("lookup", "self_draft", "eagle3")
for name, table in budgets.items():
    assert table.row(0)["net benefit"] == 0
    assert table.row(0)["ms per token"] == plain_ms
    best = course.best_length(table)
    assert table.row(best)["ms per token"] == min(table.column("ms per token"))
    assert table.row(best)["net benefit"] >= 0
    assert measured[name].certified
    gain = answer.row(name)["net benefit"]
    assert answer.row(name)["advice"] == ("use it" if gain > 0.03 else "turn it off")
""",
    "07_benchmark": """
assert answer.column("strategy") == ("greedy", "lookup", "eagle3")
assert all(found.passed for found in comparison.certificates.values())
assert all(word.startswith("yes") for word in answer.column("lossless"))
assert set(pictures) == {"tpot", "tokens_per_step", "acceptance", "quality", "costs"}
assert course.Advice(comparison).best in ("greedy", "lookup", "eagle3")
""",
    "08_scheduling": """
assert len(answer.rows) == 4 * len(rates)
assert set(answer.column("drafts")) == {*load_run.SPECULATION, "plain"}
waits = [point["off"]["ttft_ms"] for point in sweep]
assert waits[-1] > waits[0]
table = course.latency_table(runs, profile)
assert table.column("finished") == (lesson.size.num_requests,) * 2
first, short, _ = course.latency_table(queues, profile).column("TTFT ms")
assert short <= 1.1 * first
""",
}
"""Of each notebook, what must hold after it ran."""


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def body(text: str) -> str:
    """A notebook as text without its header, which names a version of jupytext."""
    return text.split("# ---\n", 2)[2].strip()


def test_there_are_eight():
    found = {path.stem for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")}
    assert found == set(NAMES) == set(EXERCISES) == set(TRUE)


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_say_the_same(name):
    """If not: jupytext --update --to ipynb colab/*.py, or the other way round."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    notebook = read(name)
    cells = [(cell.cell_type, cell.source) for cell in notebook.cells]
    other = jupytext.reads(text, fmt="py:percent")
    assert [(cell.cell_type, cell.source) for cell in other.cells] == cells
    assert body(jupytext.writes(notebook, fmt="py:percent")) == body(text)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (
            cell.outputs == [] and cell.execution_count is None
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_a_question_and_no_logic(name):
    notebook = read(name)
    assert notebook.cells[0].source.startswith(f"# {int(name[:2])}. ")
    assert "?**" in notebook.cells[0].source
    blanks = [cell for cell in notebook.cells if BLANK in cell.source]
    assert len(blanks) == len(EXERCISES[name])
    for cell in notebook.cells[2:]:
        if cell.cell_type == "code" and cell not in blanks:
            assert not {"if", "while", "def", "class"} & set(cell.source.split())
            assert len(cell.source.splitlines()) <= 16


def words(cell) -> str:
    parts = [o.get("text", "") for o in cell.outputs if o.output_type == "stream"]
    return "".join(parts)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in NAMES]
)
def test_a_notebook_answers_its_question(name, monkeypatch):
    monkeypatch.setenv("JAXDEC_COURSE_SIZE", "small")
    monkeypatch.setenv("XLA_FLAGS", QUICK)
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(jaxdec.__file__).parents[1]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    # Kernels share what they compile, however small.
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    notebook = read(name)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    places = itertools.count()

    def run(cell):
        if cell not in notebook.cells:
            notebook.cells.append(cell)
        client.execute_cell(cell, next(places))
        return words(cell)

    with client.setup_kernel():
        blanks = []
        for cell in list(notebook.cells):
            told = run(cell) if cell.cell_type == "code" else next(places)
            if BLANK in cell.source:
                blanks.append(cell.source)
                assert told.startswith("Not answered yet")
        pictures = [
            output
            for cell in notebook.cells
            for output in cell.get("outputs", ())
            if "image/png" in output.get("data", {})
        ]
        assert len(pictures) >= 2
        new = nbformat.v4.new_code_cell
        run(new(TRUE[name]))
        run(new(BEFORE))
        for source, (right, wrong) in zip(blanks, EXERCISES[name], strict=True):
            assert run(new(source.replace(BLANK, right))).startswith("Right. ")
            with pytest.raises(nbclient.exceptions.CellExecutionError) as error:
                run(new(source.replace(BLANK, wrong)))
            assert error.value.ename == "WrongAnswer" and len(error.value.evalue) > 40


def test_sizes_are_checked(monkeypatch):
    from jaxdec import course

    monkeypatch.setenv("JAXDEC_COURSE_SIZE", "huge")
    with pytest.raises(ValueError, match="must be one of small, cpu, accelerator"):
        course.start()
    assert os.environ["JAXDEC_COURSE_SIZE"] == "huge"
