"""Byte pairs of our own and foreign `tokenizer.json` files: what is unknown, decoding in steps, damaged files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from elman.config import TokenizerConfig
from elman.data.prepare import tokenize_text
from elman.errors import ConfigError, ModelFileError, TextError
from elman.text import bpe as module
from elman.text.bpe import BPETokenizer
from elman.text.building import tokenizer_from_dict, train_tokenizer
from elman.text.sources import Piece
from elman.text.tokenizers import BOUNDARY, UNKNOWN, Tokenizer

SAMPLE = "the cat sat on the mat.\nthe dog, the log: ÄÖ né 漢字 👩\u200d👧\n\n  two  spaces\tand a tab\r\n" * 20


def trained(text: str = SAMPLE, **settings: object) -> Tokenizer:
    return train_tokenizer(TokenizerConfig(level="bpe", **settings), [Piece(text, True)])


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return trained(max_size=400)


def test_bpe_in_chunks_equals_the_library_on_the_whole_text(bpe, monkeypatch):
    text = SAMPLE * 3
    whole = bpe._hub.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(module, "_CHUNK", 40)
    assert len(module._chunks(text, 40)) > 30
    assert bpe.encode(text).tolist() == whole


@given(st.text(st.sampled_from("a b\n"), max_size=400), st.integers(1, 20))
def test_chunks_join_to_the_text_and_are_bounded(text, size):
    chunks = module._chunks(text, size)
    assert "".join(chunks) == text
    assert all(0 < len(chunk) <= 16 * size + size for chunk in chunks) or not text


def test_bpe_holds_all_bytes_and_the_size_asked_for(bpe):
    assert bpe.size <= 400
    assert trained("ab" * 5).size >= 257
    assert bpe.unknown_id is None
    assert bpe.lossless
    with pytest.raises(ConfigError, match="at least 257"):
        trained(max_size=256)


def test_the_bpe_sample_is_bounded_and_even():
    documents = [Piece(f"{i:04d} " * 400, True) for i in range(100)]
    sample = list(module._even_sample(documents, 20_000))
    size = sum(map(len, sample))
    assert 15_000 < size <= 20_000
    tenths = Counter(int(chunk.split()[0]) // 10 for chunk in sample)
    assert len(tenths) == 10
    assert max(tenths.values()) <= 2 * min(tenths.values())
    assert "".join(module._even_sample(documents, 10**9)) == "".join(p.text for p in documents)


def test_bpe_sample_does_not_depend_on_where_pieces_are_cut():
    text = SAMPLE * 5
    once = list(module._even_sample([Piece(text, True)], 3000))
    pieces = [Piece(text[start : start + 97], start == 0) for start in range(0, len(text), 97)]
    again = list(module._even_sample(pieces, 3000))
    assert once
    assert once == again


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150)
@given(st.data())
def test_a_changed_bpe_dictionary_is_refused_or_works(bpe, data):
    changed = json.loads(json.dumps(bpe.to_dict()))["tokenizer"]
    at = changed
    while True:
        keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(json_values)
        break
    try:
        tokenizer = tokenizer_from_dict({"level": "bpe", "tokenizer": changed})
    except ModelFileError:
        return
    ids = tokenizer.encode("the cat", unknown="token")
    if tokenizer.lossless:
        assert tokenizer.decode(ids) == "the cat"


def test_a_deep_dictionary_is_refused():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ModelFileError):
        tokenizer_from_dict({"level": "bpe", "tokenizer": {"model": deep}})


def test_ids_far_apart_are_refused(bpe):
    settings = json.loads(json.dumps(bpe.to_dict()))["tokenizer"]
    settings["model"]["vocab"]["zzz"] = 2**31
    with pytest.raises(ModelFileError, match="largest id"):
        tokenizer_from_dict({"level": "bpe", "tokenizer": settings})


def _foreign(tmp_path, **change):
    """A byte-level tokenizer.json as another program may have written it, without a boundary."""

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=change.get("prefix", False))
    library.decoder = decoders.ByteLevel()
    if "normalizer" in change:
        library.normalizer = change["normalizer"](normalizers)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        [SAMPLE],
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False),
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.enable_truncation(4)
    library.save(str(tmp_path / "tokenizer.json"))
    return train_tokenizer(TokenizerConfig(level="bpe", path=str(tmp_path / "tokenizer.json")), [])


def test_an_existing_tokenizer_gets_a_boundary_and_is_not_cut_short(tmp_path):
    tokenizer = _foreign(tmp_path)
    assert tokenizer.boundary_id == tokenizer.size - 1
    assert tokenizer.lossless
    text = f"the cat <s> sat {BOUNDARY} on"
    ids = tokenizer.encode(text)
    assert ids.size > 4
    assert tokenizer.decode(ids) == text
    assert 0 not in ids
    assert tokenizer_from_dict(tokenizer.to_dict()).to_dict() == tokenizer.to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": lambda module: module.Lowercase()},
        {"normalizer": lambda module: module.NFC()},
        {"normalizer": lambda module: module.Replace("a word that no probe holds", "")},
        {"prefix": True},
    ],
)
def test_an_existing_tokenizer_that_changes_text_says_so(tmp_path, change):
    assert not _foreign(tmp_path, **change).lossless


def test_a_word_piece_tokenizer_has_unknowns_and_decodes_in_steps(tmp_path):
    library = Library(models.WordPiece({"[UNK]": 0, "the": 1, "cat": 2, "##s": 3}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "t.json"))
    tokenizer = BPETokenizer.from_file(tmp_path / "t.json")
    assert not tokenizer.lossless
    assert tokenizer.encode("the cats").tolist() == [1, 2, 3]
    with pytest.raises(TextError, match="lacks"):
        tokenizer.encode("the dog")
    assert tokenizer.encode("the dog", unknown="token").tolist() == [1, 0]
    assert tokenizer.unknown_characters("the thecat") == ["thecat"]
    ids = [1, 2, 3] * 50
    decoder = tokenizer.decoder()
    assert tokenizer.decode(ids) == " ".join(["the cats"] * 50)
    assert "".join([decoder.feed(i) for i in ids]) + decoder.flush() == tokenizer.decode(ids)


def test_a_pattern_that_the_library_gives_up_on_is_one_line():
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    tokenizer = BPETokenizer(library.to_str())
    with pytest.raises(TextError, match="cannot encode"):
        tokenizer.encode("a" * 40)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_missing_or_bad_tokenizer_file_is_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json") as caught:
        BPETokenizer.from_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "3",
        "null",
        "{}",
        '{"model": []}',
        '{"model": {}}',
        '{"model": {"vocab": 3}}',
        '{"model": {"vocab": {"a": "b"}}}',
        '{"model": {"vocab": {"a": []}}}',
        '{"model": {"vocab": {}}, "added_tokens": 3}',
        '{"model": {"vocab": {}}, "added_tokens": [3]}',
        '{"model": {"vocab": {}}, "added_tokens": [{}]}',
    ],
)
def test_a_file_of_another_shape_says_what_it_must_hold(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json.* (must (be|hold)|did not match|lacks)") as caught:
        BPETokenizer.from_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode there")
def test_a_file_whose_name_is_no_text_is_refused():
    with pytest.raises(TextError, match=r"b\\xff\.json is not UTF-8; rename it"):
        BPETokenizer.from_file("b\udcff.json")


def word_level() -> Library:
    library = Library(models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2, "é": 3, "end": 4}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return library


def word_piece() -> Library:
    vocabulary = ["[UNK]", "the", "cat", "##s", "##é", ".", ",", "n't", "'", "do", "[CLS]"]
    library = Library(models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens(["[CLS]", "[SEP]"])
    return library


def unigram() -> Library:
    pieces = ["<unk>", "▁", "▁the", "▁cat", "s", "é", "漢", ".", "the"]
    library = Library(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return library


def byte_fallback() -> Library:
    """As Llama 2 has it."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "t",
        "h",
        "e",
        "▁t",
        "he",
        "▁the",
        "é",
        "\ufffd",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    library = Library(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>"])
    return library


def byte_level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        [SAMPLE], trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    return library


def byte_level_without_all_bytes() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator([SAMPLE], trainers.BpeTrainer(vocab_size=90, show_progress=False))
    return library


def word_ends() -> Library:
    library = Library(models.BPE(end_of_word_suffix="</w>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=60, end_of_word_suffix="</w>", show_progress=False)
    library.train_from_iterator(["the cat sat on the mat"] * 20, trainer)
    return library


def plain_characters() -> Library:
    """Byte pairs without a token for unknown characters, and with a special token beside the vocabulary."""
    library = Library(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    library.add_special_tokens(["<s>"])
    return library


FOREIGN = [
    word_level,
    word_piece,
    unigram,
    byte_fallback,
    byte_level,
    byte_level_without_all_bytes,
    word_ends,
    plain_characters,
]
loaded = pytest.mark.parametrize("make", FOREIGN)


@cache
def read_once(make: Callable[[], Library]) -> BPETokenizer:
    return BPETokenizer(make().to_str())


@loaded
def test_pieces_joined_are_the_text_at_once_and_the_library_s(make: Callable[[], Library]):
    tokenizer = read_once(make)
    vocabulary = tokenizer._hub.get_vocab()
    bytes_alone = sorted(i for token, i in vocabulary.items() if token.startswith("<0x"))
    others = sorted(set(range(tokenizer.size)) - set(bytes_alone))

    # The library makes U+FFFD of a whole run of bytes if any is wrong, so that it is asked about whole characters only.
    whole = st.sampled_from("é漢👩a").map(
        lambda c: [vocabulary.get(f"<0x{byte:02X}>", others[0]) for byte in c.encode()]
    )

    @settings(max_examples=60, database=None)
    @given(st.lists(st.sampled_from(others).map(lambda i: [i]) | whole, max_size=100), st.data())
    def check(runs: list[list[int]], data: st.DataObject) -> None:
        ids = [i for run in runs for i in run]
        assert tokenizer.decode(ids) == tokenizer._hub.decode(ids, skip_special_tokens=False)
        ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=150))
        decoder = tokenizer.decoder()
        for _ in range(2):  # flushed, it begins anew
            assert "".join(map(decoder.feed, ids)) + decoder.flush() == tokenizer.decode(ids)

    check()


def test_a_run_of_bytes_gives_its_characters_as_they_are_complete():
    tokenizer = BPETokenizer(byte_fallback().to_str())
    ids = tokenizer.encode("the漢字").tolist()
    decoder = tokenizer.decoder()
    assert [decoder.feed(i) for i in ids] == ["the", "", "", "漢", "", "", "字"]
    broken = [ids[1], ids[0], *ids[1:5]]
    assert tokenizer.decode(broken) == "\ufffd the漢\ufffd"


@loaded
@settings(max_examples=60, database=None)
@given(text=st.text(st.sampled_from("the cat sfox.é漢Я👩\n") | st.characters(codec="utf-8"), max_size=12))
def test_a_text_is_unknown_or_all_of_it_comes_back(make: Callable[[], Library], text: str):
    tokenizer = read_once(make)
    unknown = tokenizer.unknown_characters(text)
    assert all(piece in text or piece == UNKNOWN for piece in unknown)
    ids = tokenizer.encode(text, unknown="token")
    assert (tokenizer.unknown_id in ids.tolist()) == bool(unknown)
    if unknown:
        with pytest.raises(TextError, match="lacks"):
            tokenizer.encode(text)
    else:
        assert tokenizer.encode(text).tolist() == ids.tolist()
        assert "".join(tokenizer.decode(ids).split()) == "".join(text.split())


def test_known_words_are_no_unknown_characters():
    tokenizer = BPETokenizer(word_level().to_str())
    assert tokenizer.unknown_characters("the fox") == []
    assert tokenizer.encode("the fox").tolist() == [1, 2]
    assert tokenizer.unknown_characters("the dog, the fox é") == [",", "dog"]


def test_byte_pairs_without_an_unknown_token_get_one_and_drop_nothing():
    library = plain_characters()
    library.add_tokens([AddedToken("ccc", normalized=False)])
    assert library.encode("abéa漢").tokens == ["ab", "a"]  # the library alone
    tokenizer = BPETokenizer(library.to_str())
    assert tokenizer.vocabulary == ("a", "b", "ab", "<s>", "ccc", UNKNOWN, BOUNDARY)
    assert tokenizer.unknown_characters("abéa漢é") == ["é", "漢"]
    with pytest.raises(TextError, match="lacks 2 pieces of the text: 'é', '漢'"):
        tokenizer.encode("abéa漢")
    assert tokenizer.encode("abéa漢", unknown="token").tolist() == [2, 5, 0, 5]
    assert tokenizer.encode("abéa漢", unknown="skip").tolist() == [2, 0]
    assert tokenize_text("abéa漢", tokenizer).num_unknown == 2
    assert tokenizer_from_dict(tokenizer.to_dict()).to_dict() == tokenizer.to_dict()


@pytest.mark.parametrize("name", ["<unk>", BOUNDARY, "[UNK]"])
def test_an_unknown_token_that_is_no_good_is_replaced(name):
    tokenizer = BPETokenizer(Library(models.BPE({"a": 0, BOUNDARY: 1}, [], unk_token=name)).to_str())
    assert tokenizer.encode("aéa", unknown="token").tolist() == [0, 2, 0]
    assert tokenizer.vocabulary == ("a", BOUNDARY, UNKNOWN if name == BOUNDARY else name)


def test_a_token_of_the_file_s_own_for_unknowns_stays():
    library = Library(models.BPE({"a": 0, "[UNK]": 1}, [], unk_token="[UNK]"))
    assert BPETokenizer(library.to_str()).vocabulary == ("a", "[UNK]", BOUNDARY)
    assert UNKNOWN not in BPETokenizer(byte_level().to_str()).vocabulary


def test_a_decoder_for_speech_is_refused():
    library = plain_characters()
    library.decoder = decoders.CTC()
    with pytest.raises(ModelFileError, match="CTC"):
        BPETokenizer(library.to_str())
