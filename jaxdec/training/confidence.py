"""A confidence head fitted anew, to rounds as decoding has them.

In training, blocks begin anywhere. In decoding they begin where the last one failed,
which is where the drafter is weak, so a head that is right on average of all places is
too sure there. What the head reads at a place follows from the tokens, so it can be
found again for the rounds of a decoding, and the head, being linear, be fitted to what
became of them: logistic regression, held near the weights that training gave it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxdec.models.block import BlockConfig, make_block_net
from jaxdec.training.batches import Batch
from jaxdec.training.calibrate import Rounds
from jaxdec.training.calibrate import joined as joined_rounds
from jaxdec.training.features import features_of
from jaxdec.types import DrafterParams, Params

NUM_FOLDS = 8
_STRENGTHS = (1e2, 1.0, 3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3)
"""Of the L2 penalty, from the strongest on, which moves the bias alone."""
_MULTIPLE = 32
"""Lengths are padded to it, so that few programs are compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeadRounds:
    """Rounds, and what the head read of their draft tokens."""

    inputs: np.ndarray
    """``[rounds, K, n]``, n being the width of what a head reads."""
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

    def __init__(self, config: BlockConfig, own: Params, lm: Any):
        """Takes a drafter's configuration and arrays, and its target."""
        self._net = make_block_net(config, dtype=lm.dtype)
        self._features = features_of(lm, config.taps)
        self._arrays = (own, lm.params)
        self._read = jax.jit(self._inputs)

    def __call__(
        self,
        sequences: Sequence[Sequence[int]],
        anchors: Sequence[Sequence[int]],
        drafts: np.ndarray,
    ) -> np.ndarray:
        """Of rounds that begin at some places of some sequences.

        Args:
            sequences: tokens, prompt and answer.
            anchors: of each sequence, the places of its rounds' anchors.
            drafts: ``[rounds, K]``, what the rounds drafted, sequence by sequence.

        Returns:
            ``[rounds, K, n]`` in the same order; n is the width of what a head reads.
        """
        size = _padded(max(map(len, sequences)))
        num = _padded(max(map(len, anchors)))
        shape = len(sequences), num
        tokens = np.zeros((len(sequences), size), np.int32)
        places = np.zeros(shape, np.int32)
        drafted = np.zeros((*shape, drafts.shape[1]), np.int32)
        is_round = np.zeros(shape, bool)
        for row, (ids, begins) in enumerate(zip(sequences, anchors, strict=True)):
            tokens[row, : len(ids)], places[row, : len(begins)] = ids, begins
            is_round[row, : len(begins)] = True
        drafted[is_round] = drafts
        return np.asarray(self._read(*self._arrays, tokens, places, drafted))[is_round]

    def _inputs(
        self,
        own: Params,
        target: Params,
        tokens: Int[Array, "B T"],
        anchor: Int[Array, "B N"],
        draft: Int[Array, "B N K"],
    ) -> Float[Array, "B N K n"]:
        net, features = self._net, self._features
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
        hidden = net.read_all(params, joined, anchor, first)
        hidden = hidden[:, :, net.config.first :]
        before = jnp.concatenate([first[:, :, None], draft[:, :, :-1]], axis=2)
        return net.confidence_inputs(params, hidden, before)


def joined(parts: Sequence[HeadRounds]) -> HeadRounds:
    """Those of several calls."""
    return HeadRounds(
        inputs=np.concatenate([p.inputs for p in parts]),
        rounds=joined_rounds([p.rounds for p in parts]),
        request=np.concatenate([p.request for p in parts]),
    )


def log_odds(inputs: np.ndarray, weight: np.ndarray, bias: float) -> np.ndarray:
    """``[rounds, K]``: what a head says of ``inputs[rounds, K, n]``, ``weight[n]``."""
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
        Weights and bias, fitted to all rounds; and ``[rounds, K]``, the log-odds of
        heads that were fitted without the part (`folds`) that they speak of.

    Raises:
        ValueError: the rounds are of fewer than two requests.
    """
    asked, part = found.is_asked, folds(found.request)
    if part.max(initial=0) < 1:
        raise ValueError(
            "a head is fitted to the drafts of two or more requests, got those of "
            f"{len(np.unique(found.request))}; give more prompts, or longer answers"
        )
    x = found.inputs[asked].astype(np.float64)
    label = found.is_accepted[asked].astype(np.float64)
    fold = np.broadcast_to(part[:, None], asked.shape)[asked]
    scale = np.maximum(x.std(axis=0), 1e-6)
    begin = np.append(weight, bias)
    # The last one is of all rounds, and goes the same way.
    chosen = [fold != i for i in range(part.max() + 1)] + [np.ones(len(x), bool)]
    best, heads = np.inf, [begin] * len(chosen)
    for strength in _STRENGTHS:
        found_now = [
            _regression(x[rows], label[rows], begin, scale, strength, head)
            for rows, head in zip(chosen, heads, strict=True)
        ]
        loss = sum(
            _loss(x[~rows] @ head[:-1] + head[-1], label[~rows])
            for rows, head in zip(chosen[:-1], found_now[:-1], strict=True)
        )
        if loss >= best:
            break
        best, heads = loss, found_now
    held_out = np.zeros(asked.shape)
    for i, head in enumerate(heads[:-1]):
        held_out[part == i] = log_odds(found.inputs[part == i], head[:-1], head[-1])
    return heads[-1][:-1], float(heads[-1][-1]), held_out


def folds(request: np.ndarray) -> np.ndarray:
    """``[rounds]``: of `NUM_FOLDS` parts or fewer, the one that a round belongs to.

    A request is whole in one part, and what is said of a part was learned of the
    others: that tells what was learned from what was learned by heart.
    """
    return np.unique(request, return_inverse=True)[1] % NUM_FOLDS


def _loss(said: np.ndarray, label: np.ndarray) -> float:
    """Cross-entropy of log-odds, summed."""
    return float(np.sum(np.logaddexp(0, said) - said * label))


def _regression(x, label, begin, scale, strength, start) -> np.ndarray:
    """Newton's method for ``loss + strength / 2 |scale (w - w0)|^2``, the bias free.

    A step is halved until it helps: far from the minimum a whole one can lead away.
    """
    hold = strength * np.append(scale**2, 0.0)
    with_one = np.concatenate([x, np.ones((len(x), 1))], axis=1)

    def total(head):
        held = 0.5 * np.sum(hold * (head - begin) ** 2)
        return _loss(with_one @ head, label) / len(x) + held

    head = np.array(start, np.float64)
    now = total(head)
    for _ in range(50):
        chance = 0.5 * (1 + np.tanh(0.5 * (with_one @ head)))
        gradient = with_one.T @ (chance - label) / len(x) + hold * (head - begin)
        spread = chance * (1 - chance) / len(x)
        curve = (with_one * spread[:, None]).T @ with_one + np.diag(hold + 1e-9)
        step = np.linalg.solve(curve, gradient)
        size = 1.0
        while size > 1e-6 and not total(head - size * step) <= now:
            size /= 2
        if size <= 1e-6:
            break  # As near as numbers allow.
        head = head - size * step
        before, now = now, total(head)
        if before - now < 1e-9:
            break
    return head


def _padded(length: int) -> int:
    return -(-length // _MULTIPLE) * _MULTIPLE
