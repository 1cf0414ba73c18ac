"""What clients may send: each class is one endpoint's body, validated and documented from here.

Without slots, as ``build_request_converter`` fills their dictionaries at once.
"""

from __future__ import annotations

from typing import Annotated, Any

from attrs import define, frozen

from commutator import Bounds, Fraction, NonNegativeInt, PositiveInt, setting
from commutator_openai.fields import (
    MAX_INT,
    CacheControl,
    FunctionType,
    GivenTokens,
    Hint,
    Items,
    Label,
    Metadata,
    Off,
    OneOf,
    PromptList,
    Role,
    TokenId,
    TokenIds,
    ToolName,
    Tools,
    WhichTools,
)

MAX_MESSAGES = 8192
_NO_AUDIO = "only text is served"
_NO_MEDIA = dict.fromkeys(("image_url", "input_audio", "file", "video_url"), _NO_AUDIO)
_NO_ROLES = {"function": 'it was replaced by the role "tool"'}
_REPLACED = "functions were replaced by tools"
MAX_TOOLS = 1024
MAX_BATCH = 256
Name = Annotated[str, Label()]
Tokens = Annotated[int, Bounds(minimum=1, maximum=MAX_INT)]
Penalty = Annotated[float, Bounds(minimum=-2, maximum=2)]
Bias = Annotated[float, Bounds(minimum=-100, maximum=100)]
TopLogprobs = Annotated[int, Bounds(minimum=0, maximum=20)]
MAX_NAMED_TOKENS = 128
"""Token ids whose log probabilities may be asked for at each place."""
_TIERS = ("auto", "default", "flex", "priority", "scale")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@frozen(kw_only=True, slots=False)
class StreamOptions:
    """Only with ``stream``."""

    include_usage: bool | None = setting("End the stream with a chunk that holds `usage`.", None)
    continuous_usage_stats: bool | None = setting(
        "With `include_usage`: each chunk says the usage so far, of its own answer.", None
    )
    include_obfuscation: Annotated[Any, Off("chunks are never padded", (None, False))] = setting(
        "Padding against traffic analysis.", None
    )


@frozen(kw_only=True, slots=False)
class TextPart:
    """One part of a message's content."""

    type: Annotated[str, OneOf(("text", "refusal"), _NO_MEDIA)] = setting("The kind of part.")
    text: str | None = setting("The text.", None)
    refusal: str | None = setting("The text of a refusal, in an assistant's message.", None)
    cache_control: CacheControl | None = setting("The same as that of the message.", None)


@frozen(kw_only=True, slots=False)
class CalledFunction:
    """What a model called."""

    name: Name = setting("The tool.")
    arguments: str = setting("Its arguments, as JSON.", "")


@frozen(kw_only=True, slots=False)
class MessageCall:
    """A call of a tool in the history."""

    id: Name = setting("Names the call; its result has the same id.")
    type: Annotated[str, FunctionType()] = setting("The kind of call.", "function")
    function: CalledFunction = setting("What was called.")
    index: int | None = setting("As in a stream; without meaning.", None)


@frozen(kw_only=True, slots=False)
class FunctionSpec:
    """A function that the model may call."""

    name: Annotated[str, ToolName()] = setting("Letters, digits, '_', '-', '.', ':' and '/'.")
    description: str | None = setting("For the model.", None)
    parameters: dict[str, Any] | None = setting("JSON Schema of the arguments.", None)
    strict: bool | None = setting("Whether the arguments have to fit `parameters`.", None)


@frozen(kw_only=True, slots=False)
class ToolSpec:
    """A tool that the model may call."""

    type: Annotated[str, FunctionType()] = setting("The kind of tool.")
    function: FunctionSpec = setting("The function.")


@define(kw_only=True, slots=False)
class ChatMessage:
    """One turn of a conversation."""

    role: Annotated[str, Role(_NO_ROLES)] = setting(
        "Who speaks: system, developer, user, assistant, tool, or another word for the template."
    )
    content: str | Annotated[tuple[TextPart, ...], Items(1, MAX_MESSAGES)] | None = setting(
        "The text; parts are joined by newlines. An assistant that calls tools needs none.", None
    )
    name: Name | None = setting("Passed to the model's chat template.", None)
    cache_control: CacheControl | None = setting(
        "How long to keep the KV blocks of the prompt up to the end of this message.", None
    )
    tool_calls: Annotated[tuple[MessageCall, ...], Items(0, MAX_MESSAGES)] | None = setting(
        "What an assistant called.", None
    )
    tool_call_id: Name | None = setting("The call whose result a tool's message is.", None)
    reasoning_content: str | None = setting("What an assistant thought before.", None)
    reasoning: str | None = setting("The same, as others call it.", None)
    function_call: Annotated[Any, Off(_REPLACED)] = setting("A function call.", None)
    audio: Annotated[Any, Off(_NO_AUDIO)] = setting("An audio answer.", None)
    refusal: str | None = setting("With what an assistant refused: to the model, it said so.", None)
    annotations: Annotated[Any, Off("there is no web search", (None, []))] = setting(
        "Annotations.", None
    )


CONSTRAINT_FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "guided_json_object"),
    *("guided_regex", "guided_choice", "guided_grammar", "guided_structural_tag"),
    *("guided_whitespace_pattern", "regex", "ebnf", "json_schema", "structural_tag"),
)
"""The fields that say what an answer has to follow, in the words of OpenAI, vLLM and SGLang."""


@define(kw_only=True, slots=False)
class GenerationRequest:
    """What chat and completions have in common. Null always means the default."""

    model: str | None = setting("A name from /v1/models; not needed where there is one.", None)
    max_tokens: Tokens | None = setting("Longest answer in tokens.", None)
    n: Annotated[int, Bounds(minimum=1, maximum=128)] | None = setting(
        "How many answers for each prompt; 1 by default.", None
    )
    stop: str | Annotated[tuple[str, ...], Items(0, 16)] | None = setting(
        "Up to 16 strings that end the answer.", None
    )
    stream: bool | None = setting("Send the answer as server-sent events.", None)
    stream_options: StreamOptions | None = setting("Options of the stream.", None)
    seed: Annotated[int, Bounds(minimum=-(2**63), maximum=2**63 - 1)] | None = setting(
        "Makes sampling repeatable; answer i of several uses seed + i.", None
    )
    temperature: Annotated[float, Bounds(minimum=0, maximum=2)] | None = setting(
        "0 always takes the most likely token; by default as the model's `generation` says.", None
    )
    top_p: Annotated[float, Bounds(above=0, maximum=1)] | None = setting(
        "Keep the most likely tokens up to this total probability; by default as for the model.",
        None,
    )
    presence_penalty: Penalty | None = setting("Against tokens that occurred; 0 by default.", None)
    frequency_penalty: Penalty | None = setting(
        "Against tokens by how often they occurred; 0 by default.", None
    )
    logit_bias: Annotated[dict[str, Bias], Items(0, 1024)] | None = setting(
        "By token id, what is added to its logit.", None
    )
    user: Name | None = setting("A label for the log line of this request.", None)
    service_tier: Annotated[
        Any, Hint("there is one tier", (None, "auto", "default"), words=_TIERS)
    ] = setting("Ignored: there is one tier.", None)

    top_k: Annotated[int, Bounds(minimum=-1, maximum=MAX_INT)] | None = setting(
        "Keep the k most likely tokens; 0 and -1 keep all.", None
    )
    min_p: Fraction | None = setting(
        "Drop tokens less likely than this times the likeliest; by default as for the model.", None
    )
    repetition_penalty: Annotated[float, Bounds(above=0, maximum=100)] | None = setting(
        "Above 1, against tokens of prompt and answer; by default as for the model.", None
    )
    min_tokens: Annotated[int, Bounds(minimum=0, maximum=MAX_INT)] | None = setting(
        "Nothing ends the answer before this many tokens; 0 by default.", None
    )
    ignore_eos: bool | None = setting(
        "Generate up to `max_tokens`, past the end-of-text token.", None
    )
    stop_token_ids: Annotated[tuple[TokenId, ...], Items(0, 64)] | None = setting(
        "Token ids that end the answer.", None
    )
    include_stop_str_in_output: bool | None = setting("Keep what ended the answer in it.", None)
    skip_special_tokens: bool | None = setting(
        "Leave special tokens out of the text; true by default.", None
    )
    bad_words: Annotated[tuple[Annotated[str, Label(minimum=1)], ...], Items(0, 256)] | None = (
        setting("Words that are not generated, where the engine can.", None)
    )
    allowed_token_ids: Annotated[list[int], TokenIds(1)] | None = setting(
        "The only tokens that may be generated, where the engine can.", None
    )
    logprob_token_ids: Annotated[list[int], TokenIds(0, MAX_NAMED_TOKENS)] | None = setting(
        "With log probabilities: those of these tokens instead of the likeliest, where the "
        "engine can.",
        None,
    )
    prompt_logprobs: TopLogprobs | None = setting(
        "Log probabilities of the prompt's tokens, each with this many of the likeliest, where the "
        "engine can; not in streams. The prompt is not read from caches.",
        None,
    )
    return_token_ids: bool | None = setting(
        "Return the token ids of prompt and answer as well.", None
    )
    return_tokens_as_token_ids: bool | None = setting(
        "Name tokens in log probabilities `token_id:N`.", None
    )
    truncate_prompt_tokens: Annotated[int, Bounds(minimum=-1, maximum=MAX_INT)] | None = setting(
        "Cut the prompt to this many tokens; -1: to what the model takes.", None
    )
    truncation_side: Annotated[str, OneOf(("left", "right"), {})] | None = setting(
        "Which end of a prompt is cut off; left by default.", None
    )
    cache_salt: Annotated[str, Label(minimum=1)] | None = setting(
        "Share cached KV blocks only with requests of the same salt.", None
    )
    cache_control: CacheControl | None = setting(
        "How long to keep the KV blocks of the whole prompt, where the engine has `tiers`.", None
    )
    priority: Annotated[int, Bounds(minimum=-MAX_INT, maximum=MAX_INT)] | None = setting(
        "Lower is served earlier; 0 by default.", None
    )
    migration_limit: NonNegativeInt | None = setting(
        "How often another worker may continue the answer when one is lost; lowers the "
        "deployment's limit.",
        None,
    )
    session_id: Name | None = setting(
        "Requests of one session prefer one worker, if the routing policy uses it.", None
    )
    engine_options: Annotated[dict[str, Any], Items(0, 64)] | None = setting(
        "Options that only the model's engine has, by name, such as thinking_token_budget of vLLM; "
        "one that no worker of the model has is refused.",
        None,
    )
    response_format: Any = setting(
        "What the answer follows: `text`, `json_object`, or `json_schema` with a schema.", None
    )
    structured_outputs: Any = setting(
        "vLLM's words for it: one of `json`, `json_object`, `regex`, `choice`, `grammar`, "
        "`structural_tag`.",
        None,
    )
    guided_json: Any = setting("The same as `structured_outputs.json`.", None)
    guided_json_object: Any = setting("The same as `structured_outputs.json_object`.", None)
    guided_regex: Any = setting("The same as `structured_outputs.regex`.", None)
    guided_choice: Any = setting("The same as `structured_outputs.choice`.", None)
    guided_grammar: Any = setting("The same as `structured_outputs.grammar`.", None)
    guided_structural_tag: Any = setting("The same as `structured_outputs.structural_tag`.", None)
    guided_whitespace_pattern: Any = setting("What may stand between parts of guided JSON.", None)
    regex: Any = setting("SGLang's word for `structured_outputs.regex`.", None)
    ebnf: Any = setting("SGLang's word for `structured_outputs.grammar`.", None)
    json_schema: Any = setting("SGLang's word for `structured_outputs.json`.", None)
    structural_tag: Any = setting("SGLang's word for `structured_outputs.structural_tag`.", None)


@define(kw_only=True, slots=False)
class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[tuple[str | list[int], ...], PromptList()] = setting(
        "A string, a list of strings, token ids, or a list of such lists."
    )
    max_tokens: Annotated[int, Bounds(minimum=0, maximum=MAX_INT)] | None = setting(
        "Longest answer in tokens, 16 by default; 0 with `echo`: the prompt alone.", None
    )
    logprobs: TopLogprobs | None = setting(
        "Log probabilities of each token and of this many of the likeliest.", None
    )
    echo: bool | None = setting(
        "Begin the answer with the prompt, and its log probabilities if they are wanted.", None
    )
    best_of: PositiveInt | None = setting("Only the same number as `n`.", None)
    suffix: Annotated[Any, Off("text cannot be inserted", (None, ""))] = setting(
        "Text after the answer.", None
    )


@define(kw_only=True, slots=False)
class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[tuple[ChatMessage, ...], Items(1, MAX_MESSAGES)] = setting(
        "The conversation so far."
    )
    max_completion_tokens: Tokens | None = setting(
        "Longest answer in tokens; by default what is left of the context.", None
    )
    logprobs: bool | None = setting("Return log probabilities.", None)
    top_logprobs: TopLogprobs | None = setting("The likeliest tokens at each place.", None)
    echo: bool | None = setting(
        "Begin the answer with the last message, if that is an assistant's.", None
    )
    include_reasoning: bool | None = setting(
        "Whether the answer tells what the model thought; true by default.", None
    )
    documents: Annotated[tuple[dict[str, Any], ...], Items(0, MAX_MESSAGES)] | None = setting(
        "Documents for the model's chat template.", None
    )
    kv_transfer_params: Annotated[Any, GivenTokens()] = setting(
        "Only `prompt_token_ids`: the rendered prompt, which is taken instead of the messages'.",
        None,
    )
    add_generation_prompt: bool | None = setting(
        "End the prompt with the start of an assistant's turn; true by default.", None
    )
    continue_final_message: bool | None = setting(
        "Let the model continue the last message; needs `add_generation_prompt` false.", None
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        "Further variables for the model's chat template.", None
    )
    prompt_cache_key: Name | None = setting("The same as `session_id`.", None)
    safety_identifier: Name | None = setting("The same as `user`.", None)
    tools: Annotated[tuple[ToolSpec, ...], Tools(0, MAX_TOOLS)] | None = setting(
        "Functions that the model may call, if its template knows tools.", None
    )
    tool_choice: Annotated[Any, WhichTools()] = setting(
        '"auto", by default, leaves calls to the model; "none" keeps the tools from it. A list of '
        'allowed tools narrows them. "required" and a named tool make the model call, where its '
        "family writes calls as JSON.",
        None,
    )
    parallel_tool_calls: bool | None = setting(
        "Whether an answer may have several calls; if not, all but the first are left out.", None
    )
    functions: Annotated[Any, Off(_REPLACED, (None, []))] = setting("Functions to call.", None)
    function_call: Annotated[Any, Off(_REPLACED, (None, "none", "auto"))] = setting(
        "Which function to call.", None
    )
    modalities: Annotated[Any, Off(_NO_AUDIO, (None, ["text"]))] = setting("Kinds of answer.", None)
    audio: Annotated[Any, Off(_NO_AUDIO)] = setting("Options of an audio answer.", None)
    reasoning_effort: Annotated[
        str | None,
        Hint("the effort cannot be steered here", (None, "none"), for_engines=True, words=_EFFORTS),
    ] = setting(
        "A variable of the model's chat template, and for engines that know it; otherwise it is "
        'ignored. "none": not to think, where the template can say so.',
        None,
    )
    verbosity: Annotated[
        Any,
        Hint(
            "the length cannot be steered here",
            (None, "medium"),
            for_engines=True,
            words=("low", "medium", "high"),
        ),
    ] = setting("For engines that know it; others ignore it.", None)
    prediction: Annotated[Any, Hint("predicted outputs are not used")] = setting(
        "Ignored: a predicted answer only saves time.", None
    )
    store: Annotated[Any, Hint("nothing is stored", (None, False))] = setting(
        "Ignored: nothing is stored.", None
    )
    metadata: Annotated[Any, Metadata("nothing is stored", (None, {}))] = setting(
        "Ignored: nothing is stored.", None
    )
    web_search_options: Annotated[Any, Off("there is no web search")] = setting(
        "Options of a web search.", None
    )


_Batch = tuple[Annotated[tuple[ChatMessage, ...], Items(1, MAX_MESSAGES)], ...]


@define(kw_only=True, slots=False)
class BatchRequest(ChatRequest):
    """Body of POST /v1/chat/completions/batch: several conversations, one answer to each."""

    messages: Annotated[_Batch, Items(1, MAX_BATCH)] = setting(  # type: ignore[assignment]
        "The conversations."
    )


@frozen(kw_only=True, slots=False)
class TokenizeRequest:
    """Body of POST /tokenize: a ``prompt`` or ``messages``."""

    model: str | None = setting("May be left out when one model is served.", None)
    prompt: str | None = setting("The text.", None)
    messages: Annotated[tuple[ChatMessage, ...], Items(1, MAX_MESSAGES)] | None = setting(
        "A conversation to render first.", None
    )
    add_special_tokens: bool | None = setting(
        "Add what the tokenizer adds, such as BOS; true for a prompt, false for messages.", None
    )
    add_generation_prompt: bool | None = setting("As in chat; true by default.", None)
    continue_final_message: bool | None = setting("As in chat.", None)
    chat_template_kwargs: dict[str, Any] | None = setting("As in chat.", None)
    tools: Annotated[tuple[ToolSpec, ...], Tools(0, MAX_TOOLS)] | None = setting(
        "As in chat.", None
    )
    return_token_strs: bool | None = setting(
        "Return the vocabulary's piece of each token as well.", None
    )


@frozen(kw_only=True, slots=False)
class DetokenizeRequest:
    """Body of POST /detokenize."""

    model: str | None = setting("May be left out when one model is served.", None)
    tokens: Annotated[list[int], TokenIds()] = setting("Token ids.")
