"""Training block drafters: DFlash and DSpark, from anchors anywhere in an answer.

Of every sequence some places are drawn as anchors; each makes a block of the anchor's
token and masks, which attends the target's features before the anchor, as a proposal
does. Slot k (counted over the slots that draft) of anchor A says token A + 1 + k, its
loss weighted ``exp(-k / gamma)``: a token counts only if all before it are right.

DFlash (arXiv 2602.06036) learns by cross-entropy: with the true tokens, or (better,
where the target samples) with the target's law. DSpark (2607.05147, as DeepSpec trains
it) by a sum of the cross-entropy with the true token, ``sum_v |q - p|``, and, for its
confidence c, the cross-entropy of c with ``1 - sum_v |q - p| / 2``, the probability
that a draft is accepted by rejection (or, if asked, with whether the likeliest token
is the true one, which is what the rule `match` asks). The token before each place,
which its Markov head reads, is the true one: drafts count only as long as they are
right.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxdec.models.block import BlockNet
from jaxdec.models.layers import matmul
from jaxdec.training.batches import Batch
from jaxdec.training.features import Features
from jaxdec.training.losses import RowLoss, head_loss, is_likeliest, probabilities
from jaxdec.training.objective import Losses
from jaxdec.types import DrafterParams, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """What the parts of the loss count."""

    soft: float = 0.0
    """Cross-entropy with the target's law."""
    hard: float = 0.0
    """Cross-entropy with the true token."""
    distance: float = 0.0
    """``sum_v |q - p|``."""
    confidence: float = 0.0
    confidence_label: Literal["law", "token"] = "law"
    """See `jaxdec.training.recipe.DsparkRecipe`."""
    gamma: float = 4.0
    """Slot k counts ``exp(-k / gamma)``."""


class Blocks(NamedTuple):
    """Anchors of a batch, and what stands in the places that their blocks draft."""

    anchor: Int[Array, "B N"]
    """Places of the anchors."""
    is_drafted: Bool[Array, "B N K"]
    """Where the drafted place and all before it are part of the answer."""
    place: Int[Array, "B N K"]
    """Of the drafted tokens, held within the batch."""


def blocks_at(batch: Batch, anchor: Int[Array, "B N"], num: int) -> Blocks:
    """The blocks of anchors, of which each drafts `num` tokens."""
    size = batch.tokens.shape[1]
    steps = jnp.arange(1, num + 1, dtype=jnp.int32)
    place = anchor[:, :, None] + steps[None, None]
    inside = place < jnp.asarray(batch.length)[:, None, None]
    begun = place >= jnp.asarray(batch.prompt_length)[:, None, None]
    # A context of nothing drafts nothing.
    drafted = inside & begun & (anchor > 0)[:, :, None]
    return Blocks(anchor=anchor, is_drafted=drafted, place=jnp.minimum(place, size - 1))


def draw_anchors(batch: Batch, keys: Any, num: int) -> Int[Array, "B num"]:
    """Places from the last prompt token to the last but one, without replacement.

    Where there are fewer, the rest are 0, which draft nothing.
    """
    size = batch.tokens.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)[None]
    first = jnp.maximum(jnp.asarray(batch.prompt_length) - 1, 1)[:, None]
    may = (place >= first) & (place < jnp.asarray(batch.length)[:, None] - 1)
    noise = jax.vmap(lambda key: jax.random.uniform(key, (size,)))(keys)
    order = jnp.argsort(jnp.where(may, noise, 2.0), axis=1)[:, :num].astype(jnp.int32)
    return jnp.where(jnp.take_along_axis(may, order, axis=1), order, 0)


def all_anchors(size: int, width: int) -> np.ndarray:
    """All places in groups of `width`; those past the end are 0."""
    num = -(-size // width)
    places = np.arange(num * width, dtype=np.int32)
    return np.where(places < size, places, 0).reshape(num, width)


def losses_and_right(
    net: BlockNet,
    features: Features,
    own: Params,
    frozen: Params,
    batch: Batch,
    anchor: Int[Array, "B N"],
    weights: BlockWeights,
) -> tuple[Losses, Bool[Array, "B N K"]]:
    """The losses of the blocks at some anchors, and where each draft is right.

    Args:
        net: the network.
        features: of the target.
        own: the drafter's arrays.
        frozen: as for `jaxdec.training.recurrent.losses_and_right`.
        batch: sequences.
        anchor: places; 0 drafts nothing.
        weights: of the parts of the loss.
    """
    config = net.config
    params = DrafterParams(own=own, shared=frozen["target"])
    kept = features.kept_of(frozen["target"], batch)
    joined = features.joined(frozen["target"], kept, config.taps)
    said = features.of(frozen["target"], kept, features.num_layers + 1)
    num = config.max_length
    blocks = blocks_at(batch, anchor, num)
    tokens = jnp.asarray(batch.tokens)

    def at(place):
        """Tokens at places ``[B, N, K]``."""
        rows = jnp.take_along_axis(tokens, place.reshape(len(tokens), -1), axis=1)
        return rows.reshape(place.shape)

    rows = net.read_all(params, joined, anchor, at(anchor[..., None])[..., 0])
    hidden = rows[:, :, config.first :]
    previous = at(jnp.maximum(blocks.place - 1, 0))
    previous = previous.at[:, :, 0].set(at(anchor[..., None])[..., 0])
    size = frozen["teacher"].shape[0]
    label = jnp.take(frozen["draft_index"], at(blocks.place), mode="clip")
    slot = jnp.asarray(np.exp(-np.arange(num) / weights.gamma), jnp.float32)
    is_known = label < size
    weight = jnp.where(blocks.is_drafted & is_known, slot[None, None], 0.0)

    def flat(x):
        """Anchors and slots as the rows of one chunk."""
        return x.reshape(x.shape[0], 1, -1, *x.shape[3:])

    parts, heads, trained = [flat(hidden)], [frozen["teacher"]], [False]
    head = net.markov(params)
    if head is not None:
        parts.append(flat(_codes(net, params, rows, hidden, previous)))
        heads.append(head.out.weight[...].T)
        trained.append(True)
    # The law of a token follows from what the target said one place before it.
    law_at = (blocks.place - 1).reshape(len(tokens), -1)
    law_rows = jnp.take_along_axis(said, law_at[..., None], axis=1)

    def teacher(rows):
        return probabilities(matmul(rows, frozen["teacher"], out_first=True))

    def row_loss(logits, law, own, _):
        return _row_loss(logits, law, *own, weights)

    loss, (right, distance) = head_loss(
        row_loss,
        teacher,
        parts,
        heads,
        law_rows,
        (flat(weight), flat(label)),
        trained,
    )
    shape = blocks.place.shape
    right, distance = right.reshape(shape), distance.reshape(shape)
    figures = {
        f"right {k + 1}": (
            jnp.sum(right[:, :, k] & blocks.is_drafted[:, :, k], dtype=jnp.float32),
            jnp.sum(blocks.is_drafted[:, :, k], dtype=jnp.float32),
        )
        for k in range(num)
    }
    if config.confidence != "none" and weights.confidence:
        odds = _confidence(net, params, hidden, previous)
        # A token that the drafter cannot say is one that it gets wrong.
        counted = jnp.where(blocks.is_drafted, slot[None, None], 0.0)
        accepted = jnp.where(is_known, 1 - distance / 2, 0.0)
        if weights.confidence_label == "token":
            accepted = (is_known & right).astype(jnp.float32)
            # Asked for only where all before are right, and surer there.
            so_far = jnp.cumprod(accepted, axis=2)[:, :, :-1]
            counted = counted * jnp.pad(
                so_far, ((0, 0), (0, 0), (1, 0)), "constant", constant_values=1.0
            )
        # Of both outcomes, with log-odds: log(1 + e^z) - z y.
        cross = jax.nn.softplus(odds) - odds * accepted
        total = jnp.sum(counted * cross)
        loss = loss + weights.confidence * total
        figures["confidence loss"] = (total, jnp.sum(counted))
    return Losses(loss=loss, weight=jnp.sum(weight), figures=figures), right


def _row_loss(logits, law, weight, label, weights: BlockWeights) -> RowLoss:
    """All parts of the loss that the logits decide."""
    top = jnp.max(logits, axis=-1)
    part = jnp.exp(logits - top[:, None])
    total = jnp.sum(part, axis=-1)
    guess = part / total[:, None]
    loss, gradient = jnp.float32(0), jnp.zeros_like(logits)
    log_total = jnp.log(total) + top
    if weights.soft:
        cross = log_total - jnp.sum(law * logits, axis=-1)
        loss = loss + weights.soft * jnp.sum(weight * cross)
        gradient = gradient + weights.soft * (guess - law)
    if weights.hard:
        size = logits.shape[1]
        held = jnp.minimum(label, size - 1)[:, None]
        true = jnp.take_along_axis(logits, held, axis=1)[:, 0]
        loss = loss + weights.hard * jnp.sum(weight * (log_total - true))
        is_true = jnp.arange(size, dtype=jnp.int32)[None] == held
        gradient = gradient + weights.hard * (guess - is_true.astype(jnp.float32))
    side = jnp.sign(guess - law)
    distance = jnp.sum(jnp.abs(guess - law), axis=-1)
    if weights.distance:
        loss = loss + weights.distance * jnp.sum(weight * distance)
        mean = jnp.sum(guess * side, axis=-1, keepdims=True)
        gradient = gradient + weights.distance * guess * (side - mean)
    return RowLoss(
        loss=loss,
        gradient=gradient * weight[:, None],
        extra=(is_likeliest(logits, top, label), distance),
    )


def _as_rows(x):
    """Blocks of a batch as the rows that the small heads read."""
    return x.reshape(-1, *x.shape[2:])


def _codes(net: BlockNet, params, rows, hidden, previous) -> Float[Array, "B N K r"]:
    """What the Markov head's last matrix reads, the tokens before being true."""
    head = net.markov(params)
    before, state = _as_rows(previous), head.start(previous.shape[0] * hidden.shape[1])
    if not net.config.sample_from_anchor and net.config.markov == "rnn":
        # The anchor's own row says nothing, but the cell has seen it.
        prepared = head.prepare(_as_rows(rows[:, :, :1]))[:, 0]
        state = head.code(state, before[:, 0], prepared)[0]
    codes = head.codes(state, before, _as_rows(hidden))
    return codes.reshape(*previous.shape, -1)


def _confidence(net: BlockNet, params, hidden, previous) -> Float[Array, "B N K"]:
    odds = net.confidence(params, _as_rows(hidden), _as_rows(previous))
    return odds.reshape(previous.shape)
