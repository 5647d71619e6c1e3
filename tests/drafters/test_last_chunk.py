"""Prompts whose last chunk reaches past the end of the caches, of every network."""

import functools

import block_toys
import eagle_toys
import mtp_toys
import pytest
import toy


def eagle(name, **kwargs):
    taps, build, params = eagle_toys.methods()[name]
    target = toy.tiny_params()
    return toy.compiled(
        toy.tiny(taps=taps), build(), target=target, own=params, **kwargs
    )


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (eagle, "eagle3"),
        (eagle, "eagle3_tree"),
        (eagle, "peagle"),
        (mtp_toys.compiled, "mtp_own"),
        (mtp_toys.compiled, "mtp_three"),
        (block_toys.compiled, "dflash"),
        (block_toys.compiled, "dspark"),
    ],
)
def test_what_a_drafter_remembers_does_not_depend_on_room_for_padding(build, name):
    toy.check_last_chunk(functools.partial(build, name))
