"""Tiny block drafters with random weights, of every layout, on the target TINY."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import toy

from jaxdec import acceptance
from jaxdec.drafters.dspark import block_drafter
from jaxdec.models.block import BlockConfig, make_block_net
from jaxdec.models.block_weights import init_block_params
from jaxdec.models.config import ModelConfig
from jaxdec.models.vocabulary import vocabulary_params
from jaxdec.types import DrafterParams

LAYERS = ModelConfig(
    family="qwen3",
    vocab_size=toy.VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=1024,
    qk_norm=True,
)


def block_config(layers: ModelConfig = LAYERS, **kwargs) -> BlockConfig:
    """A drafter; by default z-lab's DFlash: 1 + N, embedding and head of the target."""
    num = layers.num_layers
    defaults = dict(
        layers=layers,
        taps=(1, 2),
        block_size=5,
        sample_from_anchor=False,
        mask_token=96,
        draft_vocab_size=layers.vocab_size,
        own_embedding=False,
        own_head=False,
        windows=(None,) * num,
        causal=(False,) * num,
    )
    return BlockConfig(**(defaults | kwargs))


OWN = dict(own_embedding=True, own_head=True)
CONFIGS = {
    "dflash": block_config(),
    "dflash_anchor_first": block_config(sample_from_anchor=True, block_size=4, **OWN),
    "dspark": block_config(
        sample_from_anchor=True,
        block_size=4,
        markov="vanilla",
        markov_rank=6,
        confidence="hidden_and_previous",
        **OWN,
    ),
    "dspark_gated": block_config(
        markov="gated", markov_rank=5, confidence="hidden", own_head=True
    ),
    # Everything at once: recurrent, 1 + N, sliding layers, half of the vocabulary.
    "dspark_rnn": block_config(
        markov="rnn",
        markov_rank=5,
        confidence="hidden_and_previous",
        draft_vocab_size=48,
        windows=(6, None),
        causal=(True, False),
        **OWN,
    ),
}


@functools.cache
def weights(config: BlockConfig, seed: int = 0):
    """Random weights, loud enough that neither context nor head is drowned out."""
    own = init_block_params(config, jax.random.key(seed))
    if "vocabulary" in own:
        total = config.layers.vocab_size
        kept = np.random.default_rng(seed).permutation(total)[: config.draft_vocab_size]
        own["vocabulary"] = vocabulary_params(np.sort(kept), total)
    if "markov" in own:
        own["markov"]["rows"] = own["markov"]["rows"] * 4.0
    return own


class BlockMethod(NamedTuple):
    """A layout: what its target must return, how to make it, its arrays."""

    taps: tuple[int, ...]
    drafter: object
    """``(coupled, processor) -> Drafter``."""
    params: DrafterParams
    config: BlockConfig


@functools.cache
def methods() -> dict[str, BlockMethod]:
    """Every layout on TINY."""

    def make(config):
        def drafter(coupled=True, processor=None):
            net = make_block_net(config)
            return block_drafter(net, coupled=coupled, processor=processor)

        params = DrafterParams(own=weights(config), shared=toy.tiny_params())
        return BlockMethod(config.taps, drafter, params, config)

    return {name: make(config) for name, config in CONFIGS.items()}


def compiled(name: str, rule: str = "match", **kwargs) -> toy.Method:
    """A layout as a strategy on TINY, ready for the contract."""
    made = methods()[name]
    return toy.compiled(
        toy.tiny(taps=made.taps),
        made.drafter(coupled=rule == "match"),
        {"match": acceptance.match, "rejection": acceptance.rejection}[rule],
        target=toy.tiny_params(),
        own=made.params.own,
        shared=made.params.shared,
        **kwargs,
    )


WHOLE = ("dflash", "dspark", "dspark_rejection")
"""Rows that keep the whole contract; the others keep what layouts could break."""
ROWS = (*CONFIGS, "dspark_rejection")


def register() -> None:
    """Puts every layout into the contract table."""
    for name in ROWS:
        layout = name.removesuffix("_rejection")
        rule = "rejection" if layout != name else "match"
        toy.OTHERS[name] = functools.partial(compiled, layout, rule)


# ---- A target whose law is a table, and drafters that know it ------------------------

TABLE_LAYERS = ModelConfig(
    family="qwen3",
    vocab_size=3,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_positions=1024,
    qk_norm=True,
)
TABLE_CONFIG = block_config(
    TABLE_LAYERS,
    taps=(0,),
    block_size=3,
    sample_from_anchor=True,
    mask_token=2,
    markov="vanilla",
    markov_rank=3,
    confidence="hidden_and_previous",
    **OWN,
)


def table_target():
    """TABLE, with features that say nothing."""
    table = toy.table_model(3)

    def forward(*args):
        cache, output = table.forward(*args)
        features = jnp.zeros((*output.logits.shape[:2], 8))
        return cache, output.replace(features=features)

    return table._replace(forward=forward, num_features=8)


def table_weights(table, confidence=(0.0, 0.0, 0.0)):
    """A DSpark whose law is a table: its Markov head holds it, the rest is silent.

    `confidence` is the log-odds by the token before.
    """
    own = init_block_params(TABLE_CONFIG, jax.random.key(0))
    own["head"]["weight"] = jnp.zeros((3, 8))
    own["markov"]["rows"] = jnp.eye(3)
    own["markov"]["out"]["weight"] = jnp.asarray(table, jnp.float32)
    by_token = jnp.asarray([confidence], jnp.float32)
    weight = jnp.concatenate([jnp.zeros((1, 8)), by_token], axis=1)
    own["confidence"]["proj"] = {"weight": weight, "bias": jnp.zeros((1,))}
    return own


def many(request, num: int):
    """One request of many keys, as rows."""
    rows = jax.tree.map(lambda x: jnp.repeat(x, num, axis=0), request)
    return rows.replace(key=jax.random.split(jax.random.key(2024), num))
