"""Prompt sources: containers, forms of rows, turns, what is dropped, duplicates, samples."""

import gzip
import json
import logging
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.options import GenerateSection
from eagle3.traces import sources
from eagle3.traces.prompts import PromptSource, read_prompts

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
OTHER_TOOL = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"y": {"type": "string"}}}}}
LONE = "\ud83d"


def source(path: object, limit: int | None = None, **options) -> PromptSource:
    return PromptSource(GenerateSection(prompts=str(path), **options), limit)


def user(text: object) -> dict:
    return {"role": "user", "content": text}


def assistant(text: object) -> dict:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: object) -> Path:
    """Write JSON lines; a text is a user message with an id of its own."""
    rows = [{"id": f"id-{row}", "messages": [user(row)]} if isinstance(row, str) else row for row in rows]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, *rows: dict) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def asked(path: object, **options) -> list[str]:
    return [conversation.prompt_id(k) for conversation in source(path, **options)
            for k in range(len(conversation.asked))]


def dropped(path: object, **options) -> dict[str, int]:
    return dict(source(path, **options).scan().dropped)


def one(tmp_path: Path, row: object, **options):
    (conversation,) = source(write(tmp_path / "one.jsonl", row), **options)
    return conversation


def error_of(path: object, **options) -> str:
    with pytest.raises(PreconditionError) as caught:
        source(path, **options).scan()
    return str(caught.value)


# --- containers -------------------------------------------------------------------------------------------


def forms() -> dict[str, list[dict]]:
    """Two conversations in all forms of a row."""
    first, second = [("system", "Be brief"), ("user", "Hello 🙂 there"), ("assistant", "Grüß"), ("user", "Go")], "日本"
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    messages = [{"role": role, "content": text} for role, text in first]
    parts = [{"role": role, "content": [{"type": "text", "text": text[:4]}, {"type": "text", "text": text[4:]}]}
             for role, text in first]
    sharegpt = [{"from": names[role], "value": text} for role, text in first]
    more = {"tools": [TOOL, OTHER_TOOL], "level": 3}
    return {
        "messages": [{"messages": messages, **more}, {"messages": [user(second)], "level": 4}],
        "parts": [{"messages": parts, **more}, {"messages": [user([{"type": "text", "text": second}])], "level": 4}],
        "sharegpt": [{"conversations": sharegpt, **more}, {"conversations": [{"from": "human", "value": second}],
                                                         "level": 4}],
        "lmsys": [{"conversation": messages, **more}, {"conversation": [user(second)], "level": 4}],
        "prompt": [{"prompt": messages, **more}, {"prompt": [user(second)], "level": 4}],
        "text tools": [{"messages": messages, **more, "tools": json.dumps([TOOL, OTHER_TOOL])},
                       {"prompt": second, "level": 4}],
        "nulls": [{"id": None, "messages": messages, **more, "prompt": None, "x": None},
                  {"prompt": second, "level": 4, "tools": []}],
    }


def containers(folder: Path, rows: list[dict]) -> list[Path]:
    """Write rows into every container."""
    import datasets

    folder.mkdir()
    names = {name: None for row in rows for name in row}
    filled = [names | row for row in rows]
    lines = "\n".join(map(json.dumps, rows))
    array = json.dumps(rows, ensure_ascii=False)
    (folder / "blank.jsonl").write_text(f"\n{lines}\n \t\n\n".replace("\n", "\r\n"))
    (folder / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(
        json.dumps(row, ensure_ascii=False) for row in rows).encode())
    (folder / "zipped.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "array.json").write_text(array)
    (folder / "indented.json").write_text("\ufeff\n " + json.dumps(rows, indent=2) + "\n\n")
    (folder / "zipped.json.gz").write_bytes(gzip.compress(array.encode()))
    write_parquet(folder / "rows.parquet", *filled)
    dataset = datasets.Dataset.from_list(filled)
    dataset.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(folder / "splits")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, list[Path]]:
    folder = tmp_path_factory.mktemp("containers")
    return {form: containers(folder / form.replace(" ", "-"), rows) for form, rows in forms().items()}


def test_every_container_and_form_gives_the_same_conversations(written):
    expected = None
    for form, paths in written.items():
        assert len(paths) == 9
        for path in paths:
            found = [(each.id, each.messages, each.tools, each.asked) for each in source(path)]
            expected = expected or found
            assert found == expected, (form, path)
    (first, second) = expected
    assert first[1:] == (forms()["messages"][0]["messages"], [TOOL, OTHER_TOOL], (4,))
    assert second[1:] == ([user("日本")], [], (1,))


def test_a_split_is_chosen_and_a_missing_one_named(written):
    splits = next(path for path in written["messages"] if path.name == "splits")
    assert len(list(source(splits, prompt_split="test"))) == 1
    message = error_of(splits, prompt_split="validation")
    assert "train, test" in message and "--prompt-split" in message


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path, caplog):
    caplog.set_level(logging.INFO, "eagle3")
    folder = tmp_path / "many"
    write(folder / "b.jsonl", "third")
    write(folder / "a.jsonl", "first", "second")
    (folder / "c.json").write_text(json.dumps([{"id": "fourth", "prompt": "x"}]))
    write_parquet(folder / "d.parquet", {"id": "fifth", "prompt": "x"})
    (folder / "README.md").write_text("no rows")
    (folder / ".hidden.jsonl").write_text("no rows")
    found = list(source(folder))
    assert [each.id for each in found] == ["id-first", "id-second", "id-third", "fourth", "fifth"]
    assert [each.source for each in found] == ["a.jsonl", "a.jsonl", "b.jsonl", "c.json", "d.parquet"]
    assert "1 other entries are not read, such as README.md" in caplog.text
    write(folder / "e.jsonl", {"id": "id-second", "prompt": "other"})
    assert "a.jsonl line 2" in (message := error_of(folder)) and "e.jsonl line 1" in message


def test_columns_that_others_have_count_as_absent_and_types_are_plain(tmp_path):
    import pyarrow
    import pyarrow.parquet

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"messages": [user("a") | {"name": "Ann"}], "id": None, "extra": {"x": 1, "y": None}, "tools": [TOOL]},
        {"messages": [user("b"), {"role": "assistant", "content": None, "tool_calls": [call]},
                      {"role": "tool", "content": "1", "tool_call_id": "c"}], "id": 5, "extra": {"x": None, "y": 2}},
    ]
    lean = [{"messages": rows[0]["messages"], "extra": {"x": 1}, "tools": [TOOL]}, {**rows[1], "extra": {"y": 2}}]
    message = pyarrow.struct([
        ("role", pyarrow.dictionary(pyarrow.int8(), pyarrow.string())), ("content", pyarrow.large_string()),
        ("name", pyarrow.string()), ("tool_call_id", pyarrow.string()),
        ("tool_calls", pyarrow.string()),
    ])
    schema = pyarrow.schema([("messages", pyarrow.list_(message)), ("id", pyarrow.int32()),
                             ("extra", pyarrow.struct([("x", pyarrow.int8()), ("y", pyarrow.int64())]))])
    as_text = json.loads(json.dumps(rows))
    as_text[1]["messages"][1]["tool_calls"] = json.dumps([call])
    tools = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array([json.dumps([TOOL]), None]))
    table = pyarrow.Table.from_pylist(as_text, schema).append_column("tools", tools)
    pyarrow.parquet.write_table(table, tmp_path / "typed.parquet")
    found = list(source(tmp_path / "typed.parquet"))
    expected = list(source(write(tmp_path / "lean.jsonl", *lean)))
    assert [(each.id, each.messages) for each in found] == [(each.id, each.messages) for each in expected]
    assert (found[1].id, found[0].tools, found[1].tools) == ("5", [TOOL], [])
    assert found[1].messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert found[0].messages == [user("a") | {"name": "Ann"}]


def test_mixed_types_that_datasets_holds_as_json_are_read(tmp_path):
    import datasets

    rows = [{"id": "a", "prompt": "x", "tools": [TOOL]},
            {"id": "b", "prompt": "y", "tools": [{"type": "function", "function": {"name": "g", "parameters": 5}}]}]
    dataset = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert "Json" in str(dataset.features)
    dataset.save_to_disk(tmp_path / "saved")
    assert [each.tools for each in source(tmp_path / "saved")] == [row["tools"] for row in rows]


def test_the_hub_without_a_network_is_an_error_that_says_what_was_tried(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("some-org/absent", "some-org/absent:config"):
        with pytest.raises(PreconditionError) as caught:
            source(name)
        message = str(caught.value)
        for word in (name, "no such file or folder", "local cache", "split train", "ConnectionError", "--prompts"):
            assert word in message, word


def test_a_dataset_name_is_read_from_the_local_cache(monkeypatch, tmp_path):
    import datasets

    write(tmp_path / "name/train.jsonl", "a", "b")
    write(tmp_path / "name/test.jsonl", "c")
    builder = datasets.load_dataset_builder(str(tmp_path / "name"), cache_dir=str(tmp_path / "build"))
    builder.download_and_prepare(str(tmp_path / "cache/org___name/default/0.0.0/0a1b"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "org/name:default"):
        found = source(name)
        assert found.scan().rows == 2
        assert [(each.id, each.source) for each in found] == [("id-a", "org/name"), ("id-b", "org/name")]
    assert asked("org/name", prompt_split="test") == ["id-c#0"]
    with pytest.raises(PreconditionError, match="validation"):
        source("org/name", prompt_split="validation")
    with pytest.raises(PreconditionError, match="org/name:other"):
        source("org/name:other")


def test_names_that_are_nothing(tmp_path):
    for name in (tmp_path / "absent.jsonl", "absent.jsonl", "org/absent.jsonl", "nothing", "/a/b", "a/b/c"):
        with pytest.raises(PreconditionError, match="the prompts file is missing"):
            source(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PreconditionError, match="the folder holds no prompts"):
        source(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PreconditionError, match="read twice"):
        source(tmp_path / "pipe")


def test_damaged_files_are_named(tmp_path):
    good = b'{"prompt": "x"}\n' * 2
    zipped = gzip.compress(random.Random(0).randbytes(2000).hex().encode())
    files = {
        "cut.jsonl.gz": (zipped[:-30], "cut.jsonl.gz"), "no.jsonl.gz": (good, "no.jsonl.gz"),
        "no.parquet": (good, "no.parquet"), "latin.jsonl": (good + b'{"prompt": "\xe9"}\n', "line 3"),
        "latin.json": (b'[{"prompt": "x"}, {"prompt": "\xe9"}]', "latin.json row"),
        "utf16.jsonl": (good.decode().encode("utf-16"), "line 1"),
        "torn.jsonl": (good + b'{"prompt": "', "line 3"), "deep.jsonl": (good + b"{\"a\":" + b"[" * 100_000, "line 3"),
        "deep.json": (b"[" + good[:-1].replace(b"\n", b",") + b",{\"a\":" + b"[" * 100_000, "row 3"),
        "words.txt": (b"What is this?\n", "line 1"),
    }
    for name, (data, place) in files.items():
        (tmp_path / name).write_bytes(data)
        assert place in error_of(tmp_path / name), name
    nested = '{"prompt": "x", "more": ' + "[" * 700 + "]" * 700 + "}"  # JSON can be read, but little done with it
    assert "line 1" in error_of(write(tmp_path / "nested.jsonl", json.loads(nested)))
    for text in ("", "[]", "\n", " [\n] "):
        (tmp_path / "none.json").write_text(text)
        assert "no prompts" in error_of(tmp_path / "none.json")
    write_parquet(tmp_path / "rows.parquet", *({"prompt": str(i)} for i in range(1000)))
    damaged = bytearray((tmp_path / "rows.parquet").read_bytes())
    damaged[4:40] = bytes(36)
    (tmp_path / "rows.parquet").write_bytes(damaged)
    assert "rows.parquet" in error_of(tmp_path / "rows.parquet")


# --- one JSON array, as a stream --------------------------------------------------------------------------


def random_text(chance: random.Random) -> str:
    pieces = ['"', "\\", "]}", '",', "\n", "\x00", "é", "日本語", "🙂", "\u2028", "\\u00", "\ufeff", "{[", "words "]
    return "".join(chance.choices(pieces, k=chance.randrange(12)))


def random_value(chance: random.Random, depth: int = 0) -> object:
    kind = chance.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [random_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 6:
        return {random_text(chance): random_value(chance, depth + 1) for _ in range(chance.randrange(4))}
    return (random_text(chance), None, True, chance.choice([0, -12, 10**20]), chance.choice([1.5e-7, -2e30, 0.0]))[kind]


@pytest.mark.parametrize("seed", range(60))
def test_an_array_is_read_alike_wherever_its_chunks_end(tmp_path, monkeypatch, seed):
    chance = random.Random(seed)
    rows = [{"n": i, "value": random_value(chance), "text": random_text(chance)} for i in range(chance.randrange(1, 9))]
    text = json.dumps(rows, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1, "\t"]))
    path = tmp_path / "rows.json"
    path.write_text(chance.choice(["", " ", "\ufeff"]) + text + chance.choice(["", "\n "]))
    for size in (*chance.sample(range(1, 40), 4), 10**6):
        monkeypatch.setattr(sources, "_CHUNK", size)
        found = list(sources.open_rows(str(path), "train")())
        assert [row for _, _, row in found] == rows, size
        assert [place for place, _, _ in found] == [f"{path} row {i}" for i in range(1, len(rows) + 1)]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[{"prompt": "x"}', "row 1"), ('[{"prompt": "x"},', "row 2"), ('[{"prompt": "x"},]', "row 2"),
        ('[{"prompt": "x"} {"prompt": "y"}]', "row 1"), ('[{"prompt": "x"}] x', "after row 1"),
        ('[{"prompt": "x"}, 5]', "row 2"), ('[{"prompt": "x"}, ["y"]]', "row 2"), ('[{"a": tru}]', "row 1"),
        ('[{"prompt": "x"}, {"prompt": "a\nb"}]', "row 2"), ('[{"prompt": "x"}, {"prompt": "\\q"}]', "row 2"),
        ('[{"prompt": "x"}, {"prompt": "\\u12"}]', "row 2"), ('[{"prompt": "x"}, {"prompt" "y"}]', "row 2"),
        ('[{"prompt": "x"}, {"prompt": "y', "row 2"), ("[", "row 1"), ("[x]", "row 1"), ("[,]", "row 1"),
        ('[{"prompt": "x"}, {"prompt": 1.2.3}]', "row 2"), ('[{"prompt": "x"}, {}, {"prompt": "y"}]', "row 2"),
    ],
)
def test_a_broken_array_names_its_row(tmp_path, monkeypatch, text, place):
    path = tmp_path / "p.json"
    path.write_text(text)
    for size in (1, 3, 7, 10**6):
        monkeypatch.setattr(sources, "_CHUNK", size)
        assert f"{path} {place}" in error_of(path)


def test_a_broken_row_is_found_without_reading_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHUNK", 100)
    reads = []
    more = sources._Text._more
    monkeypatch.setattr(sources._Text, "_more", lambda self, size: reads.append(size) or more(self, size))
    path = tmp_path / "p.json"
    path.write_text('[{"prompt": "x"}, {"prompt": y}' + ', {"prompt": "z"}' * 5000 + "]")
    assert "row 2" in error_of(path)
    assert sum(reads) < 1000


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_a_long_source_is_never_held(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "_CHUNK", 1 << 16)
    monkeypatch.setattr(sources, "_BATCH_ROWS", 64)
    count = 600
    rows = [{"id": f"row-{i}", "prompt": f"{i} " + "words " * 1000} for i in range(count)]
    path = tmp_path / f"p.{kind}"
    if kind == "parquet":
        write_parquet(path, *rows)
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    del rows
    found = source(path)
    next(iter(sources.open_rows(str(path), "train")()))  # whatever is imported is no row
    tracemalloc.start()
    assert found.scan().conversations == count
    assert sum(1 for _ in found) == count
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2e6  # the file has 3.6 MB
    assert held < 1e5


# --- rows -------------------------------------------------------------------------------------------------


def test_different_later_messages_give_different_ids(tmp_path):
    def row(last: str) -> dict:
        return {"messages": [user("Same"), assistant("Yes"), user(last)]}

    first, second = asked(write(tmp_path / "p.jsonl", row("one"), row("two")))
    assert first != second and first.endswith("#1")
    assert dropped(write(tmp_path / "p.jsonl", row("one"), row("one"))) == {"repeated row": 1}


def test_a_row_names_its_own_source_and_id(tmp_path):
    path = write(tmp_path / "p.jsonl", {"id": 7, "prompt": "a", "source": "mine"}, {"id": "8", "prompt": "a"})
    assert [(each.id, each.source) for each in source(path)] == [("7", "mine"), ("8", "p.jsonl")]


SPECBENCH = [{"question_id": 81 + i, "category": "writing", "turns": [f"write {i}", f"again {i}"]} for i in range(3)]
MTBENCH = [{"category": "writing", "prompt": [f"write {i}", f"again {i}"], "reference": [], "prompt_id": i}
           for i in range(3)]


@pytest.mark.parametrize(("rows", "ids"), [(SPECBENCH, ["81", "82", "83"]), (MTBENCH, ["0", "1", "2"])])
def test_user_turns_of_benchmarks_are_a_conversation(tmp_path, rows, ids):
    from eagle3.traces.prompts import read_prompts

    path = write(tmp_path / "p.jsonl", *rows)
    found = list(source(path))  # whatever --turns says: there is no reply in between to go on from
    assert [each.id for each in found] == ids
    for i, each in enumerate(found):
        assert each.asked == (1, 3) and [each.prompt_id(0), each.prompt_id(1)] == [f"{ids[i]}#0", f"{ids[i]}#1"]
        assert [message["content"] for message in each.messages] == [f"write {i}", None, f"again {i}"]
    asked = read_prompts(path)  # of stage 06: replies to go on from are yet to be made
    assert [(each.id, each.messages) for each in asked] == [
        (f"{name}#0", [user(f"write {i}")]) for i, name in enumerate(ids)]


def test_the_name_of_a_question_is_an_id_of_user_turns_only(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt_id": "same", "messages": [user("a")]},
                 {"prompt_id": "same", "messages": [user("b")]})
    assert len({each.id for each in source(path)} - {"same"}) == 2
    with pytest.raises(PreconditionError, match="line 2: id"):
        source(write(tmp_path / "p.jsonl", SPECBENCH[0], SPECBENCH[0] | {"turns": ["other"]})).scan()


def test_messages_as_json_text_are_read(tmp_path):
    path = write(tmp_path / "p.jsonl", {"id": "a", "messages": json.dumps([user("hello")])},
                 {"id": "b", "conversations": json.dumps([{"from": "human", "value": "hello"}])})
    assert [each.messages for each in source(path)] == [[user("hello")]] * 2


def test_only_a_line_feed_ends_a_row(tmp_path):
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0cb\x0bc\x1ed", "plain"]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "prompt": text}, ensure_ascii=False) + "\n"
                            for i, text in enumerate(texts)), encoding="utf-8")
    assert [each.messages[0]["content"] for each in source(path)] == texts


def test_numbers_that_json_does_not_have_are_not_asked(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "tools": [{"x": NaN}]}\n{"prompt": "b"}\n')
    assert source(path).scan().dropped == {"not a number": 1}


MALFORMED = [
    ({"messages": [{"role": "my_model", "content": "x"}]}, ["messages[0].role", "my_model", "assistant", "--role-map"]),
    ({"messages": [{"role": 5, "content": "x"}]}, ["messages[0].role", "int"]),
    ({"messages": [{"role": "human", "content": "x"}]}, ["messages[0].role", "human"]),
    ({"messages": [{"content": "x"}]}, ["messages[0].role", "NoneType"]),
    ({"conversations": [{"from": "bing", "value": "x"}]}, ["conversations[0].from", "bing", "human", "--role-map"]),
    ({"conversations": [{"from": "human", "text": "x"}]}, ["conversations[0].value", "NoneType"]),
    ({"messages": [user("x"), user(5)]}, ["messages[1].content", "int"]),
    ({"messages": [user(None)]}, ["messages[0].content", "NoneType"]),
    ({"messages": [user({"text": "x"})]}, ["messages[0].content", "an object with ['text']"]),
    ({"messages": [user([{"type": "poem"}])]}, ["messages[0].content[0]", "text"]),
    ({"messages": [user([{"type": "text", "text": None}])]}, ["messages[0].content[0]"]),
    ({"messages": [user(["x"])]}, ["messages[0].content[0]", "str"]),
    ({"messages": [user("x") | {"name": 5}]}, ["messages[0].name", "int"]),
    ({"messages": [user("x"), assistant("y") | {"tool_calls": "{"}]}, ["messages[1].tool_calls", "list"]),
    ({"messages": ["x"]}, ["messages[0]", "str"]),
    ({"messages": "x"}, ["messages", "str"]),
    ({"prompt": ["x", 5]}, ["prompt[0]", "str"]),
    ({"prompt": ["x"], "prompt_id": 1.5}, ["prompt_id", "1.5"]),
    ({"turns": 5}, ["turns", "int"]),
    ({"messages": "[{"}, ["messages", "JSON text"]),
    ({"messages": [{"role": [], "content": "x"}]}, ["messages[0].role", "list"]),
    ({"prompt": 5}, ["prompt", "text or a list of messages", "int"]),
    ({"text": "x"}, ["messages or conversations", "prompt", "['text']"]),
    ({"id": 1.5, "prompt": "x"}, ["id", "1.5"]),
    ({"id": True, "prompt": "x"}, ["id", "True"]),
    ({"id": "", "prompt": "x"}, ["id", "''"]),
    ({"prompt": "x", "tools": "f"}, ["tools", "JSON"]),
    ({"prompt": "x", "tools": [5]}, ["tools"]),
    ({"prompt": "x", "tools": {"a": 1}}, ["tools", "an object with ['a']"]),
]


@pytest.mark.parametrize(("row", "words"), [*MALFORMED, ([], ["line 2"]), ("x", ["line 2"]), (None, ["line 2"])])
def test_a_malformed_row_is_named_with_its_field(tmp_path, row, words):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + json.dumps(row))
    message = error_of(path)
    for word in [*words, "p.jsonl line 2"]:
        assert word in message


@pytest.mark.parametrize("turns", ["last", "all"])
def test_a_malformed_row_of_parquet_is_named_by_its_number(tmp_path, turns):
    rows = [{"messages": [user("a")]}] * 300 + [{"messages": [user("b"), assistant("c") | {"role": "who"}]}]
    message = error_of(write_parquet(tmp_path / "p.parquet", *rows), turns=turns)
    assert "p.parquet row 301: messages[1].role" in message


def test_roles_are_mapped_with_one_warning_each(tmp_path, caplog):
    rows = [{"id": i, "conversations": [{"from": "bing", "value": "a"}, {"from": "human", "value": "b"},
                                        {"from": "observation", "value": "c"}, {"from": "who", "value": "d"}]}
            for i in range(3)]
    found = source(write(tmp_path / "p.jsonl", *rows), role_map={"bing": "system", "who": "user"})
    found.scan()
    roles = [[message["role"] for message in each.messages] for each in [*found, *found]]
    assert roles == [["system", "user", "tool", "user"]] * 6
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "role 'bing' is taken for 'system', as --role-map says", "role 'who' is taken for 'user', as --role-map says"]
    with pytest.raises(UsageError, match="--role-map"):
        source(tmp_path / "p.jsonl", role_map={"bing": "model"})


def test_a_system_prompt_beside_the_messages_comes_first(tmp_path):
    system = {"role": "system", "content": "Be brief"}
    inside = one(tmp_path, {"messages": [system, user("a")], "level": 1})
    assert one(tmp_path, {"system": "Be brief", "prompt": "a", "level": 1}) == inside
    sharegpt = {"conversations": [{"from": "human", "value": "a"}], "level": 1}
    assert one(tmp_path, {"system": "Be brief"} | sharegpt) == inside
    both = one(tmp_path, {"system": "Other", "messages": [system, user("a")]})
    assert both.messages == [system, user("a")]
    for nothing in ("", " ", None, 5):
        assert one(tmp_path, {"system": nothing, "prompt": "a"}).messages == [user("a")]


def test_sharegpt_roles(tmp_path):
    names = ["system", "human", "gpt", "tool", "function", "observation", "user", "assistant", "human"]
    row = {"conversations": [{"from": name, "value": "x"} for name in names]}
    assert [message["role"] for message in one(tmp_path, row).messages] == [
        "system", "user", "assistant", "tool", "tool", "tool", "user", "assistant", "user"]


def test_tools_and_tool_calls_are_kept_in_the_openai_form(tmp_path):
    def call(arguments: object) -> dict:
        return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}

    def row(tools: object, calls: object) -> dict:
        return {"tools": tools, "messages": [user("a"), assistant(None) | {"tool_calls": calls},
                                             {"role": "tool", "content": "1", "tool_call_id": "c"}]}

    rows = [row([TOOL], [call('{"x": 1}')]), row(json.dumps([TOOL]), json.dumps([call('{"x": 1}')])),
            row([json.dumps(TOOL)], [call({"x": 1})])]
    found = [one(tmp_path, each) for each in rows]
    assert found[0].tools == [TOOL]
    assert found[0].messages == rows[0]["messages"]
    assert found[0] == found[1] == found[2]
    assert one(tmp_path, {"tools": [], "prompt": "x"}) == one(tmp_path, {"tools": "[]", "prompt": "x"})
    assert one(tmp_path, {"messages": [user("a") | {"tool_calls": []}]}).messages == [user("a")]
    assert one(tmp_path, {"prompt": "x", "tools": "null"}).tools == []


def test_a_message_keeps_only_what_a_server_knows(tmp_path):
    row = {"messages": [user("a") | {"weight": 1, "name": "Ann"}, assistant("b") | {"reasoning_content": "r"},
                        user("c")]}
    assert one(tmp_path, row).messages == [
        user("a") | {"name": "Ann"}, assistant("b") | {"reasoning_content": "r"}, user("c")]


# --- turns ------------------------------------------------------------------------------------------------

S, U, A, T = {"role": "system", "content": "s"}, user("u"), assistant("a"), {"role": "tool", "content": "t"}


@pytest.mark.parametrize(
    ("messages", "last", "every"),
    [
        ([U], 1, [1]),
        ([S, U], 2, [2]),
        ([U, S], 2, [2]),
        ([U, A], 1, [1]),
        ([U, A, U], 3, [1, 3]),
        ([S, U, A, U, A], 4, [2, 4]),
        ([U, A, T, A, U], 5, [3, 5]),  # results answer the call of the row and no other
        ([U, A, T, T, A], 4, [4]),
        ([U, A, T], 3, [3]),
        ([U, A, A], 1, [1]),  # nothing asks for a second reply
        ([U, A, A, U], 4, [1, 4]),
        ([A, U], 2, [2]),  # nor for one before the first question
        ([S, A, U, A], 3, [3]),
        ([U, A, S], 1, [1]),
        ([U, A, S, A, U], 5, [1, 5]),
        ([U, S, A], 2, [2]),
    ],
)
def test_which_replies_are_asked(tmp_path, messages, last, every):
    row = {"id": "q", "messages": messages}
    final = one(tmp_path, row)
    assert (final.asked, final.messages) == ((last,), messages[:last])
    whole = one(tmp_path, row, turns="all")
    assert (list(whole.asked), whole.messages) == (every, messages[:last])
    replies = [sum(message is A for message in messages[:end]) for end in every]
    assert [whole.prompt_id(k) for k in range(len(every))] == [f"q#{number}" for number in replies]
    assert final.prompt_id(0) == whole.prompt_id(-1)
    assert final.id == whole.id
    counts = source(tmp_path / "one.jsonl", turns="all").scan()
    assert (counts.replies, counts.characters) == (len(every), sum(every))


@pytest.mark.parametrize("messages", [[A], [S], [S, A], [S, A, A]])
def test_a_row_that_asks_nothing_is_dropped(tmp_path, messages):
    path = write(tmp_path / "p.jsonl", {"messages": messages}, "good")
    assert dropped(path) == dropped(path, turns="all") == {"nothing asks for a reply": 1}


def test_the_last_turn_is_asked_and_earlier_reasoning_is_left_in_the_prompt(tmp_path):
    turns = [user("a"), assistant("b") | {"reasoning_content": "r1"}, user("c"), assistant("d") | {"reasoning": "r2"}]
    conversation = one(tmp_path, {"id": 7, "messages": turns})
    assert conversation.prompt_id(0) == "7#1"
    assert conversation.messages == turns[:3]


# --- dropped rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:x"}}], "image content"),
        ([{"type": "text", "text": "a"}, {"type": "image"}], "image content"),
        ([{"type": "input_image"}], "image content"),
        ([{"type": "input_audio", "input_audio": {}}], "audio content"),
        ([{"type": "video_url"}], "video content"),
        ([{"type": "file", "file": {}}], "file content"),
    ],
)
def test_media_are_dropped_and_counted_with_a_place(tmp_path, content, reason):
    path = write(tmp_path / "p.jsonl", "good", {"messages": [user("a"), assistant("b"), user(content)]})
    counts = source(path).scan()
    assert (counts.rows, counts.conversations, counts.dropped) == (2, 1, {reason: 1})
    assert "p.jsonl line 2: messages[2].content[" in counts.examples[reason]
    assert asked(path) == ["id-good#0"]


def test_a_row_with_a_picture_beside_its_messages_is_dropped(tmp_path):
    rows = [{"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}]},
            {"images": [{"bytes": "x"}], "prompt": "What?"}, {"image": None, "images": [], "prompt": "text only"}]
    assert dropped(write(tmp_path / "p.jsonl", *rows)) == {"image content": 2}


def test_lone_surrogates_are_dropped_wherever_they_would_be_sent(tmp_path):
    fine = ["🙂", "\x00", "\\ud83d", "日本", "a\u2028b"]
    bad = [{"prompt": LONE}, {"messages": [user("a"), assistant(f"x{LONE}y"), user("b")]}, {"id": LONE, "prompt": "c"},
           {"prompt": "d", "source": LONE}, {"prompt": "e", "tools": [{"function": {"name": LONE}}]},
           {"messages": [user("f") | {"name": LONE}]}, {"prompt": "g", "tools": [{"function": {LONE: "é"}}]}]
    path = write(tmp_path / "p.jsonl", *fine, *bad)
    counts = source(path).scan()
    assert (counts.conversations, counts.dropped) == (len(fine), {"lone surrogate": len(bad)})
    assert f"line {len(fine) + 1}" in counts.examples["lone surrogate"]
    json.dumps(counts.to_dict(), ensure_ascii=False).encode()
    assert [each.messages[0]["content"] for each in source(path)] == fine
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes(b'{"prompt": "\xed\xa0\xbd"}\n{"prompt": "fine"}\n')  # as UTF-8 that encodes surrogates
    assert dropped(raw) == {"lone surrogate": 1}
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": LONE}, {"prompt": "fine"}]))
    assert dropped(tmp_path / "p.json") == {"lone surrogate": 1}
    assert len(asked(write(tmp_path / "p.jsonl", {"prompt": "a", "note": LONE}))) == 1  # is not sent


def test_empty_prompts_are_dropped(tmp_path):
    bad = [{"prompt": ""}, {"prompt": " \n\t"}, {"messages": []}, {"messages": [user([])]},
           {"messages": [user("a"), assistant("b"), user(" ")]}, {"messages": [S, user("")]}]
    path = write(tmp_path / "p.jsonl", *bad, "good")
    assert dropped(path) == {"empty prompt": len(bad)}
    row = {"id": "q", "messages": [user(""), assistant("b"), user("c")]}
    assert asked(write(tmp_path / "p.jsonl", row)) == ["q#1"]
    assert dropped(write(tmp_path / "p.jsonl", row, "good"), turns="all") == {"empty prompt": 1}
    called = {"messages": [user("a"), assistant("b"), {"role": "tool", "content": ""}]}
    assert len(asked(write(tmp_path / "p.jsonl", called))) == 1


def test_nothing_left_to_ask_is_an_error_with_the_reasons(tmp_path):
    message = error_of(write(tmp_path / "p.jsonl", {"prompt": ""}, {"image": "x", "prompt": "a"}, {"prompt": " "}))
    assert "no prompts" in message and "2 empty prompt" in message and "1 image content" in message


# --- duplicates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [{"id": "q", "prompt": "c"}, {"id": "q", "prompt": "a"}])
def test_the_same_given_id_twice_names_both_lines(tmp_path, second):
    path = write(tmp_path / "p.jsonl", {"id": "q", "prompt": "a"}, {"prompt": "b"}, second)
    message = error_of(path)
    assert "p.jsonl line 3: id" in message and "'q', as in" in message and "p.jsonl line 1" in message
    assert error_of(path, sample=1) == message


def test_numbers_and_texts_are_the_same_id(tmp_path):
    assert "line 2: id" in error_of(write(tmp_path / "p.jsonl", {"id": 7, "prompt": "a"}, {"id": "7", "prompt": "b"}))


def test_ids_that_only_share_their_hash_are_not_taken_for_one(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3.traces.prompts.hash64", len)
    assert asked(write(tmp_path / "p.jsonl", "aa", "bb")) == ["id-aa#0", "id-bb#0"]


def test_rows_or_prompts_are_asked_once(tmp_path):
    rows = [{"prompt": "a"}, {"messages": [user("a")]}, {"prompt": "a", "level": 1}, {"id": "x", "prompt": "a"},
            {"prompt": "a", "tools": [TOOL]}, {"id": "y", "messages": [user("a"), assistant("b")]}]
    path = write(tmp_path / "p.jsonl", *rows)
    assert dropped(path) == {"repeated row": 1}
    counts = source(path, deduplicate="prompts").scan()
    assert counts.dropped == {"repeated prompt": 4}
    assert "p.jsonl line 2" in counts.examples["repeated prompt"]
    assert [bool(each.tools) for each in source(path, deduplicate="prompts")] == [False, True]


def test_equal_prompts_under_one_id_are_one_prompt_and_others_an_error(tmp_path):
    path = write(tmp_path / "p.jsonl", {"id": "q", "prompt": "a"}, {"id": "q", "prompt": "a"})
    assert dropped(path, deduplicate="prompts") == {"repeated prompt": 1}
    message = error_of(write(path, {"id": "q", "prompt": "a"}, {"id": "q", "prompt": "b"}), deduplicate="prompts")
    assert "line 2" in message and "line 1" in message


def test_replies_that_are_generated_anew_do_not_tell_prompts_apart(tmp_path):
    rows = [{"messages": [user("a"), assistant(text), user("b")]} for text in ("one", "two")]
    path = write(tmp_path / "p.jsonl", *rows, {"messages": [user("a"), user("b")]})
    assert dropped(path, turns="all", deduplicate="prompts") == {"repeated prompt": 1}
    assert dropped(path, turns="last", deduplicate="prompts") == {}


# --- the sample -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deduplicate", ["rows", "prompts"])
def test_a_sample_is_the_same_whatever_the_order(tmp_path, deduplicate):
    rows = [{"id": f"row {i}", "prompt": f"prompt {i // 2 if deduplicate == 'prompts' else i}"} for i in range(400)]
    chosen = []
    for seed in range(4):
        random.Random(seed).shuffle(rows)
        found = source(write(tmp_path / "p.jsonl", *rows), sample=30, deduplicate=deduplicate)
        kept = list(found)
        assert [row["id"] for row in rows if row["id"] in {each.id for each in kept}] == [each.id for each in kept]
        chosen.append({each.messages[0]["content"] for each in kept})
    assert len(chosen[0]) == 30
    assert chosen == chosen[:1] * 4


def test_a_sample_depends_on_its_seed_grows_with_its_size_and_is_counted(tmp_path):
    path = write(tmp_path / "p.jsonl", *(f"p{i}" for i in range(300)), {"prompt": ""})
    small, large, other = (set(asked(path, **options)) for options in (
        {"sample": 20}, {"sample": 50}, {"sample": 20, "sample_seed": 1}))
    assert len(small) == len(other) == 20 and small != other
    assert small < large
    counts = source(path, sample=20).scan()
    assert (counts.rows, counts.conversations, counts.replies) == (301, 20, 20)
    assert counts.characters == sum(len(name) - len("id-#0") for name in small)
    assert counts.dropped == {"not in the sample": 280, "empty prompt": 1}
    assert len(asked(path, sample=1000)) == 300
    even = sum(int(name[4:-2]) < 150 for name in large)
    assert 10 < even < 40


# --- passes -----------------------------------------------------------------------------------------------


def test_it_can_be_read_any_number_of_times_also_at_once(tmp_path):
    found = source(write(tmp_path / "p.jsonl", *"abcd", {"prompt": ""}), sample=3)
    first = list(found)
    assert len(first) == 3
    assert [pair[0] == pair[1] for pair in zip(found, found, strict=True)] == [True] * 3
    assert list(found) == first
    assert found.scan() == found.scan()


def test_a_limit_takes_the_first_rows(tmp_path):
    path = write(tmp_path / "p.jsonl", "a", {"prompt": ""}, "b", {"bad": 1})
    assert asked(path, limit=3) == ["id-a#0", "id-b#0"]
    assert asked(path, limit=2) == ["id-a#0"]


def test_rows_appended_later_are_left_out_and_missing_ones_noticed(tmp_path):
    path = write(tmp_path / "p.jsonl", "a", "b")
    found = source(path)
    found.scan()
    write(path, "a", "b", "c")
    assert [each.id for each in found] == ["id-a", "id-b"]
    for rows in (["a"], ["a", {"prompt": ""}]):
        write(path, *rows)
        with pytest.raises(PreconditionError, match="changed while they were read"):
            list(found)


def test_a_scan_can_be_stopped(tmp_path):
    path = write(tmp_path / "p.jsonl", *(f"p{i}" for i in range(1000)))
    looks = []
    source(path).scan(lambda: looks.append(1))
    assert len(looks) == 4

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source(path).scan(stop)


def test_counts_for_the_manifest_and_the_log(tmp_path):
    path = write(tmp_path / "p.jsonl", "a", {"id": 1, "messages": [user("bc"), assistant("d"), user("e")]},
                 {"prompt": ""}, {"prompt": " "}, {"image": "x", "prompt": "a"})
    counts = source(path, turns="all").scan()
    assert counts.to_dict() == {
        "rows": 5, "conversations": 2, "replies": 3, "characters": 1 + 2 + 4,
        "dropped": {"empty prompt": {"rows": 2, "example": f"{path} line 3: message 1 of 1 is empty"},
                    "image content": {"rows": 1, "example": f"{path} line 5: field image"}},
    }
    assert counts.line() == (
        f"5 rows: 2 conversations with 3 replies to ask; dropped: 2 empty prompt (such as {path} line 3: message 1 of "
        f"1 is empty); 1 image content (such as {path} line 5: field image)")
    assert source(write(path, "a")).scan().line() == "1 rows: 1 conversations with 1 replies to ask; dropped: none"


# --- a list of prompts ------------------------------------------------------------------------------------


def test_a_list_of_prompts_holds_the_last_reply_of_each_row(tmp_path, caplog):
    caplog.set_level(logging.INFO, "eagle3")
    rows = [{"id": "a", "messages": [user("x"), assistant("y"), user("z")], "tools": [TOOL]}, {"prompt": "p"},
            {"prompt": "p"}, {"id": "b", "messages": [user("q"), assistant("r")], "source": "s"}]
    path = write(tmp_path / "p.jsonl", *rows)
    found = read_prompts(path)
    assert [prompt.id[-2:] for prompt in found] == ["#1", "#0", "#0"]
    assert (found[0].id, found[0].messages, found[0].tools, found[0].source) == (
        "a#1", rows[0]["messages"], [TOOL], "p.jsonl")
    assert (found[2].id, found[2].messages, found[2].source) == ("b#0", [user("q")], "s")
    assert "1 repeated row" in caplog.text
    assert [prompt.id for prompt in read_prompts(path, 1)] == ["a#1"]
    with pytest.raises(PreconditionError, match="missing"):
        read_prompts(tmp_path / "nowhere.jsonl")
