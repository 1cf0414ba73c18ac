"""Clients of embeddings and reranks: OpenAI's, Cohere's, and Jina's by LangChain and LlamaIndex."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence

import cohere
import openai
from langchain_community.document_compressors.jina_rerank import JinaRerank
from langchain_core.documents import Document
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.jinaai_rerank import JinaRerank as LlamaIndexJinaRerank

URL, MODEL = os.environ["URL"], "m"
TEXTS = ["the capital of France is Paris", "bread is baked in an oven"]
QUERY = "what is the capital of France"
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="-", max_retries=0)


def unit(rows: Sequence[Sequence[float]]) -> bool:
    """Whether there is a vector for each text, of length 1."""
    return len(rows) == len(TEXTS) and all(abs(math.hypot(*row) - 1) < 1e-5 for row in rows)


def same(rows: Sequence[Sequence[float]]) -> bool:
    """Whether they are the vectors that OpenAI's client decodes."""
    known = client.embeddings.create(model=MODEL, input=TEXTS).data
    return unit(rows) and all(
        abs(a - b) < 1e-6
        for row, one in zip(rows, known, strict=True)
        for a, b in zip(row, one.embedding, strict=True)
    )


def floats() -> bool:
    answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    return same([one.embedding for one in answer.data])


def shorter() -> bool:
    answer = client.embeddings.create(model=MODEL, input=TEXTS, dimensions=32)
    return {len(one.embedding) for one in answer.data} == {32}


def langchain() -> bool:
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{URL}/v1", api_key="-", check_embedding_ctx_length=False
    )
    return same(embeddings.embed_documents(TEXTS)) and len(embeddings.embed_query(QUERY)) > 0


def langchain_jina() -> int:
    ranker = JinaRerank(model=MODEL, jina_api_key="-", top_n=1)
    (best,) = ranker.rerank([Document(page_content=text) for text in TEXTS], QUERY)
    return int(best["index"])


def llama_index() -> bool:
    embeddings = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="-")
    return same(embeddings.get_text_embedding_batch(TEXTS))


def llama_index_jina() -> str:
    ranker = LlamaIndexJinaRerank(model=MODEL, api_key="-", base_url=f"{URL}/v1", top_n=1)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    (best,) = ranker.postprocess_nodes(nodes, QueryBundle(QUERY))
    return str(best.node.get_content())


def cohere_client() -> tuple[bool, int]:
    v2 = cohere.ClientV2(api_key="-", base_url=URL)
    answer = v2.embed(
        model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"]
    )
    ranked = v2.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=1)
    return same(answer.embeddings.float_ or []), ranked.results[0].index


if __name__ == "__main__":
    # LangChain's class of Jina's reranker has no option for its address.
    import langchain_community.document_compressors.jina_rerank as of_jina

    of_jina.JINA_API_URL = f"{URL}/v1/rerank"
    embedded, best = cohere_client()
    print(
        json.dumps(
            {
                "openai: embeddings, float": floats(),
                "openai: embeddings, dimensions": shorter(),
                "langchain: OpenAIEmbeddings": langchain(),
                "langchain: JinaRerank": langchain_jina() == 0,
                "llama_index: OpenAILikeEmbedding": llama_index(),
                "llama_index: JinaRerank": llama_index_jina() == TEXTS[0],
                "cohere: embed": embedded,
                "cohere: rerank": best == 0,
            }
        )
    )
