"""What is trained is what drafts: both forwards give the same logits at every depth.

The drafter itself drafts, with noise, from prefixes of different lengths, and reports
the law that it drew each token from. Training reads the same prefix with the tokens
drawn put behind it as if they were the truth, and must say the same of each of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from helpers_sampling import make_sequences

from jaxdec.models.decoder import make_reader
from jaxdec.training import kinds
from jaxdec.training.batches import Batch
from jaxdec.training.recipe import (
    DflashRecipe,
    DraftRecipe,
    DsparkRecipe,
    Eagle3Recipe,
    MtpRecipe,
)
from jaxdec.training.session import as_drafter
from jaxdec.types import Commit

RECIPES = {
    "eagle3": Eagle3Recipe(vocabulary=61, passes=4, draft_length=4),
    "eagle3 of two layers": Eagle3Recipe(
        vocabulary=200,
        passes=3,
        draft_length=3,
        num_layers=2,
        norm_each_tap=False,
        norm_before_residual=False,
    ),
    "mtp": MtpRecipe(vocabulary=97, passes=4, draft_length=4),
    "dflash": DflashRecipe(vocabulary=97, block_size=5),
    "dspark": DsparkRecipe(vocabulary=61, block_size=4, markov_rank=8),
    "dspark gated": DsparkRecipe(
        vocabulary=97, block_size=4, markov_rank=8, markov="gated", sees_previous=False
    ),
    "dspark rnn": DsparkRecipe(
        vocabulary=61, block_size=4, markov_rank=8, markov="rnn"
    ),
    "draft": DraftRecipe(vocabulary=97, from_layers=(0, 2), draft_length=4),
}
LENGTHS = np.array([3, 9, 14])
SIZE = 24


@functools.cache
def store(folder=None):
    import tempfile

    return tiny.write_answers(tempfile.mkdtemp(), 40, 8)


def lively(own, seed=0):
    """Weights that are all different from how they begin, norms and zeros too."""
    rng = np.random.default_rng(seed)

    def shaken(path, x):
        if not jnp.issubdtype(x.dtype, jnp.floating) or "head" in str(path[0]):
            return x
        noise = rng.normal(size=x.shape).astype(np.float32)
        return x + 0.3 * jnp.std(x) * noise + 0.1 * noise

    return jax.tree_util.tree_map_with_path(shaken, own)


def drafted(objective, own, temperature=1.0):
    """Prefixes, what was drafted behind each, and the laws of what was drafted."""
    lm = tiny.target()
    drafter = as_drafter(objective, own, lm)
    length = objective.draft_length
    chain = drafter.chain(length, coupled=False)
    params = drafter.params(lm.params)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 97, (len(LENGTHS), SIZE))
    taps = getattr(objective.config, "taps", ())
    reader = make_reader(lm.config, taps=taps)
    output = reader.read(lm.params, jnp.asarray(tokens, jnp.int32))
    # Tokens 0 .. length - 2 are read; the last one is the anchor.
    commit = Commit(
        tokens=jnp.asarray(tokens[:, : LENGTHS.max()], jnp.int32),
        features=output.features[:, : LENGTHS.max() - 1],
        length=jnp.asarray(LENGTHS - 1, jnp.int32),
    )
    state = chain.init(len(LENGTHS), 256)
    state = jax.jit(chain.extend)(params, state, commit)
    rows = [row[:n].tolist() for row, n in zip(tokens, LENGTHS, strict=True)]
    sequences = make_sequences(rows, 1, capacity=64, seed=4, temperature=temperature)
    _, draft = jax.jit(chain.propose)(params, state, sequences)
    np.testing.assert_array_equal(draft.length, length)
    whole = np.zeros((len(LENGTHS), SIZE), np.int32)
    for i, row in enumerate(rows):
        whole[i, : len(row)] = row
        whole[i, len(row) : len(row) + length] = draft.tokens[i]
    batch = Batch(
        tokens=jnp.asarray(whole),
        length=jnp.asarray(LENGTHS + length, jnp.int32),
        prompt_length=jnp.ones(len(LENGTHS), jnp.int32),
        features=jnp.zeros((*whole.shape, 0, 0)),
    )
    return batch, draft


class Found(Exception):
    """Ends a forward where its loss would begin."""


def _find(row_loss, prepare, hidden, heads, shared, own, trained=()):
    parts = zip(hidden, heads, strict=True)
    raise Found(sum(jnp.einsum("gsre,we->gsrw", x, head) for x, head in parts))


def trained_logits(monkeypatch, objective, own, batch):
    """What training computes the loss of: [B, passes or 1, T or anchors x slots, W]."""
    for module in ("recurrent", "block", "draft"):
        monkeypatch.setattr(f"jaxdec.training.{module}.head_loss", _find)
    # All anchors are one group: it need not be mapped over.
    monkeypatch.setattr(jax.lax, "map", lambda f, xs: f(xs[0]))

    @jax.jit
    def logits(own, batch):
        try:
            objective.right(own, objective.frozen, batch)
        except Found as found:
            return found.args[0]

    return np.asarray(logits(own, batch))


def made(name):
    recipe = RECIPES[name]
    if name.startswith("d") and name != "draft":
        recipe = dataclasses.replace(recipe, num_anchors=SIZE)
    objective = kinds.make_objective(recipe, tiny.target(), store())
    return objective, lively(objective.init(jax.random.key(1)))


@pytest.mark.parametrize("name", RECIPES)
def test_training_says_what_drafting_says(name, monkeypatch):
    objective, own = made(name)
    batch, draft = drafted(objective, own)
    logits = trained_logits(monkeypatch, objective, own, batch)
    num, ids = objective.draft_length, drafted_ids(objective, own)
    for row, length in enumerate(LENGTHS):
        if objective.family == "block":
            slots = logits.reshape(len(LENGTHS), SIZE, num, -1)[row, length - 1]
        elif objective.family == "draft":
            slots = logits[row, 0, length - 1 : length - 1 + num]
        else:
            slots = logits[row, :, length - 2]
        expected = np.asarray(draft.log_probs[row])
        got = np.asarray(jax.nn.log_softmax(slots, axis=-1))
        np.testing.assert_allclose(got, expected[:, ids], atol=1e-4)
        others = np.delete(expected, ids, axis=1)
        assert np.all(others < -1e30) or others.size == 0


def drafted_ids(objective, own):
    """The target's tokens that the logits are of, in their order."""
    index = np.asarray(objective.frozen["draft_index"])
    size = objective.frozen["teacher"].shape[0]
    ids = np.flatnonzero(index < size)
    return ids[np.argsort(index[ids])]


@pytest.mark.parametrize("name", ["dspark", "dspark gated"])
def test_confidence_is_trained_as_it_is_served(name, monkeypatch):
    objective, own = made(name)
    batch, draft = drafted(objective, own)
    real = kinds.block._confidence

    def find(*arguments):
        raise Found(jax.nn.sigmoid(real(*arguments)))

    monkeypatch.setattr(kinds.block, "_confidence", find)
    monkeypatch.setattr(jax.lax, "map", lambda f, xs: f(xs[0]))

    @jax.jit
    def confidence(own, batch):
        try:
            objective.right(own, objective.frozen, batch)
        except Found as found:
            return found.args[0]

    got = np.asarray(confidence(own, batch))
    for row, length in enumerate(LENGTHS):
        expected = np.asarray(draft.confidence[row])
        np.testing.assert_allclose(got[row, length - 1], expected, atol=1e-5)
        assert np.ptp(expected) > 1e-3


@pytest.mark.parametrize("label", ["law", "token"])
def test_confidence_learns_whether_drafts_are_accepted(label, monkeypatch):
    """What the drafter cannot say it gets wrong; a token's fate is asked once only."""
    recipe = dataclasses.replace(
        RECIPES["dspark"], num_anchors=SIZE, confidence_label=label
    )
    objective = kinds.make_objective(recipe, tiny.target(), store())
    own = lively(objective.init(jax.random.key(1)))
    # Answers that hold what the drafter says itself, and else anything.
    batch, _ = drafted(objective, own, temperature=0.0)
    monkeypatch.setattr(
        kinds.block,
        "_confidence",
        lambda net, params, hidden, _: hidden[..., 0] * 0 + 1,
    )
    head_loss, distances = kinds.block.head_loss, []

    def watched(*args):
        loss, (right, distance) = head_loss(*args)
        distances.append(np.asarray(distance))
        return loss, (right, distance)

    monkeypatch.setattr(kinds.block, "head_loss", watched)
    anchor = jnp.broadcast_to(jnp.arange(SIZE, dtype=jnp.int32), (len(LENGTHS), SIZE))
    weights = kinds.block.BlockWeights(
        soft=1.0, confidence=1.0, confidence_label=label, gamma=recipe.gamma
    )
    net = kinds.make_block_net(objective.config, dtype="float32")
    features = kinds.features_of(tiny.target(), objective.config.taps)
    found, right = kinds.block.losses_and_right(
        net, features, own, objective.frozen, batch, anchor, weights
    )
    right = np.asarray(right, float)
    blocks = kinds.block.blocks_at(batch, anchor, objective.draft_length)
    counted = np.where(blocks.is_drafted, np.exp(-np.arange(4) / recipe.gamma), 0.0)
    said = np.asarray(batch.tokens)[
        np.arange(len(LENGTHS))[:, None, None], blocks.place
    ]
    is_known = np.isin(said, drafted_ids(objective, own))
    assert not is_known[counted > 0].all() and 0 < np.sum(right * counted)
    assert not right[~is_known].any()
    total, weight = map(float, found.figures["confidence loss"])
    accepted = right
    if label == "token":
        counted = counted * np.cumprod(np.insert(right, 0, 1, axis=2), axis=2)[..., :-1]
    else:
        (distance,) = distances
        accepted = np.where(is_known, 1 - distance.reshape(is_known.shape) / 2, 0.0)
        assert 0 < accepted[is_known].min(), "it matters what cannot be said"
    expected = np.sum(counted * (np.logaddexp(0, 1) - accepted))
    assert total == pytest.approx(expected, rel=1e-5)
    assert weight == pytest.approx(np.sum(counted), rel=1e-5)
