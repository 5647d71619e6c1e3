"""A confidence head fitted anew, to rounds as decoding has them.

In training, blocks begin anywhere. In decoding they begin where the last one failed,
which is where the drafter is weak, so a head that is right on average of all places is
too sure there. What the head reads at a place follows from the tokens, so it can be
found again for the rounds of a decoding, and the head, being linear, be fitted to what
became of them: logistic regression, held near the weights that training gave it.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxdec.models.block import BlockNet, make_block_net
from jaxdec.training.batches import Batch
from jaxdec.training.calibrate import Rounds
from jaxdec.training.features import Features, features_of
from jaxdec.types import DrafterParams, Params

_STRENGTHS = (1e2, 1e-1, 1e-2, 1e-3, 1e-4)
"""Of what holds the weights, from the strongest on, which moves the bias alone."""
_FOLDS = 4
_MULTIPLE = 32
"""Lengths are padded to it, so that few programs are compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeadRounds:
    """Rounds, and what the head read of their draft tokens."""

    inputs: np.ndarray
    """``[rounds, K, n]``."""
    rounds: Rounds
    request: np.ndarray
    """``[rounds]``: which request they are of."""

    @property
    def is_asked(self) -> np.ndarray:
        """``[rounds, K]``: drafts that were judged, with all before them accepted."""
        depth = np.arange(self.inputs.shape[1])[None]
        most = np.minimum(self.rounds.num_judged - 1, self.rounds.num_accepted)
        return depth <= most[:, None]

    @property
    def is_accepted(self) -> np.ndarray:
        """``[rounds, K]``."""
        depth = np.arange(self.inputs.shape[1])[None]
        return depth < self.rounds.num_accepted[:, None]


class HeadInputs:
    """What the confidence head of a block drafter reads, found again from tokens."""

    def __init__(self, config, own: Params, lm):
        self._net = make_block_net(config, dtype=lm.dtype)
        self._features = features_of(lm, config.taps)
        self._arrays = (own, lm.params)
        self._read = jax.jit(self._inputs)

    def __call__(
        self, sequences: Sequence[Sequence[int]], anchors: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Of rounds that begin at some places of some sequences.

        Args:
            sequences: tokens, prompt and answer.
            anchors: of each sequence, where its rounds begin: the place of the last
                token that the target has not read.

        Returns:
            ``[rounds, K, n]``, sequence by sequence. Past the end of a sequence, and
            past the first draft token that is not what follows, it is of no use.
        """
        size = _padded(max(map(len, sequences)))
        num = _padded(max(map(len, anchors)))
        tokens = np.zeros((len(sequences), size), np.int32)
        places = np.zeros((len(sequences), num), np.int32)
        for row, (ids, begins) in enumerate(zip(sequences, anchors, strict=True)):
            tokens[row, : len(ids)], places[row, : len(begins)] = ids, begins
        found = np.asarray(self._read(*self._arrays, tokens, places))
        rows = [found[row, : len(begins)] for row, begins in enumerate(anchors)]
        return np.concatenate(rows)

    def _inputs(
        self,
        own: Params,
        target: Params,
        tokens: Int[Array, "B T"],
        anchor: Int[Array, "B N"],
    ) -> Float[Array, "B N K n"]:
        net: BlockNet = self._net
        features: Features = self._features
        nothing = jnp.zeros(len(tokens), jnp.int32)
        batch = Batch(
            tokens=tokens,
            length=nothing,
            prompt_length=nothing,
            features=jnp.zeros((*tokens.shape, 0, 0)),
        )
        kept = features.kept_of(target, batch)
        joined = features.joined(target, kept, net.config.taps)
        params = DrafterParams(own=own, shared=target)
        first = jnp.take_along_axis(tokens, anchor, axis=1)
        hidden = net.read_all(params, joined, anchor, first)[:, :, net.config.first :]
        if net.config.confidence == "hidden":
            return hidden
        # The token before draft token k of the anchor's place A stands at A + k.
        steps = jnp.arange(hidden.shape[2], dtype=jnp.int32)
        place = anchor[:, :, None] + steps[None, None]
        place = jnp.minimum(place, tokens.shape[1] - 1)
        before = jnp.take_along_axis(tokens, place.reshape(len(tokens), -1), axis=1)
        head = net.markov(params)
        assert head is not None
        row = head.row(before.reshape(place.shape))
        return jnp.concatenate([hidden, row], axis=-1)


def joined(parts: Sequence[HeadRounds]) -> HeadRounds:
    """Those of several calls."""
    fields = [f.name for f in dataclasses.fields(Rounds)]
    rounds = {
        name: np.concatenate([getattr(p.rounds, name) for p in parts])
        for name in fields
    }
    return HeadRounds(
        inputs=np.concatenate([p.inputs for p in parts]),
        rounds=Rounds(**rounds),
        request=np.concatenate([p.request for p in parts]),
    )


def odds(inputs: np.ndarray, weight: np.ndarray, bias: float) -> np.ndarray:
    """``[rounds, K]``: what a head says of what it reads."""
    return inputs.astype(np.float64) @ weight + bias


def fit(
    found: HeadRounds, weight: np.ndarray, bias: float
) -> tuple[np.ndarray, float, np.ndarray]:
    """A head for these rounds.

    How firmly the weights are held is the firmness that does best on requests that
    were left out.

    Args:
        found: the rounds.
        weight: ``[n]``, from training.
        bias: from training.

    Returns:
        Weights, bias, and ``[rounds, K]``: the log-odds that a head says which was
        fitted without the request's own rounds. What is fitted to those next does not
        take what was learned by heart for knowledge.
    """
    asked = found.is_asked
    x = found.inputs[asked].astype(np.float64)
    label = found.is_accepted[asked].astype(np.float64)
    fold = np.broadcast_to((found.request % _FOLDS)[:, None], asked.shape)[asked]
    scale = np.maximum(x.std(axis=0), 1e-6)
    begin = np.append(weight, bias)
    parts = [fold != i for i in range(_FOLDS)]
    best: tuple[float, float, list[np.ndarray]] | None = None
    heads = [begin] * _FOLDS
    for strength in _STRENGTHS:
        heads = [
            _regression(x[part], label[part], begin, scale, strength, head)
            for part, head in zip(parts, heads, strict=True)
        ]
        loss = 0.0
        for part, head in zip(parts, heads, strict=True):
            said = x[~part] @ head[:-1] + head[-1]
            loss += float(np.sum(np.logaddexp(0, said) - said * label[~part]))
        if best is None or loss < best[0]:
            best = loss, strength, heads
    assert best is not None
    _, strength, heads = best
    head = _regression(x, label, begin, scale, strength, begin)
    apart = np.zeros(asked.shape)
    for i, other in enumerate(heads):
        mine = found.request % _FOLDS == i
        apart[mine] = odds(found.inputs[mine], other[:-1], other[-1])
    return head[:-1], float(head[-1]), apart


def _regression(x, label, begin, scale, strength, start) -> np.ndarray:
    """Newton's method; ``strength / 2 |scale (w - w0)|^2`` a sample, bias free."""
    head = np.array(start, np.float64)
    hold = strength * np.append(scale**2, 0.0)
    with_one = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    for _ in range(12):
        chance = 1 / (1 + np.exp(-(with_one @ head)))
        gradient = with_one.T @ (chance - label) / len(x) + hold * (head - begin)
        spread = chance * (1 - chance) / len(x)
        curve = (with_one * spread[:, None]).T @ with_one + np.diag(hold + 1e-9)
        step = np.linalg.solve(curve, gradient)
        head = head - step
        if np.max(np.abs(step) * np.append(scale, 1.0)) < 1e-6:
            break
    return head


def _padded(length: int) -> int:
    return -(-length // _MULTIPLE) * _MULTIPLE
