"""The vocabulary of m1serve: what engines, the ledger, scorers and the trainer say to each other.

Standard library only. Every value is frozen and picklable; the streams of one turn are all as long
as its token ids.
"""

from m1serve.types.engines import (
    Capabilities,
    EngineStats,
    SwapReport,
    VersionRef,
)
from m1serve.types.generation import (
    Delta,
    GenerateRequest,
    Grammar,
    GrammarStart,
    InFlight,
    Limits,
    RepetitionStop,
    Sampling,
    Scored,
    Started,
    StopCause,
    TokenFlag,
    TopLogprob,
)
from m1serve.types.ledger import (
    Drift,
    HistoryRule,
    Mode,
    Reward,
    RewardStatus,
    Slot,
    ToolCall,
    Turn,
    VersionSpan,
    VersionState,
)

__all__ = [
    "Capabilities",
    "Delta",
    "Drift",
    "EngineStats",
    "GenerateRequest",
    "Grammar",
    "GrammarStart",
    "HistoryRule",
    "InFlight",
    "Limits",
    "Mode",
    "RepetitionStop",
    "Reward",
    "RewardStatus",
    "Sampling",
    "Scored",
    "Slot",
    "Started",
    "StopCause",
    "SwapReport",
    "TokenFlag",
    "ToolCall",
    "TopLogprob",
    "Turn",
    "VersionRef",
    "VersionSpan",
    "VersionState",
]
