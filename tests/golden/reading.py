"""Reading whole sequences with a target, for the golden cases of every kind."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import toy

import jaxdec
from jaxdec.models.decoder import make_model


class Read(NamedTuple):
    """What a target says of a sequence; every leaf leads with its places."""

    logits: np.ndarray
    taps: np.ndarray
    """``[N + 1, T, E]``."""
    normed_hidden: np.ndarray


@functools.cache
def load(path):
    return jaxdec.load(path, dtype="float32")


def prompts_of(expected):
    """The prompts of a case, however many."""
    numbers = range(len(expected))
    return [expected[f"prompt_{i}"] for i in numbers if f"prompt_{i}" in expected]


@functools.cache
def program(config):
    """A model with every tap, and its jitted forward; equal models share one."""
    model = make_model(config, taps=tuple(range(config.num_layers + 1)))
    return model, jax.jit(model.forward, compiler_options=toy.FAST)


def read_prompts(lm, prompts):
    """Every prompt in one batch, where what stands after a shorter one is scratch.

    Returns:
        One `Read` per prompt, and the cache with all of them committed.
    """
    model, forward = program(lm.config)
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    width = -(-lengths.max() // 8) * 8
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    cache = model.init_cache(len(prompts), 256)
    cache, output = forward(lm.params, cache, jnp.asarray(tokens), position, None)
    reads = [_part(lm.config, output, row, n) for row, n in enumerate(lengths)]
    return reads, cache.commit(None, jnp.asarray(lengths))


def continue_greedily(lm, reads, cache, num):
    """The next `num` tokens of every row and the logits behind each, step by step."""
    _, forward = program(lm.config)
    logits = [np.stack([read.logits[-1] for read in reads])]
    tokens = [logits[0].argmax(-1)]
    while len(tokens) < num:
        step = jnp.asarray(tokens[-1][:, None], jnp.int32)
        cache, output = forward(lm.params, cache, step, cache.length[:, None], None)
        cache = cache.commit(None, jnp.ones_like(cache.length))
        logits.append(np.asarray(output.logits[:, 0]))
        tokens.append(logits[-1].argmax(-1))
    return np.stack(tokens, 1), np.stack(logits, 1)


def _part(config, output, row, length):
    features = np.asarray(output.features[row, :length])
    return Read(
        logits=np.asarray(output.logits[row, :length]),
        taps=np.stack(np.split(features, config.num_layers + 1, axis=-1)),
        normed_hidden=np.asarray(output.normed_hidden[row, :length]),
    )
