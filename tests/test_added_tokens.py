"""Finding added tokens in text: the longest spelling, wherever it stands, with its white-space flags."""

from hypothesis import given
from hypothesis import strategies as st

from nano_oasis.tokenizer.added_tokens import AddedToken, AddedTokens

WORDS = st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=8, unique=True)


def naive(words: list[str], text: str) -> list[str | int]:
    pieces: list[str | int] = []
    plain, at = "", 0
    while at < len(text):
        found = max((w for w in words if text.startswith(w, at)), key=len, default="")
        if found:
            pieces += [plain, words.index(found)] if plain else [words.index(found)]
            plain = ""
        else:
            plain += text[at]
        at += len(found) or 1
    return [*pieces, plain] if plain else pieces


@given(words=WORDS, text=st.text("ab<|\n", max_size=30))
def test_the_longest_spelling_from_the_left(words, text):
    tokens = AddedTokens(AddedToken(i, word) for i, word in enumerate(words))
    assert tokens.split(text) == naive(words, text)


def test_flags():
    tokens = AddedTokens(
        [
            AddedToken(1, "<l>", lstrip=True),
            AddedToken(2, "<r>", rstrip=True),
            AddedToken(3, "ab", single_word=True),
            AddedToken(4, ".*"),
        ]
    )
    assert tokens.split("x \n<l> y") == ["x", 1, " y"]
    assert tokens.split("x <r> \n y") == ["x ", 2, "y"]
    assert tokens.split(" <l> <r>  ") == [1, " ", 2]
    assert tokens.split("<r> <l>") == [2, 1]
    assert tokens.split("ab cab abc ab") == [3, " cab abc ", 3]
    assert tokens.split("a.*b") == ["a", 4, "b"]
    assert tokens.split("") == [] and AddedTokens([]).split("x") == ["x"]
