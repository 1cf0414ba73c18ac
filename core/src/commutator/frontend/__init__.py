"""What every front door shares: what plugins of doors, protocols and operations build on."""

from commutator.auth.gate import Gate
from commutator.auth.rights import allowed_priority, check_answers, longest, require, salted
from commutator.frontend.administration import ADMIN_PREFIX, admin_routes, local_user
from commutator.frontend.health import OPERATIONS_PATHS, PROBE_PATHS, health_routes
from commutator.frontend.limits import ByteBudget, TimeLimit
from commutator.frontend.operations import ABSENT, operations_routes
from commutator.frontend.request.bodies import (
    WrongSomewhereError,
    parse_object,
    read_object,
    read_structured,
)
from commutator.frontend.request.call import TIMEOUT_HEADER, Call
from commutator.frontend.request.failures import (
    RATE_LIMIT_HEADERS,
    log_failure,
    rate_limits,
    to_failure,
)
from commutator.frontend.request.planning import NOT_SERVED, Plan, conversation_prompt
from commutator.frontend.request.preprocessor import Preprocessor, size_of
from commutator.frontend.request.serving import answer
from commutator.frontend.services import FrontendServices
from commutator.frontend.work import WORKING_FOR, WorkPool
from commutator.routing.forward import Forward
from commutator.tracing import traced

__all__ = [
    "ABSENT",
    "ADMIN_PREFIX",
    "NOT_SERVED",
    "OPERATIONS_PATHS",
    "PROBE_PATHS",
    "RATE_LIMIT_HEADERS",
    "TIMEOUT_HEADER",
    "WORKING_FOR",
    "ByteBudget",
    "Call",
    "Forward",
    "FrontendServices",
    "Gate",
    "Plan",
    "Preprocessor",
    "TimeLimit",
    "WorkPool",
    "WrongSomewhereError",
    "admin_routes",
    "allowed_priority",
    "answer",
    "check_answers",
    "conversation_prompt",
    "health_routes",
    "local_user",
    "log_failure",
    "longest",
    "operations_routes",
    "parse_object",
    "rate_limits",
    "read_object",
    "read_structured",
    "require",
    "salted",
    "size_of",
    "to_failure",
    "traced",
]
