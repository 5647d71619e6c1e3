"""Drafting with the target's own multi-token-prediction modules.

One module drafts like any recurrent network (`jaxdec.drafters.recurrent`). With n
modules, each says the next token of the proposal. The target has read s tokens, x_s is
the anchor, and d_1, d_2, ... are the drafts; then module k reads these rows::

    row       ...   s-3   s-2   s-1
    module 0  ...   x     x     x_s     says d_1      all tokens are known
    module 1  ...   x     x_s   d_1     says d_2      one row holds a draft
    module 2  ...   x_s   d_1   d_2     says d_3      two rows do

A row is permanent once its token is committed; `extend` writes it, for every module the
same number of rows, one further back per module. So no row that used a rejected draft
is ever in the cache: rows with drafts stand beside it, and are made again from the
tokens that were committed. What a module needs of the one before it at its next row is
one vector, which the state keeps.

Past the last module drafting starts again with module 0, which reads what the modules
said about the n tokens just drafted in place of the target's hidden states; with one
module that is the usual recursion.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxdec import drafting, sampling
from jaxdec.cache import KVCache
from jaxdec.drafters.recurrent import HeldRows, RecurrentNet, chain
from jaxdec.models.mtp import MtpNetwork
from jaxdec.types import (
    Commit,
    Draft,
    Drafter,
    LogitsProcessor,
    Sequences,
    pytree,
)


@pytree
class ModulesState:
    """The permanent rows of all modules."""

    cache: KVCache
    """One layer per module. `length` is how many tokens the target has read; module k
    has k rows fewer."""
    carried: Float[Array, "B n E"]
    """What the last permanent row of each module passes on; scratch while it has none.
    """


def mtp(
    network: MtpNetwork,
    length: int,
    *,
    coupled: bool = True,
    processor: LogitsProcessor | None = None,
) -> Drafter:
    """Drafts `length` tokens in a row with one or more modules.

    Args:
        network: the modules.
        length: K.
        coupled: True for the rule `match` (the position's shared noise), False for
            `rejection` (independent noise, and the distributions it drew from).
        processor: the request's custom processor, so that drafts follow it too.

    Raises:
        ValueError: a length below 1, or one that several modules cannot share.
    """
    check_length(network.config.num_native_modules, length)
    options = dict(coupled=coupled, processor=processor)
    if network.config.num_native_modules == 1:
        return chain(recurrent_net(network), length, **options)
    return module_chain(network, length, **options)


def check_length(num_modules: int, length: int) -> None:
    """Raises ValueError for a draft `length` that `num_modules` cannot share."""
    if length < 1:
        raise ValueError(f"draft length is {length}; give at least 1")
    if length > num_modules and length % num_modules:
        raise ValueError(
            f"draft length is {length}, but {num_modules} MTP modules draft in turn; "
            f"give 1 to {num_modules}, or a multiple of {num_modules}"
        )


def recurrent_net(network: MtpNetwork) -> RecurrentNet:
    """Module 0 as the network of `jaxdec.drafters.recurrent`."""
    config = network.config

    def init_held(batch_size, num_rows):
        keys, values = network.init_held(batch_size, num_rows)
        return HeldRows(keys=(keys,), values=(values,))

    def write(params, cache, hidden, tokens, position):
        del position  # It is the row.
        return network.write(params, 0, cache, hidden, tokens)

    def read(params, cache, held, *rest):
        rows = (held.keys[0], held.values[0])
        (keys, values), out = network.read(params, 0, cache, rows, *rest)
        return HeldRows(keys=(keys,), values=(values,)), out

    return RecurrentNet(
        name="mtp",
        taps=config.taps,
        hidden_size=config.block.hidden_size,
        max_positions=config.block.max_positions,
        init_cache=network.init_cache,
        init_held=init_held,
        fuse=lambda params, features: features,
        write=write,
        read=read,
        logits=lambda params, hidden: network.logits(params, 0, hidden),
        vocabulary=network.vocabulary,
    )


def module_chain(
    network: MtpNetwork,
    length: int,
    *,
    coupled: bool = True,
    processor: LogitsProcessor | None = None,
) -> Drafter:
    """`mtp` for any number of modules; with one it drafts what `chain` does.

    Args:
        network: the modules.
        length: K.
        coupled: True for the rule `match`, False for `rejection`.
        processor: the request's custom processor.

    Raises:
        ValueError: a length that the modules cannot share.
    """
    config = network.config
    check_length(config.num_native_modules, length)
    num = min(config.num_native_modules, length)
    num_turns = length // num
    max_positions = config.block.max_positions

    def init(batch_size, capacity):
        shape = (batch_size, num, config.block.hidden_size)
        cache = network.init_cache(batch_size, capacity)
        return ModulesState(
            cache=cache.replace(keys=cache.keys[:num], values=cache.values[:num]),
            carried=jnp.zeros(shape, jnp.float32),
        )

    def extend(params, state: ModulesState, commit: Commit) -> ModulesState:
        base = state.cache.length
        cache, out, kept = state.cache, commit.features, []
        tokens = commit.tokens[:, 1:]
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        for k in range(num):
            # Row base - k pairs with the first new token; before row 0 is nothing.
            skipped = jnp.maximum(k - base, 0)
            if k > 0:
                last = state.carried[:, k - 1 : k]
                shifted = jnp.concatenate([last, out[:, :-1]], axis=1)
                out = jnp.where((base < k)[:, None, None], out, shifted)
            index = jnp.minimum(steps + skipped[:, None], steps[:, -1:])
            paired = jnp.take_along_axis(tokens, index, axis=1)
            cache, out = network.write(params, k, cache, out, paired)
            num_rows = jnp.maximum(commit.length - skipped, 0)
            newest = jnp.maximum(num_rows - 1, 0)[:, None, None]
            newest = jnp.take_along_axis(out, newest, axis=1)
            is_new = (num_rows > 0)[:, None, None]
            kept.append(jnp.where(is_new, newest, state.carried[:, k : k + 1]))
        return ModulesState(
            cache=cache.commit(None, commit.length),
            carried=jnp.concatenate(kept, axis=1),
        )

    def propose(params, state: ModulesState, sequences: Sequences):
        batch = sequences.length.shape[0]
        read_length = state.cache.length
        # Beside the cache every module has K rows: those of turn c from c * n on, the
        # first of all is row s - n. In turn 0 only the last k of module k hold drafts;
        # those before them are permanent already, and not seen here.
        row = jnp.arange(num_turns * num, dtype=jnp.int32)
        place = (read_length - num)[:, None] + row[None]
        within = jnp.arange(num, dtype=jnp.int32)

        def read(k):
            """Rows of module k in one turn, given what the module before carries on."""

            def rows(held, start, hidden, tokens):
                kept = state.carried[:, k - 1 : k] if k else hidden
                is_kept = (within == num - k) & (start == 0)
                hidden = jnp.where(is_kept[None, :, None], kept, hidden)
                asks = start + within
                is_row = (row >= num - k)[None] & (place >= 0)
                held, out = network.read(
                    params,
                    k,
                    state.cache,
                    held,
                    start,
                    hidden,
                    tokens,
                    jax.lax.dynamic_slice_in_dim(place, start, num, axis=1),
                    place,
                    _visible(is_row, row, asks),
                )
                return held, out, network.normed(params, k, out[:, -1:])

            return rows

        def nothing(held, start, hidden, tokens):
            del start, tokens
            return held, hidden, hidden[:, -1:]

        reads = [read(k) for k in range(num)] + [nothing]

        def draft_one(carry, node):
            held, context, carried, lasts, normed = carry
            token, log_probs = drafting.sample(
                None if network.vocabulary is None else network.vocabulary(params),
                sequences,
                sampling.chain_nodes(context[:, num:], node),
                network.head(params, normed),
                coupled=coupled,
                processor=processor,
            )
            context = jax.lax.dynamic_update_slice_in_dim(
                context, token, num + node + 1, axis=1
            )
            # What the next token is drawn from.
            turn, k = (node + 1) // num, (node + 1) % num
            start = turn * num
            tokens = jax.lax.dynamic_slice_in_dim(context, start + k + 1, num, axis=1)
            mine, carried, normed = jax.lax.switch(
                jnp.where(node + 1 < length, k, num),
                reads,
                jax.tree.map(lambda x: x[k], held),
                start,
                jnp.where(k == 0, lasts, carried),
                tokens,
            )
            held = jax.tree.map(lambda x, new: x.at[k].set(new), held, mine)
            lasts = jax.lax.dynamic_update_slice_in_dim(
                lasts, carried[:, -1:], k, axis=1
            )
            return (held, context, carried, lasts, normed), (token, log_probs)

        held = [network.init_held(batch, num_turns * num)] * num
        lasts = jnp.zeros_like(state.carried)
        lasts = lasts.at[:, 0].set(state.carried[:, 0])
        carry = (
            jax.tree.map(lambda *x: jnp.stack(x), *held),
            # Room for the tokens of rows that are not seen, then anchor and drafts.
            jnp.pad(sequences.anchor[:, None], ((0, 0), (num, length))),
            state.carried,
            lasts,
            network.normed(params, 0, state.carried[:, :1]),
        )
        nodes = jnp.arange(length, dtype=jnp.int32)
        _, (tokens, log_probs) = jax.lax.scan(draft_one, carry, nodes)
        fits = sequences.length + length <= max_positions
        draft = Draft(
            tokens=jnp.moveaxis(tokens[..., 0], 0, 1),
            length=jnp.where(fits & (read_length > 0), jnp.int32(length), 0),
            log_probs=None if coupled else jnp.moveaxis(log_probs[:, :, 0], 0, 1),
        )
        return state, draft

    return Drafter(
        name="mtp",
        max_length=length,
        taps=config.taps,
        init=init,
        extend=extend,
        propose=propose,
        keeps_state=True,
    )


def _visible(is_row, row, asks) -> Bool[Array, "B T R"]:
    """Earlier rows that exist, and a row itself: one at least, also for scratch."""
    is_earlier = row[None, :] <= asks[:, None]
    is_own = row[None, :] == asks[:, None]
    return (is_row[:, None, :] & is_earlier[None]) | is_own[None]
