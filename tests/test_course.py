"""What the notebooks are made of: tables, pictures, exercises, and the tiny model."""

import dataclasses
import functools
import inspect
import re

import numpy as np
import pytest

import jaxdec
from jaxdec import course, load_run, prompts, statistics
from jaxdec.course.tiny import LETTERS, tiny_model
from jaxdec.planning.break_even import Measured, expected_tokens
from jaxdec.scheduling import CostTable
from jaxdec.serving_costs import Profile
from jaxdec.speculation import Acceptance
from jaxdec.text import Generated

PROMPT = prompts.builtin()[0].text
PNG = b"\x89PNG"


def lesson(*strategies):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXDEC_COURSE_SIZE", "small")
        return course.start(*strategies)


@functools.cache
def outputs(strategy):
    """An answer of the tiny model, whose drafters nobody has trained."""
    needed = strategy.removesuffix("_tree")
    lm = lesson(*() if needed == "greedy" else (needed,)).lm
    return jaxdec.generate(
        lm, PROMPT, strategy=strategy, max_new_tokens=32, stop_tokens=()
    )


# ---- Tables, pictures, tokens --------------------------------------------------------


def test_a_table_keeps_values_and_shows_them_short():
    table = course.Table(("name", "rate"), [("a<b", 0.12345), ("c", None)], "what")
    assert table.column("rate") == (0.12345, None)
    assert table.row("c") == {"name": "c", "rate": None}
    assert repr(table).splitlines() == ["name  rate", "a<b   0.123", "c     -", "what"]
    assert "a&lt;b" in table._repr_html_() and "<i>what</i>" in table._repr_html_()
    with pytest.raises(ValueError, match="1 values for 2 columns"):
        course.Table(("name", "rate"), [("a",)])


def test_an_answer_token_by_token_is_the_answer():
    out = outputs("eagle3")
    shown = course.show_tokens(out)
    said = "".join(token.text for step in shown.steps for token in step.tokens)
    assert said == out[0].text
    kinds = [token.origin for step in shown.steps for token in step.tokens]
    assert kinds.count("accepted") == out.evidence.num_accepted > 0
    html = shown._repr_html_()
    assert html.count('title="accepted"') == kinds.count("accepted") + 1  # The legend.
    refused = sum(len(step.refused) for step in shown.steps)
    assert html.count('title="refused"') == refused + 1 > 1
    assert "".join(re.findall(r"\[(.)\]", repr(shown))) == "".join(
        t.text for s in shown.steps for t in s.tokens if t.origin == "accepted"
    )


def test_a_picture_can_be_shown_and_saved(tmp_path):
    picture = course.draw_reads(course.reads_of(outputs("greedy")))
    assert picture._repr_png_().startswith(PNG) and "bytes of a step" in repr(picture)
    picture.save(tmp_path / "reads.png")
    assert (tmp_path / "reads.png").read_bytes().startswith(PNG)


def test_reads_are_those_that_the_evidence_counts():
    out = outputs("greedy")
    reads, found = course.reads_of(out), course.evidence_of(out)
    # The evidence counts the rows too that a forward is padded with.
    written = sum(reads.column("KV written MB")) * 1e6
    total = sum(reads.column("KV read MB")) * 1e6 + found.kv_bytes_written - written
    assert total == pytest.approx(found.kv_bytes_read)
    assert reads.column("cache length")[-1] == found.cache_length


# ---- Trees and drafts ----------------------------------------------------------------


def test_a_tree_is_the_draft_of_its_step():
    out = outputs("eagle3_tree")
    info = out.run.info
    at = 0
    kinds = set()
    for step in range(info.num_accepted.shape[1]):
        table = course.tree_of(out, step)
        kept = [row for row in table.rows if row[4] == "accepted"]
        said = out[0].tokens[at : at + int(info.num_emitted[0, step])]
        at += len(said)
        # The accepted path goes down from the anchor, and is what was said.
        assert [row[1] for row in kept] == [0, *(row[0] for row in kept)][:-1]
        assert [row[2] for row in kept] == list(range(1, len(kept) + 1))
        texts = [chr(token).replace(" ", "␣") for token in said]
        assert [row[3] for row in kept] == texts[: len(kept)]
        figure = course.draw_tree(out, step).figure
        (axes,) = figure.axes
        assert len(axes.texts) == len(table.rows) + (len(said) > len(kept))
        if len(said) > len(kept):
            colour = axes.texts[-1].get_bbox_patch().get_facecolor()
            kinds.add(tuple(round(x, 2) for x in colour))
            assert axes.texts[-1].get_text() == texts[-1]
    assert at == len(out[0].tokens)
    assert len(kinds) == 2, "a correction and a bonus"
    best = course.best_step(out)
    assert info.num_accepted[0, best] == info.num_accepted[0].max()
    table = course.shape_table({"tree": out})
    assert table.row("tree")["width"] == 4
    assert course.draw_shapes(table)._repr_png_().startswith(PNG)


def test_reliability_is_what_the_calibration_error_is_made_of():
    out = outputs("dspark")
    table = course.reliability_table(out, num_bins=20)
    found = course.evidence_of(out)
    gaps = [n * abs(said - happened) for _, n, said, happened in table.rows]
    error = sum(gaps) / sum(table.column("tokens"))
    assert error == pytest.approx(found.calibration_error)
    assert course.draw_reliability(table)._repr_png_().startswith(PNG)
    with pytest.raises(ValueError, match="no draft of this run had a confidence"):
        course.reliability_table(outputs("eagle3"))


def test_thresholds_cut_drafts_where_survival_falls_below_them():
    out = outputs("dspark")
    found = course.evidence_of(out)
    table = course.threshold_table(out, (0.0, 0.2, 1.0))
    whole = found.num_judged / found.num_steps
    assert table.row(0.0)["judged per step"] == pytest.approx(whole)
    assert table.row(0.0)["acceptance rate"] == pytest.approx(found.acceptance_rate)
    steps = found.requests[0].steps
    judged = kept = 0
    for confidence, num, accepted in zip(
        steps.draft_confidence, steps.num_judged, steps.num_accepted, strict=True
    ):
        length, survival = 0, 1.0
        for value in confidence[:num]:
            survival *= value
            if survival < 0.2:
                break
            length += 1
        judged, kept = judged + length, kept + min(length, accepted)
    assert 0 < judged < found.num_judged
    assert table.row(0.2)["judged per step"] == judged / found.num_steps
    assert table.row(0.2)["tokens per step"] == 1 + kept / found.num_steps
    assert table.row(1.0)["judged per step"] == 0
    assert table.row(1.0)["acceptance rate"] is None
    picture = course.draw_thresholds(table, {"run": out})
    assert picture._repr_png_().startswith(PNG)


def test_expected_tokens_of_all_drafts_are_those_that_were_measured():
    out = outputs("eagle3")
    found = course.evidence_of(out)
    table = course.expected_table(out, {4: out})
    given = [c or 0.0 for c in found.conditional_acceptance_by_position]
    assert table.column("draft length") == (0, 1, 2, 3, 4)
    expected = tuple(expected_tokens(given, k) for k in range(5))
    assert table.column("expected") == expected
    assert table.column("measured") == (None,) * 4 + (found.tokens_per_step,)
    assert course.draw_expected(table)._repr_png_().startswith(PNG)
    counts = course.counts_table({"a": out, "b": outputs("greedy")})
    assert counts.row("a")["tokens per step"] == found.tokens_per_step
    assert counts.row("b")["acceptance rate"] is None
    picture = course.draw_acceptance({"a": out, "b": outputs("dspark")})
    lines = picture.figure.axes[1].lines
    assert list(lines[0].get_ydata()) == list(found.block_acceptance)


def test_an_answer_has_a_law_only_if_it_was_asked_for():
    out = outputs("greedy")
    with pytest.raises(ValueError, match="generate it with logprobs=8"):
        course.draw_laws(out, ["plain"])


# ---- The law -------------------------------------------------------------------------

LAW = {3: 0.5, 7: 0.3, 40: 0.2}


def answer_with(law):
    logs = tuple((token, float(np.log(p))) for token, p in law.items())
    return Generated(text="", tokens=(3,), finish_reason="length", top_logprobs=(logs,))


def drawn(law, num=400):
    rng = np.random.default_rng(1)
    tokens = rng.choice(list(law), size=num, p=list(law.values())).tolist()
    return course.Futures(
        emitted=tuple(tokens), drafted=tuple(tokens[:50]), num_accepted=(0,) * num
    )


def test_the_law_test_tells_laws_apart():
    plain = answer_with(LAW)
    assert course.law_test(drawn(LAW), plain).passed
    assert not course.law_test(drawn({3: 0.2, 7: 0.3, 40: 0.5}), plain).passed
    # Tokens that the target cannot say.
    assert not course.law_test(drawn({3: 0.5, 7: 0.2, 50: 0.3}), plain).passed
    tests = course.law_tests(drawn(LAW), plain)
    assert tests.column("how many") == (400, 50)
    assert tests.row("emitted")["at most"] == pytest.approx(
        statistics.kolmogorov_smirnov(np.ones(400)).threshold
    )


def test_a_law_is_drawn_beside_what_was_said():
    found = drawn(LAW)
    table = course.law_table(tiny_model(), found, answer_with(LAW))
    assert table.column("target") == pytest.approx(list(LAW.values()))
    shares = [found.emitted.count(token) / 400 for token in LAW]
    assert list(table.column("emitted")) == shares
    bars = course.draw_law(table, 400).figure.axes[0].patches
    assert [bar.get_height() for bar in bars[3:6]] == shares
    strange = dataclasses.replace(found, drafted=(3, 99, 99, 99))
    others = course.law_table(tiny_model(), strange, answer_with(LAW)).rows[-1]
    assert others == ("others", pytest.approx(0), 0.75, 0)


# ---- Budgets -------------------------------------------------------------------------


def measured(**changes):
    values = dict(
        certified=True,
        tpot_ms=20.0,
        tokens_per_step=2.0,
        draft_length=2,
        judged_per_step=2.0,
        acceptance_rate=0.5,
        conditional_acceptance_by_position=(0.6, 0.667),
        draft_cost_ms=4.0,
        verify_cost_ms={0: 30.0, 2: 34.0},
    )
    return Measured(**values | changes)


def test_a_budget_is_the_time_of_a_round_over_its_tokens():
    table = course.budget_table(measured(), 30.0)
    # The round of 40 ms has 2 ms beyond drafting and verifying.
    assert table.column("round ms") == pytest.approx((30.0, 2 + 32 + 2, 4 + 34 + 2))
    assert table.column("tokens") == pytest.approx((1, 1.6, 1 + 0.6 + 0.6 * 0.667))
    assert table.row(1)["net benefit"] == pytest.approx(1 - 36 / 1.6 / 30)
    assert course.best_length(table) == 2
    slow = course.budget_table(measured(tpot_ms=90.0), 30.0)
    assert course.best_length(slow) == 0
    runs = {"good": measured(), "slow": measured(tpot_ms=90.0)}
    even = course.break_even_table(runs, 30.0)
    assert even.row("good")["break-even"] == pytest.approx((40 / 30 - 1) / 2)
    assert even.column("advice") == ("use it", "turn it off")
    assert even.column("best length") == (2, 2)
    assert "not the 3% gain" in even.row("slow")["why"]
    unproved = {"new": measured(certified=False)}
    assert course.break_even_table(unproved, 30.0).column("advice") == ("not ranked",)
    assert even.row("slow")["break-even"] > 1
    assert even.row("good")["net benefit"] == pytest.approx(1 / 3)
    picture = course.draw_budget({"good": table, "slow": slow})
    assert list(picture.figure.axes[1].lines[0].get_ydata()) == list(
        table.column("net benefit")
    )


@pytest.mark.parametrize(
    ("name", "at_once"),
    [
        ("lookup", True),
        ("dflash", True),
        ("dspark", True),
        ("eagle3", False),
        ("mtp", False),
    ],
)
def test_a_block_costs_the_same_however_much_of_it_is_wanted(name, at_once):
    trained = () if name == "lookup" else (name,)
    strategy = lesson(*trained).strategy(name)
    assert strategy.drafts_at_once == at_once
    mixed = jaxdec.first_of(jaxdec.lookup(4), strategy)
    assert mixed.drafts_at_once == at_once
    assert not jaxdec.self_draft(1).drafts_at_once


def test_the_map_of_break_even_has_its_line_where_nothing_is_gained():
    found = measured()
    figure = course.draw_break_even(found, 30.0).figure
    (mesh,) = [c for c in figure.axes[0].collections if hasattr(c, "get_coordinates")]
    benefit = np.asarray(mesh.get_array()).reshape(41, 2)
    # With no acceptance, a round says one token.
    assert benefit[0] == pytest.approx([1 - 36 / 30, 1 - 40 / 30])
    assert benefit[-1] == pytest.approx([1 - 36 / 60, 1 - 40 / 90])


# ---- Serving -------------------------------------------------------------------------

PROFILE = Profile(
    costs=CostTable(
        step_s=(0.04, 0.06),
        chunk_s=0.05,
        limited_s=((0, (0.03, 0.04)), (2, (0.035, 0.05))),
    ),
    acceptance=Acceptance(conditional=(0.6, 0.5, 0.4, 0.3)),
    prefill_chunk=96,
    strategy="lookup",
)


def test_above_capacity_the_queue_grows():
    setup = lesson().setup()
    most = course.max_rate(setup, PROFILE)
    waits = []
    for share in (0.3, 0.9, 3.0, 9.0):
        busy = course.at_rate(setup, share * most)
        records = load_run.imitate(busy, PROFILE, "first_come")
        waits.append(np.mean([record.queue_wait_s for record in records]))
    assert waits == sorted(waits) and waits[-1] > 5 * waits[0]
    # Never faster than what the steps of all slots say.
    many = course.at_rate(setup, 50 * most)
    records = load_run.imitate(many, PROFILE, "first_come", kind="fixed")
    span = max(r.bursts[-1].time_s for r in records) - records[0].arrival_s
    assert len(records) / span <= 1.6 * most


def test_loads_in_tables_and_pictures():
    setup = lesson().setup(20.0)
    runs = {
        name: load_run.imitate(setup, PROFILE, name)
        for name in ("first_come", "shortest_remaining")
    }
    table = course.latency_table(runs, PROFILE)
    assert table.column("finished") == (6, 6)
    gaps = [1000 * gap for r in runs["first_come"] for gap in r.token_gaps_s]
    row = table.row("first_come")
    assert row["gap P99"] == pytest.approx(np.percentile(gaps, 99))
    assert (
        max(gaps) == pytest.approx(row["longest gap"]) and max(gaps) <= row["bound ms"]
    )
    lines = course.draw_gaps(runs, PROFILE).figure.axes[0].lines
    assert list(lines[0].get_xdata()) == pytest.approx(sorted(gaps))
    marks = course.draw_requests(runs["first_come"], "load").figure.axes[0].lines
    assert sum(len(line.get_xdata()) for line in marks) == sum(
        len(record.bursts) for record in runs["first_come"]
    )
    sweep = load_run.sweep(setup, PROFILE, [1.0, 30.0])
    points = course.sweep_table(sweep)
    assert points.column("requests/s") == (1.0,) * 3 + (30.0,) * 3
    assert points.column("drafts")[:3] == load_run.SPECULATION
    curves = course.draw_sweep(sweep, 200.0).figure.axes[0].lines
    assert list(curves[2].get_ydata()) == [points.rows[2][2], points.rows[5][2]]
    lengths = course.length_table(PROFILE)
    for _, best, there, without, everything in lengths.rows:
        assert 0 <= best <= 4 and there >= max(without, everything)
    assert course.draw_lengths(lengths)._repr_png_().startswith(PNG)


# ---- Exercises -----------------------------------------------------------------------

OF_A_RUN = {
    "check_acceptance_length",
    "check_choice",
    "check_kv_bytes",
    "check_most_tokens",
    "check_own_best_length",
    "check_rollback",
}
CHECKS = [
    getattr(course, name)
    for name in course.__all__
    if name.startswith("check_") and name not in OF_A_RUN
]


def is_of_a_function(check):
    return "Callable" in str(next(iter(inspect.signature(check).parameters.values())))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_answer_is_no_mistake_and_nonsense_is_a_wrong_answer(check, capsys):
    wraps = is_of_a_function(check)

    def give(answer):
        return check((lambda *_: answer) if wraps else answer)

    give(None)
    assert capsys.readouterr().out.startswith("Not answered yet")
    nonsense = [[0.5, [1, 2]], [], "no"] if wraps else []
    for answer in nonsense:
        with pytest.raises(course.WrongAnswer, match="[a-z]"):
            give(answer)
    assert "Right" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("check", "wrong", "hint"),
    [
        (course.check_residual, lambda p, q: p, "Drawing again from p"),
        (course.check_residual, lambda p, q: np.maximum(p - q, 0), "sum is not 1"),
        (course.check_expected_tokens, lambda c: sum(c), "own token is certain"),
        (course.check_percentile, lambda g: np.max(g) + 1, "99 % of the way up"),
        (course.check_gap_bound, lambda c, s: 3 * (c + s), "one chunk"),
    ],
)
def test_hints_are_about_the_mistake(check, wrong, hint):
    with pytest.raises(course.WrongAnswer, match=hint):
        check(wrong)


def test_a_mistake_of_the_learners_own_is_told_as_python_tells_it():
    with pytest.raises(ZeroDivisionError):
        course.check_survival(lambda confidence: 1 / 0)


# ---- The tiny model ------------------------------------------------------------------


def test_the_tiny_model_speaks_letters_and_reads_bytes():
    lm = tiny_model()
    text = "Über 90 % – 你好!\n"
    assert lm.tokenizer.encode(text) == list(text.encode())
    assert lm.tokenizer.decode(list(text.encode())) == text
    said = outputs("greedy")[0]
    assert set(said.tokens) <= set(LETTERS) and len(set(said.tokens)) >= 3
    assert bytes(said.tokens).decode() == said.text


def test_a_lesson_has_what_its_cells_ask_for():
    found = lesson("draft_model", "mtp")
    assert {"draft_model", "mtp", "mtp_tree"} <= set(found.lm.strategies)
    assert found.strategy("mtp", length=2).length == 2
    rejecting = found.strategy("draft_model", rule="rejection")
    assert (rejecting.rule, rejecting.draft.kind) == ("rejection", "draft_model")
    assert len(found.prompts) == found.size.num_prompts == 2
    assert found.setup(3.0).traffic.rate == 3.0
    assert "tiny" in repr(found) and "<table>" in found._repr_html_()
    with pytest.raises(ValueError, match="unknown strategy"):
        found.strategy("eagel3")
