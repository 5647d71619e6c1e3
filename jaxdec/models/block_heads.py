"""The two small heads of DSpark: the previous token's say, and a confidence.

A block drafter fills all its places at once, so no place knows what stands before it.
The Markov head repairs that: while tokens are chosen from left to right, the token
before a place adds a bias of low rank to the logits there. What can be computed for all
places at once (the hidden states' share) is, so a place costs one row of a table, one
r x V product and little else. The confidence head says how likely a token is to be
accepted if all before it were; it sees the token before the place, never the one at it.

Both are those of DeepSpec (deepseek-ai/DeepSpec; arXiv 2607.05147).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdec.models.layers import Linear, take_rows


class MarkovHead(nnx.Module):
    """A bias on the logits from the token before, ``W2 code`` with ``code`` of width r.

    vanilla  the code is the token's row e of W1
    gated    ``sigmoid(gate [h; e]) * e``
    rnn      a recurrent cell over ``[state; e; h]``, its state zero at every block
    """

    def __init__(
        self, kind, rank, width, vocab_size, num_out, *, dtype, out_first, rngs
    ):
        self.kind = kind
        self.rank = rank
        table = jax.random.normal(rngs.params(), (vocab_size, rank), jnp.float32)
        self.rows = nnx.Param((table * rank**-0.5).astype(dtype))
        # [r, V], whatever the layout of the other matrices: XLA on CPU multiplies by so
        # flat a matrix 17 to 19 % faster than by its transpose.
        self.out = Linear(
            rank, num_out, bias=False, dtype=dtype, out_first=False, rngs=rngs
        )
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        parts = {"vanilla": 0, "gated": 1, "rnn": 3}[kind] * rank
        before = 2 * rank if kind == "rnn" else rank
        # One assignment each: Flax fixes an attribute as static when it is None first.
        has_code = kind != "vanilla"
        self.of_hidden = Linear(width, parts, bias=True, **kw) if has_code else None
        self.of_previous = Linear(before, parts, bias=False, **kw) if has_code else None

    def row(self, previous: Int[Array, "*axes"]) -> Float[Array, "*axes r"]:
        """The rows of W1 of tokens of the target's vocabulary."""
        return take_rows(self.rows[...], previous)

    def start(self, batch_size: int) -> Float[Array, "B s"]:
        """The state before the first place; empty but for rnn."""
        return jnp.zeros((batch_size, self.rank if self.kind == "rnn" else 0))

    def prepare(self, hidden: Float[Array, "B K E"]) -> Float[Array, "B K p"]:
        """The hidden states' share of every place's code."""
        if self.of_hidden is None:
            return jnp.zeros((*hidden.shape[:2], 0), jnp.float32)
        return self.of_hidden(hidden)

    def code(
        self,
        state: Float[Array, "B s"],
        previous: Int[Array, "B"],
        prepared: Float[Array, "B p"],
    ) -> tuple[Float[Array, "B s"], Float[Array, "B r"]]:
        """One place: the state after it, and its code."""
        row = self.row(previous)
        if self.of_previous is None:
            return state, row
        if self.kind == "gated":
            return state, jax.nn.sigmoid(prepared + self.of_previous(row)) * row
        joint = prepared + self.of_previous(jnp.concatenate([state, row], axis=-1))
        gate, candidate, out = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)

    def unrolled(
        self,
        state: Float[Array, "B s"],
        previous: Int[Array, "B K"],
        hidden: Float[Array, "B K E"],
    ) -> Float[Array, "B K V"]:
        """The bias of all places, where the tokens before them are known."""
        return self.out(self.codes(state, previous, hidden))

    def codes(
        self,
        state: Float[Array, "B s"],
        previous: Int[Array, "B K"],
        hidden: Float[Array, "B K E"],
    ) -> Float[Array, "B K r"]:
        """What the last matrix reads at all places."""
        if self.kind == "vanilla":
            return self.row(previous)

        def place(state, inputs):
            return self.code(state, *inputs)

        prepared = jnp.moveaxis(self.prepare(hidden), 1, 0)
        _, codes = jax.lax.scan(place, state, (previous.T, prepared))
        return jnp.moveaxis(codes, 0, 1)


class ConfidenceHead(nnx.Module):
    """Log-odds that a token is accepted if all before it were; float32 throughout."""

    def __init__(self, width, *, rngs):
        self.proj = Linear(
            width, 1, bias=True, dtype=jnp.float32, out_first=True, rngs=rngs
        )

    def __call__(self, x: Float[Array, "B K n"]) -> Float[Array, "B K"]:
        return self.proj(x)[..., 0]
