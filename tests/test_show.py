"""`jaxdec show` on a tiny model: the text, the colours and their numbers, errors."""

import collections
import io
import re

import pytest
import rich.console
from helpers_tiny import write_model
from rich.control import strip_control_codes

import jaxdec
from jaxdec import console, show_command
from jaxdec.cli import app
from jaxdec.counts import ORIGINS

PROMPT = "abcabcabc"
LOOKUP = {"strategy": "lookup", "max_new_tokens": 48}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def lm(model):
    return jaxdec.load(model, dtype="float32")


@pytest.fixture
def run(monkeypatch, capsys, lm):
    monkeypatch.setattr(console, "prepare_jax", lambda: None)

    def call(*arguments):
        status = console.run(app, ["show", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def origins_of(evidence):
    """Where each token came from, by the steps that the evidence keeps."""
    found = []
    for request in evidence.requests:
        steps = request.steps
        for judged, accepted, emitted in zip(
            steps.num_judged, steps.num_accepted, steps.num_emitted, strict=True
        ):
            found += ["accepted"] * accepted
            if emitted > accepted:
                own = "bonus" if accepted == judged else "correction"
                found.append(own if judged else "plain")
    return found


def coloured(lm, **options):
    return show_command.Coloured(
        jaxdec.stream(lm, PROMPT, segment=1, **options), lm.tokenizer
    )


def test_every_token_has_the_colour_of_its_step(lm):
    stream = coloured(lm, **LOOKUP)
    shown = [part for parts in stream for part in parts]
    outputs = jaxdec.generate(lm, PROMPT, **LOOKUP)
    evidence = outputs.evidence
    assert stream.outputs.items == outputs.items
    assert "".join(text for text, _ in shown) == outputs[0].text
    expected = origins_of(evidence)
    assert stream.counts == collections.Counter(expected)
    assert set(stream.counts) == set(ORIGINS), "the prompt shows every colour"
    assert stream.counts["accepted"] == evidence.num_accepted
    assert stream.counts.total() == evidence.num_emitted
    assert stream.num_steps == evidence.num_steps
    # Of this model, every byte is a token; half a character has no text yet.
    texts = iter(expected)
    for text, origin in shown:
        assert origin in texts, f"{text!r} is {origin}, out of order"


def test_without_a_terminal_there_are_brackets(run, model, lm):
    words = ["--model", model, "--dtype", "float32", "--max-new-tokens", "48"]
    status, out, err = run(PROMPT, *words, "--strategy", "lookup")
    assert status == 0, err
    stream = coloured(lm, **LOOKUP)
    marks = {"accepted": "[{}]", "correction": "{{{}}}", "bonus": "<{}>", "plain": "{}"}
    parts = [marks[origin].format(text) for found in stream for text, origin in found]
    assert out == "".join(parts) + "\n"
    legend, summary = err.splitlines()
    counts = stream.counts
    assert legend == (
        f"[accepted draft] {counts['accepted']}  {{correction}} "
        f"{counts['correction']}  <bonus> {counts['bonus']}  plain {counts['plain']}"
    )
    evidence = stream.outputs.evidence
    assert summary.startswith(f"[lookup] 48 tokens in {evidence.num_steps} steps")


def terminal(**options):
    return rich.console.Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        highlight=False,
        _environ={"TERM": "xterm"},
        **options,
    )


def test_on_a_terminal_the_whole_answer_is_left(lm):
    """Longer than the terminal is high, so that only its end shows while it grows."""
    screen = terminal(width=40, height=4)
    stream = coloured(lm, **LOOKUP)
    show_command.watch(stream, screen)
    written = screen.file.getvalue()
    last = f"step {stream.num_steps} gave {stream.num_last}: 48 tokens, "
    assert f"{last}{48 / stream.num_steps:.2f} a step" in written
    # What was drawn while it grew is taken back; the answer stands after it.
    left = written[written.rindex("\x1b[2K") + 4 :]
    text = stream.outputs[0].text
    for code, origin in ((32, "accepted"), (33, "correction"), (34, "bonus")):
        assert (f"\x1b[1;{code}m" in left) == (stream.counts[origin] > 0)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", left)
    assert plain.lstrip("\r") == strip_control_codes(text) + "\n"


def test_no_colour_means_brackets():
    assert show_command.has_colours(terminal())
    assert not show_command.has_colours(terminal(no_color=True))
    assert not show_command.has_colours(rich.console.Console(file=io.StringIO()))


def test_text_that_waits_keeps_its_origin(lm):
    """A stop string may have begun; and an answer may end within a character."""
    plain = jaxdec.generate(lm, PROMPT, **LOOKUP)[0].text
    options = LOOKUP | {"stop": (plain[20:23],)}
    stream = coloured(lm, **options)
    shown = [part for parts in stream for part in parts]
    outputs = jaxdec.generate(lm, PROMPT, **options)
    assert "".join(text for text, _ in shown) == outputs[0].text
    assert outputs[0].finish_reason == "stop_string"
    assert stream.counts == collections.Counter(origins_of(outputs.evidence))
    waiting = collections.deque([(0, "bonus"), (3, "accepted"), (1, "plain")])
    cut = show_command._parts
    assert list(cut("ab", waiting)) == [("ab", "accepted")]
    assert list(cut("cd\ufffd", waiting)) == [
        ("c", "accepted"),
        ("d", "plain"),
        ("\ufffd", "plain"),
    ]


def test_nothing_to_show(run, model):
    tiny = ["--model", model, "--dtype", "float32", "--max-new-tokens", "0"]
    assert run("x", *tiny) == (0, "\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([" "], "prompt is empty"),
        (["x", "--strategy", "magic"], "unknown strategy 'magic'"),
        (["x", "--drafter", "nowhere"], "no drafter 'nowhere'"),
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--draft-length", "0"], "length"),
        (["x", "--draft-model", "m"], "and lookup was asked for"),
        (["x", "--model", "missing.gguf"], "missing.gguf"),
    ],
)
def test_errors_are_one_line(run, arguments, words):
    status, out, err = run(*arguments)
    assert status == 1 and out == ""
    assert err.startswith("jaxdec: ") and err.count("\n") == 1 and words in err
