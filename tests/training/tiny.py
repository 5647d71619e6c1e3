"""A tiny target whose answers are worth learning, and a store of them.

The target is TINY with a loud head, so that greedy answers are confident; all that is
compiled for it is shared by the tests of this folder.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import toy

from jaxdec.lm import LM
from jaxdec.models.decoder import make_reader
from jaxdec.training.recipe import (
    DflashRecipe,
    DraftRecipe,
    DsparkRecipe,
    Eagle3Recipe,
    MtpRecipe,
)
from jaxdec.training.store import Record, read_store, write_shard

CONFIG = dataclasses.replace(toy.TINY_CONFIG, num_layers=3)
PROMPT, LENGTH = 4, 24


@functools.cache
def target(dtype: str = "float32") -> LM:
    """Three layers; what it says is certain, and depends on the last token most."""
    params = jax.tree.map(lambda x: x, toy.weights(CONFIG, 5))
    for layer in params["layers"].values():
        for part, matrix in (("attention", "out"), ("mlp", "down")):
            layer[part][matrix]["weight"] = layer[part][matrix]["weight"] * 0.02
    params["head"]["weight"] = params["head"]["weight"] * 6.0
    return LM(
        config=CONFIG,
        params=params,
        dtype=dtype,
        name="tiny",
        content_hash="tiny",
        stop_tokens=(),
    )


@functools.cache
def answers(num: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Greedy answers to random prompts, ``[num, LENGTH]``, found without the engine."""
    lm = target()
    reader = make_reader(CONFIG)

    @jax.jit
    def extend(tokens, length):
        output = reader.read(lm.params, tokens)
        best = jnp.argmax(output.logits, axis=-1).astype(jnp.int32)
        at = jnp.full((tokens.shape[0], 1), length - 1)
        new = jnp.take_along_axis(best, at, axis=1)[:, 0]
        return tokens.at[:, length].set(new)

    rng = np.random.default_rng(0)
    tokens = np.zeros((num, LENGTH), np.int32)
    tokens[:, :PROMPT] = rng.integers(0, CONFIG.vocab_size, (num, PROMPT))
    tokens = jnp.asarray(tokens)
    for length in range(PROMPT, LENGTH):
        tokens = extend(tokens, jnp.int32(length))
    return np.asarray(tokens)


def write_answers(folder, num: int = 200, num_validation: int = 24):
    """A store of them; the last are for validation, and lengths differ."""
    rng = np.random.default_rng(1)
    records = [
        Record(
            prompt=row[:PROMPT].tolist(),
            answer=row[PROMPT : LENGTH - int(rng.integers(0, 8))].tolist(),
            prompt_id=str(i),
            source="toy",
            is_validation=i >= num - num_validation,
        )
        for i, row in enumerate(answers(num))
    ]
    write_shard(folder, records[: num // 2])
    write_shard(folder, records[num // 2 :])
    return read_store(folder)


COMMON = dict(
    batch_size=16,
    vocabulary=97,
    num_buckets=1,
    warmup=5,
    validate_every=1000,
    save_every=1000,
    num_validation=24,
    learning_rate=1e-2,
)
RECIPES = {
    "draft": DraftRecipe(steps=60, from_layers=(0,), draft_length=3, **COMMON),
    "mtp": MtpRecipe(steps=80, passes=2, draft_length=3, **COMMON),
    "eagle3": Eagle3Recipe(steps=80, passes=3, draft_length=3, **COMMON),
    "dflash": DflashRecipe(
        steps=150, block_size=4, num_anchors=12, num_layers=1, **COMMON
    ),
    "dspark": DsparkRecipe(
        steps=120, block_size=3, num_anchors=12, num_layers=1, markov_rank=16, **COMMON
    ),
}
"""Enough for each to learn what the target says."""
