from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agentspec.backends.torch.embeddings import BATCH, SentenceEncoder
from agentspec.errors import ModelUnavailableError

pytestmark = pytest.mark.anyio

WORDS = "cat dog bird fish tree house river stone the a".split()  # that the encoder knows


@pytest.fixture(scope="module")
def folder(tiny_encoder: Path) -> Path:
    return tiny_encoder


@pytest.fixture
def encoder(folder: Path) -> Iterator[SentenceEncoder]:
    encoder = SentenceEncoder.load(str(folder), device="cpu")
    yield encoder
    encoder.close()


async def test_vectors_are_means_over_the_tokens_of_length_one(encoder, folder):
    from transformers import AutoModel, AutoTokenizer

    text = "the cat a river"
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.inference_mode():
        mean = AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state[0].mean(0).numpy()
    vector = await encoder.encode(text)
    assert vector.dtype == np.float32 and vector.shape == (encoder.dimensions,) == (32,)
    assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)


async def test_a_query_does_not_depend_on_its_company(encoder):
    texts = [f"the {word} {'stone ' * at}" for at, word in enumerate(WORDS)]
    alone = [await encoder.encode(text) for text in texts]
    together = await asyncio.gather(*(encoder.encode(text) for text in texts))
    assert all((one == other).all() for one, other in zip(alone, together, strict=True))


async def test_documents_come_in_their_order_and_long_ones_are_cut(encoder):
    texts = ["cat " * (at % 60) + WORDS[at % 10] for at in range(2 * BATCH + 3)]
    done: list[int] = []
    vectors = encoder.encode_all(texts, done.append)
    assert done == [BATCH, BATCH, 3] and vectors.shape == (len(texts), 32)
    for at in (0, 1, 33, 59, len(texts) - 1):
        assert vectors[at] == pytest.approx(await encoder.encode(texts[at]), abs=1e-5)
    assert (await encoder.encode("cat " * 50) == await encoder.encode("cat " * 500)).all()
    assert np.isfinite(await encoder.encode("")).all()


def test_a_folder_without_a_usable_model_is_an_error(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelUnavailableError, match="cannot read the embedding model"):
        SentenceEncoder.load(str(tmp_path))


@pytest.mark.model
async def test_the_built_in_model_ranks_related_texts_first():
    encoder = SentenceEncoder.load("minilm")
    try:
        vectors = encoder.encode_all(["A cat sits on the mat.", "Interest rates rose again.", "The kitten lies there."])
        question = await encoder.encode("Where is the cat?")
    finally:
        encoder.close()
    near = vectors @ question
    assert encoder.dimensions == 384 and min(near[0], near[2]) > near[1]
