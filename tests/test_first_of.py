"""Several drafters in order of preference."""

import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec.drafters.first_of import first_of
from jaxdec.drafters.lookup import lookup
from jaxdec.types import Commit, Draft, DrafterParams

PARAMS = DrafterParams(own=((), (), ()), shared=((), (), ()))


def speaker(name, tokens, lengths, calls, parents=None):
    """A drafter that always says the same, and notes that it was traced."""

    def propose(params, state, sequences):
        del params, sequences
        calls.append(name)
        batch = len(lengths)
        wide = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (batch, len(tokens)))
        tree = None
        if parents is not None:
            tree = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), wide.shape)
        return state, Draft(
            tokens=wide,
            parents=tree,
            length=jnp.asarray(lengths, jnp.int32),
            confidence=jnp.full(wide.shape, 0.5),
        )

    return lookup(len(tokens))._replace(
        name=name,
        propose=propose,
        max_depth=None if parents is None else max(parents) + 1,
    )


def drafted(*drafters):
    """What the combination proposes for three running rows."""
    request = toy.make_request([[1, 2], [3], [4]], max_new=4)
    built = toy.compiled(toy.tiny(), lookup(2), own=(), target=toy.tiny_params())
    state = built.prefill(built.params, request)
    _, draft = first_of(*drafters).propose(PARAMS, ((),) * 3, state.sequences)
    return draft


def test_each_row_takes_the_first_drafter_with_a_draft():
    calls = []
    draft = drafted(
        speaker("a", [7, 8], [2, 0, 0], calls),
        speaker("b", [1, 2, 3], [0, 1, 0], calls),
        speaker("c", [9], [1, 1, 1], calls),
    )
    assert calls == ["a", "b", "c"]
    assert draft.length.tolist() == [2, 1, 1]
    assert draft.source.tolist() == [0, 1, 2]
    assert draft.tokens.tolist() == [[7, 8, 0], [1, 2, 3], [9, 0, 0]]
    assert draft.parents is None
    sure = [[0.5, 0.5, 1], [0.5] * 3, [0.5, 1, 1]]
    np.testing.assert_array_equal(draft.confidence, sure)


def test_a_tree_and_a_chain_share_one_shape():
    calls = []
    draft = drafted(
        speaker("chain", [7, 8, 9], [3, 0, 0], calls),
        speaker("tree", [4, 5], [2, 2, 2], calls, parents=[0, 0]),
    )
    assert draft.parents.tolist() == [[0, 1, 2], [0, 0, 2], [0, 0, 2]]
    combined = first_of(
        speaker("chain", [7, 8, 9], [3, 0, 0], calls),
        speaker("tree", [4, 5], [2, 2, 2], calls, parents=[0, 0]),
    )
    assert combined.max_depth == 3 and combined.max_length == 3
    assert combined.sources == ("chain", "tree")


def test_drafters_read_their_own_taps():
    seen = {}

    def reader(name, taps):
        def extend(params, state, commit):
            seen[name] = (params.own, np.asarray(commit.features))
            return state

        return lookup(2)._replace(name=name, taps=taps, extend=extend)

    features = np.arange(12, dtype=np.float32).reshape(1, 2, 6)
    commit = Commit(
        tokens=jnp.zeros((1, 3), jnp.int32),
        features=jnp.asarray(features),
        length=jnp.asarray([2], jnp.int32),
    )
    combined = first_of(reader("a", (1,)), reader("b", ()), reader("c", (0, 2)))
    assert combined.taps == (1, 0, 2)
    params = DrafterParams(own=("x", "y", "z"), shared=((), (), ()))
    combined.extend(params, ((), (), ()), commit)
    assert [seen[n][0] for n in "abc"] == ["x", "y", "z"]
    np.testing.assert_array_equal(seen["a"][1], features[..., :2])
    assert seen["b"][1].shape[-1] == 0
    np.testing.assert_array_equal(seen["c"][1], features[..., 2:])


def test_one_drafter_is_refused():
    with pytest.raises(ValueError, match="two or more"):
        first_of(lookup(2))


def test_both_sources_are_used_and_counted():
    """On a sequence that repeats itself, lookup speaks; elsewhere the other does."""
    _, info, _ = toy.run(toy.method("first_of"), toy.ragged(max_new=40))
    live, source = np.asarray(info.is_live), np.asarray(info.draft_source)
    drafted = np.asarray(info.num_drafted)
    assert {0, 1} <= set(source[live & (drafted > 0)].tolist())
    # Lookup has at most 3 tokens, so a longer draft is the other's.
    assert np.all(drafted[live & (source == 0)] <= 3)
    assert np.any(drafted[live & (source == 1)] > 3)
