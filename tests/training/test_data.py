"""Token stores, the order of batches, and acceptance walked through on answers."""

import dataclasses

import numpy as np
import pytest

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.training.acceptance import Validation
from jaxdec.training.batches import Batch, Order, make_batch
from jaxdec.training.objective import frequent_tokens
from jaxdec.training.recipe import Eagle3Recipe, recipe_from
from jaxdec.training.store import Record, read_store, write_shard


def records(num, first=0):
    rng = np.random.default_rng(first)
    return [
        Record(
            prompt=rng.integers(0, 90, int(rng.integers(1, 5))).tolist(),
            answer=rng.integers(0, 90, int(rng.integers(1, 60))).tolist(),
            prompt_id=f"p{first + i}",
            source="ab",
            is_greedy=i % 2 == 0,
            is_validation=i >= num - 2,
        )
        for i in range(num)
    ]


def test_a_store_grows_by_shards_and_gives_back_its_records(tmp_path):
    first, second = records(5), records(4, first=5)
    write_shard(tmp_path, first)
    before = read_store(tmp_path)
    write_shard(tmp_path, second)
    (tmp_path / "000002.partial").write_bytes(b"half")
    store = read_store(tmp_path)
    assert store.ids.dtype == np.uint16 and len(store) == 9
    for i, record in enumerate(first + second):
        assert store.tokens(i).tolist() == record.prompt + record.answer
        assert store.prompt_length[i] == len(record.prompt)
        assert (store.prompt_id[i], store.source[i]) == (record.prompt_id, "ab")
        assert store.is_greedy[i] == record.is_greedy
    assert store.num_answer_tokens == sum(len(r.answer) for r in first + second)
    assert store.content_hash(5) == before.content_hash() != store.content_hash()
    train, kept = store.split()
    assert kept.tolist() == [4, 8 - 1] and 8 not in train and 3 not in train
    one_file = read_store(tmp_path / "000000.npz")
    assert one_file.content_hash() == before.content_hash()


def test_large_ids_are_kept_whole(tmp_path):
    write_shard(tmp_path, [Record(prompt=[1], answer=[150_000])])
    assert read_store(tmp_path).tokens(0).tolist() == [1, 150_000]


@pytest.mark.parametrize("what", ["nothing", "text", "short"])
def test_what_is_no_store_is_refused(what, tmp_path):
    path = tmp_path / "000000.npz"
    if what == "text":
        path.write_text("no")
    if what == "short":
        write_shard(tmp_path, records(3))
        with np.load(path) as file:
            arrays = dict(file)
        np.savez(path, **arrays | {"ids": arrays["ids"][:-1]})
    with pytest.raises(CheckpointError, match="token store|damaged"):
        read_store(tmp_path)


def order(seed=0, **changes):
    lengths = np.random.default_rng(7).integers(3, 100, 61)
    given = dict(
        lengths=lengths, records=np.arange(50), batch_size=4, seed=seed, num_buckets=3
    )
    return Order(**given | changes)


def test_an_epoch_reads_records_once_in_buckets_that_fit():
    found = order().epoch(3)
    seen = [record for part in found for record in part.records]
    assert len(set(seen)) == len(seen) == 48 and max(seen) < 50
    for part in found:
        assert max(order().lengths[list(part.records)]) <= part.length
    assert len({part.length for part in found}) == 3
    waste = sum(part.length * 4 for part in found) / sum(order().lengths[seen])
    assert waste < 1.6


def test_a_step_reads_what_its_number_says():
    steps = order().from_step(0)
    all_steps = [next(steps) for _ in range(40)]
    for begin in (1, 11, 12, 25):
        later = order().from_step(begin)
        assert [next(later) for _ in range(5)] == all_steps[begin : begin + 5]
    assert all_steps[:12] != all_steps[12:24]
    assert next(order(seed=1).from_step(0)) != all_steps[0]


def test_validation_reads_every_record_and_batches_are_filled_up(tmp_path):
    parts = order().once()
    assert sorted(r for part in parts for r in part.records) == list(range(50))
    write_shard(tmp_path, records(3))
    store = read_store(tmp_path)
    part = dataclasses.replace(parts[0], records=(1, 2), length=64)
    batch = make_batch(store, part, 4, lambda r: np.full((store.length[r], 1, 2), r))
    assert batch.length.tolist() == [*store.length[1:].tolist(), 0, 0]
    for row, record in enumerate((1, 2)):
        size = store.length[record]
        np.testing.assert_array_equal(batch.tokens[row, :size], store.tokens(record))
        assert np.all(batch.features[row, :size] == record)
        assert not batch.features[row, size:].any()
        answer = np.flatnonzero(batch.is_answer[row])
        assert answer.tolist() == list(range(store.prompt_length[record], size))
    assert not batch.is_answer[2:].any()


def test_few_records_make_one_batch():
    assert [p.records for p in order(records=np.arange(3)).epoch(0)] != []


def test_a_walk_takes_the_rounds_that_decoding_would():
    # Tokens 0 .. 11, of which 4 .. 11 are the answer. Row i drafts tokens i + 2, ...
    right = np.zeros((1, 12, 2), bool)
    right[0, 2] = [True, True]  # 4, 5 accepted, 6 is the target's
    right[0, 5] = [False, True]  # 7 is the target's
    right[0, 6] = [True, False]  # 8 accepted, 9 is the target's
    right[0, 8] = [True, True]  # 10, 11 accepted, and the answer ends
    batch = Batch(
        tokens=np.arange(12)[None],
        length=np.array([12]),
        prompt_length=np.array([4]),
        features=None,
    )
    found = Validation(2)
    found.add(batch, right)
    full = found.by_length[2]
    assert (full.tokens, full.steps) == (8, 4)
    assert full.judged.tolist() == [4, 3] and full.accepted.tolist() == [3, 2]
    assert found.summary()["tokens_per_step"] == 2.0
    assert found.summary()["acceptance_by_depth"] == [0.75, round(2 / 3, 4)]
    assert found.plain.tokens == 8


def test_the_most_frequent_tokens_are_in_order_and_ties_are_settled():
    ids = np.array([5, 5, 5, 2, 2, 9, 1])
    assert frequent_tokens(ids, 12, 3).tolist() == [1, 2, 5]
    assert frequent_tokens(ids, 12, 3, always=(11,)).tolist() == [2, 5, 11]


def test_recipes_come_back_from_json_and_slips_are_named():
    recipe = Eagle3Recipe(taps=(1, 2), steps=7)
    assert recipe_from({**recipe.to_dict(), "taps": [1, 2]}) == recipe
    for values, message in (
        ({"kind": "eagle9"}, "one of draft, mtp"),
        ({"kind": "mtp", "lr": 1}, "no lr; it has .*learning_rate"),
        ({"kind": "mtp", "steps": -3}, "steps must be a whole number"),
        ({"kind": "mtp", "batch_size": 0}, "batch_size must be at least 1"),
        ({"kind": "mtp", "validate_every": 0}, "validate_every must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe_from(values)
