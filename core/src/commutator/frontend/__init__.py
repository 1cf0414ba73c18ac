"""What every front door shares: what plugins of doors, protocols and operations build on."""

from commutator.auth.gate import Gate
from commutator.auth.rights import allowed_priority, check_answers, longest, require, salted
from commutator.frontend.limits import TimeLimit
from commutator.frontend.request.bodies import parse_object, read_object
from commutator.frontend.request.call import FALLBACK_HEADER, INLINE_BYTES, TIMEOUT_HEADER, Call
from commutator.frontend.request.conversation import NOT_SERVED, thinking_variables
from commutator.frontend.request.failures import (
    RATE_LIMIT_HEADERS,
    log_failure,
    rate_limits,
    to_failure,
)
from commutator.frontend.request.generation import Plan
from commutator.frontend.request.planning import conversation_prompt
from commutator.frontend.request.preprocessor import Preprocessor, size_of
from commutator.frontend.request.serving import answer
from commutator.frontend.services import FrontendServices
from commutator.frontend.work import WORKING_FOR, WorkPool
from commutator.plugins import installed_versions
from commutator.routing.forward import Forward

__all__ = [
    "FALLBACK_HEADER",
    "INLINE_BYTES",
    "NOT_SERVED",
    "RATE_LIMIT_HEADERS",
    "TIMEOUT_HEADER",
    "WORKING_FOR",
    "Call",
    "Forward",
    "FrontendServices",
    "Gate",
    "Plan",
    "Preprocessor",
    "TimeLimit",
    "WorkPool",
    "allowed_priority",
    "answer",
    "check_answers",
    "conversation_prompt",
    "installed_versions",
    "log_failure",
    "longest",
    "parse_object",
    "rate_limits",
    "read_object",
    "require",
    "salted",
    "size_of",
    "thinking_variables",
    "to_failure",
]
