"""EAGLE drafters for toy.TINY: strangers of every layout, and one that is always right.

MARKOV is TINY without attention and MLPs: what it says depends on its last token alone.
An EAGLE-1 drafter whose first matrix takes the embedding as it is says the same, so it
is an oracle, as a chain and in a tree, at any temperature.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import toy

from jaxdec.drafters.eagle import eagle, recurrent_net
from jaxdec.drafters.recurrent_tree import recurrent_tree
from jaxdec.models.config import ModelConfig
from jaxdec.models.eagle import init_eagle_params
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.vocabulary import vocabulary_params
from jaxdec.types import DrafterParams

LENGTH = 4
TREE = {"nodes": 10, "depth": LENGTH, "width": 3}
MAX_POSITIONS = 33
"""Of the drafter "eagle3": it falls silent before the longest of toy.ragged ends."""
WIDTH = toy.TINY_CONFIG.hidden_size

LAYER = ModelConfig(
    family="eagle",
    vocab_size=toy.VOCAB,
    hidden_size=WIDTH,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=1024,
)
EAGLE_1 = EagleConfig(
    layers=LAYER,
    taps=(3,),
    target_hidden_size=WIDTH,
    fusion="embedding",
    wide_layers=0,
    output_norm="none",
    draft_vocab_size=toy.VOCAB,
    own_embedding=False,
    own_head=False,
    draft_length=LENGTH,
)
EAGLE_3 = EagleConfig(
    layers=dataclasses.replace(
        LAYER, num_layers=2, layer_windows=(5, None), max_positions=MAX_POSITIONS
    ),
    taps=(0, 1, 2),
    target_hidden_size=WIDTH,
    fusion_norm="each",
    norm_before_residual=True,
    draft_vocab_size=61,
    own_embedding=False,
    own_head=True,
    draft_length=LENGTH,
)
P_EAGLE = EagleConfig(
    layers=dataclasses.replace(LAYER, qk_norm=True, qkv_bias=True),
    taps=(1, 2),
    target_hidden_size=WIDTH,
    fusion_norm="all",
    output_norm="recurrent",
    draft_vocab_size=toy.VOCAB,
    own_embedding=True,
    own_head=False,
    mask_token=96,
    draft_length=LENGTH,
)


@functools.cache
def params_of(config: EagleConfig, seed: int = 3) -> DrafterParams:
    """Random weights; the branches loud enough that context matters."""
    own = init_eagle_params(config, jax.random.key(seed))
    for layer in own["layers"].values():
        layer["attention"]["out"]["weight"] = layer["attention"]["out"]["weight"] * 3.0
    if config.is_reduced:
        rng = np.random.default_rng(seed)
        ids = np.sort(rng.choice(toy.VOCAB, config.draft_vocab_size, replace=False))
        own["vocabulary"] = vocabulary_params(ids, toy.VOCAB)
    return DrafterParams(own=own, shared=toy.tiny_params())


@functools.cache
def markov_params(loudness: float = 16.0):
    """TINY's weights, of which only embedding and head are left to say anything.

    The louder the head, the surer of itself.
    """
    params = jax.tree.map(lambda x: x, toy.tiny_params())
    table = params["embedding"]
    size = jnp.sqrt(jnp.mean(jnp.square(table), axis=1, keepdims=True))
    params["embedding"] = table / size
    params["layers"] = {i: _silent(x) for i, x in params["layers"].items()}
    params["head"] = {"weight": params["head"]["weight"] * loudness}
    return params


@functools.cache
def oracle_params(loudness: float = 16.0) -> DrafterParams:
    """EAGLE-1 that says what MARKOV says."""
    own = dict(init_eagle_params(EAGLE_1, jax.random.key(0)))
    embedding_only = np.eye(2 * WIDTH, WIDTH, dtype=np.float32)
    own["fusion"] = {"weight": jnp.asarray(embedding_only)}
    own["layers"] = {0: _silent(own["layers"][0])}
    return DrafterParams(own=own, shared=markov_params(loudness))


def _silent(layer):
    """A layer that adds nothing to its input."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return layer | {
        "attention": layer["attention"] | {"out": zeros(layer["attention"]["out"])},
        "mlp": layer["mlp"] | {"down": zeros(layer["mlp"]["down"])},
    }


def _chain(config):
    def build(coupled=True, processor=None):
        return eagle(config, coupled=coupled, processor=processor)

    return build


def _tree(config):
    def build(coupled=True, processor=None, **kwargs):
        assert coupled, "trees are for the rule match"
        net = recurrent_net(config)
        return recurrent_tree(net, processor=processor, **TREE | kwargs)

    return build


def methods():
    """By name: the taps, the drafter as ``(coupled, processor) -> Drafter``, params."""
    return {
        "eagle1": (EAGLE_1.taps, _chain(EAGLE_1), params_of(EAGLE_1)),
        "eagle3": (EAGLE_3.taps, _chain(EAGLE_3), params_of(EAGLE_3)),
        "eagle3_tree": (EAGLE_3.taps, _tree(EAGLE_3), params_of(EAGLE_3)),
        "peagle": (P_EAGLE.taps, _chain(P_EAGLE), params_of(P_EAGLE)),
    }
