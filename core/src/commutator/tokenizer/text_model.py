"""The text side of one served model: tokenizer, chat template and the ids that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from commutator.errors import RequestError
from commutator.tokenizer.chat_template import ChatTemplate
from commutator.tokenizer.cut_points import CutPoints, cut_points_of
from commutator.tokenizer.detokenizer import Detokenizer, token_bytes
from commutator.tokenizer.encoder import FastTokenizer

__all__ = [
    "TextModel",
]


class TextModel:
    """Text to tokens and back for one model. Read-only, so threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        eos_ids: frozenset[int],
        bos_id: int | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """``max_model_len`` is in tokens, prompt plus answer.

        ``special_tokens`` maps names such as ``bos_token`` to their text, for the chat template.
        """
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self._bytes = token_bytes(tokenizer)
        self._longest_token_bytes = max(map(len, self._bytes.table), default=1) or 1
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._shown = tuple(
            b"" if token_id in self.special_ids else data
            for token_id, data in enumerate(self._bytes.table)
        )
        """The bytes of every token by id, none of special ones."""
        self._special_tokens = dict(special_tokens or {})
        self._chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self.use_chat_template(chat_template)

    def use_chat_template(self, source: str) -> None:
        """Replace the model's own template. Raises ConfigError when its syntax is wrong."""
        self._chat_template = ChatTemplate(source, self._special_tokens)

    @cached_property
    def fast_tokenizer(self) -> FastTokenizer:
        """What front doors tokenize with; made when it is first asked for."""
        return FastTokenizer.of(self.tokenizer)

    @cached_property
    def cut_points(self) -> CutPoints:
        """Where texts may be cut; found when it is first asked for."""
        return cut_points_of(self.tokenizer)

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text has at least its length divided by this as tokens."""
        return self._longest_token_bytes

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._bytes.table)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Lets other threads run meanwhile."""
        # Unlike encode(), the batch form gives up the interpreter lock, and it is quicker.
        (encoding,) = self.tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        table = self._shown if skip_special_tokens else self._bytes.table
        detokenizer = Detokenizer(table, strip_space=self._bytes.leading_space)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For one answer. Its first space stays, because it follows a prompt."""
        return Detokenizer(self._shown if skip_special_tokens else self._bytes.table)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt for a conversation; options as for ``ChatTemplate.render``.

        Raises RequestError when the model has no chat template or it refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions instead", "messages"
            )
        return self._chat_template.render(messages, **options)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id without a token."""
        table = self._bytes.table
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_text(self, token_id: int) -> str:
        r"""One token for display: its text, or ``bytes:\xe6\x97`` for part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
