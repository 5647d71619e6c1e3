# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. A benchmark that can be trusted
#
# **Which strategy should this model use on these prompts, and how do you know that its
# answers are as good?**
#
# "Faster" counts only at equal quality. So everything but the strategy is held fixed:
# model, prompts, lengths, stop rule, seed. The strategies take turns on every prompt,
# compilation is kept apart, and only a strategy with a certificate is ranked.

# %%
import importlib.util

if importlib.util.find_spec("jaxdec") is None:
    # From the clone that this notebook is in; on Colab, clone it and %cd to colab/.
    get_ipython().run_line_magic("pip", "install -q '..[plots]'")

import jaxdec
from jaxdec import course

lesson = course.start("eagle3")
lm = lesson.lm
lesson

# %% [markdown]
# ## One call
#
# `jaxdec compare` on the command line does the same, and writes a page that opens
# without a network. Add strategies to the list and run it again.

# %%
comparison = jaxdec.compare(
    lm,
    lesson.prompts,
    ["greedy", "lookup", "eagle3"],
    max_new_tokens=lesson.max_new_tokens,
)
answer = course.comparison_table(comparison)
answer

# %% [markdown]
# Read the last column first: a strategy that is not lossless is another model. Then
# TPOT. Tokens per step say where a gain comes from, and acceptance and rollbacks what
# was wasted on the way.

# %%
course.certificate_table(comparison)

# %% [markdown]
# ## Speed

# %%
pictures = course.comparison_pictures(comparison)
pictures["tpot"]

# %%
pictures["tokens_per_step"]

# %% [markdown]
# ## Where a round's time goes

# %%
pictures["costs"]

# %% [markdown]
# ## Where drafts end

# %%
pictures["acceptance"]

# %%
course.comparison_tokens(comparison, "lookup")

# %% [markdown]
# ## Speed against quality
#
# The perplexity is the target's own, of what each strategy said. Lossless strategies
# lie at one height.

# %%
pictures["quality"]

# %%
course.quality_table(comparison)

# %% [markdown]
# ## The answer
#
# The advice, with its reasons. It may well be plain decoding.

# %%
course.Advice(comparison)

# %% [markdown]
# ## Exercises
#
# **1.** Before you believe the advice: which strategy does the table speak for? Answer
# with its name, such as "greedy".

# %%
choice = None  # your answer
course.check_choice(choice, comparison)

# %% [markdown]
# **2.** Which strategy said most tokens per step? Is it the same one?

# %%
most = None  # your answer
course.check_most_tokens(most, comparison)
