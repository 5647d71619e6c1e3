"""Training a small language model to say what the target says.

Distillation: at every place of an answer, the cross-entropy with the target's law
(DistillSpec, arXiv 2310.08461, with the target's own answers as data). A language model
that is right at every place of a run drafts that run, so one pass over whole sequences
says what it would draft from any place.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxdec.models.decoder import Reader
from jaxdec.models.layers import matmul
from jaxdec.training.batches import Batch
from jaxdec.training.features import Features
from jaxdec.training.losses import head_loss, probabilities, soft_cross_entropy
from jaxdec.training.objective import Losses, cut, shifted, shifted_mask
from jaxdec.types import Params


def losses_and_right(
    reader: Reader,
    features: Features,
    own: Params,
    frozen: Params,
    batch: Batch,
    begin: Int[Array, "B"],
    size: int,
) -> tuple[Losses, Bool[Array, "B size"]]:
    """The losses of some places, and where the token after is the likeliest.

    Args:
        reader: of the small model.
        features: of the target.
        own: the small model's layers and norm.
        frozen: as for `jaxdec.training.recurrent.losses_and_right`.
        batch: sequences.
        begin: the first place that counts.
        size: how many do.
    """
    target = frozen["target"]
    tables = {name: target[name] for name in ("embedding", "head") if name in target}
    kept = features.kept_of(target, batch)
    said = features.of(target, kept, features.num_layers + 1)
    tokens = jnp.asarray(batch.tokens)
    hidden = cut(reader.read(own | tables, tokens).normed_hidden, begin, size)
    said = cut(said, begin, size)
    index = jnp.take(frozen["draft_index"], tokens, mode="clip")
    label = cut(shifted(index, 1), begin, size)
    is_said = cut(shifted_mask(batch.is_answer, 1), begin, size)
    known = label < frozen["teacher"].shape[0]
    weight = jnp.where(is_said & known, jnp.float32(1), 0.0)

    def teacher(said):
        return probabilities(matmul(said, frozen["teacher"], out_first=True))

    def row_loss(logits, law, own, _):
        return soft_cross_entropy(logits, law, *own)

    loss, right = head_loss(
        row_loss,
        teacher,
        [hidden[:, None]],
        [frozen["teacher"]],
        said,
        (weight[:, None], label[:, None]),
    )
    right = right[:, 0]
    figures = {
        "right 1": (
            jnp.sum(right & is_said, dtype=jnp.float32),
            jnp.sum(is_said, dtype=jnp.float32),
        )
    }
    return Losses(loss=loss, weight=jnp.sum(weight), figures=figures), right
