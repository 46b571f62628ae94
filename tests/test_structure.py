"""The shape of the source tree: small rooms, small files, one class for one name, tests beside what they test."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("agentspec", "cache", "backends", "reasoning", "benchmarks")
MODULES = sorted(
    path.relative_to(ROOT)
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))

MOST_MODULES = 15  # of a folder, without `__init__.py`
MOST_TESTS = 17  # of a folder: some go across its modules
MOST_LINES = 500
ACROSS = {Path("reliability"), Path("matrix")}  # tests of promises about the whole gateway

DOORS = frozenset(
    """
    backends.base backends.engine_plugin.cache_router backends.engine_plugin.drafter backends.engine_plugin.settings
    backends.model_store
    backends.openai backends.settings backends.sglang.corpus backends.sglang.drafting backends.sglang.plugin
    backends.torch backends.vllm.plugin backends.vllm.proposer backends.vllm.runner_v2
    backends.vllm.runner_v2.plugin backends.vllm.runner_v2.retrieval backends.vllm.runner_v2.speculator background
    cache cache.deletion cache.settings cache.stored cache.tokens cli errors langchain
    langgraph proxy proxy.app proxy.serving reasoning.delegation.backend
    reasoning.retrieval.backend reasoning.retrieval.knn_lm reasoning.retrieval.knowledge.base
    reasoning.retrieval.knowledge.bm25 reasoning.retrieval.knowledge.dense reasoning.retrieval.knowledge.folder
    reasoning.retrieval.knowledge.remote reasoning.settings reasoning.strategy recordings.calls recordings.corpus
    recordings.formats recordings.prompt_sets recordings.replay runtime settings.load settings.server step testing
    tools types version
    """.split()
)
"""What a test may import of `agentspec`: what users do, and the parts of plug-ins that engines load."""
INNER = frozenset(
    """
    backends.engine_plugin.request_state backends.engine_plugin.rounds backends.engine_plugin.source_contract
    backends.openai.metrics backends.threads backends.torch.drafters.base
    backends.torch.drafters.combined backends.torch.drafters.draft_model backends.torch.embeddings
    backends.torch.engine.cache_session backends.torch.engine.choices backends.torch.engine.delivery
    backends.torch.engine.device_memory backends.torch.engine.engine backends.torch.engine.kv_budget
    backends.torch.engine.prefill backends.torch.engine.prefix_cache backends.torch.engine.scheduler
    backends.torch.engine.sequence backends.torch.engine.speculator backends.torch.engine.stats
    backends.torch.exactness backends.torch.grammars.grammar backends.torch.loader backends.torch.model.batch
    backends.torch.model.graphs.attention backends.torch.model.graphs.attention_triton
    backends.torch.model.graphs.recording backends.torch.model.graphs.step_table
    backends.torch.model.kv_cache backends.torch.model.layers backends.torch.model.norm_triton
    backends.torch.model.replacements backends.torch.model.target
    backends.torch.sampling.constraints backends.torch.sampling.distribution backends.torch.sampling.sampler
    backends.torch.stepwise backends.torch.text.chat_template backends.torch.text.model_text
    backends.torch.text.structured_output backends.torch.text.tokenizer backends.torch.text.tool_parser
    backends.vllm.runner_v2.hybrid backends.vllm.runner_v2.matching
    backends.vllm.runner_v2.passages backends.vllm.runner_v2.verification cache._native cache.index cache.partition
    cache.storage.batch_writer cache.storage.codec cache.storage.segments placement prediction protocol
    protocol.anthropic.requests protocol.anthropic.responses protocol.completions protocol.deltas protocol.errors
    protocol.headers protocol.messages protocol.openai_responses.events protocol.openai_responses.request
    protocol.requests protocol.responses protocol.speculation protocol.tools protocol.validation protocol.wire
    proxy.admission proxy.auth proxy.body.amounts proxy.body.reading proxy.body.stored_names
    proxy.body.upstream_fields proxy.logs proxy.metering reasoning.delegation.steps
    benchmarks.reasoning.evaluation benchmarks.reasoning.grading reasoning.retrieval.datastore recordings.redaction
    speculation.cost
    speculation.governor speculation.stride telemetry.metrics telemetry.samples telemetry.scrape text tools.history
    tools.model
    """.split()
)
"""And these inner modules: nearly all compute results from arguments alone, so that a test needs nothing around them.
Of the others no door shows enough. The list may only get shorter."""


def test_folders_are_small():
    modules = Counter(str(path.parent) for path in MODULES if path.name != "__init__.py")
    tests = Counter(str(path.parent) for path in TESTS)
    assert {folder: count for folder, count in modules.items() if count > MOST_MODULES} == {}
    assert {folder: count for folder, count in tests.items() if count > MOST_TESTS} == {}


def test_files_are_short():
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in MODULES}
    assert {path: count for path, count in lengths.items() if count > MOST_LINES} == {}


def test_a_class_name_means_one_thing():
    texts = {path: (ROOT / path).read_text() for path in MODULES}
    written = {path: re.findall(r"^\s*class (\w+)", text, re.M) for path, text in texts.items()}
    counts = Counter(name for names in written.values() for name in names)
    homes = defaultdict(list)
    for path in MODULES:
        if any(counts[name] > 1 for name in written[path]):  # to parse takes long
            for node in ast.walk(ast.parse(texts[path])):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_tests_stand_where_the_code_does():
    """`tests/cache/storage` tests `cache/storage`, `tests/proxy` tests `agentspec/proxy`."""
    folders = {path.parent.relative_to("tests") for path in TESTS} - ACROSS
    assert [str(folder) for folder in sorted(folders) if not (ROOT / "agentspec" / folder).is_dir()] == []


def test_no_test_adds_an_audit_hook():
    """None can be removed, and before Python 3.12 a thread that starts beside one fails to be traced now and then."""
    programs = (path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    assert [str(path) for path in programs if "addaudithook" in path.read_text()] == []


def imported(text: str) -> set[str]:
    """The modules of the package that a program imports, without `agentspec.` before them."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("agentspec"):
            folder = ROOT / module.replace(".", "/")
            own = folder / "__init__.py"
            exported = re.findall(r"\w+", own.read_text()) if own.exists() else []
            for name in (one.name for one in node.names):
                inside = name not in exported and (folder / f"{name}.py").exists()
                found.add(f"{module}.{name}" if inside else module)
    return {module.removeprefix("agentspec.") for module in found} - {"agentspec"}


def test_tests_import_doors_and_algorithms():
    """A test of anything else goes through a door: HTTP, `SuffixCache`, `Backend.generate`, plug-ins, adapters."""
    wanted = defaultdict(set)
    for path in (ROOT / "tests").rglob("*.py"):
        for module in imported(path.read_text()) - DOORS - INNER:
            if not module.startswith("benchmarks"):
                wanted[module].add(path.name)
    assert dict(wanted) == {}
