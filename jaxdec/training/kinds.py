"""From a recipe and a target to an objective: which network, how it begins.

A network begins random, except that its last norm is smaller than the target's, so that
it says next to nothing at first: at full size its first losses are ten times those of
saying nothing, and much of the training is spent on that.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec.models.block import BlockConfig, make_block_net
from jaxdec.models.block_weights import init_block_params
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import make_reader
from jaxdec.models.eagle import init_eagle_params, make_network
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.mtp import MtpConfig, init_mtp_params, make_mtp
from jaxdec.models.vocabulary import vocabulary_params
from jaxdec.training import block, draft
from jaxdec.training.features import features_of
from jaxdec.training.objective import (
    Objective,
    draw_places,
    frequent_tokens,
    head_of,
    shifted_mask,
)
from jaxdec.training.recipe import (
    BlockRecipe,
    DflashRecipe,
    DraftRecipe,
    DsparkRecipe,
    Eagle3Recipe,
    MtpRecipe,
    Recipe,
)
from jaxdec.training.recurrent import (
    Unrolled,
    losses_and_right,
    unrolled_eagle,
    unrolled_mtp,
)
from jaxdec.training.store import TokenStore
from jaxdec.types import Params

_FIRST_SIZE = 0.4
"""Of the last norm, against the target's."""


def make_objective(recipe: Recipe, lm: Any, store: TokenStore) -> Objective:
    """What a recipe trains for a target.

    Args:
        recipe: of any kind.
        lm: the target.
        store: what it answered; the most frequent tokens are the drafter's.

    Raises:
        ValueError: the target is of a kind that no drafter is trained for here.
    """
    config = lm.config
    if config.logit_softcap is not None or config.embedding_scale != 1.0:
        raise ValueError(
            f"the target {lm.name} scales its embedding or caps its logits "
            f"(embedding_scale={config.embedding_scale}, logit_softcap="
            f"{config.logit_softcap}), and drafters are not trained for such models "
            "yet; use a target of the Llama or Qwen families"
        )
    ids = _ids(recipe, lm, store)
    if isinstance(recipe, BlockRecipe) and recipe.mask_token is None:
        unused = _unused(lm, store)
        recipe = dataclasses.replace(recipe, mask_token=unused)
    return _BUILDERS[type(recipe)](recipe, lm, ids)


def _unused(lm: Any, store: TokenStore) -> int:
    """A token that the data hardly has: the first of the rarest."""
    counts = np.bincount(store.ids, minlength=lm.config.vocab_size)
    counts[list(lm.stop_tokens)] = len(store.ids) + 1
    return int(np.argmin(counts))


def _ids(recipe: Recipe, lm: Any, store: TokenStore) -> np.ndarray:
    """The tokens of the drafter's vocabulary, as the target numbers them."""
    train, _ = store.split()
    answers = [store.tokens(i)[store.prompt_length[i] :] for i in train]
    size = lm.config.vocab_size
    num = min(recipe.vocabulary, size)
    return frequent_tokens(np.concatenate(answers), size, num, lm.stop_tokens)


def _frozen(lm: Any, ids: np.ndarray) -> Params:
    """What losses read of the target: its arrays, and some rows of its head."""
    head = head_of(lm.params)
    is_whole = len(ids) == lm.config.vocab_size
    index = vocabulary_params(ids, lm.config.vocab_size)["draft_index"]
    return {
        "target": lm.params,
        "teacher": head if is_whole else jnp.asarray(np.asarray(head)[ids]),
        "draft_index": index,
    }


def one_layer(target: ModelConfig, num_layers: int = 1, **changes: Any) -> ModelConfig:
    """Decoder layers as wide as the target's, with full attention."""
    return dataclasses.replace(
        target,
        num_layers=num_layers,
        ropes=(target.ropes[-1],),
        layer_rope=(),
        layer_windows=(),
        moe=None,
        tie_embeddings=False,
        **changes,
    )


def _taps(recipe: Eagle3Recipe | BlockRecipe, target: ModelConfig) -> tuple[int, ...]:
    """The recipe's, or low, middle and high ones as EAGLE-3 has them."""
    num = target.num_layers
    return recipe.taps or tuple(sorted({min(2, num), num // 2, max(num - 3, 0)}))


def _small_norm(target: Params) -> dict:
    return {"scale": target["norm"]["scale"] * _FIRST_SIZE}


def _eagle3(recipe: Eagle3Recipe, lm: Any, ids: np.ndarray) -> Objective:
    target = lm.config
    taps = _taps(recipe, target)
    config = EagleConfig(
        layers=one_layer(target, recipe.num_layers, family="llama", qk_norm=False),
        taps=taps,
        target_hidden_size=target.hidden_size,
        fusion_norm="each" if recipe.norm_each_tap else "none",
        norm_before_residual=recipe.norm_before_residual,
        draft_vocab_size=len(ids),
        own_embedding=False,
        own_head=len(ids) != target.vocab_size,
        draft_length=recipe.draft_length,
    )
    frozen = _frozen(lm, ids)

    def init(key):
        own = init_eagle_params(config, key, lm.dtype)
        own["norm"] = _small_norm(lm.params)
        if config.own_head:
            own["head"] = frozen["teacher"]
        if config.is_reduced:
            own["vocabulary"] = vocabulary_params(ids, target.vocab_size)
        return own

    network = make_network(config, lm.dtype)
    return _recurrent(
        "eagle", config, recipe, lm, unrolled_eagle(network), frozen, init
    )


def _mtp(recipe: MtpRecipe, lm: Any, ids: np.ndarray) -> Objective:
    target, is_reduced = lm.config, len(ids) != lm.config.vocab_size
    config = MtpConfig(
        block=dataclasses.replace(
            one_layer(target), tie_embeddings=target.tie_embeddings
        ),
        num_target_layers=target.num_layers,
        hidden_source="post",
        recycle="post",
        own_head=is_reduced,
        draft_vocab_size=len(ids) if is_reduced else None,
    )
    frozen = _frozen(lm, ids)

    def init(key):
        own = init_mtp_params(config, key, lm.dtype)
        module = own["modules"][0]
        module["final_norm"] = _small_norm(lm.params)
        if is_reduced:
            own["head"] = frozen["teacher"]
            own["vocabulary"] = vocabulary_params(ids, target.vocab_size)
        return own

    network = unrolled_mtp(make_mtp(config, dtype=lm.dtype))
    return _recurrent("mtp", config, recipe, lm, network, frozen, init)


def _recurrent(
    family: str,
    config: Any,
    recipe: Any,
    lm: Any,
    net: Unrolled,
    frozen: Params,
    init: Callable,
) -> Objective:
    features = features_of(lm, net.taps)
    unroll = functools.partial(losses_and_right, net, features)

    def losses(own, frozen, batch, keys):
        size = min(recipe.num_places, batch.tokens.shape[1])
        begin = draw_places(batch, keys, size, ahead=2)
        kw = dict(size=size, num=recipe.passes, decay=recipe.decay)
        return unroll(own, frozen, batch, begin, **kw)[0]

    def right(own, frozen, batch):
        rows, size = batch.tokens.shape
        kw = dict(size=size, num=recipe.draft_length, decay=1.0)
        return unroll(own, frozen, batch, jnp.zeros(rows, jnp.int32), **kw)[1]

    return Objective(
        family=family,
        config=config,
        features=features,
        draft_length=recipe.draft_length,
        init=init,
        frozen=frozen,
        fixed=("head", "vocabulary"),
        losses=losses,
        right=right,
    )


def _block(recipe: BlockRecipe, lm: Any, ids: np.ndarray) -> Objective:
    target = lm.config
    taps = _taps(recipe, target)
    is_dspark = isinstance(recipe, DsparkRecipe)
    confidence = "none"
    if is_dspark and recipe.confidence:
        confidence = "hidden_and_previous" if recipe.sees_previous else "hidden"
    is_reduced = len(ids) != target.vocab_size
    config = BlockConfig(
        layers=one_layer(
            target,
            recipe.num_layers,
            family="qwen3",
            qk_norm=True,
            num_kv_heads=recipe.num_kv_heads or target.num_heads,
        ),
        taps=taps,
        block_size=recipe.block_size,
        sample_from_anchor=is_dspark,
        mask_token=recipe.mask_token,
        draft_vocab_size=len(ids) if is_reduced else target.vocab_size,
        own_embedding=False,
        own_head=is_reduced,
        markov=recipe.markov if is_dspark else "none",
        markov_rank=recipe.markov_rank if is_dspark else 0,
        confidence=confidence,
        windows=(None,) * recipe.num_layers,
        causal=(False,) * recipe.num_layers,
    )
    if config.max_length < 1:
        raise ValueError(
            f"block_size {recipe.block_size} leaves no token to draft; give at least 2"
        )
    weights = block.BlockWeights(
        soft=recipe.soft,
        hard=recipe.hard,
        distance=recipe.distance if is_dspark else 0.0,
        confidence=recipe.confidence if is_dspark else 0.0,
        confidence_label=recipe.confidence_label if is_dspark else "law",
        gamma=recipe.gamma,
    )
    frozen = _frozen(lm, ids)

    def init(key):
        own = init_block_params(config, key, lm.dtype)
        own["norm"] = _small_norm(lm.params)
        if is_reduced:
            own["head"] = {"weight": frozen["teacher"]}
            own["vocabulary"] = vocabulary_params(ids, target.vocab_size)
        if is_dspark:
            # Says nothing at first.
            out = own["markov"]["out"]
            own["markov"]["out"] = {"weight": jnp.zeros_like(out["weight"])}
        return own

    net = make_block_net(config, dtype=lm.dtype)
    features = features_of(lm, taps)

    def losses(own, frozen, batch, keys):
        anchor = block.draw_anchors(batch, keys, recipe.num_anchors)
        return block.losses_and_right(
            net, features, own, frozen, batch, anchor, weights
        )[0]

    def right(own, frozen, batch):
        rows, size = batch.tokens.shape
        groups = block.all_anchors(size, recipe.num_anchors)

        def some(anchor):
            anchor = jnp.broadcast_to(anchor[None], (rows, len(anchor)))
            return block.losses_and_right(
                net, features, own, frozen, batch, anchor, weights
            )[1]

        # By anchor; a draft from row i has its anchor at i + 1.
        found = jnp.moveaxis(jax.lax.map(some, jnp.asarray(groups)), 0, 1)
        found = found.reshape(rows, -1, config.max_length)[:, :size]
        return jnp.pad(found[:, 1:], ((0, 0), (0, 1), (0, 0)))

    return Objective(
        family="block",
        config=config,
        features=features,
        draft_length=config.max_length,
        init=init,
        frozen=frozen,
        fixed=("head", "vocabulary"),
        losses=losses,
        right=right,
    )


def _draft(recipe: DraftRecipe, lm: Any, ids: np.ndarray) -> Objective:
    target = lm.config
    bad = [i for i in recipe.from_layers if not 0 <= i < target.num_layers]
    if bad or not recipe.from_layers:
        raise ValueError(
            f"from_layers is {list(recipe.from_layers)}, and the target has layers 0 "
            f"to {target.num_layers - 1}; give one or more of them"
        )
    windows = target.layer_windows
    config = dataclasses.replace(
        one_layer(target, len(recipe.from_layers)),
        tie_embeddings=target.tie_embeddings,
        layer_windows=tuple(windows[i] for i in recipe.from_layers) if windows else (),
    )

    def init(key):
        del key
        layers = [lm.params["layers"][i] for i in recipe.from_layers]
        return {"layers": dict(enumerate(layers)), "norm": lm.params["norm"]}

    reader, features = make_reader(config, dtype=lm.dtype), features_of(lm, ())

    read = functools.partial(draft.losses_and_right, reader, features)

    def losses(own, frozen, batch, keys):
        size = min(recipe.num_places, batch.tokens.shape[1])
        begin = draw_places(batch, keys, size, ahead=1)
        return read(own, frozen, batch, begin, size)[0]

    def right(own, frozen, batch):
        rows, size = batch.tokens.shape
        found = read(own, frozen, batch, jnp.zeros(rows, jnp.int32), size)[1]
        # Draft token k from row i is said at place i + 1 + k.
        depths = range(recipe.draft_length)
        return jnp.stack([shifted_mask(found, 1 + k) for k in depths], axis=2)

    return Objective(
        family="draft",
        config=config,
        features=features,
        draft_length=recipe.draft_length,
        init=init,
        frozen=_frozen(lm, ids),
        fixed=(),
        losses=losses,
        right=right,
    )


_BUILDERS: dict[type[Recipe], Callable[..., Objective]] = {
    DraftRecipe: _draft,
    MtpRecipe: _mtp,
    Eagle3Recipe: _eagle3,
    DflashRecipe: _block,
    DsparkRecipe: _block,
}
