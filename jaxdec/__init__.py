"""Every decoding strategy that matters for one request, chosen on evidence.

    import jaxdec

    lm = jaxdec.load("smollm2")
    out = jaxdec.generate(lm, "Why is the sky blue?", strategy="lookup")
    print(out[0].text, out.evidence.tokens_per_step)

`load` a model, `generate` with a strategy, `certify` that it changed no token,
`compare` several. `Server` decodes many requests at once. Underneath are pure
functions: `speculative` makes a `Strategy` of a `Model`, a `Drafter` and an `AcceptFn`.

Shapes in annotations use the same letters everywhere: B batch, P prompt, L token
buffer, S cache slots, T tokens in this forward, K draft tokens, V vocabulary,
F features, E model width, N layers, H query heads, G key/value heads, D head width,
M list buckets. Lengths, limits and capacities are in tokens.
"""

__version__ = "0.1.0"

from jaxdec import acceptance, decoding, draft_length, drafters, models, sampling, tree
from jaxdec.cache import KVCache
from jaxdec.certificate import Certificate
from jaxdec.certify import certify
from jaxdec.compare import compare
from jaxdec.decoding import autoregressive, jit_programs, speculative
from jaxdec.evidence import Evidence
from jaxdec.export import export_drafter
from jaxdec.lm import LM, load
from jaxdec.loaded_drafter import (
    LoadedDrafter,
    Tree,
    load_drafter,
    save_drafter,
)
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import init_params, make_model
from jaxdec.report.comparison import Comparison
from jaxdec.sampling_params import make_sampling_params
from jaxdec.server import Server
from jaxdec.strategies import (
    StrategyConfig,
    draft_model,
    greedy,
    lookup,
    sample,
    self_draft,
)
from jaxdec.text import Generated, Outputs, Piece, generate, stream
from jaxdec.ticket import Ticket
from jaxdec.trained import (
    add_drafter,
    dflash,
    dspark,
    eagle,
    eagle3,
    first_of,
    mtp,
    trained,
)
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
    "LoadedDrafter",
    "Tree",
    "add_drafter",
    "export_drafter",
    "load_drafter",
    "save_drafter",
    "Generated",
    "Outputs",
    "Piece",
    "Server",
    "Ticket",
    "certify",
    "compare",
    "generate",
    "load",
    "stream",
    # Strategies.
    "StrategyConfig",
    "dflash",
    "draft_model",
    "dspark",
    "eagle",
    "eagle3",
    "first_of",
    "greedy",
    "lookup",
    "mtp",
    "sample",
    "self_draft",
    "trained",
    # Engine.
    "ModelConfig",
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
