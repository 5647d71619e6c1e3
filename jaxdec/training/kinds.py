"""From a recipe and a target to an objective: which network, how it begins.

A network begins random, except that its last norm is smaller than the target's, so that
it says next to nothing at first: at full size its first losses are ten times those of
saying nothing, and much of the training is spent on that.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdec.models.config import ModelConfig
from jaxdec.models.eagle import init_eagle_params, make_network
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.mtp import MtpConfig, init_mtp_params, make_mtp
from jaxdec.models.vocabulary import vocabulary_params
from jaxdec.training.features import features_of
from jaxdec.training.objective import Objective, frequent_tokens, head_of
from jaxdec.training.recipe import Eagle3Recipe, MtpRecipe, Recipe
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
    return _BUILDERS[type(recipe)](recipe, lm, _ids(recipe, lm, store))


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


def _small(norm: Any, target: Params) -> dict:
    del norm
    return {"scale": target["norm"]["scale"] * _FIRST_SIZE}


def _eagle3(recipe: Eagle3Recipe, lm: Any, ids: np.ndarray) -> Objective:
    target = lm.config
    num = target.num_layers
    taps = recipe.taps or tuple(sorted({min(2, num), num // 2, max(num - 3, 0)}))
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
        own["norm"] = _small(own["norm"], lm.params)
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
    config = MtpConfig(
        block=dataclasses.replace(
            one_layer(lm.config), tie_embeddings=lm.config.tie_embeddings
        ),
        num_target_layers=lm.config.num_layers,
        hidden_source="post",
        recycle="post",
    )

    def init(key):
        own = init_mtp_params(config, key, lm.dtype)
        module = own["modules"][0]
        module["final_norm"] = _small(module["final_norm"], lm.params)
        return own

    network = unrolled_mtp(make_mtp(config, dtype=lm.dtype))
    return _recurrent("mtp", config, recipe, lm, network, _frozen(lm, ids), init)


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
        del keys
        return unroll(own, frozen, batch, num=recipe.passes, decay=recipe.decay)[0]

    def right(own, frozen, batch):
        return unroll(own, frozen, batch, num=recipe.draft_length, decay=1.0)[1]

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


_BUILDERS: dict[type[Recipe], Callable[..., Objective]] = {
    Eagle3Recipe: _eagle3,
    MtpRecipe: _mtp,
}
