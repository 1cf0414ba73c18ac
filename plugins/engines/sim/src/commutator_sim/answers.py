"""The answer to a simulated request: its own prompt, repeated until something ends it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import filterfalse, islice
from math import log

from attrs import frozen

from commutator import FinishReason, GenerateRequest, SamplingParams, TokenLogprob
from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator.tokenizer import TextModel
from commutator_sim.config import ScriptedAnswer
from commutator_sim.following import follows

_LN2 = log(2)


@frozen
class Answer:
    """All tokens of one answer, known before the first one is sent."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None


def refuse_what_needs_a_model(request: GenerateRequest) -> None:
    """Raise RequestError for parameters that a simulator cannot serve.

    Temperature and the like are accepted: they choose among likely tokens, and here is only one.
    """
    asked = {
        "logit_bias": bool(request.sampling.logit_bias),
        f"data parallel rank {request.data_parallel_rank}": bool(request.data_parallel_rank),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise RequestError(
                f"the sim engine computes no model, so it cannot give {what}; "
                "leave that out, or ask a worker of another engine"
            )


def logprobs_of(
    token_ids: Sequence[int], top: int, text: TextModel | None
) -> tuple[TokenLogprob, ...]:
    """The same for a token wherever it stands.

    It has half of all, and each of the ids after it half of what the one before has. Without
    ``text`` the size of the vocabulary is not known, and ids go on.
    """
    size = None if text is None else text.vocab_size
    most = top if size is None else min(top, size)
    return tuple(
        TokenLogprob(
            token_id=token_id,
            logprob=-_LN2,
            top=tuple(
                (token_id + step if size is None else (token_id + step) % size, -_LN2 * (step + 1))
                for step in range(most)
            ),
            rank=1,
        )
        for token_id in token_ids
    )


def plan_answer(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    room: int,
    natural_tokens: int,
    text: TextModel | None,
    says: Sequence[int] | None = None,
) -> Answer:
    """The prompt's tokens over and over, without the special ones; or ``says``, if it is scripted.

    It ends at a stop token or string once it has ``min_tokens``, else by itself after
    ``natural_tokens`` unless ``ignore_eos`` is set, else after ``max_tokens`` or ``room`` tokens.
    The ending token belongs to the answer. ``text`` knows the special tokens, and decodes for stop
    strings. Raises RequestError for a stop string without ``text``.
    """
    count, reason = min(params.max_tokens, room), FinishReason.LENGTH
    natural = max(natural_tokens if says is None else len(says), params.min_tokens)
    if natural < count and not params.ignore_eos:
        count, reason = natural, FinishReason.STOP
    if says:
        token_ids = _cycle(says, count, ())
    else:
        token_ids = _cycle(prompt, count, () if text is None else text.special_ids)
    stop: int | str | None = None
    if params.stop_token_ids:
        count, stop = _first_stop_id(token_ids, params, count)
    if params.stop:
        if text is None:
            raise RequestError("stop: this worker has no tokenizer to find stop strings with")
        earlier, string = _first_stop_string(token_ids[:count], params, text)
        if string is not None and (earlier < count or stop is None):
            count, stop = earlier, string
    return Answer(token_ids[:count], reason if stop is None else FinishReason.STOP, stop)


def scripted(
    answers: Sequence[ScriptedAnswer],
    text: TextModel | None,
    prompt: Sequence[int],
    constraint: Constraint | None = None,
) -> Sequence[int] | None:
    """What is said to a prompt, as tokens: the first answer for it that follows the constraint.

    None: nothing is scripted.
    """
    if not answers or text is None:
        return None
    asked = text.decode(prompt, skip_special_tokens=False)
    for answer in answers:
        if answer.when in asked and (constraint is None or follows(constraint, answer.say)):
            return text.encode(answer.say, add_special_tokens=False)
    return None


def _cycle(prompt: Sequence[int], count: int, never: Collection[int]) -> list[int]:
    source = list(islice(filterfalse(never.__contains__, prompt), count))
    source = source or list(prompt[:count])
    return source if len(source) == count else (source * -(-count // len(source)))[:count]


def _first_stop_id(
    token_ids: Sequence[int], params: SamplingParams, count: int
) -> tuple[int, int | None]:
    ends = frozenset(params.stop_token_ids)
    if ends.isdisjoint(token_ids):
        return count, None
    for index in range(max(0, params.min_tokens - 1), len(token_ids)):
        if token_ids[index] in ends:
            return index + 1, token_ids[index]
    return count, None


def _first_stop_string(
    token_ids: Sequence[int], params: SamplingParams, text: TextModel
) -> tuple[int, str | None]:
    """How many tokens complete the first stop string, and that string."""
    detokenizer = text.detokenizer()
    longest = max(map(len, params.stop))
    tail = ""
    for count, token in enumerate(token_ids, start=1):
        said = detokenizer.push((token,))
        before, tail = tail, tail + said
        if said and count >= params.min_tokens:
            for string in params.stop:
                if tail.count(string) > before.count(string):
                    return count, string
        tail = tail[len(tail) - longest + 1 :] if len(tail) >= longest else tail
    return len(token_ids), None
