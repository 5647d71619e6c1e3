"""The drafter that proposes nothing: what autoregressive decoding is made with."""

import jax.numpy as jnp

from jaxdec.types import Draft, Drafter


def none() -> Drafter:
    """K = 0: every step is one forward and one token."""

    def init(batch_size, capacity):
        del batch_size, capacity
        return ()

    def extend(params, state, commit):
        del params, commit
        return state

    def propose(params, state, sequences):
        del params
        batch = sequences.length.shape[0]
        draft = Draft(
            tokens=jnp.zeros((batch, 0), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
        )
        return state, draft

    return Drafter(
        name="none",
        max_length=0,
        taps=(),
        init=init,
        extend=extend,
        propose=propose,
        keeps_state=True,
    )
