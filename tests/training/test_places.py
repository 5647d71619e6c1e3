"""Only places in answers are learned at; leaving out the others changes nothing."""

import functools
import itertools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxdec.training import kinds
from jaxdec.training.batches import Batch, bucket_lengths
from jaxdec.training.objective import draw_places
from jaxdec.training.recipe import DraftRecipe, Eagle3Recipe, MtpRecipe

RECIPES = {
    "eagle3": (Eagle3Recipe, dict(vocabulary=61, passes=3)),
    "mtp": (MtpRecipe, dict(vocabulary=97, passes=3)),
    "draft": (DraftRecipe, dict(vocabulary=61, from_layers=(0,))),
}


@functools.cache
def store():
    return tiny.write_answers(tempfile.mkdtemp(), 40, 8)


def batch():
    """Answers of 1 to 9 tokens, of which none begins or ends where another does."""
    tokens = np.random.default_rng(0).integers(0, 97, (4, 32))
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        length=jnp.asarray([10, 20, 32, 0], jnp.int32),
        prompt_length=jnp.asarray([9, 12, 23, 0], jnp.int32),
        features=jnp.zeros((4, 32, 0, 0)),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_answers_that_fit_are_learned_whole(name):
    recipe, given = RECIPES[name]
    found = []
    for num in (9, 16, 32):
        made = kinds.make_objective(recipe(num_places=num, **given), lm(), store())
        own = made.init(jax.random.key(1))
        keys = jax.random.split(jax.random.key(num), 4)

        def loss(own, made=made, keys=keys):
            found = made.losses(own, made.frozen, batch(), keys)
            return found.loss, (found.weight, found.figures)

        # What is not trained is of whole numbers.
        fixed = {k: own.pop(k) for k in made.fixed if k in own}
        whole = jax.jit(jax.value_and_grad(lambda x: loss(x | fixed), has_aux=True))  # noqa: B023
        found.append(whole(own))
    for part in found[:2]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            part,
            found[2],
        )
    drafted = found[0][0][1][1]["right 1"][1]
    assert drafted == 1 + 8 + 9 and found[0][0][1][0] > 0


def lm():
    return tiny.target()


def test_a_longer_answer_is_learned_in_parts():
    size, given = 5, batch()
    begins = np.stack(
        [
            draw_places(given, jax.random.split(jax.random.key(i), 4), size, ahead=2)
            for i in range(60)
        ]
    )
    # Places 7 to 7, 10 to 17 and 21 to 29 have answers two tokens later.
    assert set(begins[:, 0]) == {7}
    assert set(begins[:, 1]) == {10, 11, 12, 13}
    assert set(begins[:, 2]) == {21, 22, 23, 24, 25}
    assert np.all((begins[:, 3] >= 0) & (begins[:, 3] <= 32 - size))


def test_lengths_are_those_that_pad_least():
    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths = rng.integers(1, 300, rng.integers(1, 30))
        num = int(rng.integers(1, 5))
        sizes = np.unique(-(-lengths // 32) * 32).tolist()

        def total(chosen, lengths=lengths):
            fits = [[c for c in chosen if c >= n] for n in lengths]
            return sum(min(f) for f in fits) if all(fits) else np.inf

        choices = itertools.chain.from_iterable(
            itertools.combinations(sizes, k) for k in range(1, num + 1)
        )
        found = bucket_lengths(lengths, num)
        assert total(found) == min(total(c) for c in choices)
        assert len(found) <= num and set(found) <= set(sizes)
