"""The target's answers: resumable, the engine's own, and told apart."""

import dataclasses

import numpy as np
import pytest
import tiny

import jaxdec
from jaxdec.prompts import Prompt
from jaxdec.training import regenerate as work
from jaxdec.training.store import read_store


def prompts(num=10):
    return [Prompt(id=f"p{i}", text=f"{i}", source="s") for i in range(num)]


@pytest.fixture
def lm(monkeypatch):
    """The tiny target, which reads numbers as prompts."""

    def encode(lm, prompt, chat, system, row):
        return [int(prompt) + 1, 5, 7] if isinstance(prompt, str) else list(prompt)

    monkeypatch.setattr(work, "encode", encode)
    return tiny.target()


def test_a_killed_run_goes_on_and_gives_the_same_store(lm, tmp_path):
    options = dict(batch_size=4, max_new_tokens=6, temperature=1.5)
    jobs = work.plan(prompts(), num_validation=3, sampled=0.6)
    whole = work.regenerate(lm, jobs, tmp_path / "whole", **options)

    class Killed(Exception):
        pass

    def kill(done, total, text):
        assert total == 10 and "answer tokens" in text
        if done >= 8:
            raise Killed

    with pytest.raises(Killed):
        work.regenerate(lm, jobs, tmp_path / "part", **options, progress=kill)
    assert len(read_store(tmp_path / "part")) == 8
    parts = work.regenerate(lm, jobs, tmp_path / "part", **options)
    assert parts.content_hash() == whole.content_hash()
    assert len(whole) == 10 and whole.is_validation.tolist() == [False] * 7 + [True] * 3
    assert whole.is_greedy[7:].all() and 0 < whole.is_greedy[:7].sum() < 7
    # Nothing is left to do, and more prompts add to what is there.
    assert len(work.regenerate(lm, jobs, tmp_path / "part", **options)) == 10
    expected = jaxdec.generate(
        lm,
        [whole.tokens(i)[:3].tolist() for i in range(10)],
        strategy="sample",
        temperature=[0.0 if greedy else 1.5 for greedy in whole.is_greedy],
        seed=[job.seed for job in jobs],
        max_new_tokens=6,
    )
    for i, answer in enumerate(expected):
        assert list(answer.tokens) == whole.tokens(i)[3:].tolist()


def test_how_a_prompt_is_answered_depends_on_its_id_alone():
    few = {j.prompt.id: j for j in work.plan(prompts(40), num_validation=5)}
    many = {j.prompt.id: j for j in work.plan(prompts(60), num_validation=5)}
    for name in [f"p{i}" for i in range(35)]:
        assert few[name] == many[name]
    assert len({job.seed for job in many.values()}) == 60
    greedy = [job.is_greedy for job in many.values()]
    assert 15 < sum(greedy) < 45
    with pytest.raises(ValueError, match="two prompts have the id 'p0'"):
        work.plan([*prompts(2), *prompts(1)])
    with pytest.raises(ValueError, match="0 to 1"):
        work.plan(prompts(2), sampled=50.0)


def test_a_store_begins_with_another(lm, tmp_path):
    options = dict(batch_size=4, max_new_tokens=4)
    jobs = work.plan(prompts(4), num_validation=1)
    first = work.regenerate(lm, jobs, tmp_path / "first", **options)
    work.begin_with(tmp_path / "second", tmp_path / "first")
    work.begin_with(tmp_path / "second", tmp_path / "first")
    second = read_store(tmp_path / "second")
    assert second.content_hash() == first.content_hash() and len(second) == 4
    assert np.array_equal(second.is_validation, first.is_validation)


def test_prompts_may_be_kept_alone(lm, tmp_path):
    some = work.plan(prompts(4), num_validation=1)
    work.regenerate(lm, some, tmp_path, max_new_tokens=4)
    jobs = work.plan(prompts(9), num_validation=0)
    store = work.regenerate(lm, jobs, tmp_path, max_new_tokens=0)
    assert store.prompt_id.tolist() == [f"p{i}" for i in range(9)]
    assert (store.length[4:] == 3).all() and (store.prompt_length == 3).all()
    assert store.num_answer_tokens == sum(store.length[:4] - 3) > 0
    # A recipe may learn from them past what all begin with, and never from those of
    # the answers that validate.
    wanted = np.where(store.is_validation, 3, 1)  # The first token is another's.
    np.testing.assert_array_equal(store.with_prompts().prompt_length, wanted)
    ids = store.ids.copy()
    ids[store.offsets[:-1]] = 9
    ids[store.offsets[:-1] + 2] = store.ids[store.offsets[:-1]]
    found = dataclasses.replace(store, ids=ids).with_prompts()
    assert found.prompt_length.tolist() == np.where(store.is_validation, 3, 2).tolist()
    assert found.content_hash() != store.content_hash()  # Of other tokens.
    assert store.with_prompts().content_hash() == store.content_hash()


def test_prompts_that_are_there_alone_are_answered_later(lm, tmp_path):
    jobs = work.plan(prompts(4), num_validation=1)
    store = work.regenerate(lm, jobs, tmp_path, max_new_tokens=0)
    assert len(store) == 4 and not store.is_validation.any()
    store = work.regenerate(lm, jobs, tmp_path, max_new_tokens=3)
    assert len(store) == 8 and store.is_validation.tolist() == [False] * 7 + [True]
    assert (store.length > store.prompt_length).tolist() == [False] * 4 + [True] * 4


def test_a_prompt_that_does_not_fit_is_named_before_any_is_answered(lm, tmp_path):
    jobs = work.plan(prompts(2), num_validation=1)
    with pytest.raises(ValueError, match="more than the target's 1024 positions"):
        work.regenerate(lm, jobs, tmp_path, max_new_tokens=1023)
    assert not list(tmp_path.iterdir())
