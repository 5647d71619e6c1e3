"""Faults that attacks on the public API found, each with the right value."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_tiny import write_model

import jaxdec
from jaxdec import measure

PROMPT = "abcabcabcabc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def lm(folder):
    return jaxdec.load(folder, dtype="float32")


@pytest.mark.parametrize("seed", [0, 5, 10])
def test_certify_names_a_tie_of_one_ulp(lm, seed):
    """The choice is by ``u + noise``, the gap by ``law + noise``: it may be < 0."""
    options = dict(
        strategy="sample", temperature=8.0, max_new_tokens=1, stop_tokens=[], seed=seed
    )

    def run(bias):
        return jaxdec.generate(lm, PROMPT, logit_bias={7: float(bias)}, **options)

    first = run(0)[0].tokens[0]
    low, high = np.float32(0), np.float32(100)
    while (middle := np.float32((low + high) / 2)) not in (low, high):
        if run(middle)[0].tokens[0] == first:
            low = middle
        else:
            high = middle
    for ulps in range(-4, 5):
        out = run(low + ulps * np.spacing(low))
        other = 7 if out[0].tokens[0] == first else first
        swapped = dataclasses.replace(
            out, items=(dataclasses.replace(out[0], tokens=(other,)),)
        )
        found = jaxdec.certify(lm, PROMPT, "sample", outputs=swapped)
        assert [tie.kind for tie in found.ties] == ["tie"]
        assert not found.divergences


def test_certify_of_a_sampled_answer_without_tokens_is_a_failure_not_a_crash(lm):
    found = jaxdec.certify(
        lm, PROMPT, "sample", temperature=1.0, banned_tokens=list(range(259))
    )
    assert not found.passed
    assert "nothing was compared" in found.summary()


def test_certify_of_greedy_rows_beside_a_sampled_one_without_tokens(lm):
    bans = [[], list(range(259))]
    out = jaxdec.generate(
        lm,
        [PROMPT, "x"],
        strategy=jaxdec.lookup(3),
        temperature=[0.0, 1.0],
        max_new_tokens=5,
        banned_tokens=bans,
    )
    assert jaxdec.certify(lm, [PROMPT, "x"], jaxdec.lookup(3), outputs=out).passed


def test_certify_does_not_certify_a_strategy_that_did_not_run(lm):
    out = jaxdec.generate(lm, PROMPT, strategy="greedy", max_new_tokens=4)
    with pytest.raises(ValueError):
        jaxdec.certify(lm, PROMPT, "lookup", outputs=out)


def test_certify_takes_the_largest_seed(lm):
    found = jaxdec.certify(
        lm,
        ["ab", "cd"],
        "sample",
        max_new_tokens=4,
        temperature=0.8,
        seed=2**32 - 1,
    )
    assert found.passed


def test_certify_takes_temperatures_as_a_jax_array(lm):
    out = jaxdec.generate(
        lm,
        [PROMPT, "x"],
        strategy="sample",
        max_new_tokens=4,
        temperature=jnp.array([0.0, 0.7]),
    )
    assert jaxdec.certify(lm, [PROMPT, "x"], "sample", outputs=out).passed


def test_certify_knows_the_stop_tokens_of_each_request(lm):
    options = dict(strategy="sample", temperature=0.0, max_new_tokens=4)
    free = jaxdec.generate(lm, [PROMPT] * 2, stop_tokens=[], **options)
    stops = [[free[0].tokens[1]], []]
    out = jaxdec.generate(lm, [PROMPT] * 2, stop_tokens=stops, **options)
    assert [item.tokens for item in out] == [free[0].tokens[:2], free[0].tokens]
    assert jaxdec.certify(lm, [PROMPT] * 2, "sample", outputs=out).passed


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": jnp.array([0.0, 0.7])},
        {"top_k": jnp.int32(3)},
        {"banned_tokens": range(5)},
    ],
    ids=str,
)
def test_evidence_is_json_whatever_the_options_were_given_as(lm, options):
    out = jaxdec.generate(
        lm, [PROMPT, "x"], strategy="sample", max_new_tokens=4, **options
    )
    record = measure.evidence(out.run, out.items, with_costs=False)
    assert json.loads(record.to_json())["num_emitted"] == record.num_emitted


def test_a_large_no_repeat_ngram_ends_and_bans_nothing(lm):
    """The loop is over the n-gram: 2**31 - 1 rounds of it would never come back."""
    plain = jaxdec.generate(lm, PROMPT, max_new_tokens=4)
    huge = jaxdec.generate(lm, PROMPT, max_new_tokens=4, no_repeat_ngram=2**31 - 1)
    assert huge[0].tokens == plain[0].tokens


def test_stop_string_that_only_the_end_completes_sets_the_finish_reason(lm):
    """U+FFFD of a character that was cut off appears when the text is flushed."""
    for seed in range(30):
        options = dict(strategy="sample", temperature=1.0, seed=seed, max_new_tokens=2)
        free = jaxdec.generate(lm, PROMPT, **options)[0]
        cut = jaxdec.generate(lm, PROMPT, stop="\ufffd", **options)[0]
        assert (cut.text != free.text) == (cut.finish_reason == "stop_string"), seed


def test_stop_string_counts_as_a_stop_token_at_the_same_token(lm):
    options = dict(strategy=jaxdec.lookup(3), max_new_tokens=30)
    prompt = "aAbAcA"
    first = jaxdec.generate(lm, prompt, max_new_tokens=1, stop_tokens=[])[0].tokens[0]
    text = lm.tokenizer.decode([first])
    by_token = jaxdec.generate(lm, prompt, stop_tokens=[first], **options)
    by_text = jaxdec.generate(lm, prompt, stop_tokens=[], stop=text, **options)
    assert by_token[0].tokens == by_text[0].tokens
    a, b = (
        measure.evidence(o.run, o.items, with_costs=False) for o in (by_token, by_text)
    )
    assert (a.num_drafted, a.num_judged) == (b.num_drafted, b.num_judged)


def test_a_bad_output_format_is_refused_before_the_model_runs(lm):
    with pytest.raises(ValueError):
        jaxdec.generate(lm, PROMPT, max_new_tokens=2, output_format="(")


def test_one_key_array_for_all_requests(lm):
    keys = jax.random.split(jax.random.key(0), 2)
    options = dict(strategy="sample", max_new_tokens=4)
    wanted = jaxdec.generate(lm, [PROMPT, "x"], seed=list(keys), **options)
    found = jaxdec.generate(lm, [PROMPT, "x"], seed=keys, **options)
    assert [o.tokens for o in found] == [o.tokens for o in wanted]


def test_a_key_of_another_kind_is_one_clear_error(lm):
    with pytest.raises(ValueError):
        jaxdec.generate(
            lm, PROMPT, strategy="sample", seed=jax.random.key(0, impl="rbg")
        )


@pytest.mark.parametrize(
    "options",
    [
        {"prompts": "\ud800"},
        {"prompts": None},
        {"prompts": [1.0, 2.0]},
        {"logprobs": True},
        {"exact": -3},
    ],
    ids=str,
)
def test_bad_input_is_one_clear_error(lm, options):
    with pytest.raises(ValueError):
        jaxdec.generate(lm, **{"prompts": PROMPT, "max_new_tokens": 2, **options})


def test_prompt_ids_as_a_jax_array(lm):
    wanted = jaxdec.generate(lm, [1, 2, 3], max_new_tokens=2)[0].tokens
    assert jaxdec.generate(lm, jnp.array([1, 2, 3]), max_new_tokens=2)[0].tokens == (
        wanted
    )


def test_64_bit_jax_is_refused_in_one_sentence(lm):
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(ValueError, match="jax_enable_x64 is on; switch it off"):
            jaxdec.generate(lm, PROMPT, max_new_tokens=4)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_command_says_in_a_line_that_an_argument_is_no_text(folder):
    done = subprocess.run(
        [sys.executable, "-m", "jaxdec", "generate", b"\xff", "--model", str(folder)],
        capture_output=True,
    )
    assert done.returncode != 0
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"foo": 1}, r"^there is no option 'foo'; There are .*top_k.*"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"min_pp": 1}, "did you mean 'min_p'"),
        ({"vocab_size": 1}, "no option 'vocab_size'"),
        ({"temperature": "x"}, "^temperature must be a finite number.*got 'x'"),
        ({"temperature": True}, "^temperature must be a finite number.*got True"),
        ({"temperature": 0.5}, "strategy 'greedy' is temperature 0, got .* 0.5"),
        ({"logprobs": True}, "logprobs must be .* got True"),
    ],
    ids=str,
)
def test_options_that_are_none(lm, options, words):
    with pytest.raises(ValueError, match=words) as caught:
        jaxdec.generate(lm, "hi", **options)
    assert "\n" not in str(caught.value)


def test_a_drafter_is_loaded_for_a_loaded_target(tmp_path):
    with pytest.raises(ValueError, match=r"got 'smollm2'; pass jaxdec.load"):
        jaxdec.load_drafter(tmp_path, "smollm2")


def test_an_absent_drafter_is_no_absent_model(lm):
    with pytest.raises(ValueError, match="no drafter 'nowhere'") as caught:
        jaxdec.load_drafter("nowhere", lm)
    assert "model" not in str(caught.value)
