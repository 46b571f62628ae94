from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa

from agentspec.backends.torch.text.model_text import ModelText
from agentspec.cache import SuffixCache
from agentspec.cache.storage.codec import decode
from agentspec.cache.tokens import SequenceRecord
from tests.recordings.conftest import SECRETS, claude_code

MESSAGES = [{"role": "user", "content": "Count to five, in words."}]


def chat(*answers: str) -> str:
    """Lines of recorded conversations."""
    said = ([*MESSAGES, {"role": "assistant", "content": answer}] for answer in answers)
    return "".join(json.dumps({"messages": messages}) + "\n" for messages in said)


def stored(folder: Path) -> list[SequenceRecord]:
    engine = sa.create_engine(f"sqlite:///{folder / 'sequences.sqlite3'}", poolclass=sa.NullPool)
    with engine.connect() as connection:
        return [decode(row) for row in connection.exec_driver_sql("SELECT * FROM sequences ORDER BY id")]


@pytest.mark.model
def test_each_answer_is_imported_once_by_tenant_while_a_server_writes(program, tmp_path, default_model):
    file, model = tmp_path / "given.jsonl", ("--model", default_model.folder)
    file.write_text(chat("one", "one", "two"))
    with SuffixCache.open(tmp_path / "a", mode="writer"):
        for tenant, expected in (("t", "3 sequences"), ("t", "0 sequences, 3 known already"), ("u", "3 sequences")):
            result = program("cache", "import", file, "--path", tmp_path / "a", "--tenant", tenant, *model)
            assert (result.exit_code, result.stdout) == (0, f"imported {expected}\n"), result.stderr
    assert [one.namespace.tenant for one in stored(tmp_path / "a")] == ["t"] * 3 + ["u"] * 3


@pytest.mark.model
def test_a_bad_line_stops_the_import_or_is_skipped(program, tmp_path, default_model):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(chat("one"))
    bad.write_text(chat("two") + "no json\n" + chat("three"))
    command = ("cache", "import", good, bad, "--path", tmp_path / "a", "--model", default_model.folder)
    result = program(*command)
    assert (result.exit_code, f"{bad}:2: " in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "a").exists()
    result = program(*command, "--skip-bad")
    assert result.stdout == "imported 3 sequences, 1 lines left out\n" and f"{bad}:2: " in result.stderr
    assert len(stored(tmp_path / "a")) == 3


def test_import_needs_a_model_and_a_folder(program, tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps({"messages": [*MESSAGES, {"role": "assistant", "content": "one"}]}))
    result = program("cache", "import", file, "--path", tmp_path / "a")
    assert (result.exit_code, "--model" in result.stderr) == (2, True)
    result = program("cache", "import", file, "--model", "x")
    assert (result.exit_code, "cache.path" in result.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.model
def test_imported_calls_are_what_the_gateway_stores_and_drafts(program, tmp_path, default_model):
    """The same call live and imported is one sequence, and the next day's gateway drafts it from its first token."""
    import anyio

    from agentspec.cache.settings import CacheSettings
    from agentspec.runtime import Runtime
    from agentspec.settings.load import Settings, load_settings
    from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams

    def ask(folder: Path, **labels: str) -> list[Delta]:
        backends = {"local": {"kind": "torch", "model": str(default_model.folder)}}
        settings: Settings = load_settings(None, {"backends": backends, "cache": {"path": str(folder)}})
        assert isinstance(settings.cache, CacheSettings)
        request = GenerateRequest(
            str(default_model.folder),
            messages=MESSAGES,
            sampling=SamplingParams(temperature=0.0, max_tokens=40),
            tenant="acme",
            labels=Labels(**labels),
        )

        async def run() -> list[Delta]:
            async with Runtime(settings) as runtime:
                return [delta async for delta in runtime.generate(request)]

        return anyio.run(run)

    live = ask(tmp_path / "live", session="s", step="plan")
    reason = live[-1].finish_reason
    said = {"role": "assistant", "content": "".join(delta.text for delta in live)}
    log = tmp_path / "log.jsonl"
    response = {"choices": [{"message": said, "finish_reason": reason}]}
    record = {"session": "s", "step": "plan", "request": {"messages": MESSAGES}, "response": response}
    log.write_text(json.dumps(record) + "\n")
    options = ("--model", default_model.folder, "--tenant", "acme")
    result = program("cache", "import", log, *options, "--path", tmp_path / "live")
    assert result.stdout == "imported 0 sequences, 1 known already\n", result.stderr
    result = program("cache", "import", log, *options, "--path", tmp_path / "warm")
    assert result.stdout == "imported 1 sequence\n", result.stderr

    warm, cold = ask(tmp_path / "warm", session="another"), live
    assert [token for delta in warm for token in delta.token_ids] == [t for delta in cold for t in delta.token_ids]
    done, before = warm[-1].speculation, cold[-1].speculation
    assert done is not None and before is not None
    assert done.accepted >= 0.8 * 40 or done.steps <= before.steps / 3
    assert "s" in [one.session for one in stored(tmp_path / "warm")]


@pytest.mark.model
def test_conversations_by_a_configured_name_without_what_a_pattern_refuses(program, tmp_path, default_model):
    file = tmp_path / "chat.jsonl"
    image = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "x"}]}
    file.write_text(chat("one two three", "the secret") + json.dumps(image) + "\n")
    Path("agentspec.toml").write_text(
        f'[cache]\npath = "{tmp_path / "a"}"\nrefuse_patterns = ["secret"]\n'
        f'[backends.local]\nkind = "torch"\nmodel = "{default_model.folder}"\n[models.mine]\nbackend = "local"\n'
    )
    result = program("cache", "import", file, "--model", "mine")
    assert (result.exit_code, f"{file}:3: " in result.stderr) == (2, True)
    for said in ("1 sequence", "0 sequences, 1 known already"):
        result = program("cache", "import", file, "--model", "mine", "--skip-bad")
        assert result.stdout == f"imported {said}, 1 refused by a pattern, 1 lines left out\n", result.stderr


@pytest.mark.model
def test_the_folder_of_a_coding_agent_leaves_no_secret(program, default_model, tmp_path):
    written = claude_code(tmp_path / "projects")
    (written.parent / "notes.txt").write_text("nothing")
    options = ("--model", default_model.folder, "--path", tmp_path / "a")
    forked = written.with_name("s2.jsonl")  # a session that was resumed has the lines of the one before
    forked.write_text(written.read_text().replace('"s1"', '"s2"'))
    result = program("cache", "import", tmp_path / "projects", *options)
    assert result.stdout == "imported 2 sequences\n", result.stderr
    assert program("cache", "import", forked, *options).stdout == "imported 0 sequences, 2 known already\n"
    assert "1 file of no known format left out" in result.stderr
    text = ModelText.load(str(default_model.folder))
    said = "".join(text.tokenizer.decode([*r.context.tolist(), *r.tokens.tolist()]) for r in stored(tmp_path / "a"))
    assert "[REDACTED]" in said and "The login is fixed" in said and '"name": "Read"' in said
    assert not [secret for secret in SECRETS.values() if secret in said or secret[8:] in said]


REPEATED = "The quick brown fox jumps over the lazy dog, and then the lazy dog sleeps."
SYSTEM = {"role": "system", "content": "Be kind."}  # without it the template adds one of its own


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    lines = [
        {
            "session": f"s{number}",
            "step": 0,
            "messages_delta": [SYSTEM, {"role": "user", "content": f"say it {number}"}],
            "response": REPEATED,
        }
        for number in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.model
def test_replay_reports_the_savings_of_a_log(program, log, default_model):
    result = program("cache", "replay", log, "--model", default_model.folder, "--json")
    values = json.loads(result.stdout)
    assert (values["calls"], values["bad"], values["budget"]) == (12, 0, 32)
    assert values["tokens"] > values["steps"] and 0 < values["saved"] < 1
    assert values["tokens_per_step"] > 2 and values["hit_rate"] > 0.4
    short = json.loads(
        program("cache", "replay", log, log, "--model", default_model.folder, "--calls", "13", "--json").stdout
    )
    assert short["calls"] == 13
    result = program("cache", "replay", log, "--model", default_model.folder)
    assert "of the steps have a hit" in result.stdout and "of its steps saved" in result.stdout
    (done,) = [line for line in result.stderr.splitlines() if "replaying 12 calls" in line]
    assert " 12/" in done.partition("calls")[2]  # the bar ends at what was replayed


@pytest.mark.model
def test_replay_refuses_or_skips_bad_lines(program, log, default_model):
    record = {"messages": [{"role": "user", "content": [1]}], "response": "x"}
    log.write_text('{"session": 1}\n' + json.dumps(record) + "\n" + json.dumps(record | {"messages": []}) + "\n")
    options = ("--model", default_model.folder, "--format", "log")
    refused = program("cache", "replay", log, *options)
    assert (refused.exit_code, f"{log}:1: " in refused.stderr) == (2, True)
    result = program("cache", "replay", log, *options, "--skip-bad", "--json")
    assert json.loads(result.stdout)["bad"] == 2 and f"{log}:2: " in result.stderr
    log.write_text("\n")
    result = program("cache", "replay", log, *options)
    assert (result.exit_code, "no model calls" in result.stderr) == (2, True)


@pytest.mark.model
def test_the_shipped_example_is_imported_and_replayed(program, default_model, repository, tmp_path):
    """The cache page's two commands: an empty folder takes six answers; half of the model's steps would be saved."""
    calls, model = repository / "examples" / "calls.jsonl", ("--model", default_model.folder)
    imported = program("cache", "import", calls, *model, "--path", tmp_path / "cache", "--json")
    assert json.loads(imported.stdout)["added"] == 6
    replayed = json.loads(program("cache", "replay", calls, *model, "--json").stdout)
    assert (replayed["calls"], replayed["bad"]) == (6, 0) and replayed["saved"] > 0.5
    refused = program("cache", "import", calls, *model)
    assert refused.exit_code == 2 and "give --path FOLDER" in refused.stderr
