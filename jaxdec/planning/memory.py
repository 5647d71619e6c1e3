"""What a compiled program takes of a device's memory, as its compiler reckons it.

Compiling a decoder of many layers takes minutes, and its layers are alike. So memory is
measured at two small depths; each layer adds the same, and a line through the two gives
any depth (`at_depth`).
"""

import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """Bytes on one device while a program runs."""

    arguments: int
    """Weights and state that go in."""
    outputs: int
    aliased: int
    """The part of the outputs that lies where arguments were."""
    temporary: int
    code: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.outputs - self.aliased + self.temporary + self.code

    def to_dict(self) -> dict[str, int]:
        """JSON values."""
        return {f"{k}_bytes": v for k, v in dataclasses.asdict(self).items()} | {
            "total_bytes": self.total
        }


def memory_of(compiled: Any) -> ProgramMemory:
    """Of an executable: ``jitted.lower(...).compile()``."""
    found = compiled.memory_analysis()
    return ProgramMemory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
    )


def at_depth(
    shallow: ProgramMemory, deep: ProgramMemory, depths: tuple[int, int], depth: int
) -> ProgramMemory:
    """The line through two depths, at a third.

    >>> small = dict(outputs=0, aliased=0, temporary=5, code=1)
    >>> two = ProgramMemory(arguments=30, **small)
    >>> four = ProgramMemory(arguments=50, **small)
    >>> at_depth(two, four, (2, 4), 36).arguments
    370
    """
    first, second = depths

    def line(name: str) -> int:
        low, high = getattr(shallow, name), getattr(deep, name)
        return round(high + (high - low) / (second - first) * (depth - second))

    names = [field.name for field in dataclasses.fields(ProgramMemory)]
    return ProgramMemory(**{name: max(line(name), 0) for name in names})


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def bytes_wanted(error: BaseException) -> int | None:
    """What a program needs that a TPU's compiler refused; None for other errors.

    >>> text = "CompileTimeHbmOom: Ran out of memory on HBM, the total memory required "
    >>> text += "for HLO temporaries (16.50G) exceeds available HBM (15.75G)."
    >>> bytes_wanted(ValueError(text)) / 2**30
    16.5
    """
    found = re.search(r"required [\w ]*\(([\d.]+)([KMGT]?)\) exceeds", str(error))
    # As compilers before 2026 put it.
    found = found or re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+\w? hbm", str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])
