"""The corpus: real files, split by name for good, hashed over names and texts."""

import hashlib

import pytest

from outpace.text.corpus import HELD_OUT_SHARE, Document, corpus_hash, read_corpus, split


@pytest.fixture
def folder(tmp_path):
    for name, data in {
        "b.py": b"x = 1\n",
        "a/c.py": "s = 'é'\n".encode(),
        "a/latin.py": b"s = '\xe9'\n",
        "a/blank.py": b" \n",
        "a/notes.txt": b"no\n",
        "site-packages/pip/d.py": b"y = 2\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path


def test_what_is_read(folder):
    corpus = read_corpus(folder)
    assert [(d.name, d.text) for d in corpus] == [("a/c.py", "s = 'é'\n"), ("b.py", "x = 1\n")]


def test_nothing_to_read(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no \*\.py source below .*: it has none; name a folder"):
        read_corpus(tmp_path)
    with pytest.raises(ValueError, match="gone: it is not a folder; name a folder of Python files"):
        read_corpus(tmp_path / "gone")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="this Python ships without its standard library's source"):
        read_corpus()


def test_the_side_is_decided_by_the_name_alone():
    names = [f"module_{i}.py" for i in range(4000)]
    documents = [Document(n, "a") for n in names]
    train, held_out = split(documents)
    assert sorted(d.name for d in train + held_out) == sorted(names)
    assert 0.8 < len(held_out) * HELD_OUT_SHARE / len(names) < 1.2
    assert all(d.held_out == Document(d.name, "other text").held_out for d in documents)
    for d in documents[:50]:  # the rule itself must never change: it would move files across
        assert d.held_out == (int.from_bytes(hashlib.sha256(d.name.encode()).digest()) % 20 == 0)


def test_the_hash_sees_names_texts_and_their_borders():
    one = corpus_hash([Document("a", "bc"), Document("d", "e")])
    others = [
        [Document("a", "bc")],
        [Document("ab", "c"), Document("d", "e")],
        [Document("a", "bc"), Document("d", "f")],
        [Document("d", "e"), Document("a", "bc")],
    ]
    assert one == corpus_hash([Document("a", "bc"), Document("d", "e")])
    assert one not in [corpus_hash(o) for o in others]


def test_the_standard_library_is_there_and_on_both_sides():
    train, held_out = split(read_corpus())
    assert len(train) > 400 and len(held_out) > 15
    assert not any("site-packages" in d.name for d in train + held_out)
