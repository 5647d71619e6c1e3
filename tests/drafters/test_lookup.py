"""Prompt lookup against a slow walk: longest match first, then the most recent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdec
from jaxdec.drafters.lookup import continuation

CAPACITY, NUM, MAX_NGRAM = 24, 5, 4


def walk(said, min_ngram):
    """The draft by hand: what followed the best earlier match of the last tokens."""
    best, end = 0, None
    for e in range(len(said) - 1):
        size = 0
        while size < MAX_NGRAM and size <= e and said[e - size] == said[-1 - size]:
            size += 1
        if size >= best and size > 0:
            best, end = size, e
    if best < min_ngram:
        return []
    period = said[end + 1 :]
    return [period[i % len(period)] for i in range(NUM)]


@pytest.mark.parametrize("min_ngram", [1, 2, 3])
def test_draft_follows_the_longest_then_latest_match(min_ngram):
    rng = np.random.default_rng(min_ngram)
    lengths = rng.integers(1, CAPACITY, size=200)
    # Few different tokens, so that matches of every size are there; scratch past them.
    tokens = rng.integers(0, 4, size=(200, CAPACITY)).astype(np.int32)
    find = functools.partial(
        continuation, num=NUM, min_ngram=min_ngram, max_ngram=MAX_NGRAM
    )
    drafts, found = jax.jit(jax.vmap(find))(
        jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)
    )
    wanted = [
        walk(t[:n].tolist(), min_ngram) for t, n in zip(tokens, lengths, strict=True)
    ]
    drafts = np.asarray(drafts).tolist()
    got = [d[:n] for d, n in zip(drafts, np.asarray(found).tolist(), strict=True)]
    assert got == wanted
    assert 20 < sum(map(bool, wanted)) < 200


def test_ranges_of_n_grams_that_are_none():
    """The bound that was not given counts too."""
    with pytest.raises(ValueError, match="min_ngram=5 to max_ngram=4.*are 1 and 4"):
        jaxdec.lookup(6, min_ngram=5)
    with pytest.raises(ValueError, match="min_ngram=1 to max_ngram=0"):
        jaxdec.lookup(6, max_ngram=0)


def test_a_short_match_is_no_match():
    """The last token alone stood here before; the last two did not."""
    said = jnp.asarray([7, 1, 2, 9, 2, 0, 0], jnp.int32)
    for min_ngram, draft in ((1, [9, 2]), (2, []), (3, [])):
        tokens, found = continuation(said, jnp.int32(5), 2, min_ngram, 4)
        assert tokens.tolist()[: int(found)] == draft
