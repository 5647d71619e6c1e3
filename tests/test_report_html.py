"""The page of a report: made from the dictionary alone, whole, safe, and right."""

import collections
import copy
import html.parser
import importlib
import json
import re

import numpy as np
import pytest
from helpers_tiny import write_model

import jaxdec
from jaxdec.certificate import certify as conclude
from jaxdec.prompts import Prompt
from jaxdec.report import plots, tables, timeline
from jaxdec.report.figures import data, figures
from jaxdec.report.page import html as page
from jaxdec.types import StepInfo

compare_module = importlib.import_module("jaxdec.compare")

HOSTILE = "</script><script>alert('x')</script><img src=http://evil.example/x> \"&amp;"
VOID = {"meta", "link", "input", "br", "img"}


def request(**more):
    """Three steps of an answer: a rollback, a bonus, a plain token."""
    return {
        "prompt_id": "one",
        "task": "chat",
        "text": "a b c d<e",
        "num_accepted": 3,
        "num_emitted": 6,
        "steps": {
            "num_drafted": [3, 2, 0],
            "num_judged": [3, 2, 0],
            "num_accepted": [1, 2, 0],
            "num_emitted": [2, 3, 1],
            "path": [[1], [1, 2], []],
            "draft_confidence": [[0.9, 0.4, 0.1], [0.8, 0.7], []],
            "draft_source": [0, 0, 0],
        },
        "tokens": [1, 2, 3, 4, 5, 6],
        "logprobs": [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6],
        "timeline": {
            "pieces": ["a", " b", " c\n", HOSTILE, "<e", ""],
            "refused": [[" x<y"], [], []],
            "dropped": [[" z"], [], []],
            "refused_node": [2, 0, 0],
        },
        **more,
    }


def strategy(name, **more):
    return {
        "strategy": name,
        "draft_length": 3,
        "temperature": 0.0,
        "reference": "greedy",
        "speed_vs_greedy": 1.5,
        "tokens_per_step_by_task": {"chat": 2.0, HOSTILE: 2.5},
        "tokens_per_step": 2.0,
        "tokens_per_step_not_repetitive": 2.0,
        "acceptance_rate": 0.6,
        "acceptance_by_position": [0.75, None, 0.25],
        "num_rollbacks": 1,
        "tpot_ms": 12.0,
        "draft_cost_ms": 4.0,
        "verify_cost_ms": 15.0,
        "drafter_param_bytes": 3_000_000,
        "drafter_state_bytes": 0,
        "exact_match": 1.0,
        "perplexity": 2.5,
        "repetition_rate": 0.0,
        "format_success_rate": 1.0,
        "distinct_outputs": 1,
        "finish_reasons": {"length": 1},
        "versions": {"jaxdec": "0.1.0", "device": "cpu"},
        "hashes": {"target": "abc"},
        "sampling": {"rule": "match"},
        "requests": [request()],
        **more,
    }


PLAIN = strategy(
    "greedy",
    draft_length=0,
    speed_vs_greedy=1.0,
    tpot_ms=18.0,
    acceptance_rate=0.0,
    acceptance_by_position=[],
    draft_cost_ms=0.0,
    perplexity=2.25,
    requests=[request(timeline=None)],
)
WRONG = strategy("wrong", tpot_ms=None, tokens_per_step_not_repetitive=0.0)
TIE = dict(position=3, plain_token=7, emitted_token=8, gap=0.01, kind="tie", request=0)
REPORT = {
    "model": {"name": f"tiny {HOSTILE}", "dtype": "float32", "num_params": 12},
    "settings": {
        "max_new_tokens": 6,
        "seed": 0,
        "batch_size": 1,
        "device": "cpu",
        "draft_length": None,
        "prompts": [{"prompt_id": "one", "task": HOSTILE, "prompt": f"Say {HOSTILE}"}],
        "notes": [f"a note {HOSTILE}"],
    },
    "strategies": [PLAIN, strategy("quick"), WRONG],
    "certificates": {
        "quick": {
            "mode": "greedy",
            "dtype": "float32",
            "row_class": "any",
            "tolerance": 0.05,
            "num_positions": 6,
            "ties": [TIE],
            "divergences": [],
            "ks": None,
            "passed": True,
            "reasons": [],
        },
        "wrong": {
            "mode": "sampled",
            "num_positions": 6,
            "ties": [],
            "divergences": [{**TIE, "kind": "divergence", "gap": None}],
            "ks": {"statistic": 0.5, "threshold": 0.125},
            "passed": False,
            "reasons": [f"1 of 6 tokens differ {HOSTILE}"],
        },
    },
    "floor": {"floor_ms": 3.0},
    "together": None,
    "advice": {
        "best": "quick",
        "verdict": f"Use quick: it is faster.\nTurn {HOSTILE} off.",
        "findings": [
            {
                "code": "acceptance",
                "strategy": "wrong",
                "reason": f"too few {HOSTILE}",
                "instruction": "change the drafter",
            }
        ],
        "rankings": [
            {
                "strategy": "quick",
                "action": "use",
                "reason": "12 ms a token",
                "measured_tpot_ms": 12.0,
                "predicted_tpot_ms": {"2": 11.5},
                "best_draft_length": 2,
                "break_even_acceptance": 0.125,
            }
        ],
    },
}


class Page(html.parser.HTMLParser):
    """What a browser would find, if every element is closed where it must be."""

    def __init__(self, source):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        element["within"] = tuple(self.open)
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1]["tag"] == tag, (tag, self.open[-1:])
        self.open.pop()

    def handle_data(self, text):
        for element in self.open:
            element["text"] += text

    def all(self, tag, css=None):
        return [
            element
            for element in self.elements
            if element["tag"] == tag
            and (css is None or css in (element.get("class") or "").split())
        ]

    def within(self, outer, tag, css=None):
        return [e for e in self.all(tag, css) if any(o is outer for o in e["within"])]

    def table(self, name):
        """Titles and rows of the table of that name."""
        (region,) = [e for e in self.all("div", "wide") if e["aria-label"] == name]
        rows = [
            [
                cell["text"]
                for cell in self.elements
                if cell["tag"] in ("th", "td") and any(o is row for o in cell["within"])
            ]
            for row in self.within(region, "tr")
        ]
        return (rows[0], rows[1:]) if self.within(region, "thead") else ([], rows)


@pytest.fixture(scope="module")
def made_up():
    return Page(page(REPORT))


def check_loads_nothing(source):
    found = Page(source)
    for element in found.elements:
        assert element["tag"] not in ("img", "iframe", "object", "embed", "base")
        for name, value in element.items():
            assert not name.startswith("on"), (name, value)
            if name in ("src", "href", "srcset", "action", "xlink:href"):
                assert value.startswith("#") or value == "data:,", (name, value)
    (policy,) = [e for e in found.all("meta") if "http-equiv" in e]
    assert policy["content"].startswith("default-src 'none'")
    (style,), (script,) = found.all("style"), found.all("script")
    assert "url(" not in style["text"] and "@import" not in style["text"]
    for word in ("fetch", "XMLHttp", "import", "http", "eval", "innerHTML"):
        assert word not in script["text"]
    ids = [element["id"] for element in found.elements if "id" in element]
    assert len(ids) == len(set(ids))
    for link in found.all("a"):
        assert link["href"][1:] in ids
    return found


def test_it_is_one_whole_page_that_loads_nothing(made_up):
    check_loads_nothing(page(REPORT))
    assert len(made_up.all("section")) == len(made_up.all("h2")) == 7
    for figure in made_up.all("figure"):
        assert made_up.within(figure, "figcaption")


def test_what_others_wrote_is_only_text(made_up):
    assert len(made_up.all("script")) == 1 and not made_up.all("img")
    (body,) = made_up.all("body")
    # In a prompt, a model's name, a task, an answer, a finding, a verdict, a reason,
    # and a note.
    assert body["text"].count(HOSTILE) >= 8
    titles = [e["title"] for e in made_up.all("span", "t") if "title" in e]
    assert any(HOSTILE in title for title in titles)


def test_every_figure_of_the_tables_is_there(made_up):
    for name, titles, rows in (
        ("Speed and losslessness", tables.HEADERS, tables.rows(REPORT)),
        ("Tokens per step, by task", *tables.task_table(REPORT)),
        ("Quality", *tables.quality_table(REPORT)),
    ):
        shown = made_up.table(name)
        assert shown == ([tables.one_line(t) for t in titles], [list(r) for r in rows])
    _, (greedy, quick, wrong) = made_up.table("Speed and losslessness")
    assert quick == "quick 2.00 60% 1 12.0 1.50x 4.00 15.0 3.0 100%".split() + [
        "yes, 1 tie"
    ]
    assert greedy[2:4] == ["-", "-"] and greedy[-1] == "not tried"
    assert wrong[-1] == "NO"
    # Zero is a figure.
    assert made_up.table("Tokens per step, by task")[1][2][-1] == "0.00"
    (best,) = made_up.within(made_up.all("div", "wide")[0], "tr", "best")
    assert best["text"].startswith("quick")


def test_drawings_are_to_scale(made_up):
    tpot, per_step, accepted, quality, costs = made_up.all("figure")

    def drawn(figure, tag, css=None):
        (drawing,) = made_up.within(figure, "svg", "figure")
        return made_up.within(drawing, tag, css)

    def widths(figure, css=None):
        return [float(e["width"]) for e in drawn(figure, "rect", css)]

    assert widths(tpot) == [360, 240, 0]
    assert widths(per_step) == [360] * 3
    # quick: drafting 4, verifying 15, and 5 more of a round of 2 x 12 ms; greedy's
    # round of 2 x 18 is the longest.
    assert widths(costs, "c0") == [0, 40, 40]
    assert widths(costs, "c1") == [150] * 3
    assert widths(costs, "c2") == [210, 50, 0]
    (line, _) = made_up.within(accepted, "polyline")
    (x0, y0), (x2, y2) = (map(float, p.split(",")) for p in line["points"].split())
    assert (x0, x2) == (38, 348) and (y0, y2) == (10 + 190 / 4, 10 + 190 * 3 / 4)
    marks = [mark for tag in ("circle", "polygon") for mark in drawn(quality, tag)]
    said = {mark["text"]: mark["class"] for mark in marks}
    assert said == {
        "greedy: 1.00 times greedy, perplexity 2.25, not certified": "mark open c0",
        "quick: 1.50 times greedy, perplexity 2.50, certified": "mark c1",
        "wrong: 1.50 times greedy, perplexity 2.50, not certified": "mark open c2",
    }
    legends = [item["text"] for item in made_up.within(quality, "li")]
    assert legends == ["greedy", "quick", "wrong"]
    # A strategy looks alike in every figure.
    assert "c1" in line["class"].split()
    titles, (quick, _) = made_up.table("Acceptance by position")
    assert titles == ["strategy", "1", "2", "3"]
    assert quick == ["quick", "75.0%", "-", "25.0%"]


def check_answers(found, report):
    """The tokens of every answer that was kept, against the steps of its request."""
    groups = iter(found.all("div", "tokens"))
    num = 0
    for i in range(len(report["settings"]["prompts"])):
        for record in report["strategies"]:
            told = record["requests"][i]
            if not told.get("timeline"):
                continue
            num += 1
            group = next(groups)
            spans = found.within(group, "span", "t")
            by_origin = collections.Counter(span["class"].split()[1] for span in spans)
            assert by_origin["accepted"] == told["num_accepted"]
            assert by_origin.total() == told["num_emitted"] == len(told["tokens"])
            steps = told["steps"]
            pairs = list(zip(steps["num_judged"], steps["num_accepted"], strict=True))
            own = sum(steps["num_emitted"]) - sum(steps["num_accepted"])
            if own == len(pairs):
                plain = sum(judged == 0 for judged, _ in pairs)
                rollbacks = sum(judged > accepted for judged, accepted in pairs)
                assert by_origin["plain"] == plain
                assert by_origin["correction"] == rollbacks
                assert by_origin["bonus"] == own - plain - rollbacks
            texts = [span["text"].replace("↵", "").replace("·", "") for span in spans]
            pieces = told["timeline"]["pieces"]
            assert texts == [re.sub("[↵·]", "", piece) for piece in pieces]
            stops = [span["tabindex"] for span in spans]
            assert stops == ["0"] + ["-1"] * (len(spans) - 1)
    assert next(groups, None) is None
    return num


def test_answers_tell_where_each_token_came_from(made_up):
    assert check_answers(made_up, REPORT) == 2
    group = made_up.all("div", "tokens")[0]
    spans = made_up.within(group, "span", "t")
    origins = [span["class"].split()[1] for span in spans]
    assert origins == "accepted correction accepted accepted bonus plain".split()
    (refused,) = made_up.within(group, "del")
    assert refused["text"] == " x<y"
    assert [s["text"] for s in made_up.within(group, "small")] == ["+1"]
    first, correction, *_, plain = (span["title"] for span in spans)
    assert first == (
        "token 1, step 1: accepted draft token 1 of 3\ndraft “a”, target “a”\n"
        "the target's probability of it: 90.5%\nthe drafter's confidence: 90.0%"
    )
    assert correction == (
        "token 2, step 1: correction by the target\ndraft “ x<y”, target “ b”\n"
        "the target's probability of it: 81.9%\n"
        "the drafter's confidence in “ x<y”: 40.0%\nthe draft went on: “ z”"
    )
    assert "nothing was drafted\ntarget “”" in plain
    broken = copy.deepcopy(REPORT)
    broken["strategies"][1]["requests"][0]["timeline"]["pieces"].append("more")
    with pytest.raises(ValueError, match="7 tokens, but the steps emitted 6"):
        page(broken)


def test_certificates_and_advice_have_their_words(made_up):
    passed, refused = made_up.all("article")
    assert passed["class"] == "certificate passed"
    assert passed["text"].startswith(
        "quick: lossless6 positions; the tokens were replayed through plain greedy "
        "decoding; 1 tie within 0.05, 0 divergences; float32, rows of a forward: any."
    )
    assert refused["class"] == "certificate failed"
    assert "wrong: NOT lossless" in refused["text"]
    assert "0 ties within -, 1 divergence; distance of" in refused["text"]
    assert "0.5, at most 0.125 allowed" in refused["text"]
    assert "1 of 6 tokens differ" in refused["text"]
    (verdict,) = made_up.all("div", "verdict")
    assert verdict["text"].startswith("Use quick: it is faster.")
    words = [item["text"] for item in made_up.all("li")]
    assert "wrong: too few " + HOSTILE + ".Change the drafter." in words
    assert (
        "quick, use: 12 ms a token.Measured 12.0 ms a token; break-even at 12.5% "
        "acceptance; best draft length 2, predicted 11.5 ms." in words
    )
    pairs = dict(made_up.table("Versions")[1])
    assert pairs == {"jaxdec": "0.1.0", "device": "cpu"}
    assert ["draft length", "-"] in made_up.table("Settings")[1]
    assert ["rule", "match"] in [
        [key.removeprefix("sampling."), value]
        for key, value in made_up.table("Strategy quick")[1]
    ]


def names(value):
    """Every name in a report."""
    if isinstance(value, dict):
        return set(value).union(*map(names, value.values()))
    return set().union(*map(names, value)) if isinstance(value, list) else set()


def without(value, name):
    """A report in which a name is null, wherever it is; of a list, its entry."""
    if isinstance(value, dict):
        kept = {key: without(item, name) for key, item in value.items()}
        if name in kept:
            kept[name] = [None] if isinstance(kept[name], list) else None
        return kept
    if isinstance(value, list):
        return [without(item, name) for item in value]
    return value


def test_what_is_missing_is_a_dash():
    """Whatever is null, or not there: the page is whole, and says so."""
    small = {**REPORT, "strategies": REPORT["strategies"][:2]}
    for name in sorted(names(small)):
        source = page(without(small, name))
        assert not re.search(r"\b(None|nan)\b", source), name
    bare = {
        "settings": {"prompts": [{}]},
        "strategies": [{}],
        "certificates": {"x": {}},
        "advice": {"findings": [{}], "rankings": [{}]},
    }
    for nearly in ({}, bare, dict.fromkeys(REPORT)):
        (body,) = Page(page(nearly)).all("body")
        assert "No certificate was drawn up" in body["text"]
        assert "None" not in body["text"]
    nulls = copy.deepcopy(small)
    for name in ("tpot_ms", "speed_vs_greedy", "perplexity", "verify_cost_ms"):
        nulls["strategies"][1][name] = None
    found = Page(page(nulls))
    _, (_, quick) = found.table("Time per token")
    assert quick == ["quick", "-"]
    _, (_, quick) = found.table("Speed against quality")
    assert quick == ["quick", "-", "-"]


def info(**leaves):
    """One row and one step that drafted [11, 12, 13, 14]."""
    zeros = np.zeros((1, 1, 4), np.float32)
    shared = dict(
        is_live=np.ones((1, 1), bool),
        draft_tokens=np.array([[[11, 12, 13, 14]]]),
        draft_confidence=zeros,
        draft_source=np.zeros((1, 1), np.int32),
        num_drafted=np.array([[4]]),
        logprobs=zeros,
        top_logprobs=zeros[..., None],
        top_tokens=zeros[..., None].astype(np.int32),
    )
    return StepInfo(**shared, **{k: np.array([[v]]) for k, v in leaves.items()})


@pytest.mark.parametrize(
    ("leaves", "refused", "dropped", "node"),
    [
        # A chain, refused at its second token; then with a draft clipped after it.
        (([0, 1, 2, 3], [0, 1, 2, 3, 4], 4, 1), "12 ", "13 14 ", 2),
        (([0, 1, 2, 3], [0, 1, 2, 3, 4], 2, 1), "12 ", "", 2),
        (([0, 1, 2, 3], [0, 1, 2, 3, 4], 4, 4), "", "", 0),
        # A tree: 11 with children 12 and 13, and 14 after 13.
        (([0, 1, 1, 3], [0, 1, 0, 0], 3, 1), "12 13 ", "", 2),
        (([0, 1, 1, 3], [0, 0, 0, 0], 3, 0), "11 ", "12 ", 1),
        (([0, 1, 1, 3], [0, 1, 3, 0], 3, 2), "14 ", "", 4),
    ],
)
def test_what_was_refused(leaves, refused, dropped, node):
    names = ("draft_parents", "path", "num_judged", "num_accepted")
    values = dict(zip(names, leaves, strict=True))
    step = info(**values, num_emitted=values["num_accepted"] + 1)
    found = timeline.record(None, [1, 2], step, 0)
    assert found == {
        "pieces": ["1 ", "2 "],
        "refused": [[f"{word} " for word in refused.split()]],
        "dropped": [[f"{word} " for word in dropped.split()]],
        "refused_node": [node],
    }


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tiny") / "model")
    return jaxdec.load(folder, dtype="float32")


def test_pieces_are_the_text(lm):
    tokens = [*lm.tokenizer.encode("né🙂"), 256]
    assert timeline.pieces(lm.tokenizer, tokens) == [
        *("n", "", "é", "", "", "", "🙂", "<|end|>")
    ]
    assert timeline.pieces(lm.tokenizer, tokens[:2]) == ["n", "\ufffd"]
    assert timeline.pieces(lm.tokenizer, []) == []


def test_a_real_comparison(lm, tmp_path, monkeypatch):
    def passes(lm, prompts, strategy, **options):
        return conclude(
            strategy=strategy.name,
            mode="greedy",
            dtype=lm.dtype,
            row_class="any",
            tolerance=0.0,
            num_positions=8,
        )

    monkeypatch.setattr(compare_module, "certify", passes)
    monkeypatch.setattr(compare_module, "TOGETHER", 1)
    prompts = [Prompt(id=f"p{i}", text=f"abcabc{HOSTILE[:i]}") for i in range(4)]
    comparison = jaxdec.compare(
        lm, prompts, ["lookup"], max_new_tokens=24, out=tmp_path
    )
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert source == page(report) == page(comparison.to_dict())
    found = check_loads_nothing(source)
    # Two strategies; of four prompts, the first three.
    assert check_answers(found, report) == 6
    shown = found.table("Speed and losslessness")[1]
    assert shown == [list(row) for row in tables.rows(report)]
    assert [p.get("prompt") for p in report["settings"]["prompts"]] == [
        *(prompt.text for prompt in prompts[:3]),
        None,
    ]
    lookup = report["strategies"][1]
    assert lookup["num_accepted"] > 0 and lookup["num_rollbacks"] > 0
    for told in lookup["requests"][:3]:
        kept, at = told["timeline"], 0
        for i, judged in enumerate(told["steps"]["num_judged"]):
            emitted = told["steps"]["num_emitted"][i]
            missed = judged - told["steps"]["num_accepted"][i]
            assert len(kept["refused"][i]) + len(kept["dropped"][i]) == missed
            at += emitted
            if missed:
                # The target would have agreed with what it said itself.
                own = lm.tokenizer.token_bytes(told["tokens"][at - 1])
                assert kept["refused"][i] != [own.decode("utf-8", "replace")] or (
                    "\ufffd" in kept["refused"][i][0]
                )
    for figure in figures(report):
        assert (tmp_path / f"{figure.name}.png").read_bytes().startswith(b"\x89PNG")
        assert found.table(figure.title)[1] == [list(row) for row in data(figure)[1]]


def test_without_matplotlib_there_are_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not plots.can_draw() and plots.plot(REPORT, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
