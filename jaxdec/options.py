"""The options that subcommands share, and what they lead to: a model, a checked call.

What can be wrong is looked at before a model is loaded, the likeliest slips first.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from jaxdec import console as terminal

Prompt = Annotated[str, typer.Argument(help='Text; "-" reads it from stdin.')]
Model = Annotated[
    str,
    typer.Option(help="smollm2, a folder, a .gguf file, or a Hugging Face Hub id."),
]
Dtype = Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")]
Strategy = Annotated[
    str,
    typer.Option(
        help="greedy, sample, lookup, self_draft; or one of a drafter, which comes "
        "with the model or is given: draft_model, mtp, eagle, eagle3, peagle, dflash, "
        "dspark, mtp_tree, eagle_tree, eagle3_tree, first_of, first_of_tree."
    ),
]
Drafter = Annotated[
    list[str] | None,
    typer.Option(
        help="A trained drafter: a folder or a Hub id; may be given several times."
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="For draft_model: a smaller model with the same tokens, as --model."
    ),
]
DraftLength = Annotated[
    int | None, typer.Option(help="Draft tokens a step; each strategy has its own.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens at most.")]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy. If not given: 0.7 for sample, else 0."),
]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest; 0 is off.")]
TopP = Annotated[
    float, typer.Option(help="Keep the likeliest up to this mass; 1 is off.")
]
MinP = Annotated[
    float,
    typer.Option(help="Keep those this likely against the first; 0 is off."),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same tokens.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends the answer; may be given several times."),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Apply the chat template; done if the model has one.",
    ),
]
System = Annotated[str | None, typer.Option(help="System message.")]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Equal plain decoding bit for bit; slower."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def prepare(
    prompt: str,
    *,
    model: str,
    strategy: str,
    drafter: Sequence[str] | None,
    draft_model: str | None,
    draft_length: int | None,
    dtype: str,
    stop: Sequence[str] | None,
    **asked: Any,
) -> tuple[Any, str, dict[str, Any]]:
    """A loaded model, the prompt, and the keyword arguments of `jaxdec.generate`.

    Args:
        prompt: as on the command line; ``-`` reads it from stdin.
        model: as all others, what the option of that name holds.
        strategy: its name.
        drafter: of drafters, their names.
        draft_model: of a smaller model.
        draft_length: instead of the strategy's own.
        dtype: of the weights.
        stop: texts.
        **asked: further arguments of `jaxdec.generate`, which pass through.

    Raises:
        ValueError: what can be said to be wrong before anything runs.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    # Before the model is loaded: these two are the likeliest slips.
    if not prompt.strip():
        raise ValueError(
            "the prompt is empty; give some text, or - to read it from stdin"
        )
    terminal.prepare_jax()
    import jaxdec
    from jaxdec import strategies

    strategies.check_name(strategy)
    check_draft_model([strategy], draft_model, drafter)
    if strategy in strategies.BY_NAME:  # Before the model is loaded.
        strategies.resolve(strategy, draft_length)
    sampling = {name: asked[name] for name in ("top_k", "top_p", "min_p")}
    jaxdec.sampling.make_sampling_params(
        1, temperature=asked["temperature"] or 0.0, **sampling
    )
    lm = load_model(model, dtype, drafter, draft_model)
    config = strategies.resolve(strategy, draft_length, lm)
    return lm, prompt, {**asked, "stop": tuple(stop or ()), "strategy": config}


def check_draft_model(
    names: Sequence[str], draft_model: str | None, drafters: Sequence[str] | None
) -> None:
    """Before anything is loaded: the option and the strategy belong together."""
    from jaxdec.shipped import checkpoints, shipped

    is_asked = "draft_model" in names
    is_given = draft_model is not None or bool(drafters)
    comes_along = any(s.strategy == "draft_model" for s in shipped(checkpoints()))
    if is_asked and not is_given and not comes_along:
        raise ValueError(
            "strategy 'draft_model' needs a model: add --draft-model MODEL, a smaller "
            "one with the same tokenizer, or --drafter PATH, one trained for the target"
        )
    if draft_model is not None and not is_asked:
        raise ValueError(
            f"--draft-model {draft_model} is for the strategy 'draft_model', and "
            f"{', '.join(names)} was asked for; name it, or leave the option out"
        )


def load_model(
    model: str,
    dtype: str,
    drafters: Sequence[str] | None = None,
    draft_model: str | None = None,
) -> Any:
    """A model with the drafters that go with it, known by their strategies' names."""
    import jaxdec
    from jaxdec.io.hub import resolve

    # Before the model is loaded: they may be absent.
    for name in drafters or ():
        resolve(name, terminal.notice, "drafter")
    lm = jaxdec.load(model, dtype=dtype, progress=terminal.notice)
    if draft_model is not None:
        draft = jaxdec.load(draft_model, dtype=dtype, progress=terminal.notice)
        lm.strategies["draft_model"] = jaxdec.draft_model(draft)
    for name in drafters or ():
        jaxdec.add_drafter(lm, jaxdec.load_drafter(name, lm))
    return lm
