"""What every front door shares: what a plugin of kind `frontend` builds on."""

from commutator.auth.gate import Gate
from commutator.auth.rights import allowed_priority, check_answers, longest, require, salted
from commutator.frontend.administration import ADMIN_PREFIX, admin_routes, local_user
from commutator.frontend.generation import Batch, ChoiceRules, Generation, Piece, Plan, TokenUsage
from commutator.frontend.health import OPERATIONS_PATHS, PROBE_PATHS, health_routes
from commutator.frontend.limits import ByteBudget, TimeLimit
from commutator.frontend.live import LIVE_PATH, LiveFeed, live_routes
from commutator.frontend.preprocessor import Preprocessor, size_of
from commutator.frontend.services import FrontendServices
from commutator.frontend.work import WORKING_FOR, WorkPool
from commutator.routing.forward import Forward
from commutator.tracing import traced

__all__ = [
    "ADMIN_PREFIX",
    "LIVE_PATH",
    "OPERATIONS_PATHS",
    "PROBE_PATHS",
    "WORKING_FOR",
    "Batch",
    "ByteBudget",
    "ChoiceRules",
    "Forward",
    "FrontendServices",
    "Gate",
    "Generation",
    "LiveFeed",
    "Piece",
    "Plan",
    "Preprocessor",
    "TimeLimit",
    "TokenUsage",
    "WorkPool",
    "admin_routes",
    "allowed_priority",
    "check_answers",
    "health_routes",
    "live_routes",
    "local_user",
    "longest",
    "require",
    "salted",
    "size_of",
    "traced",
]
