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
# # 3. Native multi-token prediction
#
# **How far can a model see ahead by itself, and how do you know that it was really
# asked?**
#
# A model with *multi-token-prediction* (MTP) modules brings its drafter in its own
# checkpoint ([DeepSeek-V3](https://arxiv.org/abs/2412.19437),
# [MiMo](https://arxiv.org/abs/2505.07608)). A module reads what the target just
# computed, its *features*, together with the token that followed, and says the token
# after that. One module can go on from its own output.

# %%
import importlib.util

if importlib.util.find_spec("jaxdec") is None:
    # From the clone that this notebook is in; on Colab, clone it and %cd to colab/.
    get_ipython().run_line_magic("pip", "install -q '..[plots]'")

import jaxdec
from jaxdec import course

lesson = course.start("mtp")
lm = lesson.lm
lesson

# %% [markdown]
# ## Drafts of two and of five tokens
#
# For the first draft token the module runs once, for the fifth five times in a row.

# %%
runs = {
    length: jaxdec.generate(
        lm,
        lesson.prompts,
        strategy="mtp",
        draft_length=length,
        max_new_tokens=lesson.max_new_tokens,
    )
    for length in (2, 5)
}
course.counts_table(runs)

# %%
course.show_tokens(runs[5])

# %% [markdown]
# ## Did the module really run?
#
# A backend that cannot run MTP modules may silently decode without them. Its answers
# are right all the same, so only evidence tells: how many draft tokens were judged, and
# how many of them accepted.

# %%
course.native_table(runs[5])

# %% [markdown]
# A second proof is an experiment. A module that nobody has trained has the same shape
# and takes the same time, and its drafts are hardly ever accepted. The words stay the
# same (up to the rounding of nearly equal tokens): drafts are suggestions.

# %%
blank = jaxdec.mtp(course.untrained(lm, "mtp"), length=5)
ignorant = jaxdec.generate(
    lm, lesson.prompts, strategy=blank, max_new_tokens=lesson.max_new_tokens
)
course.counts_table({"the module": runs[5], "one without training": ignorant})

# %% [markdown]
# ## How far it sees
#
# Two ways to count. On the left: how often draft token i was accepted *given* that the
# one before it was. On the right: of all drafts. The right one is the product of the
# left one (but for drafts that the end of an answer cuts), and so it can only fall.

# %%
course.draw_acceptance({"mtp": runs[5]})

# %% [markdown]
# ## What a longer draft brings
#
# With the conditional acceptance c, a step with k draft tokens is expected to say
# E(k) = 1 + c1 + c1 c2 + ... tokens. One run with long drafts predicts all shorter
# ones; the points are runs with drafts that were really so short.

# %%
answer = course.expected_table(runs[5], runs)
course.draw_expected(answer)

# %% [markdown]
# ## The answer
#
# E(k) rises and flattens: each further token needs all before it. How long a draft
# should be is a question of what a round costs; that is notebook 6.

# %%
answer

# %% [markdown]
# ## Exercises
#
# **1.** Write E: the tokens of a step on average, from the list of conditional
# acceptances.


# %%
def expected(given):
    return None  # your answer


course.check_expected_tokens(expected)

# %% [markdown]
# **2.** Papers report the *acceptance length*: accepted draft tokens plus one, per
# step. What is it in the run with five draft tokens? `course.evidence_of(runs[5])` has
# `num_accepted` and `num_steps`.

# %%
length = None  # your answer
course.check_acceptance_length(length, runs[5])
