"""Strict JAX for every test, and shape checks on every function of the library."""

import ctypes
import gc
import os
import pathlib

# Programs that were compiled stay, and looking through all of them again and again for
# garbage would take longer and longer.
gc.set_threshold(50_000, 50, 100)

# The TPU compiler is installed for the tests that compile ahead of time; JAX must not
# go looking for a TPU because of it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# Tiny programs take longer to optimise than to run.
_FLAGS = os.environ.get("XLA_FLAGS", "")
if "--xla_backend_optimization_level" not in _FLAGS:
    quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{_FLAGS} {quick}".strip()

# Tests spend most of their time compiling; what one has compiled, others find again.
_CACHE = pathlib.Path(__file__).resolve().parent.parent / ".pytest_cache" / "xla"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest
from jaxtyping import install_import_hook

jax.devices()  # Now the flags are read; the TPU compiler, which has others, must not.
os.environ["XLA_FLAGS"] = _FLAGS

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

install_import_hook("jaxdec", "beartype.beartype")

_CASES = pathlib.Path(__file__).resolve().parent / "golden" / "cases"


def pytest_addoption(parser):
    parser.addoption(
        "--golden",
        type=pathlib.Path,
        default=_CASES,
        metavar="DIR",
        help="run the golden cases in this folder instead of those of the repository",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "golden(kind, ..., only=None): runs for every golden case of these kinds for "
        "which only(case) holds",
    )


SLOW = (
    "test_contract.py::test_greedy_parity[tree_in_widths]",
    "test_contract.py::test_greedy_parity[self_rejection]",
    "test_text.py::test_strategies_say_the_same[0.0-self_draft]",
    "test_certify.py::test_lossless_strategies_pass[lookup-True]",
    "test_checkpoints.py::test_all_its_strategies_are_certified",
    "tests/drafters/",
    "test_mesh.py",
    "test_readme.py::test_the_server_and_the_certificate_run",
    "test_trained.py::test_every_name_gives_plain_decoding[0.7",
    "test_trained.py::test_a_certificate_of_a_tree",
    "test_trained.py::test_evidence_of_a_confidence",
    "test_trained.py::test_a_stream_says_the_same",
    "test_cli.py::test_capital_of_france",
    "test_certify.py::test_wrong_rules_break_the_law[no residual]",
    "test_certify.py::test_wrong_rules_break_the_law[draft again]",
    "test_certify.py::test_exact_mode_adds_up_alike",
    "test_smollm2.py::test_exact_mode_covers",
    "test_smollm2.py::test_a_drafter_equal_to_the_target_is_always_right",
    "test_smollm2.py::test_plain_and_drafted_greedy_say_the_reference[lookup]",
    "test_trained.py::test_every_name_gives_plain_decoding[0.0-eagle3-first_of]",
    "test_smollm2.py::test_chains_up_to_six_equal_plain_decoding_bit_for_bit[float32",
    "training/test_trainer.py",
    "training/test_export.py",
    "training/test_calibrate.py",
    "::test_training_says_what_drafting_says[eagle3 of",
    "::test_training_says_what_drafting_says[dflash",
    "::test_training_says_what_drafting_says[dspark",
    "::test_confidence_is_trained_as_it_is_served[dspark ",
    "test_compare.py::test_advice_ranks_only_what_is_certified",
    "test_cache.py::test_decoding_across_a_block[239]",
    "test_cache.py::test_decoding_across_a_block[248]",
    "test_cli.py::test_a_smaller_model_drafts",
    "test_text.py::test_draft_model_must_speak_the_same_tokens",
    "test_found_faults.py::test_a_limited_mixture_takes_another_draft_length",
    "test_attention.py::test_beside_the_cache_equals_in_the_cache[256-3]",
    "test_attacks.py::test_certify_names_a_tie_of_one_ulp[10]",
    *(
        f"test_compiled.py::test_cpu_program_copies_no_cache_in_its_loop[{name}]"
        for name in (
            "eagle_tree",
            "eagle",
            "peagle",
            "mtp",
            "mtp_modules",
            "dflash",
            "first_of",
            "rejection",
            "draft_model",
            "widths",
        )
    ),
    "test_compiled.py::test_tpu_program_stays_on_the_chip[lookup]",
    "test_compiled.py::test_tpu_program_stays_on_the_chip[rejection]",
    "test_compiled.py::test_slots_change_in_place",
    "test_speculation.py::test_draft_lengths_change_no_token_of_a_server",
    "test_speculation.py::test_scheduled_speculation_is_the_better_of_both_at_every_load[0.4",
    "test_batching.py::test_five_hundred",
    "test_batching.py::test_shared_beginnings_under_preemption_and_cancels[draft_rej",
    "test_loads.py::test_the_real_server_and_the_simulated_clock_agree[priority",
    "test_prefixes.py::test_shared_beginnings_are_read_once_and_nothing_else_changes[sam",
    "test_prefixes.py::test_shared_beginnings_are_read_once_and_nothing_else_changes[loo",
    "test_batching.py::test_two_thousand",
    "test_compiled.py::test_tpu_program_stays_on_the_chip[widths]",
    "test_compiled.py::test_tpu_program_stays_on_the_chip[draft_model]",
    "test_report_html.py::test_a_real_comparison",
    "test_loads.py::test_the_real_server_and_the_simulated_clock_agree",
    "test_batching.py::test_requests_say_what_they_say_alone[priority",
    "test_prefixes.py::test_shared_beginnings_are_read_once_and_nothing_else_changes[sel",
    "test_server.py::test_groups_of_a_strategy_are_told_apart",
    "test_smollm2.py::test_certificates_pass",
    "test_plan.py::test_a_drafter_reads_its_weights_once",
    "test_plan.py::test_a_step_is_its_forwards[lookup",
    "test_plan.py::test_a_step_is_its_forwards[greedy",
    "test_plan.py::test_chips_share_the_work",
    "test_trained.py::test_every_name_gives_plain_decoding[0.0-eagle3-eagle3_tree]",
    "test_trained.py::test_every_name_gives_plain_decoding[0.0-dspark-dspark]",
    "test_compare.py::test_batches_say_the_same",
    "test_cache.py::test_decoding_across_a_block[255]",
    "test_cache.py::test_decoding_across_a_block[257]",
    "::test_training_says_what_drafting_says[eagle3]",
    "::test_training_says_what_drafting_says[draft]",
    "test_compiled.py::test_cpu_program_copies_no_cache_in_its_loop[dspark]",
    "test_compiled.py::test_cpu_program_copies_no_cache_in_its_loop[lookup]",
    "test_batching.py::test_requests_say_what_they_say_alone[first_come",
    "test_eagle.py::test_end_to_end[drafters/e2e_deepspec_eagle3]",
    "training/test_regenerate.py::test_a_store_begins_with_another",
    "test_certify.py::test_lossless_strategies_pass[greedy",
    "test_faults_sampling.py::test_b14_one_row_stops_and_the_others_go_on[0.0-61]",
    "training/test_places.py::test_answers_that_fit_are_learned_whole[mtp]",
    "training/test_places.py::test_answers_that_fit_are_learned_whole[draft]",
    "test_attacks.py::test_certify_of_greedy_rows_beside_a_sampled_one",
    "test_smollm2.py::test_logits_match_the_reference",
    "test_plan.py::test_what_is_too_large_does_not_fit",
    "::test_confidence_is_trained_as_it_is_served[dspark]",
    "test_faults_sampling.py::test_b14_everything_banned",
    "test_certify.py::test_lossless_strategies_pass[self_draft-False",
    "test_acceptance.py::test_golden_filtered_chain",
    "test_text.py::test_processed_logprobs_equal_a_teacher_forced_pass",
    "test_decoder.py::test_b30_a_node_reads_its_root_path[llama",
    "test_tree.py::test_random_trees_equal_a_walk[33]",
    "test_faults_runtime.py::test_b49_the_program_hardly_grows",
)
"""What takes longest: ``-m slow`` runs it. Of drafters the golden cases stay, which
drive the same functions round by round and, one of each kind, through the engine; of
training, the way from prompts to an exported drafter, by the command; of the real
model, that it says what the reference says, plainly and with drafts."""

TOYS = """
    test_contract.py test_faults_engine.py test_faults_runtime.py
    test_faults_sampling.py test_faults_cache.py test_batching.py
""".split()
"""Files that share the compiled steps of ``toy.py``: one worker runs them all."""
_LONGEST = """
    test_notebooks.py test_smollm2.py test_decoder.py test_certify.py test_text.py
    test_plan.py test_compare.py test_cli.py test_sampling.py test_eagle.py
    test_acceptance.py test_block.py test_trained.py test_loads.py test_attacks.py
""".split()
LONGEST = {name: place for place, name in enumerate((*TOYS, *_LONGEST))}
"""Files in the order of what they take."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Keeps files together whose tests share what they have compiled.

    Those that take longest come first, so that no worker ends long after the other.
    """
    items.sort(key=lambda item: LONGEST.get(item.path.name, len(LONGEST)))
    for item in items:
        if any(name in item.nodeid for name in SLOW):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("xdist_group") is None:
            is_toy = item.path.name in TOYS
            name = "toys" if is_toy else item.path.stem
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(autouse=True, scope="module")
def _room_for_the_next_file():
    """Forgets what was compiled where it has come to fill the memory.

    Two workers need 16 GB at the end without it.
    """
    yield
    if _resident_bytes() > MOST_RESIDENT:
        jax.clear_caches()
        gc.collect()
        # The memory goes back to the allocator, which keeps it unless it is asked.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
        trim(0)


MOST_RESIDENT = 5 * 2**30


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("golden")
    if marker is not None:
        # Beside the test files that are marked so, which is the only place for them.
        from cases import discover

        found = discover(metafunc.config.getoption("--golden").resolve())
        only = marker.kwargs.get("only", lambda case: True)
        cases = [case for case in found if case.kind in marker.args and only(case)]
        metafunc.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def well_optimised(request, monkeypatch):
    """The real model's programs are worth optimising."""
    if "real" in request.keywords:
        import toy

        monkeypatch.setattr("jaxdec.program.COMPILER_OPTIONS", toy.OPTIMISED)
