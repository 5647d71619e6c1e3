"""Training drafters that feed on their own output: EAGLE-3 and MTP.

The drafter is unrolled as it will draft (EAGLE-3's training-time test, arXiv 2503.01840
section 3; FastMTP, 2509.18362). Pass 0 reads the target's features at every place i
with token i + 1, and says token i + 2. Pass t reads, at the same place, what pass t - 1
passed on, with the true token i + 1 + t, and says token i + 2 + t. A place attends the
rows of pass 0 up to its own, which at inference are the permanent ones, and of later
passes its own rows only: those of its own draft. So place i of all passes is exactly
the draft that begins when the target has read tokens 0 .. i, as long as it is right.

(FastMTP lets pass t attend all rows of pass t. At inference those rows are made from
true features, so that is not what is drafted with; here it is.)

The loss is the cross-entropy with the target's law, each pass weighted by `decay` less.
Only places in an answer have one, so after pass 0, whose rows are what places attend,
the others are left out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxdec.models.decoder import places
from jaxdec.models.eagle import EagleNetwork
from jaxdec.models.layers import matmul
from jaxdec.models.mtp import MtpNetwork
from jaxdec.training.batches import Batch
from jaxdec.training.features import Features
from jaxdec.training.losses import head_loss, probabilities, soft_cross_entropy
from jaxdec.training.objective import Losses, cut, is_drafted, shifted
from jaxdec.types import DrafterParams, Params


class Unrolled(NamedTuple):
    """A network as the passes want it."""

    taps: tuple[int, ...]
    fuse: Callable[[DrafterParams, Array], Array]
    read_all: Callable[..., tuple[Any, Array]]
    """``(params, hidden, tokens, position, place, earlier)``."""
    normed: Callable[[DrafterParams, Array], Array]
    """What the head reads."""


def unrolled_eagle(network: EagleNetwork) -> Unrolled:
    """An EAGLE-3 network."""
    return Unrolled(
        taps=network.config.taps,
        fuse=network.fuse,
        read_all=network.read_all,
        normed=network.normed,
    )


def unrolled_mtp(network: MtpNetwork) -> Unrolled:
    """One MTP module, used again and again."""

    def read_all(params, hidden, tokens, position, place, earlier):
        return network.read_all(params, 0, hidden, tokens, position, place, earlier)

    return Unrolled(
        taps=network.config.taps,
        fuse=lambda params, features: features,
        read_all=read_all,
        normed=lambda params, carried: network.normed(params, 0, carried),
    )


def passes(
    net: Unrolled,
    params: DrafterParams,
    features: Float[Array, "B T F"],
    tokens: Int[Array, "B T"],
    begin: Int[Array, "B"],
    size: int,
    num: int,
) -> Float[Array, "B num size E"]:
    """What the head reads after each pass, at `size` places from `begin` on."""
    place = places(tokens)
    hidden = net.fuse(params, features)
    rows, hidden = net.read_all(params, hidden, shifted(tokens, 1), place, place, ())
    place, hidden = cut(place, begin, size), cut(hidden, begin, size)
    earlier, out = [rows], [net.normed(params, hidden)]
    for t in range(1, num):
        token = cut(shifted(tokens, 1 + t), begin, size)
        rows, hidden = net.read_all(
            params, hidden, token, place + t, place, tuple(earlier)
        )
        earlier.append(rows)
        out.append(net.normed(params, hidden))
    return jnp.stack(out, axis=1)


def losses_and_right(
    net: Unrolled,
    features: Features,
    own: Params,
    frozen: Params,
    batch: Batch,
    begin: Int[Array, "B"],
    *,
    size: int,
    num: int,
    decay: float,
) -> tuple[Losses, Bool[Array, "B size num"]]:
    """The losses of `num` passes, and where each is right.

    Args:
        net: the network.
        features: of the target.
        own: the drafter's arrays.
        frozen: ``target``, its arrays; ``teacher``, the rows of its head that the
            drafter has; ``draft_index``, the drafter's token for each of the target's.
        batch: sequences.
        begin: the first place that counts.
        size: how many do.
        num: passes.
        decay: weight of a pass against the one before.
    """
    params = DrafterParams(own=own, shared=frozen["target"])
    kept = features.kept_of(frozen["target"], batch)
    joined = features.joined(frozen["target"], kept, net.taps)
    said = features.of(frozen["target"], kept, features.num_layers + 1)
    tokens = jnp.asarray(batch.tokens)
    hidden = passes(net, params, joined, tokens, begin, size, num)
    index = jnp.take(frozen["draft_index"], tokens, mode="clip")
    known = frozen["teacher"].shape[0]

    def by_depth(of_depth):
        return jnp.stack([cut(of_depth(t), begin, size) for t in range(num)], axis=1)

    labels = by_depth(lambda t: shifted(index, 2 + t))
    drafted = by_depth(lambda t: is_drafted(batch, t))
    by_pass = jnp.asarray(decay ** np.arange(num), jnp.float32)[None, :, None]
    weights = jnp.where(drafted & (labels < known), by_pass, 0.0)

    # Pass t at place i is taught by the law after place i + 1 + t.
    said = cut(jnp.pad(said[:, 1:], ((0, 0), (0, num), (0, 0))), begin, size + num - 1)

    def teacher(said):
        return probabilities(matmul(said, frozen["teacher"], out_first=True))

    def row_loss(logits, law, own, t):
        return soft_cross_entropy(logits, law[t : t + size], *own)

    loss, right = head_loss(
        row_loss,
        teacher,
        [hidden],
        [frozen["teacher"]],
        said,
        (weights, labels),
    )
    figures = {
        f"right {t + 1}": (
            jnp.sum(right[:, t] & drafted[:, t], dtype=jnp.float32),
            jnp.sum(drafted[:, t], dtype=jnp.float32),
        )
        for t in range(num)
    }
    losses = Losses(loss=loss, weight=jnp.sum(weights), figures=figures)
    return losses, jnp.moveaxis(right, 1, 2)
