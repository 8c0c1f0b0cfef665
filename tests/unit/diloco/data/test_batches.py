import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diloco.data import corpus as corpus_module
from diloco.data.batches import Block, Prefetched, batches, check_data, open_data
from diloco.data.corpus import FileCorpus, StdlibCorpus, is_held_out
from diloco.data.held_out import cross_entropy_bits
from diloco.data.token_cache import tokenized
from diloco.data.tokenizer import load_tokenizer
from diloco.errors import UserError
from diloco.options.flags import HvConfig
from diloco.options.trainer import TrainConfig

SENTENCE = "the quick brown fox jumps over one lazy dog while seven wizards mix quartz"
WORDS = SENTENCE.split()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("2m")


def config_for(path, *, seq_length=32, total_batch_size=4, local_steps=3, **fields):
    hv = HvConfig(local_steps=local_steps)
    return TrainConfig(
        dataset_name_or_path=str(path),
        seq_length=seq_length,
        total_batch_size=total_batch_size,
        hv=hv,
        **fields,
    )


def documents(count):
    return [
        f"{number} " + " ".join(WORDS[(number * k) % len(WORDS)] for k in range(1, 12))
        for number in range(count)
    ]


def write_jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({"id": n, column: text}) + "\n" for n, text in enumerate(texts)))
    return path


def all_windows(source):
    return source.windows(np.arange(source.num_windows))


@pytest.fixture
def parts_of_one_file(monkeypatch):
    monkeypatch.setattr(corpus_module, "_PART_BYTES", 1)


def write_shards(root, count=6, each=40):
    """Returns the files, in order."""
    texts = documents(count * each)
    root.mkdir(parents=True)
    return [
        write_jsonl(root / f"{number}.jsonl", texts[number * each : (number + 1) * each])
        for number in range(count)
    ]


def tokenise(root, tokenizer, cache):
    """Training and held-out ids, and the number of bytes tokenised."""
    told = [0.0]
    train, held_out = tokenized(FileCorpus(root), tokenizer, cache, told.append)
    return np.asarray(train), np.asarray(held_out), told[-1]


def num_text_bytes(files):
    return sum(len(json.loads(line)["text"]) for path in files for line in path.read_text().splitlines())


def test_stdlib_holds_out_enough_and_never_trains_on_it(tokenizer, tmp_path):
    corpus = StdlibCorpus()
    trained, judged_by = tokenized(corpus, tokenizer, tmp_path)
    held_out = [path for path in corpus.files if path in corpus.held_out]
    assert sum(path.stat().st_size for path in held_out) >= 200_000
    train = trained.astype(np.uint8).tobytes()
    for path in sorted(held_out, key=lambda path: -path.stat().st_size)[:20]:
        assert path.read_bytes() not in train
    assert len(trained) + len(judged_by) == sum(
        path.stat().st_size + 1 for path in corpus.files if path.stat().st_size
    )


def test_stdlib_validation_is_200_kb_and_bytes_alone_need_over_four_bits(tokenizer, tmp_path):
    config = TrainConfig(seq_length=256, total_batch_size=4, hv=HvConfig(local_steps=2))
    validation = open_data(config, tokenizer, cache_dir=tmp_path).validation()
    assert validation.windows.shape == (1024, 257)
    assert 200_000 <= validation.num_bytes <= 262_144
    assert 4.2 < validation.byte_frequency_bits < 5.2
    # A model that gives each of 256 bytes the same probability needs eight bits.
    assert validation.bits_per_byte(validation.num_bytes * np.log(256)) == pytest.approx(8.0)


def test_a_small_library_still_holds_out_what_is_asked(tmp_path):
    for number in range(40):
        (tmp_path / f"module_{number}.py").write_bytes(b"x = 1\n" * 3000)
    corpus = StdlibCorpus(tmp_path)
    assert sum(path.stat().st_size for path in corpus.held_out) >= 200_000
    assert len(corpus.held_out) < 40


def test_a_python_without_sources_is_told_apart(tmp_path):
    with pytest.raises(UserError, match="no sources"):
        StdlibCorpus(tmp_path)


def test_text_jsonl_and_parquet_of_the_same_documents_give_the_same_samples(tokenizer, tmp_path):
    texts = documents(400)
    jsonl = write_jsonl(tmp_path / "a.jsonl", texts)
    pq.write_table(pa.table({"id": list(range(400)), "text": texts}), tmp_path / "b.parquet")
    sources = [
        open_data(config_for(path), tokenizer, cache_dir=tmp_path / "cache")
        for path in (jsonl, tmp_path / "b.parquet")
    ]
    assert (all_windows(sources[0]) == all_windows(sources[1])).all()
    first = all_windows(sources[0])[:, :-1].ravel()
    kept = bytes(first[first < 256].tolist()).decode()
    assert kept.startswith(texts[0][:20])


def test_a_document_is_trained_on_or_held_out_and_its_copies_with_it(tokenizer, tmp_path):
    texts = documents(600)
    source = open_data(
        config_for(write_jsonl(tmp_path / "a.jsonl", texts * 2)), tokenizer, cache_dir=tmp_path
    )
    train, held_out = map(_split, tokenized(FileCorpus(tmp_path / "a.jsonl"), tokenizer, tmp_path))
    assert held_out and not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(text.encode() for text in texts * 2)
    assert len(source.validation().windows) >= 1


def _split(tokens):
    tokens = np.asarray(tokens)
    parts = np.split(tokens, np.flatnonzero(tokens == 257) + 1)
    return [part[:-1].astype(np.uint8).tobytes() for part in parts if len(part)]


def test_long_text_files_are_held_out_in_pieces_and_directories_read_whole(tokenizer, tmp_path):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.txt").write_text("\n".join(documents(40_000)))
    (folder / "inner" / "a.md").write_text("\n".join(documents(50)))
    (folder / ".hidden.txt").write_text("not for training")
    source = open_data(config_for(folder, seq_length=128), tokenizer, cache_dir=tmp_path / "cache")
    num_tokens = sum((folder / name).stat().st_size for name in ("b.txt", "inner/a.md"))
    assert source.num_windows * 128 > 0.9 * num_tokens
    assert source.validation().num_bytes > 1000


def test_a_corpus_too_small_for_held_out_documents_gives_up_its_end(tokenizer, tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    source = open_data(config_for(path), tokenizer, cache_dir=tmp_path)
    validation = source.validation()
    assert validation.windows.shape == (source.num_windows // 50 or 2, 33)
    assert source.num_windows * 32 + validation.windows.size >= 95 * 40 - 64


def test_samples_depend_on_the_block_and_the_offset_alone(tokenizer, tmp_path):
    config = config_for(write_jsonl(tmp_path / "a.jsonl", documents(300)))
    one, two = (open_data(config, tokenizer, cache_dir=tmp_path) for _ in range(2))
    block = Block(epoch=3, world_rank=1, data_base=6)
    whole = list(batches(one, block, local_steps=range(3), total_batch_size=4))
    joined_late = list(batches(two, block, local_steps=range(2, 3), total_batch_size=4))
    assert [batch.shape for batch in whole] == [(4, 33)] * 3 and whole[0].dtype == np.int64
    assert (whole[2] == joined_late[0]).all()
    halves = [
        next(batches(two, block, local_steps=range(1, 2), total_batch_size=4, rank=r, num_ranks=2))
        for r in (0, 1)
    ]
    assert (whole[1][0::2] == halves[0]).all() and (whole[1][1::2] == halves[1]).all()


def test_all_peers_together_read_each_window_once_a_pass(tokenizer, tmp_path):
    config = config_for(write_jsonl(tmp_path / "a.jsonl", documents(300)), total_batch_size=5)
    source = open_data(config, tokenizer, cache_dir=tmp_path)
    block_size = source.samples_per_block
    num_epochs = -(-source.num_windows // (2 * block_size))
    rows = [
        row.tobytes()
        for epoch in range(num_epochs)
        for rank in (0, 1)
        for row in source.read(
            Block(epoch=epoch, world_rank=rank, data_base=2 * epoch * block_size), np.arange(block_size)
        )
    ]
    expected = sorted(row.tobytes() for row in all_windows(source))
    assert sorted(rows[: source.num_windows]) != rows[: source.num_windows]
    assert sorted(rows[: source.num_windows]) == expected


def test_fake_data_differs_by_sample_and_by_seed_only(tokenizer):
    config = config_for("ignored", fake_data=True)
    source, other = (open_data(c, tokenizer) for c in (config, config_for("x", fake_data=True, seed=7)))
    block = Block(epoch=0, world_rank=0, data_base=0)
    samples = source.read(block, np.arange(12))
    assert samples.shape == (12, 33) and samples.max() < len(tokenizer)
    assert (samples == open_data(config, tokenizer).read(block, np.arange(12))).all()
    assert (samples != other.read(block, np.arange(12))).any()
    assert source.validation().windows.shape == (8192 // 32, 33)


def test_a_changed_file_is_tokenised_anew(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(300))
    before = open_data(config_for(path), tokenizer, cache_dir=tmp_path / "cache").num_windows
    write_jsonl(path, documents(400))
    assert open_data(config_for(path), tokenizer, cache_dir=tmp_path / "cache").num_windows > before


def test_those_who_start_at_once_divide_the_work(tokenizer, tmp_path, parts_of_one_file):
    root, cache = tmp_path / "texts", tmp_path / "cache"
    files = write_shards(root, count=12)
    together = threading.Barrier(4)

    def work(_):
        # The lock belongs to an open file, so threads contend for it as processes do.
        together.wait(timeout=30)
        return tokenise(root, tokenizer, cache)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(work, range(4)))
    assert all(np.array_equal(train, answers[0][0]) for train, _, _ in answers)
    assert sum(num_bytes for _, _, num_bytes in answers) == num_text_bytes(files)
    assert len(list(cache.iterdir())) == 12 and all(entry.is_dir() for entry in cache.iterdir())


def test_who_waits_for_the_tokens_of_another_process_waits_as_long_as_it_takes_and_says_so(
    tokenizer, tmp_path, monkeypatch, caplog
):
    path = write_jsonl(tmp_path / "a.jsonl", documents(300))
    cache, hours = tmp_path / "cache", itertools.count()
    tokenized(FileCorpus(path), tokenizer, cache)
    (directory,) = cache.iterdir()
    shutil.rmtree(directory)
    with directory.with_suffix(".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def sleep(_seconds):
            if next(hours) >= 9:
                other.close()

        monkeypatch.setattr("time.sleep", sleep)
        monkeypatch.setattr("time.perf_counter", lambda: 3600.0 * next(hours))
        train, _ = tokenized(FileCorpus(path), tokenizer, cache)
    assert len(train) > 100 and next(hours) > 9
    assert f"waiting for another process, which tokenises {path}" in caplog.text


def test_a_rank_that_does_not_fill_the_cache_waits_for_the_one_that_does_and_tells_of_it(
    tokenizer, tmp_path, monkeypatch
):
    path, cache = write_jsonl(tmp_path / "a.jsonl", documents(300)), tmp_path / "cache"
    waits, sleep = threading.Event(), time.sleep
    told: list[list[float]] = [[], []]

    def slept(_seconds):
        waits.set()
        sleep(0.001)

    monkeypatch.setattr("diloco.data.token_cache.time.sleep", slept)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(tokenized, FileCorpus(path), tokenizer, cache, told[1].append, fills_cache=False)
        assert waits.wait(30)
        train, _ = tokenized(FileCorpus(path), tokenizer, cache, told[0].append)
        assert np.array_equal(other.result(timeout=30)[0], train)
    assert told[0] and not told[1]


def test_ranks_of_a_node_use_the_same_tokens_also_where_the_files_change_while_they_start(
    tokenizer, tmp_path
):
    path, cache = write_jsonl(tmp_path / "a.jsonl", documents(30)), tmp_path / "cache"
    keys: list[str] = []

    def told(key):
        keys.append(key)
        return keys[0]

    first, _ = tokenized(FileCorpus(path), tokenizer, cache, agreed=told)
    write_jsonl(path, documents(40))
    second, _ = tokenized(FileCorpus(path), tokenizer, cache, fills_cache=False, agreed=told)
    assert np.array_equal(second, first) and len(set(keys)) == 2


@pytest.mark.parametrize("num_cores", [1, 16])
def test_parts_follow_one_another_as_the_documents_do(
    tokenizer, tmp_path, monkeypatch, num_cores, parts_of_one_file
):
    monkeypatch.setattr("diloco.data.token_cache.num_cores", lambda: num_cores)
    root, cache = tmp_path / "texts", tmp_path / "cache"
    write_shards(root)
    (root / "3a.jsonl").touch()
    train, held_out, _ = tokenise(root, tokenizer, cache)
    assert len(list(cache.iterdir())) == 7
    contents = [text.encode() for text in documents(240)]
    assert _split(train) == [content for content in contents if not is_held_out(content)]
    assert _split(held_out) == [content for content in contents if is_held_out(content)]
    source = open_data(config_for(root), tokenizer, cache_dir=cache)
    ids = train[: source.num_windows * 32 + 1]
    assert np.array_equal(all_windows(source)[:, :-1].ravel(), ids[:-1])
    assert np.array_equal(all_windows(source)[:, -1], ids[32::32])


def test_tokenising_that_was_cut_short_continues_after_the_last_complete_file(
    tokenizer, tmp_path, parts_of_one_file
):
    root, cache = tmp_path / "texts", tmp_path / "cache"
    last = write_shards(root)[-1]
    whole, good = tokenise(root, tokenizer, tmp_path / "other"), last.read_text()
    last.write_text(good + "{")
    with pytest.raises(UserError, match=r"5\.jsonl, line 41 is not JSON"):
        tokenise(root, tokenizer, cache)
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 5
    assert not list(cache.glob("*.partial"))
    last.write_text(good)
    train, held_out, num_bytes = tokenise(root, tokenizer, cache)
    assert num_bytes == num_text_bytes([last])
    assert np.array_equal(train, whole[0]) and np.array_equal(held_out, whole[1])


def test_only_new_and_changed_files_are_tokenised(tokenizer, tmp_path, parts_of_one_file):
    root, cache = tmp_path / "texts", tmp_path / "cache"
    files = write_shards(root / "one")
    assert tokenise(root, tokenizer, cache)[2] == num_text_bytes(files)
    write_jsonl(files[2], documents(41))
    assert tokenise(root, tokenizer, cache)[2] == num_text_bytes(files[2:3])
    added = write_shards(root / "added", count=2)
    assert tokenise(root, tokenizer, cache)[2] == num_text_bytes(added)
    moved = root.rename(tmp_path / "moved")
    assert tokenise(moved, tokenizer, cache)[2] == 0
    assert tokenise(moved / "one", tokenizer, cache)[2] == 0


def test_files_of_one_name_size_and_time_are_told_apart(tokenizer, tmp_path):
    for name, text in (("one", "b" * 200), ("two", "a" * 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "xaa.txt").write_text(text)
        os.utime(tmp_path / name / "xaa.txt", (0, 0))
    ids = [tokenise(tmp_path / name, tokenizer, tmp_path / "cache")[:2] for name in ("one", "two")]
    assert [set(np.concatenate(both).tolist()) - {257} for both in ids] == [{98}, {97}]


def test_tokens_of_an_earlier_format_are_named_where_others_take_their_place(tokenizer, tmp_path, caplog):
    path, cache = write_jsonl(tmp_path / "a.jsonl", documents(30)), tmp_path / "cache"
    for name in ("0" * 31 + "a", "f" * 32 + ".partial", "f" * 31, "F" * 32):
        (cache / name).mkdir(parents=True)
    for _ in range(2):
        tokenise(path, tokenizer, cache)
    (said,) = [line for line in caplog.messages if "earlier format" in line]
    assert said.startswith(f"{cache} has 2 directories") and f"({'0' * 31}a)" in said
    assert len(list(cache.iterdir())) == 5


@pytest.mark.parametrize("changed", [0, 100_000, 199_999])
def test_a_part_is_told_apart_by_the_start_the_middle_and_the_end_of_each_of_its_files(tmp_path, changed):
    before = []
    for number in range(3):
        path = tmp_path / f"{number}.txt"
        path.write_text("a" * 200_000)
        os.utime(path, (0, 0))
    for path in sorted(tmp_path.iterdir()):
        (part,) = FileCorpus(tmp_path).parts()
        before.append(part.fingerprint)
        with path.open("r+b") as file:
            file.seek(changed)
            file.write(b"b")
        os.utime(path, (0, 0))
    (part,) = FileCorpus(tmp_path).parts()
    assert len({*before, part.fingerprint}) == 4


def test_small_files_are_joined_so_that_a_change_moves_no_other_part(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_PART_BYTES", 2000)
    root = tmp_path / "texts"
    root.mkdir()
    for number in range(400):
        (root / f"{number:03}.txt").write_text("x" * (number % 190 + 10))
    (root / "200.txt").write_text("x" * 2000)

    def prints():
        return [part.fingerprint for part in FileCorpus(root).parts()]

    before = prints()
    assert 10 < len(before) < 60 and FileCorpus(root).parts()[0].num_bytes < 20_000
    (large,) = (part for part in FileCorpus(root).parts() if part.num_bytes == 2000)
    assert [len(document.content) for document in large.documents()] == [2000]
    (root / "100.txt").write_text("y")
    assert len(set(prints()) - set(before)) <= 2
    (root / "0000.txt").write_text("first")
    assert len(set(prints()) - set(before)) <= 4


class Dying(FileCorpus):
    def _documents(self, files):
        for number, document in enumerate(super()._documents(files)):
            if number == 100:
                raise KeyboardInterrupt
            yield document


def test_tokenising_that_was_cut_short_leaves_nothing_that_is_read(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(300))
    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        tokenized(Dying(path), tokenizer, cache)
    assert [entry.suffix for entry in cache.iterdir()] == [".lock"]
    # A killed process cannot clean up; the next one does.
    key = next(cache.iterdir()).stem
    (cache / f"{key}.partial").mkdir()
    assert open_data(config_for(path), tokenizer, cache_dir=cache).num_windows > 100
    assert [entry.name for entry in cache.iterdir()] == [key]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "no text"),
        ("empty.jsonl", b"", "no text"),
        ("binary.txt", b"a\n\0\1\2", "NUL bytes"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": "b"', "broken.jsonl, line 2 is not JSON .* at column 13"),
        ("latin.jsonl", b'{"text": "a"}\n\n{"text": "\xe9"}\n', "line 3 is not UTF-8 from byte 11 on"),
        ("deep.jsonl", b"[" * 100_000, "line 1 holds JSON that cannot be read"),
        ("long.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "line 1 holds JSON that cannot be read"),
        ("short.txt", b"a few words", "has 11 bytes of text, too few for .* samples of 33 tokens"),
        ("array.jsonl", b'["a", "b"]\n', "no JSON object"),
        ("numbers.jsonl", b'{"a": 1, "b": 2}\n', "no column with text"),
        ("several.jsonl", b'{"question": "a", "answer": "b"}\n', "--text-column"),
        ("broken.parquet", b"PAR1 not at all", "not a readable Parquet"),
    ],
)
def test_files_without_usable_text_are_refused_before_training(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        check_data(config_for(tmp_path / name))


def test_parquet_without_text_names_its_columns(tmp_path):
    pq.write_table(pa.table({"label": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="label"):
        check_data(config_for(tmp_path / "a.parquet"))


def test_a_dataset_that_is_not_there_is_refused(tmp_path):
    for name in (str(tmp_path / "none.txt"), "stdlb", "./nothing"):
        with pytest.raises(UserError, match="there is no"):
            check_data(config_for(name))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no"):
        check_data(config_for(tmp_path / "empty"))


def test_compressed_text_is_not_left_out_without_a_word(tmp_path):
    (tmp_path / "README.md").write_text("a corpus\n" * 1000)
    compressed = [tmp_path / f"{number}.jsonl.zst" for number in range(3)]
    for path in compressed:
        path.write_bytes(bytes(100))
    with pytest.raises(UserError, match=r"compressed files, .* \(0\.jsonl\.zst and 2 others\); decompress"):
        check_data(config_for(tmp_path))
    with pytest.raises(UserError, match=r"0\.jsonl\.zst is compressed, so it cannot be read; decompress it"):
        check_data(config_for(compressed[0]))
    for path in compressed:
        write_jsonl(path.with_suffix(""), documents(30))
    check_data(config_for(tmp_path))
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "empty.txt.gz").touch()
    with pytest.raises(UserError, match=r"\(empty\.txt\.gz and 0 others\)"):
        check_data(config_for(tmp_path / "all"))


def test_a_little_compressed_text_is_noted_and_stops_no_worker(tokenizer, tmp_path, capsys, caplog):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.md").write_text("words\n" * 1000)
    added = texts / "b.json.gz"
    added.write_bytes(bytes(180))
    check_data(config_for(texts))
    said = f"{texts} holds compressed files, which are not read (b.json.gz and 0 others)"
    assert f"note: {said}\n" in capsys.readouterr().err
    added.write_bytes(bytes(181))
    with pytest.raises(UserError, match="decompress them, or move them out of it"):
        check_data(config_for(texts))
    # Another process may have put it there since the check.
    for fills_cache in (True, False):
        open_data(config_for(texts), tokenizer, cache_dir=tmp_path / "cache", fills_cache=fills_cache)
    assert caplog.messages.count(said) == 1


def test_an_archive_is_refused_if_it_is_larger_than_the_text_beside_it(tmp_path):
    (tmp_path / "README.md").write_text("words\n" * 1000)
    archive = tmp_path / "corpus.tar.gz"
    archive.write_bytes(bytes(6000))
    check_data(config_for(tmp_path))
    archive.write_bytes(bytes(6001))
    with pytest.raises(UserError, match=r"\(corpus\.tar\.gz and 0 others\)"):
        check_data(config_for(tmp_path))


def test_every_file_of_a_directory_is_looked_at_before_the_first_is_read_to_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("words and words\n" * 1000)
    (tmp_path / "b.jsonl").write_text('{"text": "a"\n')
    with pytest.raises(UserError, match=r"b\.jsonl, line 1 is not JSON"):
        check_data(config_for(tmp_path))


@pytest.fixture
def unlike_root():
    """Drop root's rights for the test, as root may read every file."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    yield
    os.seteuid(was)


def test_a_directory_or_file_that_may_not_be_read_is_named(unlike_root):
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "a.txt").write_text("words\n" * 1000)
        (root / "sub").mkdir()
        check_data(config_for(root))
        for path in (root / "sub", root / "a.txt"):
            path.chmod(0)
            with pytest.raises(UserError, match=f"cannot read {path}: Permission denied"):
                check_data(config_for(root))
            path.chmod(0o700)


def test_a_dataset_shorter_than_a_sample_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match="too few"):
        open_data(config_for(tmp_path / "a.txt"), tokenizer, cache_dir=tmp_path)


def test_the_text_column_is_found_or_named(tokenizer, tmp_path):
    path = tmp_path / "qa.jsonl"
    rows = [{"question": text, "answer": str(n)} for n, text in enumerate(documents(300))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_data(config_for(path, text_column="question"), tokenizer, cache_dir=tmp_path)
    assert source.num_windows > 100
    with pytest.raises(UserError, match="'nothing'"):
        check_data(config_for(path, text_column="nothing"))
    null_first = tmp_path / "null.jsonl"
    null_first.write_text('{"id": "x", "text": null}\n' + '{"id": "y", "text": "some text"}\n' * 20)
    check_data(config_for(null_first))


def test_cross_entropy_of_its_own_frequencies_is_the_entropy():
    counts = np.zeros(256, dtype=np.int64)
    counts[:4] = 10**9
    assert cross_entropy_bits(counts, counts) == pytest.approx(2.0, abs=1e-5)


def test_checking_data_loads_no_torch():
    program = (
        "import sys; from diloco.options.trainer import TrainConfig; from diloco.data.batches import check_data\n"
        "check_data(TrainConfig()); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_items_arrive_in_order_and_once():
    with Prefetched(iter(range(100)), depth=3) as items:
        assert list(items) == list(range(100))
        assert list(items) == []


def test_an_error_is_raised_where_its_item_would_have_been():
    def failing():
        yield 1
        raise OSError("disk gone")

    with Prefetched(failing()) as items:
        reader = iter(items)
        assert next(reader) == 1
        with pytest.raises(OSError, match="disk gone"):
            next(reader)
        with pytest.raises(OSError, match="disk gone"):
            next(iter(items))


def test_leaving_early_ends_the_thread():
    with Prefetched(iter(int, 1)) as items:
        assert next(iter(items)) == 0
        (thread,) = items._reader._threads
        assert thread.is_alive()
    assert not thread.is_alive()


def test_reading_goes_on_while_nobody_asks():
    read = threading.Semaphore(0)

    def counted():
        for number in range(10):
            read.release()
            yield number

    with Prefetched(counted(), depth=2) as items:
        # Two items in the queue and one waiting to enter it.
        for _ in range(3):
            assert read.acquire(timeout=10)
        assert list(items) == list(range(10))
