"""ARPA files: read by the rules of back-off and nothing else they give the model's own probabilities."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import elman
from elman.errors import ModelFileError, UserError
from elman.models.arpa import read_arpa, write_arpa
from elman.models.file import Bundle, load_model, save_model
from elman.models.kinds import build_model, model_config
from elman.text.bpe import BPETokenizer
from elman.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer

TEXT = "the cat \\u0041 sat on the mat\nthe dog\u00a0sat\n<s> </s> the \t mat é 猫 cat\n" * 3


class BackOff:
    """An ARPA file as strings, and the rule of back-off: what any other tool computes."""

    def __init__(self, path: Path) -> None:
        self.entries: dict[tuple[str, ...], tuple[float, float]] = {}
        for line in path.read_text(encoding="utf-8").split("\n"):
            number, *rest = line.split("\t")
            if rest:
                tokens = tuple(rest[0].split(" "))
                assert tokens not in self.entries
                self.entries[tokens] = float(number), float(rest[1]) if len(rest) == 2 else 0.0
        self.order = max(map(len, self.entries))

    def log10(self, token: str, context: tuple[str, ...]) -> float:
        context = context[max(0, len(context) - self.order + 1) :]
        if (*context, token) in self.entries:
            return self.entries[(*context, token)][0]
        assert context, token
        return self.entries.get(context, (0.0, 0.0))[1] + self.log10(token, context[1:])


def bundle_of(tokenizer: Tokenizer, text: str = TEXT, order: int = 4, **settings: object) -> Bundle:
    halves = [tokenizer.encode(part, unknown="token") for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    tokens = np.concatenate([[tokenizer.boundary_id], halves[0], [tokenizer.boundary_id], halves[1]])
    config = model_config({"kind": "ngram", "order": order, **settings})
    network = build_model(config, tokenizer.size, seed=1, dtype=torch.float64, boundary_id=tokenizer.boundary_id)
    network.count(tokens)
    return Bundle(network, tokenizer)


def nats(bundle: Bundle, tokens: np.ndarray) -> np.ndarray:
    tokens_BT = torch.from_numpy(np.asarray(tokens)).unsqueeze(0)
    features_BTF, _ = bundle.network.features(tokens_BT[:, :-1], bundle.network.initial_state(1))
    return bundle.network.head.nll(features_BTF, tokens_BT[:, 1:])[0].numpy()


def random_tokens(tokenizer: Tokenizer, length: int = 300) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.concatenate([[tokenizer.boundary_id], rng.integers(0, tokenizer.size, length)])


TOKENIZERS = {
    "char": CharTokenizer(TEXT),
    "byte": ByteTokenizer(),
    "word": WordTokenizer(["the", "cat", "<s>", "</s>", "\\u0041", "é", "猫", "mat"]),
}


@pytest.mark.parametrize("level", TOKENIZERS)
@pytest.mark.parametrize("order", [1, 2, 5])
def test_what_is_written_is_read_again_with_its_tokenizer(level, order, tmp_path):
    written = bundle_of(TOKENIZERS[level], order=order)
    write_arpa(written, tmp_path / "a.arpa")
    read = read_arpa(tmp_path / "a.arpa")
    assert read.tokenizer.to_dict() == written.tokenizer.to_dict()
    assert read.network.config.order == order
    for tokens in (written.tokenizer.encode(TEXT, unknown="token"), random_tokens(written.tokenizer)):
        tokens = np.concatenate([[written.tokenizer.boundary_id], tokens])
        np.testing.assert_allclose(nats(read, tokens), nats(written, tokens), atol=1e-8)
    write_arpa(read, tmp_path / "b.arpa")
    assert (tmp_path / "b.arpa").read_bytes() == (tmp_path / "a.arpa").read_bytes()


@pytest.mark.parametrize("smoothing", ["kneser_ney", "stupid_backoff"])
def test_the_rule_of_back_off_gives_the_probabilities_of_the_model(smoothing, tmp_path):
    bundle = bundle_of(CharTokenizer(TEXT), smoothing=smoothing)
    write_arpa(bundle, tmp_path / "a.arpa")
    tool = BackOff(tmp_path / "a.arpa")
    names = [n[0] for n in tool.entries if len(n) == 1 and n[0] != "<s>"]
    assert (len(names), names[:2]) == (bundle.tokenizer.size, ["</s>", "<unk>"])
    # Like a tool, sentence by sentence: <s> stands before the first token alone, </s> is the last one predicted.
    for sentence in ("the cat", "mat 猫\n\n", "é", ""):
        tokens = [0, *bundle.tokenizer.encode(sentence).tolist(), 0]
        strings = ["<s>", *(names[token] for token in tokens[1:])]
        for i, value in enumerate(nats(bundle, np.array(tokens)), 1):
            assert tool.log10(strings[i], tuple(strings[:i])) == pytest.approx(-value / math.log(10), abs=1e-8)
    # And over a boundary, which is context there.
    tokens = [0, 5, 6, 0, *bundle.tokenizer.encode("the ").tolist()]
    strings = ["<s>" if token == 0 else names[token] for token in tokens]
    for i, value in enumerate(nats(bundle, np.array(tokens)), 1):
        predicted = "</s>" if tokens[i] == 0 else strings[i]
        assert tool.log10(predicted, tuple(strings[:i])) == pytest.approx(-value / math.log(10), abs=1e-8)


def test_the_probabilities_of_a_context_in_the_file_sum_to_one(tmp_path):
    write_arpa(bundle_of(CharTokenizer(TEXT)), tmp_path / "a.arpa")
    tool = BackOff(tmp_path / "a.arpa")
    names = [n[0] for n in tool.entries if len(n) == 1 and n[0] != "<s>"]
    contexts = list(dict.fromkeys(gram[:-1] for gram in tool.entries))
    for context in contexts[:: len(contexts) // 20]:
        assert sum(10 ** tool.log10(name, context) for name in names) == pytest.approx(1, abs=1e-7)


def test_tokens_are_escaped_as_documented(tmp_path):
    write_arpa(bundle_of(CharTokenizer(" \n\\\u00a0\u3000aé😀\U000e0001")), tmp_path / "a.arpa")
    lines = (tmp_path / "a.arpa").read_text(encoding="utf-8").split("\n")
    assert lines[0] == "# elman char"
    start, end = lines.index("\\1-grams:"), lines.index("\\2-grams:")
    tokens = [line.split("\t")[1] for line in lines[start + 1 : end - 1]]
    assert tokens == [
        "<s>", "</s>", "<unk>", "\\u000a", "\\u0020", "\\u005c", "a", "\\u00a0", "é", "\\u3000", "😀", "\\U000e0001"
    ]  # fmt: skip


FOREIGN = """
made by another tool

\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-1.2\t<unk>\t0
0 <s> -0.5
-0.7\t</s>\t0
-0.4\tthe\t-0.2
-0.6\tcat

\\2-grams:
-0.1\t<s> the
-0.3\tthe cat
-0.9\tcat </s>

\\end\\
"""


def test_a_file_of_another_tool_is_read_as_it_stands(tmp_path):
    (tmp_path / "a.arpa").write_text(FOREIGN, encoding="utf-8")
    bundle = read_arpa(tmp_path / "a.arpa")
    assert bundle.tokenizer.to_dict() == {"level": "word", "words": ["the", "cat"]}
    found = -nats(bundle, np.array([0, 3, 4, 2, 4, 1, 0])) / math.log(10)
    # The, cat, the line's end, which is </s> there; cat after <s> by its weight; <unk> after cat, whose weight is 1;
    # the end of the text, which such a file does not know.
    assert found == pytest.approx([-0.1, -0.3, -0.9, -0.5 - 0.6, -1.2, -99])
    assert -nats(bundle, np.array([0, 3, 4, 2, 3, 4, 2])) / math.log(10) == pytest.approx([-0.1, -0.3, -0.9] * 2)
    (tmp_path / "c.arpa").write_text(FOREIGN.replace("the", "t").replace("cat", "\\"), encoding="utf-8")
    assert read_arpa(tmp_path / "c.arpa").tokenizer.to_dict() == {"level": "char", "characters": "\\t"}


def test_a_file_that_knows_the_ends_of_lines_keeps_them_apart_from_that_of_the_text(tmp_path):
    own = FOREIGN.replace("ngram 1=5", "ngram 1=6").replace("-0.6\tcat", "-0.7\t<eos>\n-0.6\tcat")
    (tmp_path / "a.arpa").write_text(own, encoding="utf-8")
    found = -nats(read_arpa(tmp_path / "a.arpa"), np.array([0, 3, 4, 0, 3])) / math.log(10)
    assert found == pytest.approx([-0.1, -0.3, -0.9, -0.1])


def test_a_file_of_another_name_is_told_what_it_lacks(tmp_path):
    (tmp_path / "a.lm").write_text(FOREIGN, encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"a\.lm' holds an n-gram model in ARPA: give it a name in \.arpa$"):
        load_model(tmp_path / "a.lm")


def test_contexts_whose_shorter_ones_were_pruned_are_read(tmp_path):
    pruned = FOREIGN.replace("ngram 2=3", "ngram 2=3\nngram 3=1").replace(
        "\\end\\", "\\3-grams:\n-0.2\tcat the cat\n\n\\end\\"
    )
    (tmp_path / "a.arpa").write_text(pruned, encoding="utf-8")
    found = -nats(read_arpa(tmp_path / "a.arpa"), np.array([0, 4, 3, 4])) / math.log(10)
    assert found[2] == pytest.approx(-0.2)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("ngram 1=5", "ngram 1=6", "there are 5 n-grams of 1 tokens, 6 were said"),
        ("ngram 2=3", "ngram 3=3", "the size of order 2 belongs here"),
        ("ngram 1=5\nngram 2=3\n", "", "'ngram 1=...' belongs here"),
        ("\\2-grams:", "\\3-grams:", "belongs here"),
        ("\\end\\", "", "it ends before"),
        ("\\data\\", "", "it ends before"),
        ("-0.3\tthe cat", "-0.3\tthe", "a logarithm, 2 tokens and perhaps a second logarithm belong here"),
        ("-0.3\tthe cat", "x\tthe cat", "is no number"),
        ("-0.3\tthe cat", "0.3\tthe cat", "not above 0"),
        ("-0.3\tthe cat", "nan\tthe cat", "not above 0"),
        ("-0.3\tthe cat", "-inf\tthe cat", "not above 0"),
        ("the\t-0.2", "the\tinf", "finite"),
        ("-0.3\tthe cat", "-0.3\t<s> the", "twice"),
        ("-0.6\tcat", "-0.6\tthe", "twice"),
    ],
)
def test_a_damaged_file_gets_one_line(old, new, complaint, tmp_path):
    assert FOREIGN.count(old) == 1
    (tmp_path / "a.arpa").write_text(FOREIGN.replace(old, new), encoding="utf-8")
    with pytest.raises(ModelFileError) as caught:
        read_arpa(tmp_path / "a.arpa")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "a.arpa" in str(caught.value)


@pytest.mark.parametrize(
    ("level", "token", "complaint"),
    [
        ("char", "ab", "is at level char, which has no token 'ab'"),
        ("char", "\\uffff0", "no token"),
        ("char", "\\Uffffffff", "no token"),
        ("char", "a -0.1\n-1 \\u0061", "two names for one token"),
        ("word", "the -0.1\n-1 \\u0074he", "two names for one token"),
        ("byte", "a", "is at level byte, which has no token 'a'"),
        ("byte", "\\x100", "no token"),
    ],
)
def test_tokens_that_a_level_does_not_have_are_refused(level, token, complaint, tmp_path):
    size = 1 + token.count("\n")
    text = f"# elman {level}\n\\data\\\nngram 1={size}\n\\1-grams:\n-1 {token}\n\\end\\\n"
    (tmp_path / "a.arpa").write_text(text)
    with pytest.raises(ModelFileError) as caught:
        read_arpa(tmp_path / "a.arpa")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"\\data\\\nngram 1=0\n\\1-grams:\n\\end\\\n"])
def test_what_is_no_text_or_holds_nothing_is_read_or_refused_in_one_line(content, tmp_path):
    (tmp_path / "a.arpa").write_bytes(content)
    if b"\\end\\" in content:
        bundle = read_arpa(tmp_path / "a.arpa")
        assert np.isfinite(nats(bundle, np.array([0, 0, 1]))).all()
    else:
        with pytest.raises(ModelFileError):
            read_arpa(tmp_path / "a.arpa")


def test_more_than_twenty_tokens_are_refused(tmp_path):
    sizes = "".join(f"ngram {n}=0\n" for n in range(1, 22))
    sections = "".join(f"\\{n}-grams:\n" for n in range(1, 22))
    (tmp_path / "a.arpa").write_text(f"\\data\\\n{sizes}{sections}\\end\\\n")
    with pytest.raises(ModelFileError, match="accepted: 1 to 20"):
        read_arpa(tmp_path / "a.arpa")


def test_what_arpa_cannot_hold_is_refused(tmp_path):
    path = tmp_path / "a.arpa"
    with pytest.raises(UserError, match="add_k"):
        write_arpa(bundle_of(CharTokenizer(TEXT), smoothing="add_k"), path)
    lstm = build_model(model_config({"kind": "lstm"}), 10, seed=None, dtype=torch.float32)
    with pytest.raises(UserError, match=r"model\.kind 'lstm'"):
        write_arpa(Bundle(lstm, CharTokenizer("ab")), path)
    with pytest.raises(UserError, match="cannot be written"):
        write_arpa(bundle_of(CharTokenizer(TEXT)), tmp_path / "none" / "a.arpa")
    assert not path.exists()


def test_pieces_of_words_are_refused(tmp_path, tiny_text):
    from elman.config import TokenizerConfig
    from elman.text.building import train_tokenizer
    from elman.text.sources import StringSource

    tokenizer = train_tokenizer(TokenizerConfig(level="bpe", max_size=300), StringSource(tiny_text))
    assert isinstance(tokenizer, BPETokenizer)
    with pytest.raises(UserError, match="level is bpe"):
        write_arpa(bundle_of(tokenizer), tmp_path / "a.arpa")


def test_an_arpa_file_serves_as_a_model(tmp_path):
    bundle = bundle_of(CharTokenizer(TEXT))
    write_arpa(bundle, tmp_path / "a.arpa")
    model = elman.load(tmp_path / "a.arpa")
    assert model.score("the cat").score.nats_total == pytest.approx(
        nats(bundle, np.array([0, *bundle.tokenizer.encode("the cat").tolist()])).sum(), abs=1e-6
    )
    assert len(model.generate("the ", max_new_tokens=5, seed=1).tokens) <= 5
    save_model(tmp_path / "m.safetensors", model)
    again = load_model(tmp_path / "m.safetensors")
    for name, tensor in again.network.tensors().items():
        assert torch.equal(tensor, model.network.tensors()[name])
    assert list(itertools.islice(again.tokenizer.vocabulary, 2)) == ["<|endoftext|>", "<unk>"]
