"""What one run of a program does: multiplications and memory traffic, loops by trips.

XLA's cost analysis counts the body of a loop once, whatever its trips. So here the
traced program is walked as it would run. Small numbers (lengths, counters, flags) that
are given are carried along, so it is known how often each loop turns and which branch
is taken; what is inside counts as often as it runs. All else is a shape.

    FLOPs   2 for each multiply-add of a matmul; nothing else, as in a device's peak
    bytes   of arrays that were given: all of one that something computes with, each
            time; of slices and rows that are looked up or written in place, these.
            What is computed on the way is taken to stay on the chip.

On several devices an array that is split counts by the part that one device holds, and
a matmul by the smaller part of its operands. What devices say to one another is left
out. A branch that depends on data is the dearest. A loop whose end depends on data is
not entered: such loops repair what is out of the ordinary (`num_open_loops` says so).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

MOST_NUMBERS = 1024
"""In a vector whose values are carried along: one a request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """What is known of an array besides its shape."""

    label: str = ""
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
    bytes_by_label: Mapping[str, float]
    num_open_loops: int
    """Loops that do not count because their end depends on data."""

    @property
    def num_bytes(self) -> float:
        """Of all labels."""
        return float(sum(self.bytes_by_label.values()))


def count(
    function: Callable[..., Any], arguments: Sequence[Any], operands: Sequence[Any]
) -> Work:
    """Walks a function as it would run.

    Args:
        function: pure; it is traced, not run.
        arguments: arrays, or their shapes.
        operands: an `Operand` for every leaf of `arguments`, in trees like them.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    leaves = jax.tree.leaves(operands, is_leaf=lambda x: isinstance(x, Operand))
    walk = _Walk()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        walk.inner(closed, leaves)
    return Work(
        flops=walk.flops,
        bytes_by_label=dict(walk.bytes),
        num_open_loops=walk.num_open_loops,
    )


_SAME_ARRAY = frozenset(
    """
    reshape transpose squeeze expand_dims convert_element_type copy copy_p rev slice
    reduce_precision optimization_barrier
    """.split()
)
"""Of an array in memory these make no new one: what follows reads the first."""


class _Walk:
    """The totals so far, and how each operation adds to them."""

    def __init__(self):
        self.flops = 0.0
        self.bytes: Counter[str] = Counter()
        self.num_open_loops = 0

    def inner(self, jaxpr: Any, given: Sequence[Operand]) -> list[Operand]:
        """Counts a jaxpr, closed or not; returns what is known of its results."""
        consts = [_constant(c) for c in getattr(jaxpr, "consts", ())]
        body: Jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(body.constvars, consts, strict=True))
        known |= zip(body.invars, given, strict=True)

        def look(atom) -> Operand:
            is_literal = isinstance(atom, Literal)
            return _constant(atom.val, atom.aval) if is_literal else known[atom]

        for eqn in body.eqns:
            results = self.operation(eqn, [look(atom) for atom in eqn.invars])
            known |= zip(eqn.outvars, results, strict=True)
        return [look(atom) for atom in body.outvars]

    def operation(self, eqn: Any, given: list[Operand]) -> list[Operand]:
        """Counts one operation."""
        values = _evaluate(eqn, given)
        if values is not None:
            return [Operand(value=value) for value in values]
        name = eqn.primitive.name
        special = getattr(self, f"_{name}", None)
        if special is not None:
            return special(eqn, given)
        if name.startswith("scatter"):
            return self._write(eqn, given, update=2)
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if inner is not None:
            return self.inner(inner, given)
        if name in _SAME_ARRAY:
            # Only a barrier has several, and as many results.
            pairs = zip(given, eqn.invars, strict=True)
            return [_same(x, atom) for x, atom in pairs][: len(eqn.outvars)]
        for operand, atom in zip(given, eqn.invars, strict=True):
            self.read(operand, atom)
        share = min((x.share for x in given), default=1.0)
        return [Operand(share=share)] * len(eqn.outvars)

    def add(self, walk: "_Walk", times: int = 1) -> None:
        """Counts what another walk has counted."""
        self.flops += walk.flops * times
        for label, size in walk.bytes.items():
            self.bytes[label] += size * times
        self.num_open_loops += walk.num_open_loops

    def read(self, operand: Operand, atom: Any, shape: Any = None) -> None:
        """Counts bytes of an array in memory: all of it, or as much as `shape`."""
        if operand.label:
            size = math.prod(atom.aval.shape if shape is None else shape)
            item = operand.item_bytes or atom.aval.dtype.itemsize
            self.bytes[operand.label] += size * item * operand.share

    def _dot_general(self, eqn, given):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        flops = 2 * math.prod(out) * math.prod(left[i] for i in contracted)
        self.flops += flops * min(x.share for x in given)
        for operand, atom in zip(given, eqn.invars, strict=True):
            self.read(operand, atom)
        return [Operand()]  # Whole again: by a sum over devices, or not of interest.

    def _dynamic_slice(self, eqn, given):
        self.read(given[0], eqn.invars[0], eqn.outvars[0].aval.shape)
        return [Operand(share=given[0].share)]

    def _gather(self, eqn, given):
        self.read(given[0], eqn.invars[0], eqn.outvars[0].aval.shape)
        return [Operand()]

    def _dynamic_update_slice(self, eqn, given):
        return self._write(eqn, given, update=1)

    def _write(self, eqn, given, update):
        self.read(given[update], eqn.invars[update])
        self.read(given[0], eqn.invars[0], eqn.invars[update].aval.shape)
        return [_same(given[0], eqn.invars[0])]

    def _cond(self, eqn, given):
        branches, (which, *rest) = eqn.params["branches"], given
        if which.value is not None:
            taken = int(np.clip(int(which.value), 0, len(branches) - 1))
            return self.inner(branches[taken], rest)
        walks = [_Walk() for _ in branches]
        results = [w.inner(b, rest) for w, b in zip(walks, branches, strict=True)]
        self.add(max(walks, key=lambda w: (w.bytes.total(), w.flops)))
        return [_joined(options) for options in zip(*results, strict=True)]

    def _while(self, eqn, given):
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test_consts, rest = given[:first], given[first:]
        consts, carry = rest[:second], rest[second:]
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        trips = _num_trips(test.jaxpr, test_consts + carry)
        if trips > 1 and not _has_branches(body.jaxpr):
            # All turns are alike, and a long context has many.
            once = _Walk()
            after = once.inner(body, consts + carry)
            self.add(once, trips)
            return [_kept(*pair) for pair in zip(carry, after, strict=True)]
        while True:
            (goes_on,) = self.inner(test, test_consts + carry)
            if goes_on.value is None:
                break
            if not goes_on.value:
                return carry
            carry = self.inner(body, consts + carry)
        self.num_open_loops += 1
        return [_forgotten(x) for x in carry]

    def _scan(self, eqn, given):
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        consts, rest = given[:num_consts], given[num_consts:]
        carry, each = rest[:num_carry], rest[num_carry:]
        turns = range(eqn.params["length"])
        for turn in reversed(turns) if eqn.params["reverse"] else turns:
            now = [_row(x, turn) for x in each]
            results = self.inner(eqn.params["jaxpr"], consts + carry + now)
            carry = results[:num_carry]
        return carry + [Operand()] * (len(eqn.outvars) - num_carry)


def _num_trips(test: Jaxpr, given: Sequence[Operand]) -> int:
    """Turns of a loop that counts up to a known number; 0 for other loops."""
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt":
        return 0
    known = dict(zip(test.invars, given, strict=True))
    bounds = [known.get(x) for x in test.eqns[0].invars if not isinstance(x, Literal)]
    if len(bounds) != 2 or any(x is None or x.value is None for x in bounds):
        return 0
    return int(bounds[1].value) - int(bounds[0].value)


def _has_branches(jaxpr: Jaxpr) -> bool:
    """Whether what an operation costs can depend on numbers."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    inner = [eqn.params.get("jaxpr") for eqn in jaxpr.eqns]
    inner = [getattr(x, "jaxpr", x) for x in inner if x is not None]
    return bool(names & {"cond", "while"}) or any(map(_has_branches, inner))


def _kept(before: Operand, after: Operand) -> Operand:
    """What is known after many turns: what one turn leaves as it was."""
    is_same = before.value is not None and np.array_equal(before.value, after.value)
    return after if is_same else _forgotten(after)


def _is_small(array: Any) -> bool:
    """Whether values are carried along: of numbers and vectors, but not of keys."""
    dtype = getattr(array, "dtype", None)
    is_plain = dtype == np.bool_ or jax.dtypes.issubdtype(dtype, np.number)
    return is_plain and len(array.shape) < 2 and math.prod(array.shape) <= MOST_NUMBERS


def _constant(array: Any, like: Any = None) -> Operand:
    """Of an array in the program; a plain number is `like` an array."""
    like = array if like is None else like
    return Operand(value=np.asarray(array, like.dtype) if _is_small(like) else None)


def _evaluate(eqn: Any, given: Sequence[Operand]) -> list[np.ndarray] | None:
    """The results of an operation on small known numbers; None where they are not."""
    is_known = all(x.value is not None for x in given)
    has_body = any("jaxpr" in name or name == "branches" for name in eqn.params)
    outs = [atom.aval for atom in eqn.outvars]
    if not is_known or has_body or not all(map(_is_small, outs)):
        return None
    found = eqn.primitive.bind(*(x.value for x in given), **eqn.params)
    found = found if eqn.primitive.multiple_results else [found]
    return [np.asarray(x) for x in found]


def _same(operand: Operand, atom: Any) -> Operand:
    item = operand.item_bytes or atom.aval.dtype.itemsize
    return dataclasses.replace(operand, value=None, item_bytes=item)


def _forgotten(operand: Operand) -> Operand:
    return dataclasses.replace(operand, value=None)


def _row(operand: Operand, turn: int) -> Operand:
    """One row of what a scan goes through."""
    if operand.value is None:
        return operand
    return dataclasses.replace(operand, value=np.asarray(operand.value[turn]))


def _joined(options: Sequence[Operand]) -> Operand:
    """What is known of the result of a branch that is not known."""
    first = options[0]
    is_same = all(x.label == first.label for x in options)
    return _forgotten(first) if is_same else Operand()
