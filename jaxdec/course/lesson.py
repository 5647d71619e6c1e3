"""What a notebook begins with: a model, its drafters, and sizes that suit the device.

lesson = course.start("eagle3")
lesson.lm, lesson.prompts, lesson.max_new_tokens

Sizes are chosen by the device: what a CPU does in a minute, an accelerator does many
times over. The environment variable ``JAXDEC_COURSE_SIZE`` overrides that; ``small``
takes a tiny random model as well, so that every notebook runs in seconds.
"""

import dataclasses
import functools
import os
from typing import Any

import jax

from jaxdec import console, load_run, prompts
from jaxdec.counts import Number
from jaxdec.course.display import Table
from jaxdec.course.tiny import tiny_model, untrained
from jaxdec.lm import LM, load
from jaxdec.strategies import StrategyConfig, resolve
from jaxdec.traffic import Traffic
from jaxdec.trained import add_drafter

VARIABLE = "JAXDEC_COURSE_SIZE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much a notebook does."""

    num_prompts: int
    """Of the built-in prompts: chat, math and code in turn."""
    max_new_tokens: int
    num_seeds: int
    """Answers of one prompt, where sampling is looked at."""
    num_futures: int
    """Steps that are taken from one and the same state."""
    num_slots: int
    """Requests that a server runs at once."""
    num_requests: int
    """Of a load."""


SIZES = {
    "small": Size(
        num_prompts=2,
        max_new_tokens=24,
        num_seeds=2,
        num_futures=60,
        num_slots=2,
        num_requests=6,
    ),
    "cpu": Size(
        num_prompts=3,
        max_new_tokens=48,
        num_seeds=3,
        num_futures=300,
        num_slots=4,
        num_requests=16,
    ),
    "accelerator": Size(
        num_prompts=12,
        max_new_tokens=128,
        num_seeds=8,
        num_futures=3000,
        num_slots=16,
        num_requests=128,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
    """A model that is ready, and how much to do with it."""

    lm: LM
    device: str
    """``cpu``, ``gpu`` or ``tpu``."""
    name: str
    """Of the size."""
    size: Size

    @property
    def prompts(self) -> list[str]:
        """Texts of the built-in prompts."""
        return [p.text for p in prompts.builtin()[: self.size.num_prompts]]

    @property
    def max_new_tokens(self) -> int:
        """Of an answer."""
        return self.size.max_new_tokens

    @property
    def seeds(self) -> list[int]:
        """0, 1, ..."""
        return list(range(self.size.num_seeds))

    @property
    def futures(self) -> range:
        """Seeds of the steps that are taken from one state."""
        return range(self.size.num_futures)

    def strategy(self, name: str, **changes: Any) -> StrategyConfig:
        """A strategy of the model by name, with some of its settings changed.

        Args:
            name: as for `jaxdec.generate`.
            **changes: fields of its configuration, such as ``rule="rejection"``; and
                ``length``, the draft tokens of a step.

        Raises:
            ValueError: no such strategy, or a setting that it cannot have.
        """
        config = resolve(name, changes.pop("length", None), self.lm)
        return dataclasses.replace(config, **changes)

    def setup(self, rate: Number = 1.0, **changes: Any) -> load_run.Setup:
        """A load of this size for `jaxdec.load_run`.

        Args:
            rate: requests per second.
            **changes: other fields of `jaxdec.load_run.Setup`.
        """
        tokens = self.size.max_new_tokens
        traffic = Traffic(
            rate=rate,
            num_requests=self.size.num_requests,
            prompt_tokens=tokens,
            output_tokens=tokens // 2,
            max_length=4 * tokens,
        )
        options = dict(num_slots=self.size.num_slots, temperature=0.0)
        return load_run.Setup(traffic=traffic, **options | changes)

    @property
    def about(self) -> Table:
        """What this run is of."""
        rows = [
            ("device", f"{self.device}, {jax.device_count()} of them"),
            ("model", f"{self.lm.name}, {self.lm.num_params / 1e6:.1f} M parameters"),
            ("weights", self.lm.dtype),
            ("size", self.name),
            ("prompts", self.size.num_prompts),
            ("new tokens", self.size.max_new_tokens),
        ]
        return Table(("what", "here"), rows)

    def __repr__(self) -> str:
        return repr(self.about)

    def _repr_html_(self) -> str:
        return self.about._repr_html_()


def start(*strategies: str) -> Lesson:
    """Loads the built-in model for a notebook.

    Args:
        *strategies: those that the notebook needs a trained drafter for.

    Raises:
        ValueError: no such size.
    """
    console.prepare_jax()
    device = jax.devices()[0].platform
    name = os.environ.get(VARIABLE) or ("cpu" if device == "cpu" else "accelerator")
    if name not in SIZES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(SIZES)}, got {name!r}")
    lm = _model(name == "small")
    for strategy in strategies:
        # Those of the real model come along with it.
        if name == "small" and strategy not in lm.strategies:
            add_drafter(lm, untrained(lm, strategy))
    return Lesson(lm=lm, device=device, name=name, size=SIZES[name])


@functools.cache
def _model(is_small: bool) -> LM:
    """Loaded once, so that its compiled programs stay."""
    return tiny_model() if is_small else load("smollm2", progress=print)
