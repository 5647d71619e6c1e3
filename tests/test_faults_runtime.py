"""Faults of other libraries: compilation, donation, ragged batches (B48 to B56)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec import decoding
from jaxdec.drafters.draft_model import draft_model
from jaxdec.drafters.lookup import lookup
from jaxdec.drafters.none import none
from jaxdec.types import DrafterParams, StrategyParams


def _prompt(length):
    return [(7 * i + length) % toy.VOCAB for i in range(length)]


@pytest.mark.parametrize("name", ["plain", "self", "tree", "lookup"])
def test_b48_values_compile_nothing(name):
    """Twenty prompt lengths and every kind of setting: no trace but the first two."""
    built = toy.method(name)
    toy.run(built, toy.ragged())
    before = len(built.traces)
    for start in range(5, 25, 4):
        prompts = [_prompt(length) for length in range(start, start + 4)]
        toy.run(built, toy.make_request(prompts, max_new=start))
    for settings in (
        {"temperature": 0.7},
        {"top_k": 5, "temperature": 1.0},
        {"top_p": 0.5, "min_p": 0.1, "temperature": 1.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"frequency_penalty": 0.5, "no_repeat_ngram": 3},
        {"stop": [3, 4, 5], "min_new_tokens": 4},
        {"logit_bias": {3: 1.0}, "banned_tokens": [5]},
        {"seeds": [9, 8, 7, 6], "max_draft": [0, 1, 2, 3]},
    ):
        toy.run(built, toy.ragged(**settings), steps=5)
    assert len(built.traces) == before


def test_b48_kinds_of_step_counts():
    """NumPy and JAX integers are one program; so is every number of steps."""
    built = toy.method("plain")
    state = built.prefill(built.params, toy.ragged())
    built.generate(built.params, state, jnp.int32(3))
    before = len(built.traces)
    for count in (np.int32(3), jnp.asarray(4, jnp.int32), jnp.int32(64)):
        built.generate(built.params, state, count)
    assert len(built.traces) == before


# ---- Program size --------------------------------------------------------------------


def _num_equations(jaxpr) -> int:
    """Equations of a jaxpr and of all jaxprs within it."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += _num_equations(inner)
    return total


def _strategy(kind: str, length: int = 4, capacity: int = toy.CAPACITY, layers=None):
    target = toy.tiny_params()
    model = toy.tiny()
    drafter = {
        "plain": none,
        "lookup": lambda: lookup(length),
        "self": lambda: draft_model(model, length),
        "tree": lambda: toy.tree_of(draft_model(model, length)),
    }[kind]()
    strategy = decoding.speculative(model, drafter, capacity=capacity, prefill_chunk=16)
    params = StrategyParams(
        target=target, drafter=DrafterParams(own=None, shared=target)
    )
    return strategy, params


@functools.cache
def _size(kind: str, length: int = 4, capacity: int = toy.CAPACITY, slots: int = 16):
    strategy, params = _strategy(kind, length, capacity)
    request = jax.eval_shape(lambda: toy.ragged(max_new=4))

    def whole(params, request, max_steps):
        state = strategy.prefill(params, request)
        return decoding.generate(strategy, params, state, max_steps, num_slots=slots)

    jaxpr = jax.make_jaxpr(whole)(params, request, jnp.int32(4))
    return _num_equations(jaxpr.jaxpr)


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_b49_generate_is_not_unrolled(kind):
    """Neither room for tokens nor room for records changes the program."""
    small = _size(kind, capacity=512, slots=16)
    assert small == _size(kind, capacity=2048, slots=1024)


@pytest.mark.parametrize("kind", ["self", "tree"])
def test_b49_the_program_hardly_grows_with_the_draft(kind):
    assert _size(kind, 32) < 1.2 * _size(kind, 2)


# ---- Donation ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_b50_donation(kind):
    """Params and requests outlive a run, although both models share their arrays.

    Warnings are errors under pytest: an unusable donated buffer fails here.
    """
    strategy, params = _strategy(kind)
    programs = decoding.jit_programs(strategy, 32)
    request = toy.ragged(temperature=toy.TEMPERATURES)
    outputs = []
    for _ in range(2):
        state = programs.prefill(params, request)
        after, _, _ = programs.generate(params, state, jnp.int32(2))
        state, _, _ = programs.generate(params, after, jnp.int32(32))
        assert after.cache.keys[0].is_deleted()
        outputs.append(toy.tokens_of(state))
    assert outputs[0] == outputs[1] == toy.plain(request)
    for leaf in jax.tree.leaves((params, request)):
        assert not leaf.is_deleted()


# ---- Batches -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "lookup", "self", "tree", "corrupted"])
@pytest.mark.parametrize("pad", [0, 5, 17, 96])
def test_b56_padding_is_not_read(name, pad):
    """Pad ids equal to a real prompt token, or to the stop token, change nothing."""
    request = toy.ragged(temperature=toy.TEMPERATURES)
    expected = toy.plain(request)
    assert toy.output(name, request.replace(prompt=_pad(request, pad))) == expected
    stopping = toy.ragged(stop=[pad], max_new=12)
    padded = stopping.replace(prompt=_pad(stopping, pad))
    assert toy.output(name, padded) == toy.plain(stopping)


def _pad(request, pad):
    slot = jnp.arange(request.prompt.shape[1], dtype=jnp.int32)[None]
    return jnp.where(slot < request.prompt_length[:, None], request.prompt, pad)


@pytest.mark.parametrize("name", ["lookup", "self", "tree"])
def test_b56_short_prompts_alone_and_together(name):
    """Lengths 1, 3 and 9, as one batch and one by one."""
    prompts = [[41], [41, 2, 9], _prompt(9), [0]]
    request = toy.make_request(prompts, max_new=25)
    expected = toy.plain(request)
    built = toy.method(name)
    assert toy.output(name, request) == expected
    for row in range(4):
        state, _, _ = toy.run(built, toy.pick(request, [row]))
        assert toy.tokens_of(state) == [expected[row]]
        assert toy.is_greedy(prompts[row], expected[row])


def test_a_request_may_come_in_a_buffer_of_any_width():
    """A longer buffer holds the same request: only the program differs."""
    built = toy.method("self")
    wide = toy.ragged(buffer=40)
    assert toy.tokens_of(toy.run(built, wide)[0]) == toy.plain(toy.ragged())


def test_capacity_without_room_is_refused():
    with pytest.raises(ValueError, match="larger capacity"):
        decoding.speculative(toy.tiny(), lookup(4), capacity=6)
