"""Slots, masks and forwards: one forward over rows, chain and tree equals a forward per path, for every family."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from agentspec.backends.torch.loader import measure_costs
from agentspec.backends.torch.model.batch import attention_mask, tree_layout
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel

TOLERANCE = 2e-4
LAYERS = 2


def test_every_family_runs_on_the_fastest_kernel_that_computes_it(family: Any) -> None:
    own = family.target.module.config.model_type in ("gemma2", "gpt_oss")  # soft caps, sinks
    assert family.target.attention == ("eager" if own else "agentspec_grouped")


@given(st.data())
def test_a_mask_is_ancestry_within_the_window(data: st.DataObject) -> None:
    chain, past = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(data.draw(st.integers(0, 6)))]
    window = data.draw(st.none() | st.integers(1, 8))
    layout = tree_layout(chain, parents)
    mask = attention_mask(layout, past, window=window, groups=1, dtype=torch.float32)[0, 0]
    for row in range(chain + len(parents)):
        line = list(range(past)) + [past + column for column in ancestry(row, chain, parents)]  # columns by position
        visible = line if window is None else line[-window:]
        assert layout.depths[row] == len(line) - 1 - past
        assert torch.nonzero(mask[row] == 0).flatten().tolist() == visible


def ancestry(row: int, chain: int, parents: list[int]) -> list[int]:
    if row < chain:
        return list(range(row + 1))
    return [*ancestry(chain + parents[row - chain], chain, parents), row]


def write(cache: SequenceCache, values: list[int]) -> list[Tensor]:
    """One forward: every layer writes a row per value; returns the rows each layer then sees."""
    rows = torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 3)
    return [cache.update(rows + layer, -rows - layer, layer)[0] for layer in range(LAYERS)]


def stored(cache: SequenceCache) -> list[int]:
    """The values in the committed rows, the same in every layer, keys and values."""
    rows, columns = cache.rows(0, cache.length), []
    for layer, (keys, values) in enumerate(zip(rows.keys, rows.values, strict=True)):
        assert keys is not None and values is not None and torch.equal(keys, -values)
        columns.append((keys[0, 0, :, 0] - layer).int().tolist())
    assert columns[0] == columns[1]
    return list(columns[0])


@given(st.data())
def test_slots_are_those_of_the_committed_tokens(data: st.DataObject) -> None:
    cache, model = SequenceCache(data.draw(st.integers(1, 8))), list[int]()
    for step in range(data.draw(st.integers(1, 8))):
        chain = [1000 * step + i for i in range(data.draw(st.integers(1, 5)))]
        tree = [1000 * step + 500 + i for i in range(data.draw(st.integers(0, 6)))]
        path = sorted(data.draw(st.sets(st.integers(0, len(tree) - 1)))) if tree else []
        seen = write(cache, chain + tree)
        assert seen[0][0, 0, :, 0].tolist() == [float(v) for v in model + chain + tree]
        cache.commit(len(chain), path)
        model += chain + [tree[node] for node in path]
        if data.draw(st.booleans()):
            keep = data.draw(st.integers(0, len(model)))
            cache.truncate(keep)
            del model[keep:]
        assert cache.length == cache.get_seq_length() == len(model)
        assert stored(cache) == model


def test_an_interrupted_forward_changes_nothing() -> None:
    cache = SequenceCache(2)
    write(cache, [1, 2])
    cache.commit(2, ())
    cache.update(torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3), 0)  # the second layer never comes
    write(cache, [3])
    cache.commit(1, ())
    assert stored(cache) == [1, 2, 3]


def test_costs_are_measured_within_the_context_and_of_several_sequences(lab: Any) -> None:
    config = GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=12)
    samples, _ = measure_costs(TargetModel(AutoModelForCausalLM.from_config(config).eval()), 60.0)
    assert {(tokens, context) for tokens, context, _ in samples} == {(1, 0), (2, 0), (4, 0), (8, 0), (1, 4), (8, 4)}
    assert {count for count, seconds in measure_costs(lab.target, 60.0)[1] if seconds > 0} == {4, 8}
    assert len(measure_costs(lab.target, 0.0)[0]) == 1
