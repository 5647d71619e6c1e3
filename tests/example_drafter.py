"""A new drafter in one file: it drafts what followed each token the last time.

out = jaxdec.generate(lm, prompt, strategy=LastSuccessor(name="last", length=4))
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdec import Draft, Drafter, DrafterParams, StrategyConfig


def last_successor(length: int, vocab_size: int) -> Drafter:
    """Drafts `length` tokens; `vocab_size` stands for a token that is not known."""

    def init(batch_size, capacity):  # The state: for every token, what followed it.
        return jnp.full((batch_size, vocab_size), vocab_size, jnp.int32)

    def extend(params, state, commit):  # Learns what became permanent.
        def learn(table, commit):  # One request; vmap makes it all of them.
            def write(table, i):
                is_live = i < commit.length  # What lies past it is scratch.
                token = jnp.where(is_live, commit.tokens[i], vocab_size)
                return table.at[token].set(commit.tokens[i + 1], mode="drop"), None

            places = jnp.arange(commit.tokens.shape[0] - 1, dtype=jnp.int32)
            return jax.lax.scan(write, table, places)[0]  # In order: the last one wins.

        return jax.vmap(learn)(state, commit)

    def propose(params, state, sequences):  # Follows the table from the last token on.
        def draft(table, anchor):
            def follow(token, _):
                token = table.at[token].get(mode="fill", fill_value=vocab_size)
                return token, token

            return jax.lax.scan(follow, anchor, length=length)[1]

        tokens = jax.vmap(draft)(state, sequences.anchor)
        num_known = jnp.sum(tokens < vocab_size, axis=1, dtype=jnp.int32)
        tokens = jnp.minimum(tokens, vocab_size - 1)
        return state, Draft(tokens=tokens, length=num_known)

    return Drafter("last_successor", length, (), init, extend, propose)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastSuccessor(StrategyConfig):
    """The drafter as a strategy for `jaxdec.generate`, `compare` and `Server`."""

    proposal_mode = "chain"  # What the evidence says of it.

    def build(self, lm, processor, min_rows):  # For a loaded model; it has no arrays.
        drafter = last_successor(self.length, lm.config.vocab_size)
        return drafter, DrafterParams(own=(), shared=())
