"""The golden cases: which there are, what they expect, and how close is close enough.

A test marked ``@pytest.mark.golden("drafter")`` runs once, as its argument `case`, for
every case of that kind in the folder that ``--golden`` names (layout: its README.md).
"""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

KINDS = ("target", "target-gguf", "drafter", "drafter-end-to-end", "mtp")


@dataclasses.dataclass(frozen=True)
class Case:
    """A folder with a checkpoint, expected tensors, and facts (``case.json``)."""

    folder: Path

    @functools.cached_property
    def facts(self) -> dict:
        return json.loads((self.folder / "case.json").read_text(encoding="utf-8"))

    @property
    def name(self) -> str:
        return self.facts["case"]

    @property
    def kind(self) -> str:
        return self.facts["kind"]

    @property
    def target(self) -> Path:
        """The folder of the model it belongs to: another of the set, or itself."""
        paired = self.facts.get("pairs_with")
        if paired is None or paired.startswith("itself"):
            return self.folder
        # The case's own path inside its set says where the set begins.
        root = self.folder.parents[len(Path(self.name).parts) - 1]
        return root / paired

    def expected(self, file: str = "expected.safetensors") -> dict[str, np.ndarray]:
        return load_file(self.folder / file)

    def close(self, name: str, ours, theirs, tolerance: str = "logits") -> None:
        """Asserts ``|ours - theirs| <= atol + rtol * |theirs|``, everywhere.

        `tolerance` says whose atol: that of ``"logits"`` or of ``"hidden"`` states.
        """
        limits = self.facts["tolerance"]
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        where = f"{self.name}: {name}"
        assert ours.shape == theirs.shape, (
            f"{where}: shape {ours.shape}, expected {theirs.shape}"
        )
        difference = np.abs(ours.astype(np.float64) - theirs)
        allowed = limits[f"{tolerance}_atol"] + limits["rtol"] * np.abs(theirs)
        excess = np.where(difference <= allowed, -np.inf, difference - allowed)
        if np.any(excess > -np.inf):
            worst = np.unravel_index(np.argmax(excess), excess.shape)
            raise AssertionError(
                f"{where}: {np.sum(excess > -np.inf)} of {excess.size} values differ "
                f"too much; worst at {tuple(map(int, worst))}: {ours[worst]} instead "
                f"of {theirs[worst]}, {difference[worst]:.3g} apart where "
                f"{allowed[worst]:.3g} is allowed"
            )

    def equal(self, name: str, ours, theirs) -> None:
        """Asserts that tokens, masks or counts are the same."""
        np.testing.assert_array_equal(
            np.asarray(ours), np.asarray(theirs), err_msg=f"{self.name}: {name}"
        )


@functools.cache
def discover(folder: Path) -> tuple[Case, ...]:
    """Every case in a folder, however deep."""
    if not folder.is_dir():
        raise ValueError(f"--golden {folder} is no folder; give one that holds cases")
    cases = tuple(Case(file.parent) for file in sorted(folder.rglob("case.json")))
    if not cases:
        raise ValueError(f"--golden {folder} holds no case.json; give another folder")
    return cases
