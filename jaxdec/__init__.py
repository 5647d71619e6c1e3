"""jaxdec: every decoding strategy that matters for one request, chosen on evidence.

import jaxdec

lm = jaxdec.load("smollm2")
out = jaxdec.generate(lm, "Why is the sky blue?", strategy="lookup")
print(out[0].text, out.evidence.tokens_per_step)

Names are imported when they are first used, so that the command can show its help
without waiting for JAX.
"""

import importlib
import sys
import typing
from types import ModuleType

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from jaxdec import (
        acceptance,
        decoding,
        draft_length,
        drafters,
        models,
        sampling,
        tree,
    )
    from jaxdec.cache import KVCache
    from jaxdec.certificate import Certificate
    from jaxdec.certify import certify
    from jaxdec.compare import compare
    from jaxdec.decoding import autoregressive, jit_programs, speculative
    from jaxdec.evidence import Evidence
    from jaxdec.lm import LM, load
    from jaxdec.models.decoder import init_params, make_model
    from jaxdec.report.comparison import Comparison
    from jaxdec.sampling_params import make_sampling_params
    from jaxdec.strategies import (
        StrategyConfig,
        draft_model,
        greedy,
        lookup,
        sample,
        self_draft,
    )
    from jaxdec.text import Generated, Outputs, Piece, generate, stream
    from jaxdec.types import (
        Acceptance,
        AcceptFn,
        Commit,
        DecodeState,
        Draft,
        Drafter,
        DrafterParams,
        FinishReason,
        Judgement,
        Model,
        Output,
        Request,
        SamplingParams,
        Sequences,
        StepInfo,
        Strategy,
        StrategyParams,
    )

__all__ = [
    # Text API.
    "LM",
    "Comparison",
    "Generated",
    "Outputs",
    "Piece",
    "certify",
    "compare",
    "generate",
    "load",
    "stream",
    # Strategies.
    "StrategyConfig",
    "draft_model",
    "greedy",
    "lookup",
    "sample",
    "self_draft",
    # Engine.
    "autoregressive",
    "decoding",
    "init_params",
    "make_model",
    "make_sampling_params",
    "jit_programs",
    "speculative",
    # Parts.
    "acceptance",
    "draft_length",
    "drafters",
    "models",
    "sampling",
    "tree",
    # Data.
    "AcceptFn",
    "Acceptance",
    "Certificate",
    "Evidence",
    "Judgement",
    "KVCache",
    "Output",
    "Commit",
    "DecodeState",
    "Draft",
    "Drafter",
    "DrafterParams",
    "FinishReason",
    "Model",
    "Request",
    "SamplingParams",
    "Sequences",
    "StepInfo",
    "Strategy",
    "StrategyParams",
]

_FROM = {
    "cache": "KVCache",
    "certificate": "Certificate",
    "certify": "certify",
    "compare": "compare",
    "decoding": "autoregressive jit_programs speculative",
    "evidence": "Evidence",
    "lm": "LM load",
    "models.decoder": "init_params make_model",
    "report.comparison": "Comparison",
    "sampling_params": "make_sampling_params",
    "strategies": "StrategyConfig draft_model greedy lookup sample self_draft",
    "text": "Generated Outputs Piece generate stream",
    "types": "Acceptance AcceptFn Commit DecodeState Draft Drafter DrafterParams "
    "FinishReason Judgement Model Output Request SamplingParams Sequences StepInfo "
    "Strategy StrategyParams",
}
"""The imports above, for `__getattr__`; names that are missing here are files."""
_HOME = {name: file for file, names in _FROM.items() for name in names.split()}


class _Package(ModuleType):
    """Importing the file compare.py must not hide the function `compare`."""

    def __setattr__(self, name, value):
        is_shadow = _HOME.get(name) == name and isinstance(value, ModuleType)
        if not is_shadow:
            super().__setattr__(name, value)

    def __dir__(self):
        return sorted({*super().__dir__(), *__all__})

    def __getattr__(self, name):
        missing = AttributeError(f"module 'jaxdec' has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        file = f"jaxdec.{_HOME.get(name, name)}"
        try:
            found = importlib.import_module(file)
        except ModuleNotFoundError as error:
            # A package that is missing is another matter.
            raise missing if error.name == file else error from None
        if name in _HOME:
            found = getattr(found, name)
            setattr(self, name, found)
        return found


sys.modules[__name__].__class__ = _Package
