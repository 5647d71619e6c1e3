import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_sampling import random_parents, walk

from jaxdec import tree


@pytest.mark.parametrize("num_draft", [0, 1, 2, 3, 4, 8, 9, 33])
def test_random_trees_equal_a_walk(num_draft):
    rng = np.random.default_rng(num_draft)
    for shape in ("random", "chain", "star"):
        parents = {
            "random": random_parents(rng, num_draft),
            "chain": np.arange(num_draft, dtype=np.int32),
            "star": np.zeros(num_draft, np.int32),
        }[shape]
        is_ancestor = np.asarray(tree.ancestors(jnp.asarray(parents)))
        depth = np.asarray(tree.depth(jnp.asarray(parents)))
        node_paths = jax.vmap(tree.path_to, in_axes=(None, 0))(
            jnp.asarray(parents), jnp.arange(num_draft + 1)
        )
        for node, got in enumerate(np.asarray(node_paths)):
            path = walk(parents, node)
            assert sorted(path) == path == list(np.flatnonzero(is_ancestor[node]))
            assert depth[node] == len(path) - 1
            padding = [node] * (num_draft + 1 - len(path))
            assert list(got) == path + padding


def test_chain_and_vmap():
    assert tree.chain_parents(0).shape == (0,)
    chain = tree.ancestors(tree.chain_parents(5))
    np.testing.assert_array_equal(chain, np.tri(6, dtype=bool))
    batch = jnp.array([[0, 1, 2], [0, 0, 1]])
    both = jax.jit(jax.vmap(tree.ancestors))(batch)
    for i in range(2):
        np.testing.assert_array_equal(both[i], tree.ancestors(batch[i]))


@pytest.mark.parametrize("seed", range(5))
def test_keep_best_equals_a_slow_prune(seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, 12)
    scores = rng.integers(-4, 0, 12).astype(np.float32)  # many ties
    for num_kept in (0, 1, 5, 12):
        worst = [
            min(scores[n - 1] for n in walk(parents, i + 1)[1:]) for i in range(12)
        ]
        best = sorted(range(12), key=lambda i: (-worst[i], i))[:num_kept]
        kept = sorted(best)
        got, new_parents = tree.keep_best(
            jnp.asarray(scores), jnp.asarray(parents), num_kept
        )
        assert list(np.asarray(got)) == kept
        nodes = [0] + [i + 1 for i in kept]
        assert [nodes[p] for p in np.asarray(new_parents)] == [parents[i] for i in kept]


def test_keep_best_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="keep fewer"):
        tree.keep_best(jnp.zeros(2), jnp.zeros(2, jnp.int32), 3)
