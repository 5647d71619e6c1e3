"""The drafters that come with jaxdec: small, with their cards, and worth their cost."""

import functools
import pathlib

import numpy as np
import pytest

import jaxdec
from jaxdec.io.drafters.own import is_own
from jaxdec.io.orbax import load_metadata
from jaxdec.shipped import shipped
from jaxdec.training.store import read_store

ROOT = pathlib.Path(__file__).parent.parent / "checkpoints"
FOUND = shipped(ROOT)
PROMPTS = ["Why is the sky blue?", "Write a function that reverses a list in Python."]


@functools.cache
def load():
    return jaxdec.load("smollm2", dtype="bfloat16")


def test_all_are_small_and_whole():
    assert FOUND
    folders = {path for path in ROOT.glob("*/*") if path.is_dir()}
    assert folders == {found.folder for found in FOUND}
    size = sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file())
    assert size <= 80e6, f"{size / 1e6:.1f} MB"


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.strategy)
def test_a_card_says_what_it_is_of_and_how_it_came_to_be(found):
    assert is_own(found.folder)
    card = load_metadata(found.folder)["card"]
    text = (found.folder / "README.md").read_text(encoding="utf-8")
    assert card["target"]["hash"] == found.target and found.target in text
    for said in (card["licences"], card["command"], "## Tokens per step"):
        assert said in text
    tasks = {"gsm8k", "humaneval", "mbpp", "math500", "mt_bench"}
    assert card["acceptance"]
    for record in card["acceptance"]:
        assert set(record["tokens_per_step_by_task"]) == tasks
        assert record["num_prompts"] == 200


@functools.cache
def answers():
    return read_store(ROOT / "smollm2-135m-instruct" / "answers.npz")


def test_answers_are_as_their_table_says():
    store, text = answers(), (ROOT / "smollm2-135m-instruct/answers.md").read_text()
    assert (
        f"{store.num_answer_tokens:,} tokens" in text
        and f"{len(store):,} answers" in text
    )
    assert f"greedy ({int(store.is_greedy.sum()):,})" in text
    assert f"validation ({int(store.is_validation.sum())})" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line[:2] == "| "]
    told, licences = 0, set()
    for sources, num, licence in rows[1:]:
        names = [n.strip() for n in sources.split("(")[0].split(",")]
        found = sum(int(np.sum(store.source == name)) for name in names)
        assert found == int(num.replace(",", "")) > 0, sources
        told += found
        licences.add(licence.strip())
    assert told == len(store)
    assert licences <= {"MIT", "Apache-2.0", "CC BY 4.0"}


@pytest.mark.real
def test_answers_are_the_targets_own():
    store = answers()
    long = store.is_greedy & (store.length - store.prompt_length >= 100)
    some = np.flatnonzero(long)[[0, -1]]
    prompts = [store.tokens(i)[: store.prompt_length[i]].tolist() for i in some]
    for i, out in zip(
        some, jaxdec.generate(load(), prompts, max_new_tokens=8), strict=True
    ):
        # They were answered 64 at a time, which rounds differently: a token may differ.
        said = store.tokens(i)[store.prompt_length[i] :][:8]
        assert list(out.tokens)[:4] == said[:4].tolist()


@functools.cache
def greedy():
    return jaxdec.generate(load(), PROMPTS[1], strategy="greedy", max_new_tokens=64)


@pytest.mark.real
@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.strategy)
def test_it_says_what_the_target_says_in_fewer_steps(found):
    lm = load()
    assert found.target == lm.content_hash
    # A round of up to 7 rows is bit for bit a plain one.
    out = jaxdec.generate(
        lm, PROMPTS[1], strategy=found.strategy, draft_length=4, max_new_tokens=64
    )
    assert out[0].tokens == greedy()[0].tokens
    assert out.evidence.tokens_per_step > 1.6


@pytest.mark.real
@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.strategy)
def test_all_its_strategies_are_certified(found):
    lm = load()
    names = [
        n for n in (found.strategy, f"{found.strategy}_tree") if n in lm.strategies
    ]
    for name in names:
        out = jaxdec.generate(lm, PROMPTS, strategy=name, max_new_tokens=64)
        certificate = jaxdec.certify(lm, PROMPTS, name, outputs=[out])
        assert certificate.passed, certificate
        assert out.evidence.tokens_per_step > 1.6
