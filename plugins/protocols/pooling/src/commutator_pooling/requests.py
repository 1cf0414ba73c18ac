"""What clients may send: each class is the body of one endpoint."""

from __future__ import annotations

from typing import Annotated, Any

from attrs import frozen

from commutator import Bounds, PositiveInt, setting
from commutator_openai.embeddings import Truncation
from commutator_openai.fields import MAX_INT, Hint, Items, Label, Off, OneOf, PromptList

MAX_DOCUMENTS = 10_000
_MAX_TEXTS = 2_048


@frozen(kw_only=True)
class Document:
    """A document of a rerank, as an object."""

    text: str = setting("The text.")


Texts = Annotated[tuple[str | Document, ...], Items(1, MAX_DOCUMENTS)]


@frozen(kw_only=True)
class _Common(Truncation):
    """What all bodies have."""

    model: str | None = setting("A name from /v1/models; not needed where there is one.", None)
    priority: Annotated[int, Bounds(minimum=-MAX_INT, maximum=MAX_INT)] | None = setting(
        "Lower is served earlier; 0 by default.", None
    )
    user: Annotated[str, Label()] | None = setting("A label for the log line.", None)


@frozen(kw_only=True)
class RerankRequest(_Common):
    """Body of POST /rerank and /v1/rerank."""

    query: str = setting("What is looked for.")
    documents: Texts = setting("Texts, or objects with a `text`.")
    top_n: PositiveInt | None = setting("Return this many of the best; all by default.", None)
    return_documents: bool | None = setting("Return the texts as well; true by default.", None)
    max_tokens_per_doc: PositiveInt | None = setting("Cut documents to this many tokens.", None)


@frozen(kw_only=True)
class RerankV2Request(_Common):
    """Body of POST /v2/rerank, as Cohere has it."""

    query: str = setting("What is looked for.")
    documents: Texts = setting("Texts, or objects with a `text`.")
    top_n: PositiveInt | None = setting("Return this many of the best; all by default.", None)
    max_tokens_per_doc: PositiveInt | None = setting(
        "Cut documents to this many tokens, 4,096 by default, or to what the model takes.", None
    )


@frozen(kw_only=True)
class ScoreRequest(_Common):
    """Body of POST /score and /v1/score: one text and one, or each of several; or pair by pair."""

    text_1: Any = setting("A text, or several.", None)
    text_2: Any = setting("A text, or several.", None)
    queries: Any = setting("The same as `text_1`.", None)
    documents: Any = setting("The same as `text_2`.", None)
    use_activation: bool | None = setting("False: logits of a cross-encoder as they are.", None)


@frozen(kw_only=True)
class ClassifyRequest(_Common):
    """Body of POST /classify."""

    input: Annotated[tuple[str | list[int], ...], PromptList(maximum=_MAX_TEXTS)] = setting(
        "A string, a list of strings, token ids, or a list of such lists."
    )
    use_activation: bool | None = setting("False: logits instead of probabilities.", None)


@frozen(kw_only=True)
class PoolingRequest(_Common):
    """Body of POST /pooling."""

    input: Annotated[tuple[str | list[int], ...], PromptList(maximum=_MAX_TEXTS)] = setting(
        "A string, a list of strings, token ids, or a list of such lists."
    )
    task: Annotated[str, OneOf(("embed", "token_embed", "classify"), {})] | None = setting(
        "What to return; by default what the model is for.", None
    )
    encoding_format: Annotated[str, OneOf(("float", "base64"), {})] | None = setting(
        "base64: of little-endian 32-bit floats. float by default.", None
    )
    dimensions: PositiveInt | None = setting(
        "Cut vectors to this length, and normalize them again; for models trained for it.", None
    )
    use_activation: bool | None = setting("False: vectors and logits as they are.", None)


_NO_PICTURES = "only texts are served"


@frozen(kw_only=True)
class EmbedRequest:
    """Body of POST /v2/embed, as Cohere has it."""

    model: str | None = setting("A name from /v1/models; not needed where there is one.", None)
    texts: Annotated[tuple[str, ...], Items(1, _MAX_TEXTS)] | None = setting("The texts.", None)
    embedding_types: (
        Annotated[tuple[Annotated[str, OneOf(("float", "base64"), {})], ...], Items(1, 2)] | None
    ) = setting("What to return of each vector: `float`, by default, or `base64`.", None)
    input_type: Annotated[Any, Hint("texts are embedded as they are", (None,))] = setting(
        "Ignored: texts are embedded as they are.", None
    )
    truncate: Annotated[str, OneOf(("NONE", "START", "END"), {})] | None = setting(
        "What is cut off from a text that is too long: its start, or, by default, its end.", None
    )
    max_tokens: PositiveInt | None = setting("Cut texts to this many tokens.", None)
    output_dimension: PositiveInt | None = setting(
        "Cut vectors to this length, and normalize them again; for models trained for it.", None
    )
    images: Annotated[Any, Off(_NO_PICTURES, (None, []))] = setting("Pictures.", None)
    inputs: Annotated[Any, Off(_NO_PICTURES, (None, []))] = setting("Texts with pictures.", None)
    priority: Annotated[int, Bounds(minimum=-MAX_INT, maximum=MAX_INT)] | None = setting(
        "Lower is served earlier; 0 by default.", None
    )
