"""What the save and the load talk with: the face of the collective modules."""

from mpickpt.parallel.communicators import Conversations, conversations_of
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.launcher import check_launcher
from mpickpt.parallel.messages import Received, Transfer
from mpickpt.parallel.roll_call import Patience
from mpickpt.parallel.waiting import Pace, Steps, resolve_timeout_s, run

__all__ = [
    "Conversation",
    "Conversations",
    "Pace",
    "Patience",
    "Received",
    "Steps",
    "Transfer",
    "check_launcher",
    "conversations_of",
    "resolve_timeout_s",
    "run",
]
