"""What one run of a program does: arithmetic and memory traffic, loops times trips.

XLA's own cost analysis counts the body of a loop once, whatever its trips, and all
bytes that pass between its operations, most of which never leave the chip. So here the
traced program is walked as it would run. Small numbers (lengths, counters, flags) are
given and carried along; so it is known how often each loop turns, and which branch is
taken, and what is inside counts as often as it runs. Everything else has a shape only.

    FLOPs     2 for each multiply-add of a matmul, 1 for each number that elementwise
              arithmetic makes or a reduction reads; what is transcendental or random
              is left out, as XLA does
    bytes     what has to come out of memory: an array that was given, whenever
              something computes with it; of slices and rows that are looked up, these;
              and what is written back in place. Results of matmuls pass through
              memory once each way, which is an upper bound: most stay on the chip.

On several devices an array that is split counts by the part that a device holds, and a
matmul by the smaller part of its operands. What devices tell one another is left out.

With ``as_written=True`` each body counts once and the dearest branch of each condition,
which is what XLA counts (`HloCostAnalysis`): FLOPs are then comparable with
``compiled.cost_analysis()``.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from jaxdec.planning import folding

ON_CHIP = ""
"""The label of what is computed."""
ACTIVATIONS = "activations"
"""The label under which results of matmuls count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """What is known of an array besides its shape."""

    label: str = ON_CHIP
    """Where its bytes count; empty for what is computed."""
    share: float = 1.0
    """The part of it that one device holds."""
    value: np.ndarray | None = None
    """Its numbers, where they are given or follow from such."""
    item_bytes: int = 0
    """Of a number, as it lies in memory; 0 is by dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one device does."""

    flops: float
    matmul_flops: float
    """The part of `flops` that is in matmuls."""
    bytes_by_label: Mapping[str, float]
    num_open_loops: int
    """Loops whose trips depend on data that is not given."""

    @property
    def num_bytes(self) -> float:
        """Of all labels."""
        return sum(self.bytes_by_label.values())


_COMPUTED = Operand()
_ELEMENTWISE = frozenset(
    """
    add sub mul div max min neg abs sign rem and or not xor select_n clamp pow square
    integer_pow floor ceil round lt le gt ge eq ne is_finite
    shift_left shift_right_logical shift_right_arithmetic add_any nextafter
    """.split()
)
_REDUCING = frozenset(
    """
    reduce_sum reduce_max reduce_min reduce_prod reduce_or reduce_and argmax argmin
    cumsum cumprod cummax cummin cumlogsumexp top_k sort
    """.split()
)
_SAME_ARRAY = frozenset(
    """
    reshape transpose squeeze expand_dims convert_element_type copy copy_p rev
    sharding_constraint reduce_precision optimization_barrier slice
    """.split()
)
"""Of an array in memory these make no new one: what follows reads the first."""


def count(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    operands: Sequence[Any],
    *,
    as_written: bool = False,
    open_trips: int = 1,
) -> Work:
    """Walks a function as it would run.

    Args:
        function: pure; it is traced, not run.
        arguments: arrays, or their shapes.
        operands: an `Operand` for every leaf of `arguments`, in trees like them.
        as_written: count loop bodies once and the dearest branches, as XLA does.
        open_trips: of counting loops whose end depends on data that is not given (a
            mixture's experts). Other open loops are taken not to turn: they repair what
            is out of the ordinary.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    leaves = jax.tree.leaves(operands, is_leaf=lambda x: isinstance(x, Operand))
    walk = _Walk(as_written=as_written, open_trips=open_trips)
    walk.run(closed.jaxpr, [_constant(c) for c in closed.consts], leaves)
    return Work(
        flops=walk.flops,
        matmul_flops=walk.matmul_flops,
        bytes_by_label=dict(walk.bytes),
        num_open_loops=walk.open_loops,
    )


def _constant(array: Any) -> Operand:
    is_small = isinstance(array, np.ndarray | jax.Array) and folding.is_small(array)
    return Operand(value=np.asarray(array) if is_small else None)


class _Walk:
    """One walk: the totals so far, and how each operation adds to them."""

    def __init__(self, *, as_written: bool, open_trips: int):
        self.as_written, self.open_trips = as_written, open_trips
        self.flops = self.matmul_flops = 0.0
        self.bytes: Counter[str] = Counter()
        self.open_loops = 0

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Operand], arguments: Sequence[Operand]
    ) -> list[Operand]:
        """Counts a jaxpr; returns what is known of its results."""
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known |= zip(jaxpr.invars, arguments, strict=True)

        def look(atom) -> Operand:
            if isinstance(atom, Literal):
                return Operand(value=np.asarray(atom.val))
            return known[atom]

        for eqn in jaxpr.eqns:
            results = self.operation(eqn, [look(atom) for atom in eqn.invars])
            known |= zip(eqn.outvars, results, strict=True)
        return [look(atom) for atom in jaxpr.outvars]

    def operation(self, eqn: Any, given: list[Operand]) -> list[Operand]:
        """Counts one operation."""
        name = eqn.primitive.name
        special = getattr(self, f"_{name}", None)
        if special is not None:
            return special(eqn, given)
        if name.startswith("scatter"):
            return self._scatter(eqn, given)
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if inner is not None:
            return self._inner(inner, given)
        value = None if self.as_written else folding.evaluate(eqn, given)
        if value is not None:
            return [Operand(value=value)]
        if name in _SAME_ARRAY:
            # Only a barrier has several, and as many results.
            pairs = zip(given, eqn.invars, strict=True)
            return [self._same(x, atom) for x, atom in pairs][: len(eqn.outvars)]
        return self._compute(eqn, given)

    def read(self, operand: Operand, atom: Any, size: int | None = None) -> None:
        """Counts bytes of an array in memory: all of it, or `size` numbers."""
        if operand.label:
            size = math.prod(atom.aval.shape) if size is None else size
            item = operand.item_bytes or atom.aval.dtype.itemsize
            self.bytes[operand.label] += size * item * operand.share

    def _same(self, operand: Operand, atom: Any) -> Operand:
        item = operand.item_bytes or atom.aval.dtype.itemsize
        return Operand(label=operand.label, share=operand.share, item_bytes=item)

    def _compute(self, eqn: Any, given: list[Operand]) -> list[Operand]:
        for operand, atom in zip(given, eqn.invars, strict=True):
            self.read(operand, atom)
        name, share = eqn.primitive.name, min((x.share for x in given), default=1.0)
        if name in _REDUCING:
            self.flops += share * math.prod(eqn.invars[0].aval.shape)
        elif name in _ELEMENTWISE:
            self.flops += share * math.prod(eqn.outvars[0].aval.shape)
        return [Operand(share=share)] * len(eqn.outvars)

    def _dot_general(self, eqn, given):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        out = eqn.outvars[0].aval
        flops = 2 * math.prod(out.shape) * math.prod(left[i] for i in contracted)
        share = min(x.share for x in given)
        self.flops += share * flops
        self.matmul_flops += share * flops
        for operand, atom in zip(given, eqn.invars, strict=True):
            self.read(operand, atom)
        self.bytes[ACTIVATIONS] += 2 * math.prod(out.shape) * out.dtype.itemsize
        # Whole again: by a sum over devices, or not of interest.
        return [_COMPUTED]

    def _dynamic_slice(self, eqn, given):
        value = None if self.as_written else folding.evaluate(eqn, given)
        if value is not None:
            return [Operand(value=value)]
        self.read(given[0], eqn.invars[0], math.prod(eqn.outvars[0].aval.shape))
        return [Operand(share=given[0].share)]

    def _gather(self, eqn, given):
        self.read(given[0], eqn.invars[0], math.prod(eqn.outvars[0].aval.shape))
        return [_COMPUTED]

    def _dynamic_update_slice(self, eqn, given):
        return self._write(eqn, given, update=1)

    def _scatter(self, eqn, given):
        return self._write(eqn, given, update=2)

    def _write(self, eqn, given, update):
        self.read(given[update], eqn.invars[update])
        self.read(given[0], eqn.invars[0], math.prod(eqn.invars[update].aval.shape))
        return [self._same(given[0], eqn.invars[0])]

    def _inner(self, inner, given):
        jaxpr = getattr(inner, "jaxpr", inner)
        consts = [_constant(c) for c in getattr(inner, "consts", ())]
        return self.run(jaxpr, consts, given)

    def _custom_jvp_call(self, eqn, given):
        return self._inner(eqn.params["call_jaxpr"], given)

    def _cond(self, eqn, given):
        branches, (which, *rest) = eqn.params["branches"], given
        if which.value is not None and not self.as_written:
            taken = int(np.clip(int(which.value), 0, len(branches) - 1))
            return self._inner(branches[taken], rest)
        before = self._totals()
        best, results = None, []
        for branch in branches:
            self._restore(before)
            results.append(self._inner(branch, rest))
            found = self._totals()
            if best is None or (sum(found[2].values()), found[0]) > (
                sum(best[2].values()),
                best[0],
            ):
                best = found
        self._restore(best)
        return [_joined(options) for options in zip(*results, strict=True)]

    def _while(self, eqn, given):
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test_consts, rest = given[:first], given[first:]
        consts, carry = rest[:second], rest[second:]
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        if self.as_written:
            self._inner(test, test_consts + carry)
            return [_forgotten(x) for x in self._inner(body, consts + carry)]
        while True:
            (goes_on,) = self._inner(test, test_consts + carry)
            if goes_on.value is None:
                break
            if not goes_on.value:
                return carry
            carry = self._inner(body, consts + carry)
        self.open_loops += 1
        is_counter = len(test.jaxpr.eqns) == 1
        for _ in range(self.open_trips if is_counter else 0):
            carry = self._inner(body, consts + [_forgotten(x) for x in carry])
        return [_forgotten(x) for x in carry]

    def _scan(self, eqn, given):
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        length, body = eqn.params["length"], eqn.params["jaxpr"]
        consts = given[:num_consts]
        carry = given[num_consts : num_consts + num_carry]
        each = given[num_consts + num_carry :]
        turns = range(length)
        if self.as_written:
            carry, turns = [_forgotten(x) for x in carry], range(min(length, 1))
        elif eqn.params["reverse"]:
            turns = reversed(turns)
        for turn in turns:
            now = [_turn(x, turn) for x in each]
            if self.as_written:
                now = [_forgotten(x) for x in now]
            carry = self._inner(body, consts + carry + now)[:num_carry]
        if self.as_written:
            carry = [_forgotten(x) for x in carry]
        return carry + [_COMPUTED] * (len(eqn.outvars) - num_carry)

    def _totals(self):
        return self.flops, self.matmul_flops, Counter(self.bytes), self.open_loops

    def _restore(self, totals):
        self.flops, self.matmul_flops, found, self.open_loops = totals
        self.bytes = Counter(found)


def _forgotten(operand: Operand) -> Operand:
    """Without its numbers."""
    return dataclasses.replace(operand, value=None)


def _turn(operand: Operand, turn: int) -> Operand:
    """One row of what a scan goes through."""
    if operand.value is None:
        return operand
    return dataclasses.replace(operand, value=np.asarray(operand.value[turn]))


def _joined(options: Sequence[Operand]) -> Operand:
    """What is known of the result of a branch that is not known."""
    first = options[0]
    if any(x.label != first.label for x in options):
        return _COMPUTED
    return _forgotten(first)
