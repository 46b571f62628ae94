from __future__ import annotations

import json
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache

DATABASE = "sequences.sqlite3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with SuffixCache.open(tmp_path / "cache") as cache:
        with cache.request([1, 2, 3]) as request:
            request.extend([4, 5])
        cache.flush()
    return tmp_path / "cache"


def test_stats_read_the_named_or_configured_folder_while_it_is_in_use(program, folder):
    Path("agentspec.toml").write_text(f'[cache]\npath = "{folder}"\n')
    with SuffixCache.open(folder):
        values = json.loads(program("cache", "stats", "--json").output)
    assert values["sequences"] == 1
    lines = dict(re.split(" {2,}", line) for line in program("cache", "stats", "--path", folder).output.splitlines())
    shown = {"cached answers": "1", "tokens in them": "2", "tenants and models": "1"}
    assert shown.items() <= lines.items() and len(lines) == 5, "nothing is wrong with it"


@pytest.mark.parametrize("command", ["stats", "compact"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "give --path FOLDER, or set cache.path"),
        (("--path", "absent"), "no cache at"),
        (("--path", "other"), "no cache at"),
        (("--path", ""), "--path must not be empty"),
    ],
)
def test_commands_refuse_a_missing_cache_and_create_none(program, tmp_path, command, options, says):
    (tmp_path / "other").mkdir()
    result = program("cache", command, *options)
    assert (result.exit_code, says in result.stderr) == (2, True)
    assert not (tmp_path / "absent").exists() and not list((tmp_path / "other").iterdir())


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    with SuffixCache.open(tmp_path / "cache") as cache:
        for number, (tenant, session) in enumerate([("a", "s"), ("a", "t"), ("b", "s")]):
            with cache.request([1], namespace=tenant, session=session) as request:
                request.extend([10 * number, 10 * number + 1])
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("options", "forgotten"),
    [
        (["--session", "s"], 2),
        (["--session", "s", "--tenant", "b"], 1),
        (["--tenant", "a"], 2),
        (["--older-than", "30d"], 0),
        (["--older-than", "0"], 3),
    ],
)
def test_forget_deletes_what_the_options_select(program, conversations, options, forgotten):
    result = program("cache", "forget", "--path", conversations, *options, "--yes", "--json")
    assert json.loads(result.output)["forgotten"] == forgotten
    assert json.loads(program("cache", "stats", "--path", conversations, "--json").output)["sequences"] == 3 - forgotten


def test_forget_asks_first_and_reports_the_count(program, conversations):
    refused = program("cache", "forget", "--path", conversations, "--session", "s")
    assert (refused.exit_code, "cannot be undone" in refused.stderr) == (1, True)
    result = program("cache", "forget", "--path", conversations, "--session", "s", "--tenant", "b", "-y")
    assert result.output.startswith("forgot 1 sequence: session 's', tenant 'b'\n")
    assert "backups" in result.output


def test_forget_fails_while_a_reader_holds_the_deleted_bytes(program, conversations, monkeypatch):
    monkeypatch.setattr("agentspec.cli.cache._ERASURE_SECONDS", 0.0)  # a minute
    database = conversations / DATABASE
    with closing(sqlite3.connect(database, isolation_level=None)) as reader:
        [(row,)] = reader.execute("SELECT tokens FROM sequences WHERE tenant = 'b'").fetchall()
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sequences").fetchall()
        result = program("cache", "forget", "--path", conversations, "--tenant", "b", "--yes", "--json")
        assert (result.exit_code, json.loads(result.stdout)["erased"]) == (1, False)
        assert "waiting" in result.stderr and "deleted, but bytes may still be in" in result.stderr
    # Closing the last connection empties the journal too, which a reader that is killed leaves to the next writer.
    assert program("cache", "compact", "--path", conversations).exit_code == 0
    assert row not in b"".join(file.read_bytes() for file in conversations.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to forget"),
        (["--older-than", "a while"], "such as 30d"),
        (["--text", "x"], "go together"),
        (["--model", "x"], "go together"),
    ],
)
def test_forget_refuses_incomplete_options(program, conversations, options, message):
    result = program("cache", "forget", "--path", conversations, *options, "--yes")
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("mine", marks=pytest.mark.slow)])
def test_forget_finds_a_text_in_any_tokenization(program, tmp_path, default_model, name):
    from agentspec.backends.torch.text.model_text import load_tokenizer
    from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
    from agentspec.types import Namespace

    Path("agentspec.toml").write_text(
        f'[cache]\npath = "{tmp_path / "cache"}"\n[backends.local]\nkind = "torch"\nmodel = "{default_model.folder}"\n'
        '[models.mine]\nbackend = "local"\n'
    )
    tokenizer, key = load_tokenizer(str(default_model.folder))
    codec = TokenizerAdapter(tokenizer)
    outputs = [
        codec.encode("The password is hunter2, of course."),
        [token for letter in "The password is hunter2" for token in codec.encode(letter)],
        codec.encode("The password is a secret."),
    ]
    with SuffixCache.open(tmp_path / "cache") as cache:
        for output in outputs:
            with cache.request([1], namespace=Namespace("t", "m", key)) as request:
                request.extend(output)
    wanted = name if name == "mine" else str(default_model.folder)
    result = program("cache", "forget", "--text", "password is hunter2", "--model", wanted, "-y", "--json")
    assert json.loads(result.output)["forgotten"] == 2, result.stderr


@pytest.fixture
def large(tmp_path: Path) -> Path:
    with SuffixCache.open(tmp_path / "cache") as cache:
        for number in range(100):
            with cache.request([1, 2, 3]) as request:
                request.extend([int(byte) for byte in os.urandom(500 + number)])
    return tmp_path / "cache"


def test_verify(program, large):
    result = program("cache", "verify", "--path", large)
    assert (result.exit_code, result.stdout) == (0, f"ok: {large}\n"), result.stderr
    with closing(sqlite3.connect(large / DATABASE)) as database, database:
        database.execute("UPDATE sequences SET tokens = x'00' WHERE id = 3")
    result = program("cache", "verify", "--path", large, "--json")
    values = json.loads(result.stdout)
    assert result.exit_code == 1 and not values["ok"] and "sequence 3" in values["problems"][0]
    assert "sequence 3" in program("cache", "verify", "--path", large).stdout


def test_compact_shrinks_the_database(program, large):
    with closing(sqlite3.connect(large / DATABASE)) as database, database:
        database.execute("DELETE FROM sequences WHERE id > 10")
    before = sum(file.stat().st_size for file in large.iterdir())
    values = json.loads(program("cache", "compact", "--path", large, "--json").stdout)
    files = sum(file.stat().st_size for file in large.glob(f"{DATABASE}*"))
    assert values["disk_bytes"] < before / 2 and files <= values["disk_bytes"]
    with SuffixCache.open(large) as cache:
        assert cache.stats().sequences == 10
    now = sum(file.stat().st_size for file in large.glob("*.s*"))
    assert program("cache", "compact", "--path", large).stdout == f"{large}: takes {now} bytes now\n"


def test_compact_is_refused_while_a_server_writes(program, large):
    with SuffixCache.open(large, mode="writer"):
        result = program("cache", "compact", "--path", large)
    assert (result.exit_code, f"process {os.getpid()}" in result.stderr) == (1, True)
