import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diloco.data.tokenizer import (
    _byte_symbols,
    chat_template_of,
    check_vocabulary,
    encode_documents,
    is_byte_level,
    load_tokenizer,
    text_byte_counts,
)
from diloco.errors import UserError
from diloco.options.model_files import PRESETS_DIR

TOKENIZER = load_tokenizer("2m")
EOS_ID = TOKENIZER.eos_token_id
# Three reserved ones make the vocabulary size a multiple of eight, which tensor cores need for full speed.
SPECIAL_TOKENS = [
    *("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"),
    *("<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>"),
]


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_survives_the_byte_tokenizer(text):
    content = text.encode("utf-8", errors="replace")
    text = content.decode()
    ids = TOKENIZER(text, split_special_tokens=True)["input_ids"]
    assert bytes(ids) == content
    assert TOKENIZER.decode(ids) == text
    assert [*encode_documents(TOKENIZER, [content], byte_level=True)[0]] == [*ids, EOS_ID]


def test_any_bytes_are_ids_and_back():
    content = bytes(range(256)) * 3
    [ids] = encode_documents(TOKENIZER, [content], byte_level=True)
    assert bytes(ids[:-1].tolist()) == content and ids[-1] == EOS_ID
    assert text_byte_counts(TOKENIZER, ids, byte_level=True).tolist() == [3] * 256


def test_special_tokens_follow_the_bytes_and_are_not_read_out_of_documents():
    assert TOKENIZER.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(256, 264))
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (256, 257, 258)
    assert [*encode_documents(TOKENIZER, [b"a<|eos|>"], byte_level=False)[0]] == [*b"a<|eos|>", EOS_ID]
    assert is_byte_level(TOKENIZER)


def test_chat_template_frames_each_turn():
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    assert TOKENIZER.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )
    ids = TOKENIZER.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    assert ids[0] == 259 and bytes(ids[-10:]) == b"assistant\n"


NAMED = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "own"}]


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config.json": {"chat_template": "own"}}, "own"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "own"),
        ({"tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": "own\r\n"}, "own\n"),
        ({"tokenizer_config.json": {}}, ""),
        (
            {"tokenizer.json": None, "tokenizer_config.json": None, "chat_template.jinja": "of no tokenizer"},
            None,
        ),
    ],
)
def test_the_chat_template_is_found_without_transformers_and_is_the_one_that_it_uses(
    tmp_path, files, template
):
    shutil.copytree(PRESETS_DIR / "2m", tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    own = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for name, content in files.items():
        if content is None:
            (tmp_path / name).unlink()
        elif isinstance(content, dict):
            (tmp_path / name).write_text(json.dumps({**own, **content}))
        else:
            (tmp_path / name).write_bytes(content.encode())
    found = chat_template_of(str(tmp_path))
    assert found == (TOKENIZER.chat_template if template is None else template)
    loaded = load_tokenizer(str(tmp_path))
    assert found == (loaded.get_chat_template() if found else "")
    assert bool(loaded.chat_template) == bool(found)


@pytest.mark.parametrize("text", ["[]", "{", '{"chat_template": [{"name": "x"}]}'])
def test_a_chat_template_that_cannot_be_read_is_the_users_to_mend(tmp_path, text):
    shutil.copytree(PRESETS_DIR / "2m", tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match=r"chat template of .* does not load"):
        chat_template_of(str(tmp_path))


def test_the_presets_files_are_a_bpe_of_bytes_without_merges():
    backend = Tokenizer(
        models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_byte_symbols())}, merges=[])
    )
    # Split at line ends, so that no pre-token ("word") is longer than a line.
    lines = pre_tokenizers.Split("\n", "merged_with_previous")
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([lines, symbols])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )
    for directory in ("2m", "15m"):
        stored = json.loads((PRESETS_DIR / directory / "tokenizer.json").read_text())
        assert stored == json.loads(tokenizer.backend_tokenizer.to_str())


def test_a_model_without_a_tokenizer_is_read_by_bytes(caplog):
    assert is_byte_level(load_tokenizer("150m"))
    assert "brings no tokenizer" in caplog.text


def write_model(directory, vocab_size):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
    return str(directory)


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path):
    path = write_model(tmp_path / "model", 3)
    word_tokenizer(eos_token="</s>").save_pretrained(path)
    for refuses in (load_tokenizer, check_vocabulary):
        with pytest.raises(UserError, match="knows 3 token ids, its tokenizer has 4"):
            refuses(path)
    check_vocabulary(write_model(tmp_path / "enough", 264))


def test_a_vocabulary_too_small_for_bytes_is_refused_where_there_is_no_tokenizer(tmp_path):
    path = write_model(tmp_path / "model", 100)
    for refuses in (load_tokenizer, check_vocabulary):
        with pytest.raises(
            UserError,
            match="100 token ids, but has no tokenizer, so text is read byte by byte, which takes 264",
        ):
            refuses(path)


def word_tokenizer(**special):
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)


def test_a_tokenizer_beside_the_model_is_used(tmp_path):
    path = write_model(tmp_path / "model", 4)
    word_tokenizer(eos_token="</s>").save_pretrained(path)
    tokenizer = load_tokenizer(path)
    assert not is_byte_level(tokenizer)
    [ids] = encode_documents(tokenizer, [b"hello world hello"], byte_level=False)
    assert ids.tolist() == [2, 3, 2, 1]
    assert text_byte_counts(tokenizer, ids, byte_level=False).sum() == len("hello world hello")


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    path = write_model(tmp_path / "model", 4)
    word_tokenizer().save_pretrained(path)
    with pytest.raises(UserError, match="eos_token"):
        load_tokenizer(path)


def test_a_broken_tokenizer_is_refused(tmp_path):
    path = write_model(tmp_path / "model", 300)
    (tmp_path / "model" / "tokenizer.json").write_text("{not json")
    for refuses in (load_tokenizer, check_vocabulary):
        with pytest.raises(UserError, match="does not load"):
            refuses(path)
