"""Drafters in a folder are found by their target, and read when they are asked for."""

import test_trained
from test_trained import OPTIONS, PROMPTS, loaded

import jaxdec
from jaxdec.shipped import add_shipped
from jaxdec.strategies import StrategyConfig, resolve


def model(content_hash):
    lm, _, _ = loaded("eagle3")
    return jaxdec.LM(
        config=lm.config,
        params=lm.params,
        dtype=lm.dtype,
        name="target",
        content_hash=content_hash,
    )


def save(folder, strategy, tokens_per_step):
    lm, drafter, _ = loaded("eagle3")
    card = {"validation": {"tokens_per_step": tokens_per_step}}
    jaxdec.save_drafter(folder / "target" / strategy, drafter, lm, card=card)


def test_a_target_has_the_strategies_of_its_drafters(tmp_path):
    save(tmp_path, "eagle3", 2.0)
    save(tmp_path, "mtp", 1.5)  # Never read, so it may be what it is not.
    (tmp_path / "target" / "notes").mkdir()
    lm = model(loaded("eagle3")[0].content_hash)
    add_shipped(lm, tmp_path)
    assert set(lm.strategies) == {
        *("eagle3", "eagle3_tree", "mtp", "mtp_tree", "first_of", "first_of_tree")
    }
    assert not any(isinstance(x, StrategyConfig) for x in lm.strategies.values())
    out = jaxdec.generate(lm, PROMPTS, strategy="first_of", **OPTIONS)
    assert [item.tokens for item in out] == test_trained.plain("eagle3", 0.0)
    # The best by its card drafts, and it is read once for all its strategies.
    chain, tree = (resolve(name, None, lm) for name in ("eagle3", "eagle3_tree"))
    assert lm.strategies["first_of"].parts[1] is chain
    mixed = resolve("first_of_tree", None, lm)
    assert (mixed.name, mixed.parts[1]) == ("first_of_tree", tree)
    assert tree.draft is chain.draft and tree.tree == jaxdec.Tree()
    assert not isinstance(lm.strategies["mtp"], StrategyConfig)


def test_another_target_has_none(tmp_path):
    save(tmp_path, "eagle3", 2.0)
    lm = model("other weights")
    add_shipped(lm, tmp_path)
    assert lm.strategies == {}
    add_shipped(lm, tmp_path / "nowhere")
    assert lm.strategies == {}
