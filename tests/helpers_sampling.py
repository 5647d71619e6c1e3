"""Sequences and goldens for tests below the engine."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec import sampling
from jaxdec.types import Draft, Sequences

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / "goldens" / "sampling.json").read_text()
)


def make_sequences(
    rows, prompt_length, *, capacity=24, seed=0, stop_tokens=(), keys=None, **params
):
    """Sequences of the given token lists; the scratch past them is poisoned."""
    batch_size = len(rows)
    tokens = np.full((batch_size, capacity), -7, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    stop = np.full((batch_size, 4), -1, np.int32)
    stop[:, : len(stop_tokens)] = stop_tokens
    full = functools.partial(np.full, batch_size, dtype=np.int32)
    if keys is None:
        keys = jax.random.split(jax.random.key(seed), batch_size)
    return Sequences(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray([len(row) for row in rows], jnp.int32),
        prompt_length=jnp.asarray(full(prompt_length)),
        limit=jnp.asarray(full(capacity)),
        finish=jnp.asarray(full(0)),
        max_draft_length=jnp.asarray(full(99)),
        stop_tokens=jnp.asarray(stop),
        num_stop_tokens=jnp.asarray(full(len(stop_tokens))),
        key=keys,
        sampling=sampling.make_sampling_params(batch_size, **params),
    )


def make_draft(tokens, parents=None, log_probs=None, length=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    batch_size, num_draft = tokens.shape
    if parents is not None:
        parents = jnp.asarray(parents, jnp.int32)
        parents = jnp.broadcast_to(parents, tokens.shape)
    return Draft(
        tokens=tokens,
        parents=parents,
        length=jnp.full(batch_size, num_draft if length is None else length, jnp.int32),
        log_probs=log_probs,
    )


def row(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def random_parents(rng, num_draft):
    return np.array([rng.integers(0, i + 1) for i in range(num_draft)], np.int32)


def walk(parents, node):
    """Nodes from the root to `node`, by hand."""
    path = [node]
    while path[0] != 0:
        path.insert(0, int(parents[path[0] - 1]))
    return path
